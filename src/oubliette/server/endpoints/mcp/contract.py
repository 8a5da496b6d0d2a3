"""The seam between the transport and what it serves.

The transport knows the protocol: eras, headers, sessions, streams, cancellation. What it serves knows tools and
resources, and nothing of HTTP. Each side sees the other through this module alone, so the same transport serves the
product and the fixtures of the conformance suite.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from oubliette.server.endpoints.mcp.versions import Era
from oubliette.server.tokens.token import Actor
from oubliette.wire.jsonrpc import Id

LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
SEVERITY: Mapping[str, int] = {level: rank for rank, level in enumerate(LEVELS)}

INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
PARSE_ERROR = -32700
REQUEST_CANCELLED = -32800
SERVER_ERROR = -32000
SESSION_NOT_FOUND = -32001
LEGACY_RESOURCE_NOT_FOUND = -32002
HEADER_MISMATCH = -32020
MISSING_CAPABILITY = -32021
UNSUPPORTED_VERSION = -32022


class RpcError(Exception):
    """A JSON-RPC error on purpose: what it says reaches the client as it stands."""

    def __init__(self, code: int, message: str, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data


class MissingCapability(RpcError):
    """The request needs something that its client did not say it can do."""

    def __init__(self, required: Mapping[str, Any]) -> None:
        names = ", ".join(sorted(required))
        super().__init__(
            MISSING_CAPABILITY, f"the client did not declare: {names}", {"requiredCapabilities": dict(required)}
        )


class ResourceNotFound(RpcError):
    """No such resource, or not for this asker; the transport picks the code that the client's revision uses."""

    def __init__(self, uri: str) -> None:
        super().__init__(INVALID_PARAMS, "resource not found", {"uri": uri})


class ToolResult(msgspec.Struct):
    content: list[Any]
    structuredContent: Any = msgspec.UNSET
    isError: bool = False
    meta: dict[str, Any] | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="_meta")


class Filter(msgspec.Struct, omit_defaults=True):
    """What a `subscriptions/listen` asks for, and what of it is honoured."""

    toolsListChanged: bool = False
    promptsListChanged: bool = False
    resourcesListChanged: bool = False
    resourceSubscriptions: list[str] = []


@dataclass(frozen=True, slots=True)
class Freshness:
    """How long a modern client may keep an answer, and whether others may be given it."""

    ttl_ms: int = 0
    scope: Literal["private", "public"] = "private"


@dataclass(frozen=True, slots=True)
class Mirrored:
    """An argument that a client must repeat in a header, for those who route without reading bodies."""

    path: tuple[str, ...]
    header: str  # lower case, with its `mcp-param-` prefix
    kind: str  # the schema's type


class Channel(Protocol):
    """A way back to one client. Nothing here waits: what cannot be queued ends the channel."""

    @property
    def is_open(self) -> bool: ...

    def notify(self, method: str, params: object) -> bool:
        """Queue a notification; False means that the channel has ended and nothing of it will arrive."""
        ...

    def announce(self, method: str, params: object) -> bool:
        """Queue a notification ahead of everything that is not one of these."""
        ...

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call back once when the channel has ended, for whatever reason; at once if it has already."""
        ...

    async def drained(self) -> None:
        """Return when little waits to be written: who reads a log need not queue all of it."""
        ...

    def has_room(self, again: Callable[[], None]) -> bool:
        """Whether much may be announced still; if not, `again` is called once when little of it waits."""
        ...

    def end(self) -> None:
        """End the channel after what is queued."""
        ...


class Context(Protocol):
    """One request, and the way back to whoever asked."""

    @property
    def actor(self) -> Actor: ...
    @property
    def version(self) -> str: ...
    @property
    def era(self) -> Era: ...
    @property
    def stream_id(self) -> str | None:
        """The legacy session that asked."""
        ...

    @property
    def request_id(self) -> Id: ...
    @property
    def capabilities(self) -> Mapping[str, Any]:
        """What the client said that it can do."""
        ...

    @property
    def log_level(self) -> str | None:
        """The least level that the client wants: of its session, or of this request alone. None: it never said."""
        ...

    @property
    def meta(self) -> Mapping[str, Any]: ...
    @property
    def params(self) -> Mapping[str, Any]:
        """All parameters of the request as they came."""
        ...

    @property
    def channel(self) -> Channel:
        """This request's own stream, opened by the first notification; it ends with the answer."""
        ...

    def abandon(self) -> None:
        """From here on this request is for its client's eyes only: if they leave, it is cancelled, in either era."""
        ...

    def wants(self, level: str) -> bool:
        """Whether a log notification of this level may be sent on this request."""
        ...

    def notify(self, method: str, params: object) -> bool: ...

    def log(self, level: str, data: object, logger: str | None = None) -> bool:
        """Send a log notification if it is wanted; tell whether it was queued."""
        ...

    def progress(self, progress: float, total: float | None = None, message: str | None = None) -> bool:
        """Report progress if the client gave a token for it; tell whether it was queued."""
        ...


class StreamContext(Protocol):
    """A legacy session's standing stream, as long as it is open."""

    @property
    def actor(self) -> Actor: ...
    @property
    def stream_id(self) -> str: ...
    @property
    def channel(self) -> Channel: ...
    @property
    def log_level(self) -> str | None:
        """The session's level now: `logging/setLevel` changes it under an open stream."""
        ...

    @property
    def subscriptions(self) -> Sequence[str]:
        """The resources whose updates the session wants to hear of, now."""
        ...


Method = Callable[[Context], Awaitable[object]]


class Served(Protocol):
    """What a transport serves. Any of these may raise `RpcError`; whatever else escapes is an internal error."""

    @property
    def info(self) -> Mapping[str, str]:
        """`name` and `version`, and what else identifies the server."""
        ...

    @property
    def instructions(self) -> str | None: ...

    @property
    def freshness(self) -> Mapping[str, Freshness]:
        """By method; what is not here must be asked for again each time."""
        ...

    @property
    def methods(self) -> Mapping[str, Method]:
        """Requests beyond tools, resources and logging."""
        ...

    def capabilities(self, era: Era) -> Mapping[str, Any]: ...

    async def authenticate(self, bearer: str | None) -> Actor:
        """Raises `Unauthenticated`, or `Forbidden` for a key that may not use this door at all."""
        ...

    async def still_valid(self, actors: Sequence[Actor]) -> Sequence[bool]:
        """Whether each of these, once authenticated, would be again: asked every second for open streams."""
        ...

    async def list_tools(self, context: Context) -> Sequence[object]: ...

    def mirrored(self, tool: str) -> Sequence[Mirrored]:
        """The arguments of this tool that headers must repeat."""
        ...

    async def call_tool(self, context: Context, name: str, arguments: msgspec.Raw) -> object:
        """A `ToolResult`, or an object of the protocol's own shape. Raises `RpcError` -32602 for an unknown tool.

        `arguments` is the JSON of an object, not decoded yet: who knows its type decodes it once.
        """
        ...

    async def list_resources(self, context: Context) -> Sequence[object]: ...

    async def list_resource_templates(self, context: Context) -> Sequence[object]: ...

    async def read_resource(self, context: Context, uri: str) -> Sequence[object]:
        """The contents. Raises `ResourceNotFound`."""
        ...

    async def subscribe(self, context: Context, uri: str) -> None:
        """Check that this legacy session may hear of this resource. Raises `ResourceNotFound`."""
        ...

    async def admit(self, context: Context, wanted: Filter) -> Filter:
        """What of a modern listener's wishes is honoured."""
        ...

    def listen(self, context: Context, honoured: Filter, channel: Channel) -> None:
        """Attach an admitted listener, who has been told what is honoured; it leaves by `channel.on_close`."""
        ...

    async def attend(self, stream: StreamContext) -> None:
        """Serve a legacy session's standing stream; cancelled when the stream has ended."""
        ...

    def stream_changed(self, stream: StreamContext) -> None:
        """The session of an open stream set its level or its subscriptions."""
        ...

    async def session_ended(self, stream_id: str) -> None:
        """A legacy session was ended by its client, or expired."""
        ...
