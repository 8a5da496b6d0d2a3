"""A caller that is there, goes, comes back, or never was: over every carrier."""

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio

from tests.kit.mcp_caller import Era, McpCaller
from tests.kit.scene import Scene, lent, planned, scene
from tests.kit.server import ServerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[ServerProcess]:
    async with ServerProcess(tmp_path_factory.mktemp("presence") / "home", disconnect_grace_s=2) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def here(server: ServerProcess) -> AsyncGenerator[Scene]:
    async with scene(server) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def strict(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[ServerProcess]:
    """A server that grants a caller no time to come back."""
    async with ServerProcess(tmp_path_factory.mktemp("presence") / "home", disconnect_grace_s=0) as started:
        yield started


# An answer to session_message promises that the caller is about to listen, for so long.
PROMISE_S = 5.0
CALL = {"tool": "ant_any", "expect": {"is_error": True, "contains": "disconnected"}}


@pytest.mark.seed("REQ-CTR-001.3", "CTR-ERROR.1")
async def test_with_no_grace_a_caller_that_disconnects_is_an_error_at_once(strict: ServerProcess) -> None:
    async with scene(strict) as here, here.caller() as caller:
        session_id = await here.start(caller, [{"sleep": PROMISE_S}, CALL, {"say": "went on"}], context=lent())
        request = await caller.request()
        left = time.time()
        await caller.drop()
        turn = (await here.turn(session_id)).worked()
        (ended,) = turn.of("caller_tool_resolved")
        assert ended["outcome"] == "disconnected"
        assert ended["at"] - left < 1
        assert ended["request_id"] == request["request_id"]
    assert "went on" in turn.text


@pytest.mark.seed("REQ-CTR-001.3")
async def test_a_caller_that_stays_away_for_longer_than_the_grace_is_gone_within_a_second(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.start(caller, [{"sleep": PROMISE_S - 1.5}, CALL], context=lent())
        await caller.request()
        left = time.time()
        await caller.drop()
        (ended,) = (await here.turn(session_id)).worked().of("caller_tool_resolved")
        assert ended["outcome"] == "disconnected"
        assert 1.5 < ended["at"] - left < 3


@pytest.mark.seed("REQ-CTR-001.3", "CTR-ERROR.1")
async def test_the_error_on_the_socket_says_that_the_caller_is_gone(strict: ServerProcess) -> None:
    async with scene(strict) as here:
        # Who starts a session and never holds anything.
        async with here.caller(stream=False) as caller:
            session_id = await here.rest(caller, context=lent())
        async with here.box(session_id) as box:
            began = time.monotonic()
            told = await box.ask("caller_tool", tool="any", arguments={})
            assert told["error"]["data"] == {"kind": "disconnected", "retryable": False}
            assert time.monotonic() - began < PROMISE_S + 1
            # Nothing is promised any more: at once.
            began = time.monotonic()
            told = await box.ask("caller_tool", tool="any", arguments={})
            assert told["error"]["data"]["kind"] == "disconnected"
            assert time.monotonic() - began < 1


async def again(caller: McpCaller, session_id: str) -> None:
    """Come back by another carrier than the one that broke."""
    if caller.era == "legacy":
        await caller.open_stream()
    else:
        await caller.watch(session_id)


@pytest.mark.parametrize("era", ["legacy", "modern"])
async def test_a_caller_that_comes_back_in_time_is_asked_again_and_only_once(here: Scene, era: Era) -> None:
    async with here.caller(era=era) as caller:
        plan = [{"tool": "ant_any", "expect": {"is_error": False, "contains": "back"}}]
        session_id = await here.start(caller, plan, context=lent())
        if era == "modern":
            await caller.watch(session_id)
        first = await caller.request()
        assert first["redelivery"] == 0
        await caller.drop()
        await again(caller, session_id)
        second = await caller.request()
        assert second["request_id"] == first["request_id"]
        assert second["redelivery"] == 1
        assert second["arguments"] == first["arguments"]
        await caller.answer(second, "I am back")
        turn = (await here.turn(session_id)).worked()
        assert len(turn.of("caller_tool_request")) == 1, "one call is one record"
        assert caller.requests.empty()


async def test_a_caller_that_comes_back_with_another_mcp_session_takes_its_calls_over(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent())
        async with here.box(session_id) as box:
            asked = await box.request("caller_tool", tool="any", arguments={})
            first = await caller.request()
            await caller.drop()
            async with here.caller() as reborn:
                await reborn.call("session_events", session_id=session_id, max_events=1)
                second = await reborn.request()
                assert (second["request_id"], second["redelivery"]) == (first["request_id"], 1)
                await reborn.answer(second, "reborn")
                assert (await box.answer(asked))["result"] == "reborn"


@pytest.mark.seed("CTR-SDK.1")
@pytest.mark.parametrize("level", [None, "error", "emergency"])
async def test_a_legacy_client_gets_requests_whatever_level_it_set(here: Scene, level: str | None) -> None:
    async with here.caller() as caller:
        if level is not None:
            assert "result" in await caller.ask("logging/setLevel", {"level": level})
        session_id = await here.rest(caller, context=lent())
        async with here.box(session_id) as box:
            asked = await box.request("caller_tool", tool="any", arguments={})
            await caller.answer(await caller.request(), "heard")
            assert (await box.answer(asked))["result"] == "heard"
        if level is None:
            await caller.until("completion")
        else:
            assert {one["type"] for one in caller.heard} == {"caller_tool_request"}, "its level holds for the rest"


@pytest.mark.parametrize("carrier", ["watch", "listen", "poll"])
async def test_every_carrier_of_the_stateless_era_brings_requests(here: Scene, carrier: str) -> None:
    async with here.caller(era="modern") as caller:
        session_id = await here.rest(caller, context=lent())
        if carrier == "watch":
            await caller.watch(session_id)
        elif carrier == "listen":
            await caller.listen(session_id)
        async with here.box(session_id) as box:
            for n in range(3):
                asked = await box.request("caller_tool", tool="any", arguments={"n": n})
                if carrier == "poll":
                    await caller.poll(session_id)
                request = await caller.request()
                assert (request["tool"], request["arguments"]) == ("any", {"n": n})
                await caller.answer(request, n)
                assert (await box.answer(asked))["result"] == n
        assert caller.requests.empty()


async def test_a_request_is_on_one_carrier_at_a_time(here: Scene) -> None:
    async with here.caller() as caller, here.caller(era="modern") as beside:
        session_id = await here.rest(caller, context=lent())
        await beside.watch(session_id)
        async with here.box(session_id) as box:
            asked = await box.request("caller_tool", tool="any", arguments={})
            request = await beside.request()
            assert request["redelivery"] == 0
            assert caller.requests.empty(), "the newest carrier alone has it"
            await beside.drop()
            moved = await caller.request()
            assert (moved["request_id"], moved["redelivery"]) == (request["request_id"], 1)
            await caller.answer(moved, "by the older one")
            assert (await box.answer(asked))["result"] == "by the older one"


@pytest.mark.parametrize("how", ["watch", "listen"])
async def test_what_named_a_child_that_has_ended_carries_its_tree_no_longer(here: Scene, how: str) -> None:
    child = {"tool": "session_message", "args": {"message": planned([{"say": "done"}])}}
    async with here.caller() as caller, here.caller(era="modern") as beside:
        session_id = await here.rest(caller, context=lent())
        await here.more(caller, session_id, [child])
        await here.turn(session_id, 2)
        (child_id,) = (await caller.call("session_get", session_id=session_id))["children"]
        await (beside.watch(child_id) if how == "watch" else beside.listen(child_id))
        await caller.call("session_end", session_id=child_id)
        if how == "watch":
            await beside.ended()
        else:
            await beside.drop()
        async with here.box(session_id) as box:
            asked = await box.request("caller_tool", tool="any", arguments={})
            await caller.answer(await caller.request(), "heard")
            assert (await box.answer(asked))["result"] == "heard"


async def test_a_poll_whose_asker_has_gone_is_nobodys_presence(here: Scene) -> None:
    async with here.caller(stream=False) as gone, asyncio.TaskGroup() as tasks:
        session_id = await here.rest(gone, context=lent())
        polling = tasks.create_task(gone.poll(session_id, seconds=40))
        for _ in range(3):  # the poll has left
            await gone.call("project_list")
        polling.cancel()
        await asyncio.wait((polling,))
        async with here.box(session_id) as box:
            told = await box.ask("caller_tool", tool="any", arguments={})
            assert told["error"]["data"]["kind"] == "disconnected", "not in forty seconds: within the grace"


async def test_between_two_polls_a_stream_brings_what_comes(here: Scene) -> None:
    """A poll that was answered promises the next; who opens a stream instead is told there."""
    async with here.caller(stream=False) as caller:
        session_id = await here.rest(caller, context=lent())
        async with here.box(session_id) as box:
            asked = [await box.request("caller_tool", tool="any", arguments={"n": 0})]
            (first,) = await caller.poll(session_id)
            await caller.requests.get()
            asked.append(await box.request("caller_tool", tool="any", arguments={"n": 1}))
            await here.until(session_id, "caller_tool_request", arguments={"n": 1})
            await caller.open_stream()
            asked.append(await box.request("caller_tool", tool="any", arguments={"n": 2}))
            for n in (1, 2):
                request = await caller.request()
                assert request["arguments"] == {"n": n}
                await caller.answer(request, n)
            await caller.answer(first, 0)
            assert [(await box.answer(one))["result"] for one in asked] == [0, 1, 2]


async def test_more_than_a_stream_may_hold_reaches_who_reads_it(here: Scene) -> None:
    """Four mebibytes may wait in a stream; what is announced waits for that to be read."""
    async with here.caller(stream=False) as caller:
        session_id = await here.rest(caller, context=lent())
        async with here.box(session_id) as box:
            text = "z" * 200_000
            asked = [await box.request("caller_tool", tool="any", arguments={"t": text, "n": n}) for n in range(40)]
            await here.until(session_id, "caller_tool_request", arguments={"t": text, "n": 39})
            await caller.open_stream()
            for n in range(40):
                request = await caller.request()
                assert (request["arguments"]["n"], request["redelivery"]) == (n, 0)
                await caller.answer(request, n)
            assert [(await box.answer(one))["result"] for one in asked] == list(range(40))
        assert [one for one in caller.heard if one.get("kind") == "slow_reader"] == []


async def test_who_lends_by_poll_never_counts_as_gone(strict: ServerProcess) -> None:
    async with scene(strict) as here, here.caller(stream=False) as caller:
        context = lent(delivery="poll", caller_tool_timeout_s=PROMISE_S + 1)
        session_id = await here.rest(caller, context=context)
        async with here.box(session_id) as box:
            told = await box.ask("caller_tool", tool="any", arguments={})
            assert told["error"]["data"]["kind"] == "timeout", "not disconnected"
            asked = await box.request("caller_tool", tool="any", arguments={"n": 2})
            (request,) = await caller.poll(session_id)
            await caller.answer(request, 2)
            assert (await box.answer(asked))["result"] == 2


async def test_a_stream_of_somebody_else_is_nobodys_presence(strict: ServerProcess) -> None:
    async with scene(strict) as here:
        stranger = await here.token("admin")
        async with here.caller(stream=False) as caller, here.caller(stranger["token"], era="modern") as other:
            session_id = await here.start(caller, [{"sleep": PROMISE_S}, CALL], context=lent())
            await other.watch(session_id)
            (await here.turn(session_id)).worked()
            seen: list[dict[str, Any]] = [one for one in other.heard if one["type"] == "caller_tool_request"]
        assert len(seen) <= 1, "a follower sees the record"


async def test_a_caller_that_ends_its_mcp_session_counts_as_gone(strict: ServerProcess) -> None:
    async with scene(strict) as here, here.caller() as caller:
        session_id = await here.start(caller, [{"sleep": PROMISE_S}, CALL], context=lent())
        await caller.request()
        left = time.time()
        await caller.end()
        (ended,) = (await here.turn(session_id)).worked().of("caller_tool_resolved")
        assert (ended["outcome"], ended["at"] - left < 1) == ("disconnected", True)


async def test_an_owner_without_a_stream_is_told_with_its_next_request(here: Scene) -> None:
    async with here.caller(stream=False) as caller:
        session_id = await here.rest(caller, context=lent())
        async with here.box(session_id) as box:
            asked = await box.request("caller_tool", tool="any", arguments={"n": 1})
            await here.until(session_id, "caller_tool_request")
            for operation in ("session_get", "session_events"):
                told = await caller.call(operation, session_id=session_id)
                assert told["pending_caller_requests"] == 1, operation
            (request,) = (await caller.call("caller_tool_pending", session_id=session_id))["requests"]
            await caller.answer(request, "found it")
            assert (await box.answer(asked))["result"] == "found it"


async def test_after_a_restart_nobody_counts_as_gone_for_a_while(tmp_path_factory: pytest.TempPathFactory) -> None:
    home = tmp_path_factory.mktemp("presence") / "home"
    async with (
        ServerProcess(home, disconnect_grace_s=0, restart_grace_s=3) as server,
        scene(server) as here,
        here.caller() as caller,
    ):
        back = {"tool": "ant_any", "expect": {"is_error": False, "contains": "back"}}
        session_id = await here.start(caller, [back, CALL], context=lent())
        first = await caller.request()
        await server.kill()
        await server.restart()
        await asyncio.sleep(1)
        await caller.open_stream()
        again = await caller.request()
        assert again["request_id"] == first["request_id"]
        await caller.answer(again, "back")
        await caller.request()
        await server.kill()
        await server.restart()
        began = time.time()
        turn = await here.turn(session_id)
        (_, ended) = turn.worked().of("caller_tool_resolved")
        assert ended["outcome"] == "disconnected"
        assert 2 < ended["at"] - began < 6
