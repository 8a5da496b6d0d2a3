"""The caller, a real server, and a real droid in a real box."""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from oubliette import Caller
from oubliette.caller.errors import Conflict, InvalidParams, NotFound, SessionFailed, Unauthenticated
from oubliette.caller.session import LoggedEvent
from oubliette.wire.events import CallerToolProgress, CallerToolRequest, Completion
from tests.kit.server import ServerProcess
from tests.kit.stingy_proxy import StingyProxy


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[ServerProcess]:
    async with ServerProcess(tmp_path / "home") as started:
        yield started


def plan(*steps: dict[str, Any]) -> str:
    return f"<<plan {json.dumps(steps)}>>"


def call(tool: str, **args: Any) -> dict[str, Any]:
    return {"tool": f"ant_{tool}", "args": args, "expect": {"is_error": False}}


async def project_of(caller: Caller) -> str:
    return (await caller.call("project_create", name="tests"))["id"]


async def test_a_droid_calls_what_was_lent_and_the_log_tells_of_it(server: ServerProcess):
    async with Caller(server.url, server.token, "ant") as caller:

        @caller.tool
        def add(a: int, b: int = 1) -> dict[str, int]:
            """Add two numbers."""
            return {"sum": a + b}

        @caller.tool
        async def refuse(why: str) -> None:
            raise ValueError(why)

        await project_of(caller)
        failed = {"tool": "ant_refuse", "args": {"why": "not today"}, "expect": {"is_error": True}}
        session = await caller.start("tests", plan(call("add", a=2), {"say": "Sum: $last"}, failed, {"say": "$last"}))
        completion = await session.result(timeout_s=20)
        assert completion.stop_reason == "end_turn"
        assert 'Sum: {"sum":3}' in completion.text
        assert "not today" in completion.text
        await session.end()
        seen: list[LoggedEvent] = [logged async for logged in session.events()]
        assert [one.index for one in seen] == list(range(len(seen)))
        assert [one.fields["tool"] for one in seen if one.type == "caller_tool_request"] == ["add", "refuse"]
        assert [one.fields["outcome"] for one in seen if one.type == "caller_tool_resolved"] == ["answered", "failed"]
        assert all(not isinstance(one.event, dict) for one in seen), "every type is known"
        with pytest.raises(Conflict):
            await session.send("more")


async def test_the_result_is_of_the_last_message_though_another_turn_was_open(server: ServerProcess):
    async with Caller(server.url, server.token, "ant") as caller:
        gate = asyncio.Event()

        @caller.tool
        async def wait() -> None:
            await gate.wait()

        session = await caller.start(await project_of(caller), plan(call("wait"), {"say": "first"}))
        await session.send(plan({"say": "second"}))
        gate.set()
        second = await session.result(timeout_s=20)
        assert (second.turn, second.text) == (2, "second")


async def test_tools_lent_later_arrive_with_the_next_message(server: ServerProcess):
    async with Caller(server.url, server.token, "ant") as caller:
        session = await caller.start(await project_of(caller), plan({"say": "hello"}))
        await session.result(timeout_s=20)

        @caller.tool
        def late() -> str:
            return "in time"

        await session.send(plan({"wait_tool": "ant_late", "s": 5}, call("late"), {"say": "$last"}))
        assert (await session.result(timeout_s=20)).text.endswith("in time")


async def test_many_calls_at_once_are_answered_in_any_order(server: ServerProcess):
    async with Caller(server.url, server.token, "ant") as caller:
        arrived: list[int] = []
        gates = [asyncio.Event() for _ in range(21)]
        gates[20].set()

        @caller.tool
        async def echo(n: int) -> int:
            arrived.append(n)
            if len(arrived) == 20:
                gates[19].set()
            await gates[n].wait()
            if n:
                gates[n - 1].set()
            return n * n

        parallel = {"parallel": [call("echo", n=n) for n in range(20)]}
        session = await caller.start(await project_of(caller), plan(parallel, {"say": "done"}))
        assert (await session.result(timeout_s=30)).text.endswith("done")
        assert sorted(arrived) == list(range(20))


async def test_large_arguments_and_large_results_pass(server: ServerProcess):
    async with Caller(server.url, server.token, "ant") as caller:
        sizes: list[int] = []

        @caller.tool
        def swallow(text: str) -> str:
            sizes.append(len(text))
            return "y" * 1_500_000

        @caller.tool
        def burst() -> str:
            return "z" * 7_000_000

        size = 400_000
        large = call("swallow", text="x" * size)
        failing = {"tool": "ant_burst", "expect": {"is_error": True, "contains": "the server does not take the result"}}
        session = await caller.start(await project_of(caller), plan(large, failing, {"say": "both"}))
        completion = await session.result(timeout_s=30)
        assert completion.stop_reason == "end_turn", completion
        assert sizes == [size]


async def test_progress_moves_the_deadline(server: ServerProcess):
    async with Caller(server.url, server.token, "ant") as caller:
        told = asyncio.Event()

        @caller.tool
        async def long() -> str:
            caller.progress(1, 2, "half", extend_s=300)
            await told.wait()
            return "at last"

        session = await caller.start(await project_of(caller), plan(call("long"), {"say": "$last"}))
        deadlines: list[float] = []
        async with asyncio.timeout(20):
            async for logged in session.events():
                if isinstance(logged.event, CallerToolRequest | CallerToolProgress):
                    deadlines.append(logged.event.deadline_at or 0)
                if isinstance(logged.event, CallerToolProgress):
                    assert (logged.event.progress, logged.event.total, logged.event.message) == (1, 2, "half")
                    told.set()
                if isinstance(logged.event, Completion):
                    assert logged.event.text.endswith("at last")
                    break
        assert deadlines[1] - deadlines[0] > 200


async def test_cancelling_the_turn_cancels_the_tool(server: ServerProcess):
    async with Caller(server.url, server.token, "ant") as caller:
        began, cancelled = asyncio.Event(), asyncio.Event()

        @caller.tool
        async def endless() -> None:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        session = await caller.start(await project_of(caller), plan(call("endless")))
        async with asyncio.timeout(20):
            await began.wait()
            await session.cancel()
            await cancelled.wait()
            assert (await session.result()).stop_reason == "cancelled"


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_a_call_survives_a_server_that_goes_and_comes_back(server: ServerProcess, how: str):
    async with Caller(server.url, server.token, "ant") as caller:
        ran: list[int] = []
        began, gate = asyncio.Event(), asyncio.Event()

        @caller.tool
        async def slow(n: int) -> int:
            ran.append(n)
            began.set()
            await gate.wait()
            return n + 1

        session = await caller.start(await project_of(caller), plan(call("slow", n=1), {"say": "got $last"}))
        async with asyncio.timeout(30):
            await began.wait()
            await (server.kill() if how == "killed" else server.stop())
            gate.set()
            await server.restart()
            completion = await session.result()
        assert completion.text.endswith("got 2")
        assert ran == [1], "the tool ran once"
        await session.send(plan(call("slow", n=2), {"say": "got $last"}))
        assert (await session.result(timeout_s=20)).text.endswith("got 3")
        await session.end()
        indices = [logged.index async for logged in session.events(-1)]
        assert indices == list(range(len(indices)))


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_a_start_that_waits_survives_a_server_that_goes_and_comes_back(server: ServerProcess, how: str):
    async with Caller(server.url, server.token, "ant") as caller:
        ran: list[int] = []
        began, gate = asyncio.Event(), asyncio.Event()

        @caller.tool
        async def slow(n: int) -> int:
            ran.append(n)
            began.set()
            await gate.wait()
            return n + 1

        message = plan(call("slow", n=1), {"say": "got $last"})
        project = await project_of(caller)
        async with asyncio.timeout(40), asyncio.TaskGroup() as group:
            starting = group.create_task(caller.start(project, message, wait_seconds=40))
            await began.wait()
            await (server.kill() if how == "killed" else server.stop())
            gate.set()
            await server.restart()
            completion = await (await starting).result()
        assert completion.text.endswith("got 2")
        assert ran == [1], "the tool ran once"


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_following_goes_on_over_a_restart_without_loss_or_doubles(server: ServerProcess, how: str):
    async with Caller(server.url, server.token, "ant") as caller:

        @caller.tool
        def echo(n: int) -> int:
            return n

        session = await caller.start(await project_of(caller), plan(call("echo", n=1)))
        await session.result(timeout_s=20)
        seen: list[int] = []
        last = (await session.get())["last_index"]
        caught_up = asyncio.Event()

        async def follow() -> None:
            async for logged in session.events(-1):
                seen.append(logged.index)
                if logged.index == last:
                    caught_up.set()

        async with asyncio.timeout(40), asyncio.TaskGroup() as group:
            group.create_task(follow())
            await caught_up.wait()
            # By when another operation is answered the follower's next page is being waited for.
            await session.get()
            await (server.kill() if how == "killed" else server.stop())
            await server.restart()
            await session.send(plan(call("echo", n=2)))
            await session.result()
            await session.end()
        assert seen == list(range(len(seen)))


CRASHING = """
import asyncio, sys
from oubliette import Caller

async def main(url, token, project, message):
    async with Caller(url, token, "ant") as caller:
        started = asyncio.get_running_loop().create_future()

        @caller.tool
        async def ask(n: int) -> int:
            print((await started).id, flush=True)
            await asyncio.Event().wait()

        started.set_result(await caller.start(project, message))
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_another_process_takes_a_session_up_with_its_open_calls(server: ServerProcess):
    async with Caller(server.url, server.token, "ant") as caller:

        @caller.tool
        def ask(n: int) -> int:
            return n + 1

        project = await project_of(caller)
        message = plan(call("ask", n=20), {"say": "got $last"})
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CRASHING, server.url, server.token, project, message, stdout=-1
        )
        assert process.stdout is not None
        async with asyncio.timeout(20):
            session_id = (await process.stdout.readline()).decode().strip()
            process.kill()
            await process.wait()
        session = await caller.attach(session_id)
        assert (await session.result(timeout_s=20)).text.endswith("got 21")


async def test_where_no_stream_can_be_held_requests_are_polled_for(server: ServerProcess):
    async with StingyProxy(server.url) as proxy, Caller(proxy.url, server.token, "ant") as caller:
        ran: list[int] = []

        @caller.tool
        async def echo(n: int) -> int:
            ran.append(n)
            await asyncio.sleep(0)
            return n

        steps = [call("echo", n=n) for n in range(5)]
        session = await caller.start(await project_of(caller), plan(*steps, {"say": "got $last"}))
        assert (await session.result(timeout_s=30)).text.endswith("got 4")
        assert ran == list(range(5))
        assert proxy.refused


async def test_polling_goes_on_over_a_restart(server: ServerProcess):
    async with StingyProxy(server.url) as proxy, Caller(proxy.url, server.token, "ant") as caller:

        @caller.tool
        def echo(n: int) -> int:
            return n

        session = await caller.start(await project_of(caller), plan(call("echo", n=1), {"say": "got $last"}))
        assert (await session.result(timeout_s=30)).text.endswith("got 1")
        await server.stop()
        await server.restart()
        await session.send(plan(call("echo", n=2), {"say": "got $last"}))
        assert (await session.result(timeout_s=30)).text.endswith("got 2")


async def test_a_childs_open_call_is_asked_for_once_by_a_caller_that_polls(server: ServerProcess):
    async with StingyProxy(server.url) as proxy, Caller(proxy.url, server.token, "ant") as caller:
        began, gate = asyncio.Event(), asyncio.Event()

        @caller.tool
        async def slow() -> str:
            began.set()
            await gate.wait()
            return "done"

        child = {"message": plan(call("slow")), "wait_seconds": 30}
        session = await caller.start(
            await project_of(caller),
            plan({"tool": "oubliette_session_message", "args": child}),
            oubliette_scope="write",
        )
        async with asyncio.timeout(30):
            await began.wait()
            children = (await session.get())["children"]
            await asyncio.sleep(1)  # it is time that is tested
            pending = (await caller.call("caller_tool_pending", session_id=session.id))["requests"]
            assert [one["session_id"] for one in pending] == children
            assert pending[0]["redelivery"] <= 1
            gate.set()
            await session.result()


async def test_a_childs_call_does_not_wait_for_the_page_that_a_proxy_holds(server: ServerProcess):
    async with StingyProxy(server.url) as proxy, Caller(proxy.url, server.token, "ant") as caller:
        ran = asyncio.Event()

        @caller.tool
        def quick() -> None:
            ran.set()

        child = {"message": plan({"sleep": 1}, call("quick")), "wait_seconds": 30}
        session = await caller.start(
            await project_of(caller),
            plan({"tool": "oubliette_session_message", "args": child}),
            oubliette_scope="write",
        )
        async with asyncio.timeout(40), asyncio.TaskGroup() as group:
            group.create_task(session.result())
            async with asyncio.timeout(10):
                await ran.wait()


async def test_refusals_of_the_server_are_exceptions_by_their_kind(server: ServerProcess):
    async with Caller(server.url, server.token, "ant") as caller:
        with pytest.raises(NotFound):
            await caller.call("session_get", session_id="gogol_20260101_000000_00000000")
        with pytest.raises(InvalidParams):
            await caller.call("session_get", session=1)
        with pytest.raises(NotFound, match="0 projects"):
            await caller.start("nowhere", "go")

        @caller.tool(name="bad name")
        def bad() -> None: ...

        with pytest.raises(InvalidParams, match="bad name"):
            await caller.start(await project_of(caller), "go")
    with pytest.raises(Unauthenticated):
        async with Caller(server.url, "oub_" + "0" * 64):
            raise NotImplementedError


async def test_a_revoked_token_ends_what_goes_on(server: ServerProcess):
    made = await server.ask("token_create", name="short", scope="write")
    async with Caller(server.url, made["token"], "ant") as caller:
        session = await caller.start(await project_of(caller), plan({"sleep": 30}))
        await server.ask("token_revoke", token_id="short")
        with pytest.raises(Unauthenticated):
            await session.result(timeout_s=20)


async def test_a_session_that_ends_in_mid_turn_fails_its_result(server: ServerProcess):
    async with Caller(server.url, server.token, "ant") as caller:
        session = await caller.start(await project_of(caller), plan({"sleep": 30}))
        await session.end()
        with pytest.raises(SessionFailed):
            await session.result(timeout_s=20)


def test_the_caller_runs_on_uvloop(tmp_path: Path):
    async def scenario() -> Completion:
        async with (
            ServerProcess(tmp_path / "home") as server,
            Caller(server.url, server.token, "ant") as caller,
        ):

            @caller.tool
            def echo(n: int) -> int:
                return n

            session = await caller.start(await project_of(caller), plan(call("echo", n=5), {"say": "got $last"}))
            return await session.result(timeout_s=20)

    assert uvloop.run(scenario()).text.endswith("got 5")
