"""The server's side of the relay socket: what is kept of a request, and what a keeper answers to what it was asked."""

import asyncio
import json
import tracemalloc
from typing import Any, cast

import pytest

from oubliette.inside import calls
from oubliette.server.endpoints.boxed import Boxed
from oubliette.server.endpoints.relay import OPEN_BYTES_MAX, Connection, Door, Relay
from oubliette.server.errors import DroidFailed
from oubliette.server.tasks import Tasks


class Wire(asyncio.Transport):
    """Takes every line; nothing comes back by itself."""

    def get_write_buffer_size(self) -> int:
        return 0

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[bytes] = []

    def writelines(self, list_of_data: Any) -> None:
        self.lines += list_of_data


class Waits:
    """Behind the socket: every follower waits until it is let go."""

    def __init__(self) -> None:
        self.let_go = asyncio.Event()
        self.waiting = 0

    async def session_events(self, session_id: str, asked: Any, interest: Any) -> object:
        del session_id, asked, interest
        self.waiting += 1
        await self.let_go.wait()
        return {}


def padded(number: int, size: int) -> bytes:
    """A request to follow a session, of so many bytes, nearly all of them in a field that nobody reads."""
    params = {"session_id": "s", "wait_seconds": 45, "padding": ""}
    text = json.dumps({"jsonrpc": "2.0", "id": number, "method": "session_events", "params": params})
    return text.replace('"padding": ""', f'"padding": "{"x" * (size - len(text))}"').encode() + b"\n"


async def ticks() -> None:
    """Let everything happen that is ready to."""
    for _ in range(10):
        await asyncio.sleep(0)


def of_client(door: Door, wire: Wire, behind: Waits, tasks: Tasks) -> Connection:
    connection = Connection(door, Relay(cast(Boxed, behind), tasks))
    connection.connection_made(wire)
    connection.session_id, connection.role = "s", "client"
    return connection


async def test_a_request_that_waits_keeps_what_it_asks_and_not_the_line_it_came_in() -> None:
    behind = Waits()
    async with asyncio.timeout(30), Tasks() as tasks:
        connection = of_client(Door("box_1"), Wire(), behind, tasks)
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for number in range(8):
                connection.data_received(padded(number, 4 * 1024 * 1024))
            await ticks()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert behind.waiting == 8
        assert after - before < 1024 * 1024
        behind.let_go.set()


async def test_the_open_requests_of_a_box_have_so_many_bytes_and_no_more_by_whatever_connection() -> None:
    behind, door, size = Waits(), Door("box_1"), 8 * 1024 * 1024 - 1
    async with asyncio.timeout(30), Tasks() as tasks:
        one, other = Wire(), Wire()
        first, second = (of_client(door, wire, behind, tasks) for wire in (one, other))
        for number in range(OPEN_BYTES_MAX // size):
            first.data_received(padded(number, size))
        await ticks()
        assert one.lines == [], "they wait"
        second.data_received(padded(99, size))
        await ticks()
        (line,) = other.lines
        refusal = json.loads(line)
        assert refusal["id"] == 99
        assert refusal["error"]["data"] == {"kind": "too_many", "retryable": True}
        behind.let_go.set()
        await ticks()
        second.data_received(padded(100, size))
        await ticks()
        assert json.loads(other.lines[-1]) == {"jsonrpc": "2.0", "id": 100, "result": {}}


def test_a_client_that_comes_back_may_ask_again_for_all_that_it_holds() -> None:
    """What it asked before it went is still open then."""
    assert 2 * calls.HELD_BYTES_MAX <= OPEN_BYTES_MAX


async def refused(error: Any) -> DroidFailed:
    """What is raised for a request to a keeper that answers with this error."""
    connection = Connection(Door("box_1"), cast(Relay, None))
    connection.connection_made(Wire())
    connection.session_id = "s"
    asking = asyncio.get_running_loop().create_task(connection.request("stdin", {}))
    await asyncio.sleep(0)
    connection.data_received(b'{"jsonrpc":"2.0","id":1,"error":' + error + b"}\n")
    with pytest.raises(DroidFailed) as failure:
        await asking
    return failure.value


async def test_a_keepers_refusal_says_whether_to_try_again() -> None:
    busy = b'{"code":-32000,"message":"it does not read","data":{"kind":"too_many","retryable":true}}'
    failure = await refused(busy)
    assert failure.message == "the keeper refused: it does not read"
    assert (failure.retryable, failure.details) == (True, {"reason": "too_many"})
    failure = await refused(b'{"code":-32000,"message":"a gap","data":{"kind":"conflict","retryable":false}}')
    assert (failure.retryable, failure.details) == (False, {"reason": "conflict"})


@pytest.mark.parametrize("error", [b"7", b"{}", b'{"message":1}', b'{"message":"x","data":{"kind":{}}}', b"[]"])
async def test_a_refusal_of_the_wrong_shape_is_one_all_the_same(error: bytes) -> None:
    failure = await refused(error)
    assert (failure.message, failure.retryable) == ("the keeper refused, and its reason was not understood", False)


async def test_a_keeper_that_is_not_waited_for_any_more_may_still_answer() -> None:
    connection = Connection(Door("box_1"), cast(Relay, None))
    connection.connection_made(Wire())
    connection.session_id = "s"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await connection.request("stdin", {})
    connection.data_received(b'{"jsonrpc":"2.0","id":1,"result":{}}\n')
    asking = asyncio.get_running_loop().create_task(connection.request("stdin", {}))
    await asyncio.sleep(0)
    connection.data_received(b'{"jsonrpc":"2.0","id":2,"result":{"stdin_offset":7}}\n')
    assert await asking == b'{"stdin_offset":7}'
