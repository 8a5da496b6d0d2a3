"""The HTTP door: its socket, its connections and its routes."""

import asyncio
import socket
import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from oubliette.server.endpoints import http
from oubliette.server.endpoints.http import HttpServer, Routes, listening_socket
from tests.kit.raw_http import SLOW_S, connected

HEAD = [("Host", "localhost")]


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers after the body, and holds on to a request for /mcp?hold until the client has gone."""
    message = await receive()
    if scope["query_string"] == b"hold":
        while message["type"] != "http.disconnect":
            message = await receive()
        return
    body = message["body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


async def drip(scope: Any, receive: Any, send: Any) -> None:
    """Sends a head, and only later a body."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def serving(app: Any = echo, reason: str | None = None) -> AsyncGenerator[tuple[str, int]]:
    async def ready() -> str | None:
        return reason

    server = HttpServer(Routes(app, ready), listening_socket("127.0.0.1", 0))
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(server.serve())
        try:
            yield server.address
        finally:
            server.stop()
            async with asyncio.timeout(SLOW_S):
                await serving


def test_a_listening_socket_notices_peers_that_vanish() -> None:
    with listening_socket("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        listener.setblocking(True)
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15


def test_an_address_that_is_taken_is_an_error_and_leaks_nothing() -> None:
    with listening_socket("127.0.0.1", 0) as listener, pytest.raises(OSError, match="in use"):
        listening_socket("127.0.0.1", listener.getsockname()[1])


def test_it_listens_on_ipv6_as_well() -> None:
    with listening_socket("::1", 0) as listener:
        assert listener.family == socket.AF_INET6


async def test_not_ready_says_why() -> None:
    async with serving(reason="bwrap is missing") as address, connected(address) as connection:
        await connection.send("GET", "/ready", HEAD)
        reply = await connection.reply()
        assert (reply.status, reply.json) == (503, {"status": "not ready", "reason": "bwrap is missing"})


async def test_head_answers_without_a_body() -> None:
    async with serving() as address, connected(address) as connection:
        await connection.send("HEAD", "/health", HEAD)
        assert (await connection.head()).status == 200
        await connection.send("GET", "/health", HEAD)
        assert (await connection.reply()).json == {"status": "ok"}


async def test_a_head_without_a_body_still_goes_out() -> None:
    async with serving(drip) as address, connected(address) as connection:
        await connection.send("POST", "/mcp", [*HEAD, ("Content-Length", "0")])
        assert (await connection.head()).status == 200


async def test_requests_in_one_packet_are_answered_in_order() -> None:
    async with serving() as address, connected(address) as connection:
        one = b"POST /mcp HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n"
        connection.writer.write(one + b"a" + one + b"b" + one + b"c")
        assert [(await connection.reply()).body for _ in range(3)] == [b"a", b"b", b"c"]


@pytest.mark.parametrize("before", [b"", b"POST /mcp HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\na"])
@pytest.mark.parametrize("part", [b"GET /health HTTP/1.1\r\nHost:"])
async def test_a_head_that_never_ends_is_not_waited_for(
    before: bytes, part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "HEAD_WAIT_S", 0.2)
    async with serving() as address, connected(address) as connection:
        if before:
            connection.writer.write(before)
            assert (await connection.reply()).body == b"a"
        connection.writer.write(part)
        async with asyncio.timeout(SLOW_S):
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await connection.reader.readexactly(1)


async def test_a_request_that_takes_its_time_keeps_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "HEAD_WAIT_S", 0.05)
    async with serving() as address, connected(address) as connection:
        await connection.send("POST", "/mcp", [*HEAD, ("Content-Length", "1")])
        # Longer than the head may take: the head is here, it is the body that comes late.
        await asyncio.sleep(0.15)
        connection.writer.write(b"z")
        assert (await connection.reply()).body == b"z"


async def test_a_reset_in_the_middle_hurts_nobody() -> None:
    async with serving() as address:
        async with connected(address) as held:
            await held.send("POST", "/mcp?hold", [*HEAD, ("Content-Length", "1")], b"x")
            raw: socket.socket = held.writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        async with connected(address) as connection:
            await connection.send("GET", "/health", HEAD)
            assert (await connection.reply()).status == 200
