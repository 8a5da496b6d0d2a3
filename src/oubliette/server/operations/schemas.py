"""JSON Schemas of parameters and results, from the types that the code uses."""

from functools import cache
from typing import Any, cast

import msgspec


@cache
def schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The schema of a struct, with `type: object` at its root as MCP wants it."""
    whole = msgspec.json.schema(kind)
    definitions = cast("dict[str, Any]", whole.pop("$defs", {}))
    root = definitions.pop(kind.__name__) if "$ref" in whole else whole
    if definitions:
        root = {**root, "$defs": definitions}
    root.pop("title", None)
    return root
