"""What goes out: JSON-RPC messages, and the same as server-sent events."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from oubliette.wire.jsonrpc import ErrorObject, Id

encode: Final = msgspec.json.Encoder().encode

HEARTBEAT: Final = b":\n\n"
RETRY: Final = b"retry: 3000\n\n"
_EVENT: Final = b"event: message\ndata: "


def event(message: bytes) -> bytes:
    """A message as one server-sent event; JSON on one line holds no line break of its own."""
    return b"%b%b\n\n" % (_EVENT, message)


def result(request_id: Id, value: bytes) -> bytes:
    return b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (encode(request_id), value)


def failure(request_id: Id | None, code: int, message: str, data: Mapping[str, Any] | None = None) -> bytes:
    error = ErrorObject(code=code, message=message, data=dict(data) if data is not None else None)
    return b'{"jsonrpc":"2.0","id":%b,"error":%b}' % (encode(request_id), encode(error))


def notification(method: str, params: object) -> bytes:
    return b'{"jsonrpc":"2.0","method":%b,"params":%b}' % (encode(method), encode(params))


def request(request_id: Id, method: str) -> bytes:
    return b'{"jsonrpc":"2.0","id":%b,"method":%b}' % (encode(request_id), encode(method))


def with_members(target: bytes, members: Sequence[bytes]) -> bytes:
    """An encoded object with encoded members (`"name":value`) put in front."""
    if not members:
        return target
    added = b",".join(members)
    return b"{%b}" % added if target == b"{}" else b"{%b,%b" % (added, target[1:])
