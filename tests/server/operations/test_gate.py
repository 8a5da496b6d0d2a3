"""Who may what, as a literal table: the code's own declarations are what is judged."""

from typing import Any

import msgspec
import pytest

from oubliette.server.operations.catalogue import OPERATIONS
from oubliette.server.operations.gate import allowed
from oubliette.server.operations.operation import Target
from oubliette.server.operations.schemas import schema
from oubliette.server.tokens.token import Actor, Scope

# name: outside as admin, write, read | narrowed to a project, to write and to read: that one, and another one |
#       inside by a write key of the caller's own | by a derived key, write and read
TABLE = """
caller_tool_pending   yes yes no   yes no   no  no   no   no  no
caller_tool_poll      yes yes no   yes no   no  no   no   no  no
caller_tool_progress  yes yes no   yes no   no  no   no   no  no
caller_tool_response  yes yes no   yes no   yes no   no   no  no
config_limits         yes yes yes  yes yes  no  no   yes  yes yes
project_create        yes yes no   no  no   no  no   yes  no  no
project_delete        yes yes no   yes no   no  no   yes  no  no
project_get           yes yes yes  yes yes  no  no   yes  yes yes
project_list          yes yes yes  yes yes  yes yes  yes  yes yes
session_cancel        yes yes no   yes no   no  no   yes  yes no
session_end           yes yes no   yes no   no  no   yes  yes no
session_events        yes yes yes  yes yes  no  no   yes  yes yes
session_get           yes yes yes  yes yes  no  no   yes  yes yes
session_list          yes yes yes  yes yes  no  no   yes  yes yes
session_message       yes yes no   yes no   no  no   yes  yes no
session_spawn         yes yes no   yes no   no  no   yes  yes no
session_watch         yes yes yes  yes yes  no  no   yes  yes yes
token_create          yes no  no   no  no   no  no   no   no  no
token_list            yes no  no   no  no   no  no   no   no  no
token_revoke          yes no  no   no  no   no  no   no   no  no
workspace_delete      yes yes no   yes no   no  no   yes  yes no
workspace_list        yes yes yes  yes yes  no  no   yes  yes yes
"""
ROWS = {row.split()[0]: [cell == "yes" for cell in row.split()[1:]] for row in TABLE.strip().splitlines()}
DERIVED: dict[str, Any] = {"project_id": "p", "session_id": "gogol_x", "derived": True}
COLUMNS = [
    Actor(principal="a", scope=Scope.ADMIN),
    Actor(principal="w", scope=Scope.WRITE),
    Actor(principal="r", scope=Scope.READ),
    Actor(principal="n", scope=Scope.WRITE, project_id="p"),
    Actor(principal="n", scope=Scope.READ, project_id="p"),
    Actor(principal="n", scope=Scope.WRITE, project_id="another"),
    Actor(principal="n", scope=Scope.READ, project_id="another"),
    Actor(principal="w", scope=Scope.WRITE, session_id="gogol_x"),
    Actor(principal="d", scope=Scope.WRITE, **DERIVED),
    Actor(principal="d", scope=Scope.READ, **DERIVED),
]


def test_every_operation_has_its_row_and_every_row_its_operation():
    assert sorted(operation.name for operation in OPERATIONS) == sorted(ROWS)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_the_gate_allows_what_the_table_says(operation: Any):
    def may(actor: Actor) -> bool:
        return allowed(operation, actor) and (operation.target is Target.NOTHING or actor.reaches("p"))

    assert [may(actor) for actor in COLUMNS] == ROWS[operation.name]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_schemas_are_closed_and_their_parameters_are_what_the_gate_needs(operation: Any):
    shown = schema(operation.params)
    assert shown["type"] == "object"
    assert shown["additionalProperties"] is False
    assert schema(operation.result)["type"] == "object"
    names = {field.name for field in msgspec.structs.fields(operation.params)}
    needed = {
        Target.NOTHING: set[str](),
        Target.PROJECT: {"project_id"},
        Target.SESSION: {"session_id"},
        Target.OWNED_SESSION: {"session_id"},
        Target.SESSION_OR_PROJECT: {"session_id", "project_id"},
    }
    assert needed[operation.target] <= names


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_what_only_reads_is_open_to_readers_or_to_owners(operation: Any):
    if not operation.writes and operation.scope is not Scope.READ:
        assert operation.target is Target.OWNED_SESSION or operation.scope is Scope.ADMIN
    if operation.destructive:
        assert operation.writes


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_summaries_are_sentences(operation: Any):
    assert operation.summary.endswith(".")
    assert operation.title
    assert len(operation.summary) < 400
