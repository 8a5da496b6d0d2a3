"""A lent tool: a function of the caller's, and what a droid is told of it.

The signature is the schema: annotations become types, defaults make a parameter optional, and what arrives is
decoded by the same types, so that the function gets its dataclasses and structs ready made.
"""

import copy
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from oubliette.caller.errors import InvalidArguments

_DEFAULTS_THAT_NEED_NO_COPY: tuple[type, ...] = (str, int, float, bool, bytes, tuple, frozenset, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    name: str
    description: str
    input_schema: dict[str, Any]
    function: Callable[..., Any]
    is_async: bool
    threaded: bool
    timeout_s: float | None
    decode: Callable[[bytes | msgspec.Raw], dict[str, Any]]

    def declaration(self) -> dict[str, Any]:
        """The tool as `caller_tools` holds it."""
        declared: dict[str, Any] = {
            "name": self.name,
            "description": self.description,
            "inputSchema": self.input_schema,
        }
        if self.timeout_s is not None:
            declared["timeoutSeconds"] = self.timeout_s
        return declared


def tool_of(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    description: str | None = None,
    timeout_s: float | None = None,
    threaded: bool = False,
) -> Tool:
    """Make a tool of a function. Raises `TypeError` for a signature that JSON arguments cannot fill."""
    title = name or getattr(function, "__name__", type(function).__name__)
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object whose call is async is async
    )
    if is_async and threaded:
        raise TypeError(f"{title}: an async function runs on the loop; only a plain one can be threaded")
    fields, open_ended = _fields(function, title)
    arguments = msgspec.defstruct(
        re.sub(r"\W", "_", title) + "_arguments", fields, kw_only=True, forbid_unknown_fields=not open_ended
    )
    return Tool(
        name=title,
        description=inspect.cleandoc(description if description is not None else inspect.getdoc(function) or ""),
        input_schema=_root_schema(arguments, open_ended),
        function=function,
        is_async=is_async,
        threaded=threaded,
        timeout_s=timeout_s,
        decode=_decoder(arguments, open_ended),
    )


def _fields(function: Callable[..., Any], title: str) -> tuple[list[tuple[str, Any, Any]], bool]:
    """The parameters as fields of a struct, and whether the function takes any other argument as well."""
    try:
        parameters = inspect.signature(function, eval_str=True).parameters.values()
    except NameError as failure:
        raise TypeError(f"{title}: an annotation names something that its module does not know: {failure}") from None
    fields: list[tuple[str, Any, Any]] = []
    open_ended = False
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            open_ended = True
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise TypeError(f"{title}: arguments arrive by name, and {parameter} cannot be given by name")
        else:
            kind = Any if parameter.annotation is parameter.empty else parameter.annotation
            fields.append((parameter.name, kind, _default(parameter)))
    return fields, open_ended


def _default(parameter: inspect.Parameter) -> Any:
    if parameter.default is parameter.empty:
        return msgspec.NODEFAULT
    value: Any = parameter.default
    if isinstance(value, _DEFAULTS_THAT_NEED_NO_COPY):
        return value
    return msgspec.field(default_factory=lambda: copy.deepcopy(value))


def _root_schema(arguments: type[msgspec.Struct], open_ended: bool) -> dict[str, Any]:
    """The struct's schema with its own object at the root, as MCP asks for."""
    try:
        schema = msgspec.json.schema(arguments)
    except TypeError as failure:
        raise TypeError(f"{arguments.__name__.removesuffix('_arguments')}: {failure}") from None
    definitions = cast("dict[str, dict[str, Any]]", schema["$defs"])
    root = definitions.pop(schema["$ref"].rpartition("/")[2])
    root.pop("title", None)
    if open_ended:
        root["additionalProperties"] = True
    if definitions:
        root["$defs"] = definitions
    return root


def _decoder(arguments: type[msgspec.Struct], open_ended: bool) -> Callable[[bytes | msgspec.Raw], dict[str, Any]]:
    decode = msgspec.json.Decoder(arguments).decode
    names = arguments.__struct_fields__

    def decoded(raw: bytes | msgspec.Raw) -> dict[str, Any]:
        try:
            given = decode(raw)
            values = {name: getattr(given, name) for name in names}
            if open_ended:
                values = msgspec.json.decode(raw, type=dict[str, Any]) | values
        except msgspec.ValidationError as failure:
            raise InvalidArguments(str(failure)) from None
        return values

    return decoded
