import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from oubliette.server.errors import Conflict
from oubliette.server.projects.premises import Premises
from oubliette.server.storage.database import Tx
from oubliette.server.storage.sqlite import SqliteDatabase
from oubliette.server.tasks import Tasks
from tests.kit.held_database import HeldDatabase


class Rig:
    def __init__(self, database: HeldDatabase, tasks: Tasks) -> None:
        self.database = database
        self.vacated: list[tuple[str, str | None]] = []
        self.premises = Premises(database, tasks, self._vacate)

    async def _vacate(self, project_id: str, workspace_id: str | None) -> None:
        await asyncio.sleep(0)
        self.vacated.append((project_id, workspace_id))


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncGenerator[Rig]:
    database = HeldDatabase(SqliteDatabase(tmp_path / "premises.db"))
    async with Tasks() as tasks, asyncio.timeout(10):
        yield Rig(database, tasks)
    await database.close()


async def was_there(tx: Tx) -> bool:
    return True


async def was_gone(tx: Tx) -> bool:
    return False


async def test_an_id_is_given_again_only_once_the_files_of_the_last_are_out_of_the_way(rig: Rig):
    async def give() -> list[tuple[str, str | None]]:
        async with rig.premises.naming:
            return list(rig.vacated)

    async with asyncio.TaskGroup() as tasks:
        deleting = tasks.create_task(rig.premises.delete(was_there, "p", "w"))
        await rig.database.committed.wait()
        giving = tasks.create_task(give())
        await asyncio.sleep(0.05)
        assert not giving.done()
        rig.database.release()
    assert deleting.result()
    assert giving.result() == [("p", "w")]


async def test_the_files_go_though_whoever_asked_left_after_the_commit(rig: Rig):
    async with asyncio.TaskGroup() as tasks:
        deleting = tasks.create_task(rig.premises.delete(was_there, "p"))
        await rig.database.committed.wait()
        deleting.cancel()
    rig.database.release()
    async with rig.premises.naming:
        assert rig.vacated == [("p", None)]


async def test_what_was_not_there_and_what_was_refused_leaves_every_file_in_its_place(rig: Rig):
    async def refused(tx: Tx) -> bool:
        raise Conflict("a live session")

    rig.database.release()
    assert not await rig.premises.delete(was_gone, "p", "w")
    with pytest.raises(Conflict):
        await rig.premises.delete(refused, "p", "w")
    assert rig.vacated == []
