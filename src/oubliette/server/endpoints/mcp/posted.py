"""What a POST may carry, read without believing any of it."""

from dataclasses import dataclass, field
from typing import Any, Final, cast

import msgspec

from oubliette.server.endpoints.mcp.contract import (
    HEADER_MISMATCH,
    INVALID_PARAMS,
    INVALID_REQUEST,
    LEVELS,
    PARSE_ERROR,
    UNSUPPORTED_VERSION,
)
from oubliette.server.endpoints.mcp.headers import Headers, repeats_body
from oubliette.server.endpoints.mcp.versions import LEGACY, MODERN, SUPPORTED, Era, is_dated
from oubliette.wire.jsonrpc import Frame, Id, decode_frame

VERSION_KEY: Final = "io.modelcontextprotocol/protocolVersion"
CAPABILITIES_KEY: Final = "io.modelcontextprotocol/clientCapabilities"
LEVEL_KEY: Final = "io.modelcontextprotocol/logLevel"
SUBSCRIPTION_KEY: Final = "io.modelcontextprotocol/subscriptionId"
SERVER_KEY: Final = "io.modelcontextprotocol/serverInfo"

# The parameter that the `Mcp-Name` header repeats.
NAMED: Final = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}


@dataclass(frozen=True, slots=True)
class Refused(Exception):
    """A request that goes no further, and what its sender is told."""

    status: int
    code: int
    message: str
    data: dict[str, Any] | None = None
    request_id: Id | None = None
    headers: tuple[tuple[bytes, bytes], ...] = field(default=())


class Params(msgspec.Struct):
    """The parameters that the transport itself reads, of all methods; types are checked where they are used."""

    meta: msgspec.Raw | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="_meta")
    name: Any = msgspec.UNSET
    uri: Any = msgspec.UNSET
    arguments: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    cursor: Any = msgspec.UNSET
    level: Any = msgspec.UNSET
    notifications: Any = msgspec.UNSET
    requestId: Any = msgspec.UNSET
    protocolVersion: Any = msgspec.UNSET
    capabilities: Any = msgspec.UNSET
    clientInfo: Any = msgspec.UNSET


class Meta(msgspec.Struct):
    version: Any = msgspec.field(default=msgspec.UNSET, name=VERSION_KEY)
    capabilities: Any = msgspec.field(default=msgspec.UNSET, name=CAPABILITIES_KEY)
    level: Any = msgspec.field(default=msgspec.UNSET, name=LEVEL_KEY)
    progressToken: Any = msgspec.UNSET


_NO_PARAMS: Final = Params()
_NO_META: Final = Meta()
_decode_params = msgspec.json.Decoder(Params).decode
_decode_meta = msgspec.json.Decoder(Meta).decode


@dataclass(slots=True)
class Posted:
    """A request, a notification (no id), or the answer to a request of ours (no method)."""

    id: Id | None
    method: str | None
    params: Params
    meta: Meta
    raw_params: msgspec.Raw | None = None

    @property
    def is_request(self) -> bool:
        return self.method is not None and self.id is not None

    @property
    def progress_token(self) -> Id | None:
        token = self.meta.progressToken
        return token if isinstance(token, str | int) and not isinstance(token, bool) else None


def read(body: bytes | bytearray) -> Posted:
    """Raises `Refused` for what is no single JSON-RPC message."""
    frame = _frame(body)
    if frame.jsonrpc != "2.0":
        raise _invalid("the message is not JSON-RPC 2.0", frame)
    if frame.method is msgspec.UNSET:
        if frame.id is msgspec.UNSET or (frame.result is msgspec.UNSET) == (frame.error is msgspec.UNSET):
            raise _invalid("the message is no request, no notification and no response", frame)
        return Posted(_known_id(frame), None, _NO_PARAMS, _NO_META)
    if not isinstance(frame.method, str):
        raise _invalid("`method` is not a string", frame)
    if frame.id is not msgspec.UNSET and _known_id(frame) is None:
        raise _invalid("`id` is neither a string nor an integer", frame)
    posted = Posted(_known_id(frame), frame.method, _NO_PARAMS, _NO_META)
    if frame.params is not msgspec.UNSET and not _is_null(frame.params):
        posted.raw_params = frame.params
        posted.params = _params(frame.params, posted.id)
        if posted.params.meta is not msgspec.UNSET and not _is_null(posted.params.meta):
            posted.meta = _meta(posted.params.meta, posted.id)
    return posted


def _frame(body: bytes | bytearray) -> Frame:
    try:
        return decode_frame(body)
    except RecursionError:
        raise Refused(400, PARSE_ERROR, "the body is nested too deep") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    try:
        whole = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Refused(400, PARSE_ERROR, "the body is not JSON") from None
    kind = "a batch: send its messages one by one" if isinstance(whole, list) else "not a JSON object"
    raise Refused(400, INVALID_REQUEST, f"the body is {kind}")


def _is_null(raw: msgspec.Raw) -> bool:
    view = memoryview(raw)
    return len(view) == 4 and bytes(view) == b"null"


def _known_id(frame: Frame) -> Id | None:
    return frame.id if isinstance(frame.id, str | int) and not isinstance(frame.id, bool) else None


def _invalid(message: str, frame: Frame) -> Refused:
    return Refused(400, INVALID_REQUEST, message, request_id=_known_id(frame))


def _params(raw: msgspec.Raw, request_id: Id | None) -> Params:
    try:
        return _decode_params(raw)
    except msgspec.ValidationError:
        raise Refused(400, INVALID_PARAMS, "`params` is not an object", request_id=request_id) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Refused(400, PARSE_ERROR, "the body is not JSON", request_id=request_id) from None


def _meta(raw: msgspec.Raw, request_id: Id | None) -> Meta:
    try:
        return _decode_meta(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise Refused(400, INVALID_PARAMS, "`params._meta` is not an object", request_id=request_id) from None


def claimed(headers: Headers) -> str | None:
    """The revision that a request's headers say it speaks."""
    return headers.version.decode("latin-1").strip() if headers.version is not None else None


def check_bodiless(headers: Headers) -> None:
    """What a request without a body claims: such are of the legacy era. Raises `Refused`."""
    version = claimed(headers)
    if version is not None and version not in LEGACY:
        raise _unsupported(version, None)


def era(posted: Posted, headers: Headers) -> Era:
    """Which era a message belongs to. Raises `Refused` where it claims a revision that we do not serve."""
    version = claimed(headers)
    if posted.meta.version is not msgspec.UNSET or version == MODERN:
        return Era.MODERN
    if version is None or version in LEGACY:
        return Era.LEGACY
    if posted.method == "initialize" and is_dated(version):
        return Era.LEGACY  # an older client that repeats what it asks for: the answer offers it another
    raise _unsupported(version, posted.id)


def check_modern(posted: Posted, headers: Headers) -> None:
    """The rules of the stateless era, in their order. Raises `Refused`."""
    meta, request_id = posted.meta, posted.id
    if headers.repeated_routing is not None:
        raise Refused(400, HEADER_MISMATCH, f"{headers.repeated_routing} appears more than once", None, request_id)
    missing = [
        key
        for key, value in ((VERSION_KEY, meta.version), (CAPABILITIES_KEY, meta.capabilities))
        if value is msgspec.UNSET
    ]
    if missing:
        raise Refused(400, INVALID_PARAMS, f"`params._meta` lacks {' and '.join(missing)}", None, request_id)
    problem = _header_problem(posted, headers)
    if problem is not None:
        raise Refused(400, HEADER_MISMATCH, problem, None, request_id)
    if meta.version != MODERN:
        raise _unsupported(meta.version, request_id)
    if not isinstance(meta.capabilities, dict):
        raise Refused(400, INVALID_PARAMS, f"{CAPABILITIES_KEY} is not an object", None, request_id)
    if meta.level is not msgspec.UNSET and meta.level not in LEVELS:
        raise Refused(400, INVALID_PARAMS, f"{LEVEL_KEY} is none of {', '.join(LEVELS)}", None, request_id)


def _header_problem(posted: Posted, headers: Headers) -> str | None:
    version = posted.meta.version
    if not isinstance(version, str) or not repeats_body(headers.version, version):
        return "mcp-protocol-version does not say what the body says"
    assert posted.method is not None
    if not repeats_body(headers.method, posted.method):
        return "mcp-method does not say what the body says"
    parameter = NAMED.get(posted.method)
    if parameter is not None:
        value = cast("object", getattr(posted.params, parameter))
        if isinstance(value, str) and not repeats_body(headers.name, value):
            return f"mcp-name does not say what the parameter `{parameter}` says"
    return None


def _unsupported(requested: object, request_id: Id | None) -> Refused:
    return Refused(
        400,
        UNSUPPORTED_VERSION,
        "unsupported protocol version",
        {"supported": list(SUPPORTED), "requested": requested},
        request_id,
    )
