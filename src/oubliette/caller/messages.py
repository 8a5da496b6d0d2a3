"""What passes between a caller and the server's MCP endpoint, as types. No I/O."""

from typing import Any, cast

import msgspec

from oubliette.caller.errors import CallerError, refusal
from oubliette.caller.sse import Frames

PROTOCOL_VERSION = "2025-11-25"
# Where a tool result that is an error carries its machine word.
ERROR_META = "dev.oubliette/error"
# The capability of a server that works on the requests of one connection together, if asked to.
PIPELINE = "dev.oubliette/pipeline"


class Announced(msgspec.Struct):
    """An event that the server pushed; only what concerns lent tools is looked at."""

    type: str = ""
    session_id: str = ""
    request_id: str = ""
    tool: str = ""
    arguments: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    arguments_bytes: int | None = None
    deadline_at: float | None = None
    redelivery: int = 0


class PushedParams(msgspec.Struct):
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class Pushed(msgspec.Struct):
    """A message of the server's own: a notification, or a request such as `ping`."""

    method: str = ""
    id: int | str | None = None
    params: PushedParams | None = None


class ErrorObject(msgspec.Struct):
    code: int = 0
    message: str = ""
    data: Any = None


class ToolResult(msgspec.Struct):
    isError: bool = False
    structuredContent: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    content: list[dict[str, Any]] = []
    meta: dict[str, Any] = msgspec.field(default_factory=dict[str, Any], name="_meta")


class Reply(msgspec.Struct):
    """The answer to a request of ours."""

    id: int | str | None = None
    method: str | None = None
    result: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: ErrorObject | None = None


decode_announced = msgspec.json.Decoder(Announced).decode
decode_pushed = msgspec.json.Decoder(Pushed).decode
decode_reply = msgspec.json.Decoder(Reply).decode
decode_tool_result = msgspec.json.Decoder(ToolResult).decode


def request(request_id: int, method: str, params: object) -> bytes:
    return msgspec.json.encode({"jsonrpc": "2.0", "id": request_id, "method": method, "params": params})


def tool_call(request_id: int, name: str, arguments: object) -> bytes:
    return request(request_id, "tools/call", {"name": name, "arguments": arguments})


def pong(request_id: int | str) -> bytes:
    return msgspec.json.encode({"jsonrpc": "2.0", "id": request_id, "result": {}})


def reply_in(content_type: bytes, body: bytes) -> Reply | None:
    """The reply that a response carries, whether as JSON or as a stream of events."""
    try:
        if not content_type.startswith(b"text/event-stream"):
            return decode_reply(body)
        for data in Frames().feed(body if body.endswith(b"\n\n") else body + b"\n\n"):
            if (reply := reply_of(data)) is not None:
                return reply
    except (msgspec.DecodeError, ValueError):
        return None
    return None


def reply_of(data: bytes) -> Reply | None:
    """The reply that an event of a response's stream is; None for what the server says of its own."""
    try:
        reply = decode_reply(data)
    except msgspec.DecodeError:
        return None
    return reply if reply.method is None else None


def failure_of(reply: Reply) -> CallerError | None:
    """Why the call failed as a request, by the machine word in its data."""
    if reply.error is None:
        return None
    details = _object(reply.error.data)
    kind = details.get("kind")
    return refusal(kind if isinstance(kind, str) else "invalid_request", reply.error.message, details)


def failure_in(result: ToolResult) -> CallerError | None:
    """Why the operation failed, by the machine word in its structured content."""
    if not result.isError:
        return None
    details: dict[str, Any] = {}
    if result.structuredContent is not msgspec.UNSET:
        details = _object(msgspec.json.decode(result.structuredContent))
    details = _object(result.meta.get(ERROR_META)) or _object(details.get("error")) or details
    details |= _object(details.get("details"))
    kind, message = details.get("kind"), details.get("message")
    text = "\n".join(str(block.get("text", "")) for block in result.content)
    return refusal(
        kind if isinstance(kind, str) else "internal", message if isinstance(message, str) else text, details
    )


def _object(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
