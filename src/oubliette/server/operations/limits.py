"""The operation that tells the bounds in force."""

from typing import Annotated

import msgspec
from msgspec import Meta

from oubliette.server.errors import InvalidParams
from oubliette.server.limits import PENDING_CALLS_PER_SESSION, QUEUED_MESSAGES_PER_SESSION
from oubliette.server.operations.operation import Asked, Operation, Rooms, Target
from oubliette.server.projects import projects
from oubliette.server.sessions import rows
from oubliette.server.storage.database import Tx
from oubliette.server.tokens.token import Scope


class ConfigLimits(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    project_id: Annotated[str | None, Meta(description="Needed unless session_id is given.")] = None
    session_id: Annotated[str | None, Meta(description="Adds what is left for this session.")] = None


class Bound(msgspec.Struct, kw_only=True):
    value: int
    source: str


class SessionLeft(msgspec.Struct, kw_only=True):
    session_id: str
    depth: int
    remaining_depth: int
    remaining_agents: int
    pending_calls: int


class LimitsShown(msgspec.Struct, kw_only=True):
    project_id: str
    max_recursion_depth: Bound
    max_agents_per_session: Bound
    sessions: Annotated[Bound, Meta(description="Live on the whole server, children too.")]
    sessions_per_project: Annotated[Bound, Meta(description="Live ones that callers started.")]
    pending_calls_per_session: Bound
    queued_messages_per_session: Bound
    session: SessionLeft | None = None


def _bound(override: int | None, default: int) -> Bound:
    if override is None or override >= default:
        return Bound(value=default, source="server")
    return Bound(value=override, source="project")


async def show(rooms: Rooms, asked: Asked, params: ConfigLimits) -> LimitsShown:
    del asked
    bounds = rooms.messages.bounds

    async def read(tx: Tx) -> LimitsShown:
        session = await rows.get(tx, params.session_id) if params.session_id is not None else None
        project_id = session.project_id if session is not None else params.project_id
        if project_id is None:
            raise InvalidParams("project_id is missing: say which project, or which session by session_id")
        project = await projects.get(tx, project_id)
        shown = LimitsShown(
            project_id=project.id,
            max_recursion_depth=_bound(project.settings.get("max_recursion_depth"), bounds.max_depth),
            max_agents_per_session=_bound(project.settings.get("max_agents_per_session"), bounds.max_descendants),
            sessions=Bound(value=bounds.sessions, source="server"),
            sessions_per_project=Bound(value=bounds.sessions_per_project, source="server"),
            pending_calls_per_session=Bound(value=PENDING_CALLS_PER_SESSION, source="fixed"),
            queued_messages_per_session=Bound(value=QUEUED_MESSAGES_PER_SESSION, source="fixed"),
        )
        if session is not None:
            spent = await rows.count_descendants(tx, session.root_id)
            shown.session = SessionLeft(
                session_id=session.id,
                depth=session.depth,
                remaining_depth=max(0, session.choices.max_depth - session.depth),
                remaining_agents=max(0, session.choices.max_descendants - spent),
                pending_calls=rooms.exchange.pending_count(session.id),
            )
        return shown

    return await rooms.database.read(read)


OPERATIONS = (
    Operation(
        name="config_limits",
        title="Show limits",
        scope=Scope.READ,
        target=Target.SESSION_OR_PROJECT,
        params=ConfigLimits,
        result=LimitsShown,
        summary="Show the bounds on a project's sessions, each with where it comes from, and what a session has left.",
        run=show,
        writes=False,
    ),
)
