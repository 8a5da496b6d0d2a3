"""Nonsense at every door: the server stays up, and other sessions' calls go on unhurt."""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, cast

import hypothesis.strategies as st
import pytest
import pytest_asyncio
from hypothesis import find, given, settings

from tests.kit.mcp_caller import McpCaller
from tests.kit.raw_http import connected as http_connected
from tests.kit.records import records
from tests.kit.scene import ANY, Scene, lent, scene
from tests.kit.server import ServerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[ServerProcess]:
    async with ServerProcess(tmp_path_factory.mktemp("noise") / "home") as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def here(server: ServerProcess) -> AsyncGenerator[Scene]:
    async with scene(server) as made:
        yield made


@asynccontextmanager
async def bystander(here: Scene) -> AsyncGenerator[None]:
    """A session of somebody else: its calls are relayed all the while, none lost, none late."""
    key = await here.token("write")
    async with here.caller(key["token"]) as caller:
        session_id = await here.rest(caller, context=lent(caller_tool_timeout_s=20))
        over = asyncio.Event()

        async def call() -> int:
            async with here.box(session_id) as box:
                count = 0
                while count < 5 or not over.is_set():
                    asked = await box.request("caller_tool", tool="any", arguments={"n": count})
                    request = await caller.request()
                    assert request["arguments"] == {"n": count}
                    await caller.answer(request, count)
                    assert (await box.answer(asked))["result"] == count
                    count += 1
                    await asyncio.sleep(0.02)
                return count

        async with asyncio.TaskGroup() as tasks:
            calling = tasks.create_task(call())
            try:
                yield
            finally:
                over.set()
        assert calling.result() >= 5


@asynccontextmanager
async def answering(caller: McpCaller) -> AsyncGenerator[None]:
    """A caller that answers what it is asked, until it is left."""

    async def answer() -> None:
        while True:
            await caller.answer(await caller.requests.get(), "fine")

    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(answer())
        try:
            yield
        finally:
            serving.cancel()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
    max_leaves=12,
)
METHODS = st.sampled_from(
    [
        "attach",
        "caller_tool",
        "oubliette_tools",
        "oubliette_call_tool",
        "session_message",
        "session_events",
        "cancel",
        "progress",
        "listed",
        "caller_tools_config",
        "start",
        "stdin",
        "signal",
        "ack",
        "stdout",
        "exited",
    ]
)
PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "tool": st.just("any") | JSON,
        "arguments": st.dictionaries(st.text(max_size=8), JSON, max_size=3) | JSON,
        "call_key": st.sampled_from(["one", "two", "three"]) | JSON,
        **{
            name: st.just("any") | JSON
            for name in ("api_key", "message", "session_id", "since_index", "key", "role", "instance")
        },
    },
)
FRAMES = st.fixed_dictionaries(
    {},
    optional={
        "jsonrpc": st.just("2.0") | JSON,
        "id": st.integers() | st.text() | JSON,
        "method": METHODS | JSON,
        "params": PARAMS | JSON,
        "result": JSON,
        "error": JSON,
        "type": METHODS | JSON,
    },
).map(lambda frame: json.dumps(frame).encode())
# Calls that are meant, and collide under their keys.
CALLS = st.fixed_dictionaries(
    {
        "jsonrpc": st.just("2.0"),
        "id": st.integers(1, 999),
        "method": st.sampled_from(["caller_tool", "caller_tool", "cancel"]),
        "params": st.fixed_dictionaries(
            {"tool": st.just("any"), "call_key": st.sampled_from(["one", "two", "three"])},
            optional={"arguments": st.fixed_dictionaries({"n": st.integers(0, 3)})},
        ),
    }
).map(lambda frame: json.dumps(frame).encode())
LINES = FRAMES | st.binary(max_size=200).map(lambda line: line.replace(b"\n", b" "))


def drawn(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """Values that hypothesis finds worth trying; async tests cannot be driven by it."""
    found: list[Any] = []

    @settings(max_examples=count, deadline=None, database=None, derandomize=True)
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


async def test_random_lines_before_attach_hurt_nobody(here: Scene) -> None:
    async with here.caller() as caller, bystander(here):
        session_id = await here.rest(caller, context=lent())
        for line in drawn(LINES, 60):
            async with here.door(session_id) as box:
                await box.write(line + b"\n")
                if line.strip():
                    assert await box.frame() is not None, "it is told something"
        async with here.box(session_id) as box:
            assert "result" in await box.ask("session_events", session_id=session_id)


async def test_random_frames_from_an_attached_client_hurt_nobody(here: Scene) -> None:
    async with here.caller() as caller, bystander(here):
        session_id = await here.rest(caller, context=lent([ANY]))
        async with here.box(session_id) as box, answering(caller):
            for line in drawn(LINES | CALLS, 600):
                await box.write(line + b"\n")
            told = await box.ask("session_events", session_id=session_id)
            assert "result" in told, "the same connection still works"
            for frame in box.kept():
                assert frame["jsonrpc"] == "2.0"
                if "error" in frame:
                    assert isinstance(frame["error"]["code"], int)
                    assert frame["error"]["data"]["kind"] != "internal", frame
            async with asyncio.timeout(10):
                while records(here.server.home, "calls", session_id=session_id, state="pending"):
                    await asyncio.sleep(0.02)
        shown = await caller.call("session_get", session_id=session_id)
        assert shown["status"] in ("idle", "running")
        ends = {one["state"] for one in records(here.server.home, "calls", session_id=session_id, kind="caller_tool")}
        assert "answered" in ends, "some of it was a call"
        reused = records(here.server.home, "audit", session_id=session_id, outcome="refused: call_key_reused")
        assert reused, "and some met another under its key"


MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "jsonrpc": st.just("2.0") | JSON,
        "id": st.integers() | st.text() | JSON,
        "method": st.sampled_from(
            [
                "initialize",
                "tools/call",
                "tools/list",
                "resources/read",
                "subscriptions/listen",
                "ping",
                "logging/setLevel",
            ]
        )
        | JSON,
        "params": st.fixed_dictionaries(
            {},
            optional={
                "name": st.sampled_from(["session_get", "caller_tool_response", "project_create"]) | JSON,
                "arguments": JSON,
                "uri": st.just("oubliette://sessions/x/caller-requests") | JSON,
                "_meta": JSON,
                "level": JSON,
                "notifications": JSON,
            },
        )
        | JSON,
    },
).map(lambda message: json.dumps(message).encode())


@pytest.mark.parametrize("era", ["legacy", "modern"])
async def test_random_bodies_over_http_hurt_nobody(here: Scene, era: Any) -> None:
    async with bystander(here), here.caller(era=era) as caller:
        for body in drawn(MESSAGES | st.binary(max_size=200), 250):
            async with asyncio.timeout(10):
                status = await first_word(caller, body)
            assert status < 500, body
        assert "result" in await caller.ask("tools/list")


async def first_word(caller: McpCaller, body: bytes) -> int:
    """The status of the reply; what is a stream is not read to its end."""
    headers = caller.headers({"method": "tools/call", "params": {}} if caller.era == "modern" else None)
    host, port = caller.url.removeprefix("http://").split("/")[0].split(":")
    async with http_connected((host, int(port))) as connection:
        lines = [("Host", f"{host}:{port}"), ("Content-Length", str(len(body))), *headers.items()]
        await connection.send("POST", "/mcp", lines, body)
        return (await connection.head()).status


async def test_random_arguments_of_every_operation_are_answered_as_results(here: Scene) -> None:
    async with bystander(here), here.caller() as caller:
        tools = (await caller.ask("tools/list"))["result"]["tools"]
        values = JSON | st.just("x" * 100_000) | st.just("gogol_1") | st.just("../../etc/passwd") | st.just("")
        for tool in tools:
            names = list(tool["inputSchema"]["properties"])
            strategy = st.dictionaries(st.sampled_from([*names, "other"]), values, max_size=6)
            for arguments in drawn(strategy, 12):
                arguments.pop("wait_seconds", None)
                told = await caller.ask("tools/call", {"name": tool["name"], "arguments": arguments})
                if "error" in told:
                    assert told["error"]["code"] != -32603, (tool["name"], arguments)
                elif told["result"].get("isError"):
                    kind = (told["result"].get("_meta") or {}).get("dev.oubliette/error", {}).get("kind", "refused")
                    assert kind != "internal", (tool["name"], arguments)
            for params in ({"name": tool["name"]}, {"name": tool["name"], "arguments": None}):
                told = await caller.ask("tools/call", params)
                assert "result" in told or told["error"]["code"] == -32602
    assert "an unexpected error" not in here.server.log.read_text()
    assert "Traceback" not in here.server.log.read_text()


async def test_a_client_in_the_box_that_does_not_read_is_cut_and_the_others_go_on(here: Scene) -> None:
    async with here.caller() as caller, bystander(here):
        session_id = await here.rest(caller, context=lent([{"name": "any", "description": "x" * 16_000}] * 1))
        async with here.box(session_id, instance="slow") as slow, here.box(session_id) as other:
            # Each answer is about a megabyte, and nobody reads any.
            slow.transport.pause_reading()
            big = "y" * 1_000_000
            for n in range(40):
                await slow.request("caller_tool", tool="any", arguments={"n": n})
            for _ in range(40):
                await caller.answer(await caller.request(), big)
            assert "result" in await other.ask("session_events", session_id=session_id)
            slow.transport.resume_reading()
            read, last = 0, None
            while (frame := await slow.frame()) is not None:
                read, last = read + len(frame.get("result") or ""), frame
            assert read < 40 * len(big), "what waited for it was bounded"
            assert last is not None
            assert last["error"]["data"]["kind"] == "too_large", "its last word is why"
            assert "too slowly" in last["error"]["message"]
        assert "does not read" in here.server.log.read_text()


async def test_a_stream_that_is_not_read_holds_up_no_call(here: Scene) -> None:
    async with here.caller(stream=False) as caller, bystander(here):
        session_id = await here.rest(caller, context=lent())
        host, port = caller.url.removeprefix("http://").split("/")[0].split(":")
        async with http_connected((host, int(port))) as stuck:
            raw = stuck.writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            await stuck.send(
                "GET",
                "/mcp",
                [("Host", f"{host}:{port}"), *(caller.headers() | {"Accept": "text/event-stream"}).items()],
            )
            assert (await stuck.head()).status == 200
            cast("asyncio.Transport", stuck.writer.transport).pause_reading()
            async with here.box(session_id) as box:
                text = "z" * 200_000
                asked = [await box.request("caller_tool", tool="any", arguments={"t": text, "n": n}) for n in range(60)]
                # The stream is not told more than it may hold; all of it is there to be polled.
                async with asyncio.timeout(30):
                    polled = await caller.poll(session_id)
                    while len(polled) < 60:
                        polled += await caller.poll(session_id)
                for request in polled:
                    await caller.answer(request, request["arguments"]["n"])
                assert sorted([(await box.answer(one))["result"] for one in asked]) == list(range(60))
            cast("asyncio.Transport", stuck.writer.transport).resume_reading()
            # It reads again, and nothing of the log is lost to it.
            last = (await here.events(session_id))[-1]
            assert last["type"] == "caller_tool_resolved"
            told = b""
            async with asyncio.timeout(20):
                while b'"request_id":"%b","tool":"any","outcome":"answered"' % last["request_id"].encode() not in told:
                    told = (told + (await stuck.chunk()))[-65536:]


async def test_half_a_request_that_never_ends_holds_nobody_up(here: Scene) -> None:
    async with bystander(here), here.caller() as caller:
        host, port = caller.url.removeprefix("http://").split("/")[0].split(":")
        async with http_connected((host, int(port))) as one, http_connected((host, int(port))) as two:
            one.writer.write(b"POST /mcp HTTP/1.1\r\nHost: x\r\nContent-Le")
            two.writer.write(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 50)
            assert "result" in await caller.ask("tools/list")


async def test_what_is_drawn_is_not_all_nonsense() -> None:
    """The noise reaches behind the doors: some of it is a request that somebody could mean."""
    assert find(FRAMES, lambda line: b'"method": "caller_tool"' in line and b'"id"' in line)
    lines = drawn(LINES, 400)
    assert any(b'"method": "' in line for line in lines)
    assert any(not line.startswith(b"{") for line in lines)
