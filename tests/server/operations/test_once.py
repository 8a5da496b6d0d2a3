import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from oubliette.server.clock import SystemClock
from oubliette.server.errors import CallKeyReused, Conflict, OutcomeUnknown
from oubliette.server.operations.once import KeepOutcome, Once
from oubliette.server.storage.sqlite import SqliteDatabase


@pytest.fixture
async def database(tmp_path: Path) -> AsyncGenerator[SqliteDatabase]:
    opened = SqliteDatabase(tmp_path / "once.db")
    yield opened
    await opened.close()


class Work:
    """Counts how often it ran, and waits where it is told to."""

    def __init__(
        self,
        outcome: bytes = b"1",
        failure: Exception | None = None,
        *,
        effect: tuple[SqliteDatabase, bytes] | None = None,
    ) -> None:
        self.runs = 0
        self.effect = effect
        self.has_effect = asyncio.Event()
        self.outcome = outcome
        self.failure = failure
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def __call__(self, keep: KeepOutcome) -> bytes:
        self.runs += 1
        if self.effect is not None:
            database, told = self.effect
            await database.write(lambda tx: keep(tx, told))
            self.has_effect.set()
        await self.may_end.wait()
        if self.failure is not None:
            raise self.failure
        return self.outcome


async def test_the_same_key_gets_the_stored_outcome_and_nothing_runs_twice(database: SqliteDatabase):
    work = Work(b'{"a":1}')
    for once in (Once(database, SystemClock()), Once(database, SystemClock())):  # the second as after a restart
        assert await once.run("s", "key", "tool", b"{}", work) == b'{"a":1}'
    assert work.runs == 1


async def test_the_same_key_joins_what_runs(database: SqliteDatabase):
    once, work = Once(database, SystemClock()), Work()
    work.may_end.clear()
    async with asyncio.TaskGroup() as tasks:
        both = [tasks.create_task(once.run("s", "key", "tool", b"{}", work)) for _ in range(2)]
        while not work.runs:
            await asyncio.sleep(0)
        work.may_end.set()
    assert [task.result() for task in both] == [b"1", b"1"]
    assert work.runs == 1


@pytest.mark.parametrize(("tool", "arguments"), [("other", b"{}"), ("tool", b'{"b":2}')])
async def test_the_same_key_for_another_call_is_refused(database: SqliteDatabase, tool: str, arguments: bytes):
    once = Once(database, SystemClock())
    await once.run("s", "key", "tool", b"{}", Work())
    with pytest.raises(CallKeyReused):
        await once.run("s", "key", tool, arguments, Work())


async def test_keys_of_different_sessions_have_nothing_to_do_with_each_other(database: SqliteDatabase):
    once, work = Once(database, SystemClock()), Work()
    await once.run("one", "key", "tool", b"{}", work)
    await once.run("other", "key", "tool", b"{}", work)
    assert work.runs == 2


async def test_what_a_crash_cut_off_is_unknown_and_not_run_again(database: SqliteDatabase):
    crashed, work = Once(database, SystemClock()), Work()
    work.may_end.clear()
    task = asyncio.get_running_loop().create_task(crashed.run("s", "key", "tool", b"{}", work))
    while not work.runs:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(OutcomeUnknown, match="Look before you repeat it"):
        await Once(database, SystemClock()).run("s", "key", "tool", b"{}", work)
    assert work.runs == 1


async def test_an_outcome_that_was_kept_with_its_effect_is_there_after_a_crash(database: SqliteDatabase):
    crashed, work = Once(database, SystemClock()), Work(b"all of it", effect=(database, b"what counts"))
    work.may_end.clear()
    task = asyncio.get_running_loop().create_task(crashed.run("s", "key", "tool", b"{}", work))
    await work.has_effect.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await Once(database, SystemClock()).run("s", "key", "tool", b"{}", work) == b"what counts"
    assert work.runs == 1


async def test_what_is_told_in_the_end_is_kept_over_what_was_known_at_the_effect(database: SqliteDatabase):
    work = Work(b"all of it", effect=(database, b"what counts"))
    for once in (Once(database, SystemClock()), Once(database, SystemClock())):
        assert await once.run("s", "key", "tool", b"{}", work) == b"all of it"
    assert work.runs == 1


async def test_who_asks_again_before_the_end_waits_for_it_though_the_effect_is_there(database: SqliteDatabase):
    once, work = Once(database, SystemClock()), Work(b"all of it", effect=(database, b"what counts"))
    work.may_end.clear()
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(once.run("s", "key", "tool", b"{}", work))
        await work.has_effect.wait()
        second = tasks.create_task(once.run("s", "key", "tool", b"{}", work))
        work.may_end.set()
    assert [first.result(), second.result()] == [b"all of it", b"all of it"]


@pytest.mark.parametrize("has_effect_first", [True, False])
async def test_a_secret_outcome_is_told_once_and_kept_nowhere(database: SqliteDatabase, has_effect_first: bool):
    work = Work(b"the secret", effect=(database, b"the secret") if has_effect_first else None)
    once = Once(database, SystemClock())
    assert await once.run("s", "key", "tool", b"{}", work, is_secret=True) == b"the secret"
    assert await database.read(lambda tx: tx.all("SELECT state, outcome FROM calls")) == [("done", None)]
    with pytest.raises(OutcomeUnknown, match="holds a secret"):
        await once.run("s", "key", "tool", b"{}", work, is_secret=True)
    assert work.runs == 1


async def test_a_failure_behind_the_effect_does_not_hide_it(database: SqliteDatabase):
    once, work = Once(database, SystemClock()), Work(failure=ValueError("later"), effect=(database, b"what counts"))
    for _ in range(2):
        assert await once.run("s", "key", "tool", b"{}", work) == b"what counts"
    assert work.runs == 1


async def test_a_failure_behind_a_secret_effect_is_told_and_the_key_is_not_free(database: SqliteDatabase):
    once, work = Once(database, SystemClock()), Work(failure=Conflict("later"), effect=(database, b"the secret"))
    with pytest.raises(Conflict):
        await once.run("s", "key", "tool", b"{}", work, is_secret=True)
    with pytest.raises(OutcomeUnknown, match="holds a secret"):
        await once.run("s", "key", "tool", b"{}", work, is_secret=True)
    assert work.runs == 1


async def test_what_was_refused_changed_nothing_and_may_be_tried_again(database: SqliteDatabase):
    once = Once(database, SystemClock())
    with pytest.raises(Conflict):
        await once.run("s", "key", "tool", b"{}", Work(failure=Conflict("no")))
    assert await once.run("s", "key", "tool", b"{}", Work(b"2")) == b"2"
