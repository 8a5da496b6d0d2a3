"""The rules on request headers, as functions that look at nothing else."""

import base64
import binascii
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, cast

from oubliette.server.endpoints.mcp.contract import Mirrored

RawHeaders = Iterable[tuple[bytes, bytes]]

# The ones that the transport reads, and where `Headers` keeps them.
_SLOTS: Final = {
    b"accept": "accept",
    b"authorization": "authorization",
    b"content-encoding": "content_encoding",
    b"content-length": "content_length",
    b"content-type": "content_type",
    b"host": "host",
    b"mcp-method": "method",
    b"mcp-name": "name",
    b"mcp-protocol-version": "version",
    b"mcp-session-id": "session",
    b"origin": "origin",
}
_ROUTING: Final = frozenset({b"mcp-method", b"mcp-name", b"mcp-protocol-version"})
# Two of these would be read differently by different readers, whatever the era.
_ONCE: Final = frozenset({b"authorization", b"content-type", b"host", b"mcp-session-id", b"origin"})
_MIRROR_PREFIX: Final = "mcp-param-"


class Headers:
    __slots__ = (*_SLOTS.values(), "raw", "repeated", "repeated_routing")

    accept: bytes | None
    authorization: bytes | None
    content_encoding: bytes | None
    content_length: bytes | None
    content_type: bytes | None
    host: bytes | None
    method: bytes | None
    name: bytes | None
    version: bytes | None
    session: bytes | None
    origin: bytes | None

    def __init__(self, raw: RawHeaders) -> None:
        self.raw = raw
        self.repeated: str | None = None
        self.repeated_routing: str | None = None
        self.accept = self.authorization = self.content_encoding = self.content_length = self.content_type = None
        self.host = self.method = self.name = self.version = self.session = self.origin = None
        for name, value in raw:
            slot = _SLOTS.get(name)
            if slot is None:
                continue
            if getattr(self, slot) is not None:
                self._repeat(name, slot, value)
            else:
                setattr(self, slot, value)

    def _repeat(self, name: bytes, slot: str, value: bytes) -> None:
        if name in _ROUTING:
            self.repeated_routing = name.decode()
        elif name in _ONCE:
            self.repeated = name.decode()
        elif name == b"accept":
            self.accept = b"%b, %b" % (getattr(self, slot), value)


# A client says the same again and again, but for the length.
read = lru_cache(maxsize=256)(Headers)


@lru_cache(maxsize=256)
def accepts(accept: bytes | None) -> tuple[bool, bool]:
    """Whether JSON and whether an event stream may be answered. No header means that anything may."""
    if accept is None:
        return True, True
    kinds: set[str] = set()
    for part in accept.decode("latin-1").lower().split(","):
        kind, *parameters = (piece.strip() for piece in part.split(";"))
        if not any(re.fullmatch(r"q=0(\.0{0,3})?", parameter) for parameter in parameters):
            kinds.add(kind)
    anything = "*/*" in kinds
    return (
        anything or "application/json" in kinds or "application/*" in kinds,
        anything or "text/event-stream" in kinds or "text/*" in kinds,
    )


@lru_cache(maxsize=256)
def is_json(content_type: bytes | None) -> bool:
    if content_type is None:
        return False
    kind, *parameters = (piece.strip() for piece in content_type.decode("latin-1").lower().split(";"))
    charsets = [parameter for parameter in parameters if parameter.startswith("charset=")]
    return kind == "application/json" and all(each[8:].strip('"') in ("utf-8", "utf8") for each in charsets)


def bearer(authorization: bytes | None) -> str | None:
    """The token of an `Authorization: Bearer` header."""
    if authorization is None:
        return None
    scheme, _, token = authorization.strip().partition(b" ")
    if scheme.lower() != b"bearer":
        return None
    return token.strip().decode("latin-1") or None


def repeats_body(header: bytes | None, value: str) -> bool:
    """Whether a header carries this value of the body, plain or wrapped as base64."""
    return header is not None and decoded(header) == value


_WRAPPED: Final = re.compile(rb"=\?base64\?(.*)\?=")


def decoded(header: bytes) -> str | None:
    """A header's value; what is not plain ASCII travels as `=?base64?…?=`. None: wrapped, and broken."""
    header = header.strip(b" \t")
    wrapped = _WRAPPED.fullmatch(header)
    if wrapped is None:
        return header.decode("latin-1")
    payload = wrapped[1]
    try:
        content = base64.b64decode(payload, validate=True)
        # Sloppy spellings of the same bytes would be read differently by different readers.
        return content.decode() if base64.b64encode(content) == payload else None
    except (binascii.Error, UnicodeDecodeError):
        return None


def mirrored(schema: Mapping[str, Any]) -> tuple[Mirrored, ...]:
    """The arguments that a tool's input schema wants repeated in headers by `x-mcp-header`."""
    found: list[Mirrored] = []
    stack: list[tuple[tuple[str, ...], Mapping[str, Any]]] = [((), schema)]
    while stack:
        path, node = stack.pop()
        properties: Any = node.get("properties")
        if not isinstance(properties, dict):
            continue
        for name, child in cast("dict[str, Any]", properties).items():
            if not isinstance(child, dict):
                continue
            inner = cast("dict[str, Any]", child)
            header = inner.get("x-mcp-header")
            if isinstance(header, str) and inner.get("type") in ("string", "integer", "boolean"):
                found.append(Mirrored((*path, name), _MIRROR_PREFIX + header.lower(), str(inner["type"])))
            stack.append(((*path, name), inner))
    return tuple(found)


def mirror_problem(rules: Sequence[Mirrored], arguments: Mapping[str, Any], raw: RawHeaders) -> str | None:
    """Why the mirrored headers of a tool call do not say what its arguments say, or None."""
    given: dict[str, bytes] = {}
    for name, value in raw:
        key = name.decode("latin-1")
        if key.startswith(_MIRROR_PREFIX):
            if key in given:
                return f"{key} appears more than once"
            given[key] = value
    for rule in rules:
        value = _at(arguments, rule.path)
        header = given.get(rule.header)
        argument = ".".join(rule.path)
        if header is None:
            if value is not None and _rendered(value) is not None:
                return f"{rule.header} is missing and the argument {argument!r} is there"
            continue
        said = decoded(header)
        if said is None:
            return f"{rule.header} is not valid base64"
        if value is None or not _says(rule.kind, said, value):
            return f"{rule.header} does not say what the argument {argument!r} says"
    return None


def _at(arguments: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    node: Any = arguments
    for key in path:
        if not isinstance(node, dict):
            return None
        node = cast("dict[str, Any]", node).get(key)
    return node


def _rendered(value: Any) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, str | int | float) else None


def _says(kind: str, said: str, value: Any) -> bool:
    if kind == "integer" and isinstance(value, int | float) and not isinstance(value, bool):
        whole = re.fullmatch(r"(-?[0-9]{1,400})(?:\.0+)?", said)
        return whole is not None and int(whole[1]) == value
    return said == _rendered(value)


_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})


class Doors:
    """Which `Host` and `Origin` may come in: by default this machine's own names, at any port.

    A web page that makes a browser resolve its own name to 127.0.0.1 still sends that name.
    """

    def __init__(self, hosts: Iterable[str] = (), origins: Iterable[str] = ()) -> None:
        self._hosts = _LOOPBACK | {host.lower() for host in hosts}
        self._origins = frozenset(origin.lower().rstrip("/") for origin in origins)
        self.admits_host = lru_cache(maxsize=256)(self._admits_host)
        self.admits_origin = lru_cache(maxsize=256)(self._admits_origin)

    def _admits_host(self, header: bytes | None) -> bool:
        if header is None:
            return False
        host = header.decode("latin-1").strip().lower()
        return "*" in self._hosts or host in self._hosts or _without_port(host) in self._hosts

    def _admits_origin(self, header: bytes | None) -> bool:
        """A request that names no origin comes from no web page."""
        if header is None:
            return True
        origin = header.decode("latin-1").strip().lower()
        if "*" in self._origins or origin in self._origins:
            return True
        scheme, separator, host = origin.partition("://")
        return separator != "" and scheme in ("http", "https") and _without_port(host) in _LOOPBACK


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host
