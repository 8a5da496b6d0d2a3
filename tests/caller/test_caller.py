"""The caller against a server that misbehaves on demand. Against the real one: tests/walks and tests/caller."""

import asyncio
import math
import traceback
from typing import Any

import pytest

from oubliette import Caller
from oubliette.caller.errors import CallerError, NotFound, SessionFailed, TooMany, Unauthenticated, Unreachable
from oubliette.wire.events import Completion, Message
from tests.kit.fake_server import TOKEN, FakeServer


def lent_to(server: FakeServer, **options: Any) -> Caller:
    return Caller(server.url, TOKEN, "ant", **options)


async def test_a_request_runs_the_tool_and_its_result_goes_back() -> None:
    async with FakeServer() as server, lent_to(server) as caller:

        @caller.tool
        def add(a: int, b: int = 1) -> dict[str, int]:
            """Add."""
            return {"sum": a + b}

        @caller.tool
        async def later(a: int) -> int:
            await asyncio.sleep(0)
            return a

        @caller.tool(threaded=True, name="in_a_thread")
        def blocking() -> list[Any]:
            return [None, False, "é"]

        await caller.start("demo", "go")
        assert await server.ask("add", {"a": 2}) == {"result": {"sum": 3}, "error": None}
        assert await server.ask("later", {"a": 2}) == {"result": 2, "error": None}
        assert await server.ask("in_a_thread", {}) == {"result": [None, False, "é"], "error": None}


async def test_a_request_that_comes_before_the_reply_to_something_else_is_run_at_once() -> None:
    async with FakeServer() as server, lent_to(server) as caller:

        @caller.tool
        def add(a: int) -> int:
            return a + 1

        server.pushes_on_replies = True
        session = await caller.start("demo", "go")
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(session.result())
            await server.until(lambda: server.is_replying)
            assert (await server.ask("add", {"a": 1}))["result"] == 2
            await server.log(type="completion", turn=1, stop_reason="end_turn", text="done", duration_ms=1)
            assert (await waiting).text == "done"


async def test_events_are_not_pushed_to_one_who_reads_them_from_the_log() -> None:
    async with FakeServer() as server, lent_to(server):
        assert server.level == "emergency"


async def test_what_a_tool_raises_reaches_the_droid_as_its_message_alone() -> None:
    async with FakeServer() as server, lent_to(server) as caller:

        @caller.tool
        def plain() -> None:
            raise ValueError("recipient not found")

        @caller.tool
        async def waiting() -> None:
            raise KeyError

        @caller.tool
        def not_json() -> object:
            return object()

        @caller.tool
        async def cancels_itself() -> None:
            raise asyncio.CancelledError

        @caller.tool
        def cancels_on_the_loop() -> None:
            raise asyncio.CancelledError

        assert (await server.ask("plain", {}))["error"] == "recipient not found"
        assert (await server.ask("waiting", {}))["error"] == "KeyError"
        assert "not JSON" in (await server.ask("not_json", {}))["error"]
        assert "cancelled" in (await server.ask("cancels_itself", {}))["error"]
        assert "cancelled" in (await server.ask("cancels_on_the_loop", {}))["error"]
        assert "invalid arguments" in (await server.ask("plain", {"more": 1}))["error"]
        assert "no tool 'nothing'" in (await server.ask("nothing", {}))["error"]


async def test_a_slow_tool_holds_up_no_other_and_only_so_many_run_at_once() -> None:
    async with FakeServer() as server, lent_to(server, parallel_max=3) as caller:
        gate = asyncio.Event()
        running = most = 0

        @caller.tool
        async def slow(n: int) -> int:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await gate.wait()
            running -= 1
            return n

        @caller.tool
        def quick() -> int:
            return 0

        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(server.ask("slow", {"n": n})) for n in range(10)]
            assert (await server.ask("quick", {}))["result"] == 0
            gate.set()
        assert [one.result()["result"] for one in asked] == list(range(10))
        assert most == 3


async def test_a_request_that_comes_twice_is_run_once_and_answered_twice_alike() -> None:
    async with FakeServer() as server, lent_to(server) as caller:
        ran: list[int] = []

        @caller.tool
        def count() -> int:
            ran.append(1)
            return len(ran)

        assert (await server.ask("count", {}, request_id="r1"))["result"] == 1
        await server.announce("count", {}, request_id="r1", redelivery=1)
        await server.until(lambda: len(server.answers) == 2)
        assert server.answers[0] == server.answers[1]
        assert ran == [1]


async def test_an_answer_is_sent_until_the_server_took_it() -> None:
    async with FakeServer() as server, lent_to(server) as caller:
        ran: list[int] = []

        @caller.tool
        def once() -> int:
            ran.append(1)
            return 7

        server.hang_ups = 2
        assert (await server.ask("once", {}))["result"] == 7
        await server.until(lambda: len(server.answers) == 3)
        server.unavailable = 3
        assert (await server.ask("once", {}))["result"] == 7
        assert server.unavailable == 0
        server.nonsense = 3
        assert (await server.ask("once", {}, request_id="r3"))["result"] == 7
        await server.until(lambda: [one["request_id"] for one in server.answers].count("r3") == 4)
        assert ran == [1, 1, 1]


async def test_an_answer_that_is_refused_for_good_is_not_sent_again() -> None:
    async with FakeServer() as server, lent_to(server) as caller:

        @caller.tool
        def late() -> int:
            return 1

        server.refusals["r1"] = {"is_error": True, "accepted": False, "reason": "expired"}
        await server.announce("late", {}, request_id="r1")
        await server.until(lambda: len(server.answers) == 1)
        await server.ask("late", {})
        assert [one["request_id"] for one in server.answers].count("r1") == 1


async def test_a_result_that_the_server_cannot_take_becomes_an_error() -> None:
    async with FakeServer() as server, lent_to(server) as caller:

        @caller.tool
        def huge() -> str:
            return "x"

        error = {"kind": "too_large", "message": "a result is at most 6 MiB"}
        server.refusals["r1"] = {"is_error": True, "error": error}
        answer = await server.ask("huge", {}, request_id="r1")
        assert answer["result"] is None
        assert "at most 6 MiB" in answer["error"]


async def test_a_cancelled_request_cancels_the_tool_and_is_not_answered() -> None:
    async with FakeServer() as server, lent_to(server) as caller:
        began, ended = asyncio.Event(), asyncio.Event()

        @caller.tool
        async def wait() -> None:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        @caller.tool
        def quick() -> int:
            return 0

        await server.announce("wait", {}, request_id="r1")
        async with asyncio.timeout(5):
            await began.wait()
            await server.push({"type": "caller_tool_cancelled", "request_id": "r1", "tool": "wait", "reason": "droid"})
            await ended.wait()
        await server.ask("quick", {})
        assert [one["request_id"] for one in server.answers if one["request_id"] == "r1"] == []


async def test_a_request_that_is_cancelled_before_its_tool_began_holds_nothing_up() -> None:
    async with FakeServer() as server, lent_to(server, parallel_max=1) as caller:
        ran: list[int] = []

        @caller.tool
        async def waiting(n: int) -> int:
            ran.append(n)
            return n

        # One piece of the stream holds both, so that nothing happens between them.
        request = {"type": "caller_tool_request", "request_id": "r1", "session_id": "gogol_1"}
        asked = request | {"tool": "waiting", "arguments": {"n": 1}}
        cancelled = {"type": "caller_tool_cancelled", "request_id": "r1", "tool": "waiting", "reason": "droid"}
        await server.push_together(asked, cancelled)
        assert (await server.ask("waiting", {"n": 2}))["result"] == 2
        assert ran == [2]


async def test_progress_from_inside_a_tool_names_its_request() -> None:
    async with FakeServer() as server, lent_to(server) as caller:

        @caller.tool
        async def long() -> None:
            caller.progress(1, 3, "a third", extend_s=60)
            await asyncio.sleep(0)

        @caller.tool(threaded=True)
        def blocking() -> None:
            caller.progress(message="in a thread")

        caller.progress(9)
        await server.ask("long", {}, request_id="r1")
        await server.ask("blocking", {}, request_id="r2")
        await server.until(lambda: len(server.progress) == 2)
        assert server.progress == [
            {"session_id": "gogol_1", "request_id": "r1", "progress": 1, "total": 3, "message": "a third"}
            | {"extend_seconds": 60},
            {"session_id": "gogol_1", "request_id": "r2", "message": "in a thread"},
        ]


async def test_what_moves_the_deadline_is_told_until_the_server_took_it() -> None:
    async with FakeServer() as server, lent_to(server) as caller:
        gate = asyncio.Event()

        @caller.tool
        async def long() -> None:
            caller.progress(extend_s=60)
            await gate.wait()

        async with asyncio.TaskGroup() as group:
            server.stopping = 1
            server.failures["caller_tool_progress"] = [
                {"kind": "unavailable", "message": "busy", "retryable": True},
            ]
            asked = group.create_task(server.ask("long", {}, request_id="r1"))
            await server.until(lambda: len(server.progress) == 1)
            assert server.progress[0]["extend_seconds"] == 60
            assert (server.stopping, server.failures["caller_tool_progress"]) == (0, [])
            gate.set()
            await asked
        assert len(server.progress) == 1


async def test_what_moves_the_deadline_is_not_told_again_where_it_is_refused() -> None:
    async with FakeServer() as server, lent_to(server) as caller:
        gate = asyncio.Event()

        @caller.tool
        async def long() -> None:
            caller.progress(extend_s=60)
            await gate.wait()

        @caller.tool
        async def other() -> None:
            caller.progress(extend_s=61)

        server.failures["caller_tool_progress"] = [{"kind": "not_found", "message": "no such request"}]
        await server.announce("long", {}, request_id="r1")
        await server.until(lambda: server.failures["caller_tool_progress"] == [])
        await server.ask("other", {})
        await server.until(lambda: len(server.progress) > 0)
        assert [one["extend_seconds"] for one in server.progress] == [61]
        gate.set()


async def test_what_is_asked_before_anything_is_lent_waits_for_it() -> None:
    async with FakeServer() as server, lent_to(server) as caller:
        session = await caller.attach("gogol_1")
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(server.ask(name, {}, request_id=name)) for name in ("first", "second", "third")]
            await server.push_frame({"jsonrpc": "2.0", "id": "p1", "method": "ping"})
            await server.until(lambda: server.pongs == ["p1"])
            assert server.answers == []

            @caller.tool
            def first() -> int:
                return 1

            @caller.tool
            def second() -> int:
                return 2

        assert [one.result()["result"] for one in asked] == [1, 2, None]
        assert "no tool 'third'" in asked[2].result()["error"]
        await session.end()


async def test_large_arguments_are_fetched() -> None:
    async with FakeServer() as server, lent_to(server) as caller:

        @caller.tool
        def size(text: str) -> int:
            return len(text)

        assert (await server.ask("size", {"text": "x" * 300_000}, by_reference=True))["result"] == 300_000


async def test_a_lost_stream_is_taken_up_again() -> None:
    async with FakeServer() as server, lent_to(server) as caller:

        @caller.tool
        def echo(n: int) -> int:
            return n

        for n in range(3):
            assert (await server.ask("echo", {"n": n}))["result"] == n
            await server.drop_streams()
            await server.until(lambda: server.has_stream)


async def test_a_server_that_forgot_the_mcp_session_is_met_anew() -> None:
    async with FakeServer() as server, lent_to(server) as caller:

        @caller.tool
        def echo(n: int) -> int:
            return n

        session = await caller.start("demo", "go")
        assert (await server.ask("echo", {"n": 1}))["result"] == 1
        server.mcp_sessions.clear()
        server.calls.clear()
        await session.send("more")
        await server.drop_streams()
        await server.until(lambda: server.has_stream)
        assert (await server.ask("echo", {"n": 2}))["result"] == 2
        assert [name for name, _ in server.calls] == ["session_events", "session_message"], "the session is ours again"


async def test_a_renewal_that_fails_once_is_tried_again() -> None:
    async with FakeServer() as server, lent_to(server, patience_s=0.2) as caller:

        @caller.tool
        def echo(n: int) -> int:
            return n

        session = await caller.start("demo", "go")
        server.streams_refused = True
        await server.drop_streams()
        server.mcp_sessions.clear()
        server.initializes_refused = 1000
        with pytest.raises(Unreachable, match="does not answer"):
            await session.send("more")
        await server.push({"type": "caller_tool_request", "session_id": "gogol_1", "request_id": "r1", "tool": "echo"})
        server.initializes_refused = 0
        await session.send("more")
        assert [arguments["message"] for name, arguments in server.calls if name == "session_message"] == ["go", "more"]


async def test_an_answer_waits_for_a_renewal_that_fails_at_first() -> None:
    async with FakeServer() as server, lent_to(server, patience_s=0.2) as caller:

        @caller.tool
        def forget() -> int:
            server.mcp_sessions.clear()
            server.initializes_refused = 6
            return 5

        assert (await server.ask("forget", {}))["result"] == 5
        assert server.initializes_refused == 0


async def test_many_answers_wait_for_one_renewal() -> None:
    async with FakeServer() as server, lent_to(server, patience_s=0.5) as caller:

        @caller.tool
        def forget() -> int:
            server.mcp_sessions.clear()
            server.initializes_refused = 1_000_000
            return 5

        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(server.ask("forget", {})) for _ in range(10)]
            await server.until(lambda: server.forgotten >= 15)
            assert [task.get_name() for task in asyncio.all_tasks()].count("renew") <= 1
            server.initializes_refused = 0
        assert [one.result()["result"] for one in asked] == [5] * 10


async def test_a_server_that_says_when_to_come_again_is_waited_for_within_the_patience() -> None:
    async with FakeServer() as server, lent_to(server, patience_s=0.2) as caller:
        server.mcp_sessions.clear()
        server.initializes_refused = 1
        assert (await caller.call("project_list"))["projects"]


async def test_a_log_that_was_purged_is_taken_up_at_its_oldest_event() -> None:
    purged = {"kind": "purged", "message": "gone", "details": {"oldest_index": 3}}
    async with FakeServer() as server, lent_to(server) as caller:
        for n in range(5):
            await server.log(type="message", text=str(n))
        server.failures["session_events"] = [dict(purged)]
        session = await caller.attach("gogol_1")
        await server.end_session()
        assert [one.index async for one in session.events()] == [3, 4]


async def test_a_renewal_keeps_every_session_but_those_that_are_gone() -> None:
    async with FakeServer() as server, lent_to(server) as caller:
        await caller.start("demo", "go")
        for error in ({"kind": "purged", "details": {"oldest_index": 3}}, {"kind": "internal"}):
            server.failures["session_events"] = [{"message": "", **error}]
            await caller._renewed()
            assert list(caller._sessions) == ["gogol_1"], error
        server.failures["session_events"] = [{"message": "", "kind": "not_found"}]
        await caller._renewed()
        assert list(caller._sessions) == []


async def test_what_a_stopping_server_cut_off_is_asked_again_where_that_changes_nothing() -> None:
    async with FakeServer() as server, lent_to(server) as caller:
        server.stopping = 2
        assert (await caller.call("project_list"))["projects"]
        assert server.stopping == 0
        server.failures["project_list"] = [{"kind": "unavailable", "message": "busy", "retryable": True}] * 2
        assert (await caller.call("project_list"))["projects"]
        server.stopping = 1
        with pytest.raises(Unreachable, match="not known") as lost:
            await caller.call("session_message", message="go")
        assert lost.value.kind == "outcome_unknown"


async def test_what_the_server_could_not_do_is_said_in_its_own_words_in_the_end() -> None:
    unavailable = {"kind": "unavailable", "message": "the database is busy", "retryable": True}
    async with FakeServer() as server, lent_to(server, patience_s=0.1) as caller:
        server.failures |= {"project_list": [unavailable] * 1000, "session_message": [unavailable]}
        for refused in (caller.call("project_list"), caller.call("session_message", message="go")):
            with pytest.raises(CallerError, match="the database is busy") as failure:
                await refused
            assert failure.value.kind == "unavailable"


async def test_an_answer_under_a_forgotten_mcp_session_arrives_under_the_next() -> None:
    async with FakeServer() as server, lent_to(server) as caller:

        @caller.tool
        def forget() -> int:
            server.mcp_sessions.clear()
            return 5

        assert (await server.ask("forget", {}))["result"] == 5


@pytest.mark.parametrize("manner", ["streams_refused", "streams_mute"])
async def test_requests_are_polled_for_where_no_stream_can_be_held(
    manner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oubliette.caller.presence.OPEN_S", 0.1)
    server = FakeServer()
    setattr(server, manner, True)
    async with server, lent_to(server) as caller:

        @caller.tool
        def echo(n: int) -> int:
            return n

        await caller.start("demo", "go")
        assert (await server.ask("echo", {"n": 1}))["result"] == 1
        assert (await server.ask("echo", {"n": 2}))["result"] == 2


async def test_requests_are_polled_for_while_streams_die_young(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oubliette.caller.presence.HELD_S", 0.5)
    monkeypatch.setattr("oubliette.caller.presence.POLL_WAIT_S", 0.5)
    async with FakeServer() as server, lent_to(server) as caller:

        @caller.tool
        def echo(n: int) -> int:
            return n

        await caller.start("demo", "go")
        server.streams_cut = True
        await server.drop_streams()
        assert (await server.ask("echo", {"n": 1}))["result"] == 1
        assert (await server.ask("echo", {"n": 2}))["result"] == 2
        server.streams_cut = False
        await server.until(lambda: server.has_stream)
        # A stream that has just begun may die as young as those before it.
        await server.until(lambda: server.polls == 1)
        asked = len(polled_with(server))
        await server.until(lambda: server.polls == 0)
        assert (await server.ask("echo", {"n": 3}))["result"] == 3
        assert len(polled_with(server)) <= asked + 2, "what holds is not polled beside"


async def test_requests_are_polled_for_while_a_start_waits_for_its_turn() -> None:
    async with FakeServer() as server:
        server.streams_refused = True
        async with lent_to(server) as caller, asyncio.TaskGroup() as group:

            @caller.tool
            def echo(n: int) -> int:
                return n

            starting = group.create_task(caller.start("demo", "go", wait_seconds=30))
            assert (await server.ask("echo", {"n": 1}))["result"] == 1
            assert not starting.done()
            await server.log(type="completion", turn=1, stop_reason="end_turn", text="done", duration_ms=1)
            async with asyncio.timeout(5):
                assert (await (await starting).result()).text == "done"


async def test_polling_names_what_is_worked_on_and_ends_when_a_stream_can_be_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("oubliette.caller.presence.HELD_S", 0.2)
    monkeypatch.setattr("oubliette.caller.presence.POLL_WAIT_S", 0.5)
    async with FakeServer() as server:
        server.streams_refused = True
        async with lent_to(server) as caller:
            gate = asyncio.Event()

            @caller.tool
            async def wait() -> None:
                await gate.wait()

            @caller.tool
            def quick() -> int:
                return 1

            await caller.start("demo", "go")
            await server.announce("wait", {}, request_id="r1")
            await server.until(lambda: ["r1"] in polled_with(server))
            server.streams_refused = False
            await server.until(lambda: server.has_stream)
            await server.until(lambda: server.polls == 0)
            gate.set()
            assert (await server.ask("quick", {}))["result"] == 1


@pytest.mark.parametrize("kind", ["internal", "unavailable", "invalid_request", "too_many"])
async def test_a_poll_that_fails_is_followed_by_another(kind: str) -> None:
    async with FakeServer() as server:
        server.streams_refused = True
        async with lent_to(server) as caller:

            @caller.tool
            def echo(n: int) -> int:
                return n

            server.failures["caller_tool_poll"] = [{"kind": kind, "message": "not now"}]
            await caller.start("demo", "go")
            assert (await server.ask("echo", {"n": 1}))["result"] == 1
            assert server.failures["caller_tool_poll"] == []


async def test_a_session_that_is_taken_up_again_is_polled_for_again() -> None:
    async with FakeServer() as server:
        server.streams_refused = True
        async with lent_to(server) as caller:
            server.failures["caller_tool_poll"] = [{"kind": "not_found", "message": "not live"}]
            await caller.start("demo", "go")
            await server.until(lambda: len(polled_with(server)) == 1)
            async with asyncio.timeout(5):
                while not caller._presence._pollers["gogol_1"].done():
                    await asyncio.sleep(0)
            await caller.attach("gogol_1")
            await server.until(lambda: len(polled_with(server)) == 2)


async def test_a_session_that_is_over_is_kept_no_longer() -> None:
    async with FakeServer() as server:
        server.streams_refused = True
        async with lent_to(server) as caller:

            def kept() -> list[set[str]]:
                return [set(caller._sessions), set(caller._presence._pollers)]

            session = await caller.start("demo", "go")
            assert kept() == [{"gogol_1"}] * 2
            await session.end()
            assert kept() == [set()] * 2, "its caller ended it"
            server.status = "running"
            session = await caller.attach("gogol_1")
            assert kept() == [{"gogol_1"}] * 2
            await server.end_session()
            assert [one async for one in session.events()] == []
            assert kept() == [set()] * 2, "it was followed to its end"
            await caller.attach("gogol_1")
            assert kept() == [set()] * 2, "it was over when it was taken up"


async def test_polling_names_the_requests_of_children_as_well() -> None:
    async with FakeServer() as server:
        server.streams_refused = True
        async with lent_to(server) as caller:
            gate = asyncio.Event()

            @caller.tool
            async def wait() -> None:
                await gate.wait()

            await caller.start("demo", "go")
            request = {"type": "caller_tool_request", "request_id": "r1", "tool": "wait", "arguments": {}}
            await server.push(request | {"session_id": "gogol_2"})
            await server.until(lambda: ["r1"] in polled_with(server))
            gate.set()


async def test_a_server_that_gives_only_what_is_known_is_not_asked_in_circles() -> None:
    async with FakeServer() as server:
        server.streams_refused = True
        async with lent_to(server) as caller:
            began, gate = asyncio.Event(), asyncio.Event()

            @caller.tool
            async def wait() -> None:
                began.set()
                await gate.wait()

            await caller.start("demo", "go")
            for _ in range(1000):
                await server.announce("wait", {}, request_id="r1")
            async with asyncio.timeout(5):
                await began.wait()
                await asyncio.sleep(0.5)  # it is time that is tested
            assert len(polled_with(server)) < 10
            gate.set()


def polled_with(server: FakeServer) -> list[Any]:
    return [arguments["known"] for name, arguments in server.calls if name == "caller_tool_poll"]


async def test_a_message_may_wait_for_its_turn_longer_than_other_calls_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oubliette.caller.endpoint.ANSWER_S", 2)
    async with FakeServer() as server, lent_to(server) as caller:
        session = await caller.start("demo", "go", wait_seconds=0.75)
        await session.send("more", wait_seconds=2.5)
        await caller.call("session_message", message="another", wait_seconds=2.5)
        with pytest.raises(Unreachable, match="not known"):
            await caller.call("session_message", message="too long", wait_seconds=5, answer_in_s=0)


@pytest.mark.parametrize("wait_seconds", [None, "5", -1, math.inf, math.nan])
async def test_a_wait_that_is_none_starts_nothing(wait_seconds: Any) -> None:
    async with FakeServer() as server, lent_to(server) as caller:
        with pytest.raises((TypeError, ValueError)):
            await caller.start("demo", "go", wait_seconds=wait_seconds)
        assert [name for name, _ in server.calls if name == "session_message"] == []


async def test_a_message_that_may_have_arrived_is_not_sent_twice() -> None:
    async with FakeServer() as server, lent_to(server) as caller:
        server.hang_ups = 1
        with pytest.raises(Unreachable, match="not known") as lost:
            await caller.start("demo", "go")
        assert lost.value.kind == "outcome_unknown"
        assert [name for name, _ in server.calls].count("session_message") == 1


async def test_a_connection_that_falls_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oubliette.caller.lane.SILENCE_S", 0.1)
    async with FakeServer() as server, lent_to(server) as caller:

        @caller.tool
        def echo(n: int) -> int:
            return n

        server.mute_answers = True
        assert (await server.ask("echo", {"n": 1}))["result"] == 1, "it was taken"
        server.mute_answers = False
        await server.until(lambda: len(server.answers) == 2)


async def test_a_stream_that_falls_silent_is_taken_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oubliette.caller.stream.SILENCE_S", 0.1)
    async with FakeServer() as server, lent_to(server):
        streams = server.streams
        await server.until(lambda: server.streams > streams + 1)


async def test_after_the_token_is_refused_nothing_more_is_asked() -> None:
    async with FakeServer() as server, lent_to(server) as caller:

        @caller.tool
        def revoke() -> None:
            server.revoked = True

        await server.announce("revoke", {}, request_id="r1")
        await server.until(lambda: server.refused_posts > 0)
        async with asyncio.timeout(5):
            await caller._outbox._empty.wait()
        with pytest.raises(Unauthenticated):
            await caller.call("session_get", session_id="gogol_1")
        assert server.refused_posts == 1


async def test_replies_may_come_as_a_stream_of_events() -> None:
    async with FakeServer() as server:
        server.replies_as_events = True
        async with lent_to(server) as caller:

            @caller.tool
            def echo(n: int) -> int:
                return n

            await caller.start("demo", "go")
            assert (await server.ask("echo", {"n": 1}))["result"] == 1
            await server.ask("echo", {"n": 2})
            assert len(server.answers) == 2


async def test_a_ping_is_answered_and_other_frames_are_let_by() -> None:
    async with FakeServer() as server, lent_to(server):
        await server.push_frame({"jsonrpc": "2.0", "method": "notifications/message", "params": {"data": "text"}})
        await server.push_frame({"jsonrpc": "2.0", "method": "notifications/else", "params": [1]})
        await server.push_frame({"jsonrpc": "2.0", "id": "p1", "method": "ping"})
        await server.until(lambda: server.pongs == ["p1"])


async def test_a_session_is_started_by_the_name_of_its_project_and_lent_the_tools() -> None:
    async with FakeServer() as server, lent_to(server) as caller:

        @caller.tool
        def echo(n: int) -> int:
            """Echo."""
            return n

        session = await caller.start("demo", "go", autonomy="high", context={"more": 1})
        await session.send("again")
        caller.withdraw("echo")
        await session.send("without")
        messages = [arguments for name, arguments in server.calls if name == "session_message"]
        assert messages[0]["project_id"] == "id-of-demo"
        assert messages[0]["autonomy"] == "high"
        assert messages[0]["context"] | {"caller_tools": []} == {"more": 1, "caller_id": "ant", "caller_tools": []}
        assert [tool["name"] for tool in messages[0]["context"]["caller_tools"]] == ["echo"]
        assert messages[1] == {"session_id": "gogol_1", "message": "again"}, "what the session knows is not said again"
        assert messages[2]["context"]["caller_tools"] == []
        with pytest.raises(NotFound, match="0 projects are named 'dem'"):
            await caller.start("dem", "go")


async def test_events_come_in_order_once_each_until_the_session_ends() -> None:
    async with FakeServer() as server, lent_to(server) as caller:
        session = await caller.start("demo", "go")
        for n in range(250):
            await server.log(type="message", text=str(n))
        await server.log(type="from_the_future", colour="red")
        got: list[Any] = []
        async with asyncio.timeout(10):
            async for logged in session.events():
                got.append(logged)
                if logged.index == 250:
                    await server.log(type="message", text="last")
                    await server.end_session()
        assert [one.index for one in got] == list(range(252))
        assert got[7].event == Message(text="7")
        assert got[250].type == "from_the_future"
        assert got[250].event["colour"] == "red"
        assert [one.index async for one in session.events(since_index=249)] == [250, 251]
        assert [one.index async for one in session.events(-1)] == list(range(252)), "every page of an ended session"


async def test_the_result_is_the_end_of_the_turn_of_the_last_message() -> None:
    async with FakeServer() as server, lent_to(server) as caller:
        session = await caller.start("demo", "go")
        await server.log(type="completion", turn=1, stop_reason="end_turn", text="one", duration_ms=1)
        assert await session.result() == Completion(turn=1, stop_reason="end_turn", text="one", duration_ms=1)
        await session.send("more")
        with pytest.raises(TimeoutError):
            await session.result(timeout_s=0.05)
        await server.log(type="completion", turn=2, stop_reason="end_turn", text="two", duration_ms=1)
        assert (await session.result(timeout_s=5)).text == "two"
        await session.send("more")
        await server.log(type="error", kind="droid_failed", message="the droid died")
        await server.end_session()
        with pytest.raises(SessionFailed, match="the droid died"):
            await session.result(timeout_s=5)


async def test_refusals_are_exceptions_by_their_kind() -> None:
    async with FakeServer() as server, lent_to(server) as caller:
        with pytest.raises(TooMany, match="16 messages are waiting") as refused:
            await caller.start("demo", "refuse")
        assert refused.value.kind == "too_many"
        assert refused.value.details["retryable"] is True


async def test_a_wrong_token_is_told_at_once() -> None:
    async with FakeServer() as server:
        with pytest.raises(Unauthenticated, match="invalid or expired"):
            async with Caller(server.url, "oub_wrong"):
                raise NotImplementedError


async def test_a_server_that_is_not_there_is_waited_for_and_then_given_up() -> None:
    async with FakeServer() as server:
        url = server.url
    with pytest.raises(Unreachable, match="does not answer"):
        async with Caller(url, TOKEN, patience_s=0.3):
            raise NotImplementedError


async def test_an_exception_of_the_body_comes_out_as_it_is() -> None:
    async with FakeServer() as server:
        with pytest.raises(LookupError, match="mine"):
            async with lent_to(server):
                raise LookupError("mine")
        assert server.mcp_sessions == set(), "the session was ended"


async def test_leaving_sends_what_is_answered_and_cancels_what_runs() -> None:
    async with FakeServer() as server:
        ended = asyncio.Event()
        async with lent_to(server) as caller:
            began = asyncio.Event()

            @caller.tool
            async def endless() -> None:
                began.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.set()

            @caller.tool
            def quick() -> int:
                return 1

            server.unavailable = 1
            await server.announce("quick", {}, request_id="r1")
            await server.announce("endless", {}, request_id="r2")
            await began.wait()
        assert ended.is_set()
        assert [one["request_id"] for one in server.answers] == ["r1"]


@pytest.mark.parametrize("cancellations", [1, 2, 3])
async def test_leaving_ends_everything_however_often_it_is_cancelled(cancellations: int) -> None:
    async with FakeServer() as server:
        caller = lent_to(server)
        began, cleaning, cleaned, asked_to_leave = (asyncio.Event() for _ in range(4))

        @caller.tool
        def quick() -> int:
            return 1

        @caller.tool
        async def endless() -> None:
            try:
                began.set()
                await asyncio.Event().wait()
            finally:
                cleaning.set()
                await cleaned.wait()

        async def stay() -> None:
            async with caller:
                await asked_to_leave.wait()

        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            staying = group.create_task(stay())
            await server.until(lambda: server.has_stream)
            server.mute_answers = True  # so leaving waits for one to be taken
            await server.announce("endless", {}, request_id="r1")
            await server.announce("quick", {}, request_id="r2")
            await began.wait()
            await server.until(lambda: len(server.answers) == 1)
            asked_to_leave.set()
            await asyncio.sleep(0.1)  # it is time that is tested: leaving has begun, and waits
            staying.cancel()
            await cleaning.wait()
            for _ in range(cancellations - 1):
                staying.cancel()
                await asyncio.sleep(0)
            cleaned.set()
            await asyncio.wait([staying])
        assert staying.cancelled()
        assert server.mcp_sessions == set(), "the session was ended"
        assert {task.get_name() for task in asyncio.all_tasks()} & {"stream", "lane", "tool endless"} == set()
        assert caller._http.closed


async def test_a_deadline_around_a_caller_is_kept_though_an_answer_is_not_taken() -> None:
    async with FakeServer() as server:

        async def stay() -> None:
            async with asyncio.timeout(1), lent_to(server) as caller:

                @caller.tool
                def quick() -> int:
                    return 1

                server.mute_answers = True
                await server.announce("quick", {}, request_id="r1")
                await server.until(lambda: len(server.answers) == 1)

        with pytest.raises(TimeoutError):
            await stay()
        assert server.mcp_sessions == set(), "the session was ended"


async def test_leaving_does_not_wait_for_what_was_never_begun() -> None:
    async with FakeServer() as server, asyncio.timeout(5):
        ran: list[int] = []
        async with lent_to(server, parallel_max=1) as caller:
            began = asyncio.Event()

            @caller.tool
            async def endless() -> None:
                ran.append(1)
                began.set()
                await asyncio.Event().wait()

            for n in range(3):
                await server.announce("endless", {}, request_id=f"r{n}")
            await began.wait()
        assert ran == [1]


async def test_leaving_does_not_wait_for_an_answer_that_nobody_wants_any_more() -> None:
    async with FakeServer() as server, asyncio.timeout(4), lent_to(server) as caller:

        @caller.tool
        def huge() -> str:
            return "x"

        server.refusals["r1"] = {"is_error": True, "error": {"kind": "too_large", "message": "at most 6 MiB"}}
        request = {"type": "caller_tool_request", "request_id": "r1", "session_id": "gogol_1"}
        cancelled = {"type": "caller_tool_cancelled", "request_id": "r1", "tool": "huge", "reason": "droid"}
        await server.push_together(request | {"tool": "huge", "arguments": {}}, cancelled)
        await server.until(lambda: len(server.answers) == 1)


async def test_leaving_does_not_wait_for_an_answer_that_was_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oubliette.caller.errands.ANSWERS_KEPT_BYTES", 10)
    async with FakeServer() as server, asyncio.timeout(4), lent_to(server) as caller:

        @caller.tool
        def quick() -> int:
            return 1

        server.unavailable = 1
        request = {"type": "caller_tool_request", "session_id": "gogol_1", "tool": "quick", "arguments": {}}
        cancelled = {"type": "caller_tool_cancelled", "request_id": "r1", "tool": "quick", "reason": "droid"}
        await server.push_together(request | {"request_id": "r1"}, cancelled, request | {"request_id": "r2"})
        await server.until(lambda: len(server.answers) == 1)


async def test_leaving_gives_up_on_a_tool_that_will_not_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("oubliette.caller.crew.DISMISS_S", 0.1)
    began, gate = asyncio.Event(), asyncio.Event()
    async with FakeServer() as server, asyncio.timeout(5):
        async with lent_to(server) as caller:

            @caller.tool
            async def stubborn() -> None:
                began.set()
                while not gate.is_set():
                    try:
                        await gate.wait()
                    except asyncio.CancelledError:
                        continue

            await server.announce("stubborn", {}, request_id="r1")
            await began.wait()
        assert "tool stubborn" in caplog.text
        assert server.mcp_sessions == set(), "the session was ended"
        gate.set()
        await asyncio.wait([one for one in asyncio.all_tasks() if one.get_name() == "tool stubborn"])


async def test_a_tool_that_is_lent_after_leaving_is_called_by_nobody() -> None:
    ran: list[int] = []
    async with FakeServer() as server:
        async with lent_to(server) as caller:
            await server.announce("early", {}, request_id="r1")
            await server.push_frame({"jsonrpc": "2.0", "id": "p1", "method": "ping"})
            await server.until(lambda: server.pongs == ["p1"])

        @caller.tool
        def early() -> None:
            ran.append(1)

        await asyncio.sleep(0)
        assert ran == []


async def test_a_url_that_is_none_is_refused_when_it_is_given() -> None:
    with pytest.raises(ValueError, match="not an http or https URL"):
        Caller("localhost:8080/mcp", TOKEN)


async def test_no_error_shows_what_may_be_a_secret() -> None:
    with pytest.raises(ValueError, match="not an http or https URL") as swapped:
        Caller(TOKEN, "http://127.0.0.1:1/mcp")
    async with FakeServer() as server:
        url = server.url + "?key=secret"
    with pytest.raises(Unreachable, match="does not answer") as unreachable:
        async with Caller(url, TOKEN, patience_s=0):
            raise NotImplementedError
    told = "".join(traceback.format_exception(swapped.value) + traceback.format_exception(unreachable.value))
    assert TOKEN not in told
    assert "key=secret" not in told


async def test_a_failure_without_a_kind_is_still_a_caller_error() -> None:
    async with FakeServer() as server, lent_to(server) as caller:
        with pytest.raises(CallerError):
            await caller.call("nothing_like_it")
