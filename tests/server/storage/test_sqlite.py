"""What every database promises, and what the embedded one promises beside it."""

import asyncio
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from oubliette.server.errors import NotFound, StorageFailed
from oubliette.server.events.log import EventLog
from oubliette.server.storage.database import Database, Tx, Unit
from oubliette.server.storage.migrations import MIGRATIONS
from oubliette.server.storage.sqlite import Durability, SqliteDatabase, migrate
from oubliette.server.storage.write_ahead_log import WriteAheadLog
from oubliette.wire.events import Delta
from tests.kit.exchange_rig import database

KINDS = ["process", "power", "suspending"]
ROOT = Path(__file__).parents[3]


@pytest.fixture(params=KINDS)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Database]:
    made = database(request.param, tmp_path / "oubliette.db")
    yield made
    await made.close()


async def put(tx: Tx, at: float, operation: str) -> int:
    await tx.run("INSERT INTO audit (at, door, operation, outcome) VALUES (?, 'd', ?, 'ok')", at, operation)
    return round(at)


async def operations(store: Database) -> list[str]:
    return [row[0] for row in await store.read(lambda tx: tx.all("SELECT operation FROM audit ORDER BY id"))]


# -- what every database promises -----------------------------------------------------------------------------------


async def test_a_unit_returns_its_value_after_its_commit(store: Database) -> None:
    assert await store.write(lambda tx: put(tx, 7, "a")) == 7
    assert await operations(store) == ["a"]


async def test_what_a_unit_raises_undoes_it_and_is_raised(store: Database) -> None:
    async def fails(tx: Tx) -> None:
        await put(tx, 1, "undone")
        await tx.add("INSERT INTO audit (at, door, operation, outcome) VALUES (1, 'd', 'undone', 'ok')")
        raise NotFound("no such thing")

    with pytest.raises(NotFound, match="no such thing"):
        await store.write(fails)
    assert await operations(store) == []


async def wrong_sql(tx: Tx) -> None:
    await put(tx, 1, "undone")
    await tx.run("UPDATE no_such_table SET a = 1")


async def wrong_values(tx: Tx) -> None:
    await put(tx, 1, "undone")
    await tx.run("UPDATE audit SET at = ?, door = ?", 1)


async def against_a_constraint(tx: Tx) -> None:
    await put(tx, 1, "undone")
    await tx.add("INSERT INTO audit (at) VALUES (1)")


@pytest.mark.parametrize(
    "unit, error",
    [
        (wrong_sql, sqlite3.OperationalError),
        (wrong_values, sqlite3.ProgrammingError),
        (against_a_constraint, sqlite3.IntegrityError),
    ],
)
async def test_a_unit_that_fails_takes_nobody_of_its_moment_with_it(
    store: Database, unit: Unit[None], error: type[Exception]
) -> None:
    before, failed, after = await asyncio.gather(
        store.write(lambda tx: put(tx, 1, "before")),
        store.write(unit),
        store.write(lambda tx: put(tx, 2, "after")),
        return_exceptions=True,
    )
    assert (before, after) == (1, 2)
    assert isinstance(failed, error)
    assert sorted(await operations(store)) == ["after", "before"]


async def test_a_row_that_was_added_is_there_after_the_commit_with_all_others(store: Database) -> None:
    async def adds(tx: Tx, name: str) -> None:
        await tx.add("INSERT INTO audit (at, door, operation, outcome) VALUES (?, 'd', ?, 'ok')", 1, name)
        await put(tx, 1, name)

    await asyncio.gather(*(store.write(lambda tx, name=f"{number:02}": adds(tx, name)) for number in range(20)))
    assert sorted(await operations(store)) == sorted([f"{number:02}" for number in range(20)] * 2)


async def test_a_read_sees_one_state(store: Database, tmp_path: Path) -> None:
    await store.write(lambda tx: put(tx, 1, "a"))
    other = sqlite3.connect(tmp_path / "oubliette.db", isolation_level=None)

    async def read(tx: Tx) -> list[int]:
        (first,) = await tx.one("SELECT count(*) FROM audit") or (0,)
        if not isinstance(store, SqliteDatabase) or store._durability == "power":
            # Where somebody else may write meanwhile: the writer thread, another server.
            other.execute("INSERT INTO audit (at, door, operation, outcome) VALUES (1, 'd', 'b', 'ok')")
        (second,) = await tx.one("SELECT count(*) FROM audit") or (0,)
        return [first, second]

    assert await store.read(read) == [1, 1]
    other.close()


# -- the embedded database ------------------------------------------------------------------------------------------


@pytest.fixture(params=["process", "power"])
async def embedded(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[SqliteDatabase]:
    made = SqliteDatabase(tmp_path / "oubliette.db", durability=request.param)
    yield made
    await made.close()


async def test_a_unit_that_waits_for_something_else_is_a_bug_and_named_so(embedded: SqliteDatabase) -> None:
    async def waits(tx: Tx) -> None:
        await put(tx, 1, "undone")
        await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="waited for something other"):
        await embedded.write(waits)
    with pytest.raises(RuntimeError, match="waited for something other"):
        await embedded.read(waits)
    assert await embedded.write(lambda tx: put(tx, 1, "fine")) == 1
    assert "fine" in await operations(embedded)


async def test_closing_finishes_what_was_asked_and_refuses_what_comes_after(tmp_path: Path) -> None:
    durabilities: tuple[Durability, ...] = ("process", "power")
    for durability in durabilities:
        path = tmp_path / f"{durability}.db"
        store = SqliteDatabase(path, durability=durability)
        writes = [asyncio.get_running_loop().create_task(store.write(lambda tx: put(tx, 1, "a"))) for _ in range(50)]
        await asyncio.sleep(0)
        await store.close()
        await store.close()  # again is no error
        assert await asyncio.gather(*writes) == [1] * 50
        with pytest.raises(StorageFailed, match="stopping"):
            await store.write(lambda tx: put(tx, 1, "late"))
        with pytest.raises(StorageFailed, match="stopping"):
            await operations(store)
        again = SqliteDatabase(path)
        assert await operations(again) == ["a"] * 50
        await again.close()


async def test_a_writer_that_left_before_the_commit_changes_nothing_for_others(embedded: SqliteDatabase) -> None:
    leaving = asyncio.get_running_loop().create_task(embedded.write(lambda tx: put(tx, 1, "left")))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await embedded.write(lambda tx: put(tx, 2, "stayed")) == 2
    assert "stayed" in await operations(embedded)


async def test_what_is_asked_during_a_sync_shares_the_next(tmp_path: Path) -> None:
    store = SqliteDatabase(tmp_path / "oubliette.db", durability="power")
    committed: list[int] = []
    commit = store._commit
    store._commit = lambda batch: (committed.append(len(batch)), commit(batch))[1]  # type: ignore[method-assign]

    async def writer(number: int) -> None:
        for _ in range(number):  # spread over many ticks
            await asyncio.sleep(0)
        await store.write(lambda tx: put(tx, 1, "a"))

    await asyncio.gather(*(writer(number) for number in range(60)))
    assert sum(committed) == 60
    assert len(committed) < 30
    await store.close()


async def test_an_interruption_in_a_unit_is_told_to_everybody(tmp_path: Path) -> None:
    store = SqliteDatabase(tmp_path / "oubliette.db")

    async def interrupted(tx: Tx) -> None:
        raise asyncio.CancelledError

    other = asyncio.get_running_loop().create_task(store.write(lambda tx: put(tx, 1, "a")))
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    with pytest.raises((StorageFailed, asyncio.CancelledError)):
        async with asyncio.timeout(5):
            await store.write(interrupted)
    with pytest.raises(StorageFailed):
        await other
    assert await store.write(lambda tx: put(tx, 1, "b")) == 1
    assert await operations(store) == ["b"]
    await store.close()


async def test_a_newer_file_and_a_file_that_is_none_are_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "newer.db"
    await SqliteDatabase(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version={len(MIGRATIONS) + 1}")
    connection.close()
    with pytest.raises(StorageFailed, match="newer oubliette"):
        SqliteDatabase(path)
    (tmp_path / "text.db").write_text("not a database at all, whatever it is called" * 40)
    with pytest.raises(StorageFailed, match="cannot be used as the database"):
        SqliteDatabase(tmp_path / "text.db")


async def test_a_migration_that_fails_leaves_the_step_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "oubliette.db"
    await SqliteDatabase(path).close()
    broken = (*MIGRATIONS, ("CREATE TABLE added (a)", "CREATE NONSENSE"))
    monkeypatch.setattr("oubliette.server.storage.sqlite.MIGRATIONS", broken)
    with pytest.raises(StorageFailed):
        SqliteDatabase(path)
    monkeypatch.undo()
    connection = sqlite3.connect(path, isolation_level=None)
    assert connection.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
    assert connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'added'").fetchone() == (0,)
    migrate(connection)
    connection.close()


async def test_events_of_older_files_keep_their_places(tmp_path: Path) -> None:
    path = tmp_path / "oubliette.db"
    connection = sqlite3.connect(path, isolation_level=None)
    for step in MIGRATIONS[:2]:
        for statement in step:
            connection.execute(statement)
    connection.execute("PRAGMA user_version=2")
    for made, (session_id, first, count) in enumerate([("s1", 2, 3), ("s2", 0, 2)]):
        connection.execute(
            "INSERT INTO sessions (id, project_id, workspace_id, owner, state, root_id, depth, settings, next_index,"
            " first_index, event_bytes, created_at, updated_at)"
            " VALUES (?, 'p', 'w', 'o', 'idle', ?, 0, '{}', ?, ?, 7, ?, 0)",
            (session_id, session_id, first + count, first, made),
        )
        for index in range(first, first + count):
            body = b'{"type":"delta","text":"%d"}' % index
            connection.execute("INSERT INTO events VALUES (?, ?, 'delta', 1, ?)", (session_id, index, body))
    connection.close()
    store = SqliteDatabase(path)
    log = EventLog(store)
    page = await log.page("s1", 1)
    assert [(event["index"], event["text"]) for event in page.events] == [(2, "2"), (3, "3"), (4, "4")]
    assert (page.first_index, page.end_index) == (2, 4)
    assert await store.write(lambda tx: log.append(tx, "s2", [Delta(text="new")], 2)) == 2
    assert [event["text"] for event in (await log.page("s2", -1)).events] == ["0", "1", "new"]
    session = await store.read(lambda tx: tx.one("SELECT next_index, event_bytes FROM logs WHERE session_id = 's2'"))
    assert session is not None
    assert session[0] == 3
    await store.close()


# -- a full disk ----------------------------------------------------------------------------------------------------

FULL = textwrap.dedent(
    """
    import asyncio, json, resource, signal, sys
    from pathlib import Path
    from oubliette.server.errors import StorageFailed
    from oubliette.server.storage.sqlite import SqliteDatabase

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    async def put(tx, name, size):
        await tx.run("INSERT INTO audit (at, door, operation, outcome) VALUES (1, 'd', ?, 'ok')", name)
        await tx.add("INSERT INTO process_pieces VALUES (?, 'text', 0, ?)", name, b"x" * size)
        return name

    async def main():
        store = SqliteDatabase(Path(sys.argv[1]), durability=sys.argv[2])
        await store.write(lambda tx: put(tx, "first", 10))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, resource.RLIM_INFINITY))
        sizes = {"small1": 1000, "huge": 4_000_000, "small2": 1000}
        told = await asyncio.gather(
            *(store.write(lambda tx, name=name, size=size: put(tx, name, size)) for name, size in sizes.items()),
            return_exceptions=True,
        )
        kinds = [one if isinstance(one, str) else type(one).__name__ for one in told]
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        later = await store.write(lambda tx: put(tx, "later", 4_000_000))
        await store.close()
        print(json.dumps([*kinds, later]))

    asyncio.run(main())
    """
)


@pytest.mark.parametrize("durability", ["process", "power"])
async def test_a_full_disk_refuses_exactly_what_had_no_room_and_halves_nothing(tmp_path: Path, durability: str) -> None:
    path = tmp_path / "oubliette.db"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        FULL,
        str(path),
        durability,
        env={"PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
    )
    async with asyncio.timeout(30):
        out, _ = await process.communicate()
    assert out.decode().strip() == '["small1", "StorageFailed", "small2", "later"]'
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    kept = ["first", "later", "small1", "small2"]
    assert [row[0] for row in connection.execute("SELECT operation FROM audit ORDER BY 1")] == kept
    assert [row[0] for row in connection.execute("SELECT process_id FROM process_pieces ORDER BY 1")] == kept
    connection.close()


# -- the write-ahead log --------------------------------------------------------------------------------------------


async def test_the_log_stays_short_while_much_is_written(embedded: SqliteDatabase, tmp_path: Path) -> None:
    log = embedded._log
    log._checkpoint_from, log._restart_from = 200_000, 800_000
    largest = 0
    for number in range(1500):
        await embedded.write(
            lambda tx, number=number: tx.run("INSERT INTO events VALUES (?, 'delta', 1, ?)", number, b"x" * 8000)
        )
        largest = max(largest, (tmp_path / "oubliette.db-wal").stat().st_size)
    assert largest < 800_000 + 64 * 3 * 8000 * 2  # what may be written between two looks, and the pages around it
    assert (tmp_path / "oubliette.db").stat().st_size > 8_000_000


def test_a_log_that_cannot_be_copied_now_is_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "oubliette.db"
    writer = sqlite3.connect(path, isolation_level=None, timeout=0)
    writer.execute("PRAGMA journal_mode=WAL")
    writer.execute("PRAGMA wal_autocheckpoint=0")
    writer.execute("CREATE TABLE t (a)")
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM t").fetchall()

    def fails() -> sqlite3.Connection:
        raise sqlite3.OperationalError("unable to open database file")

    log = WriteAheadLog(path, fails, checkpoint_from=0, restart_from=10**9)
    for _ in range(64):
        writer.execute("INSERT INTO t VALUES (1)")
        log.committed(writer)
    log.close()
    assert "was not looked after" in caplog.text
    restarting = WriteAheadLog(path, fails, checkpoint_from=0, restart_from=0)
    for _ in range(64):
        writer.execute("INSERT INTO t VALUES (1)")
        restarting.committed(writer)  # the reader holds an older state: later, then
    reader.close()
    writer.close()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("INSERT INTO t VALUES (1)")
    for _ in range(64):
        restarting.committed(writer)  # a connection that cannot do anything any more
    assert "was not copied" in caplog.text
    other.close()
    restarting.close()


@pytest.mark.parametrize("durability", ["process", "power"])
async def test_reads_of_one_turn_of_the_loop_share_a_state_that_ends_with_it(
    tmp_path: Path, durability: Durability
) -> None:
    path = tmp_path / "oubliette.db"
    store = SqliteDatabase(path, durability=durability)
    beside = sqlite3.connect(path, isolation_level=None)
    assert await operations(store) == []
    beside.execute("INSERT INTO audit (at, door, operation, outcome) VALUES (1, 'd', 'beside', 'ok')")
    assert await operations(store) == [], "nothing has turned yet"
    await store.write(lambda tx: put(tx, 2, "own"))
    assert await operations(store) == ["beside", "own"]
    await asyncio.sleep(0)
    assert beside.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0, "nobody holds an older state"
    beside.close()
    await store.close()
