"""The exchange on a real database, under every grade of durability and a database that suspends at every call."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from oubliette.server.caller_tools.declaration import OfferedTool, declare
from oubliette.server.errors import (
    CallCancelled,
    CallerError,
    CallerGone,
    CallKeyReused,
    CallTimeout,
    ClientGone,
    InvalidArguments,
    InvalidParams,
    NotFound,
    StorageFailed,
    TooLarge,
    TooMany,
    UnknownTool,
)
from oubliette.server.limits import (
    ARGUMENTS_BYTES,
    ERROR_BYTES,
    INLINE_ARGUMENTS_BYTES,
    PENDING_ARGUMENTS_BYTES,
    PENDING_CALLS_PER_SESSION,
    RESULT_BYTES,
    WAITERS_PER_CALL,
)
from oubliette.server.storage.database import Tx
from oubliette.wire.events import CallerToolProgress
from tests.kit.exchange_rig import OWNER, SESSION, Heard, Rig, actor, rig, tools
from tests.kit.held_database import HeldDatabase

CHILD = "gogol_20260101_000001_00000001"


@pytest.fixture(params=["process", "power", "suspending"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Rig]:
    async with rig(tmp_path, request.param) as made:
        await made.session()
        yield made


@pytest.fixture
async def caller(world: Rig) -> Heard:
    carrier = Heard()
    carrier.leave = world.exchange.attach(SESSION, carrier)
    return carrier


async def result(call: asyncio.Task[bytes]) -> bytes:
    async with asyncio.timeout(10):
        return await call


async def test_a_call_is_announced_answered_and_returned_unchanged(world: Rig, caller: Heard) -> None:
    call = world.call(text="hi")
    told = await caller.next()
    assert told["type"] == "caller_tool_request"
    assert (told["tool"], told["index"], told["redelivery"]) == ("echo", 0, 0)
    assert bytes(told["arguments"]) == b'{"text":"hi"}'
    answered = await world.answer(told["request_id"], {"status": "sent"})
    assert (answered.accepted, answered.state) == (True, "answered")
    assert await result(call) == b'{"status":"sent"}'
    log = await world.log()
    assert [(one["index"], one["type"]) for one in log] == [(0, "caller_tool_request"), (1, "caller_tool_resolved")]
    assert log[0]["request_id"] == told["request_id"]
    assert log[0]["arguments"] == {"text": "hi"}
    assert [(what, outcome) for what, outcome, _ in await world.audit()] == [
        ("caller_tool", "asked"),
        ("caller_tool_response", "ok"),
    ]


async def test_nobody_hears_of_a_call_before_its_row_is_committed(world: Rig, caller: Heard) -> None:
    seen: list[str] = []
    world.mark = lambda name: seen.append(f"{name} {len(caller.told)}")
    world.call()
    await caller.next()
    await world.settle()
    assert seen[-2:] == ["call:after_commit 0", "call:announced 1"]
    assert set(seen[:-2]) == {"call:after_row 0"}


async def test_an_error_of_the_caller_is_what_the_droid_reads(world: Rig, caller: Heard) -> None:
    call = world.call()
    await world.answer((await caller.next())["request_id"], error="recipient not found")
    with pytest.raises(CallerError, match=r"^recipient not found$"):
        await result(call)


async def test_an_empty_error_is_an_error_and_its_repeat_a_repeat(world: Rig, caller: Heard) -> None:
    call = world.call()
    request_id = (await caller.next())["request_id"]
    await world.answer(request_id, error="")
    with pytest.raises(CallerError, match="echo failed at the caller"):
        await result(call)
    assert (await world.answer(request_id, error="")).repeated


async def test_neither_result_nor_error_is_a_null_result_and_both_are_refused(world: Rig, caller: Heard) -> None:
    call = world.call()
    request_id = (await caller.next())["request_id"]
    with pytest.raises(InvalidParams, match="both"):
        await world.answer(request_id, {"a": 1}, error="b")
    assert (await world.rows("state")) == [("pending",)]
    await world.answer(request_id)
    assert await result(call) == b"null"


async def test_the_same_answer_again_is_a_repeat_however_it_is_written(world: Rig, caller: Heard) -> None:
    world.call()
    request_id = (await caller.next())["request_id"]
    await world.answer(request_id, {"a": 1, "b": [2]})
    again = await world.exchange.answer(
        actor(), SESSION, request_id, result=b'{ "b": [2], "a": 1 }', error=None, door="mcp"
    )
    assert (again.accepted, again.repeated, again.state) == (True, True, "answered")
    other = await world.answer(request_id, {"a": 2})
    assert (other.accepted, other.reason, other.state) == (False, "answered", "answered")
    assert [what for what, _, _ in await world.audit()].count("caller_tool_response") == 3
    assert [outcome for _, outcome, _ in await world.audit()][-2:] == ["repeated", "refused: answered"]


async def test_only_the_owner_answers(world: Rig, caller: Heard) -> None:
    call = world.call()
    request_id = (await caller.next())["request_id"]
    for stranger in (actor("prn_other"), actor(OWNER, derived=True, session_id=SESSION)):
        refused = await world.answer(request_id, 1, by=stranger)
        assert (refused.accepted, refused.reason, refused.state) == (False, "not_owner", "")
    wrong = await world.answer(request_id, 1, session_id="gogol_20260101_000000_ffffffff")
    assert (wrong.accepted, wrong.reason) == (False, "unknown")
    assert (await world.rows("state")) == [("pending",)]
    await world.answer(request_id, 2)
    assert await result(call) == b"2"


async def test_an_answer_after_the_deadline_is_expired_and_the_droid_got_a_timeout(world: Rig, caller: Heard) -> None:
    call = world.call()
    request_id = (await caller.next())["request_id"]
    await world.pass_time(60)
    with pytest.raises(CallTimeout, match="did not answer echo within 60 seconds"):
        await result(call)
    late = await world.answer(request_id, 1)
    assert (late.accepted, late.reason, late.state) == (False, "expired", "expired")
    cancelled = caller.told[-1]
    assert (cancelled["type"], cancelled["reason"], cancelled["index"]) == ("caller_tool_cancelled", "timeout", 1)
    assert (await world.log())[1]["reason"] == "timeout"


async def test_a_deadline_is_counted_by_the_monotonic_clock(world: Rig, caller: Heard) -> None:
    """The wall clock may jump either way: calls end when their time has passed, and not before."""
    first = world.call("a")
    world.clock.jump(-3600)
    await world.answer((await caller.next())["request_id"], 1)
    assert await result(first) == b"1"
    second = world.call("b")
    request_id = (await caller.next())["request_id"]
    world.clock.jump(7200)
    await world.pass_time(59)
    assert not second.done()
    assert (await world.answer(request_id, 2)).accepted
    assert await result(second) == b"2"
    third = world.call("c")
    await caller.next()
    world.clock.jump(-7200)
    await world.pass_time(60)
    with pytest.raises(CallTimeout):
        await result(third)
    assert [one["duration_ms"] for one in await world.log() if one["type"] == "caller_tool_resolved"] == [
        0,
        59_000,
        60_000,
    ]


async def test_the_same_key_joins_and_runs_nothing_twice(world: Rig, caller: Heard) -> None:
    calls = [world.call(text="x") for _ in range(3)]
    told = await caller.next()
    late = world.call(tool="echo", text="x")  # by its declared name: the same call
    await world.settle()
    await world.answer(told["request_id"], 7)
    assert [await result(call) for call in (*calls, late)] == [b"7"] * 4
    assert await result(world.call(text="x")) == b"7"  # after its end: the stored outcome
    assert len(caller.requests()) == 1
    assert len(await world.rows()) == 1


async def test_the_same_key_for_another_call_is_refused(world: Rig, caller: Heard) -> None:
    world.call(text="x")
    told = await caller.next()
    for other in (world.call(text="y"), world.call(tool="ant_other", text="x")):
        with pytest.raises(CallKeyReused):
            await result(other)
    await world.answer(told["request_id"], 7)
    with pytest.raises(CallKeyReused):
        await result(world.call(text="y"))
    assert len(await world.rows()) == 1


async def test_a_key_counts_though_its_tool_was_removed(world: Rig, caller: Heard) -> None:
    ended = world.call("ended")
    await world.answer((await caller.next())["request_id"], 1)
    assert await result(ended) == b"1"
    open_ = world.call("open")
    second = (await caller.next())["request_id"]
    world.exchange.open_desk(SESSION, SESSION, OWNER, tools("fresh"))
    again = [world.call("ended"), world.call("open")]
    await world.settle()
    assert (await world.answer(second, 2)).accepted
    assert [await result(one) for one in (open_, *again)] == [b"2", b"1", b"2"]
    with pytest.raises(UnknownTool):
        await result(world.call("new"))
    with pytest.raises(CallKeyReused):
        await result(world.call("ended", text="other"))


async def test_a_cancel_ends_the_call_and_tells_the_caller(world: Rig, caller: Heard) -> None:
    call = world.call()
    request_id = (await caller.next())["request_id"]
    assert await world.exchange.cancel(SESSION, "key", "no longer needed")
    with pytest.raises(CallCancelled, match="no longer needed"):
        await result(call)
    told = await caller.next()
    assert (told["type"], told["request_id"], told["reason"]) == ("caller_tool_cancelled", request_id, "cancelled")
    assert not await world.exchange.cancel(SESSION, "key", "again")
    assert not await world.exchange.cancel(SESSION, "unknown", "")
    assert (await world.answer(request_id, 1)).reason == "expired"


async def test_a_cancel_that_overtakes_the_row_still_ends_the_call(world: Rig, caller: Heard) -> None:
    call = world.call()
    await asyncio.sleep(0)  # asked, and not yet committed
    assert await world.exchange.cancel(SESSION, "key", "too late?")
    with pytest.raises(CallCancelled):
        await result(call)
    assert await world.rows("state") == [("cancelled",)]
    assert caller.requests() == []


async def test_an_answer_from_who_read_the_log_may_come_before_the_announcement(world: Rig, caller: Heard) -> None:
    """The commit is seen by readers before the server has gone on: the answer counts, and at once."""
    held = HeldDatabase(world.database)
    world.exchange._asking._database = held
    call = world.call()
    async with asyncio.timeout(10):
        await held.committed.wait()
    ((request_id,),) = await world.rows("request_id")
    assert (await world.answer(request_id, "quick")).accepted
    held.release()
    assert await result(call) == b'"quick"'
    await world.settle()
    assert (caller.told, world.clock.waiting, world.exchange.pending_count(SESSION)) == ([], 0, 0)
    assert world.carriers._reaches[SESSION].on == {}


async def test_who_calls_while_its_session_ends_is_told_so(world: Rig, caller: Heard) -> None:
    pending = world.call("pending")
    await caller.next()
    held = HeldDatabase(world.database)
    world.exchange._ends._database = held
    closing = world.tasks.create_task(world.exchange.close_desk(SESSION, "the session was ended"))
    async with asyncio.timeout(10):
        await held.committed.wait()
    with pytest.raises(CallCancelled, match="ant_echo was not called: the session was ended"):
        await result(world.call("late"))
    held.release()
    await closing
    with pytest.raises(CallCancelled):
        await result(pending)
    assert len(await world.rows()) == 1


async def test_an_extension_that_is_heard_of_late_moves_no_deadline_back(world: Rig, caller: Heard) -> None:
    call = world.call()
    request_id = (await caller.next())["request_id"]
    held = HeldDatabase(world.database)
    world.exchange._answering._database = held
    first = world.tasks.create_task(world.extend(request_id, 70))
    async with asyncio.timeout(10):
        await held.committed.wait()
    await world.extend(request_id, 100)
    held.release()
    await first
    await world.pass_time(99)
    assert not call.done()


async def test_progress_reaches_the_droid_and_moves_the_deadline_up_to_its_maximum(world: Rig, caller: Heard) -> None:
    call = world.call()
    told = await caller.next()
    request_id, begun = told["request_id"], told["deadline_at"] - 60
    await world.pass_time(50)
    assert await world.extend(request_id, 100, progress=1, total=4, message="half") == begun + 150
    assert [(one.progress, one.total, one.message) for one in world.progress] == [(1, 4, "half")]
    await world.pass_time(99)
    assert not call.done()
    assert await world.extend(request_id, 5) == begun + 154
    assert await world.extend(request_id, 1) == begun + 154, "a deadline never moves back"
    assert await world.extend(request_id, 10_000) == begun + 600
    await world.pass_time(451)
    with pytest.raises(CallTimeout, match="within 600 seconds"):
        await result(call)
    assert await world.extend(request_id, 1) is None


async def test_of_extensions_at_once_the_latest_deadline_stays(world: Rig, caller: Heard) -> None:
    call = world.call()
    request_id = (await caller.next())["request_id"]
    async with asyncio.timeout(10):
        await asyncio.gather(*(world.extend(request_id, seconds) for seconds in range(62, 102, 2)))
    await world.pass_time(99)
    assert not call.done()
    await world.pass_time(1)
    assert call.done()


@pytest.mark.parametrize("jump", [-5000, 5000])
async def test_a_deadline_is_moved_in_the_time_that_it_is_counted_in(world: Rig, caller: Heard, jump: float) -> None:
    call = world.call()
    told = await caller.next()
    world.clock.jump(jump)
    await world.pass_time(10)
    assert await world.extend(told["request_id"], 100) == told["deadline_at"] + 50
    await world.pass_time(99)
    assert not call.done()
    await world.pass_time(1)
    assert call.done()


async def test_a_deadline_that_was_moved_meanwhile_does_not_expire(world: Rig, caller: Heard) -> None:
    call = world.call()
    request_id = (await caller.next())["request_id"]
    await world.pass_time(59)

    async def elsewhere(tx: Tx) -> int:
        return await tx.run("UPDATE calls SET deadline_at = deadline_at + 100")

    await world.database.write(elsewhere)  # as another server does
    await world.pass_time(1)
    assert not call.done()
    await world.pass_time(99)
    assert (await world.answer(request_id, 1)).accepted
    assert await result(call) == b"1"


async def test_progress_by_a_stranger_changes_nothing(world: Rig, caller: Heard) -> None:
    world.call()
    request_id = (await caller.next())["request_id"]
    told = CallerToolProgress(request_id=request_id)
    assert await world.exchange.progress(actor("prn_x"), SESSION, request_id, told, extend_s=9, door="mcp") is None
    assert [one["type"] for one in await world.log()] == ["caller_tool_request"]


async def test_nothing_asked_wrongly_disturbs_anybody(world: Rig, caller: Heard) -> None:
    with pytest.raises(UnknownTool):
        await result(world.call(tool="ant_unknown"))
    with pytest.raises(TooLarge):
        await result(world.call(text="x" * ARGUMENTS_BYTES))
    with pytest.raises(InvalidParams):
        await result(world.call("k" * 129))
    with pytest.raises(NotFound):
        await result(world.call(session_id="gogol_20260101_000000_ffffffff"))
    assert await world.rows() == []
    assert await world.log() == []
    assert caller.told == []


async def test_arguments_that_do_not_fit_are_refused_before_anyone_is_disturbed(world: Rig, caller: Heard) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    lent = declare("ant", [OfferedTool(name="strict", inputSchema=schema)], timeout_max_s=600)
    world.exchange.open_desk(SESSION, SESSION, OWNER, lent)
    with pytest.raises(InvalidArguments, match=r"ant_strict was not called: .*required"):
        await result(world.call(tool="ant_strict"))
    assert (await world.rows(), caller.told) == ([], [])


async def test_the_65th_pending_call_is_refused_and_an_end_makes_room(world: Rig, caller: Heard) -> None:
    calls = [world.call(f"k{number}") for number in range(PENDING_CALLS_PER_SESSION)]
    one_more = world.call("more")
    with pytest.raises(TooMany, match="64"):
        await result(one_more)
    first = await caller.next()
    await world.answer(first["request_id"], 0)
    done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED, timeout=10)
    assert len(done) == 1
    more = world.call("more")
    while len(caller.requests()) < PENDING_CALLS_PER_SESSION + 1:
        await caller.next()
    # A key that ended gets its outcome, though there is no room for another call.
    ended = calls.index(next(iter(done)))
    assert await result(world.call(f"k{ended}")) == b"0"
    assert not more.done()


async def test_results_and_errors_have_bounds(world: Rig, caller: Heard) -> None:
    call = world.call()
    request_id = (await caller.next())["request_id"]
    with pytest.raises(TooLarge, match="result"):
        await world.answer(request_id, "x" * RESULT_BYTES)
    with pytest.raises(TooLarge, match="error"):
        await world.answer(request_id, error="x" * (ERROR_BYTES + 1))
    await world.answer(request_id, "x" * (RESULT_BYTES - 2))
    assert len(await result(call)) == RESULT_BYTES


async def test_large_arguments_travel_by_reference(world: Rig, caller: Heard) -> None:
    world.call(text="x" * INLINE_ARGUMENTS_BYTES)
    told = await caller.next()
    assert "arguments" not in told
    assert told["arguments_bytes"] == INLINE_ARGUMENTS_BYTES + len('{"text":""}')
    assert world.exchange.listed(SESSION) == [told]
    (whole,) = world.exchange.listed(SESSION, told["request_id"])
    assert len(whole["arguments"]) == told["arguments_bytes"]
    assert "arguments_bytes" not in whole
    (logged,) = await world.log()
    assert "arguments" not in logged
    assert logged["arguments_bytes"] == told["arguments_bytes"]


async def test_a_list_of_requests_shows_all_and_the_arguments_of_as_many_as_fit(world: Rig, caller: Heard) -> None:
    size = PENDING_ARGUMENTS_BYTES // 5 + 1
    texts = ["x" * (size - len('{"text":""}'))] * 6 + ["small"]
    for n, text in enumerate(texts):
        world.call(f"k{n}", text=text)
        await caller.next()
    listed = world.exchange.listed(SESSION)
    assert [one["request_id"] for one in listed] == caller.requests()
    assert [one.get("arguments_bytes") for one in listed] == [None] * 4 + [size] * 2 + [None]
    assert [len(one["arguments"]) for one in listed if "arguments" in one][:-1] == [size] * 4
    assert bytes(listed[-1]["arguments"]) == b'{"text":"small"}'


async def test_one_request_is_listed_by_its_id_while_it_waits(world: Rig, caller: Heard) -> None:
    world.call("k1", n=1)
    asked, _ = await caller.next(), world.call("k2", n=2)
    await caller.next()
    assert world.exchange.listed(SESSION, asked["request_id"]) == [asked]
    assert world.exchange.listed(SESSION, "unheard-of") == []
    await world.answer(asked["request_id"], 1)
    assert world.exchange.listed(SESSION, asked["request_id"]) == []


async def test_a_call_joined_too_often_keeps_the_last_to_join(world: Rig, caller: Heard) -> None:
    first = world.call()
    request_id = (await caller.next())["request_id"]
    later = [world.call() for _ in range(WAITERS_PER_CALL)]
    with pytest.raises(TooMany, match="joined again"):
        await result(first)
    await world.answer(request_id, 1)
    assert [await result(one) for one in later] == [b"1"] * WAITERS_PER_CALL


async def test_a_client_that_does_not_return_gives_up_what_only_it_asked(world: Rig, caller: Heard) -> None:
    mine, shared, other = world.call("mine"), world.call("shared"), world.call("other", instance="two")
    for _ in range(3):
        await caller.next()
    joined = world.call("shared", instance="two")
    await world.settle()
    assert world.exchange.instances(SESSION) == {"one", "two"}
    await world.exchange.client_gone(SESSION, "one")
    with pytest.raises(ClientGone):
        await result(mine)
    assert not shared.done()
    await world.exchange.client_gone(SESSION, "two")
    for call in (shared, joined, other):
        with pytest.raises(ClientGone):
            await result(call)


async def test_the_end_of_a_session_ends_its_calls_and_lets_none_in(world: Rig, caller: Heard) -> None:
    pending = [world.call(f"k{number}") for number in range(3)]
    for _ in pending:
        await caller.next()
    entering = world.call("entering")
    await asyncio.sleep(0)
    await world.session_ended()
    await world.exchange.close_desk(SESSION, "the session was ended")
    for call in (*pending, entering):
        with pytest.raises(CallCancelled, match="the session was ended"):
            await result(call)
    assert {state for (state,) in await world.rows("state")} == {"cancelled"}
    with pytest.raises(NotFound):
        await result(world.call("after"))


async def test_a_session_that_ends_leaves_nothing_behind(world: Rig, caller: Heard) -> None:
    stream = Heard()
    await world.session(CHILD, root_id=SESSION)
    world.exchange.bind(CHILD, "mcp-1")
    world.carriers.attach_stream("mcp-1", stream)
    calls = [world.call("a"), world.call("b", session_id=CHILD)]
    polled = world.tasks.create_task(world.exchange.poll(SESSION, frozenset(), 30))
    await world.settle()
    await world.exchange.close_desk(SESSION, "over")
    await world.exchange.close_desk(CHILD, "over")
    await world.settle()
    assert all(call.done() for call in (*calls, polled))
    world.carriers.detach_stream("mcp-1", stream)
    world.exchange.promise(SESSION, 5)
    caller.leave()
    assert world.clock.waiting == 0
    carriers, desks, polling = world.carriers, world.exchange._desks, world.exchange._polling
    assert (carriers._reaches, carriers._lines, desks._desks, desks._trees, polling._polls) == ({}, {}, {}, {}, {})


async def test_a_call_of_nobody_is_disconnected_at_once(world: Rig) -> None:
    call = world.call()
    await world.settle()
    await world.pass_time(0)
    with pytest.raises(CallerGone):
        await result(call)


async def test_a_promise_keeps_a_call_for_who_is_about_to_listen(world: Rig) -> None:
    world.exchange.promise(SESSION, 5)
    call = world.call()
    await world.settle()
    await world.pass_time(4.9)
    assert not call.done()
    await world.pass_time(0.2)
    with pytest.raises(CallerGone):
        await result(call)


async def test_a_caller_that_leaves_ends_every_question_after_the_grace(world: Rig, caller: Heard) -> None:
    calls = [world.call(f"k{number}") for number in range(3)]
    await world.settle()
    caller.leave()
    await world.pass_time(3.9)
    assert not any(call.done() for call in calls)
    await world.pass_time(0.2)
    for call in calls:
        with pytest.raises(CallerGone, match="disconnected before it answered echo"):
            await result(call)


async def test_a_caller_back_within_the_grace_is_asked_once_more(world: Rig, caller: Heard) -> None:
    call = world.call()
    request_id = (await caller.next())["request_id"]
    caller.leave()
    await world.pass_time(3)
    again = Heard()
    world.exchange.attach(SESSION, again)
    told = await again.next()
    assert (told["request_id"], told["redelivery"]) == (request_id, 1)
    await world.pass_time(10)
    assert not call.done()
    assert await world.rows("redelivery") == [(1,)]


async def test_a_child_asks_its_roots_caller(world: Rig, caller: Heard) -> None:
    await world.session(CHILD, root_id=SESSION)
    call = world.call(session_id=CHILD)
    told = await caller.next()
    assert told["session_id"] == CHILD
    await world.answer(told["request_id"], 1, session_id=CHILD)
    assert await result(call) == b"1"


async def test_a_restart_joins_droid_and_caller_again(world: Rig, caller: Heard) -> None:
    world.call("a", text="x")
    told = await caller.next()
    await world.kill()
    world.clock.pass_time(10)
    await world.start()
    joined = world.call("a", text="x")
    back = Heard()
    world.exchange.attach(SESSION, back)
    again = await back.next()
    assert (again["request_id"], again["redelivery"]) == (told["request_id"], 1)
    await world.answer(told["request_id"], 5)
    assert await result(joined) == b"5"
    assert len(await world.rows()) == 1


async def test_after_a_restart_nobody_is_gone_for_a_while_and_then_is(world: Rig, caller: Heard) -> None:
    world.call()
    await caller.next()
    await world.kill()
    await world.start(restart_grace_s=30)
    call = world.call()
    await world.pass_time(29.9)
    assert not call.done()
    await world.pass_time(0.2)
    with pytest.raises(CallerGone):
        await result(call)


@pytest.mark.parametrize("jump, left", [(0, 50), (-5000, 60), (30, 20)])
async def test_after_a_restart_a_call_has_what_the_wall_says_and_never_more(
    world: Rig, caller: Heard, jump: float, left: float
) -> None:
    world.call()
    await caller.next()
    await world.kill()
    world.clock.pass_time(10)
    world.clock.jump(jump)
    await world.start(restart_grace_s=1000)
    call = world.call()
    await world.pass_time(left - 1)
    assert not call.done()
    await world.pass_time(1)
    with pytest.raises(CallTimeout):
        await result(call)


async def test_a_call_whose_deadline_passed_while_the_server_was_away_times_out(world: Rig, caller: Heard) -> None:
    world.call()
    told = await caller.next()
    await world.kill()
    world.clock.pass_time(61)
    await world.start()
    await world.pass_time(0)
    with pytest.raises(CallTimeout):
        await result(world.call())
    assert (await world.answer(told["request_id"], 1)).reason == "expired"


async def test_a_call_of_a_session_that_ended_just_before_the_crash_is_ended_by_the_next_server(
    world: Rig, caller: Heard
) -> None:
    world.call()
    told = await caller.next()
    await world.session_ended()
    await world.kill()
    await world.start()
    assert await world.rows("state") == [("cancelled",)]
    assert (await world.answer(told["request_id"], 1)).reason == "expired"
    assert [one["type"] for one in await world.log()][-2:] == ["caller_tool_cancelled", "caller_tool_resolved"]


async def test_an_outcome_survives_a_restart_for_droid_and_caller(world: Rig, caller: Heard) -> None:
    world.call("a")
    told = await caller.next()
    await world.answer(told["request_id"], {"x": 1})
    await world.kill()
    await world.start()
    assert await result(world.call("a")) == b'{"x":1}'
    assert (await world.answer(told["request_id"], {"x": 1})).repeated
    assert (await world.answer(told["request_id"], {"x": 2})).reason == "answered"


async def test_an_end_that_the_database_refuses_is_tried_again(world: Rig, caller: Heard) -> None:
    call = world.call()
    await caller.next()
    database, refused = world.database, 0

    class Full:
        async def write(self, unit: object) -> object:
            nonlocal refused
            refused += 1
            raise StorageFailed("no space left")

        def __getattr__(self, name: str) -> object:
            return getattr(database, name)

    world.exchange._ends._database = Full()  # type: ignore[assignment]
    await world.pass_time(61.5)
    assert refused == 2
    assert not call.done()
    world.exchange._ends._database = database
    await world.pass_time(1)
    with pytest.raises(CallTimeout):
        await result(call)


async def test_a_call_that_the_database_refuses_is_told_so_and_leaves_nothing(world: Rig, caller: Heard) -> None:
    database = world.database

    class Full:
        async def write(self, unit: object) -> object:
            await asyncio.sleep(0)
            raise StorageFailed("no space left")

        def __getattr__(self, name: str) -> object:
            return getattr(database, name)

    world.exchange._asking._database = Full()  # type: ignore[assignment]
    first, joined = world.call(), world.call()
    for call in (first, joined):
        with pytest.raises(StorageFailed):
            await result(call)
    assert world.exchange.pending_count(SESSION) == 0
    world.exchange._asking._database = database
    again = world.call()
    await world.answer((await caller.next())["request_id"], 1)
    assert await result(again) == b"1"


class Died(Exception):
    """The server is gone, at a named point."""


POINTS = [
    "call:after_row",
    "call:after_commit",
    "call:announced",
    "progress:after_row",
    "progress:after_commit",
    "end:after_row",
    "end:after_commit",
    "end:told",
    "answer:before_reply",
]


@pytest.mark.parametrize("point", POINTS)
async def test_wherever_the_server_dies_both_sides_repeat_themselves_and_it_happened_once(
    world: Rig, caller: Heard, point: str
) -> None:
    dead = asyncio.Event()

    def mark(name: str) -> None:
        if name == point or dead.is_set():
            dead.set()
            raise Died(name)

    async def caller_does(carrier: Heard) -> None:
        request_id = (await carrier.next())["request_id"]
        await world.extend(request_id, 30, message="working")
        assert (await world.answer(request_id, "done")).accepted

    world.mark = mark
    call = world.call()
    works = world.tasks.create_task(caller_does(caller))
    async with asyncio.timeout(10):
        await dead.wait()
        await asyncio.wait((call, works), timeout=0.05, return_when=asyncio.ALL_COMPLETED)
    await world.kill()
    world.mark = world.marks.append
    await world.start()
    again = world.call()
    await world.settle()
    back = Heard()
    world.exchange.attach(SESSION, back)
    await world.settle()
    if back.requests():
        await caller_does(back)
    assert await result(again) == b'"done"'
    (row,) = await world.rows("request_id, state")
    assert row[1] == "answered"
    assert (await world.answer(row[0], "done")).repeated
    log = [one["type"] for one in await world.log() if one["type"] != "caller_tool_progress"]
    assert log == ["caller_tool_request", "caller_tool_resolved"]
    audit = [(what, outcome) for what, outcome, _ in await world.audit() if what != "caller_tool_progress"]
    assert audit == [("caller_tool", "asked"), ("caller_tool_response", "ok"), ("caller_tool_response", "repeated")]
