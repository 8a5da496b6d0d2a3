"""What a caller lends: checked as a whole when it is declared, so that nothing is half-registered."""

import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from oubliette.server.caller_tools import schemas
from oubliette.server.errors import InvalidParams, TooLarge
from oubliette.server.limits import DECLARATION_BYTES, DECLARATION_CPU_S, DESCRIPTION_BYTES, TOOLS_PER_CALLER
from oubliette.wire import naming
from oubliette.wire.relay import ConfigTool


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
    """A tool as it stands in `caller_tools`: the specification's three fields, and what MCP tools carry beside them."""

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
    begun = time.thread_time()
    for position, tool in enumerate(offered):
        if time.thread_time() - begun > DECLARATION_CPU_S:
            raise TooLarge("the schemas of these caller tools take too long to prepare: declare fewer or simpler ones")
        try:
            if position in wrong:
                raise InvalidParams(wrong[position])
            tools.append(_tool(caller_id, tool, timeout_max_s))
        except (InvalidParams, TooLarge) as refused:
            reasons[f"{position}:{tool.name[:64]}"] = refused.message
    if reasons:
        told = "; ".join(f"{name.split(':', 1)[1]!r}: {reason}" for name, reason in reasons.items())
        raise InvalidParams(f"caller tools were refused and none was registered: {told}", tools=reasons)
    declaration = Declaration(caller_id=caller_id, tools=tuple(tools), timeout_s=timeout_s, delivery=delivery)
    if len(msgspec.json.encode(declaration)) > DECLARATION_BYTES:
        raise TooLarge(f"these caller tools are more than {DECLARATION_BYTES} bytes together: declare fewer")
    return declaration


def _tool(caller_id: str, tool: OfferedTool, timeout_max_s: float) -> Tool:
    if len(tool.description.encode(errors="replace")) > DESCRIPTION_BYTES:
        raise TooLarge(f"its description is longer than {DESCRIPTION_BYTES} bytes")
    _check_timeout("timeoutSeconds", tool.timeoutSeconds, timeout_max_s)
    schema = _object_schema(tool.inputSchema)
    schemas.checked(schema)
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
