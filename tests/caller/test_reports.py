"""What tools tell of themselves is bounded where it cannot leave, and the newest of it arrives."""

import asyncio

import pytest

from oubliette.caller.crew import Crew
from oubliette.caller.errands import Errand
from oubliette.caller.lane import Lanes
from oubliette.caller.messages import Announced
from oubliette.caller.reports import REPORTS_OPEN, Reports
from tests.caller.test_lane import ADDRESS, Wire, connected

TAKEN = b'{"jsonrpc":"2.0","id":1,"result":{"structuredContent":{"accepted":true}}}'
REPLY = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(TAKEN), TAKEN)


class World:
    """Reports of one errand on one lane, which a test connects when it likes."""

    def __init__(self) -> None:
        self.lanes = Lanes(1, ADDRESS, None, dict)
        self.lane = self.lanes._lanes[0]
        self.errand = Errand(Announced("caller_tool_request", "gogol_1", "r1", "work"))
        self.crew = Crew()
        self.reports = Reports(self.lanes, self.crew, lambda: 1)

    def connect(self) -> Wire:
        return connected(self.lane)


async def test_progress_that_cannot_leave_is_dropped_beyond_a_bound():
    world = World()
    for n in range(2000):
        world.reports.send(world.errand, {"progress": n})
    assert world.lane.load == REPORTS_OPEN
    wire = world.connect()
    while world.lane.load:
        world.lane.data_received(REPLY)
    world.reports.send(world.errand, {"progress": 2000})
    await asyncio.sleep(0)
    assert b'"progress":2000' in wire.written[-1]


async def test_of_deadlines_that_cannot_be_moved_yet_the_last_is_told():
    world = World()
    for n in range(2000):
        world.reports.send(world.errand, {"extend_seconds": n})
        await asyncio.sleep(0)
    assert (world.lane.load, len(world.crew._tasks)) == (1, 1)
    wire = world.connect()
    async with asyncio.timeout(5):
        while b'"extend_seconds":1999' not in b"".join(wire.written):
            if world.lane._in_flight:
                world.lane.data_received(REPLY)
            await asyncio.sleep(0)
        world.lane.data_received(REPLY)
        await asyncio.wait(world.crew._tasks)
    assert b"".join(wire.written).count(b"extend_seconds") == 2
    world.reports.send(world.errand, {"extend_seconds": 7})
    for _ in range(2):  # its task begins, and the turn in which that posts is over
        await asyncio.sleep(0)
    assert b'"extend_seconds":7' in wire.written[-1]
    await world.crew.dismiss()


async def test_what_is_not_json_is_not_sent_and_stands_in_nobodys_way(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    wire = world.connect()
    for told in ({"progress": object()}, {"progress": object(), "extend_seconds": 5}):
        for _ in range(REPORTS_OPEN + 1):
            world.reports.send(world.errand, told)
    assert "not JSON" in caplog.text
    world.reports.send(world.errand, {"progress": 1})
    world.reports.send(world.errand, {"extend_seconds": 7})
    for _ in range(2):
        await asyncio.sleep(0)
    sent = b"".join(wire.written)
    assert b'"progress":1' in sent
    assert b'"extend_seconds":7' in sent
    await world.crew.dismiss()
