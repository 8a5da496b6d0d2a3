"""Deaths and departures at no chosen moment: servers in a storm of calls, droids, keepers, keys, boxes left alone."""

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from oubliette import Caller
from tests.kit.inhabitants import Namespace, inhabitants, namespace
from tests.kit.mcp_caller import Refused
from tests.kit.records import records
from tests.kit.scene import Scene, lent, planned, scene
from tests.kit.server import ServerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[ServerProcess]:
    async with ServerProcess(tmp_path_factory.mktemp("turmoil") / "home") as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def here(server: ServerProcess) -> AsyncGenerator[Scene]:
    async with scene(server) as made:
        yield made


CALLS = 24


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("seed", [1, 2])
async def test_a_storm_of_calls_survives_servers_that_end_at_any_moment(tmp_path: Path, how: str, seed: int) -> None:
    """Twenty-four calls at once and more behind them; the server goes three times; each tool runs exactly once."""
    chance = random.Random(f"{how} {seed}")
    ran: list[int] = []
    async with ServerProcess(tmp_path / "home", disconnect_grace_s=10) as server, scene(server) as here:
        async with here.caller(stream=False) as starter:
            session_id = await here.rest(starter, context=lent([{"name": "work"}]))
        async with Caller(server.url, server.token, caller_id="ant") as caller:

            @caller.tool
            async def work(n: int) -> dict[str, int]:
                ran.append(n)
                await asyncio.sleep(chance.uniform(0, 0.3))
                return {"did": n}

            await caller.attach(session_id)
            steps: list[dict[str, Any]] = [
                {
                    "parallel": [
                        {"tool": "ant_work", "args": {"n": n}, "expect": {"is_error": False, "equals": {"did": n}}}
                        for n in range(part, part + CALLS)
                    ]
                }
                for part in (0, CALLS, 2 * CALLS)
            ]
            await server.ask("session_message", session_id=session_id, message=planned(steps))
            for _ in range(3):
                await asyncio.sleep(chance.uniform(0.02, 0.4))
                await (server.kill() if how == "kill" else server.stop())
                await server.restart()
            turn = (await here.turn(session_id, 2)).worked()
        rows = records(server.home, "calls", session_id=session_id)
        assert [row["state"] for row in rows] == ["answered"] * 3 * CALLS
        assert len(turn.of("caller_tool_resolved")) == 3 * CALLS
        assert [event["index"] for event in turn.events] == list(range(len(turn.events)))
    assert sorted(ran) == list(range(3 * CALLS))


def programs(box: Namespace, word: bytes) -> list[int]:
    """Processes in a box whose command has this word."""
    commands = {pid: (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0") for pid in inhabitants(box)}
    return [pid for pid, command in commands.items() if word in command]


async def test_a_droid_that_dies_ends_its_turn_as_an_error_and_the_next_turn_has_another(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.start(caller, [{"tool": "ant_any"}], context=lent())
        request = await caller.request()
        (droid,) = programs(namespace(here.folder(session_id)), b"droid")
        os.kill(droid, signal.SIGKILL)
        turn = await here.turn(session_id)
        assert turn.failure
        assert turn.completion["stop_reason"] != "end_turn"
        await caller.until("caller_tool_cancelled", request_id=request["request_id"])
        await here.more(caller, session_id, [{"tool": "ant_any", "expect": {"contains": "again"}}])
        await caller.answer(await caller.request(), "again")
        (await here.turn(session_id, 2)).worked()


async def test_a_keeper_that_dies_takes_its_box_with_it_and_the_next_turn_has_another(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.start(caller, [{"tool": "ant_any"}], context=lent())
        await caller.request()
        folder = here.folder(session_id)
        box = namespace(folder)
        (keeper,) = programs(box, b"keeper")
        os.kill(keeper, signal.SIGKILL)
        turn = await here.turn(session_id)
        assert turn.failure
        assert inhabitants(box) == []
        assert not folder.exists()
        await here.more(caller, session_id, [{"say": "in another box"}])
        assert (await here.turn(session_id, 2)).worked().text == "in another box"


async def test_a_box_whose_server_never_returns_ends_itself(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "home", box_abandoned_after_s=1)
    async with server:
        async with scene(server) as here, here.caller() as caller:
            session_id = await here.start(caller, [{"sleep": 600}])
            await here.until(session_id, "turn_started")
            folder = here.folder(session_id)
            box = namespace(folder)
            await server.kill()
            assert inhabitants(box)
            async with asyncio.timeout(20):
                while inhabitants(box):
                    await asyncio.sleep(0.1)
            await server.restart()
            turn = await here.turn(session_id)
            assert turn.failure, "the turn did not end well, and is not said to"
        assert not folder.exists()


@pytest.mark.parametrize("how", ["revoked", "expired"])
async def test_streams_end_within_a_second_of_their_keys_end(here: Scene, how: str) -> None:
    key = await here.token("write", **({"expires_in_s": 2} if how == "expired" else {}))
    async with here.caller(key["token"]) as legacy, here.caller(key["token"], era="modern") as modern:
        session_id = await here.rest(legacy)
        await modern.watch(session_id)
        polled = asyncio.Event()

        async def poll() -> None:
            await modern.call("caller_tool_poll", session_id=session_id, wait_seconds=0)
            polled.set()
            with pytest.raises(Refused, match="revoked or has expired"):
                await modern.call("caller_tool_poll", session_id=session_id, wait_seconds=20)

        async with asyncio.TaskGroup() as group:
            polling = group.create_task(poll())
            await polled.wait()
            if how == "revoked":
                await here.server.ask("token_revoke", token_id=key["id"])
                ends = time.time()
            else:
                ends = key["expires_at"]
            for ended in (legacy.ended(), modern.ended(), polling):
                async with asyncio.timeout(ends - time.time() + 3):
                    await ended
                assert time.time() >= ends - 0.1
        assert time.time() < ends + 2


async def test_an_interrupting_message_cancels_the_turn_and_its_calls_first(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.start(caller, [{"tool": "ant_any"}, {"say": "never"}], context=lent())
        request = await caller.request()
        await here.more(caller, session_id, [{"say": "instead"}], interrupt=True)
        assert (await caller.until("caller_tool_cancelled"))["request_id"] == request["request_id"]
        first = await here.turn(session_id)
        assert first.completion["stop_reason"] == "cancelled"
        assert "never" not in first.text
        assert (await here.turn(session_id, 2)).text == "instead"


async def test_several_clients_of_one_box_are_equal(here: Scene) -> None:
    """Hosts start a server to look at it and another to use; each has its own calls, none takes another's."""
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent())
        async with here.client(session_id) as one, here.client(session_id, era="modern") as two:
            await one.open()
            await two.open()
            assert await one.tool_names() == await two.tool_names()
            first, second = one.call("ant_any", {"by": 1}), two.call("ant_any", {"by": 2})
            for _ in range(2):
                request = await caller.request()
                await caller.answer(request, request["arguments"]["by"])
            assert (await first)["content"][0]["text"] == "1"
            assert (await second)["content"][0]["text"] == "2"
            await one.leave()
            third = two.call("ant_any", {"by": 3})
            await caller.answer(await caller.request(), "three")
            assert (await third)["content"][0]["text"] == "three"


async def test_a_session_that_is_ended_while_it_starts_leaves_nothing(here: Scene) -> None:
    async with here.caller() as caller:
        for pause in (0, 0.02, 0.1, 0.2, 0.3):
            session_id = await here.start(caller, [{"say": "hello"}], context=lent())
            await asyncio.sleep(pause)
            await caller.call("session_end", session_id=session_id)
            shown = await caller.call("session_get", session_id=session_id)
            assert shown["status"] in ("completed", "failed")
            assert not [one for one in (here.server.home / "boxes").iterdir() if session_id in holds(one)]


def holds(folder: Path) -> str:
    try:
        return (folder / "box.json").read_text()
    except OSError:
        return ""


async def test_depth_and_number_of_children_are_bounded(tmp_path: Path) -> None:
    async with (
        ServerProcess(tmp_path / "home", max_depth=1, max_children=2) as server,
        scene(server) as here,
        here.caller() as caller,
    ):
        session_id = await here.rest(caller, context=lent())
        async with here.box(session_id) as box:
            children = [(await box.ask("session_message", message="no plan"))["result"]["session_id"] for _ in range(2)]
            refused = await box.ask("session_message", message="no plan")
            assert refused["error"]["data"]["kind"] == "too_many"
            assert "max_agents_per_session" in refused["error"]["message"]
        await here.turn(children[0])
        async with here.box(children[0]) as below:
            refused = await below.ask("session_message", message="no plan")
            assert refused["error"]["data"]["kind"] == "too_many"
            assert "max_recursion_depth" in refused["error"]["message"]


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("pause", [0.0, 0.1, 0.2])
async def test_a_session_that_was_starting_when_its_server_ended_starts_all_the_same(
    tmp_path: Path, how: str, pause: float
) -> None:
    async with ServerProcess(tmp_path / "home") as server, scene(server) as here, here.caller() as caller:
        plan = [{"tool": "ant_any", "expect": {"is_error": False, "contains": "hello"}}]
        session_id = await here.start(caller, plan, context=lent())
        await asyncio.sleep(pause)
        await (server.kill() if how == "kill" else server.stop())
        await server.restart()
        await caller.open_stream()
        await caller.answer(await caller.request(), "hello")
        turn = (await here.turn(session_id)).worked()
        assert len(turn.of("caller_tool_request")) == 1


@pytest.mark.parametrize("pause", [0.02, 0.04, 0.06, 0.08, 0.1])
async def test_a_droid_that_was_killed_before_it_had_its_derived_key_is_started_with_another(
    tmp_path: Path, pause: float
) -> None:
    """Keys are never stored; one that the server derives itself can be derived again."""
    async with ServerProcess(tmp_path / "home") as server, scene(server) as here, here.caller() as caller:
        await here.rest(caller)  # whether boxes can be made is known from here on
        plan = [{"tool": "oubliette_project_list", "args": {}, "expect": {"is_error": False}}]
        session_id = await here.start(caller, plan, oubliette_scope="read")
        await asyncio.sleep(pause)
        await server.kill()
        await server.restart()
        (await here.turn(session_id)).worked()
        live = [row for row in records(server.home, "tokens", session_id=session_id) if row["revoked_at"] is None]
        assert len(live) == 1
