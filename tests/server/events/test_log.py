"""The log: dense whoever writes and whatever fails, paged without a loss, purged from its old end."""

import asyncio
import sqlite3
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oubliette.server.errors import InvalidParams, NotFound, Purged
from oubliette.server.events.log import EventLog
from oubliette.server.storage.database import Database, Tx
from oubliette.server.storage.sqlite import SqliteDatabase
from oubliette.wire.events import Delta, Message
from tests.kit.exchange_rig import database

SESSIONS = ["s1", "s2"]


async def with_sessions(store: Database) -> Database:
    async def write(tx: Tx) -> None:
        for session_id in SESSIONS:
            await tx.run(
                "INSERT INTO sessions (id, project_id, workspace_id, owner, state, root_id, depth, settings,"
                " created_at, updated_at) VALUES (?, 'p', 'w', 'o', 'running', ?, 0, '{}', 0, 0)",
                session_id,
                session_id,
            )
            await EventLog.begin(tx, session_id)

    await store.write(write)
    return store


@pytest.fixture(params=["process", "power", "suspending"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Database]:
    made = database(request.param, tmp_path / "oubliette.db")
    yield await with_sessions(made)
    await made.close()


async def say(store: Database, log: EventLog, *texts: str, session_id: str = "s1") -> int:
    said = [Message(text=text) for text in texts]
    return await store.write(lambda tx: log.append(tx, session_id, said, 5.0))


async def everything(log: EventLog, session_id: str = "s1", **bounds: int) -> list[dict[str, Any]]:
    """All that is kept, page by page."""
    try:
        since = -1
        page = await log.page(session_id, since, **bounds)
    except Purged as purged:
        since = purged.details["oldest_index"] - 1
        page = await log.page(session_id, since, **bounds)
    found = list(page.events)
    while page.last_index < page.end_index:
        assert page.last_index > since, "a page always gets on"
        since = page.last_index
        page = await log.page(session_id, since, **bounds)
        found.extend(page.events)
    return found


async def test_an_event_is_one_flat_object(store: Database) -> None:
    log = EventLog(store)
    assert await say(store, log, "hi") == 0
    (event,) = await everything(log)
    assert event == {"session_id": "s1", "index": 0, "at": 5.0, "type": "message", "text": "hi"}


async def test_indices_are_dense_whoever_writes_and_whatever_fails(store: Database) -> None:
    log = EventLog(store)

    async def fails(tx: Tx) -> None:
        await log.append(tx, "s1", [Message(text="undone"), Message(text="undone")], 1.0)
        raise NotFound("rolled back")

    async def writer(number: int) -> int | None:
        if number % 3 == 0:
            with pytest.raises(NotFound):
                await store.write(fails)
            return None
        return await say(store, log, f"{number}", session_id=SESSIONS[number % 2])

    told = await asyncio.gather(*(writer(number) for number in range(60)))
    for position, session_id in enumerate(SESSIONS):
        events = await everything(log, session_id)
        assert [event["index"] for event in events] == list(range(20))
        assert "undone" not in {event["text"] for event in events}
        # The index that a writer was told is that of its event.
        mine = {index: f"{number}" for number, index in enumerate(told) if index is not None and number % 2 == position}
        assert {event["index"]: event["text"] for event in events} == mine


async def test_several_events_of_one_unit_stay_together_and_in_order(store: Database) -> None:
    log = EventLog(store)
    ends = await asyncio.gather(*(say(store, log, f"{n}a", f"{n}b", f"{n}c") for n in range(10)))
    texts = [event["text"] for event in await everything(log)]
    assert sorted(ends) == [2, 5, 8, 11, 14, 17, 20, 23, 26, 29]
    assert all(texts[at][:-1] == texts[at + 2][:-1] and texts[at][-1] == "a" for at in range(0, 30, 3))


async def test_appending_nothing_tells_where_the_log_ends(store: Database) -> None:
    log = EventLog(store)
    assert await store.write(lambda tx: log.append(tx, "s1", (), 1.0)) == -1
    await say(store, log, "a", "b")
    assert await store.write(lambda tx: log.append(tx, "s1", (), 1.0)) == 1
    assert await log.end_index("s1") == 1


async def test_an_unknown_session_has_no_log(store: Database) -> None:
    log = EventLog(store)
    for ask in (log.page("none", -1), log.end_index("none"), say(store, log, "a", session_id="none")):
        with pytest.raises(NotFound, match="no session none"):
            await ask


async def test_pages_lose_nothing_at_any_size(store: Database) -> None:
    log = EventLog(store)
    for number in range(0, 700, 100):
        await say(store, log, *("x" * (n % 97) for n in range(number, number + 100)))
    whole = await everything(log)
    assert [event["index"] for event in whole] == list(range(700))
    for bounds in ({"max_events": 1}, {"max_events": 7}, {"max_bytes": 1}, {"max_bytes": 500, "max_events": 50}):
        assert await everything(log, "s1", **bounds) == whole
    assert len((await log.page("s1", -1, max_events=10_000)).events) == 500


async def test_a_page_is_bounded_by_bytes_and_never_empty(store: Database) -> None:
    log = EventLog(store)
    await say(store, log, *["y" * 1000] * 20)
    assert len((await log.page("s1", -1, max_bytes=5500)).events) == 5
    assert len((await log.page("s1", 16, max_bytes=1500)).events) == 1
    assert len((await log.page("s1", -1, max_bytes=1)).events) == 1


async def test_an_outline_says_of_what_a_page_would_be(store: Database) -> None:
    log = EventLog(store)
    await say(store, log, *["y" * 1000] * 3)
    outline = await log.outline("s1", 0, max_events=1)
    assert ([index for index, _, _ in outline.events], outline.end_index) == ([1], 2)
    assert 1000 < outline.events[0][2] < 1100
    assert (await log.outline("s1", 2, max_events=1)).events == []
    with pytest.raises(InvalidParams, match="ahead of the log"):
        await log.outline("s1", 3, max_events=1)


async def test_asking_beyond_the_end_is_an_error_and_at_the_end_is_none(store: Database) -> None:
    log = EventLog(store)
    await say(store, log, "a")
    page = await log.page("s1", 0)
    assert (page.events, page.last_index, page.end_index) == ([], 0, 0)
    for ahead in (1, 2**80):
        with pytest.raises(InvalidParams, match="ahead of the log, which ends at 0"):
            await log.page("s1", ahead)
    assert len((await log.page("s1", -(2**80))).events) == 1


async def test_beyond_the_bound_the_oldest_go_and_who_asks_is_told_the_oldest(store: Database) -> None:
    log = EventLog(store, events_kept=100)
    for number in range(300):
        await say(store, log, f"{number}")
    with pytest.raises(Purged, match="oldest available") as purged:
        await log.page("s1", -1)
    oldest = purged.value.details["oldest_index"]
    assert 300 - 100 - 64 <= oldest <= 200
    kept = await everything(log)
    assert [event["text"] for event in kept] == [f"{number}" for number in range(oldest, 300)]
    assert (await log.page("s1", oldest - 1)).first_index == oldest


async def test_the_bytes_of_a_log_are_bounded_and_the_last_event_stays(store: Database) -> None:
    log = EventLog(store, bytes_kept=10_000)
    for _ in range(200):
        await say(store, log, "z" * 900)
    kept = await everything(log)
    assert 1 <= len(kept) <= 13
    assert kept[-1]["index"] == 199
    await say(store, log, "large" * 10_000)
    await say(store, log, "larger" * 10_000)
    assert [event["index"] for event in await everything(log)] == [201]


async def test_a_bound_that_was_lowered_is_reached_in_steps(store: Database) -> None:
    await say(store, EventLog(store), *("a" for _ in range(1500)))
    log = EventLog(store, events_kept=10)
    for _ in range(4):
        await say(store, log, "b")
    assert len(await everything(log)) <= 10 + 4


async def test_one_event_is_two_statements(tmp_path: Path) -> None:
    store = SqliteDatabase(tmp_path / "oubliette.db")
    await with_sessions(store)
    seen: list[str] = []
    store._connection.set_trace_callback(seen.append)
    await say(store, EventLog(store), "a")
    store._connection.set_trace_callback(None)
    assert [statement.split()[0] for statement in seen] == ["BEGIN", "UPDATE", "INSERT", "COMMIT"]
    await store.close()


async def test_large_events_are_not_read_to_be_left_out(tmp_path: Path) -> None:
    store = SqliteDatabase(tmp_path / "oubliette.db")
    await with_sessions(store)
    log = EventLog(store)
    await say(store, log, *["x" * 300_000] * 20)
    read: list[int] = []
    store._reader.row_factory = lambda cursor, row: (
        read.append(sum(len(v) for v in row if isinstance(v, bytes))),
        row,
    )[1]
    assert len((await log.page("s1", -1)).events) == 3
    assert sum(read) < 1_000_000
    await store.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batches=st.lists(st.lists(st.integers(0, 400), min_size=1, max_size=30), min_size=1, max_size=20),
    events_kept=st.integers(1, 120),
    bytes_kept=st.integers(1, 30_000),
)
def test_whatever_is_purged_the_rest_is_whole(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[int]], events_kept: int, bytes_kept: int
) -> None:
    async def run() -> None:
        path = tmp_path_factory.mktemp("log") / "oubliette.db"
        store = SqliteDatabase(path)
        await with_sessions(store)
        log = EventLog(store, events_kept=events_kept, bytes_kept=bytes_kept)
        written: list[int] = []
        for batch in batches:
            said = [Delta(text="d" * size) for size in batch]
            await store.write(lambda tx, said=said: log.append(tx, "s1", said, 1.0))
            written.extend(batch)
        kept = await everything(log)
        first = kept[0]["index"]
        assert [event["index"] for event in kept] == list(range(first, len(written)))
        assert [len(event["text"]) for event in kept] == written[first:]
        await store.close()
        with sqlite3.connect(path) as connection:
            rows = connection.execute("SELECT count(*), coalesce(sum(length(body)), 0) FROM events").fetchone()
            counted = connection.execute(
                "SELECT next_index - first_index, event_bytes FROM logs WHERE session_id = 's1'"
            ).fetchone()
        connection.close()
        assert rows == counted

    asyncio.run(run())
