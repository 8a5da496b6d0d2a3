"""The droid's MCP server over stdio: one end of the relay socket.

`Client` joins the agent (`mcp.py`) to the server (`link.py`) and does no I/O; `loop.py` is the loop around it.

`initialize` is answered at once. The first `tools/list` is held until the server has told which tools there are, for
0.7 s at most: some agents never ask again, others start their turn after a second without tools. Everything after
that is told by `list_changed`.
"""

from __future__ import annotations

import os
import signal

from oubliette.inside.calls import Calls, error
from oubliette.inside.link import (
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    PROTOCOL,
    Link,
    encode,
    error_kind,
    is_list,
    is_object,
)
from oubliette.inside.loop import Stderr, say_goodbye, serve
from oubliette.inside.mcp import Mcp, cacheable
from oubliette.inside.results import failure, outcome
from oubliette.inside.stdio import Stdio
from oubliette.inside.toolbox import CALL, PLATFORM, SEARCH, SEARCH_LIMIT, Toolbox, argument_problem

TYPE_CHECKING = False  # see link.py
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional, Set, Union

    from oubliette.inside.mcp import Request
    from oubliette.inside.toolbox import Route

    Json = Dict[str, Any]
    Id = Union[int, str]

HOLD_S = 0.7
HELD_MAX = 256
ASK_WAIT_S = 30.0


class Client:
    """Everything between the agent's lines and the server's frames."""

    def __init__(self, api_key: str, read_key: Callable[[], str], log: Callable[[str, str], None]) -> None:
        self.now = 0.0
        self.link: Optional[Link] = None
        self.log = log
        self.agent = Mcp(self)
        self.toolbox = Toolbox(api_key, lambda text: log("warning", text))
        self.calls = Calls(self._send, self.agent)
        self._api_key = api_key
        self._read_key = read_key
        self._instance = os.urandom(16).hex()
        self._refusal: Optional[Json] = None
        # What the first list waits for, and the requests that wait for it.
        self._awaited: Set[str] = {"config", "platform"} if api_key else {"config"}
        self._held: List[Request] = []
        self._settle_at: Optional[float] = None
        self._is_settled = False
        self._is_followed_from: Optional[float] = None  # a host that never lists is told of changes from here on
        # What the server was told about lists.
        self._listed = -1  # the version of the list that the agent saw last
        self._told = -1  # ... and that the server knows it saw
        self._knows_config = False  # on this connection
        # The question for the platform's tools.
        self._asking: Optional[int] = None
        self._asked_at = 0.0
        self._ask_again = False

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

    # ---- for the agent: the Tools of its Mcp

    def greeted(self) -> None:
        # From a moment after the first greeting on, tools that come are a change; before, they are the beginning.
        if self._is_followed_from is None:
            self._is_followed_from = self.now + HOLD_S

    def list(self, request: Request) -> None:
        if not self._is_settled and self._hold(request):
            return
        # The list is kept as text; what surrounds it is short.
        end = "," + encode(cacheable())[1:] if request.modern else "}"
        self.agent.reply(request, '{"tools":' + self.toolbox.tools_json + end)
        self._listed = self.toolbox.version
        self._tell_listed()

    def call(self, request: Request) -> None:
        name, arguments = request.params.get("name"), request.params.get("arguments")
        if arguments is None:
            arguments: Any = {}
        if type(name) is not str or not is_object(arguments):
            self.agent.refuse(request.id, INVALID_PARAMS, "name must be a string, arguments an object")
            return
        route = self.toolbox.routes.get(name)
        if route is not None and route.kind <= PLATFORM:
            self._relay(request, name, route, arguments)
        elif route is not None:
            self._call_own(request, name, route, arguments)
        elif self._is_settled or not self._hold(request):  # who knows a name from before may be faster than the config
            unknown = {"kind": "unknown_tool"}
            self.agent.refuse(request.id, INVALID_PARAMS, "Unknown tool: %s" % name[:100], unknown)

    def cancel(self, request_id: Id, reason: object) -> None:
        self.calls.cancel(request_id, reason)
        self._held = [request for request in self._held if request.id != request_id]

    def is_open(self, request_id: Id) -> bool:
        return request_id in self.calls or any(request.id == request_id for request in self._held)

    def _call_own(self, request: Request, name: str, route: Route, arguments: Json) -> None:
        """Call one of the client's own tools; only their arguments are the client's to check."""
        problem = argument_problem(route, arguments)
        if not problem and route.kind == CALL:
            name, arguments = arguments["name"], arguments.get("arguments", {})
            target = self.toolbox.routes.get(name) if type(name) is str else None
            if target is None or target.kind in (SEARCH, CALL):
                self.agent.fail(request, error("unknown_tool", "tools_call: no such tool", code=INVALID_PARAMS))
                return
            route = target
            problem = argument_problem(route, arguments)
        if problem:
            self.agent.fail(request, error("invalid_arguments", name + ": " + problem, code=INVALID_PARAMS))
        elif route.kind == SEARCH:
            self._search(request, arguments)
        else:
            self._relay(request, name, route, arguments)

    def _relay(self, request: Request, name: str, route: Route, arguments: Json) -> None:
        problem = self._refusal or self.calls.start(request, name, route, arguments, self.now)
        if problem is not None:
            self.agent.fail(request, problem)

    def _search(self, request: Request, arguments: Json) -> None:
        query, limit = arguments.get("query", ""), arguments.get("limit", SEARCH_LIMIT)
        if type(query) is not str or type(limit) is not int or not 1 <= limit <= 100:
            problem = error("invalid_arguments", "query is a string, limit from 1 to 100", code=INVALID_PARAMS)
            self.agent.fail(request, problem)
        else:
            found = {"tools": self.toolbox.search(query, limit)}
            self.agent.reply(request, outcome(found, request.modern))

    # ---- for the server: the Peer of the link

    def introduce(self) -> Json:
        return {"key": self._read_key(), "role": "client", "instance": self._instance, "protocol": PROTOCOL}

    def attached(self, answer: Json) -> None:
        self._refusal = None
        self._take_limits(answer)
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
        """Asked again, the answer would be as large."""
        self._fail_headed(head, error("too_large", "the result is larger than a frame may be"))

    def unreadable(self, head: bytes) -> None:
        """Asked again, the answer would be the same: a number of thousands of digits, for one."""
        self._fail_headed(head, error("internal", "the server's answer cannot be read here"))

    def _fail_headed(self, head: bytes, reason: Json) -> None:
        """Fail the call that a frame answers, if the frame's beginning tells which."""
        mark = head.find(b'"id":')
        digits = head[mark + 5 :].lstrip().split(b",", 1)[0].strip() if mark >= 0 else b""
        if digits.isdigit():
            self.calls.fail(int(digits), reason)

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

    def _take_limits(self, answer: Json) -> None:
        longest: Any = answer.get("call_timeout_max_s")
        margin: Any = answer.get("margin_s")
        wait: Any = answer.get("wait_max_s", 0)
        if type(longest) in (int, float) and type(margin) in (int, float) and type(wait) in (int, float):
            self.calls.be_patient(longest + margin, max(longest, wait) + margin)
        limits: Any = answer.get("limits")
        bound = limits.get("frame_bytes") if is_object(limits) else None
        if type(bound) is int and bound > 0:
            self.calls.frame_bytes_max = bound

    def _answered(self, number: int, message: Json) -> None:
        self.calls.answered(number)
        call = self.calls.end(number)
        if call is None:
            if number == self._asking:
                self._take_platform(message)
            return
        request_id, name, _, _, _, _, modern, kind = call
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
        self.agent.reply_to(request_id, result)

    def _send(self, frame: bytes) -> None:
        if self.link is not None:
            self.link.send(frame)

    # ---- the platform's tools

    def _ask_platform(self) -> None:
        if not self._api_key or not self.calls.is_linked:
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

    def _hold(self, request: Request) -> bool:
        """Keep a request until the tools are known; whether there was room to."""
        if len(self._held) >= HELD_MAX:
            return False
        self._held.append(request)
        if self._settle_at is None:
            self._settle_at = self.now + HOLD_S
        return True

    def _settle(self) -> None:
        """Answer what was held: from now on a change is told, not waited for."""
        self._is_settled = True
        self._settle_at = None
        held, self._held = self._held, []
        for request in held:
            if request.method == "tools/list":
                self.list(request)
            else:
                self.call(request)

    def _list_may_have_changed(self, changed: bool) -> None:
        is_followed = self._is_followed_from is not None and self.now >= self._is_followed_from
        if changed and (self._is_settled or is_followed):
            self.agent.announce()
        if not self._is_settled and not self._awaited:
            self._settle()
        self._tell_listed()

    def _tell_listed(self) -> None:
        """Tell the server, once per list and connection, that the agent has seen the list as it is now."""
        is_current = self._listed == self.toolbox.version != self._told
        if is_current and self._knows_config and self.calls.is_linked:
            self._told = self._listed
            self._send(b'{"jsonrpc":"2.0","method":"listed","params":{}}\n')


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
        say_goodbye(client, link, stdio)
        link.close()
        stdio.close()
    return 0
