"""Open streams: order, bounds, liveness, and how each of them ends."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from oubliette.server.endpoints.mcp.stream import Stream
from oubliette.server.endpoints.mcp.streams import Patience
from tests.kit.mcp_rig import Rig, call, legacy, modern, request, serving
from tests.kit.raw_http import SLOW_S, RawConnection, connected

# Streams are looked at all the time, and lose patience at once where a test says so.
EAGER = Patience(look_every_s=0.02)


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncGenerator[Rig]:
    async with serving(tmp_path, patience=EAGER) as rig:
        yield rig


async def standing(rig: Rig, session: str) -> Any:
    """The stream's other end, once it is attended to."""
    async with asyncio.timeout(SLOW_S):
        while session not in rig.fixtures.standing:
            await asyncio.sleep(0)
    return rig.fixtures.standing[session]


async def closed(connection: RawConnection) -> bool:
    """Whether the other side closed the connection, in order or not."""
    try:
        async with asyncio.timeout(SLOW_S):
            while await connection.reader.read(1 << 20):
                pass
    except ConnectionError:
        pass
    return True


# The standing stream.


async def test_a_standing_stream_begins_with_when_to_come_again(rig: Rig) -> None:
    session = await rig.session()
    async with connected(rig.address) as stream:
        head = await rig.get(stream, session)
        assert head.headers["mcp-session-id"] == session
        assert head.headers["cache-control"] == "no-cache, no-transform"
        assert await stream.frame() == "retry: 3000"


async def test_the_newest_standing_stream_wins(rig: Rig) -> None:
    session = await rig.session()
    async with connected(rig.address) as older, connected(rig.address) as newer:
        await rig.get(older, session)
        first = await standing(rig, session)
        await rig.get(newer, session)
        assert await older.message() is None
        async with asyncio.timeout(SLOW_S):
            while rig.fixtures.standing.get(session) in (None, first):
                await asyncio.sleep(0)
        rig.fixtures.standing[session].channel.notify("notifications/message", {"level": "info", "data": 1})
        assert (await newer.message())["params"]["data"] == 1


async def test_a_push_carries_no_id_and_is_one_line(rig: Rig) -> None:
    session = await rig.session()
    async with connected(rig.address) as stream:
        await rig.get(stream, session)
        (await standing(rig, session)).channel.notify("notifications/message", {"level": "info", "data": "a\nb"})
        await stream.frame()
        frame = await stream.frame()
        assert frame is not None
        assert [line.split(":")[0] for line in frame.split("\n")] == ["event", "data"]


async def test_a_client_that_leaves_closes_its_channel(rig: Rig) -> None:
    session = await rig.session()
    left = asyncio.Event()
    async with connected(rig.address) as stream:
        await rig.get(stream, session)
        channel = (await standing(rig, session)).channel
        channel.on_close(left.set)
    async with asyncio.timeout(SLOW_S):
        await left.wait()
    assert not channel.is_open
    assert not channel.notify("notifications/message", {})
    called_at_once: list[bool] = []
    channel.on_close(lambda: called_at_once.append(True))
    assert called_at_once == [True]


async def test_a_quiet_stream_has_a_heartbeat(tmp_path: Path) -> None:
    async with serving(tmp_path, patience=Patience(look_every_s=0.02, heartbeat_after_s=0.05)) as rig:
        async with connected(rig.address) as stream:
            await rig.get(stream, await rig.session())
            frames = [await stream.frame() for _ in range(4)]
        assert frames == ["retry: 3000", ":", ":", ":"]


async def test_a_quiet_client_is_pinged_and_one_that_answers_stays(tmp_path: Path) -> None:
    patience = Patience(look_every_s=0.02, ping_after_s=0.1, ping_wait_s=SLOW_S)
    async with serving(tmp_path, patience=patience) as rig:
        session = await rig.session()
        async with connected(rig.address) as stream:
            await rig.get(stream, session)
            ids: set[str] = set()
            for _ in range(3):
                ping = await stream.message()
                assert ping["method"] == "ping"
                ids.add(ping["id"])
                answer = {"jsonrpc": "2.0", "id": ping["id"], "result": {}}
                assert (await rig.ask(answer, legacy(session))).status == 202
            assert len(ids) == 3


async def test_a_ping_without_an_answer_closes_the_stream(tmp_path: Path) -> None:
    patience = Patience(look_every_s=0.02, ping_after_s=0.05, ping_wait_s=0.1)
    async with serving(tmp_path, patience=patience) as rig:
        session = await rig.session()
        async with connected(rig.address) as stream:
            await rig.get(stream, session)
            assert (await stream.message())["method"] == "ping"
            # An answer to something else is no answer.
            await rig.ask({"jsonrpc": "2.0", "id": "ping-999", "error": {"code": 1, "message": "no"}}, legacy("x"))
            assert await closed(stream)
        assert session not in rig.fixtures.standing


async def test_a_stream_ends_when_its_key_is_revoked(rig: Rig) -> None:
    session, other = await rig.session(), await rig.session(key="key-a2")
    async with connected(rig.address) as stream, connected(rig.address) as request_, connected(rig.address) as spared:
        await rig.get(stream, session)
        await rig.get(spared, other, key="key-a2")
        await standing(rig, other)
        await rig.post(request_, call("try_hang", push=True), legacy(session))
        await request_.head()
        await request_.message()
        assert rig.fixtures.keys is not None
        del rig.fixtures.keys["key-a"]
        assert await stream.message() is None
        assert "revoked" in (await request_.message())["error"]["message"]
        rig.fixtures.standing[other].channel.notify("notifications/message", {"data": "still here"})
        assert (await spared.message())["params"] == {"data": "still here"}


@pytest.mark.parametrize("era", ["legacy", "modern"])
async def test_a_request_that_waits_ends_when_its_key_is_revoked(era: str, rig: Rig) -> None:
    message = call("try_hang", id="h")
    message, lines = modern(message) if era == "modern" else (message, [legacy(await rig.session())])
    async with connected(rig.address) as connection:
        await rig.post(connection, message, *lines)
        async with asyncio.timeout(SLOW_S):
            await rig.fixtures.started.wait()
            assert rig.fixtures.keys is not None
            del rig.fixtures.keys["key-a"]
            await connection.head()
            error = (await connection.message())["error"]
    assert "revoked" in error["message"]
    assert error["data"] == {"kind": "unauthenticated", "retryable": False}
    assert rig.fixtures.stopped == ["h"]


async def test_only_so_many_streams_per_principal(tmp_path: Path) -> None:
    async with serving(tmp_path, streams_per_principal=1) as rig:
        one, two = await rig.session(), await rig.session()
        async with connected(rig.address) as first, connected(rig.address) as second, connected(rig.address) as third:
            await rig.get(first, one)
            assert (await rig.get(second, two)).status == 503
            assert (await rig.get(third, one)).status == 200
        message, lines = modern(request("subscriptions/listen", {"notifications": {}}))
        async with connected(rig.address) as mine, connected(rig.address) as theirs:
            await rig.get(mine, two)
            assert "too many" in (await rig.ask(message, *lines)).json["error"]["message"]
            await rig.post(theirs, message, *lines, key="key-b")
            assert (await theirs.head()).is_stream


# Request streams.


async def test_an_answer_without_notifications_is_json(rig: Rig) -> None:
    reply = await rig.call(await rig.session(), "test_simple_text")
    assert reply.headers["content-type"] == "application/json"


@pytest.mark.parametrize("era", ["legacy", "modern"])
async def test_notifications_come_before_the_answer_on_the_requests_own_stream(era: str, rig: Rig) -> None:
    message = call("try_push", id="x", count=3, ahead=2)
    message, lines = modern(message) if era == "modern" else (message, [legacy(await rig.session())])
    async with connected(rig.address) as connection:
        await rig.post(connection, message, *lines)
        assert (await connection.head()).is_stream
        told = [await connection.message() for _ in range(6)]
        assert await connection.message() is None
    # Announcements were queued last and go first.
    assert [each["params"]["data"] for each in told[:-1]] == [
        "announcement 0",
        "announcement 1",
        [0, "x"],
        [1, "x"],
        [2, "x"],
    ]
    assert (told[-1]["id"], told[-1]["result"]["content"][0]["text"]) == ("x", "3")


async def test_a_stateless_client_gets_log_notifications_only_where_it_asked(rig: Rig) -> None:
    for level, wanted in ((None, 0), ("error", 0), ("info", 3), ("debug", 3)):
        message, lines = modern(call("test_tool_with_logging"), **({"logLevel": level} if level else {}))
        async with connected(rig.address) as connection:
            await rig.post(connection, message, *lines)
            head = await connection.head()
            assert head.is_stream == bool(wanted), level
            if wanted:
                told = [await connection.message() for _ in range(wanted + 1)]
                assert "result" in told[-1]


async def test_a_legacy_session_gets_what_its_level_lets_through(rig: Rig) -> None:
    session = await rig.session()
    for level, streamed in (("warning", False), ("info", True)):
        await rig.ask(request("logging/setLevel", {"level": level}), legacy(session))
        async with connected(rig.address) as connection:
            await rig.post(connection, call("test_logging_tool"), legacy(session))
            assert (await connection.head()).is_stream == streamed


async def test_progress_goes_to_who_gave_a_token(rig: Rig) -> None:
    message = call("test_streaming_elicitation")
    message["params"]["_meta"] = {"progressToken": 7}
    async with connected(rig.address) as connection:
        await rig.post(connection, message, legacy(await rig.session()))
        assert (await connection.head()).is_stream
        assert (await connection.message())["params"] == {"progressToken": 7, "progress": 1, "total": 1}
    del message["params"]["_meta"]
    assert "result" in (await rig.ask(message, legacy(await rig.session()))).json


# Cancelling.


async def test_a_cancelled_request_is_answered_by_an_event(rig: Rig) -> None:
    session = await rig.session()
    async with connected(rig.address) as connection:
        await rig.post(connection, call("try_hang", id="h"), legacy(session))
        async with asyncio.timeout(SLOW_S):
            await rig.fixtures.started.wait()
        cancelled = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": "h"}}
        # Nobody else's, and no other request.
        stranger = await rig.session(key="key-b")
        assert (await rig.ask(cancelled, legacy(stranger), key="key-b")).status == 202
        for wrong in ("g", 1, None, ["h"], {}):
            told = {**cancelled, "params": {"requestId": wrong}}
            assert (await rig.ask(told, legacy(session))).status == 202
        assert rig.fixtures.stopped == []
        assert (await rig.ask(cancelled, legacy(session))).status == 202
        assert (await connection.head()).is_stream
        assert (await connection.message())["error"] == {"code": -32800, "message": "request cancelled"}
        assert await connection.message() is None
        # The connection is good for more.
        await rig.post(connection, request("ping"), legacy(session))
        assert (await connection.reply()).status == 200
    assert rig.fixtures.stopped == ["h"]


async def test_a_stateless_client_cancels_by_leaving(rig: Rig) -> None:
    message, lines = modern(call("try_hang", id="m"))
    async with connected(rig.address) as connection:
        await rig.post(connection, message, *lines)
        async with asyncio.timeout(SLOW_S):
            await rig.fixtures.started.wait()
    async with asyncio.timeout(SLOW_S):
        while not rig.fixtures.stopped:
            await asyncio.sleep(0.01)
    assert rig.fixtures.stopped == ["m"]


async def test_a_legacy_clients_leaving_cancels_nothing(rig: Rig) -> None:
    session = await rig.session()
    async with connected(rig.address) as connection:
        await rig.post(connection, call("try_hang", id="l"), legacy(session))
        async with asyncio.timeout(SLOW_S):
            await rig.fixtures.started.wait()
        (running,) = rig.endpoint._running
    # The leaving is noticed, and the request lives: its cancellation still finds it.
    async with asyncio.timeout(SLOW_S):
        while not running._gone:
            await asyncio.sleep(0.01)
    await rig.ask(request("ping"), legacy(session))
    assert rig.fixtures.stopped == []
    await rig.ask(
        {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": "l"}}, legacy(session)
    )
    assert rig.fixtures.stopped == ["l"]


# Slow readers.


async def test_a_slow_reader_is_cut_and_told_and_hurts_nobody(rig: Rig) -> None:
    session = await rig.session()
    async with connected(rig.address) as slow, connected(rig.address) as other:
        await rig.get(slow, session)
        channel = (await standing(rig, session)).channel
        sent = 0
        while channel.notify("notifications/message", {"level": "info", "data": "x" * 100_000}):
            sent += 1
            await asyncio.sleep(0)
            assert sent < 1000
        assert not channel.is_open
        assert channel.undelivered < 1000  # all that waited was dropped; what is left is the farewell
        # Others are served meanwhile.
        await rig.post(other, request("ping"), legacy(session))
        assert (await other.reply()).status == 200
        # Who reads at last is told, in the last frame.
        last: Any = None
        while (message := await slow.message()) is not None:
            last = message
        assert last["params"]["data"]["kind"] == "slow_reader"
        assert sent > 40


async def test_a_reader_that_never_reads_is_broken_off(tmp_path: Path) -> None:
    async with serving(tmp_path, patience=Patience(look_every_s=0.02, cut_wait_s=0.1)) as rig:
        session = await rig.session()
        async with connected(rig.address) as slow:
            await rig.get(slow, session)
            channel = (await standing(rig, session)).channel
            while channel.notify("notifications/message", {"level": "info", "data": "x" * 100_000}):
                await asyncio.sleep(0)
            # The server closes by itself, although nothing was read until now.
            async with asyncio.timeout(SLOW_S):
                while rig.endpoint._streams._standing:
                    await asyncio.sleep(0.01)
            assert await closed(slow)


async def test_a_write_that_stands_still_is_broken_off(tmp_path: Path) -> None:
    async with serving(tmp_path, patience=Patience(look_every_s=0.02, stuck_s=0.1)) as rig:
        session = await rig.session()
        async with connected(rig.address) as slow:
            await rig.get(slow, session)
            channel = (await standing(rig, session)).channel
            gone = asyncio.Event()
            channel.on_close(gone.set)
            # More than sockets hold, and less than the stream's bound.
            while channel.is_open and channel.undelivered < 2_000_000:
                channel.notify("notifications/message", {"level": "info", "data": "x" * 100_000})
                await asyncio.sleep(0)
            async with asyncio.timeout(SLOW_S):
                await gone.wait()
            # Its owner knows at once; the client has a moment to read why.
            last = None
            while (message := await slow.message()) is not None:
                last = message
        assert last is not None
        assert last["params"]["data"]["kind"] == "slow_reader"
        assert "too slowly" in last["params"]["data"]["message"]


async def test_a_request_whose_reader_is_slow_ends_with_an_error(rig: Rig) -> None:
    session = await rig.session()
    async with connected(rig.address) as connection:
        await rig.post(connection, call("try_push", count=100, bytes=100_000), legacy(session))
        await connection.head()
        last: Any = None
        while (message := await connection.message()) is not None:
            last = message
    assert "too slowly" in last["error"]["message"]


# Listening.


async def listening(rig: Rig, connection: RawConnection, **wishes: Any) -> Any:
    message, lines = modern(request("subscriptions/listen", {"notifications": wishes}, id="sub-1"))
    await rig.post(connection, message, *lines)
    assert (await connection.head()).is_stream
    return await connection.message()


async def test_a_listener_is_acknowledged_first_and_every_frame_names_its_subscription(rig: Rig) -> None:
    tag = {"io.modelcontextprotocol/subscriptionId": "sub-1"}
    async with connected(rig.address) as connection:
        first = await listening(
            rig,
            connection,
            toolsListChanged=True,
            resourcesListChanged=True,
            resourceSubscriptions=["test://watched-resource", "other://x"],
        )
        assert first["method"] == "notifications/subscriptions/acknowledged"
        assert first["params"] == {
            "notifications": {"toolsListChanged": True, "resourceSubscriptions": ["test://watched-resource"]},
            "_meta": tag,
        }
        rig.fixtures.updated("test://watched-resource")
        rig.fixtures.updated("test://static-text")
        assert await connection.message() == {
            "jsonrpc": "2.0",
            "method": "notifications/resources/updated",
            "params": {"uri": "test://watched-resource", "_meta": tag},
        }
        rig.endpoint.close()
        # In order: a result, then the end.
        assert await connection.message() == {
            "jsonrpc": "2.0",
            "id": "sub-1",
            "result": {"resultType": "complete", "_meta": tag},
        }
        assert await connection.message() is None


async def test_a_listener_that_leaves_is_forgotten(rig: Rig) -> None:
    async with connected(rig.address) as connection:
        await listening(rig, connection, toolsListChanged=True)
        assert len(rig.fixtures.listeners) == 1
    async with asyncio.timeout(SLOW_S):
        while rig.fixtures.listeners:
            await asyncio.sleep(0.01)


# Stopping.


async def test_stopping_ends_streams_and_requests_before_the_server_waits(tmp_path: Path) -> None:
    async with serving(tmp_path) as rig:
        session = await rig.session()
        stream, hanging = await connect(rig), await connect(rig)
        await rig.get(stream, session)
        await rig.post(hanging, call("try_hang"), legacy(session))
        async with asyncio.timeout(SLOW_S):
            await rig.fixtures.started.wait()
        began = asyncio.get_running_loop().time()
        rig.endpoint.close()
        assert await stream.message() is None
        await hanging.head()
        cut_off, refused = await hanging.message(), await rig.ask(request("ping"), legacy(session))
        assert refused.status == 503
        for error in (cut_off["error"], refused.json["error"]):
            assert "stopping" in error["message"]
            assert error["data"] == {"kind": "unavailable", "retryable": True}
    assert asyncio.get_running_loop().time() - began < 4
    stream.abort()
    hanging.abort()


async def connect(rig: Rig) -> RawConnection:
    return RawConnection(*await asyncio.open_connection(*rig.address))


# The queue alone.


class Socket:
    """Takes what a stream writes; `room` is how many writes it takes before it blocks."""

    def __init__(self, room: int = 1_000_000) -> None:
        self.room = asyncio.Semaphore(room)
        self.bodies: list[bytes] = []

    async def send(self, message: Any) -> None:
        await self.room.acquire()
        if message["type"] == "http.response.body":
            self.bodies.append(message["body"])


async def test_frames_that_wait_together_are_written_together() -> None:
    stream, socket = Stream(), Socket()
    for number in range(100):
        stream.push(b"%d;" % number)
    stream.end()
    await stream.write(socket.send)
    assert socket.bodies == [b"".join(b"%d;" % number for number in range(100))]


async def test_room_for_announcements_is_not_taken_by_what_follows_a_log() -> None:
    stream = Stream()
    told: list[str] = []
    for _ in range(30):
        stream.notify("notifications/message", {"data": "x" * 100_000})
    assert stream.has_room(lambda: told.append("again")), "they go ahead of it"
    while stream.has_room(lambda: told.append("again")):
        stream.announce("notifications/message", {"data": "y" * 100_000})
    assert stream.undelivered < 4 * 1024 * 1024 + 200_000
    sent = asyncio.Event()

    async def send(message: Any) -> None:
        if b"x" * 1000 in message.get("body", b""):
            sent.set()
        await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        writing = tasks.create_task(stream.write(send))
        await sent.wait()
        assert told == ["again"], "once, when they were written, and before the log is"
        writing.cancel()


async def test_an_announcement_passes_what_waits_behind_a_slow_write() -> None:
    stream, socket = Stream(), Socket(room=2)
    big = b"x" * 100_000
    for _ in range(5):
        stream.push(big)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stream.write(socket.send))
        while len(socket.bodies) < 1:
            await asyncio.sleep(0)
        stream.push(b"urgent", ahead=True)
        stream.end()
        for _ in range(10):
            socket.room.release()
    assert [len(body) for body in socket.bodies][:2] == [100_000, 100_000]
    assert socket.bodies[2].startswith(b"urgent")
    assert sum(map(len, socket.bodies)) == 500_006


async def test_who_reads_a_log_can_wait_until_little_is_queued() -> None:
    stream, socket = Stream(), Socket(room=1)
    for _ in range(5):
        stream.push(b"x" * 100_000)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stream.write(socket.send))
        drained = tasks.create_task(stream.drained())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not drained.done()
        for _ in range(5):
            socket.room.release()
        await drained
        assert stream.undelivered <= 64 * 1024
        stream.end()
        socket.room.release()


async def test_who_waits_for_a_stream_is_released_when_it_ends() -> None:
    for end in (Stream.lost, lambda stream: stream.cut("too slow"), Stream.end):
        stream = Stream()
        stream.push(b"x" * 100_000)
        async with asyncio.TaskGroup() as tasks, asyncio.timeout(SLOW_S):
            waiting = tasks.create_task(stream.drained())
            await asyncio.sleep(0)
            assert not waiting.done()
            end(stream)
            await waiting
