"""The droid's MCP server over stdio: one end of the relay socket.

`Client` speaks MCP to the agent and frames to the server and does no I/O; `serve` is the loop around it. It speaks
both eras of MCP at once: a request that carries its protocol version in `_meta` is of the stateless revision, any
other of the older ones that begin with `initialize`.

`initialize` is answered at once. The first `tools/list` is held until the server has told which tools there are, for
0.7 s at most: some agents never ask again, others start their turn after a second without tools. Everything after
that is told by `list_changed`.
"""

from __future__ import annotations

import os
import select
import signal
import time

from oubliette.inside.calls import INVALID_PARAMS, Calls, error
from oubliette.inside.link import METHOD_NOT_FOUND, PROTOCOL, Link, decode, encode, error_kind, is_list, is_object
from oubliette.inside.results import SERVER_INFO, failure, outcome
from oubliette.inside.stdio import Stdio
from oubliette.inside.toolbox import CALL, PLATFORM, SEARCH, SEARCH_LIMIT, Toolbox

TYPE_CHECKING = False  # see link.py
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional, Set, Union

    from oubliette.inside.toolbox import Route

    Json = Dict[str, Any]
    Id = Union[int, str]

LEGACY = ("2025-11-25", "2025-06-18", "2025-03-26")
MODERN = "2026-07-28"
META_VERSION = "io.modelcontextprotocol/protocolVersion"
META_CAPABILITIES = "io.modelcontextprotocol/clientCapabilities"
META_SUBSCRIPTION = "io.modelcontextprotocol/subscriptionId"

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
UNSUPPORTED_VERSION = -32022

HOLD_S = 0.7
ASK_WAIT_S = 30.0
SUBSCRIPTIONS_MAX = 64
HELD_MAX = 256
AGENT_UNREAD_MAX = 64 * 1024 * 1024
SERVER_PAUSE_AT = 16 * 1024 * 1024
GOODBYE_S = 0.5

CAPABILITIES: Json = {"tools": {"listChanged": True}}
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "none": 100}


class Client:
    """Everything between the agent's lines and the server's frames."""

    def __init__(self, api_key: str, read_key: Callable[[], str], log: Callable[[str, str], None]) -> None:
        self.now = 0.0
        self.out: List[str] = []  # for the agent
        self.link: Optional[Link] = None
        self.log = log
        self.toolbox = Toolbox(api_key, lambda text: log("warning", text))
        self.calls = Calls(self._send, self.out.append)
        self._api_key = api_key
        self._read_key = read_key
        self._instance = os.urandom(16).hex()
        self._refusal: Optional[Json] = None
        self._legacy: Dict[str, Callable[[Id, Json, bool, Json], None]] = {
            "initialize": self._initialize,
            "ping": self._ping,
            "tools/list": self._list,
            "tools/call": self._call,
        }
        self._modern: Dict[str, Callable[[Id, Json, bool, Json], None]] = {
            "server/discover": self._discover,
            "tools/list": self._list,
            "tools/call": self._call,
            "subscriptions/listen": self._listen,
        }
        # What the first list waits for, and the requests that wait for it.
        self._awaited: Set[str] = {"attach", "config"} | ({"platform"} if api_key else set())
        self._held: List[Json] = []
        self._settle_at: Optional[float] = None
        self._is_settled = False
        self._is_followed_from: Optional[float] = None  # a host that never lists is told of changes from here on
        # Who is told about changes, and what the server was told about lists.
        self._is_initialized = False
        self._subscriptions: Dict[Id, bool] = {}  # by the request that opened it: whether it asked for tools
        self._listed = -1  # the version of the list that the agent saw last
        self._told = -1  # ... and that the server knows it saw
        self._knows_config = False  # on this connection
        # The question for the platform's tools.
        self._asking: Optional[int] = None
        self._asked_at = 0.0
        self._ask_again = False

    # ---- the loop's side

    @property
    def wake_at(self) -> Optional[float]:
        times = [self._settle_at, self.calls.wake_at, self._asked_at + ASK_WAIT_S if self._asking else None]
        return min((at for at in times if at is not None), default=None)

    def tick(self, now: float) -> None:
        self.now = now
        if self._settle_at is not None and now >= self._settle_at:
            self._settle()
        if self._asking is not None and now >= self._asked_at + ASK_WAIT_S:
            self._asking = None
            self.log("warning", "failed to get oubliette tools: no answer")
        self.calls.sweep(now)

    def finish(self, reason: str) -> None:
        """The agent is gone: tell the server to stop what it does for it."""
        self._settle()
        self.calls.cancel_all(reason)

    # ---- the agent's side

    def line(self, line: bytes) -> None:
        try:
            message: Any = decode(line)
        except (ValueError, RecursionError):
            if line.strip():
                self._protocol_error(None, PARSE_ERROR, "not JSON")
            return
        if not is_object(message):
            self._protocol_error(None, INVALID_REQUEST, "one JSON-RPC object per line is expected, no batches")
            return
        mcp_id, method = message.get("id"), message.get("method")
        known_id = mcp_id if type(mcp_id) in (int, str) else None
        if type(method) is not str:
            if "result" not in message and "error" not in message:  # we ask the agent nothing: no answer is ours
                self._protocol_error(known_id, INVALID_REQUEST, "a request has a method")
        elif message.get("jsonrpc") != "2.0":
            self._protocol_error(known_id, INVALID_REQUEST, "jsonrpc must be '2.0'")
        elif "id" not in message:
            self._notified(method, message.get("params"))
        elif known_id is None:
            self._protocol_error(None, INVALID_REQUEST, "an id is a string or an integer")
        elif known_id in self.calls or known_id in self._subscriptions or self._is_held(known_id):
            self._protocol_error(known_id, INVALID_REQUEST, "this id is of a request that is still open")
        else:
            self._asked(known_id, method, message)

    def line_too_long(self) -> None:
        self._protocol_error(None, INVALID_REQUEST, "a line is too long: nothing of it was read")

    def _asked(self, mcp_id: Id, method: str, message: Json) -> None:
        params: Any = message.get("params")
        if params is None:
            params = {}
        elif not is_object(params):
            self._protocol_error(mcp_id, INVALID_PARAMS, "params must be an object")
            return
        meta: Any = params.get("_meta")
        modern = is_object(meta) and META_VERSION in meta
        if modern and not self._is_acceptable(mcp_id, meta):
            return
        answer = (self._modern if modern else self._legacy).get(method)
        if answer is None:
            self._protocol_error(mcp_id, METHOD_NOT_FOUND, "unknown method: %s" % method[:100])
        else:
            answer(mcp_id, params, modern, message)

    def _is_acceptable(self, mcp_id: Id, meta: Json) -> bool:
        """Whether a request of the stateless revision says what it must; answered here if not."""
        version = meta[META_VERSION]
        if type(version) is not str:
            self._protocol_error(mcp_id, INVALID_PARAMS, "%s must be a string" % META_VERSION)
        elif version != MODERN:
            supported = {"supported": [MODERN, *LEGACY], "requested": version}
            self._protocol_error(mcp_id, UNSUPPORTED_VERSION, "Unsupported protocol version", supported)
        elif not is_object(meta.get(META_CAPABILITIES)):
            self._protocol_error(mcp_id, INVALID_PARAMS, "params._meta lacks %s" % META_CAPABILITIES)
        else:
            return True
        return False

    def _notified(self, method: str, params: Any) -> None:
        if method == "notifications/initialized":
            self._is_initialized = True
        elif method == "notifications/cancelled" and is_object(params):
            mcp_id: Any = params.get("requestId")
            if type(mcp_id) not in (int, str):
                return
            self.calls.cancel(mcp_id, params.get("reason"))
            self._subscriptions.pop(mcp_id, None)
            self._held = [message for message in self._held if message["id"] != mcp_id]

    def _initialize(self, mcp_id: Id, params: Json, modern: bool, message: Json) -> None:
        asked = params.get("protocolVersion")
        version = asked if asked in LEGACY else LEGACY[0]
        # Some agents never send notifications/initialized; they hear of changes all the same.
        self._is_initialized = True
        self._follow()
        self._reply(mcp_id, {"protocolVersion": version, "capabilities": CAPABILITIES, "serverInfo": SERVER_INFO})

    def _ping(self, mcp_id: Id, params: Json, modern: bool, message: Json) -> None:
        self._reply(mcp_id, {})

    def _discover(self, mcp_id: Id, params: Json, modern: bool, message: Json) -> None:
        self._reply(mcp_id, _modern_result(supportedVersions=[MODERN], capabilities=CAPABILITIES))

    def _list(self, mcp_id: Id, params: Json, modern: bool, message: Json) -> None:
        if params.get("cursor") is not None:
            self._protocol_error(mcp_id, INVALID_PARAMS, "there is one page: no cursor is valid")
        elif self._is_settled or not self._hold(message):
            # The list is kept as text; what surrounds it is short.
            around = encode(_modern_result() if modern else {})[1:]
            result = '{"tools":%s%s%s' % (self.toolbox.tools_json, "," if modern else "", around)
            self.out.append('{"jsonrpc":"2.0","id":%s,"result":%s}\n' % (encode(mcp_id), result))
            self._listed = self.toolbox.version
            self._tell_listed()

    def _listen(self, mcp_id: Id, params: Json, modern: bool, message: Json) -> None:
        wanted = params.get("notifications")
        if not is_object(wanted):
            self._protocol_error(mcp_id, INVALID_PARAMS, "notifications must be an object")
            return
        if len(self._subscriptions) >= SUBSCRIPTIONS_MAX:
            self._protocol_error(mcp_id, -32603, "too many subscriptions (%d)" % SUBSCRIPTIONS_MAX)
            return
        honored = wanted.get("toolsListChanged") is True
        self._subscriptions[mcp_id] = honored
        acknowledged: Json = {"notifications": {"toolsListChanged": True} if honored else {}}
        acknowledged["_meta"] = {META_SUBSCRIPTION: mcp_id}
        self._notify("notifications/subscriptions/acknowledged", acknowledged)
        self._follow()

    def _call(self, mcp_id: Id, params: Json, modern: bool, message: Json) -> None:
        name, arguments = params.get("name"), params.get("arguments")
        if arguments is None:
            arguments: Any = {}
        if type(name) is not str or not is_object(arguments):
            self._protocol_error(mcp_id, INVALID_PARAMS, "name must be a string, arguments an object")
            return
        route = self.toolbox.routes.get(name)
        if route is not None and route.kind <= PLATFORM:
            self._relay(mcp_id, name, route, arguments, params, modern)
        elif route is not None:
            self._call_own(mcp_id, name, route, arguments, params, modern)
        elif self._is_settled or not self._hold(message):  # who knows a name from before may be faster than the config
            self._protocol_error(mcp_id, INVALID_PARAMS, "Unknown tool: %s" % name[:100], {"kind": "unknown_tool"})

    def _call_own(self, mcp_id: Id, name: str, route: Route, arguments: Json, params: Json, modern: bool) -> None:
        """Call one of the client's own tools; only their arguments are the client's to check."""
        problem = argument_problem(route, arguments)
        if not problem and route.kind == CALL:
            name, arguments = arguments["name"], arguments.get("arguments", {})
            target = self.toolbox.routes.get(name) if type(name) is str else None
            if target is None or target.kind in (SEARCH, CALL):
                self._fail(mcp_id, error("unknown_tool", "tools_call: no such tool", code=INVALID_PARAMS), modern)
                return
            route = target
            problem = argument_problem(route, arguments)
        if problem:
            self._fail(mcp_id, error("invalid_arguments", "%s: %s" % (name, problem), code=INVALID_PARAMS), modern)
        elif route.kind == SEARCH:
            self._search(mcp_id, arguments, modern)
        else:
            self._relay(mcp_id, name, route, arguments, params, modern)

    def _relay(self, mcp_id: Id, name: str, route: Route, arguments: Json, params: Json, modern: bool) -> None:
        if self._refusal is not None:
            self._fail(mcp_id, self._refusal, modern)
            return
        meta: Any = params.get("_meta")
        token = meta.get("progressToken") if is_object(meta) else None
        if type(token) not in (int, str):
            token = None
        problem = self.calls.start(mcp_id, name, route, arguments, token, modern, self.now)
        if problem is not None:
            self._fail(mcp_id, problem, modern)

    def _search(self, mcp_id: Id, arguments: Json, modern: bool) -> None:
        query, limit = arguments.get("query", ""), arguments.get("limit", SEARCH_LIMIT)
        if type(query) is not str or type(limit) is not int or not 1 <= limit <= 100:
            problem = error("invalid_arguments", "query is a string, limit from 1 to 100", code=INVALID_PARAMS)
            self._fail(mcp_id, problem, modern)
            return
        found = {"tools": self.toolbox.search(query, limit)}
        self.out.append('{"jsonrpc":"2.0","id":%s,"result":%s}\n' % (encode(mcp_id), outcome(found, modern)))

    # ---- the server's side (a Peer of the link)

    def introduce(self) -> Json:
        return {"key": self._read_key(), "role": "client", "instance": self._instance, "protocol": PROTOCOL}

    def attached(self, answer: Json) -> None:
        self._refusal = None
        longest: Any = answer.get("call_timeout_max_s")
        margin: Any = answer.get("margin_s")
        if type(longest) in (int, float) and type(margin) in (int, float):
            self.calls.be_patient(longest + margin)
        limits: Any = answer.get("limits")
        bound = limits.get("frame_bytes") if is_object(limits) else None
        if type(bound) is int and bound > 0:
            self.calls.frame_bytes_max = bound
        self._awaited.discard("attach")
        declared = answer.get("caller_tools") is True
        self._knows_config = not declared
        changed = self.toolbox.offer_search(answer.get("tools_search") is True)
        if not declared:
            self._awaited.discard("config")
            changed = self.toolbox.declare([]) or changed
        self.calls.linked()
        self._told = -1
        self._ask_platform()
        self._list_may_have_changed(changed)

    def lost(self) -> None:
        self.calls.unlinked()
        self._asking = None
        self._ask_again = False

    def refused(self, error: Json) -> None:
        self._refusal = error
        self.calls.fail_all(error)
        self._settle()

    def oversized(self, head: bytes) -> None:
        """Fail the call that this frame answers, if its beginning tells: asked again it would be as large."""
        mark = head.find(b'"id":')
        digits = head[mark + 5 :].lstrip().split(b",", 1)[0].strip() if mark >= 0 else b""
        if digits.isdigit():
            self.calls.fail(int(digits), error("too_large", "the result is larger than a frame may be"))

    def received(self, message: Json) -> None:
        method = message.get("method", message.get("type"))
        if method is None:
            number = message.get("id")
            if type(number) is int:
                self._answered(number, message)
        elif type(message.get("id")) in (int, str):
            refusal = {"code": METHOD_NOT_FOUND, "message": "the client answers no requests"}
            answer = encode({"jsonrpc": "2.0", "id": message["id"], "error": refusal})
            self._send(answer.encode("utf-8", "replace") + b"\n")
        elif method == "tools_changed":
            self._ask_platform()
        elif not is_object(message.get("params")):
            self.log("warning", "ignored a notification without params")
        elif method == "caller_tools_config":
            self._awaited.discard("config")
            self._knows_config = True
            self._list_may_have_changed(self.toolbox.declare(message["params"].get("tools")))
        elif method == "progress":
            self.calls.progressed(message["params"])
        elif method == "cancel":
            self.calls.withdrawn(message["params"])

    def _answered(self, number: int, message: Json) -> None:
        call = self.calls.end(number)
        if call is None:
            if number == self._asking:
                self._take_platform(message)
            else:
                self.calls.settled(number)
            return
        mcp_id, name, _, _, _, _, modern, kind = call
        problem: Any = message.get("error")
        if problem is None:
            try:
                result = outcome(message.get("result"), modern, kind == PLATFORM)
            except (ValueError, RecursionError):
                result = failure(error("internal", name + ": the result cannot be written as JSON"), modern)
        else:
            if not is_object(problem):
                problem = error("internal", "the server answered with an error that is no object")
            result = failure(problem, modern)
            if kind == PLATFORM and error_kind(problem) in ("unauthenticated", "forbidden"):
                self._ask_platform()
        self.out.append('{"jsonrpc":"2.0","id":%s,"result":%s}\n' % (encode(mcp_id), result))

    def _ask_platform(self) -> None:
        if not self._api_key or self.link is None or not self.link.is_up:
            return
        if self._asking is not None:
            self._ask_again = True
            return
        self._asking, self.calls.next_id = self.calls.next_id, self.calls.next_id + 1
        self._asked_at = self.now
        params = {"api_key": self._api_key}
        request = {"jsonrpc": "2.0", "id": self._asking, "method": "oubliette_tools", "params": params}
        self._send(encode(request).encode() + b"\n")

    def _take_platform(self, message: Json) -> None:
        self._asking = None
        result: Any = message.get("result")
        problem: Any = message.get("error")
        changed = False
        if is_object(result) and is_list(result.get("tools")) and problem is None:
            changed = self.toolbox.offer(result["tools"])
        else:
            problem = problem if is_object(problem) else error("internal", "the answer has no tools")
            self.log("warning", "failed to get oubliette tools: %s" % problem.get("message"))
            if error_kind(problem) in ("unauthenticated", "forbidden"):
                changed = self.toolbox.offer([])
        self._awaited.discard("platform")
        self._list_may_have_changed(changed)
        if self._ask_again:
            self._ask_again = False
            self._ask_platform()

    # ---- the list

    def _hold(self, message: Json) -> bool:
        """Keep a request until the tools are known; whether there was room to."""
        if len(self._held) >= HELD_MAX:
            return False
        self._held.append(message)
        if self._settle_at is None:
            self._settle_at = self.now + HOLD_S
        return True

    def _is_held(self, mcp_id: Id) -> bool:
        return bool(self._held) and any(message["id"] == mcp_id for message in self._held)

    def _follow(self) -> None:
        """From a moment after the first greeting, tools that come are a change; before, they are the beginning."""
        if self._is_followed_from is None:
            self._is_followed_from = self.now + HOLD_S

    def _list_may_have_changed(self, changed: bool) -> None:
        is_followed = self._is_followed_from is not None and self.now >= self._is_followed_from
        if changed and (self._is_settled or is_followed):
            self._announce()
        if not self._is_settled and not self._awaited:
            self._settle()
        self._tell_listed()

    def _settle(self) -> None:
        """Answer what was held: from now on a change is told, not waited for."""
        self._is_settled = True
        self._settle_at = None
        held, self._held = self._held, []
        for message in held:
            self._asked(message["id"], message["method"], message)

    def _announce(self) -> None:
        method = "notifications/tools/list_changed"
        if self._is_initialized:
            self._notify(method, {})
        for subscription, is_wanted in self._subscriptions.items():
            if is_wanted:
                self._notify(method, {"_meta": {META_SUBSCRIPTION: subscription}})

    def _tell_listed(self) -> None:
        """Tell the server, once per list and connection, that the agent has seen the list as it is now."""
        is_current = self._listed == self.toolbox.version != self._told
        if is_current and self._knows_config and self.calls.is_linked:
            self._told = self._listed
            self._send(b'{"jsonrpc":"2.0","method":"listed","params":{}}\n')

    # ---- writing

    def _send(self, frame: bytes) -> None:
        if self.link is not None:
            self.link.send(frame)

    def _reply(self, mcp_id: Id, result: Json) -> None:
        self.out.append(encode({"jsonrpc": "2.0", "id": mcp_id, "result": result}) + "\n")

    def _notify(self, method: str, params: Json) -> None:
        self.out.append(encode({"jsonrpc": "2.0", "method": method, "params": params}) + "\n")

    def _fail(self, mcp_id: Id, reason: Json, modern: bool) -> None:
        """End a call as a tool result that says why."""
        self.out.append('{"jsonrpc":"2.0","id":%s,"result":%s}\n' % (encode(mcp_id), failure(reason, modern)))

    def _protocol_error(self, mcp_id: Optional[Id], code: int, message: str, data: Optional[Json] = None) -> None:
        problem: Json = {"code": code, "message": message}
        if data is not None:
            problem["data"] = data
        self.out.append(encode({"jsonrpc": "2.0", "id": mcp_id, "error": problem}) + "\n")


def _modern_result(**fields: Any) -> Json:
    """A result of the stateless revision that may be cached; ours is stale at once, as tools come and go."""
    end: Json = {"ttlMs": 0, "cacheScope": "private", "resultType": "complete"}
    return dict(fields, **end, _meta={"io.modelcontextprotocol/serverInfo": SERVER_INFO})


def argument_problem(route: Route, arguments: Any) -> str:
    """What is wrong with the names of these arguments; types are the server's to judge."""
    if not is_object(arguments):
        return "arguments must be an object"
    if route.kind <= PLATFORM:
        return ""
    for name in route.required:
        if name not in arguments:
            return "%s is required" % name
    for name in arguments:
        if name not in route.parameters:
            return "there is no argument %s" % encode(name[:100])
    return ""


class Stderr:
    """Log lines, dropped rather than waited for where nobody reads them."""

    def __init__(self, level: str) -> None:
        self._least = LEVELS.get(level.lower(), LEVELS["info"])
        self._poll = select.poll()
        self._poll.register(2, select.POLLOUT)

    def __call__(self, level: str, text: str) -> None:
        if LEVELS[level] < self._least:
            return
        line = "oubliette-client: %s: %s" % (level.upper(), " ".join(text.split()))
        try:
            # A pipe that is writable takes a page without blocking; descriptor 2 is often the agent's own, so it
            # must not be made non-blocking.
            if any(event & select.POLLOUT for _, event in self._poll.poll(0)):
                os.write(2, line.encode("utf-8", "replace")[:1000] + b"\n")
        except OSError:
            pass


def serve(client: Client, link: Link, stdio: Stdio) -> None:
    """Carry lines and frames until the agent is gone."""
    poller = select.poll()
    masks: Dict[int, int] = {}
    monotonic = time.monotonic
    now = monotonic()
    while not stdio.has_ended:
        link.tick(now)
        client.tick(now)
        _write(client, link, stdio, now)
        wanted = {0: select.POLLIN if len(stdio.out) < AGENT_UNREAD_MAX else 0}
        if stdio.out:
            wanted[1] = select.POLLOUT
        socket_fd = link.fileno()
        if socket_fd >= 0:
            reads = select.POLLIN if len(stdio.out) < SERVER_PAUSE_AT else 0
            wanted[socket_fd] = reads | (select.POLLOUT if link.out else 0)
        if wanted != masks:
            for fd in masks.keys() - wanted.keys():
                poller.unregister(fd)
            for fd, mask in wanted.items():
                poller.register(fd, mask)
            masks = wanted
        ready = poller.poll(_wait_ms(link.wake_at, client.wake_at, now))
        now = client.now = monotonic()
        for fd, event in sorted(ready, reverse=True):  # the server first: a lost link is known before more is sent
            if fd == 0:
                _read_agent(client, stdio)
            elif fd == socket_fd and event & ~select.POLLOUT:
                link.readable(now)


def _write(client: Client, link: Link, stdio: Stdio, now: float) -> None:
    if client.out:
        stdio.write("".join(client.out))
        client.out.clear()
    if stdio.out:
        stdio.flush()
    if link.out:
        link.writable(now)


def _read_agent(client: Client, stdio: Stdio) -> None:
    for line in stdio.read():
        client.line(line)
    while stdio.too_long:
        stdio.too_long -= 1
        client.line_too_long()


def _wait_ms(first: Optional[float], second: Optional[float], now: float) -> Optional[int]:
    due = first if second is None else second if first is None else min(first, second)
    return None if due is None else max(0, int((due - now) * 1000) + 1)


def _say_goodbye(client: Client, link: Link, stdio: Stdio) -> None:
    """Write what is left, for a moment at most: nobody may be reading."""
    client.finish("the agent is gone")
    until = time.monotonic() + GOODBYE_S
    while True:
        now = time.monotonic()
        _write(client, link, stdio, now)
        poller = select.poll()
        if link.out and link.fileno() >= 0:
            poller.register(link.fileno(), select.POLLOUT)
        elif not stdio.out:
            return
        if stdio.out:
            poller.register(1, select.POLLOUT)
        if now >= until or not poller.poll(max(1, int((until - now) * 1000))):
            return


def main(arguments: List[str]) -> int:
    path = os.environ.get("OUBLIETTE_SOCKET") or "/mcp/relay.sock"
    api_key = os.environ.get("OUBLIETTE_API_KEY", "")
    log = Stderr(os.environ.get("OUBLIETTE_LOG_LEVEL", "info"))
    if arguments:
        log("error", "the client takes no arguments: it is configured by OUBLIETTE_SOCKET and OUBLIETTE_API_KEY")
        return 2
    key_path = os.path.join(os.path.dirname(path), "key")

    def read_key() -> str:
        with open(key_path, encoding="ascii") as key:
            return key.read().strip()

    if api_key:
        log("info", "OUBLIETTE_API_KEY detected, requesting tools...")
    client = Client(api_key, read_key, log)
    link = client.link = Link(path, client, log)
    stdio = Stdio()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        serve(client, link, stdio)
    except KeyboardInterrupt:
        pass
    finally:
        _say_goodbye(client, link, stdio)
        link.close()
        stdio.close()
    return 0
