"""Sessions on a whole server: real boxes, real droids."""

import asyncio
import dataclasses
import functools
import json
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oubliette.server import app
from oubliette.server.app import LOCAL
from oubliette.server.caller_tools.exchange import Exchange
from oubliette.server.containers import folders
from oubliette.server.droids import processes
from oubliette.server.droids.acp import AcpDroid, AcpDroids
from oubliette.server.droids.dialogue import Patience
from oubliette.server.droids.profiles import builtin
from oubliette.server.errors import (
    Conflict,
    Forbidden,
    InvalidParams,
    NotConfigured,
    NotFound,
    TooMany,
    Unauthenticated,
)
from oubliette.server.events.log import PLACES, EventLog
from oubliette.server.home import Home
from oubliette.server.limits import PAGE_BYTES
from oubliette.server.operations.operation import Asked
from oubliette.server.operations.session import SessionMessage, SessionMessaged, waited
from oubliette.server.sessions import ends, session
from oubliette.server.sessions.lifecycle import Move
from oubliette.server.storage.sqlite import SqliteDatabase
from oubliette.server.tokens.token import Actor, Scope
from oubliette.wire.events import Message
from tests.kit import acp_agent
from tests.kit.app import World, world
from tests.kit.server import ServerProcess

CHILD = json.dumps({"tool": "session_message", "args": {"message": '<<plan [{"say": "c"}]>>', "wait_seconds": 20}})
LIST = json.dumps([{"list": True}])
TOOLS: dict[str, Any] = {"caller_id": "ant", "caller_tools": [{"name": "echo"}]}


# What is in pieces between its statements shows on a database that waits at each.
either = pytest.mark.parametrize("suspends", [False, True], ids=["embedded", "suspending"])


async def until(here: World | ServerProcess, session_id: str, kind: str, **fields: Any) -> dict[str, Any]:
    """Wait until the session's log holds an event of this type with these fields; the first of them."""
    since = -1
    async with asyncio.timeout(20):
        while True:
            page = await here.ask("session_events", session_id=session_id, since_index=since, wait_seconds=5)
            for event in page["events"]:
                if event["type"] == kind and all(event[name] == value for name, value in fields.items()):
                    return event
            since = page["last_index"]


@either
async def test_a_message_starts_a_session_and_the_next_one_continues_it(tmp_path: Path, suspends: bool):
    async with world(tmp_path / "h", suspends=suspends) as here:
        project = await here.project()
        first = await here.run(project, '[{"say": "one"}]')
        second = await here.run(project, '[{"say": "two"}]')
        assert (first["spawned"], first["last_event_index"], first["result"]) == (True, -1, "one")
        assert (second["spawned"], second["session_id"], second["turn"]) == (False, first["session_id"], 2)
        shown = await here.ask("session_get", session_id=first["session_id"], turns=5)
        assert [(turn["turn"], turn["text"], turn["stop_reason"]) for turn in shown["turns"]] == [
            (1, "one", "end_turn"),
            (2, "two", "end_turn"),
        ]
        assert shown["status"] == "idle"


async def test_a_session_shows_what_its_turns_used_together(tmp_path: Path):
    async with world(tmp_path / "h") as here:
        project = await here.project()
        for word in ("one", "two", "three"):
            session_id = (await here.run(project, f'[{{"say": "{word}"}}]'))["session_id"]
        assert "usage" not in await here.ask("session_get", session_id=session_id), "this droid counts nothing"
        for number, usage in ((1, '{"input_tokens":3,"total_tokens":9223372036854775807}'), (3, '{"input_tokens":4}')):
            await here.database.write(
                lambda tx, number=number, usage=usage: tx.run(
                    "UPDATE turns SET usage = ? WHERE session_id = ? AND number = ?", usage, session_id, number
                )
            )
        shown = await here.ask("session_get", session_id=session_id, turns=0)
        assert shown["usage"] == {"input_tokens": 7, "total_tokens": 2**63 - 1}
        ended = await here.ask("session_end", session_id=session_id)
        assert ended["status"] == "completed"
        for operation in ("session_events", "session_watch"):
            told = await here.ask(operation, session_id=session_id)
            assert "error" not in told, "it ended and did not fail"


async def test_the_log_is_dense_and_pages_lose_nothing(tmp_path: Path):
    async with world(tmp_path / "h") as here:
        project = await here.project()
        session_id = (await here.run(project, '[{"say": "one"}, {"say": "two"}]'))["session_id"]
        whole = await here.events(session_id)
        assert [event["index"] for event in whole] == list(range(len(whole)))
        paged: list[dict[str, Any]] = []
        while True:
            since = paged[-1]["index"] if paged else -1
            page = await here.ask("session_events", session_id=session_id, since_index=since, max_events=3)
            paged += page["events"]
            if not page["more"]:
                break
        assert paged == whole


async def test_beyond_the_bound_the_oldest_events_go_and_asking_for_them_names_the_oldest(tmp_path: Path):
    async with world(tmp_path / "h", events_kept=20) as here:
        project = await here.project()
        plan = '[{"repeat": 40, "step": {"sh": "true"}}]'
        session_id = (await here.run(project, plan))["session_id"]
        with pytest.raises(Exception, match=r"have been purged \(oldest available: \d+\)") as caught:
            await here.ask("session_events", session_id=session_id)
        oldest = caught.value.details["oldest_index"]  # type: ignore[attr-defined]
        page = await here.ask("session_events", session_id=session_id, since_index=oldest - 1, max_events=500)
        assert page["first_index"] == oldest == page["events"][0]["index"]


@either
async def test_messages_for_a_busy_session_wait_their_turn_up_to_a_bound(tmp_path: Path, suspends: bool):
    async with world(tmp_path / "h", suspends=suspends) as here:
        project, ant = await here.project(), await here.caller("ant")
        plan = '<<plan [{"tool": "ant_echo", "args": {}}]>>'
        first = await here.ask("session_message", actor=ant, project_id=project, message=plan, context=TOOLS)
        session_id = first["session_id"]
        request = (await here.ask("caller_tool_poll", actor=ant, session_id=session_id))["requests"][0]
        for number in range(16):
            queued = await here.ask(
                "session_message", actor=ant, project_id=project, message=f'<<plan [{{"say": "{number}"}}]>>'
            )
            assert queued["turn"] == number + 2
        with pytest.raises(TooMany, match="16 messages wait"):
            await here.ask("session_message", actor=ant, project_id=project, message="one too many")
        await here.ask(
            "caller_tool_response", actor=ant, session_id=session_id, request_id=request["request_id"], result=1
        )
        await here.ask("session_watch", session_id=session_id, wait_seconds=20)
        shown = await here.ask("session_get", session_id=session_id, turns=20)
        assert [turn["text"] for turn in shown["turns"]][1:] == [str(number) for number in range(16)]


@either
async def test_an_interrupt_cancels_the_running_turn_and_its_calls_first(tmp_path: Path, suspends: bool):
    async with world(tmp_path / "h", suspends=suspends) as here:
        project, ant = await here.project(), await here.caller("ant")
        plan = '<<plan [{"tool": "ant_echo", "args": {}}, {"say": "not reached"}]>>'
        first = await here.ask("session_message", actor=ant, project_id=project, message=plan, context=TOOLS)
        await here.ask("caller_tool_poll", actor=ant, session_id=first["session_id"])
        second = await here.run(project, '[{"say": "instead"}]', actor=ant, interrupt=True)
        assert second["result"] == "instead"
        turns = (await here.ask("session_get", session_id=first["session_id"], turns=2))["turns"]
        assert turns[0]["stop_reason"] == "cancelled"
        log = await here.events(first["session_id"])
        assert [event["outcome"] for event in log if event["type"] == "caller_tool_resolved"] == ["cancelled"]


async def test_cancelling_leaves_the_session_to_go_on(tmp_path: Path):
    async with world(tmp_path / "h") as here:
        project = await here.project()
        started = await here.ask("session_message", project_id=project, message='<<plan [{"sleep": 60}]>>')
        await until(here, started["session_id"], "turn_started")
        assert (await here.ask("session_cancel", session_id=started["session_id"]))["cancelled"]
        assert (await here.run(project, '[{"say": "on"}]'))["result"] == "on"


async def test_a_turn_cancelled_while_its_box_is_made_never_reaches_the_droid(tmp_path: Path):
    async with world(tmp_path / "h") as here:
        project = await here.project()
        started = await here.ask("session_message", project_id=project, message='<<plan [{"say": "reached"}]>>')
        await until(here, started["session_id"], "user_message")
        assert (await here.ask("session_cancel", session_id=started["session_id"]))["cancelled"]
        await here.ask("session_watch", session_id=started["session_id"], wait_seconds=20)
        (turn,) = (await here.ask("session_get", session_id=started["session_id"]))["turns"]
        assert (turn["stop_reason"], turn["text"]) == ("cancelled", "")
        assert (await here.run(project, '[{"say": "on"}]'))["result"] == "on"


@either
async def test_ending_a_session_ends_its_droid_its_calls_its_key_and_its_children(tmp_path: Path, suspends: bool):
    async with world(tmp_path / "h", suspends=suspends) as here:
        project, ant = await here.project(), await here.caller("ant")
        plan = '[{"tool": "session_message", "args": {"message": "<<plan [{\\"sleep\\": 60}]>>"}}, {"sleep": 60}]'
        started = await here.ask(
            "session_message",
            actor=ant,
            project_id=project,
            message=f"<<plan {plan}>>",
            context=TOOLS,
            oubliette_scope="read",
        )
        session_id = started["session_id"]
        child = (await until(here, session_id, "child_started"))["child_session_id"]
        await until(here, child, "turn_started")
        keepers = await pids(here)
        assert len(keepers) == 2
        ended = await here.ask("session_end", actor=ant, session_id=session_id)
        assert ended["status"] == "completed"
        below = await here.ask("session_get", session_id=child)
        assert (below["status"], below["reason"]) == ("completed", "its parent ended")
        assert not any(alive(pid) for pid in keepers)
        assert await here.rows("SELECT 1 FROM tokens WHERE session_id = ? AND revoked_at IS NULL", session_id) == []
        assert (await here.ask("session_end", session_id=session_id))["status"] == "completed"
        with pytest.raises(Conflict, match="has ended"):
            await here.ask("session_message", session_id=session_id, message="hello?")


async def pids(here: World) -> list[int]:
    """The first processes of all boxes, as the host numbers them."""
    rows = await here.rows("SELECT handle FROM boxes WHERE state = 'running'")
    return [int(json.loads(handle)["pid"]) for (handle,) in rows]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@either
async def test_children_have_a_depth_and_a_budget_of_the_root(tmp_path: Path, suspends: bool):
    async with world(tmp_path / "h", suspends=suspends) as here:
        project = await here.project(max_recursion_depth=1, max_agents_per_session=2)
        plan = f"[{CHILD}, {CHILD}, {CHILD}]"
        done = await here.run(project, plan)
        results = [event for event in await here.events(done["session_id"]) if event["type"] == "tool_result"]
        assert [event["is_error"] for event in results if "is_error" in event] == [True]
        assert "max_agents_per_session (2)" in str(results[-1]["content"])
        inner = json.dumps({"tool": "session_message", "args": {"message": f"<<plan [{CHILD}]>>", "wait_seconds": 20}})
        deep = await here.ask("session_spawn", project_id=project, message=f"<<plan [{inner}]>>", wait_seconds=20)
        shown = await here.ask("session_get", session_id=deep["session_id"])
        log = await here.events(shown["children"][0])
        assert "max_recursion_depth (1)" in str(log)


async def test_only_the_owner_lends_tools_and_others_change_nothing_of_it(tmp_path: Path):
    async with world(tmp_path / "h") as here:
        project, ant, bee = await here.project(), await here.caller("ant"), await here.caller("bee")
        session_id = (await here.run(project, '[{"say": "x"}]', actor=ant, context=TOOLS))["session_id"]
        with pytest.raises(Forbidden, match="started this session"):
            await here.run(project, '[{"say": "y"}]', actor=bee, context=TOOLS)
        assert (await here.run(project, '[{"list": true}]', actor=bee))["session_id"] == session_id
        shown = await here.ask("session_get", session_id=session_id)
        assert shown["caller_tools"] == {"echo": "ant_echo"}


@pytest.mark.parametrize("key", ["derived", "its owner's"])
@pytest.mark.parametrize("again", [TOOLS, {"caller_id": "ant", "caller_tools": []}])
async def test_what_comes_out_of_a_box_lends_no_tools_whatever_its_key(tmp_path: Path, key: str, again: dict[str, Any]):
    async with world(tmp_path / "h") as here:
        project, ant = await here.project(), await here.caller("ant")
        lent = {"caller_id": "ant", "caller_tools": [{"name": "echo", "inputSchema": {"type": "object"}}]}
        root = (await here.run(project, '[{"say": "x"}]', actor=ant, context=lent))["session_id"]
        droid = msgspec.structs.replace(ant, session_id=root)
        if key == "derived":
            droid = Actor(principal="d", scope=Scope.WRITE, project_id=project, session_id=root, derived=True)
        asked: list[tuple[str, dict[str, Any]]] = [
            ("session_spawn", {"project_id": project}),
            ("session_message", {"project_id": project}),
            ("session_message", {"session_id": root}),
        ]
        for operation, where in asked:
            for lending in ({"context": again}, again):
                params: dict[str, Any] = {"message": "x", **where, **lending}
                with pytest.raises(Forbidden, match="cannot be declared out of a box"):
                    await here.ask(operation, actor=droid, **params)
        (only,) = (await here.ask("session_list", project_id=project))["sessions"]
        shown = await here.ask("session_get", session_id=only["session_id"])
        assert (shown["turn_count"], shown["caller_tools"]) == (1, {"echo": "ant_echo"})
        told = await here.ask("session_spawn", actor=droid, project_id=project, message="x", wait_seconds=20)
        child = await here.ask("session_get", session_id=told["session_id"])
        assert child.get("caller_tools") == ({"echo": "ant_echo"} if key == "derived" else None)


async def test_tools_declared_again_on_a_live_session_replace_the_old_ones(tmp_path: Path):
    async with world(tmp_path / "h") as here:
        project = await here.project()
        await here.run(project, '[{"say": "x"}]', context=TOOLS)
        again = {"caller_id": "ant", "caller_tools": [{"name": "other"}]}
        plan = '[{"wait_tool": "ant_other", "s": 10}, {"list": true}]'
        assert "ant_echo" not in (await here.run(project, plan, context=again))["result"]


def below(*plan: dict[str, Any]) -> dict[str, Any]:
    """A step that starts a session with this plan."""
    return {"tool": "session_message", "args": {"message": f"<<plan {json.dumps(plan)}>>"}}


@either
async def test_tools_declared_again_reach_every_session_below_that_has_its_ancestors(tmp_path: Path, suspends: bool):
    async with world(tmp_path / "h", suspends=suspends) as here:
        project, ant = await here.project(), await here.caller("ant")
        waits: dict[str, Any] = {"wait_tool": "ant_other", "s": 20}
        working = (waits, {"list": True})
        plan = json.dumps([below(below(*working), *working), below({"say": "x"}, below({"say": "y"}))])
        root = (await here.run(project, plan, actor=ant, context=TOOLS))["session_id"]
        at_work, told_otherwise = (await here.ask("session_get", session_id=root))["children"]
        lowest = (await until(here, at_work, "child_started"))["child_session_id"]
        heir = (await until(here, told_otherwise, "child_started"))["child_session_id"]
        await here.ask("session_watch", session_id=told_otherwise, wait_seconds=20)
        own = {"caller_id": "ant", "caller_tools": [{"name": "own"}]}
        lent: dict[str, Any] = {"actor": ant, "message": "x", "context": own, "wait_seconds": 20}
        await here.ask("session_message", session_id=told_otherwise, **lent)

        again = {"caller_id": "ant", "caller_tools": [{"name": "other"}]}
        await here.run(project, '[{"say": "x"}]', actor=ant, context=again)
        for one in (at_work, lowest):
            await here.ask("session_watch", session_id=one, wait_seconds=20)
            shown = await here.ask("session_get", session_id=one)
            assert shown["caller_tools"] == {"other": "ant_other"}
            listed = shown["turns"][0]["text"]
            assert "ant_other" in listed, "its client was told, in the middle of a turn"
            assert "ant_echo" not in listed
            declared = [event["tools"] for event in await here.events(one) if event["type"] == "caller_tools_declared"]
            assert declared == [["echo"], ["other"]]
        for one in (told_otherwise, heir):
            assert (await here.ask("session_get", session_id=one))["caller_tools"] == {"own": "ant_own"}
            said = await here.ask("session_message", session_id=one, message=f"<<plan {LIST}>>", wait_seconds=20)
            assert "ant_own" in said["result"]
            assert "ant_other" not in said["result"]


async def test_a_session_below_that_was_lent_the_same_tools_itself_keeps_them(tmp_path: Path):
    async with world(tmp_path / "h") as here:
        project, ant = await here.project(), await here.caller("ant")
        plan = json.dumps([below({"say": "x"})])
        root = (await here.run(project, plan, actor=ant, context=TOOLS))["session_id"]
        (child,) = (await here.ask("session_get", session_id=root))["children"]
        await here.ask("session_message", actor=ant, session_id=child, message="x", context=TOOLS, wait_seconds=20)
        await here.run(project, "[]", actor=ant, context={"caller_id": "ant", "caller_tools": []})
        assert (await here.ask("session_get", session_id=child))["caller_tools"] == {"echo": "ant_echo"}


async def test_a_declaration_in_context_and_at_the_top_level_must_agree(tmp_path: Path):
    async with world(tmp_path / "h") as here:
        project = await here.project()
        with pytest.raises(InvalidParams, match="they differ"):
            await here.run(project, "[]", context=TOOLS, caller_id="bee")
        assert (await here.run(project, '[{"list": true}]', **TOOLS))["caller_tools"] == {"echo": "ant_echo"}


async def test_the_slots_of_a_project_are_bounded_and_an_ended_session_frees_its_own(tmp_path: Path):
    async with world(tmp_path / "h", sessions_per_project=2) as here:
        project = await here.project()
        first = await here.ask("session_spawn", project_id=project, message="x", wait_seconds=20)
        await here.ask("session_spawn", project_id=project, message="x", wait_seconds=20)
        with pytest.raises(TooMany, match="2 sessions of this project are live"):
            await here.ask("session_spawn", project_id=project, message="x")
        await here.ask("session_end", session_id=first["session_id"])
        await here.ask("session_spawn", project_id=project, message="x", wait_seconds=20)


async def test_the_sessions_of_a_server_are_bounded_and_children_count(tmp_path: Path):
    async with world(tmp_path / "h", sessions_max=2) as here:
        project, other = await here.project(), await here.project()
        root = await here.run(project, f"[{CHILD}, {CHILD}]")
        results = [event for event in await here.events(root["session_id"]) if event["type"] == "tool_result"]
        assert [event.get("is_error", False) for event in results] == [False, True]
        assert "sessions_max (2) is reached" in str(results[-1]["content"])
        with pytest.raises(TooMany, match=r"sessions_max \(2\) is reached"):
            await here.ask("session_spawn", project_id=other, message="x")
        assert (await here.ask("config_limits", project_id=other))["sessions"] == {"value": 2, "source": "server"}
        (child,) = (await here.ask("session_get", session_id=root["session_id"]))["children"]
        await here.ask("session_end", session_id=child)
        await here.ask("session_spawn", project_id=other, message="x", wait_seconds=20)


async def test_a_session_that_idles_for_too_long_is_ended(tmp_path: Path):
    async with world(tmp_path / "h", idle_after_s=0.2) as here:
        project = await here.project()
        session_id = (await here.run(project, '[{"say": "x"}]', oubliette_scope="read"))["session_id"]
        await here.ask("session_watch", session_id=session_id, until="end", wait_seconds=20)
        assert (await here.ask("session_get", session_id=session_id))["status"] == "timed_out"
        for operation in ("session_events", "session_watch"):
            assert (await here.ask(operation, session_id=session_id))["error"] == "idle for too long"
        # By the commit that the watcher saw: a server that dies right after it leaves no key behind.
        assert await here.rows("SELECT revoked_at IS NULL FROM tokens WHERE session_id = ?", session_id) == [(0,)]


async def test_a_box_that_dies_ends_its_turn_by_name_and_the_session_goes_on_in_another(tmp_path: Path):
    async with world(tmp_path / "h") as here:
        project = await here.project()
        started = await here.ask("session_message", project_id=project, message='<<plan [{"sleep": 60}]>>')
        await until(here, started["session_id"], "turn_started")
        (keeper,) = await pids(here)
        os.kill(keeper, 9)
        error = await until(here, started["session_id"], "error")
        assert error["kind"] == "droid_failed"
        assert "box" in error["message"]
        assert (await here.run(project, '[{"say": "on"}]'))["result"] == "on"


async def test_a_box_that_dies_between_turns_is_told_and_the_next_message_gets_another(tmp_path: Path):
    async with world(tmp_path / "h") as here:
        project = await here.project()
        first = await here.run(project, '[{"say": "one"}]')
        (keeper,) = await pids(here)
        os.kill(keeper, 9)
        warning = await until(here, first["session_id"], "warning")
        assert warning["kind"] == "box_lost"
        second = await here.run(project, '[{"say": "two"}]')
        assert (second["session_id"], second["result"], second.get("error")) == (first["session_id"], "two", None)


async def test_turns_are_shown_as_far_as_they_fit_and_the_rest_is_to_be_had(tmp_path: Path):
    async with world(tmp_path / "h") as here:
        project = await here.project()
        session_id = (await here.run(project, '[{"say": "x"}]'))["session_id"]
        large = "l" * 400_000
        for _ in range(4):
            await here.ask("session_message", session_id=session_id, message=f'{large}<<plan [{{"say": "y"}}]>>')
        await here.ask("session_watch", session_id=session_id, wait_seconds=20)
        newest = await here.ask("session_get", session_id=session_id, turns=100)
        assert [turn["turn"] for turn in newest["turns"]] == [4, 5]
        assert newest["turns_left_out"] == 3
        older = await here.ask("session_get", session_id=session_id, turns=100, before_turn=4)
        assert [turn["turn"] for turn in older["turns"]] == [1, 2, 3]
        assert "turns_left_out" not in older


async def test_a_result_that_was_waited_for_is_told_though_many_turns_came_after_it(tmp_path: Path):
    async with world(tmp_path / "h") as here:
        project = await here.project()
        told = await here.run(project, '[{"say": "one"}]')
        await here.database.write(
            lambda tx: tx.run(
                "WITH RECURSIVE n (i) AS (SELECT 2 UNION ALL SELECT i + 1 FROM n WHERE i < 130)"
                " INSERT INTO turns SELECT session_id, i, '', 'ended', NULL, 1, 1, 1, 'end_turn', '', NULL, NULL"
                " FROM turns JOIN n WHERE session_id = ? AND number = 1",
                told["session_id"],
            )
        )
        await here.database.write(lambda tx: tx.run("UPDATE sessions SET turns = 130"))
        params = SessionMessage(session_id=told["session_id"], message="x", wait_seconds=20)
        known = SessionMessaged(
            **{name: told[name] for name in SessionMessaged.__struct_fields__ if name in told and name != "result"}
        )
        again = await waited(here.app.gate._rooms, Asked(actor=LOCAL, door="local"), params, known)
        assert again.result == "one"


async def test_a_list_of_sessions_is_without_what_is_lent_to_them(tmp_path: Path):
    async with world(tmp_path / "h") as here:
        project = await here.project()
        await here.run(project, '[{"say": "x"}]', context=TOOLS)
        (listed,) = (await here.ask("session_list", project_id=project))["sessions"]
        assert "caller_tools" not in listed
        assert (await here.ask("session_get", session_id=listed["session_id"]))["caller_tools"] == {"echo": "ant_echo"}


@either
async def test_a_list_of_sessions_shows_the_beginning_of_the_last_prompt_of_each(tmp_path: Path, suspends: bool):
    async with world(tmp_path / "h", suspends=suspends) as here:
        project = await here.project()
        words = ("first", "später " * 30)
        told = [await here.ask("session_spawn", project_id=project, message=word, wait_seconds=20) for word in words]
        one, other = (each["session_id"] for each in told)
        droid = Actor(principal="d", scope=Scope.READ, project_id=project, session_id=one, derived=True)

        async def prompts(**params: Any) -> dict[str, str]:
            listed = await here.ask("session_list", project_id=project, **params)
            return {each["session_id"]: each["last_prompt"] for each in listed["sessions"]}

        assert await prompts() == {one: "first", other: ("später " * 30)[:80]}
        await here.ask("session_message", session_id=one, message="second", wait_seconds=20)
        assert await prompts() == {one: "second", other: ("später " * 30)[:80]}
        assert await prompts(actor=droid) == {one: "second"}
        assert await prompts(status=["failed"]) == {}
        assert "last_prompt" not in await here.ask("session_get", session_id=one)


async def test_a_derived_key_is_cut_to_its_creators_rights_and_dies_with_the_session(tmp_path: Path):
    async with world(tmp_path / "h") as here:
        project = await here.project()
        made = await here.ask("token_create", name="reader-writer", scope="write")
        actor = await here.app.tokens.verify(made["token"])
        asked = f'"args": {{"project_id": "{project}"}}'
        plan = (
            f'[{{"list": true}}, {{"tool": "oubliette_project_get", {asked}}},'
            f' {{"tool": "oubliette_session_list", {asked}}}]'
        )
        done = await here.run(project, plan, actor=actor, oubliette_scope="write")
        results = [event for event in await here.events(done["session_id"]) if event["type"] == "tool_result"]
        assert not any(event.get("is_error") for event in results)
        assert "oubliette_session_message" in done["result"]
        for absent in ("oubliette_token_", "oubliette_caller_tool_", "oubliette_project_create"):
            assert absent not in done["result"]
        ((secret_row,),) = await here.rows("SELECT count(*) FROM tokens WHERE session_id IS NOT NULL")
        assert secret_row == 1


async def test_a_scope_beyond_the_askers_own_is_refused(tmp_path: Path):
    async with world(tmp_path / "h") as here:
        project = await here.project()
        reader = Actor(principal="prn_x", scope=Scope.READ)
        with pytest.raises(Forbidden):
            await here.run(project, "[]", actor=reader)


async def test_a_key_that_the_caller_brings_must_be_alive_and_reaches_the_droid(tmp_path: Path):
    async with world(tmp_path / "h") as here:
        project = await here.project()
        with pytest.raises(Unauthenticated):
            await here.run(project, "[]", oubliette_api_key="oub_" + "0" * 64)
        made = await here.ask("token_create", name="own", scope="write")
        plan = '[{"tool": "oubliette_project_create", "args": {"name": "from inside"}}]'
        await here.run(project, plan, oubliette_api_key=made["token"])
        names = [one["name"] for one in (await here.ask("project_list"))["projects"]]
        assert "from inside" in names


@pytest.mark.parametrize("operation", ["session_spawn", "session_message"])
async def test_a_key_that_the_server_made_starts_children_and_one_that_the_caller_brought_starts_sessions_of_its_own(
    tmp_path: Path, operation: str
):
    async with world(tmp_path / "h") as here:
        project, other = await here.project(), await here.project()
        made = await here.ask("token_create", name="own", scope="write")

        def starting(**where: Any) -> str:
            args = {"message": "x", "create_workspace": True, **where}
            return json.dumps([{"tool": f"oubliette_{operation}", "args": args}, {"say": "$last"}])

        async def started(plan: str, **key: Any) -> tuple[dict[str, Any], dict[str, Any]]:
            asked: dict[str, Any] = {"project_id": project, "message": f"<<plan {plan}>>", "wait_seconds": 20}
            told = await here.ask("session_spawn", **asked, **key)
            by = await here.ask("session_get", session_id=told["session_id"])
            return by, await here.ask("session_get", session_id=json.loads(told["result"])["session_id"])

        by, one = await started(starting(), oubliette_scope="write")
        assert (one["parent_session_id"], one["depth"], one["project_id"]) == (by["session_id"], 1, project)
        brought = {"oubliette_api_key": made["token"]}
        for where in (project, other):
            by, one = await started(starting(project_id=where), **brought)
            assert (one.get("parent_session_id"), one["depth"], one["project_id"]) == (None, 0, where)
            assert "children" not in by or by["children"] == []
        asked: dict[str, Any] = {"project_id": project, "message": f"<<plan {starting()}>>", "wait_seconds": 20}
        refused = await here.ask("session_spawn", **asked, **brought)
        assert "project_id is missing" in str(await here.events(refused["session_id"]))


async def test_what_is_asked_out_of_a_box_gets_no_more_autonomy_than_the_box_has(tmp_path: Path):
    async with world(tmp_path / "h") as here:
        project = await here.project()
        made = await here.ask("token_create", name="own", scope="write")
        spawn = '{"tool": "oubliette_session_spawn", "args": {"project_id": "%s", "message": "x", "autonomy": "high"}}'
        done = await here.run(project, "[" + spawn % project + "]", oubliette_api_key=made["token"], autonomy="low")
        others = (await here.ask("session_list", project_id=project))["sessions"]
        (spawned,) = [one for one in others if one["session_id"] != done["session_id"]]
        assert spawned["autonomy"] == "low"


@pytest.mark.parametrize("wanted", [{}, {"autonomy": "high"}])
async def test_a_project_that_is_made_out_of_a_box_allows_no_more_autonomy_than_the_box_has(
    tmp_path: Path, wanted: dict[str, str]
):
    async with world(tmp_path / "h") as here:
        project = await here.project()
        made = await here.ask("token_create", name="own", scope="write")
        plan = json.dumps([{"tool": "oubliette_project_create", "args": {"name": "n", **wanted}}])
        await here.run(project, plan, oubliette_api_key=made["token"], autonomy="low")
        (found,) = (await here.ask("project_list", name_contains="n"))["projects"]
        started = await here.run(found["id"], '[{"say": "x"}]')
        assert (await here.ask("session_get", session_id=started["session_id"]))["autonomy"] == "low"


async def test_a_workspace_is_resolved_as_the_table_says(tmp_path: Path):
    async with world(tmp_path / "h") as here:
        project = await here.project()
        default = (await here.ask("project_get", project_id=project))["default_workspace_id"]
        missing = "11111111-1111-4111-8111-111111111111"
        spawn: dict[str, Any] = {"project_id": project, "message": "x", "wait_seconds": 20}
        assert (await here.ask("session_spawn", **spawn))["workspace_id"] == default
        fresh = await here.ask("session_spawn", **spawn, create_workspace=True)
        assert (fresh["workspace_created"], fresh["workspace_id"] != default) == (True, True)
        with pytest.raises(NotFound, match="not found"):
            await here.ask("session_spawn", **spawn, workspace_id=missing)
        with pytest.raises(InvalidParams, match="not a UUID"):
            await here.ask("session_spawn", **spawn, workspace_id="w", create_workspace=True)
        made = await here.ask("session_spawn", **spawn, workspace_id=missing, create_workspace=True)
        assert (made["workspace_id"], made["workspace_created"]) == (missing, True)
        again = await here.ask("session_spawn", **spawn, workspace_id=missing, create_workspace=True)
        assert again["workspace_created"] is False


async def test_a_project_that_is_deleted_leaves_nothing_but_its_audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("oubliette.server.operations.project.BULK_ROWS", 3)
    async with world(tmp_path / "h") as here:
        project, other = await here.project(), await here.project()
        plan = '[{"sh": "mkdir -p closed/in && chmod 0 closed"}, {"tool": "ant_echo", "args": {}}]'
        session_id = (await here.run(project, plan, context=TOOLS, oubliette_scope="read"))["session_id"]
        kept = (await here.run(other, '[{"say": "x"}]'))["session_id"]
        with pytest.raises(Conflict, match="live session"):
            await here.ask("project_delete", project_id=project)
        assert await here.events(session_id), "a refusal deletes nothing"
        await here.ask("session_end", session_id=session_id)
        await here.ask("project_delete", project_id=project)
        tables = [name for (name,) in await here.rows("SELECT name FROM sqlite_master WHERE type = 'table'")]
        left = {table: str(await here.rows(f"SELECT * FROM {table}")) for table in tables if table != "audit"}
        assert [table for table, rows in left.items() if session_id in rows or project in rows] == []
        assert [table for table, rows in left.items() if kept in rows] != []
        await gone(tmp_path / "h" / "projects" / project)
        assert (tmp_path / "h" / "projects" / other).exists()


async def gone(folder: Path) -> None:
    async with asyncio.timeout(10):
        while folder.exists():
            await asyncio.sleep(0.01)


async def test_files_whose_deletion_a_server_did_not_live_to_see_are_removed_by_the_next(tmp_path: Path):
    home = tmp_path / "h"
    async with world(home) as here:
        project = await here.project()
        told = await here.run(project, '[{"sh": "echo hello > kept"}]', create_workspace=True)
        workspace = home / "projects" / project / "workspaces" / told["workspace_id"]
    strays = [workspace.parent / "22222222-2222-4222-8222-222222222222", home / "projects" / "33333333" / "workspaces"]
    for stray in strays:
        (stray / "in" / "it").mkdir(parents=True)
    left = home / "projects" / ".gone" / "left"
    left.mkdir(parents=True)
    async with world(home):
        assert not any(stray.exists() for stray in strays), "out of the way before anybody may ask for anything"
        await gone(left)
        assert (workspace / "kept").read_text() == "hello\n"


async def test_derived_keys_do_not_pile_up_once_outcomes_are_kept_no_longer(tmp_path: Path):
    async with world(tmp_path / "h") as here:
        session_id = (await here.run(await here.project(), '[{"say": "x"}]', oubliette_scope="read"))["session_id"]
        await here.ask("session_end", session_id=session_id)
        assert await here.rows("SELECT 1 FROM tokens WHERE session_id = ?", session_id) != []
    async with world(tmp_path / "h", outcomes_kept_s=0) as here, asyncio.timeout(10):
        while await here.rows("SELECT 1 FROM tokens WHERE session_id = ?", session_id):
            await asyncio.sleep(0.01)


async def test_a_workspace_that_is_deleted_takes_its_files_along(tmp_path: Path):
    async with world(tmp_path / "h") as here:
        project = await here.project()
        told = await here.run(project, '[{"sh": "echo hello > kept"}]', create_workspace=True)
        named: dict[str, Any] = {"project_id": project, "workspace_id": told["workspace_id"]}
        folder = tmp_path / "h" / "projects" / project / "workspaces" / told["workspace_id"]
        with pytest.raises(Conflict, match="live session"):
            await here.ask("workspace_delete", **named)
        assert (folder / "kept").exists()
        await here.ask("session_end", session_id=told["session_id"])
        assert (await here.ask("workspace_delete", **named))["deleted"]
        await gone(folder)


@either
async def test_a_workspace_made_again_at_once_begins_empty_and_keeps_what_it_gets(
    tmp_path: Path, suspends: bool, monkeypatch: pytest.MonkeyPatch
):
    remove, may_remove = folders.remove, threading.Event()

    def late(path: Path) -> None:
        may_remove.wait(20)
        remove(path)

    async with world(tmp_path / "h", suspends=suspends) as here:
        project = await here.project()
        told = await here.run(project, '[{"sh": "echo x > old"}]', create_workspace=True)
        named: dict[str, Any] = {"project_id": project, "workspace_id": told["workspace_id"]}
        await here.ask("session_end", session_id=told["session_id"])
        monkeypatch.setattr(folders, "remove", late)
        plan = '<<plan [{"sh": "ls; echo x > new"}, {"say": "$last"}]>>'
        params: dict[str, Any] = {**named, "create_workspace": True, "message": plan, "wait_seconds": 20}
        try:
            deleted, again = await asyncio.gather(
                here.ask("workspace_delete", **named), here.ask("session_message", **params)
            )
        finally:
            may_remove.set()
        assert (deleted["deleted"], again["workspace_created"]) == (True, True)
        assert "old" not in again["result"]
        async with asyncio.timeout(10):
            while list((tmp_path / "h" / "projects" / ".gone").iterdir()):
                await asyncio.sleep(0.01)
        folder = tmp_path / "h" / "projects" / project / "workspaces" / told["workspace_id"]
        assert [path.name for path in folder.iterdir()] == ["new"]


async def test_whoever_asked_for_a_deletion_may_leave_and_the_files_go(tmp_path: Path):
    async with world(tmp_path / "h", suspends=True) as here:
        project = await here.project()
        told = await here.run(project, '[{"sh": "echo x > old"}]', create_workspace=True)
        named: dict[str, Any] = {"project_id": project, "workspace_id": told["workspace_id"]}
        await here.ask("session_end", session_id=told["session_id"])
        async with asyncio.TaskGroup() as asking, asyncio.timeout(10):
            asked = asking.create_task(here.ask("workspace_delete", **named))
            while len((await here.ask("workspace_list", project_id=project))["workspaces"]) == 2:
                await asyncio.sleep(0)
            asked.cancel()
        await gone(tmp_path / "h" / "projects" / project / "workspaces" / told["workspace_id"])


async def test_events_of_a_tree_page_by_cursor_without_loss(tmp_path: Path):
    async with world(tmp_path / "h") as here:
        project = await here.project()
        root = (await here.run(project, f"[{CHILD}, {CHILD}]"))["session_id"]
        wanted = {(root, event["index"]) for event in await here.events(root)}
        for one in (await here.ask("session_get", session_id=root))["children"]:
            wanted |= {(one, event["index"]) for event in await here.events(one)}
        seen: list[tuple[str, int]] = []
        cursor: str | None = None
        while True:
            more: dict[str, Any] = {"cursor": cursor} if cursor else {}
            page = await here.ask("session_events", session_id=root, include_children=True, max_events=7, **more)
            seen += [(event["session_id"], event["index"]) for event in page["events"]]
            cursor = page["cursor"]
            if not page["more"]:
                break
        assert len(seen) == len(set(seen))
        assert set(seen) == wanted


@either
async def test_a_page_of_a_tree_holds_so_many_bytes_however_many_logs_it_merges(tmp_path: Path, suspends: bool):
    async with world(tmp_path / "h", suspends=suspends) as here:
        project = await here.project()
        root = (await here.run(project, f"[{', '.join([CHILD] * 6)}]"))["session_id"]
        logs = [root, *(await here.ask("session_get", session_id=root))["children"]]
        log = EventLog(here.database)
        page_and_more = Message(text="x" * 2 * PAGE_BYTES)
        for number in range(6):
            for place, one in enumerate(logs):
                event = page_and_more if number == place == 3 else Message(text="x" * 100_000)
                # Times of one log need not follow its order.
                await here.database.write(partial(log.append, session_id=one, events=[event], now=2e9 + number % 4))
        counted = await here.rows(
            "SELECT session_id, place - number * ? FROM logs JOIN events ON place / ? = number", PLACES, PLACES
        )
        seen: list[tuple[str, int]] = []
        page: dict[str, Any] = {"more": True}
        while page["more"]:
            more: dict[str, Any] = {"cursor": page["cursor"]} if "cursor" in page else {}
            page = await here.ask("session_events", session_id=root, include_children=True, max_events=500, **more)
            assert page["events"]
            assert len(page["events"]) == 1 or len(json.dumps(page["events"])) < PAGE_BYTES * 1.1
            seen += [(event["session_id"], event["index"]) for event in page["events"]]
        assert len(seen) == len(set(seen)), "nothing comes twice"
        assert set(seen) == set(counted), "nothing is lost"
        for one in logs:
            of_one = [index for name, index in seen if name == one]
            assert of_one == sorted(of_one)


async def test_a_page_of_a_tree_waits_for_its_first_event_and_says_how_far_it_read(tmp_path: Path):
    async with world(tmp_path / "h") as here:
        project = await here.project()
        root = (await here.run(project, f"[{CHILD}]"))["session_id"]
        tree: dict[str, Any] = {"session_id": root, "include_children": True}
        page = await here.ask("session_events", **tree, max_events=500)
        own = [event["index"] for event in page["events"] if event["session_id"] == root]
        assert page["last_index"] == own[-1]
        assert page["more"] is False
        async with asyncio.TaskGroup() as tasks:
            next_page = here.ask("session_events", **tree, cursor=page["cursor"], wait_seconds=20)
            waiting = tasks.create_task(next_page)
            await here.run(project, '[{"say": "later"}]')
        assert waiting.result()["events"][0]["type"] == "user_message"
        with pytest.raises(InvalidParams, match="cursor"):
            await here.ask("session_events", **tree, cursor=page["cursor"], since_index=3)


async def test_what_a_message_cannot_mean_is_refused_rather_than_ignored(tmp_path: Path):
    async with world(tmp_path / "h") as here:
        project, other = await here.project(), await here.project("other")
        session_id = (await here.run(project, '[{"say": "x"}]'))["session_id"]
        named: dict[str, Any] = {"session_id": session_id, "message": "more"}
        missing = "11111111-1111-4111-8111-111111111111"
        refused: list[tuple[type[Exception], dict[str, Any]]] = [
            (NotFound, {"project_id": other}),
            (Conflict, {"workspace_id": missing}),
            (InvalidParams, {"create_workspace": True}),
            (InvalidParams, {"external_id": "mine"}),
            (InvalidParams, {"context": {"delivery": "poll"}}),
            (InvalidParams, {"context": {"caller_tool_timeout_s": 5}}),
        ]
        for error, wrong in refused:
            with pytest.raises(error):
                await here.ask("session_message", **named, **wrong)
        shown = await here.ask("session_get", session_id=session_id)
        assert shown["turn_count"] == 1
        same: dict[str, Any] = {"project_id": project, "workspace_id": shown["workspace_id"]}
        assert (await here.ask("session_message", **named, **same))["turn"] == 2


async def test_limits_are_those_of_a_project_or_of_a_session_and_its_project(tmp_path: Path):
    async with world(tmp_path / "h", max_depth=2) as here:
        project, other = await here.project(max_recursion_depth=1), await here.project("other")
        session_id = (await here.run(project, f"[{CHILD}]"))["session_id"]
        shown = await here.ask("config_limits", session_id=session_id)
        assert shown["project_id"] == project
        assert shown["max_recursion_depth"] == {"value": 1, "source": "project"}
        assert (shown["session"]["remaining_depth"], shown["session"]["remaining_agents"]) == (1, 49)
        assert (await here.ask("config_limits", project_id=other))["max_recursion_depth"]["value"] == 2
        with pytest.raises(InvalidParams, match="project_id is missing"):
            await here.ask("config_limits")
        with pytest.raises(NotFound):
            await here.ask("config_limits", project_id=other, session_id=session_id)
        droid = Actor(principal="d", scope=Scope.READ, project_id=other, session_id="gogol_x", derived=True)
        for params in ({"session_id": session_id}, {"project_id": other, "session_id": session_id}):
            with pytest.raises(NotFound) as refused:
                await here.ask("config_limits", actor=droid, **params)
            assert project not in str(refused.value), "and does not learn whose it is"


@pytest.mark.parametrize(("name", "setting"), [("max_recursion_depth", 3), ("max_agents_per_session", 50)])
async def test_a_projects_bounds_are_numbers_within_the_servers(tmp_path: Path, name: str, setting: int):
    async with world(tmp_path / "h") as here:
        for wrong, why in (
            (-1, "Expected `int` >= 0"),
            (setting + 1, rf"{name} {setting + 1} is more than .* bound, which is {setting}"),
            (10**30, "out of range|bound"),
        ):
            with pytest.raises(InvalidParams, match=why):
                await here.project("wrong", **{name: wrong})
        assert (await here.ask("project_list"))["projects"] == []
        for right in (0, setting):
            project = await here.project("right", **{name: right})
            assert (await here.ask("project_get", project_id=project))[name] == right


async def test_a_droids_list_of_sessions_is_its_tree_and_takes_every_parameter(tmp_path: Path):
    async with world(tmp_path / "h") as here:
        project = await here.project()
        root = (await here.run(project, f"[{CHILD}, {CHILD}]"))["session_id"]
        await here.ask("session_spawn", project_id=project, message="a stranger's", wait_seconds=20)
        droid = Actor(principal="d", scope=Scope.READ, project_id=project, session_id=root, derived=True)

        async def listed(**params: Any) -> list[str]:
            told = await here.ask("session_list", actor=droid, project_id=project, **params)
            return [one["session_id"] for one in told["sessions"]]

        newest, older, first = await listed()
        assert first == root
        assert await listed(parent_session_id=root) == [newest, older]
        assert await listed(limit=1) == [newest]
        assert await listed(offset=1, limit=1) == [older]


async def test_what_an_operation_itself_refuses_is_in_the_audit_too(tmp_path: Path):
    async with world(tmp_path / "h") as here:
        project, ant, bee = await here.project(), await here.caller("ant"), await here.caller("bee")
        session_id = (await here.run(project, '[{"say": "x"}]', actor=ant, context=TOOLS))["session_id"]
        refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
            (Forbidden, "session_message", {"session_id": session_id, "message": "x", "context": TOOLS}),
            (Conflict, "project_delete", {"project_id": project}),
            (NotFound, "caller_tool_progress", {"session_id": session_id, "request_id": "none"}),
            (Forbidden, "token_revoke", {"token_id": "oub_" + "0" * 64}),
            (InvalidParams, "session_spawn", {"project_id": "oub_" + "0" * 64, "message": 7}),
        ]
        for error, operation, params in refused:
            actor = ant if operation == "caller_tool_progress" else bee
            with pytest.raises(error):
                await here.ask(operation, actor=actor, **params)
        droid = Actor(principal="d", scope=Scope.READ, project_id=project, session_id="gogol_x", derived=True)
        for actor in (bee, droid):
            with pytest.raises(NotFound, match="session_list shows them"):
                await here.ask("session_get", actor=actor, session_id="gogol_20260101_000000_00000000")
        with pytest.raises(NotFound, match="session_list shows them"):
            await here.ask("session_events", actor=droid, session_id=session_id)
        rows = await here.rows("SELECT operation, outcome, target FROM audit WHERE outcome <> 'ok' ORDER BY id")
        assert rows == [
            ("session_message", "refused: forbidden", session_id),
            ("project_delete", "refused: conflict", project),
            ("caller_tool_progress", "refused: not_found", session_id),
            ("token_revoke", "refused: forbidden", None),
            ("session_spawn", "refused: invalid_params", None),
            *[("session_get", "refused: not_found", "gogol_20260101_000000_00000000")] * 2,
            ("session_events", "refused: not_found", session_id),
        ]


async def test_a_tree_is_read_though_the_oldest_events_of_a_child_are_gone(tmp_path: Path):
    async with world(tmp_path / "h", events_kept=20) as here:
        project = await here.project()
        busy = json.dumps([{"repeat": 40, "step": {"sh": "true"}}])
        child = json.dumps({"tool": "session_message", "args": {"message": f"<<plan {busy}>>", "wait_seconds": 20}})
        root = (await here.run(project, f"[{child}]"))["session_id"]
        (below,) = (await here.ask("session_get", session_id=root))["children"]
        page = await here.ask("session_events", session_id=root, include_children=True, max_events=500)
        read = [event["index"] for event in page["events"] if event["session_id"] == below]
        assert read[0] > 0
        assert read == list(range(read[0], read[-1] + 1))
        assert read[-1] == (await here.ask("session_get", session_id=below))["last_index"]


@either
async def test_every_mutating_call_leaves_an_audit_row_and_every_refusal_does(tmp_path: Path, suspends: bool):
    async with world(tmp_path / "h", suspends=suspends) as here:
        project, ant = await here.project(), await here.caller("ant")
        session_id = (await here.run(project, '[{"say": "x"}]', actor=ant))["session_id"]
        sleeping = {"session_id": session_id, "message": '<<plan [{"sleep": 60}]>>'}
        await here.ask("session_cancel", actor=ant, session_id=session_id)
        await here.ask("session_message", actor=ant, **sleeping)
        await until(here, session_id, "turn_started", turn=2)
        await here.ask("session_cancel", actor=ant, session_id=session_id)
        for _ in range(2):
            await here.ask("session_end", actor=ant, session_id=session_id)
        await here.ask("project_delete", actor=ant, project_id=project)
        with pytest.raises(Forbidden):
            await here.ask("token_create", actor=ant, name="n", scope="admin")
        rows = await here.rows("SELECT operation, outcome, token_id FROM audit ORDER BY id")
        assert [(operation, outcome) for operation, outcome, _ in rows] == [
            ("project_create", "ok"),
            ("token_create", "ok"),
            ("session_message", "ok"),
            ("session_cancel", "nothing open"),
            ("session_message", "ok"),
            ("session_cancel", "ok"),
            ("session_end", "ok"),
            ("session_end", "ended already"),
            ("project_delete", "begun"),
            ("project_delete", "ok"),
            ("token_create", "refused: forbidden"),
        ]
        assert [token for _, _, token in rows] == [None, None, *[ant.token_id] * 9]


async def test_without_isolation_the_built_in_droid_runs_and_refuses_commands(tmp_path: Path):
    async with world(tmp_path / "h", runtime="process") as here:
        project = await here.project()
        assert (await here.run(project, '[{"list": true}]', context=TOOLS))["result"].startswith("ant_echo")
        refused = await here.run(project, '[{"sh": "touch /tmp/oubliette-was-here"}]')
        assert "command" in refused["error"]
        assert not Path("/tmp/oubliette-was-here").exists()


async def test_commands_run_without_isolation_only_where_that_was_asked_for(tmp_path: Path):
    async with world(tmp_path / "h", runtime="process", unsafe_no_sandbox=True) as here:
        project = await here.project()
        done = await here.run(project, '[{"sh": "echo from the workspace"}, {"say": "$last"}]')
        assert "from the workspace" in done["result"]


async def test_a_session_whose_keeper_stands_still_does_not_wait_for_it_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(processes, "KEEPER_ANSWER_S", 0.3)
    usual = AcpDroids.start

    async def frozen(self: AcpDroids, session: Any, box: Any, *, api_key: str | None = None) -> AcpDroid:
        os.kill(int(box.box.handle["pid"]), signal.SIGSTOP)
        return await usual(self, session, box, api_key=api_key)

    monkeypatch.setattr(AcpDroids, "start", frozen)
    async with asyncio.timeout(60), world(tmp_path / "h", runtime="process") as here:
        project = await here.project()
        told = await here.run(project, '[{"say": "x"}]')
        error = await until(here, told["session_id"], "error")
        assert (error["kind"], error["message"]) == (
            "box_failed",
            "the box's keeper did not answer start within 0.3 s",
        )
        await here.ask("session_watch", session_id=told["session_id"], until="end", wait_seconds=20)
        assert (await here.ask("session_get", session_id=told["session_id"]))["status"] == "failed"
        assert await here.rows("SELECT state FROM processes") == [("ended",)]
        assert await here.rows("SELECT state FROM boxes") == [("ended",)]


async def test_a_turn_whose_keeper_stands_still_ends_and_the_next_has_another_box(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(app, "Patience", functools.partial(Patience, cancel_s=0.3, kill_s=0.3))
    async with asyncio.timeout(60), world(tmp_path / "h", runtime="process", turn_silence_s=1) as here:
        project = await here.project()
        assert (await here.run(project, '[{"say": "x"}]'))["result"] == "x"
        ((handle,),) = await here.rows("SELECT handle FROM boxes WHERE state = 'running'")
        os.kill(int(json.loads(handle)["pid"]), signal.SIGSTOP)
        told = await here.run(project, '[{"say": "y"}]')
        assert told["error"].startswith("the droid gave no sign of life for 1 s of its turn, and ")
        assert (await here.run(project, '[{"say": "z"}]'))["result"] == "z"


async def test_where_boxes_cannot_be_made_a_session_is_refused_with_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))  # no bwrap there
    async with world(tmp_path / "h") as here:
        project = await here.project()
        with pytest.raises(NotConfigured, match="bubblewrap"):
            await here.run(project, '[{"say": "x"}]')
        assert (await here.ask("session_list", project_id=project))["sessions"] == []


async def test_an_agent_that_never_refreshes_reaches_later_tools_by_search_and_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    usual = builtin.profile
    monkeypatch.setattr(builtin, "profile", lambda **chosen: dataclasses.replace(usual(**chosen), list_changed="none"))
    async with world(tmp_path / "h") as here:
        project, ant = await here.project(), await here.caller("ant")
        listed = await here.run(project, '[{"list": true}]', actor=ant, context=TOOLS)
        assert {"tools_search", "tools_call"} <= set(listed["result"].split(", "))
        later = {"caller_id": "ant", "caller_tools": [{"name": "later", "description": "Says when."}]}
        plan = (
            '[{"tool": "tools_search", "args": {"query": "when"}, "expect": {"contains": "ant_later"}},'
            ' {"tool": "tools_call", "args": {"name": "ant_later", "arguments": {}}}, {"say": "$last"}]'
        )
        started = await here.ask(
            "session_message", actor=ant, project_id=project, message=f"<<plan {plan}>>", context=later
        )
        session_id = started["session_id"]
        (request,) = (await here.ask("caller_tool_poll", actor=ant, session_id=session_id))["requests"]
        answer = {"session_id": session_id, "request_id": request["request_id"], "result": "now"}
        await here.ask("caller_tool_response", actor=ant, **answer)
        await here.ask("session_watch", session_id=session_id, wait_seconds=20)
        (turn,) = (await here.ask("session_get", session_id=session_id))["turns"]
        assert turn["text"].endswith("now")


async def test_an_agent_that_never_refreshes_has_its_session_opened_anew_when_the_tools_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    usual, argv = builtin.profile, (sys.executable, str(acp_agent.__file__), "plain")
    told = {"argv": argv, "list_changed": "none"}
    monkeypatch.setattr(builtin, "profile", lambda **chosen: dataclasses.replace(usual(**chosen), **told))
    history = json.dumps([{"act": "say-methods"}, {"act": "answer", "result": {"stopReason": "end_turn"}}])
    async with world(tmp_path / "h", runtime="process", unsafe_no_sandbox=True) as here:
        project, ant = await here.project(), await here.caller("ant")
        said: list[str] = []
        later = {"context": {"caller_id": "ant", "caller_tools": [{"name": "later"}]}}
        contexts: list[dict[str, Any]] = [{"context": TOOLS}, {}, {"context": TOOLS}, later]
        for context in contexts:
            asked: dict[str, Any] = {"project_id": project, "message": history, "wait_seconds": 20, **context}
            said.append((await here.ask("session_message", actor=ant, **asked))["result"])
        assert said[2] == "initialize new set_mode prompt prompt prompt"
        assert said[3] == f"{said[2]} resume set_mode prompt"


@pytest.mark.parametrize("agent", ["asks", "never asks"])
async def test_an_agent_that_has_not_asked_for_its_tools_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: str
):
    monkeypatch.setattr(session, "LISTED_WITHIN_S", 0.2)
    plan = '<<plan [{"sleep": 0.5}]>>'
    if agent == "never asks":
        argv = (sys.executable, str(acp_agent.__file__), "plain")
        usual = builtin.profile
        monkeypatch.setattr(builtin, "profile", lambda **chosen: dataclasses.replace(usual(**chosen), argv=argv))
        done = {"act": "answer", "result": {"stopReason": "end_turn"}}
        plan = json.dumps([{"act": "trickle", "n": 5, "s": 0.1}, done])
    async with world(tmp_path / "h", runtime="process", unsafe_no_sandbox=True) as here:
        project = await here.project()
        told = await here.ask("session_message", project_id=project, message=plan, wait_seconds=20)
        warnings = [one["kind"] for one in await here.events(told["session_id"]) if one["type"] == "warning"]
        assert ("mcp_not_connected" in warnings) is (agent == "never asks")


async def test_children_whose_parents_end_the_server_did_not_outlive_are_ended_by_the_next(tmp_path: Path):
    async with ServerProcess(tmp_path / "h") as server:
        project = (await server.ask("project_create", name="p"))["id"]
        plan = f"<<plan [{CHILD}]>>"
        root = (await server.ask("session_message", project_id=project, message=plan, wait_seconds=20))["session_id"]
        (child,) = (await server.ask("session_get", session_id=root))["children"]
        await server.kill()
        # As a kill between the two commits leaves it.
        database = SqliteDatabase(Home(server.home).database)
        await database.write(
            lambda tx: tx.run("UPDATE sessions SET state = 'completed', ended_at = 1.0 WHERE id = ?", root)
        )
        await database.close()
        await server.restart()
        await server.ask("session_watch", session_id=child, until="end", wait_seconds=20)
        shown = await server.ask("session_get", session_id=child)
        assert (shown["status"], shown["reason"]) == ("completed", "its parent ended")


@either
async def test_a_message_that_comes_as_its_session_idles_out_is_sent(
    tmp_path: Path, suspends: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(session.LiveSession, "wake", lambda _: None)  # as if it had just given up waiting
    async with world(tmp_path / "h", suspends=suspends, idle_after_s=1.0) as here:
        project = await here.project()
        first = await here.run(project, '[{"say": "one"}]')
        second = await here.run(project, '[{"say": "two"}]')
        assert (second["session_id"], second["turn"], second.get("result")) == (first["session_id"], 2, "two")


async def test_a_session_does_not_idle_out_while_one_below_it_is_at_work(tmp_path: Path):
    async with world(tmp_path / "h", idle_after_s=0.2) as here:
        project = await here.project()
        child = (
            '{"tool": "session_message", "args": {"message": "<<plan [{\\"sleep\\": 1}, {\\"say\\": \\"done\\"}]>>"}}'
        )
        root = (await here.run(project, f"[{child}]"))["session_id"]
        (below,) = (await here.ask("session_get", session_id=root))["children"]
        await here.ask("session_watch", session_id=root, until="end", wait_seconds=20)
        assert (await here.ask("session_get", session_id=root))["status"] == "timed_out"
        (turn,) = (await here.ask("session_get", session_id=below))["turns"]
        assert (turn["stop_reason"], turn["text"]) == ("end_turn", "done")


@either
async def test_an_ended_session_keeps_its_last_words_and_its_status_is_the_last_event(tmp_path: Path, suspends: bool):
    async with world(tmp_path / "h", suspends=suspends) as here:
        project = await here.project()
        plan = '<<plan [{"say": "half of it"}, {"sleep": 60}]>>'
        started = await here.ask("session_message", project_id=project, message=plan)
        session_id = started["session_id"]
        await until(here, session_id, "delta")
        watching = here.ask("session_watch", session_id=session_id, until="end", wait_seconds=20)
        ending = (here.ask("session_end", session_id=session_id) for _ in range(3))
        watched, *ended = await asyncio.gather(watching, *ending)
        assert [one["status"] for one in ended] == ["completed"] * 3
        log = await here.events(session_id)
        assert [event["type"] for event in log[-3:]] == ["message", "completion", "status"]
        assert (log[-2]["stop_reason"], log[-2]["text"]) == ("session_ended", "half of it")
        assert (log[-1]["status"], log[-1]["reason"]) == ("completed", "ended on request")
        shown = await here.ask("session_get", session_id=session_id)
        assert (shown["turns"][0]["stop_reason"], shown["turns"][0]["text"]) == ("session_ended", "half of it")
        assert watched["last_index"] == log[-1]["index"]
        rows = await here.rows("SELECT outcome FROM audit WHERE operation = 'session_end'")
        assert sorted(rows) == [("ended already",), ("ended already",), ("ok",)]


async def test_whoever_asked_for_an_end_may_leave_and_it_comes(tmp_path: Path):
    async with world(tmp_path / "h") as here:
        project = await here.project()
        started = await here.ask("session_message", project_id=project, message='<<plan [{"sleep": 60}]>>')
        session_id = started["session_id"]
        await until(here, session_id, "turn_started")
        async with asyncio.TaskGroup() as asking, asyncio.timeout(10):
            asked = asking.create_task(here.ask("session_end", session_id=session_id))
            while not await here.rows("SELECT 1 FROM sessions WHERE ending IS NOT NULL"):
                await asyncio.sleep(0)
            asked.cancel()
        await here.ask("session_watch", session_id=session_id, until="end", wait_seconds=20)
        assert (await here.ask("session_get", session_id=session_id))["status"] == "completed"


async def test_a_session_that_fails_with_a_call_open_says_so_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with world(tmp_path / "h") as here:
        project, ant = await here.project(), await here.caller("ant")
        plan = '<<plan [{"tool": "ant_echo", "args": {}}]>>'
        monkeypatch.setattr(session, "TOUCH_EVERY_S", 0.1)
        told = await here.ask("session_message", actor=ant, project_id=project, message=plan, context=TOOLS)
        await here.ask("caller_tool_poll", actor=ant, session_id=told["session_id"])
        with monkeypatch.context() as broken:
            broken.setattr(Exchange, "pending_count", lambda *_: 1 / 0)
            await here.ask("session_watch", session_id=told["session_id"], until="end", wait_seconds=20)
        log = await here.events(told["session_id"])
        assert (log[-1]["type"], log[-1].get("status")) == ("status", "failed")
        assert "caller_tool_resolved" in [event["type"] for event in log]


async def test_a_server_that_finds_a_session_ending_ends_it_with_what_was_said(tmp_path: Path):
    async with ServerProcess(tmp_path / "h") as server:
        project = (await server.ask("project_create", name="p"))["id"]
        plan = '<<plan [{"say": "half of it"}, {"sleep": 60}]>>'
        session_id = (await server.ask("session_message", project_id=project, message=plan))["session_id"]
        await until(server, session_id, "delta")
        await server.kill()
        database = SqliteDatabase(Home(server.home).database)
        # As a kill right after the decision leaves it.
        await database.write(lambda tx: ends.decide(tx, session_id, Move.END, "ended on request", 1.0))
        await database.close()
        await server.restart()
        await server.ask("session_watch", session_id=session_id, until="end", wait_seconds=20)
        log = (await server.ask("session_events", session_id=session_id))["events"]
        assert [event["type"] for event in log[-3:]] == ["message", "completion", "status"]
        assert (log[-2]["stop_reason"], log[-2]["text"]) == ("session_ended", "half of it")
        assert log[-1]["status"] == "completed"
