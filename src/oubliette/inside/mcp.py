"""The Model Context Protocol as a tool server speaks it over stdio, both eras at once.

A request that carries its protocol version in `_meta` is of the stateless revision, 2026-07-28; any other is of the
older ones, that begin with `initialize`. What the tools are and what a call does is decided by `Tools`.
"""

from __future__ import annotations

from oubliette.inside.link import INVALID_PARAMS, METHOD_NOT_FOUND, decode, encode, is_object
from oubliette.inside.results import SERVER_INFO, failure

TYPE_CHECKING = False  # see link.py
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional, Protocol, Union

    Json = Dict[str, Any]
    Id = Union[int, str]

    class Tools(Protocol):
        """Who answers for the tools."""

        def greeted(self) -> None:
            """A host has begun, or asked to be told of changes."""
            ...

        def list(self, request: Request) -> None: ...
        def call(self, request: Request) -> None: ...
        def cancel(self, request_id: Id, reason: object) -> None: ...
        def is_open(self, request_id: Id) -> bool: ...


LEGACY = ("2025-11-25", "2025-06-18", "2025-03-26")
MODERN = "2026-07-28"
META_VERSION = "io.modelcontextprotocol/protocolVersion"
META_CAPABILITIES = "io.modelcontextprotocol/clientCapabilities"
META_SUBSCRIPTION = "io.modelcontextprotocol/subscriptionId"
META_SERVER = "io.modelcontextprotocol/serverInfo"
CAPABILITIES: Json = {"tools": {"listChanged": True}}

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
INTERNAL_ERROR = -32603
UNSUPPORTED_VERSION = -32022

SUBSCRIPTIONS_MAX = 64


class Request:
    """One request of the agent."""

    __slots__ = ("id", "method", "modern", "params")

    def __init__(self, request_id: Id, method: str, params: Json, modern: bool) -> None:
        self.id = request_id
        self.method = method
        self.params = params
        self.modern = modern

    @property
    def progress_token(self) -> Union[int, str, None]:
        meta: Any = self.params.get("_meta")
        token: Any = meta.get("progressToken") if is_object(meta) else None
        return token if type(token) in (int, str) else None


class Mcp:
    """What is said with one agent."""

    def __init__(self, tools: Tools) -> None:
        self.out: List[str] = []  # lines for the agent
        self._tools = tools
        self._is_initialized = False
        self._subscriptions: Dict[Id, bool] = {}  # by the request that opened it: whether it asked for tools
        self._legacy: Dict[str, Callable[[Request], None]] = {
            "initialize": self._initialize,
            "ping": lambda request: self.reply(request, "{}"),
            "tools/list": self._list,
            "tools/call": tools.call,
        }
        self._modern: Dict[str, Callable[[Request], None]] = {
            "server/discover": self._discover,
            "tools/list": self._list,
            "tools/call": tools.call,
            "subscriptions/listen": self._listen,
        }

    def line(self, line: bytes) -> None:
        """Take one line of the agent's."""
        try:
            message: Any = decode(line)
        except (ValueError, RecursionError):
            if line.strip():
                self.refuse(None, PARSE_ERROR, "not JSON")
            return
        if not is_object(message):
            self.refuse(None, INVALID_REQUEST, "one JSON-RPC object per line is expected, no batches")
            return
        request_id, method = message.get("id"), message.get("method")
        known_id = request_id if type(request_id) in (int, str) else None
        if type(method) is not str:
            if "result" not in message and "error" not in message:  # we ask the agent nothing: no answer is ours
                self.refuse(known_id, INVALID_REQUEST, "a request has a method")
        elif message.get("jsonrpc") != "2.0":
            self.refuse(known_id, INVALID_REQUEST, "jsonrpc must be '2.0'")
        elif "id" not in message:
            self._notified(method, message.get("params"))
        elif known_id is None:
            self.refuse(None, INVALID_REQUEST, "an id is a string or an integer")
        elif known_id in self._subscriptions or self._tools.is_open(known_id):
            self.refuse(known_id, INVALID_REQUEST, "this id is of a request that is still open")
        else:
            self._asked(known_id, method, message.get("params"))

    def line_too_long(self) -> None:
        self.refuse(None, INVALID_REQUEST, "a line is too long: nothing of it was read")

    def announce(self) -> None:
        """Tell whoever wants to know that the tools changed."""
        method = "notifications/tools/list_changed"
        if self._is_initialized:
            self.notify(method, "{}")
        for subscription, is_wanted in self._subscriptions.items():
            if is_wanted:
                self.notify(method, encode({"_meta": {META_SUBSCRIPTION: subscription}}))

    def reply(self, request: Request, result: str) -> None:
        self.reply_to(request.id, result)

    def reply_to(self, request_id: Id, result: str) -> None:
        """Answer with a result that is JSON already."""
        self.out.append('{"jsonrpc":"2.0","id":%s,"result":%s}\n' % (encode(request_id), result))

    def fail(self, request: Request, problem: Json) -> None:
        """End a call as a tool result that says why."""
        self.reply(request, failure(problem, request.modern))

    def notify(self, method: str, params: str) -> None:
        self.out.append('{"jsonrpc":"2.0","method":"%s","params":%s}\n' % (method, params))

    def refuse(self, request_id: Optional[Id], code: int, message: str, data: Optional[Json] = None) -> None:
        """Answer with an error of the protocol: what was asked was no proper question."""
        problem: Json = {"code": code, "message": message}
        if data is not None:
            problem["data"] = data
        self.out.append(encode({"jsonrpc": "2.0", "id": request_id, "error": problem}) + "\n")

    def _asked(self, request_id: Id, method: str, params: Any) -> None:
        if params is None:
            params = {}
        if not is_object(params):
            self.refuse(request_id, INVALID_PARAMS, "params must be an object")
            return
        meta: Any = params.get("_meta")
        modern = is_object(meta) and META_VERSION in meta
        if modern and not self._is_acceptable(request_id, meta):
            return
        answer = (self._modern if modern else self._legacy).get(method)
        if answer is None:
            self.refuse(request_id, METHOD_NOT_FOUND, "unknown method: %s" % method[:100])
        else:
            answer(Request(request_id, method, params, modern))

    def _is_acceptable(self, request_id: Id, meta: Json) -> bool:
        """Whether a request of the stateless revision says what it must; answered here if not."""
        version = meta[META_VERSION]
        if type(version) is not str:
            self.refuse(request_id, INVALID_PARAMS, "%s must be a string" % META_VERSION)
        elif version != MODERN:
            supported = {"supported": [MODERN, *LEGACY], "requested": version}
            self.refuse(request_id, UNSUPPORTED_VERSION, "Unsupported protocol version", supported)
        elif not is_object(meta.get(META_CAPABILITIES)):
            self.refuse(request_id, INVALID_PARAMS, "params._meta lacks %s" % META_CAPABILITIES)
        else:
            return True
        return False

    def _notified(self, method: str, params: Any) -> None:
        request_id: Any = params.get("requestId") if is_object(params) else None
        if method == "notifications/cancelled" and type(request_id) in (int, str):
            self._subscriptions.pop(request_id, None)
            self._tools.cancel(request_id, params.get("reason"))

    def _initialize(self, request: Request) -> None:
        asked = request.params.get("protocolVersion")
        version = asked if asked in LEGACY else LEGACY[0]
        # Some agents never send notifications/initialized; they hear of changes all the same.
        self._is_initialized = True
        self._tools.greeted()
        hello = {"protocolVersion": version, "capabilities": CAPABILITIES, "serverInfo": SERVER_INFO}
        self.reply(request, encode(hello))

    def _discover(self, request: Request) -> None:
        self.reply(request, encode(cacheable(supportedVersions=[MODERN], capabilities=CAPABILITIES)))

    def _list(self, request: Request) -> None:
        if request.params.get("cursor") is not None:
            self.refuse(request.id, INVALID_PARAMS, "there is one page: no cursor is valid")
        else:
            self._tools.list(request)

    def _listen(self, request: Request) -> None:
        wanted = request.params.get("notifications")
        if not is_object(wanted):
            self.refuse(request.id, INVALID_PARAMS, "notifications must be an object")
            return
        if len(self._subscriptions) >= SUBSCRIPTIONS_MAX:
            self.refuse(request.id, INTERNAL_ERROR, "too many subscriptions (%d)" % SUBSCRIPTIONS_MAX)
            return
        honored = wanted.get("toolsListChanged") is True
        self._subscriptions[request.id] = honored
        acknowledged: Json = {"notifications": {"toolsListChanged": True} if honored else {}}
        acknowledged["_meta"] = {META_SUBSCRIPTION: request.id}
        self.notify("notifications/subscriptions/acknowledged", encode(acknowledged))
        self._tools.greeted()


def cacheable(**fields: Any) -> Json:
    """A result of the stateless revision that may be cached; ours is stale at once, as tools come and go."""
    end: Json = {"ttlMs": 0, "cacheScope": "private", "resultType": "complete"}
    return dict(fields, **end, _meta={META_SERVER: SERVER_INFO})
