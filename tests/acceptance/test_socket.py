"""The relay socket as a stranger finds it: JSON-RPC by the book, keys before anything, bounds on everything."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio

from oubliette.server.endpoints.relay import OPEN_REQUESTS_MAX
from tests.kit.mcp_caller import McpCaller
from tests.kit.records import records
from tests.kit.scene import Scene, lent, planned, scene
from tests.kit.server import ServerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[ServerProcess]:
    async with ServerProcess(tmp_path_factory.mktemp("socket") / "home") as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def here(server: ServerProcess) -> AsyncGenerator[Scene]:
    async with scene(server) as made:
        yield made


async def works(here: Scene, caller: McpCaller, session_id: str) -> bool:
    """Whether a call of this session is still relayed."""
    async with here.box(session_id) as box:
        asked = await box.request("caller_tool", tool="any", arguments={})
        await caller.answer(await caller.request(), "fine")
        return (await box.answer(asked))["result"] == "fine"


# What is no request, and how it is answered: the line, the id of the answer, and its code.
GARBAGE: dict[str, tuple[bytes, Any, int]] = {
    "no JSON": (b"hello", None, -32700),
    "half a line": (b'{"jsonrpc":"2.0","id":1,"method":', None, -32700),
    "bytes that are no text": (b"\xff\xfe\x00\x01", None, -32700),
    "invalid UTF-8 in a string": (b'{"jsonrpc":"2.0","id":1,"method":"\xff"}', None, -32700),
    "half a surrogate": (b'{"jsonrpc":"2.0","id":1,"method":"\\ud800"}', None, -32700),
    "NaN": (b'{"jsonrpc":"2.0","id":1,"method":"x","params":{"a":NaN}}', None, -32700),
    "endlessly nested": (b"[" * 100_000, None, -32700),
    "a batch": (b'[{"jsonrpc":"2.0","id":1,"method":"caller_tool"}]', None, -32600),
    "a number": (b"7", None, -32600),
    "null": (b"null", None, -32600),
    "an empty object": (b"{}", None, -32600),
    "only an id": (b'{"jsonrpc":"2.0","id":5}', 5, -32600),
    "a method that is no string": (b'{"jsonrpc":"2.0","id":5,"method":7}', 5, -32600),
    "an id that is an object": (b'{"jsonrpc":"2.0","id":{},"method":"caller_tool"}', None, -32600),
    "an id that is a fraction": (b'{"jsonrpc":"2.0","id":1.5,"method":"caller_tool"}', None, -32600),
    "an unknown method": (b'{"jsonrpc":"2.0","id":6,"method":"format_disk","params":{}}', 6, -32601),
    "a method of the keeper": (b'{"jsonrpc":"2.0","id":6,"method":"stdout","params":{}}', 6, -32601),
    "a method of the server": (b'{"jsonrpc":"2.0","id":6,"method":"start","params":{}}', 6, -32601),
    "a second attach": (b'{"jsonrpc":"2.0","id":6,"method":"attach","params":{}}', 6, -32601),
    "params left out": (b'{"jsonrpc":"2.0","id":6,"method":"caller_tool"}', 6, -32602),
    "params in a list": (b'{"jsonrpc":"2.0","id":6,"method":"caller_tool","params":["x"]}', 6, -32602),
    "params that are null": (b'{"jsonrpc":"2.0","id":6,"method":"caller_tool","params":null}', 6, -32602),
    "the tool left out": (b'{"jsonrpc":"2.0","id":6,"method":"caller_tool","params":{"arguments":{}}}', 6, -32602),
    "a tool by number": (b'{"jsonrpc":"2.0","id":6,"method":"caller_tool","params":{"tool":1}}', 6, -32602),
    "arguments in a list": (
        b'{"jsonrpc":"2.0","id":6,"method":"caller_tool","params":{"tool":"any","arguments":[]}}',
        6,
        -32602,
    ),
    "a call key that is too long": (
        b'{"jsonrpc":"2.0","id":6,"method":"caller_tool","params":{"tool":"any","call_key":"%b"}}' % (b"k" * 129),
        6,
        -32602,
    ),
    "an empty message": (b'{"jsonrpc":"2.0","id":6,"method":"session_message","params":{"message":""}}', 6, -32602),
}


async def test_what_is_no_request_is_answered_by_the_book_and_the_connection_survives(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent())
        async with here.box(session_id) as box:
            await box.told("caller_tools_config")
            for name, (line, answered, code) in GARBAGE.items():
                await box.write(line + b"\n")
                told = await box.answer(answered)
                assert told["jsonrpc"] == "2.0", name
                assert (told["id"], told["error"]["code"]) == (answered, code), (name, told)
                assert told["error"]["data"]["kind"], name
            assert caller.requests.empty()
            asked = await box.request("caller_tool", tool="any", arguments={})
            await caller.answer(await caller.request(), 1)
            assert (await box.answer(asked))["result"] == 1


async def test_ids_come_back_as_they_were_and_notifications_get_no_reply(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent())
        async with here.box(session_id) as box:
            for name in ("text", "", 0, -1, 2**53, "\u00e4\U0001f600"):
                frame = {"jsonrpc": "2.0", "id": name, "method": "session_events", "params": {"session_id": session_id}}
                await box.send(frame)
                told = await box.answer(name)
                assert told["id"] == name
                assert type(told["id"]) is type(name)
            # None of these asks anything; the next answer is to the request behind them.
            for method in ("caller_tool", "format_disk", "cancel", "progress", "listed", "attach"):
                await box.notify(method, tool="any", arguments={}, call_key="none")
            await box.write(b"\n\n")
            asked = await box.request("session_events", session_id=session_id)
            frame = await box.answer(asked)
            assert "result" in frame
            config = await box.frame()
            assert config is not None
            assert config["method"] == "caller_tools_config", "what was told at the start is all that is left"
            await box.request("session_events", session_id=session_id)
            assert (await box.frame() or {}).get("id") == asked + 1
            assert caller.requests.empty()


async def test_a_frame_over_eight_mebibytes_is_refused_and_hurts_nobody_else(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent())
        async with here.box(session_id) as box, here.box(session_id) as other:
            try:
                await box.write(b'{"jsonrpc":"2.0","id":1,"method":"caller_tool","params":{"tool":"' + b"x" * 8_500_000)
            except ConnectionError:
                pass  # it may hang up before it read everything
            assert await box.closed()
            assert "result" in await other.ask("session_events", session_id=session_id)
        assert await works(here, caller, session_id)


async def test_arguments_and_results_have_bounds_with_names(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent())
        async with here.box(session_id) as box:
            told = await box.ask("caller_tool", tool="any", arguments={"text": "x" * 4_200_000})
            assert told["error"]["data"]["kind"] == "too_large"
            asked = await box.request("caller_tool", tool="any", arguments={})
            request = await caller.request()
            over = await caller.result(
                "caller_tool_response",
                session_id=session_id,
                request_id=request["request_id"],
                result="x" * 6_400_000,
            )
            assert over["isError"]
            assert "bytes" in over["content"][0]["text"]
            assert (await caller.answer(request, "smaller"))["accepted"], "it stays open for one that fits"
            assert (await box.answer(asked))["result"] == "smaller"


ATTACH_REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "a wrong key": ({"key": "0" * 64}, -32001, "unauthenticated"),
    "an empty key": ({"key": ""}, -32001, "unauthenticated"),
    "no key": ({"key": None}, -32602, "invalid_params"),
    "the client's key as the keeper": ({"role": "keeper"}, -32001, "unauthenticated"),
    "as the server": ({"role": "server"}, -32602, "invalid_params"),
    "an instance of nothing": ({"instance": ""}, -32602, "invalid_params"),
    "a protocol to come": ({"protocol": 99}, -32000, "upgrade_required"),
}


@pytest.mark.parametrize("wrong", list(ATTACH_REFUSED))
async def test_who_cannot_identify_itself_is_told_why_and_put_out(here: Scene, wrong: str) -> None:
    params, code, kind = ATTACH_REFUSED[wrong]
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent())
        async with here.door(session_id) as box:
            told = await box.attach(**params)
            assert (told["error"]["code"], told["error"]["data"]["kind"]) == (code, kind)
            assert await box.closed()
            assert await box.frame() is None, "nothing of the session was told"
    if code == -32001:
        async with asyncio.timeout(5):
            while not records(here.server.home, "audit", operation="attach", outcome="refused: unauthenticated"):
                await asyncio.sleep(0.02)


async def test_another_sessions_key_opens_nothing(here: Scene) -> None:
    async with here.caller() as caller:
        one, two = await here.rest(caller, context=lent()), await here.rest(caller, context=lent())
        async with here.door(one) as box:
            key = (here.folder(two) / "mcp" / "key").read_text()
            told = await box.attach(key=key)
            assert told["error"]["code"] == -32001
            assert key not in json.dumps(told)
            assert await box.closed()


async def test_what_comes_before_attach_is_not_served(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent())
        for method in ("caller_tool", "oubliette_tools", "session_events"):
            async with here.door(session_id) as box:
                told = await box.ask(method, tool="any", session_id=session_id, api_key="x")
                assert told["error"]["code"] == -32602
                assert "attach" in told["error"]["message"]
                assert await box.closed()
        assert caller.requests.empty()


async def test_an_attach_over_four_kibibytes_is_cut(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller)
        async with here.door(session_id) as box:
            await box.write(b'{"jsonrpc":"2.0","id":1,"method":"attach","params":{"key":"' + b"k" * 5000)
            frame = await box.frame()
            assert frame is not None
            assert frame["error"]["data"]["kind"] == "too_large"
            assert await box.closed()


async def test_an_attach_that_does_not_come_in_five_seconds_is_cut(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller)
        async with here.door(session_id) as box:
            began = time.monotonic()
            await box.write(b'{"jsonrpc":"2.0",')
            frame = await box.frame()
            assert frame is not None
            assert "in time" in frame["error"]["message"]
            assert 4 < time.monotonic() - began < 7
            assert await box.closed()


async def admitted(here: Scene, session_id: str) -> bool:
    async with here.door(session_id) as box:
        try:
            return "result" in await box.attach()
        except (ConnectionError, AssertionError):
            return False


async def test_the_ninth_connection_of_a_box_is_refused_and_a_free_place_is_taken(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent())
        async with AsyncExitStack() as stack:
            # The keeper has one, the droid's own client another.
            for _ in range(6):
                await stack.enter_async_context(here.box(session_id))
            async with here.door(session_id) as ninth:
                frame = await ninth.frame()
                assert frame is not None
                assert frame["error"]["data"]["kind"] == "too_many"
                assert await ninth.closed()
        async with asyncio.timeout(5):
            while not await admitted(here, session_id):
                await asyncio.sleep(0.05)
        assert await works(here, caller, session_id)


def watch(key: dict[str, Any], session_id: str, **more: Any) -> dict[str, Any]:
    """A read that goes on until the session ends."""
    arguments = {"session_id": session_id, "wait_seconds": 3600, "until": "end"}
    return {"api_key": key["token"], "tool": "session_watch", "arguments": arguments, **more}


async def noted(here: Scene, count: int, **where: Any) -> None:
    """Wait for so many audit rows."""
    async with asyncio.timeout(10):
        while len(records(here.server.home, "audit", **where)) < count:
            await asyncio.sleep(0.02)


async def test_what_a_client_only_waits_for_ends_with_its_connection(here: Scene) -> None:
    key = await here.token("read")
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent())
        for n in range(1, 4):
            async with here.box(session_id, instance="the same") as box:
                for _ in range(20):
                    await box.request("oubliette_call_tool", **watch(key, session_id))
                assert "result" in await box.ask("oubliette_tools", api_key=key["token"])
            await noted(here, 20 * n, token_id=key["id"], outcome="refused: cancelled")
        assert await works(here, caller, session_id)


async def test_a_call_of_a_callers_tool_does_not_end_with_its_connection(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent())
        async with here.box(session_id, instance="the same") as box:
            await box.request("caller_tool", tool="any", arguments={}, call_key="k")
            request = await caller.request()
        async with here.box(session_id, instance="the same") as box:
            asked = await box.request("caller_tool", tool="any", arguments={}, call_key="k")
            await caller.answer(request, "still wanted")
            assert (await box.answer(asked))["result"] == "still wanted"


async def test_a_box_has_so_many_requests_open_and_no_more_by_whatever_connection(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller)
        last = len(await here.events(session_id)) - 1
        waiting = {"session_id": session_id, "since_index": last, "wait_seconds": 45}
        async with here.box(session_id) as other:
            async with here.box(session_id) as box:
                for _ in range(OPEN_REQUESTS_MAX):
                    await box.request("session_events", **waiting)
                told = await box.ask("session_events", **waiting)
                assert told["error"]["data"]["kind"] == "too_many"
                told = await other.ask("session_events", **waiting)
                assert told["error"]["data"]["kind"] == "too_many"
            async with asyncio.timeout(10):
                while "error" in (await other.ask("session_events", session_id=session_id)):
                    await asyncio.sleep(0.05)


@pytest.mark.parametrize("door", ["relay", "relay, the tree"])
async def test_a_wait_ends_within_a_second_when_its_key_is_revoked(here: Scene, door: str) -> None:
    key = await here.token("write")
    async with here.caller() as caller:
        session_id = await here.rest(caller)
        asked = watch(key, session_id)
        if door == "relay, the tree":
            last = len(await here.events(session_id)) - 1
            arguments = {"session_id": session_id, "since_index": last, "wait_seconds": 45, "include_children": True}
            asked.update(tool="session_events", arguments=arguments)
        async with here.box(session_id) as box:
            waiting = await box.request("oubliette_call_tool", **asked)
            assert "result" in await box.ask("session_events", session_id=session_id)
            await here.server.ask("token_revoke", token_id=key["id"])
            began = time.monotonic()
            told = await box.answer(waiting)
            assert told["error"]["code"] == -32001
            assert time.monotonic() - began < 2
    # It was let in, and then it was put out: whom the door does not know has no id.
    (row,) = records(here.server.home, "audit", operation=asked["tool"], token_id=key["id"])
    assert row["outcome"] == "refused: unauthenticated"


async def test_waits_on_a_child_end_within_a_second_when_their_creators_token_is_revoked(here: Scene) -> None:
    key = await here.token("write")
    async with here.caller(key["token"]) as caller:
        session_id = await here.rest(caller)
        async with here.box(session_id) as box:
            slow = planned([{"sleep": 30}])
            messaged = await box.request("session_message", message=slow, wait_seconds=45)
            await here.until(session_id, "child_started")
            last = len(await here.events(session_id)) - 1
            read = await box.request("session_events", session_id=session_id, since_index=last, wait_seconds=45)
            assert "result" in await box.ask("session_events", session_id=session_id)
            await here.server.ask("token_revoke", token_id=key["id"])
            began = time.monotonic()
            for one in (messaged, read):
                assert (await box.answer(one))["error"]["code"] == -32001
            assert time.monotonic() - began < 2


async def test_what_waits_is_cancelled_by_its_key_whatever_it_is(here: Scene) -> None:
    key = await here.token("write")
    async with here.caller() as caller:
        session_id = await here.rest(caller)
        last = len(await here.events(session_id)) - 1
        slow = planned([{"sleep": 30}])
        message = {"session_id": session_id, "message": slow, "wait_seconds": 45}
        asked: dict[str, tuple[str, dict[str, Any]]] = {
            "a read": ("session_events", {"session_id": session_id, "since_index": last, "wait_seconds": 45}),
            "a watch": ("oubliette_call_tool", watch(key, session_id)),
            "a message": (
                "oubliette_call_tool",
                {"api_key": key["token"], "tool": "session_message", "arguments": message},
            ),
            "a child": ("session_message", {"message": slow, "wait_seconds": 45}),
        }
        async with here.box(session_id) as box, here.box(session_id) as other:
            for name, (method, params) in asked.items():
                waiting = await box.request(method, **params, call_key=name)
                await box.notify("cancel", call_key="of nothing")
                await box.notify("cancel", call_key=name, reason="enough")
                began = time.monotonic()
                told = await box.answer(waiting)
                assert told["error"]["data"]["kind"] == "cancelled", name
                assert time.monotonic() - began < 5, name
            # Whichever connection says it.
            waiting = await box.request("oubliette_call_tool", **watch(key, session_id), call_key="again")
            assert "result" in await box.ask("oubliette_tools", api_key=key["token"])
            await other.notify("cancel", call_key="again")
            assert (await box.answer(waiting))["error"]["data"]["kind"] == "cancelled"
        # What was begun goes on: the turn that was asked for, and the child.
        await here.until(session_id, "turn_started", turn=2)
        await here.until(session_id, "child_started")


async def test_a_call_that_two_have_joined_and_one_cancels_is_cancelled_for_both(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent())
        async with here.box(session_id) as one, here.box(session_id) as two:
            first = await one.request("caller_tool", tool="any", arguments={}, call_key="k")
            await caller.request()
            second = await two.request("caller_tool", tool="any", arguments={}, call_key="k")
            assert "result" in await two.ask("session_events", session_id=session_id)
            await one.notify("cancel", call_key="k")
            for told in (await one.answer(first), await two.answer(second)):
                assert told["error"]["data"]["kind"] == "cancelled"


async def test_a_peer_that_never_reads_its_last_words_is_cut_off(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent())
        async with AsyncExitStack() as stack:
            # The keeper has one, the droid's own client another; the slow one is the eighth.
            for _ in range(5):
                await stack.enter_async_context(here.box(session_id))
            slow = await stack.enter_async_context(here.box(session_id))
            slow.transport.pause_reading()
            # Each answer is about a megabyte.
            for _ in range(20):
                await slow.request("caller_tool", tool="any", arguments={})
            for _ in range(20):
                await caller.answer(await caller.request(), "y" * 1_000_000)
            assert not await admitted(here, session_id), "it has a few seconds to read why"
            async with asyncio.timeout(15):
                while not await admitted(here, session_id):
                    await asyncio.sleep(0.1)


async def test_a_droid_that_poses_as_the_server_is_not_believed_by_anybody(here: Scene) -> None:
    """What only a server or a keeper says, a client cannot: not to the server, and not to other clients."""
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent())
        before = await here.events(session_id)
        async with here.box(session_id) as posing, here.client(session_id) as agent:
            await agent.open()
            names = await agent.tool_names()
            for method in ("start", "stdin", "signal"):
                told = await posing.ask(method, process="droid", argv=["/bin/sh"], env={}, cwd="/", data="", offset=0)
                assert told["error"]["code"] == -32601
            forged = {"caller_id": "ant", "tools": [{"name": "evil", "box_name": "ant_evil"}]}
            await posing.notify("caller_tools_config", **forged)
            await posing.notify("stdout", process="droid", stream="out", offset=0, data="e30K")
            await posing.notify("exited", process="droid", exit_code=0)
            await posing.notify("tools_changed")
            # An answer to a request that nobody asked.
            await posing.send({"jsonrpc": "2.0", "id": 1, "result": {"stdin_offset": 10**9}})
            assert "result" in await posing.ask("session_events", session_id=session_id)
            assert await agent.tool_names() == names
        assert await here.events(session_id) == before
        assert await works(here, caller, session_id)


async def test_the_sockets_folder_cannot_be_changed_from_inside(here: Scene) -> None:
    """Nobody in the box can put a socket of its own where the clients look for the server's."""
    async with here.caller() as caller:
        plan = [
            {"sh": "mv /mcp/relay.sock /mcp/old", "expect": {"is_error": True, "contains": "Read-only"}},
            {"sh": "rm -f /mcp/relay.sock", "expect": {"is_error": True, "contains": "Read-only"}},
            {"sh": "echo x > /mcp/key", "expect": {"is_error": True, "contains": "Read-only"}},
            {"sh": "mount -t tmpfs none /mcp || umount /mcp", "expect": {"is_error": True}},
            {"tool": "ant_any", "expect": {"is_error": False}},
        ]
        session_id = await here.start(caller, plan, context=lent())
        await caller.answer(await caller.request(), 1)
        (await here.turn(session_id)).worked()


async def test_sessions_of_others_are_out_of_reach_of_a_box(here: Scene) -> None:
    async with here.caller() as caller:
        one, two = await here.rest(caller, context=lent()), await here.rest(caller, context=lent())
        async with here.box(one) as box:
            told = await box.ask("session_events", session_id=two)
            assert told["error"]["data"]["kind"] == "not_found"
            told = await box.ask("session_message", message="hello", session_id=two)
            assert told["error"]["data"]["kind"] == "not_found"
            await box.notify("cancel", call_key="k")
            asked = await box.request("caller_tool", tool="any", arguments={}, call_key="k")
            request = await caller.request()
            async with here.box(two) as other:
                await other.notify("cancel", call_key="k")
                assert "result" in await other.ask("session_events", session_id=two)
            assert (await caller.answer(request, "still wanted"))["accepted"]
            assert (await box.answer(asked))["result"] == "still wanted"


async def test_the_key_changes_with_every_server_and_only_the_new_one_opens(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    async with (
        ServerProcess(tmp_path_factory.mktemp("socket") / "home") as server,
        scene(server) as here,
        here.caller() as caller,
    ):
        session_id = await here.rest(caller, context=lent())
        folder = here.folder(session_id)
        old = (folder / "mcp" / "key").read_text()
        assert (folder / "mcp" / "key").stat().st_mode & 0o077 == 0
        assert (folder / "mcp").stat().st_mode & 0o077 == 0
        await server.stop()
        await server.restart()
        async with here.door(session_id) as box:
            new = (folder / "mcp" / "key").read_text()
            assert new != old
            assert (await box.attach(key=old))["error"]["code"] == -32001
        async with here.box(session_id):
            pass
