"""The log of a session: dense, paged without loss, the same by push and by page; and what an end frees."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio

from oubliette.server.events.log import PURGE_EVERY
from tests.kit.inhabitants import inhabitants, namespace
from tests.kit.mcp_caller import McpCaller, Refused
from tests.kit.records import records
from tests.kit.scene import Scene, lent, scene
from tests.kit.server import ServerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[ServerProcess]:
    async with ServerProcess(
        tmp_path_factory.mktemp("log") / "home", events_kept=60, sessions_per_project=3
    ) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def here(server: ServerProcess) -> AsyncGenerator[Scene]:
    async with scene(server) as made:
        yield made


async def paged(caller: McpCaller, session_id: str, size: int, since: int = -1) -> list[dict[str, Any]]:
    """The log by the documented loop, in pages of a size."""
    events: list[dict[str, Any]] = []
    while True:
        told = await caller.call("session_events", session_id=session_id, since_index=since, max_events=size)
        assert len(told["events"]) <= size
        if not told["events"]:
            return events
        events += told["events"]
        since = told["last_index"]
        assert since == told["events"][-1]["index"], "of the last event of the page, not of the log"


async def test_indices_are_dense_and_paging_of_any_size_loses_nothing(here: Scene) -> None:
    async with here.caller() as caller:
        plan = [{"say": f"word {n}"} for n in range(12)]
        session_id = await here.start(caller, plan, context=lent())
        (await here.turn(session_id)).worked()
        whole = await paged(caller, session_id, 500)
        assert [one["index"] for one in whole] == list(range(len(whole)))
        for size in (1, 2, 3, 7, len(whole)):
            assert await paged(caller, session_id, size) == whole
        assert [one["at"] for one in whole] == sorted(one["at"] for one in whole)


async def test_push_and_page_together_are_exactly_the_log(here: Scene) -> None:
    async with here.caller() as caller:
        plan: list[dict[str, Any]] = [{"say": "a"}, {"tool": "ant_any"}, {"say": "b"}, {"tool": "ant_any"}]
        session_id = await here.start(caller, plan, context=lent())
        await caller.answer(await caller.request(), 1)
        await caller.drop()
        await caller.open_stream()  # what was missed meanwhile comes now
        await caller.answer(await caller.request(), 2)
        (await here.turn(session_id)).worked()
        last = (await here.events(session_id))[-1]["index"]
        await caller.until("status", index=last)
        log = {one["index"]: one for one in await here.events(session_id)}
        pushed: dict[int, dict[str, Any]] = {}
        for one in caller.heard:
            before = pushed.setdefault(one["index"], one)
            assert one["type"] == "caller_tool_request" or before is one, "nothing comes twice"
        missing = set(log) - set(pushed)
        assert {log[index]["type"] for index in missing} <= {"delta"}, "deltas come on request only"
        for index, one in pushed.items():
            assert {name: one.get(name) for name in log[index]} == log[index]


async def test_large_events_are_pushed_small_and_paged_whole(here: Scene) -> None:
    """Readers of some clients stop at an event of 1 MiB, and their stream and all its calls with it."""
    large = "x" * 1_500_000
    async with here.caller() as caller, here.caller(era="modern") as modern:
        plan = [{"tool": "ant_any"}, {"tool": "ant_any", "expect": {"contains": "small"}}, {"say": "$last"}]
        session_id = await here.start(caller, plan, context=lent())
        request = await caller.request()
        await modern.watch(session_id)
        await caller.answer(request, large)
        await modern.answer(await modern.request(), "small")
        whole = (await here.turn(session_id)).worked().results[0]
        assert large in str(whole["content"])
        for one in (caller, modern):
            pushed = await one.until("tool_result", index=whole["index"])
            assert pushed["left_out"] == ["content"]
            assert {name: value for name, value in whole.items() if name != "content"} == {
                name: value for name, value in pushed.items() if name != "left_out"
            }
            assert max(len(json.dumps(frame)) for frame in one.frames) < 300_000
        told = await here.server.ask("session_watch", session_id=session_id, wait_seconds=0)
        (kept,) = (one for one in told["events"] if one["index"] == whole["index"])
        assert kept["left_out"] == ["content"], "a watch that cannot push keeps them small, too"
        assert told["ended_by"] == "idle"


async def test_what_a_watch_keeps_has_a_bound_in_bytes(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.start(caller, [{"tool": "ant_any"}] * 6, context=lent())
        for _ in range(6):
            await caller.answer(await caller.request(), "y" * 100_000)
        whole = (await here.turn(session_id)).worked().events
        kept: list[dict[str, Any]] = []
        pages = 0
        while True:
            since = kept[-1]["index"] if kept else -1
            told = await here.server.ask("session_watch", session_id=session_id, since_index=since, wait_seconds=0)
            assert len(json.dumps(told["events"])) < 500_000, "it stands in its answer twice"
            kept += told["events"]
            if told["ended_by"] == "idle":
                break
            assert told["ended_by"] == "page"
            pages += 1
        assert pages > 1
        assert kept == [one for one in whole if one["type"] != "delta"], "and the next watch goes on from there"


async def test_beyond_the_bound_the_oldest_go_and_asking_for_them_names_the_oldest_that_is_kept(here: Scene) -> None:
    async with here.caller() as caller:
        plan = [{"repeat": 120, "step": {"tool": "session_events", "args": {"session_id": "none"}}}]
        session_id = await here.start(caller, plan, context=lent())
        (await here.turn(session_id)).worked()
        with pytest.raises(Refused) as refused:
            await caller.call("session_events", session_id=session_id, since_index=-1)
        assert refused.value.kind == "purged"
        shown = await caller.call("session_get", session_id=session_id)
        last = shown["last_index"]
        told = re.search(r"oldest available: (\d+)", refused.value.text)
        assert told is not None
        oldest = int(told[1])
        # The oldest go some at a time: never fewer than the bound are kept, and never many more.
        assert 60 <= last - oldest + 1 <= 60 + PURGE_EVERY
        kept = await paged(caller, session_id, 7, since=oldest - 1)
        assert [one["index"] for one in kept] == list(range(oldest, last + 1))


async def test_a_page_waits_for_the_next_event_and_only_for_it(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent())
        last = (await here.events(session_id))[-1]["index"]
        loop = asyncio.get_running_loop()
        began = loop.time()
        told = await caller.call("session_events", session_id=session_id, since_index=last, wait_seconds=0.3)
        assert told["events"] == []
        assert 0.25 < loop.time() - began < 5
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(
                caller.call("session_events", session_id=session_id, since_index=last, wait_seconds=30)
            )
            began = loop.time()
            await here.more(caller, session_id, [{"say": "x"}])
        assert waiting.result()["events"][0]["index"] == last + 1
        assert loop.time() - began < 5


async def test_a_log_and_its_turns_are_readable_after_the_server_was_killed(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    async with (
        ServerProcess(tmp_path_factory.mktemp("log") / "home") as server,
        scene(server) as here,
        here.caller() as caller,
    ):
        session_id = await here.start(caller, [{"say": "first"}])
        (await here.turn(session_id)).worked()
        before = await here.events(session_id)
        await server.kill()
        await server.restart()
        after = await here.events(session_id)
        assert after[: len(before)] == before
        assert [one["index"] for one in after] == list(range(len(after)))
        shown = await here.server.ask("session_get", session_id=session_id)
        assert (shown["turns"][0]["text"], shown["turns"][0]["stop_reason"]) == ("first", "end_turn")
        await here.more(caller, session_id, [{"say": "second"}])
        assert (await here.turn(session_id, 2)).worked().text == "second"


async def test_session_end_ends_droid_children_calls_and_key_and_leaves_nothing(here: Scene) -> None:
    async with here.caller() as caller:
        child = {"message": 'wait <<plan [{"sleep": 600}]>>'}
        plan: list[dict[str, Any]] = [
            {"tool": "session_message", "args": child, "expect": {"is_error": False}},
            {"sh": "setsid sleep 600 >/dev/null 2>&1 &"},
            {"parallel": [{"tool": "ant_any"}, {"sleep": 600}]},
        ]
        session_id = await here.start(caller, plan, context=lent(), oubliette_scope="write")
        request = await caller.request()
        started = await here.until(session_id, "child_started")
        await here.until(started["child_session_id"], "turn_started")
        folders = [here.folder(session_id), here.folder(started["child_session_id"])]
        boxes = [namespace(folder) for folder in folders]
        assert len(inhabitants(boxes[0])) > 3, "keeper, droid, client, and what the droid began"
        ended = await caller.call("session_end", session_id=session_id)
        assert ended == {"session_id": session_id, "status": "completed"}
        assert not any(folder.exists() for folder in folders)
        assert [inhabitants(box) for box in boxes] == [[], []]
        shown = await caller.call("session_get", session_id=started["child_session_id"])
        assert shown["status"] == "completed"
        assert (await caller.until("caller_tool_cancelled"))["request_id"] == request["request_id"]
        (key,) = records(here.server.home, "tokens", session_id=session_id)
        assert key["revoked_at"] is not None
        assert records(here.server.home, "calls", session_id=session_id, state="pending") == []
        with pytest.raises(Refused):
            await here.more(caller, session_id, [{"say": "no"}])


async def test_finished_sessions_hold_no_place(here: Scene) -> None:
    """The project takes three at a time; the seventh of seven is fine where the fourth of four at once is not."""
    async with here.caller() as caller:
        for _ in range(7):
            session_id = await here.rest(caller)
            await caller.call("session_end", session_id=session_id)
        for _ in range(3):
            await here.rest(caller)
        with pytest.raises(Refused) as refused:
            await here.start(caller, [])
        assert refused.value.kind == "too_many"


async def test_turns_keep_their_text_times_and_reason(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.start(caller, [{"say": "one"}])
        (await here.turn(session_id)).worked()
        await here.more(caller, session_id, [{"fail": "as planned"}])
        turn = await here.turn(session_id, 2)
        assert "as planned" in turn.failure
        shown = await caller.call("session_get", session_id=session_id, turns=5)
    first, second = sorted(shown["turns"], key=lambda one: one["turn"])
    assert (first["text"], first["stop_reason"]) == ("one", "end_turn")
    assert first["created_at"] <= first["started_at"] <= first["ended_at"]
    assert "as planned" in second["error"]
    assert second["stop_reason"] != "end_turn", "an end is not success"


async def test_messages_for_a_busy_session_wait_their_turn_in_order(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.start(caller, [{"tool": "ant_any"}, {"say": "first"}], context=lent())
        request = await caller.request()
        told = [await here.more(caller, session_id, [{"say": f"turn {n}"}]) for n in range(2, 18)]
        assert [one["turn"] for one in told] == list(range(2, 18))
        with pytest.raises(Refused) as refused:
            await here.more(caller, session_id, [{"say": "one too many"}])
        assert refused.value.kind == "too_many"
        await caller.answer(request, 1)
        await caller.until("completion", turn=17)
        shown = await caller.call("session_get", session_id=session_id, turns=100)
        texts = [one["text"] for one in sorted(shown["turns"], key=lambda one: one["turn"])]
        assert texts == ["first", *(f"turn {n}" for n in range(2, 18))]


async def test_a_session_that_is_ended_right_after_a_restart_leaves_nothing_either(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Its box is being taken up again at that very moment."""
    async with ServerProcess(tmp_path_factory.mktemp("log") / "home") as server, scene(server) as here:
        async with here.caller() as caller:
            sessions = [await here.rest(caller, context=lent()) for _ in range(3)]
        folders = [here.folder(session_id) for session_id in sessions]
        boxes = [namespace(folder) for folder in folders]
        await server.kill()
        await server.restart()
        for session_id in sessions:
            await server.ask("session_end", session_id=session_id)
        assert [inhabitants(box) for box in boxes] == [[], [], []]
        assert not any(folder.exists() for folder in folders)
