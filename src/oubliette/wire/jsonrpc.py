"""JSON-RPC 2.0 as it crosses our sockets: one object per line, decoded once, encoded once."""

from typing import Any

import msgspec

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
# The specification's own three.
SERVER_ERROR = -32000
UNAUTHENTICATED = -32001
FORBIDDEN = -32002

Id = int | str


class ErrorObject(msgspec.Struct, omit_defaults=True):
    code: int
    message: str
    data: dict[str, Any] | None = None


class Frame(msgspec.Struct):
    """Anything that may arrive on a line: a request, a notification or a response, told apart by what is set.

    `type` is how the specification keys `caller_tools_config`; receivers accept it where `method` is missing.
    """

    jsonrpc: Any = msgspec.UNSET
    id: Any = msgspec.UNSET
    method: Any = msgspec.UNSET
    type: Any = msgspec.UNSET
    params: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    result: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


# What decoding raises for bytes that are not the JSON that was expected: no JSON, no text, or nested too deep.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

decode_frame = msgspec.json.Decoder(Frame).decode
_encode = msgspec.json.Encoder().encode


def request(request_id: Id, method: str, params: object) -> bytes:
    return _encode({"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}) + b"\n"


def notification(method: str, params: object) -> bytes:
    return _encode({"jsonrpc": "2.0", "method": method, "params": params}) + b"\n"


def result(request_id: Id, value: object) -> bytes:
    """A response; `null` is a result like any other and is always sent."""
    return _encode({"jsonrpc": "2.0", "id": request_id, "result": value}) + b"\n"


def error(request_id: Id | None, failure: ErrorObject) -> bytes:
    return _encode({"jsonrpc": "2.0", "id": request_id, "error": failure}) + b"\n"
