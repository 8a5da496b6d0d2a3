"""Projects and their workspaces, as rows; a workspace's folder is its runtime's to make."""

import json
from dataclasses import dataclass
from typing import Any

from oubliette.server import ids
from oubliette.server.errors import Conflict, InvalidParams, NotFound
from oubliette.server.events import log
from oubliette.server.storage.database import Row, Tx

NAMES_READ = 1000  # at a time, where one is looked for
_PROJECT = "id, name, description, settings, default_workspace_id, creator, created_at"
_WORKSPACE = "id, project_id, created_at, last_session_at, external_id, source"


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    id: str
    name: str
    description: str
    settings: dict[str, Any]
    default_workspace_id: str
    creator: str
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    id: str
    project_id: str
    created_at: float
    last_session_at: float | None
    external_id: str | None
    source: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The workspace that a message goes to, and whether it was made for it."""

    workspace: Workspace
    created: bool


def _project(row: Row) -> Project:
    return Project(
        id=row[0],
        name=row[1],
        description=row[2],
        settings=json.loads(row[3]),
        default_workspace_id=row[4],
        creator=row[5],
        created_at=row[6],
    )


def _workspace(row: Row) -> Workspace:
    return Workspace(
        id=row[0], project_id=row[1], created_at=row[2], last_session_at=row[3], external_id=row[4], source=row[5]
    )


async def create(tx: Tx, *, name: str, description: str, settings: dict[str, Any], creator: str, now: float) -> Project:
    """Make a project and its default workspace. Names need not be unique."""
    project = Project(
        id=ids.new_uuid(),
        name=name,
        description=description,
        settings=settings,
        default_workspace_id=ids.new_uuid(),
        creator=creator,
        created_at=now,
    )
    await tx.run(
        f"INSERT INTO projects ({_PROJECT}) VALUES (?, ?, ?, ?, ?, ?, ?)",  # noqa: S608
        project.id,
        name,
        description,
        json.dumps(settings),
        project.default_workspace_id,
        creator,
        now,
    )
    await add_workspace(tx, project.id, project.default_workspace_id, now=now, source="project_create")
    return project


async def get(tx: Tx, project_id: str) -> Project:
    row = await tx.one(f"SELECT {_PROJECT} FROM projects WHERE id = ?", project_id)  # noqa: S608
    if row is None:
        raise NotFound(f"no project {project_id!r}: project_list shows them")
    return _project(row)


async def listed(tx: Tx, *, name_contains: str, only: str | None, limit: int, offset: int) -> list[Project]:
    """Newest first; `only` narrows to one project, for a token that is narrowed to it."""
    if name_contains:
        named = await _named(tx, name_contains, only, offset + limit)
        return [await get(tx, one) for one in named[offset:]]
    rows = await tx.all(
        f"SELECT {_PROJECT} FROM projects WHERE (? IS NULL OR id = ?)"  # noqa: S608
        " ORDER BY created_at DESC, id LIMIT ? OFFSET ?",
        only,
        only,
        limit,
        offset,
    )
    return [_project(row) for row in rows]


async def _named(tx: Tx, name_contains: str, only: str | None, count: int) -> list[str]:
    """The newest projects with this in their names. Databases differ in what case is: ours is Unicode's."""
    wanted = name_contains.casefold()
    found: list[tuple[float, str]] = []
    last = ""
    while names := await tx.all(
        "SELECT id, name, created_at FROM projects WHERE id > ? AND (? IS NULL OR id = ?) ORDER BY id LIMIT ?",
        last,
        only,
        only,
        NAMES_READ,
    ):
        last = names[-1][0]
        matching = [(-created_at, one) for one, name, created_at in names if wanted in name.casefold()]
        found = sorted(found + matching)[:count]
    return [one for _, one in found]


async def empty(tx: Tx, project_id: str, limit: int) -> int:
    """Let so many rows of what a project's sessions left go; how many went. Raises `Conflict` where one lives."""
    await _check_idle(tx, project_id)
    sessions = "SELECT id FROM sessions WHERE project_id = ?"
    gone = await log.empty(tx, sessions, project_id, limit=limit)
    if gone:
        return gone
    for table, key in (("calls", "request_id"), ("turns", "number")):
        gone = await tx.run(
            f"DELETE FROM {table} WHERE (session_id, {key}) IN"  # noqa: S608
            f" (SELECT session_id, {key} FROM {table} WHERE session_id IN ({sessions}) LIMIT ?)",
            project_id,
            limit,
        )
        if gone:
            return gone
    return 0


async def delete(tx: Tx, project_id: str) -> None:
    """Delete a project that has no live session, with all its records; `empty` goes before it, a bit at a time."""
    await _check_idle(tx, project_id)
    sessions = "SELECT id FROM sessions WHERE project_id = ?"
    processes = f"SELECT id FROM processes WHERE session_id IN ({sessions})"  # noqa: S608
    for table in ("process_input", "process_pieces"):
        await tx.run(f"DELETE FROM {table} WHERE process_id IN ({processes})", project_id)  # noqa: S608
    await log.empty(tx, sessions, project_id, limit=log.PLACES)
    for table in ("logs", "turns", "calls", "processes", "boxes", "tokens"):
        await tx.run(f"DELETE FROM {table} WHERE session_id IN ({sessions})", project_id)  # noqa: S608
    await tx.run("DELETE FROM sessions WHERE project_id = ?", project_id)
    await tx.run("DELETE FROM workspaces WHERE project_id = ?", project_id)
    await tx.run("DELETE FROM projects WHERE id = ?", project_id)


async def _check_idle(tx: Tx, project_id: str) -> None:
    await get(tx, project_id)
    live = await tx.one(
        "SELECT id FROM sessions WHERE project_id = ? AND ended_at IS NULL ORDER BY created_at LIMIT 1", project_id
    )
    if live is not None:
        raise Conflict(f"project {project_id} has a live session ({live[0]}): end it with session_end first")


async def add_workspace(
    tx: Tx,
    project_id: str,
    workspace_id: str,
    *,
    now: float,
    external_id: str | None = None,
    source: str | None = None,
) -> Workspace:
    await tx.run(
        "INSERT INTO workspaces (id, project_id, created_at, external_id, source) VALUES (?, ?, ?, ?, ?)",
        workspace_id,
        project_id,
        now,
        external_id,
        source,
    )
    return Workspace(
        id=workspace_id,
        project_id=project_id,
        created_at=now,
        last_session_at=None,
        external_id=external_id,
        source=source,
    )


async def find_workspace(tx: Tx, project_id: str, workspace_id: str) -> Workspace | None:
    row = await tx.one(
        f"SELECT {_WORKSPACE} FROM workspaces WHERE id = ? AND project_id = ?",  # noqa: S608
        workspace_id,
        project_id,
    )
    return _workspace(row) if row is not None else None


async def resolve_workspace(
    tx: Tx,
    project: Project,
    workspace_id: str | None,
    *,
    create_missing: bool,
    now: float,
    external_id: str | None = None,
    source: str | None = None,
) -> Resolved:
    """Which workspace a message means.

    | workspace_id | create_workspace | outcome |
    | --- | --- | --- |
    | none | false | the default workspace |
    | none | true | a new one |
    | exists | either | that one |
    | missing | false | an error |
    | missing | true | a new one with this id, which must be a UUID |
    """
    wanted = workspace_id or (None if create_missing else project.default_workspace_id)
    if wanted is not None:
        found = await find_workspace(tx, project.id, wanted)
        if found is not None:
            return Resolved(workspace=found, created=False)
        if not create_missing:
            raise NotFound(f"workspace {wanted!r} not found in project {project.id}: workspace_list shows them")
        if not ids.is_uuid(wanted):
            raise InvalidParams(f"workspace_id {wanted!r} is not a UUID, so no workspace can be created with it")
        if await tx.one("SELECT 1 FROM workspaces WHERE id = ?", wanted) is not None:
            raise InvalidParams(f"workspace_id {wanted!r} is taken: choose another UUID")
    made = await add_workspace(
        tx, project.id, wanted or ids.new_uuid(), now=now, external_id=external_id, source=source
    )
    return Resolved(workspace=made, created=True)


async def workspaces(tx: Tx, project_id: str, *, limit: int, offset: int) -> list[Workspace]:
    rows = await tx.all(
        f"SELECT {_WORKSPACE} FROM workspaces WHERE project_id = ? ORDER BY created_at, id LIMIT ? OFFSET ?",  # noqa: S608
        project_id,
        limit,
        offset,
    )
    return [_workspace(row) for row in rows]


async def every_workspace(tx: Tx) -> list[tuple[str, str]]:
    """Each there is: its project and its own id."""
    return [(row[0], row[1]) for row in await tx.all("SELECT project_id, id FROM workspaces")]


async def touch_workspace(tx: Tx, workspace_id: str, now: float) -> None:
    await tx.run("UPDATE workspaces SET last_session_at = ? WHERE id = ?", now, workspace_id)


async def delete_workspace(tx: Tx, project: Project, workspace_id: str) -> bool:
    """Delete a workspace's record; False where it was gone already."""
    if workspace_id == project.default_workspace_id:
        raise Conflict("the default workspace lives as long as its project")
    live = await tx.one(
        "SELECT id FROM sessions WHERE workspace_id = ? AND ended_at IS NULL ORDER BY created_at LIMIT 1", workspace_id
    )
    if live is not None:
        raise Conflict(f"workspace {workspace_id} has a live session ({live[0]}): end it with session_end first")
    return await tx.run("DELETE FROM workspaces WHERE id = ? AND project_id = ?", workspace_id, project.id) == 1
