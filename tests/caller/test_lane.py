"""A lane gives back what a lost connection left open, and goes on with what waited."""

import asyncio
from typing import cast

import pytest

from oubliette.caller.http1 import Response
from oubliette.caller.lane import PIPELINED_MAX, Address, Lane, Lanes


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None: ...


def connected(lane: Lane) -> Wire:
    wire = Wire()
    lane.connection_made(cast("asyncio.Transport", wire))
    return wire


ADDRESS = Address.of("http://user@localhost:81/mcp?x=1")
REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


def test_an_address_is_what_the_url_says():
    assert Address("localhost", 81, "/mcp?x=1", "localhost:81", False) == ADDRESS
    assert Address.of("https://[::1]").port == 443
    with pytest.raises(ValueError, match="not an http"):
        Address.of("ftp://x")


async def test_requests_of_one_turn_leave_in_one_write_and_are_answered_in_order():
    lane = Lane(ADDRESS, None, lambda: {"A": "b"})
    wire = connected(lane)
    heard: list[int] = []
    for n in range(5):
        lane.post(b"body%d" % n, lambda response, n=n: heard.append(n))
    await asyncio.sleep(0)
    assert [one.count(b"POST /mcp?x=1 HTTP/1.1\r\nHost: localhost:81\r\nA: b\r\n") for one in wire.written] == [5]
    lane.data_received(REPLY * 3)
    lane.data_received(REPLY * 2)
    assert heard == [0, 1, 2, 3, 4]


async def test_no_more_than_the_bound_are_on_their_way():
    lane = Lane(ADDRESS, None, dict)
    wire = connected(lane)
    for _ in range(PIPELINED_MAX + 5):
        lane.post(b"", lambda response: None)
    await asyncio.sleep(0)
    assert b"".join(wire.written).count(b"POST") == PIPELINED_MAX
    lane.data_received(REPLY * 2)
    assert b"".join(wire.written).count(b"POST") == PIPELINED_MAX + 2


async def test_what_a_lost_connection_left_open_is_given_back_and_what_waited_goes_on():
    lane = Lane(ADDRESS, None, dict)
    connected(lane)
    heard: list[Response | None] = []
    lane.post(b"sent", heard.append)
    await asyncio.sleep(0)
    lane.post(b"waiting", heard.append)
    lane.connection_lost(None)
    assert heard == [None]
    assert lane._wanted.is_set(), "it wants to connect for what waits"
    wire = connected(lane)
    assert wire.written[0].endswith(b"waiting")


async def test_a_reply_to_nothing_ends_the_connection():
    lane = Lane(ADDRESS, None, dict)
    wire = connected(lane)
    ended: list[bool] = []
    wire.abort = lambda: ended.append(True)
    lane.data_received(REPLY)
    assert ended == [True]


async def test_a_request_takes_a_lane_that_is_free():
    lanes = Lanes(3, ADDRESS, None, dict)
    for _ in range(4):
        lanes.post(b"", lambda response: None)
    assert [lane.load for lane in lanes._lanes] == [2, 1, 1]


async def test_a_lane_is_filled_first_where_its_server_works_in_parallel():
    lanes = Lanes(3, ADDRESS, None, dict)
    lanes.share = 2
    for _ in range(5):
        lanes.post(b"", lambda response: None)
    assert [lane.load for lane in lanes._lanes] == [2, 2, 1]
