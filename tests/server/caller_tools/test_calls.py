"""The rows of calls: each move is one conditional statement, whoever else writes to the same database."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from oubliette.server.caller_tools import calls, ledger
from oubliette.server.caller_tools.ledger import Call, State, Stimulus
from oubliette.server.errors import CallerGone
from oubliette.server.storage.database import Tx
from tests.kit.exchange_rig import SESSION, Heard, Rig, rig


@pytest.fixture
async def world(tmp_path: Path) -> AsyncGenerator[Rig]:
    async with rig(tmp_path) as made:
        await made.session()
        yield made


async def pending_call(world: Rig) -> tuple[asyncio.Task[bytes], Call]:
    carrier = Heard()
    world.exchange.attach(SESSION, carrier)
    task = world.call()
    request_id = (await carrier.next())["request_id"]
    call = await world.database.read(lambda tx: calls.find(tx, SESSION, request_id))
    assert call is not None
    return task, call


def ended(call: Call, stimulus: Stimulus, now: float) -> Call:
    content = b"1" if stimulus is Stimulus.ANSWER else "why"
    moved = ledger.ended(call, stimulus, content, now=now, at=now)
    assert moved is not None
    return moved.call


async def ends(world: Rig, call: Call, stimulus: Stimulus, now: float) -> bool:
    return await world.database.write(lambda tx: calls.end(tx, call, stimulus, now))


async def test_of_two_ends_of_a_row_the_first_counts(world: Rig) -> None:
    _, call = await pending_call(world)
    now = call.created_at + 1
    assert await ends(world, ended(call, Stimulus.DISCONNECT, now), Stimulus.DISCONNECT, now)
    for stimulus in Stimulus:
        assert not await ends(world, ended(call, stimulus, now), stimulus, now)
    assert await world.rows("state") == [("disconnected",)]


@pytest.mark.parametrize("stimulus", [Stimulus.ANSWER, Stimulus.FAIL])
async def test_an_answer_must_come_before_the_rows_deadline(world: Rig, stimulus: Stimulus) -> None:
    _, call = await pending_call(world)
    moved = ended(call, stimulus, call.created_at)
    assert not await ends(world, moved, stimulus, call.deadline_at)
    assert await ends(world, moved, stimulus, call.deadline_at - 0.001)


async def test_an_expiry_ends_no_later_deadline_than_its_own(world: Rig) -> None:
    _, call = await pending_call(world)
    now = call.deadline_at
    early = ended(structs.replace(call, deadline_at=call.deadline_at - 1), Stimulus.EXPIRE, now)
    assert not await ends(world, early, Stimulus.EXPIRE, now)
    assert await ends(world, ended(call, Stimulus.EXPIRE, now), Stimulus.EXPIRE, now)


async def test_a_call_that_another_server_ended_ends_here_as_it_ended_there(world: Rig) -> None:
    task, call = await pending_call(world)
    there = ended(call, Stimulus.DISCONNECT, call.created_at + 1)
    await ends(world, there, Stimulus.DISCONNECT, call.created_at + 1)
    told = await world.answer(call.request_id, 5)
    assert (told.accepted, told.reason, told.state) == (False, "expired", "disconnected")
    with pytest.raises(CallerGone, match="why"):
        await task
    assert world.exchange.pending_count(SESSION) == 0
    assert world.clock.waiting == 0


async def test_pending_calls_and_orphans_are_told_apart_by_their_session(world: Rig) -> None:
    _, call = await pending_call(world)

    async def both(tx: Tx) -> tuple[list[str], list[str]]:
        pending, orphans = await calls.pending(tx), await calls.orphans(tx)
        return [one.call.request_id for one in pending], [one.call.request_id for one in orphans]

    assert await world.database.read(both) == ([call.request_id], [])
    await world.session_ended()
    assert await world.database.read(both) == ([], [call.request_id])
    await ends(world, ended(call, Stimulus.CANCEL, 0), Stimulus.CANCEL, 0)
    assert await world.database.read(both) == ([], [])


async def test_a_stored_call_is_what_was_put(world: Rig) -> None:
    _, call = await pending_call(world)
    (stored,) = await world.database.read(calls.pending)
    assert replace(stored, arguments=b"") == calls.Stored(call=call, index=0, digest=stored.digest, arguments=b"")
    assert (call.state, call.owner, call.instance, call.tool) == (State.PENDING, "prn_owner", "one", "echo")
    assert stored.arguments == b"{}"


async def test_outcomes_are_forgotten_long_after_their_session_ended_and_are_unknown_then(world: Rig) -> None:
    task, call = await pending_call(world)
    await world.answer(call.request_id, 5)
    await task
    ended_at = world.clock.now()
    forget = lambda before: world.database.write(lambda tx: calls.forget(tx, before, 500))  # noqa: E731
    assert await forget(ended_at + 1) == 0, "its session lives"
    await world.session_ended()
    assert await forget(ended_at) == 0, "it ended just now"
    assert await forget(ended_at + 1) == 1
    assert (await world.answer(call.request_id, 5)).reason == "unknown"


async def test_a_start_looks_at_what_is_pending_and_not_at_all_that_ever_was(world: Rig) -> None:
    plan = await world.database.read(lambda tx: tx.all("EXPLAIN QUERY PLAN " + calls._PENDING, calls.KIND))
    assert any("calls_pending" in row[3] for row in plan)
