"""Everything that oubliette can do, each declared once."""

from typing import Any

from oubliette.server.operations import caller_tool, limits, project, session, token
from oubliette.server.operations.operation import Operation

OPERATIONS: tuple[Operation[Any], ...] = (
    *project.OPERATIONS,
    *session.OPERATIONS,
    *caller_tool.OPERATIONS,
    *token.OPERATIONS,
    *limits.OPERATIONS,
)
