"""Posts like the one before: past uvicorn, and nobody sees a difference."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from oubliette.server.endpoints import http, posts
from oubliette.server.endpoints.http import HttpServer, Routes, listening_socket
from oubliette.server.endpoints.posts import Known
from tests.kit.raw_http import SLOW_S, RawConnection, connected

HEAD = b"POST /mcp HTTP/1.1\r\nHost: x\r\nA: b\r\nContent-Length: %d\r\n\r\n%b"
PARALLEL = HEAD.replace(b"A: b", b"Oubliette-Pipeline: parallel")


class Told:
    """An application that answers as its requests' bodies tell it to, and keeps what it saw."""

    def __init__(self) -> None:
        self.scopes: list[dict[str, Any]] = []
        self.seen: list[bytes] = []
        self.gone: list[bytes] = []
        self.let_go = asyncio.Event()
        self.waits = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        is_whole = False
        while not is_whole:
            message = await receive()
            body += message["body"]
            is_whole = not message["more_body"]
        self.scopes.append(scope)
        self.seen.append(body)
        if body.startswith(b"wait"):
            self.waits.set()
            await self.let_go.wait()
        if body == b"stay":
            assert (await receive())["type"] == "http.disconnect"
            self.gone.append(body)
            return
        if body == b"fail":
            raise RuntimeError("told to fail")
        if body == b"silent":
            return
        if body == b"stream":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"one", "more_body": True})
            await self.let_go.wait()
            await send({"type": "http.response.body", "body": b"two", "more_body": False})
            return
        headers = [(b"content-length", b"%d" % len(body))]
        if body == b"close":
            headers.append((b"connection", b"close"))
        if body == b"inject":
            headers.append((b"x", b"a\r\nb: c"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        if body == b"after":
            assert (await receive())["type"] == "http.disconnect"
            self.gone.append(body)


@asynccontextmanager
async def serving() -> AsyncGenerator[tuple[Told, RawConnection, HttpServer]]:
    """A connection whose first request is over."""

    async def ready() -> str | None:
        return None

    app = Told()
    server = HttpServer(Routes(app, ready), listening_socket("127.0.0.1", 0))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(server.serve())
        try:
            async with connected(server.address) as connection:
                yield app, connection, server
        finally:
            app.let_go.set()
            server.stop()
            async with asyncio.timeout(SLOW_S):
                await running


def request(body: bytes, head: bytes = HEAD) -> bytes:
    return head % (len(body), body)


async def begin(connection: RawConnection, head: bytes = HEAD) -> None:
    connection.writer.write(request(b"first", head))
    assert (await connection.reply()).body == b"first"


async def ask(connection: RawConnection, body: bytes) -> bytes:
    connection.writer.write(request(body))
    return (await connection.reply()).body


async def written(connection: RawConnection, data: bytes) -> None:
    connection.writer.write(data)
    await connection.writer.drain()


async def closed(connection: RawConnection) -> bool:
    async with asyncio.timeout(SLOW_S):
        try:
            return await connection.reader.read(1) == b""
        except ConnectionError:
            return True


async def test_a_post_like_the_one_before_goes_past_uvicorn(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as (app, connection, _):
        await begin(connection)
        # Whoever feeds the parser now has not taken the short way.
        monkeypatch.setattr(http._Connection, "_feed", None)
        assert await ask(connection, b"second, and longer than ten") == b"second, and longer than ten"
        assert await ask(connection, b"") == b""
        assert app.seen == [b"first", b"second, and longer than ten", b""]


async def test_it_looks_the_same_from_both_sides() -> None:
    async with serving() as (app, connection, _):
        replies: list[Any] = []
        for _ in range(2):
            connection.writer.write(request(b"same"))
            reply = await connection.reply()
            assert "date" in reply.headers
            replies.append((reply.status, sorted(reply.headers), reply.body))
        assert replies[0] == replies[1]
        first, second = ({name: one for name, one in scope.items() if name != "extensions"} for scope in app.scopes)
        assert first == second
        assert set(app.scopes[1]["extensions"]) == {"oubliette.abort"}


async def test_posts_are_worked_on_one_after_another_unless_their_client_says_otherwise() -> None:
    async with serving() as (app, connection, _):
        await begin(connection)
        connection.writer.write(request(b"wait") + request(b"next"))
        await asyncio.wait_for(app.waits.wait(), SLOW_S)
        assert app.seen == [b"first", b"wait"]
        app.let_go.set()
        assert [(await connection.reply()).body for _ in range(2)] == [b"wait", b"next"]


async def test_parallel_posts_are_worked_on_together_and_answered_in_order() -> None:
    async with serving() as (app, connection, _):
        await begin(connection, PARALLEL)
        bodies = [b"wait", b"next", *(b"more %d" % n for n in range(posts.PARALLEL_MAX + 10))]
        connection.writer.write(b"".join(request(body, PARALLEL) for body in bodies))
        await asyncio.wait_for(app.waits.wait(), SLOW_S)
        while len(app.seen) < posts.PARALLEL_MAX + 1:
            await asyncio.sleep(0)
        assert len(app.seen) == posts.PARALLEL_MAX + 1  # and no more until one is answered
        app.let_go.set()
        assert [(await connection.reply()).body for _ in bodies] == bodies


@pytest.mark.parametrize("size", [1, 7, 60, 100])
async def test_posts_may_arrive_in_any_pieces(size: int) -> None:
    async with serving() as (_, connection, _):
        await begin(connection, PARALLEL)
        bodies = [b"%d" % n * (n + 1) for n in range(30)]
        everything = b"".join(request(body, PARALLEL) for body in bodies)
        for at in range(0, len(everything), size):
            connection.writer.write(everything[at : at + size])
            await asyncio.sleep(0)
        assert [(await connection.reply()).body for _ in bodies] == bodies


async def test_what_is_no_such_post_waits_for_its_turn_and_goes_to_uvicorn() -> None:
    async with serving() as (app, connection, _):
        await begin(connection, PARALLEL)
        connection.writer.write(
            request(b"wait", PARALLEL)
            + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
            + request(b"other", HEAD)
            + request(b"last", PARALLEL)
        )
        await asyncio.wait_for(app.waits.wait(), SLOW_S)
        app.let_go.set()
        replies = [(await connection.reply()).body for _ in range(4)]
        assert replies == [b"wait", b'{"status":"ok"}', b"other", b"last"]


async def test_more_than_is_held_is_not_read_until_there_is_room() -> None:
    async with serving() as (app, connection, _):
        await begin(connection, PARALLEL)
        bodies = [b"wait", *(b"%03d" % n * 20_000 for n in range(300))]
        sending = asyncio.get_running_loop().create_task(
            written(connection, b"".join(request(body, PARALLEL) for body in bodies))
        )
        await asyncio.wait_for(app.waits.wait(), SLOW_S)
        await asyncio.sleep(0.1)
        assert len(app.seen) <= posts.PARALLEL_MAX + 1
        assert not sending.done()
        app.let_go.set()
        assert [(await connection.reply()).body for _ in bodies] == bodies
        await sending


async def test_a_body_over_the_bound_goes_to_uvicorn() -> None:
    async with serving() as (_, connection, _):
        await begin(connection)
        connection.writer.write(request(b"x" * 10))
        assert (await connection.reply()).body == b"x" * 10
        connection.writer.write(b"POST /mcp HTTP/1.1\r\nHost: x\r\nA: b\r\nContent-Length: 99999999999\r\n\r\n")
        connection.writer.write_eof()
        assert await closed(connection)


async def test_a_stream_is_chunked_and_goes_out_as_it_comes() -> None:
    async with serving() as (app, connection, _):
        await begin(connection)
        connection.writer.write(request(b"stream"))
        head = await connection.head()
        assert head.headers["transfer-encoding"] == "chunked"
        assert await connection.chunk() == b"one"
        app.let_go.set()
        assert [await connection.chunk(), await connection.chunk()] == [b"two", b""]
        assert await ask(connection, b"go on") == b"go on"


async def test_a_stream_that_is_not_first_waits_for_its_turn() -> None:
    async with serving() as (app, connection, _):
        await begin(connection, PARALLEL)
        connection.writer.write(request(b"wait", PARALLEL) + request(b"stream", PARALLEL))
        await asyncio.wait_for(app.waits.wait(), SLOW_S)
        app.let_go.set()
        assert (await connection.reply()).body == b"wait"
        assert (await connection.head()).status == 200
        assert [await connection.chunk() for _ in range(3)] == [b"one", b"two", b""]


async def test_a_client_that_leaves_is_noticed() -> None:
    async with serving() as (app, connection, _):
        await begin(connection)
        connection.writer.write(request(b"stay"))
        while b"stay" not in app.seen:
            await asyncio.sleep(0)
        connection.writer.transport.abort()
        async with asyncio.timeout(SLOW_S):
            while not app.gone:
                await asyncio.sleep(0)


async def test_a_complete_answer_ends_the_wait_for_leaving() -> None:
    async with serving() as (app, connection, _):
        await begin(connection)
        assert await ask(connection, b"after") == b"after"
        async with asyncio.timeout(SLOW_S):
            while not app.gone:
                await asyncio.sleep(0)


@pytest.mark.parametrize("body", [b"fail", b"silent", b"inject"])
async def test_what_fails_is_an_error_and_the_end_of_its_connection(body: bytes) -> None:
    async with serving() as (_, connection, _):
        await begin(connection)
        connection.writer.write(request(body))
        reply = await connection.reply()
        assert (reply.status, reply.headers["connection"]) == (500, "close")
        assert await closed(connection)


async def test_an_answer_may_close_the_connection() -> None:
    async with serving() as (_, connection, _):
        await begin(connection)
        connection.writer.write(request(b"close") + request(b"never"))
        assert (await connection.reply()).body == b"close"
        assert await closed(connection)


async def test_a_server_that_stops_answers_what_it_has_begun() -> None:
    async with serving() as (app, connection, server):
        await begin(connection)
        connection.writer.write(request(b"wait"))
        await asyncio.wait_for(app.waits.wait(), SLOW_S)
        server.stop()
        with pytest.raises(OSError):  # noqa: PT011, PT012 - refused, or reset just then
            while True:
                async with connected(server.address):
                    await asyncio.sleep(0)
        app.let_go.set()
        reply = await connection.reply()
        assert (reply.body, reply.headers["connection"]) == (b"wait", "close")
        assert await closed(connection)


async def test_a_connection_in_use_is_kept_and_an_idle_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "KEEP_ALIVE_S", 1)
    async with serving() as (app, connection, _):
        await begin(connection)
        connection.writer.write(request(b"wait"))
        await asyncio.wait_for(app.waits.wait(), SLOW_S)
        await asyncio.sleep(1.3)
        app.let_go.set()
        assert (await connection.reply()).body == b"wait"
        assert await closed(connection)


def scope(head: bytes, *headers: tuple[bytes, bytes], method: str = "POST") -> dict[str, Any]:
    return {"method": method, "http_version": "1.1", "headers": [(b"host", b"x"), *headers]}


LENGTH = (b"content-length", b"2")


@pytest.mark.parametrize(
    ("head", "headers", "method"),
    [
        (b"PUT / HTTP/1.1\r\nContent-Length: 2\r\n\r\nab", [LENGTH], "PUT"),
        (b"POST / HTTP/1.1\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\nab", [LENGTH, (b"expect", b"")], "POST"),
        (
            b"POST / HTTP/1.1\r\nContent-Length: 2\r\nConnection: close\r\n\r\nab",
            [LENGTH, (b"connection", b"")],
            "POST",
        ),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", [(b"transfer-encoding", b"")], "POST"),
        (b"POST / HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nab", [LENGTH, LENGTH], "POST"),
        # Where a lenient parser would see another end than we do.
        (b"POST / HTTP/1.1\r\nContent-Length: 2\r\nA: b\n\n\r\n\r\nab", [LENGTH], "POST"),
        (b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\nabc", [LENGTH], "POST"),
    ],
)
def test_nothing_is_learned_from_what_is_no_plain_post(
    head: bytes, headers: list[tuple[bytes, bytes]], method: str
) -> None:
    assert Known.of(head, scope(head, *headers, method=method)) is None


def test_a_head_is_known_by_all_its_bytes_but_the_length() -> None:
    one = b"POST / HTTP/1.1\r\nContent-Length: 2\r\nA: b\r\n\r\nab"
    known = Known.of(one, scope(one, LENGTH, (b"a", b"b")))
    assert known is not None
    start, end = known.cut(b"junk" + one, 4) or (0, 0)
    assert (b"junk" + one)[start:end] == b"ab"
    assert known.scope(12)["headers"] == [(b"host", b"x"), (b"content-length", b"12"), (b"a", b"b")]
    for other in (
        one[:-1],
        one.replace(b"A: b", b"A: c"),
        one.replace(b": 2", b": +2"),
        one.replace(b": 2", b": 2 "),
        one.replace(b": 2", b":"),
        one.replace(b": 2", b": 2\r\nB: 1"),
        one.replace(b"POST", b"post"),
        one.replace(b": 2", b": 65537") + b"x" * 65537,
    ):
        assert known.cut(other, 0) is None
