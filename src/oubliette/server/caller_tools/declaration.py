"""What a caller lends: checked as a whole when it is declared, so that nothing is half-registered.

A declared schema comes from outside and is compiled here, so it is bounded first: its size, the number of nodes it
expands to when its references are followed, and where references may point (into itself; a retriever that refuses
everything stands behind that). A regular expression in it may not backtrack without end.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, cast

import jsonschema_rs
import msgspec

from oubliette.server.errors import InvalidArguments, InvalidParams, TooLarge
from oubliette.server.limits import DESCRIPTION_BYTES, SCHEMA_BYTES, SCHEMA_NODES, TOOLS_PER_CALLER
from oubliette.wire import naming
from oubliette.wire.relay import ConfigTool

BACKTRACK_LIMIT = 10_000
_encode_sorted = msgspec.json.Encoder(order="deterministic").encode


class Tool(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tool as declared and kept; `box_name` is what the droid calls it."""

    name: str
    box_name: str
    description: str = ""
    input_schema: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "object"})
    title: str | None = None
    annotations: dict[str, Any] | None = None
    timeout_s: float | None = None


class Declaration(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    caller_id: str
    tools: tuple[Tool, ...] = ()
    timeout_s: float | None = None
    delivery: Literal["push", "poll"] = "push"

    def find(self, name: str) -> Tool | None:
        """The tool of this declared name, or of this name in the box."""
        for tool in self.tools:
            if tool.name == name:
                return tool
        for tool in self.tools:
            if tool.box_name == name:
                return tool
        return None

    def names(self) -> dict[str, str]:
        """Declared names to names in the box."""
        return {tool.name: tool.box_name for tool in self.tools}

    def config_tools(self) -> list[ConfigTool]:
        return [
            ConfigTool(
                name=tool.name,
                box_name=tool.box_name,
                description=tool.description,
                inputSchema=tool.input_schema,
                annotations=tool.annotations,
                title=tool.title,
                timeout_s=tool.timeout_s,
            )
            for tool in self.tools
        ]


class OfferedTool(msgspec.Struct, kw_only=True):
    """A tool as it stands in `caller_tools`: the seeds' three fields, and what MCP tools carry beside them."""

    name: str
    description: str = ""
    inputSchema: dict[str, Any] | None = None
    title: str | None = None
    annotations: dict[str, Any] | None = None
    timeoutSeconds: float | None = None


def declare(
    caller_id: str,
    offered: Sequence[OfferedTool],
    *,
    timeout_s: float | None = None,
    timeout_max_s: float,
    delivery: Literal["push", "poll"] = "push",
) -> Declaration:
    """A declaration that holds as a whole. Raises `InvalidParams` with every reason, by tool."""
    problem = naming.caller_problem(caller_id)
    if problem:
        raise InvalidParams(f"caller_id {caller_id!r} cannot be used: {problem}")
    if len(offered) > TOOLS_PER_CALLER:
        raise TooLarge(f"{len(offered)} caller tools are more than {TOOLS_PER_CALLER}: declare fewer")
    _check_timeout("caller_tool_timeout_s", timeout_s, timeout_max_s)
    reasons: dict[str, str] = {}
    tools: list[Tool] = []
    wrong = naming.tool_problems(caller_id, [tool.name for tool in offered])
    for position, tool in enumerate(offered):
        try:
            if position in wrong:
                raise InvalidParams(wrong[position])
            tools.append(_tool(caller_id, tool, timeout_max_s))
        except (InvalidParams, TooLarge) as refused:
            reasons[f"{position}:{tool.name[:64]}"] = refused.message
    if reasons:
        told = "; ".join(f"{name.split(':', 1)[1]!r}: {reason}" for name, reason in reasons.items())
        raise InvalidParams(f"caller tools were refused and none was registered: {told}", tools=reasons)
    return Declaration(caller_id=caller_id, tools=tuple(tools), timeout_s=timeout_s, delivery=delivery)


def _tool(caller_id: str, tool: OfferedTool, timeout_max_s: float) -> Tool:
    if len(tool.description.encode()) > DESCRIPTION_BYTES:
        raise TooLarge(f"its description is longer than {DESCRIPTION_BYTES} bytes")
    _check_timeout("timeoutSeconds", tool.timeoutSeconds, timeout_max_s)
    schema = _object_schema(tool.inputSchema)
    _validator(_encode_sorted(schema))
    return Tool(
        name=tool.name,
        box_name=naming.box_name(caller_id, tool.name),
        description=tool.description,
        input_schema=schema,
        title=tool.title,
        annotations=tool.annotations,
        timeout_s=tool.timeoutSeconds,
    )


def _check_timeout(name: str, seconds: float | None, most: float) -> None:
    if seconds is not None and not 0 < seconds <= most:
        raise InvalidParams(f"{name} is {seconds:g}; it must be above 0 and at most {most:g} (the server's bound)")


def _object_schema(schema: dict[str, Any] | None) -> dict[str, Any]:
    """The schema as MCP wants it: with `type: object` at its root."""
    if schema is None:
        return {"type": "object"}
    if "type" not in schema:
        return {"type": "object", **schema}
    if schema["type"] != "object":
        raise InvalidParams('its inputSchema must have "type": "object" at the root')
    return schema


def _check_size(schema: Mapping[str, Any], encoded: bytes) -> None:
    if len(encoded) > SCHEMA_BYTES:
        raise TooLarge(f"its inputSchema is {len(encoded)} bytes; at most {SCHEMA_BYTES} are taken")
    nodes = _expanded(schema, schema, {}, depth=0)
    if nodes > SCHEMA_NODES:
        raise TooLarge(f"its inputSchema expands to more than {SCHEMA_NODES} nodes")


def _expanded(node: Any, root: Any, known: dict[str, int], *, depth: int) -> int:
    """How many nodes a schema has when each local reference stands for what it points at; a cycle counts once."""
    if depth > 200:
        raise TooLarge("its inputSchema is nested too deep")
    if isinstance(node, list):
        return 1 + sum(_expanded(item, root, known, depth=depth + 1) for item in cast("list[Any]", node))
    if not isinstance(node, dict):
        return 1
    members = cast("dict[str, Any]", node)
    total = 1
    for name, value in members.items():
        if name in ("$ref", "$dynamicRef") and isinstance(value, str):
            if not value.startswith("#"):
                raise InvalidParams(f"its inputSchema refers to {value[:80]!r}: references may only point into itself")
            if value not in known:
                known[value] = 1
                known[value] = _expanded(_pointed(root, value), root, known, depth=depth + 1)
            total += known[value]
        else:
            total += _expanded(value, root, known, depth=depth + 1)
        if total > SCHEMA_NODES:
            return total
    return total


def _pointed(root: Any, reference: str) -> Any:
    """What a JSON pointer into the schema leads to; anchors and dead ends count as a leaf, the compiler judges them."""
    node = root
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and key in node:
            node = cast("dict[str, Any]", node)[key]
        elif isinstance(node, list) and key.isdigit() and int(key) < len(cast("list[Any]", node)):
            node = cast("list[Any]", node)[int(key)]
        else:
            return None
    return node


def _refuse(uri: str) -> Any:
    raise InvalidParams(f"its inputSchema refers to {uri[:80]!r}: references may only point into itself")


@lru_cache(maxsize=4096)
def _validator(encoded: bytes) -> Any:
    schema = msgspec.json.decode(encoded)
    _check_size(schema, encoded)
    try:
        return jsonschema_rs.validator_for(
            schema,
            retriever=_refuse,
            pattern_options=jsonschema_rs.FancyRegexOptions(backtrack_limit=BACKTRACK_LIMIT),
        )
    except InvalidParams:
        raise
    except Exception as error:
        raise InvalidParams(f"its inputSchema is not a JSON Schema: {str(error)[:200]}") from None


class Arguments:
    """Checks arguments against one tool's schema, compiled once."""

    def __init__(self, tool: Tool) -> None:
        self._box_name = tool.box_name
        self._validator = _validator(_encode_sorted(tool.input_schema))

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raise `InvalidArguments`, naming each place, unless the arguments fit; before anyone is disturbed."""
        if self._validator.is_valid(arguments):
            return
        problems: list[str] = []
        for error in self._validator.iter_errors(arguments):
            where = "/".join(str(part) for part in error.instance_path)
            problems.append(f"{where or 'arguments'}: {error.message[:200]}")
            if len(problems) == 5:
                break
        raise InvalidArguments(f"{self._box_name} was not called: " + "; ".join(problems))
