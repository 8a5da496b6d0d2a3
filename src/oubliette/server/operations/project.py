"""Operations on projects and workspaces."""

from typing import Annotated

import msgspec
from msgspec import Meta

from oubliette.server import audit
from oubliette.server.errors import InvalidParams
from oubliette.server.limits import BULK_ROWS, NAME_CHARS, TEXT_CHARS
from oubliette.server.operations.choices import ChosenAutonomy, Limit, Offset
from oubliette.server.operations.operation import Asked, Operation, Rooms, Target
from oubliette.server.projects import projects
from oubliette.server.projects.projects import Project, Workspace
from oubliette.server.sessions.messages import AUTONOMY
from oubliette.server.storage.database import Tx
from oubliette.server.tokens import tokens
from oubliette.server.tokens.token import Scope

ProjectId = Annotated[str, Meta(description="The project's id.")]


class ProjectCreate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=NAME_CHARS, description="For people; need not be unique.")]
    description: Annotated[str, Meta(max_length=TEXT_CHARS)] = ""
    autonomy: ChosenAutonomy | None = None
    max_recursion_depth: (
        Annotated[int, Meta(ge=0, description="How deep its sessions may start sessions, within the server's bound.")]
        | None
    ) = None
    max_agents_per_session: (
        Annotated[int, Meta(ge=0, description="How many sessions may descend from one, within the server's bound.")]
        | None
    ) = None


class ProjectShown(msgspec.Struct, kw_only=True):
    id: str
    name: str
    description: str
    default_workspace_id: str
    created_at: float
    autonomy: str | None = None
    max_recursion_depth: int | None = None
    max_agents_per_session: int | None = None


class ProjectNamed(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    project_id: ProjectId


class ProjectList(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name_contains: Annotated[str, Meta(max_length=NAME_CHARS, description="Case does not matter.")] = ""
    limit: Limit = 50
    offset: Offset = 0


class ProjectsShown(msgspec.Struct, kw_only=True):
    projects: list[ProjectShown]


class Deleted(msgspec.Struct, kw_only=True):
    id: str
    deleted: bool


class WorkspaceList(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    project_id: ProjectId
    limit: Limit = 50
    offset: Offset = 0


class WorkspaceShown(msgspec.Struct, kw_only=True):
    id: str
    created_at: float
    last_session_at: float | None
    external_id: str | None
    source: str | None
    is_default: bool


class WorkspacesShown(msgspec.Struct, kw_only=True):
    workspaces: list[WorkspaceShown]


class WorkspaceDelete(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    project_id: ProjectId
    workspace_id: str


def _shown(project: Project) -> ProjectShown:
    return ProjectShown(
        id=project.id,
        name=project.name,
        description=project.description,
        default_workspace_id=project.default_workspace_id,
        created_at=project.created_at,
        **project.settings,
    )


def _check(name: str, wanted: int | None, bound: int) -> None:
    if wanted is not None and wanted > bound:
        raise InvalidParams(f"{name} {wanted} is more than this server's bound, which is {bound}")


async def create(rooms: Rooms, asked: Asked, params: ProjectCreate) -> ProjectShown:
    now = rooms.clock.now()
    bounds = rooms.messages.bounds
    _check("max_recursion_depth", params.max_recursion_depth, bounds.max_depth)
    _check("max_agents_per_session", params.max_agents_per_session, bounds.max_descendants)
    autonomy = params.autonomy
    if asked.actor.session_id is not None:
        # What is configured out of a box allows no more than that box.
        inside = await rooms.sessions.get(asked.actor.session_id)
        autonomy = min(autonomy or "medium", inside.choices.autonomy, key=AUTONOMY.index)
    chosen = {
        "autonomy": autonomy,
        "max_recursion_depth": params.max_recursion_depth,
        "max_agents_per_session": params.max_agents_per_session,
    }
    settings = {name: value for name, value in chosen.items() if value is not None}

    async def write(tx: Tx) -> ProjectShown:
        project = await projects.create(
            tx,
            name=params.name,
            description=params.description,
            settings=settings,
            creator=asked.actor.principal,
            now=now,
        )
        await audit.write(tx, now, asked.entry("project_create", project.id))
        shown = _shown(project)
        await asked.keep(tx, shown)
        return shown

    return await rooms.database.write(write)


async def get(rooms: Rooms, asked: Asked, params: ProjectNamed) -> ProjectShown:
    del asked
    return _shown(await rooms.database.read(lambda tx: projects.get(tx, params.project_id)))


async def listed(rooms: Rooms, asked: Asked, params: ProjectList) -> ProjectsShown:
    found = await rooms.database.read(
        lambda tx: projects.listed(
            tx,
            name_contains=params.name_contains,
            only=asked.actor.project_id,
            limit=params.limit,
            offset=params.offset,
        )
    )
    return ProjectsShown(projects=[_shown(project) for project in found])


async def delete(rooms: Rooms, asked: Asked, params: ProjectNamed) -> Deleted:
    now = rooms.clock.now()
    deleted = Deleted(id=params.project_id, deleted=True)

    async def begin(tx: Tx) -> int:
        gone = await projects.empty(tx, params.project_id, BULK_ROWS)
        if gone:
            # What goes before the last commit is told of, though the server may not live to make that.
            await audit.write(tx, now, asked.entry("project_delete", params.project_id, outcome="begun"))
        return gone

    gone = await rooms.database.write(begin)
    while gone:  # nobody waits on the loop while a large log goes
        gone = await rooms.database.write(lambda tx: projects.empty(tx, params.project_id, BULK_ROWS))

    async def write(tx: Tx) -> bool:
        await projects.delete(tx, params.project_id)
        await tokens.revoke_narrowed(tx, params.project_id, now)
        await audit.write(tx, now, asked.entry("project_delete", params.project_id))
        await asked.keep(tx, deleted)
        return True

    await rooms.premises.delete(write, params.project_id)
    return deleted


def _workspace_shown(workspace: Workspace, project: Project) -> WorkspaceShown:
    return WorkspaceShown(
        id=workspace.id,
        created_at=workspace.created_at,
        last_session_at=workspace.last_session_at,
        external_id=workspace.external_id,
        source=workspace.source,
        is_default=workspace.id == project.default_workspace_id,
    )


async def workspace_list(rooms: Rooms, asked: Asked, params: WorkspaceList) -> WorkspacesShown:
    del asked

    async def read(tx: Tx) -> list[WorkspaceShown]:
        project = await projects.get(tx, params.project_id)
        found = await projects.workspaces(tx, project.id, limit=params.limit, offset=params.offset)
        return [_workspace_shown(workspace, project) for workspace in found]

    return WorkspacesShown(workspaces=await rooms.database.read(read))


async def workspace_delete(rooms: Rooms, asked: Asked, params: WorkspaceDelete) -> Deleted:
    now = rooms.clock.now()

    async def write(tx: Tx) -> bool:
        project = await projects.get(tx, params.project_id)
        was_there = await projects.delete_workspace(tx, project, params.workspace_id)
        await audit.write(tx, now, asked.entry("workspace_delete", params.workspace_id))
        await asked.keep(tx, Deleted(id=params.workspace_id, deleted=was_there))
        return was_there

    was_there = await rooms.premises.delete(write, params.project_id, params.workspace_id)
    return Deleted(id=params.workspace_id, deleted=was_there)


OPERATIONS = (
    Operation(
        name="project_create",
        title="Create a project",
        scope=Scope.WRITE,
        target=Target.NOTHING,
        everywhere=True,
        params=ProjectCreate,
        result=ProjectShown,
        summary="Create a project: a name, bounds for its sessions, and a default workspace.",
        run=create,
        writes=True,
    ),
    Operation(
        name="project_list",
        title="List projects",
        scope=Scope.READ,
        target=Target.NOTHING,
        params=ProjectList,
        result=ProjectsShown,
        summary="List projects, newest first.",
        run=listed,
        writes=False,
    ),
    Operation(
        name="project_get",
        title="Show a project",
        scope=Scope.READ,
        target=Target.PROJECT,
        params=ProjectNamed,
        result=ProjectShown,
        summary="Show one project with its settings.",
        run=get,
        writes=False,
    ),
    Operation(
        name="project_delete",
        title="Delete a project",
        scope=Scope.WRITE,
        target=Target.PROJECT,
        params=ProjectNamed,
        result=Deleted,
        summary="Delete a project with its workspaces' files, its sessions' records and the tokens narrowed to it."
        " Refused while a session is live.",
        run=delete,
        writes=True,
        destructive=True,
        derived=False,
    ),
    Operation(
        name="workspace_list",
        title="List workspaces",
        scope=Scope.READ,
        target=Target.PROJECT,
        params=WorkspaceList,
        result=WorkspacesShown,
        summary="List a project's workspaces, oldest first.",
        run=workspace_list,
        writes=False,
    ),
    Operation(
        name="workspace_delete",
        title="Delete a workspace",
        scope=Scope.WRITE,
        target=Target.PROJECT,
        params=WorkspaceDelete,
        result=Deleted,
        summary="Delete a workspace and its files; one that is gone already is no error. Never the default one.",
        run=workspace_delete,
        writes=True,
        destructive=True,
    ),
)
