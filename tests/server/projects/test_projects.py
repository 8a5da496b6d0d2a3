from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path

import pytest

from oubliette.server.errors import Conflict, InvalidParams, NotFound
from oubliette.server.projects import projects
from oubliette.server.projects.projects import Project, Resolved
from oubliette.server.storage.sqlite import SqliteDatabase

FREE = "11111111-1111-4111-8111-111111111111"


@pytest.fixture
async def database(tmp_path: Path) -> AsyncGenerator[SqliteDatabase]:
    opened = SqliteDatabase(tmp_path / "projects.db")
    yield opened
    await opened.close()


async def made(database: SqliteDatabase, name: str = "p", at: float = 1.0) -> Project:
    return await database.write(
        lambda tx: projects.create(tx, name=name, description="", settings={}, creator="prn", now=at)
    )


async def resolve(database: SqliteDatabase, project: Project, named: str | None, create: bool) -> Resolved:
    return await database.write(
        lambda tx: projects.resolve_workspace(tx, project, named, create_missing=create, now=2.0)
    )


async def test_a_project_comes_with_its_default_workspace(database: SqliteDatabase):
    project = await made(database)
    (workspace,) = await database.read(lambda tx: projects.workspaces(tx, project.id, limit=10, offset=0))
    assert (workspace.id, workspace.source) == (project.default_workspace_id, "project_create")


async def test_the_resolution_table_holds(database: SqliteDatabase):
    project = await made(database)
    assert (await resolve(database, project, None, False)).workspace.id == project.default_workspace_id
    fresh = await resolve(database, project, None, True)
    assert fresh.created
    assert fresh.workspace.id != project.default_workspace_id
    for create in (False, True):
        found = await resolve(database, project, fresh.workspace.id, create)
        assert (found.workspace.id, found.created) == (fresh.workspace.id, False)
    with pytest.raises(NotFound, match="not found"):
        await resolve(database, project, FREE, False)
    assert (await resolve(database, project, FREE, True)).created


@pytest.mark.parametrize("named", ["../x", "w", FREE + "0", "x" * 10_000])
async def test_a_workspace_is_made_only_under_a_uuid(database: SqliteDatabase, named: str):
    project = await made(database)
    with pytest.raises(InvalidParams, match="not a UUID"):
        await resolve(database, project, named, True)


async def test_a_workspace_of_another_project_is_not_found_and_not_taken(database: SqliteDatabase):
    one, other = await made(database), await made(database)
    with pytest.raises(NotFound):
        await resolve(database, one, other.default_workspace_id, False)
    with pytest.raises(InvalidParams, match="taken"):
        await resolve(database, one, other.default_workspace_id, True)


async def test_lists_are_newest_first_filtered_and_paged(database: SqliteDatabase):
    for at, name in enumerate(("Alpha", "beta", "alphabet")):
        await made(database, name, float(at))

    async def names(contains: str, limit: int = 10, offset: int = 0) -> list[str]:
        found = await database.read(
            lambda tx: projects.listed(tx, name_contains=contains, only=None, limit=limit, offset=offset)
        )
        return [project.name for project in found]

    assert await names("ALPHA") == ["alphabet", "Alpha"]
    assert await names("") == ["alphabet", "beta", "Alpha"]
    assert await names("", limit=1, offset=1) == ["beta"]
    assert await names("%") == []


@pytest.mark.parametrize(("name", "contains"), [("ÄPFEL", "äpfel"), ("straße", "STRASSE"), ("Όμηρος", "ΌΜΗΡΟΣ")])
async def test_case_does_not_matter_in_any_script(database: SqliteDatabase, name: str, contains: str):
    project = await made(database, name)
    for only in (None, project.id):
        found = await database.read(partial(projects.listed, name_contains=contains, only=only, limit=10, offset=0))
        assert found == [project]
    assert not await database.read(partial(projects.listed, name_contains=contains, only="x", limit=10, offset=0))


async def test_a_name_is_found_in_pages_among_any_number_of_projects(
    database: SqliteDatabase, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(projects, "NAMES_READ", 3)
    ours = [await made(database, f"p {number}", at=number % 5) for number in range(20)]
    wanted = sorted(ours, key=lambda project: (-project.created_at, project.id))
    found: list[Project] = []
    for offset in range(0, 24, 4):
        found += await database.read(partial(projects.listed, name_contains="P ", only=None, limit=4, offset=offset))
    assert found == wanted


async def test_the_default_workspace_stays_and_deleting_another_twice_is_no_error(database: SqliteDatabase):
    project = await made(database)
    extra = (await resolve(database, project, None, True)).workspace.id
    with pytest.raises(Conflict, match="default workspace"):
        await database.write(lambda tx: projects.delete_workspace(tx, project, project.default_workspace_id))
    assert await database.write(lambda tx: projects.delete_workspace(tx, project, extra))
    assert not await database.write(lambda tx: projects.delete_workspace(tx, project, extra))


async def test_a_project_is_deleted_whole(database: SqliteDatabase):
    project = await made(database)
    await database.write(lambda tx: projects.delete(tx, project.id))
    with pytest.raises(NotFound, match="project_list shows them"):
        await database.read(lambda tx: projects.get(tx, project.id))
    assert await database.read(lambda tx: projects.workspaces(tx, project.id, limit=10, offset=0)) == []
