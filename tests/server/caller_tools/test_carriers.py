"""Which carrier a request is on: one at a time, the newest, and never none while one lives."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

from oubliette.server.caller_tools.carriers import Carriers
from oubliette.server.errors import CallerGone
from tests.kit.clock import MovableClock
from tests.kit.exchange_rig import OWNER, SESSION, Heard, Rig, rig, tools

TREE = "root"


class Book:
    """Stands for the exchange: what is pending, and whether the owner was found absent."""

    def __init__(self) -> None:
        self.pending: set[str] = set()
        self.absences = 0

    def announcement(self, reach_id: str, request_id: str, redelivery: int) -> dict[str, Any] | None:
        if request_id not in self.pending:
            return None
        return {"type": "caller_tool_request", "request_id": request_id, "redelivery": redelivery}

    def absent(self, reach_id: str) -> None:
        self.absences += 1


class World:
    def __init__(self) -> None:
        self.clock = MovableClock()
        self.carriers = Carriers(self.clock, grace_s=4)
        self.book = Book()
        self.carriers.join(self.book)

    def put(self, request_id: str) -> None:
        self.book.pending.add(request_id)
        self.carriers.put(TREE, request_id)

    def end(self, request_id: str) -> None:
        self.book.pending.discard(request_id)
        self.carriers.ended(TREE, request_id)

    def on(self, request_id: str) -> object:
        return self.carriers.is_on(TREE, request_id)


class Ending(Heard):
    """A carrier that ends while it announces, as a stream does whose client does not read."""

    def __init__(self, world: World, after: int = 0) -> None:
        super().__init__()
        self._world = world
        self._after = after

    def announce(self, session_id: str, announcement: dict[str, Any]) -> None:
        if len(self.told) >= self._after:
            self._world.carriers.detach(TREE, self)
        else:
            super().announce(session_id, announcement)


class Narrow(Heard):
    """A carrier that takes so many at a time, as a stream does that is read slower than it is told."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.waiting: list[Callable[[], None]] = []

    def has_room(self, again: Callable[[], None]) -> bool:
        if self.room == 0:
            self.waiting.append(again)
        return self.room > 0

    def announce(self, session_id: str, announcement: dict[str, Any]) -> None:
        self.room -= 1
        super().announce(session_id, announcement)

    def drain(self, room: int) -> None:
        self.room = room
        waiting, self.waiting = self.waiting, []
        for again in waiting:
            again()


class Raising(Heard):
    def announce(self, session_id: str, announcement: dict[str, Any]) -> None:
        raise RuntimeError("a bug in a carrier")


@pytest.fixture
def world() -> World:
    return World()


def deliveries(*carriers: Heard) -> list[list[tuple[str, int]]]:
    return [[(told["request_id"], told["redelivery"]) for told in carrier.told] for carrier in carriers]


def test_a_request_goes_to_the_newest_carrier_and_to_no_other(world: World) -> None:
    old, new = Heard(), Heard("request")
    world.carriers.attach(TREE, old)
    world.carriers.attach(TREE, new)
    world.put("r")
    assert deliveries(old, new) == [[], [("r", 0)]]


def test_a_newer_carrier_leaves_a_request_where_it_is(world: World) -> None:
    old, new = Heard(), Heard()
    world.carriers.attach(TREE, old)
    world.put("r")
    world.carriers.attach(TREE, new)
    assert deliveries(old, new) == [[("r", 0)], []]
    world.put("s")
    assert deliveries(old, new) == [[("r", 0)], [("s", 0)]]


def test_what_was_on_a_carrier_that_goes_is_announced_on_the_next_with_redelivery(world: World) -> None:
    first, second, third = Heard(), Heard(), Heard()
    for carrier in (first, second, third):
        world.carriers.attach(TREE, carrier)
    world.put("r")
    world.carriers.detach(TREE, third)
    world.carriers.detach(TREE, second)
    world.carriers.detach(TREE, second)  # twice is no error
    assert deliveries(first, second, third) == [[("r", 2)], [("r", 1)], [("r", 0)]]


def test_without_a_carrier_a_request_waits_for_the_first_to_come(world: World) -> None:
    world.carriers.promise(TREE, 5)
    world.put("r")
    assert world.on("r") is None
    carrier = Heard()
    world.carriers.attach(TREE, carrier)
    assert deliveries(carrier) == [[("r", 0)]]


def test_a_carrier_that_is_full_gets_the_rest_in_order_when_it_has_room_again(world: World) -> None:
    for number in range(3):
        world.put(f"r{number}")
    narrow = Narrow(room=2)
    world.carriers.attach(TREE, narrow)
    assert narrow.requests() == ["r0", "r1"]
    world.put("r3")
    assert len(narrow.waiting) == 1, "it is asked once, not once for each that waits"
    assert world.on("r2") is world.on("r3") is None
    world.end("r2")
    narrow.drain(5)
    assert narrow.requests() == ["r0", "r1", "r3"]
    world.put("r4")
    assert narrow.requests()[-1] == "r4"


def test_what_waits_for_a_full_carrier_is_nobodys_loss(world: World) -> None:
    """The owner is there, if slow; another carrier takes what waits, and the full one's end moves the rest."""
    narrow = Narrow(room=1)
    world.carriers.attach(TREE, narrow)
    for number in range(3):
        world.put(f"r{number}")
    world.clock.pass_time(60)
    assert world.book.absences == 0
    assert not world.carriers.is_absent(TREE)
    wide = Heard()
    world.carriers.attach(TREE, wide)
    assert deliveries(wide) == [[("r1", 0), ("r2", 0)]]
    world.carriers.detach(TREE, narrow)
    assert deliveries(wide) == [[("r1", 0), ("r2", 0), ("r0", 1)]]
    narrow.drain(5)
    assert narrow.requests() == ["r0"], "it carries nothing any more"


def test_a_full_carrier_that_ends_leaves_its_place_to_the_next(world: World) -> None:
    narrow = Narrow(room=0)
    world.carriers.attach(TREE, narrow)
    world.put("r0")
    world.carriers.detach(TREE, narrow)
    world.carriers.attach(TREE, narrow)
    narrow.drain(1)
    assert deliveries(narrow) == [[("r0", 0)]]


def test_an_ended_request_is_never_announced_again(world: World) -> None:
    first, second = Heard(), Heard()
    world.carriers.attach(TREE, first)
    world.put("r")
    world.end("r")
    world.carriers.detach(TREE, first)
    world.carriers.attach(TREE, second)
    assert second.told == []


def test_what_is_said_of_a_request_is_said_where_it_is(world: World) -> None:
    first, second = Heard(), Heard()
    world.carriers.attach(TREE, first)
    world.put("r")
    world.carriers.attach(TREE, second)
    world.carriers.tell(TREE, "r", {"type": "caller_tool_cancelled"})
    assert [told["type"] for told in first.told] == ["caller_tool_request", "caller_tool_cancelled"]
    assert second.told == []


def test_a_carrier_that_ends_while_it_announces_passes_everything_on(world: World) -> None:
    old = Heard()
    world.carriers.promise(TREE, 5)
    for name in ("a", "b", "c"):
        world.put(name)
    ending = Ending(world, after=1)
    # Of two that come together: the newer takes one request and ends; none may be lost on it.
    world.carriers.attach(TREE, ending)
    assert [world.on(name) for name in ("a", "b", "c")] == [None, None, None]
    world.carriers.attach(TREE, old)
    assert deliveries(ending, old) == [[("a", 0)], [("a", 1), ("b", 1), ("c", 0)]]
    world.put("d")
    world.carriers.attach(TREE, Ending(world))
    world.put("e")
    assert {world.on(name) for name in "abcde"} == {old}


def test_a_carrier_with_a_bug_is_taken_to_be_gone(world: World, caplog: pytest.LogCaptureFixture) -> None:
    old = Heard()
    world.carriers.attach(TREE, old)
    world.carriers.attach(TREE, Raising())
    world.put("r")
    world.put("s")
    assert deliveries(old) == [[("r", 1), ("s", 0)]]
    assert "a carrier failed" in caplog.text


def test_a_stream_carries_what_its_session_touched_whichever_came_first(world: World) -> None:
    before, after = Heard(), Heard()
    world.carriers.attach_stream("mcp-1", before)
    assert world.carriers.bind(TREE, "mcp-1")
    assert not world.carriers.bind(TREE, "mcp-1")
    world.put("r")
    assert (before.carries, deliveries(before)) == ([TREE], [[("r", 0)]])
    world.carriers.bind("other", "mcp-2")
    world.carriers.attach_stream("mcp-2", after)
    assert after.carries == ["other"]


def test_the_newest_stream_of_a_session_wins_and_gets_what_the_older_had(world: World) -> None:
    older, newer = Heard(), Heard()
    world.carriers.bind(TREE, "mcp-1")
    world.carriers.attach_stream("mcp-1", older)
    world.put("r")
    world.carriers.attach_stream("mcp-1", newer)
    world.carriers.detach_stream("mcp-1", older)  # late, and about nothing
    assert deliveries(older, newer) == [[("r", 0)], [("r", 1)]]
    assert (older.carries, newer.carries) == ([], [TREE])
    world.put("s")
    assert deliveries(newer) == [[("r", 1), ("s", 0)]]


def test_another_session_of_the_owner_takes_over_once_it_has_a_stream(world: World) -> None:
    """Until then the first goes on: looking in by another program deafens nobody."""
    first, second = Heard(), Heard()
    world.carriers.bind(TREE, "mcp-1")
    world.carriers.attach_stream("mcp-1", first)
    world.put("r")
    world.carriers.bind(TREE, "mcp-2")
    world.put("s")
    assert deliveries(first) == [[("r", 0), ("s", 0)]]
    world.carriers.attach_stream("mcp-2", second)
    world.put("t")
    # What the first works on stays with it while it lives.
    assert deliveries(first, second) == [[("r", 0), ("s", 0)], [("t", 0)]]
    assert (first.carries, second.carries) == ([], [TREE])
    world.carriers.detach_stream("mcp-1", first)
    assert deliveries(second) == [[("t", 0), ("r", 1), ("s", 1)]]


def test_a_stream_that_lost_its_session_is_no_presence_for_what_it_does_not_hold(world: World) -> None:
    first, second = Heard(), Heard()
    world.carriers.bind(TREE, "mcp-1")
    world.carriers.attach_stream("mcp-1", first)
    world.put("r")
    world.carriers.bind(TREE, "mcp-2")
    world.carriers.attach_stream("mcp-2", second)
    world.put("s")
    world.carriers.detach_stream("mcp-2", second)
    world.clock.pass_time(4.1)
    assert world.book.absences == 1
    assert (world.on("r"), world.on("s")) == (first, None)


def test_the_same_session_touched_again_takes_its_stream_back(world: World) -> None:
    first, second = Heard(), Heard()
    world.carriers.bind(TREE, "mcp-1")
    world.carriers.attach_stream("mcp-1", first)
    world.carriers.bind(TREE, "mcp-2")
    world.carriers.bind(TREE, "mcp-1")
    world.put("r")
    world.carriers.attach_stream("mcp-2", second)
    world.put("s")
    assert deliveries(first, second) == [[("r", 0), ("s", 0)], []]
    assert first.carries == [TREE]


def test_a_carrier_named_again_is_the_newest(world: World) -> None:
    first, second = Heard("poll"), Heard()
    world.carriers.attach(TREE, first)
    world.carriers.attach(TREE, second)
    world.carriers.attach(TREE, first)
    world.put("r")
    assert deliveries(first, second) == [[("r", 0)], []]


@pytest.mark.parametrize(
    "promised, attached_for, gone_after",
    [(None, None, 0), (5, None, 5), (None, 10, 4), (12, 10, 4), (20, 10, 10), (2, 0, 4)],
)
def test_absence_comes_after_the_grace_and_every_promise(
    world: World, promised: float | None, attached_for: float | None, gone_after: float
) -> None:
    if promised is not None:
        world.carriers.promise(TREE, promised)
    if attached_for is not None:
        carrier = Heard()
        world.carriers.attach(TREE, carrier)
        world.put("r")
        world.clock.pass_time(attached_for)
        world.carriers.detach(TREE, carrier)
    else:
        world.put("r")
    world.clock.pass_time(max(0.0, gone_after - 0.1))
    assert world.book.absences == (1 if gone_after == 0 else 0)
    world.clock.pass_time(0.2)
    assert world.book.absences == 1


def test_a_promise_made_meanwhile_counts(world: World) -> None:
    world.carriers.promise(TREE, 5)
    world.put("r")
    world.clock.pass_time(4)
    world.carriers.promise(TREE, 5)
    world.clock.pass_time(4.9)
    assert world.book.absences == 0
    world.clock.pass_time(0.2)
    assert world.book.absences == 1


def test_nobody_is_absent_who_owes_no_answer(world: World) -> None:
    carrier = Heard()
    world.carriers.attach(TREE, carrier)
    world.carriers.detach(TREE, carrier)
    world.clock.pass_time(100)
    assert world.book.absences == 0
    world.put("r")
    world.clock.pass_time(0)
    assert world.book.absences == 1


def test_an_owner_that_polls_is_pushed_nothing_and_is_never_gone(world: World) -> None:
    stream, poll = Heard(), Heard("poll")
    world.carriers.poll_only(TREE, True)
    world.carriers.attach(TREE, stream)
    world.put("r")
    world.clock.pass_time(1000)
    assert (world.book.absences, stream.told) == (0, [])
    world.carriers.attach(TREE, poll)
    assert deliveries(poll) == [[("r", 0)]]
    world.carriers.poll_only(TREE, False)
    world.carriers.detach(TREE, poll)
    assert deliveries(stream) == [[("r", 1)]]


def test_what_is_forgotten_leaves_nothing(world: World) -> None:
    stream, watch = Heard(), Heard()
    world.carriers.bind(TREE, "mcp-1")
    world.carriers.attach_stream("mcp-1", stream)
    world.carriers.bind(TREE, "mcp-2")
    world.carriers.attach(TREE, watch)
    world.put("r")
    world.carriers.detach(TREE, watch)
    world.carriers.forget(TREE)
    world.carriers.forget(TREE)
    assert world.carriers._lines["mcp-1"].carries == set()
    world.carriers.detach_stream("mcp-1", stream)
    assert (world.carriers._reaches, world.carriers._lines, world.clock.waiting) == ({}, {}, 0)


# -- polls, over an exchange ----------------------------------------------------------------------------------------


@pytest.fixture(params=["process", "suspending"])
async def exchange(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Rig]:
    async with rig(tmp_path, request.param) as made:
        await made.session()
        yield made


def poll(
    exchange: Rig, *known: str, wait_s: float = 30, session_id: str = SESSION, stream_id: str | None = None
) -> asyncio.Task[list[dict[str, Any]]]:
    asked = exchange.exchange.poll(session_id, frozenset(known), wait_s, stream_id=stream_id)
    return exchange.tasks.create_task(asked)


async def polled(task: asyncio.Task[list[dict[str, Any]]]) -> list[tuple[str, int]]:
    async with asyncio.timeout(10):
        return [(told["request_id"], told["redelivery"]) for told in await task]


async def test_a_poll_waits_for_the_first_request(exchange: Rig) -> None:
    waiting = poll(exchange)
    await exchange.settle()
    call = exchange.call(text="x")
    ((request_id, redelivery),) = await polled(waiting)
    assert redelivery == 0
    await exchange.answer(request_id, 1)
    assert await call == b"1"


async def test_a_poll_ends_empty_when_its_time_is_up_and_at_once_without_any(exchange: Rig) -> None:
    assert await polled(poll(exchange, wait_s=0)) == []
    waiting = poll(exchange, wait_s=10)
    await exchange.settle()
    await exchange.pass_time(9.9)
    assert not waiting.done()
    await exchange.pass_time(0.2)
    assert await polled(waiting) == []


async def test_of_two_polls_that_wait_together_one_gets_a_request(exchange: Rig) -> None:
    first, second = poll(exchange), poll(exchange)
    await exchange.settle()
    exchange.call("a")
    await exchange.settle()
    assert first.done() != second.done()
    exchange.call("b")
    both = await polled(first) + await polled(second)
    assert len({request_id for request_id, _ in both}) == 2
    assert {redelivery for _, redelivery in both} == {0}


async def test_a_poll_gives_the_first_that_it_has_space_for_and_at_least_one(exchange: Rig) -> None:
    exchange.exchange.promise(SESSION, 5)
    for text in "abc":
        exchange.call(text, text=text)
        await exchange.settle()
    for space, expected in ((0, ["a"]), (2, ["a", "b"]), (9, ["a", "b", "c"])):
        offered: list[Any] = []

        def takes(announcement: dict[str, Any], space: int = space, offered: list[Any] = offered) -> bool:
            offered.append(announcement)
            return len(offered) <= space

        told = await exchange.exchange.poll(SESSION, frozenset(), 0, takes=takes)
        assert [json.loads(bytes(one["arguments"]))["text"] for one in told] == expected


async def test_a_later_poll_that_does_not_know_a_request_gets_it_again(exchange: Rig) -> None:
    """The answer that held it may have been lost."""
    exchange.exchange.promise(SESSION, 5)
    exchange.call("a")
    await exchange.settle()
    ((request_id, first),) = await polled(poll(exchange))
    ((again, second),) = await polled(poll(exchange))
    assert (again, first, second) == (request_id, 0, 1)
    assert await polled(poll(exchange, request_id, wait_s=0)) == []
    await exchange.settle()
    assert await exchange.rows("redelivery") == [(1,)]


async def test_a_poll_leaves_what_another_carrier_has(exchange: Rig) -> None:
    stream = Heard()
    leave = exchange.exchange.attach(SESSION, stream)
    exchange.call("a")
    await stream.next()
    assert await polled(poll(exchange, wait_s=0)) == []
    leave()
    ((_, redelivery),) = await polled(poll(exchange, wait_s=0))
    assert redelivery == 1


async def test_a_poll_fetches_what_its_own_session_did_not_hear_on_its_stream(exchange: Rig) -> None:
    """A client on an SDK opens a stream that nobody reads, and polls: it must not wait for its own deadline."""
    stream = Heard()
    exchange.exchange.bind(SESSION, "mcp-1")
    exchange.carriers.attach_stream("mcp-1", stream)
    exchange.call("a")
    request_id = (await stream.next())["request_id"]
    assert await polled(poll(exchange, wait_s=0, stream_id="mcp-2")) == []
    assert await polled(poll(exchange, request_id, wait_s=0, stream_id="mcp-1")) == []
    assert await polled(poll(exchange, wait_s=0, stream_id="mcp-1")) == [(request_id, 1)]
    exchange.carriers.detach_stream("mcp-1", stream)
    assert exchange.carriers.is_on(SESSION, request_id) is not None


async def test_who_polls_beside_another_request_is_asked_by_the_poll(exchange: Rig) -> None:
    """What stands between may hold the other request's notifications back until its answer."""
    waiting = poll(exchange, stream_id="mcp-1")
    await exchange.settle()
    watch, foreign = Heard("request", "mcp-1"), Heard("request", "mcp-2")
    exchange.exchange.attach(SESSION, watch)
    exchange.call("a")
    ((first, redelivery),) = await polled(waiting)
    assert (redelivery, watch.told) == (0, [])
    exchange.call("b")
    second = (await watch.next())["request_id"]
    assert await polled(poll(exchange, first, wait_s=0, stream_id="mcp-2")) == []
    assert await polled(poll(exchange, first, wait_s=0, stream_id="mcp-1")) == [(second, 1)]
    waiting = poll(exchange, first, second, stream_id="mcp-1")
    await exchange.settle()
    exchange.exchange.attach(SESSION, foreign)
    exchange.call("c")
    await foreign.next()
    assert not waiting.done()


async def test_a_stream_that_comes_while_a_poll_holds_a_request_gets_the_next(exchange: Rig) -> None:
    exchange.exchange.promise(SESSION, 5)
    exchange.call("a")
    await exchange.settle()
    ((first, _),) = await polled(poll(exchange))
    stream = Heard()
    exchange.exchange.attach(SESSION, stream)
    exchange.call("b")
    told = await stream.next()
    assert told["request_id"] != first
    await exchange.pass_time(31)  # the poll's promise is over: what it held is the stream's now
    again = await stream.next()
    assert (again["request_id"], again["redelivery"]) == (first, 1)


async def test_a_poll_promises_the_next_for_thirty_seconds(exchange: Rig) -> None:
    exchange.exchange.promise(SESSION, 5)
    call = exchange.call("a")
    await exchange.settle()
    await polled(poll(exchange))
    await exchange.pass_time(33.9)
    assert not call.done()
    await exchange.pass_time(0.2)
    with pytest.raises(CallerGone):
        await call


async def test_a_poll_that_is_cut_off_promises_nothing(exchange: Rig) -> None:
    waiting = poll(exchange)
    await exchange.settle()
    waiting.cancel()
    await exchange.settle()
    call = exchange.call("a")
    await exchange.settle()
    await exchange.pass_time(4.1)
    with pytest.raises(CallerGone):
        await call


async def test_who_declares_to_poll_is_waited_for_until_the_deadline(exchange: Rig) -> None:
    stream = Heard()
    exchange.exchange.open_desk(SESSION, SESSION, OWNER, tools(delivery="poll"))
    exchange.exchange.attach(SESSION, stream)
    call = exchange.call("a")
    await exchange.pass_time(50)
    ((request_id, redelivery),) = await polled(poll(exchange))
    assert (redelivery, stream.told) == (0, [])
    await exchange.answer(request_id, 1)
    assert await call == b"1"


async def test_the_end_of_a_session_answers_who_polls_for_it(exchange: Rig) -> None:
    await exchange.session("child", root_id=SESSION)
    waiting, waiting_for_child = poll(exchange), poll(exchange, session_id="child")
    await exchange.settle()
    await exchange.exchange.close_desk("child", "over")
    assert await polled(waiting_for_child) == []
    await exchange.settle()
    assert not waiting.done()
    await exchange.exchange.close_desk(SESSION, "over")
    assert await polled(waiting) == []
    await exchange.settle()
    assert (exchange.clock.waiting, exchange.carriers._reaches, exchange.exchange._polling._polls) == (0, {}, {})
