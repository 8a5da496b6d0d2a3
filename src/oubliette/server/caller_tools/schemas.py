"""Schemas from outside: bounded before they are compiled, and before anything is checked against them.

A declared schema is somebody's text that runs here. So its size is bounded, the number of nodes that it expands to
when its references are followed, where those point (into itself; a retriever that refuses everything stands behind
that), how many regular expressions it holds and how far one may backtrack; and what is checked against it is bounded
by the product of both sides.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast
from urllib.parse import unquote

import jsonschema_rs
import msgspec

from oubliette.server.errors import InvalidArguments, InvalidParams, TooLarge
from oubliette.server.limits import CHECKS_PER_CALL, SCHEMA_BYTES, SCHEMA_NODES, SCHEMA_PATTERNS

BACKTRACK_LIMIT = 10_000
PATTERN_BYTES = 4 * 1024 * 1024  # compiled
DEPTH = 200
_REFERENCES = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
# Keywords whose members are schemas by names of the schema's own making, and such whose value is plain data.
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
_DATA = frozenset({"const", "enum", "default", "example", "examples", "required"})
_encode_sorted = msgspec.json.Encoder(order="deterministic").encode


class Checked:
    """A schema that was taken: what it is worth in work, and what it says of values."""

    def __init__(self, validator: Any, nodes: int) -> None:
        self._validator = validator
        self._nodes = nodes

    def check(self, arguments: Mapping[str, Any], encoded: bytes, name: str) -> None:
        """Raise `InvalidArguments`, naming each place, unless the arguments fit; `encoded` is their JSON."""
        values = encoded.count(b",") + 1
        if values * self._nodes > CHECKS_PER_CALL:
            raise TooLarge(f"{name} was not called: about {values} values are too many for a schema of {self._nodes}")
        if self._validator.is_valid(arguments):
            return
        problems: list[str] = []
        for error in self._validator.iter_errors(arguments):
            where = "/".join(str(part) for part in error.instance_path)
            problems.append(f"{where or 'arguments'}: {error.message[:200]}")
            if len(problems) == 5:
                break
        raise InvalidArguments(f"{name} was not called: " + "; ".join(problems))


def checked(schema: Mapping[str, Any]) -> Checked:
    """Take a schema. Raises `InvalidParams` or `TooLarge` with the reason, to be read after the tool's name."""
    try:
        encoded = _encode_sorted(schema)
    except RecursionError:
        raise TooLarge("its inputSchema is nested too deep") from None
    except (UnicodeEncodeError, msgspec.MsgspecError, TypeError) as error:
        raise InvalidParams(f"its inputSchema is not JSON: {error}") from None
    return _compiled(encoded)


@lru_cache(maxsize=4096)
def _compiled(encoded: bytes) -> Checked:
    if len(encoded) > SCHEMA_BYTES:
        raise TooLarge(f"its inputSchema is {len(encoded)} bytes; at most {SCHEMA_BYTES} are taken")
    schema = msgspec.json.decode(encoded)
    nodes = _Survey(schema).nodes()
    try:
        validator = jsonschema_rs.validator_for(
            schema,
            retriever=_refuse,
            pattern_options=jsonschema_rs.FancyRegexOptions(backtrack_limit=BACKTRACK_LIMIT, size_limit=PATTERN_BYTES),
        )
    except Exception as error:
        first = str(error).split("\n", 1)[0][:200]
        raise InvalidParams(f"its inputSchema is not a JSON Schema: {first}") from None
    return Checked(validator, nodes)


def _refuse(uri: str) -> Any:
    raise ValueError(f"{uri[:80]!r} is not fetched")


class _Survey:
    """Counts the nodes of a schema with each reference standing for what it points at; a cycle counts once."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[str, int] = {}
        self._anchors = _anchors(root)
        self._patterns = 0

    def nodes(self) -> int:
        return self._schema(self._root, 0)

    def _schema(self, node: Any, depth: int) -> int:
        if depth > DEPTH:
            raise TooLarge("its inputSchema is nested too deep")
        if isinstance(node, list):
            return self._sum(1, (self._schema(item, depth + 1) for item in cast("list[Any]", node)))
        if not isinstance(node, dict):
            return 1
        members = cast("dict[str, Any]", node)
        if "$id" in members and node is not self._root:
            raise InvalidParams("its inputSchema has an $id below its root, which would change what references mean")
        return self._sum(1, (self._keyword(name, value, depth + 1) for name, value in members.items()))

    def _keyword(self, name: str, value: Any, depth: int) -> int:
        if name in _REFERENCES and isinstance(value, str):
            return self._reference(value, depth)
        if name in _DATA:
            return self._data(value, depth)
        if name in _NAMED and isinstance(value, dict):
            schemas = cast("dict[str, Any]", value)
            if name == "patternProperties":
                self._count_patterns(len(schemas))
            return self._sum(1, (self._schema(schema, depth + 1) for schema in schemas.values()))
        if name == "pattern":
            self._count_patterns(1)
        return self._schema(value, depth)

    def _reference(self, reference: str, depth: int) -> int:
        if not reference.startswith("#"):
            raise InvalidParams(f"its inputSchema refers to {reference[:80]!r}: references may only point into itself")
        if reference not in self._known:
            self._known[reference] = 1
            self._known[reference] = self._schema(self._pointed(reference), depth)
        return self._known[reference]

    def _data(self, value: Any, depth: int) -> int:
        if depth > DEPTH:
            raise TooLarge("its inputSchema is nested too deep")
        if isinstance(value, dict):
            members = cast("dict[str, Any]", value)
            return self._sum(1, (self._data(member, depth + 1) for member in members.values()))
        if isinstance(value, list):
            return self._sum(1, (self._data(item, depth + 1) for item in cast("list[Any]", value)))
        return 1

    @staticmethod
    def _sum(total: int, parts: Any) -> int:
        for part in parts:
            total += part
            if total > SCHEMA_NODES:
                raise TooLarge(f"its inputSchema expands to more than {SCHEMA_NODES} nodes")
        return total

    def _count_patterns(self, patterns: int) -> None:
        self._patterns += patterns
        if self._patterns > SCHEMA_PATTERNS:
            raise TooLarge(f"its inputSchema has more than {SCHEMA_PATTERNS} regular expressions")

    def _pointed(self, reference: str) -> Any:
        """What a reference leads to; a dead end counts as a leaf, the compiler judges it."""
        pointer = unquote(reference[1:])
        if pointer and not pointer.startswith("/"):
            return self._anchors.get(pointer)
        node = self._root
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and key in node:
                node = cast("dict[str, Any]", node)[key]
            elif isinstance(node, list) and key.isdigit() and int(key) < len(cast("list[Any]", node)):
                node = cast("list[Any]", node)[int(key)]
            else:
                return None
        return node


def _anchors(root: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    left: list[Any] = [root]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            members = cast("dict[str, Any]", node)
            for name in ("$anchor", "$dynamicAnchor"):
                if isinstance(members.get(name), str):
                    found[members[name]] = members
            left.extend(members.values())
        elif isinstance(node, list):
            left.extend(cast("list[Any]", node))
    return found
