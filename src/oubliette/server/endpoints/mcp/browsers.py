"""What a web page needs that may call from another origin: its browser asks first, and shows it only what we name.

Which origins those are is the door's business; here is only how they are told.
"""

from typing import Any, Final

from oubliette.server.endpoints.mcp.stream import Send

_KEPT_S: Final = b"600"
PREFLIGHT: Final[tuple[tuple[bytes, bytes], ...]] = (
    (b"access-control-allow-methods", b"GET, POST, DELETE"),
    # `Authorization` must be named, a wildcard does not cover it; `Mcp-Param-*` cannot be, they are not ours to ask.
    (
        b"access-control-allow-headers",
        b"Authorization, Accept, Content-Type, Last-Event-ID, Mcp-Method, Mcp-Name, Mcp-Protocol-Version,"
        b" Mcp-Session-Id",
    ),
    (b"access-control-max-age", _KEPT_S),
)
_EXPOSED: Final = (b"access-control-expose-headers", b"Mcp-Session-Id, WWW-Authenticate, Retry-After")


def shared_with(origin: bytes, send: Send) -> Send:
    """A `send` that lets pages of this origin see the response."""
    shared = ((b"access-control-allow-origin", origin), _EXPOSED, (b"vary", b"Origin"))

    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *shared]}
        await send(message)

    return sending
