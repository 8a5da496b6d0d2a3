"""Sessions over a database that takes nothing for a while: they go on, or end, once it does."""

import asyncio
import dataclasses
import json
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from oubliette.server import app
from oubliette.server.droids.profiles import builtin
from oubliette.server.errors import NotFound, StorageFailed
from oubliette.server.sessions import ends, insistence, sessions
from oubliette.server.sessions.boxes import Boxes, OpenBox
from oubliette.server.storage.database import Database
from tests.kit.app import World, world
from tests.kit.refusing_database import RefusingDatabase

ECHO: dict[str, Any] = {"caller_id": "ant", "caller_tools": [{"name": "echo"}]}
SLEEP = '<<plan [{"say": "half of it"}, {"sleep": 60}]>>'


@asynccontextmanager
async def outage(home: Path, *rooms: str, **flags: Any) -> AsyncGenerator[tuple[World, RefusingDatabase]]:
    """A world over such a database, which refuses these rooms' units a few times from the start."""
    made: list[RefusingDatabase] = []

    def over(database: Database) -> RefusingDatabase:
        made.append(RefusingDatabase(database))
        made[0].refuse(*rooms, times=3)
        return made[0]

    async with world(home, over=over, **flags) as here:
        try:
            yield here, made[0]
        finally:
            made[0].take_all()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(insistence, "AGAIN_S", 0.05)


async def end_of(here: World, session_id: str) -> dict[str, Any]:
    await here.ask("session_watch", session_id=session_id, until="end", wait_seconds=20)
    return await here.ask("session_get", session_id=session_id)


async def said(here: World, session_id: str, kind: str) -> None:
    """Wait until the log holds an event of this type."""
    async with asyncio.timeout(20):
        while kind not in {event["type"] for event in await here.events(session_id)}:
            await asyncio.sleep(0.01)


BEGINNINGS = ["LiveSession._next", "LiveSession._begin", "SessionKeys.for_droid", "Boxes._record", "Process."]


@pytest.mark.parametrize("room", BEGINNINGS)
async def test_a_session_whose_database_refuses_for_a_while_goes_on_with_what_was_queued(
    tmp_path: Path, room: str, monkeypatch: pytest.MonkeyPatch
):
    record = Boxes._record

    async def late(boxes: Boxes, one: OpenBox) -> None:
        # asyncio loses a connection whose door is closed as it comes: the keeper is in when its box is given up.
        await one.attached.wait()
        await record(boxes, one)

    monkeypatch.setattr(Boxes, "_record", late)
    async with outage(tmp_path / "h", room) as (here, database):
        project = await here.project()
        for number, word in enumerate(("one", "two"), 1):
            done = await here.run(project, f'[{{"say": "{word}"}}]')
            assert (done["turn"], done.get("result")) == (number, word)
        await database.refused()


async def test_a_turn_whose_droid_is_lost_during_an_outage_ends_by_name_and_the_next_one_runs(tmp_path: Path):
    async with outage(tmp_path / "h") as (here, database):
        project = await here.project()
        told = await here.ask("session_message", project_id=project, message=SLEEP)
        await said(here, told["session_id"], "delta")
        ((pid,),) = await here.rows("SELECT handle ->> 'pid' FROM boxes WHERE state = 'running'")
        database.refuse("LiveSession._close", "LiveSession._has_ended", "Boxes.end", times=6)
        os.kill(int(pid), 9)
        done = await here.run(project, '[{"say": "on"}]')
        await database.refused()
        assert (done["turn"], done.get("result")) == (2, "on")
        turns = (await here.ask("session_get", session_id=told["session_id"], turns=2))["turns"]
        assert turns[0]["stop_reason"] == "error"


async def test_a_session_that_fails_during_an_outage_says_so_once_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    usual = builtin.profile
    monkeypatch.setattr(builtin, "profile", lambda **how: dataclasses.replace(usual(**how), argv=("/not/there",)))
    async with outage(tmp_path / "h", "LiveSession._fail") as (here, database):
        told = await here.ask("session_message", project_id=await here.project(), message="x")
        shown = await end_of(here, told["session_id"])
        await database.refused()
        assert shown["status"] == "failed"
        log = await here.events(told["session_id"])
        assert [event["kind"] for event in log if event["type"] == "error"] == ["droid_failed"]
        assert log[-1].get("status") == "failed"


async def test_a_session_that_idles_out_during_an_outage_ends_after_it(tmp_path: Path):
    async with outage(tmp_path / "h", "LiveSession._expire", idle_after_s=4.0) as (here, database):
        told = await here.run(await here.project(), '[{"say": "x"}]')
        async with asyncio.timeout(7.5):  # no second wait for a message
            assert (await end_of(here, told["session_id"]))["status"] == "timed_out"
        await database.refused()


@pytest.mark.parametrize("room", ["Boxes.adopt", "AcpDroids.resume"])
async def test_a_session_that_is_taken_up_during_an_outage_goes_on_with_its_droid(tmp_path: Path, room: str):
    async with world(tmp_path / "h") as here:
        plan = '<<plan [{"say": "before"}, {"sleep": 1}, {"say": "after"}]>>'
        told = await here.ask("session_message", project_id=await here.project(), message=plan)
        await said(here, told["session_id"], "delta")
        here.leaves_sessions = True
    async with outage(tmp_path / "h", room) as (here, database):
        await database.refused()
        await here.ask("session_watch", session_id=told["session_id"], wait_seconds=20)
        (turn,) = (await here.ask("session_get", session_id=told["session_id"]))["turns"]
        assert (turn["stop_reason"], turn["text"]) == ("end_turn", "before\nafter")


async def test_an_end_that_is_not_stored_is_told_as_such_and_comes_once_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sessions, "ENDED_WITHIN_S", 0.2)
    async with outage(tmp_path / "h", sessions_per_project=1) as (here, database):
        project = await here.project()
        session_id = (await here.run(project, '[{"say": "x"}]'))["session_id"]
        database.refuse("Sessions._end_all_of", "Boxes.end")
        for _ in range(2):
            with pytest.raises(StorageFailed, match="decided and not stored yet: ask again") as told:
                await here.ask("session_end", session_id=session_id)
            assert told.value.retryable
        database.take_all()
        assert (await end_of(here, session_id))["status"] == "completed"
        assert (await here.ask("session_end", session_id=session_id))["status"] == "completed"
        assert "result" in await here.run(project, '[{"say": "its slot is free"}]')


async def test_an_end_that_broke_on_a_bug_is_told_as_such_and_can_be_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with world(tmp_path / "h") as here:
        session_id = (await here.run(await here.project(), '[{"say": "x"}]'))["session_id"]
        with monkeypatch.context() as broken:
            broken.setattr(ends, "complete", lambda *_: 1 / 0)
            with pytest.raises(StorageFailed, match="ask again"):
                await here.ask("session_end", session_id=session_id)
        assert (await here.ask("session_end", session_id=session_id))["status"] == "completed"


async def test_an_end_is_decided_or_refused_and_nothing_in_between(tmp_path: Path):
    async with outage(tmp_path / "h") as (here, database):
        session_id = (await here.run(await here.project(), '[{"say": "x"}]'))["session_id"]
        database.refuse("Sessions.end", "Sessions._decided", times=1)
        with pytest.raises(StorageFailed, match="no space left"):
            await here.ask("session_end", session_id=session_id)
        assert "result" in await here.ask(
            "session_message", session_id=session_id, message='<<plan [{"say": "on"}]>>', wait_seconds=20
        )


@pytest.mark.parametrize("room", ["Ends.end", "Process.commit", "Sessions._end_children"])
async def test_the_last_event_is_the_status_whatever_of_an_end_was_not_stored_at_once(tmp_path: Path, room: str):
    async with outage(tmp_path / "h") as (here, database):
        project, ant = await here.project(), await here.caller("ant")
        child = {"tool": "session_message", "args": {"message": SLEEP}}
        plan = f'<<plan [{json.dumps(child)}, {{"say": "half of it"}}, {{"tool": "ant_echo", "args": {{}}}}]>>'
        told = await here.ask("session_message", actor=ant, project_id=project, message=plan, context=ECHO)
        session_id = told["session_id"]
        await here.ask("caller_tool_poll", actor=ant, session_id=session_id, wait_seconds=10)
        (below,) = (await here.ask("session_get", session_id=session_id))["children"]
        await said(here, below, "delta")
        database.refuse(room, times=2)
        await here.ask("session_end", session_id=session_id)
        await database.refused()
        for one in (session_id, below):
            log = await here.events(one)
            assert (log[-1]["type"], log[-1].get("status")) == ("status", "completed")
            assert "half of it" in str([event for event in log if event["type"] == "completion"])
        assert "caller_tool_resolved" in [event["type"] for event in await here.events(session_id)]


async def test_input_goes_on_though_it_cannot_be_forgotten(tmp_path: Path) -> None:
    async with outage(tmp_path / "h", "Process._took") as (here, database):
        project = await here.project()
        told = await here.run(project, '[{"say": "one"}]')
        await database.refused()
        again = await here.run(project, '[{"say": "two"}]')
        assert (told["result"], again["result"]) == ("one", "two")


async def test_a_sweep_that_fails_is_not_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "SWEEP_EVERY_S", 0.02)
    async with outage(tmp_path / "h", "App._sweep") as (_, database):
        for _ in range(3):
            await database.refused()
            database.refuse("App._sweep", times=1)


async def test_a_refusal_tells_why_though_it_cannot_be_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with outage(tmp_path / "h", "Gate._refused") as (here, _):
        with pytest.raises(NotFound, match="no project"):
            await here.ask("project_get", project_id="none")
    assert "a refusal is not in the audit" in caplog.text
