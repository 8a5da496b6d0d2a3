"""The client as a process, between a host that speaks MCP and a server that judges its frames."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oubliette.wire import relay as wire
from oubliette.wire.jsonrpc import ErrorObject
from oubliette.wire.relay import (
    CallerTool,
    Cancel,
    OublietteCallTool,
    OublietteTools,
    SessionEvents,
    SessionMessage,
)
from tests.kit.boxed import Box
from tests.kit.mcp_host import ERAS, Era, RpcError
from tests.kit.relay_server import Listed, RelayServer, failure, tool

KEY = "oub_" + "5" * 64
ECHO = tool("echo", description="Says it back.")
PROJECT_LIST = {"name": "project_list", "description": "All projects.", "inputSchema": {"type": "object"}}
BASE = ["session_message", "session_events"]

eras = pytest.mark.parametrize("era", ERAS)


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


def text(result: dict[str, Any]) -> str:
    (block,) = result["content"]
    return block["text"]


def error_of(result: dict[str, Any]) -> dict[str, Any]:
    assert result["isError"] is True
    return result["_meta"]["dev.oubliette/error"]


# ---- the list


@pytest.mark.seed("CTR-SDK.2", "CTR-SDK.3", "CTR-CONFIG.2")
@eras
async def test_the_first_list_holds_the_callers_tools_with_their_schema(box: Box, era: Era) -> None:
    schema = {
        "type": "object",
        "properties": {"message": {"$ref": "#/$defs/m"}},
        "$defs": {"m": {"type": "string", "x-any": [1]}},
        "required": ["message"],
    }
    send = tool("send", description="Sends.", inputSchema=schema, title="Send", annotations={"readOnlyHint": False})
    async with RelayServer(box.folder, tools=[send]) as relay, box.talk(relay, era) as host:
        listed = {each["name"]: each for each in await host.tools()}
        assert listed["ant_send"] == {
            "name": "ant_send",
            "title": "Send",
            "description": "Sends.",
            "inputSchema": schema,
            "annotations": {"readOnlyHint": False},
        }
        assert list(listed) == ["ant_send", *BASE]


@eras
async def test_without_declared_tools_the_first_list_waits_for_nothing(box: Box, era: Era) -> None:
    async with RelayServer(box.folder), box.client(era) as host:
        await host.open()
        started = asyncio.get_running_loop().time()
        assert await host.tool_names() == BASE
        assert asyncio.get_running_loop().time() - started < 0.5  # a hold would take 0.7


async def test_a_list_is_held_until_the_config_comes(box: Box) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.client() as host:
        relay.declares = False
        await host.open()
        listing = host.begin("tools/list")
        await relay.take(wire.Attach)
        await host.ask("ping")  # it is the list that waits, not the server
        assert not listing.done()
        relay.declare(ECHO)
        assert [each["name"] for each in (await listing)["tools"]] == ["ant_echo", *BASE]
        assert host.count("notifications/tools/list_changed") == 0


async def test_a_list_is_held_for_a_moment_only_when_there_is_no_server(box: Box) -> None:
    async with box.client() as host:
        await host.open()
        started = asyncio.get_running_loop().time()
        assert await host.tool_names() == BASE
        waited = asyncio.get_running_loop().time() - started
        assert 0.6 < waited < 1.2
        assert wire.HOLD_S == 0.7


@eras
async def test_tools_that_change_are_told_and_listed(box: Box, era: Era) -> None:
    changed = "notifications/tools/list_changed"
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay, era) as host:
        await host.follow()
        relay.declare(ECHO, tool("more"))
        told = await host.notification(changed)
        if era == "modern":
            assert told == {"_meta": {"io.modelcontextprotocol/subscriptionId": "follow"}}
        assert await host.tool_names() == ["ant_echo", "ant_more", *BASE]
        await relay.take(Listed)
        relay.declare()
        await host.notification(changed)
        assert await host.tool_names() == BASE
        with pytest.raises(RpcError, match="Unknown tool: ant_echo") as caught:
            await host.call("ant_echo")
        assert caught.value.code == -32602


async def test_the_same_tools_again_are_no_change(box: Box) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay) as host:
        relay.declare(ECHO)
        relay.declare(tool("other"))
        await host.notification("notifications/tools/list_changed")
        assert host.count("notifications/tools/list_changed") == 1


async def test_the_server_hears_once_per_list_that_the_agent_saw_it(box: Box) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay) as host:
        await host.tools()
        await host.tools()
        relay.declare(tool("other"))
        await host.notification("notifications/tools/list_changed")
        await host.tools()
        host.call("ant_other")
        await relay.take(CallerTool)  # what came before this is all there was
        assert len(relay.of(Listed)) == 2


@pytest.mark.seed("CTR-CONFIG.1", "CTR-DATA.3")
async def test_one_bad_tool_does_not_cost_the_others(box: Box) -> None:
    config = {
        "caller_id": "ant",
        "tools": [
            {"name": "a", "box_name": "ant_a", "inputSchema": None, "description": 5, "annotations": []},
            {"name": "nameless"},
            "what",
            {"name": "b", "box_name": "ant_b", "inputSchema": {"properties": {"x": {}}}},
        ],
    }
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.client() as host:
        relay.declares = False
        await host.open()
        await relay.take(wire.Attach)
        # As the seeds key it: by `type` alone.
        relay.connection.write(msgspec.json.encode({"type": "caller_tools_config", "params": config}) + b"\n")
        tools = await host.tools()
        assert tools[:2] == [
            {"name": "ant_a", "inputSchema": {"type": "object"}},
            {"name": "ant_b", "inputSchema": {"properties": {"x": {}}, "type": "object"}},
        ]
        assert [each["name"] for each in tools[2:]] == BASE


# ---- a caller's tool


@pytest.mark.seed("CTR-SOCKET.1")
@eras
async def test_a_call_carries_the_declared_name_and_a_fresh_key(box: Box, era: Era) -> None:
    arguments = {"text": "grüße 🐜", "n": 12345678901234567890, "f": 0.1, "deep": [{"a": None}, True]}
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay, era) as host:
        pending = [host.call("ant_echo", arguments) for _ in range(2)]
        first, second = await relay.take_many(2, CallerTool)
        assert first.params.tool == "echo"
        assert first.params.arguments == arguments
        keys = {first.params.call_key, second.params.call_key}
        assert len(keys) == 2
        assert all(key is not None and len(key) == 32 and int(key, 16) >= 0 for key in keys)
        for call in (first, second):
            call.reply({"sent": True})
        for each in pending:
            result = await each
            assert result["structuredContent"] == {"sent": True}
            assert text(result) == '{"sent":true}'


VALUES: list[Any] = [{"a": [1, {"b": None}]}, [1, "two"], "plain words", 7, 1.5, True, False, None, {}, [], "", 2**70]


@pytest.mark.seed("CTR-SOCKET.2")
@eras
@pytest.mark.parametrize("value", VALUES, ids=repr)
async def test_any_json_reaches_the_agent_unchanged(box: Box, era: Era, value: Any) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay, era) as host:
        pending = host.call("ant_echo")
        call = await relay.take(CallerTool)
        call.connection.write(b'{"jsonrpc":"2.0","id":%d,"result":%s}\n' % (call.id, _json(value)))
        result = await pending
        assert result["isError"] is False
        assert (text(result) if isinstance(value, str) else _value(text(result))) == value
        wrapped = value if era == "modern" or isinstance(value, dict) else {"result": value}
        assert result["structuredContent"] == wrapped
        assert result.get("resultType") == ("complete" if era == "modern" else None)


async def test_a_result_of_a_mebibyte_arrives_whole(box: Box) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay) as host:
        value = {"text": "ä€🐜\n" * 200_000}
        pending = host.call("ant_echo", value)
        call = await relay.take(CallerTool)
        assert call.params.arguments == value
        call.reply(value)
        assert (await pending)["structuredContent"] == value


@eras
async def test_a_result_with_a_key_named_error_is_a_result(box: Box, era: Era) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay, era) as host:
        pending = host.call("ant_echo")
        (await relay.take(CallerTool)).reply({"error": "x", "code": -1})
        result = await pending
        assert result["isError"] is False
        assert result["structuredContent"] == {"error": "x", "code": -1}


@pytest.mark.seed("CTR-ERROR.3")
@eras
async def test_an_error_is_a_tool_result_with_the_exact_text_and_its_kind(box: Box, era: Era) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay, era) as host:
        pending = host.call("ant_echo")
        (await relay.take(CallerTool)).fail(failure(-32000, "recipient\nnot found ✗", "caller_error", retryable=True))
        result = await pending
        assert text(result) == "recipient\nnot found ✗"
        assert error_of(result) == {"code": -32000, "kind": "caller_error", "retryable": True}
        assert "structuredContent" not in result


@pytest.mark.parametrize(("code", "kind"), [(-32001, "unauthenticated"), (-32002, "forbidden"), (-5, "internal")])
async def test_an_error_without_a_kind_gets_the_one_of_its_code(box: Box, code: int, kind: str) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay) as host:
        pending = host.call("ant_echo")
        (await relay.take(CallerTool)).fail(ErrorObject(code=code, message="no"))
        assert error_of(await pending) == {"code": code, "kind": kind, "retryable": False}


BLOCKS: list[dict[str, Any]] = [
    {"type": "text", "text": "hello", "annotations": {"audience": ["user"]}},
    {"type": "image", "data": "aGk=", "mimeType": "image/png"},
    {"type": "audio", "data": "aGk=", "mimeType": "audio/wav"},
    {"type": "resource", "resource": {"uri": "file:///a", "text": "body", "mimeType": "text/plain"}},
    {"type": "resource", "resource": {"uri": "file:///b", "blob": "aGk="}},
    {"type": "resource_link", "uri": "file:///c", "name": "c"},
]


@eras
async def test_content_blocks_pass_through(box: Box, era: Era) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay, era) as host:
        pending = host.call("ant_echo")
        (await relay.take(CallerTool)).reply({"content": BLOCKS, "structuredContent": {"n": 1}, "isError": True})
        result = await pending
        assert result["content"] == BLOCKS
        assert result["structuredContent"] == {"n": 1}
        assert result["isError"] is True
        pending = host.call("ant_echo")
        (await relay.take(CallerTool)).reply({"content": BLOCKS[:1], "structuredContent": [1]})
        assert (await pending)["structuredContent"] == ([1] if era == "modern" else {"result": [1]})


NOT_CONTENT: list[Any] = [
    {"content": []},
    {"content": "text"},
    {"content": [{"type": "text"}]},
    {"content": [{"type": "text", "text": "ok"}, {"type": "video", "data": "aGk="}]},
    {"content": [{"type": "image", "data": "not base64!", "mimeType": "image/png"}]},
    {"content": [{"type": "image", "data": "aGk="}]},
    {"content": [{"type": "resource", "resource": {"uri": "file:///a"}}]},
    {"content": [{"type": ["text"], "text": "x"}]},
    {"content": [{"type": "text", "text": "x"}], "isError": "yes"},
    {"content": [1]},
]


@pytest.mark.parametrize("value", NOT_CONTENT, ids=repr)
async def test_what_only_looks_like_content_is_shown_as_json(box: Box, value: Any) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay) as host:
        pending = host.call("ant_echo")
        (await relay.take(CallerTool)).reply(value)
        result = await pending
        assert result["structuredContent"] == value
        assert _value(text(result)) == value


@pytest.mark.seed("CTR-FLOW.1", "CTR-FLOW.2")
async def test_twenty_calls_are_answered_in_reverse_while_a_platform_call_passes_them(box: Box) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay:
        relay.platform = [PROJECT_LIST]
        async with box.talk(relay, OUBLIETTE_API_KEY=KEY) as host:
            pending = [host.call("ant_echo", {"n": n}) for n in range(20)]
            calls = await relay.take_many(20, CallerTool)
            overtaking = host.call("oubliette_project_list")
            (await relay.take(OublietteCallTool)).reply({"content": [{"type": "text", "text": "[]"}], "isError": False})
            assert text(await overtaking) == "[]"
            for call in reversed(calls):
                call.reply(call.params.arguments)
            results = [await each for each in pending]
            assert [each["structuredContent"]["n"] for each in results] == list(range(20))
            order = [message["id"] for message in host.messages if message.get("id") in {each.id for each in pending}]
            assert order == [each.id for each in reversed(pending)]


async def test_an_argument_too_large_is_a_tool_error_and_the_link_stays(box: Box) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay) as host:
        result = await host.call("ant_echo", {"text": "x" * wire.FRAME_BYTES_MAX})
        assert error_of(result)["kind"] == "too_large"
        assert "ant_echo" in text(result)
        assert str(wire.FRAME_BYTES_MAX) in text(result)
        pending = host.call("ant_echo", {"text": "x" * (wire.FRAME_BYTES_MAX - 200)})
        (await relay.take(CallerTool)).reply("fits")
        assert text(await pending) == "fits"
        assert len(relay.connections) == 1


@pytest.mark.parametrize("raw", ['{"n":1e999}', '{"s":"\\ud800"}'])
async def test_arguments_that_json_cannot_carry_on_are_a_tool_error(box: Box, raw: str) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay) as host:
        pending = host.begin("ping")
        await pending
        host.write_raw(
            b'{"jsonrpc":"2.0","id":"odd","method":"tools/call","params":{"name":"ant_echo","arguments":%s}}\n'
            % raw.encode()
        )
        result = (await host.stray())["result"]
        assert error_of(result)["kind"] == "invalid_arguments"


# ---- progress and cancelling


@eras
async def test_the_callers_progress_is_passed_on_at_once_and_only_rises(box: Box, era: Era) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay, era) as host:
        pending = host.call("ant_echo", token="p-1")
        quiet = host.call("ant_echo")
        call, other = await relay.take_many(2, CallerTool)
        key = call.params.call_key
        said = [
            {"call_key": key, "progress": 1, "total": 4, "message": "one"},
            {"call_key": key, "progress": 1},
            {"call_key": key, "message": "still there"},
            {"call_key": "of nobody", "progress": 3},
            {"call_key": other.params.call_key, "progress": 3},
            {"call_key": key, "progress": 2.5},
        ]
        for params in said:
            relay.connection.notify("progress", params)
        told = [await host.notification("notifications/progress") for _ in range(4)]
        assert told[0] == {"progressToken": "p-1", "progress": 1, "total": 4, "message": "one"}
        assert told[2]["message"] == "still there"
        assert told[3] == {"progressToken": "p-1", "progress": 2.5}
        numbers = [each["progress"] for each in told]
        assert numbers == sorted(set(numbers))
        call.reply(1)
        other.reply(2)
        await pending
        await quiet
        assert host.count("notifications/progress") == 4


@eras
async def test_a_cancelled_call_is_cancelled_at_the_server_and_never_answered(box: Box, era: Era) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay, era) as host:
        pending = host.call("ant_echo")
        call = await relay.take(CallerTool)
        host.cancel(pending, "too slow")
        cancel = await relay.take(Cancel)
        assert (cancel.params.call_key, cancel.params.reason) == (call.params.call_key, "too slow")
        call.reply("late")
        after = host.call("ant_echo")
        (await relay.take(CallerTool)).reply("on time")
        assert text(await after) == "on time"
        assert not pending.done()


async def test_a_cancelled_read_is_cancelled_at_the_server_too(box: Box) -> None:
    async with RelayServer(box.folder) as relay, box.talk(relay) as host:
        pending = host.call("session_events", {"session_id": "s", "wait_seconds": 30})
        read = await relay.take(SessionEvents)
        host.cancel(pending)
        assert (await relay.take(Cancel)).params.call_key == read.params.call_key


async def test_cancelling_what_is_finished_or_unknown_is_silent(box: Box) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay) as host:
        pending = host.call("ant_echo")
        (await relay.take(CallerTool)).reply("done")
        await pending
        host.cancel(pending)
        host.notify("notifications/cancelled", {"requestId": "never was"})
        host.notify("notifications/cancelled", {"requestId": [1]})
        host.notify("notifications/cancelled")
        await host.ask("ping")
        again = host.call("ant_echo")
        (await relay.take(CallerTool)).reply("again")
        await again
        assert relay.of(Cancel) == []
        assert b"cancel" not in host.log


async def test_when_the_agent_leaves_every_open_call_is_cancelled_and_the_client_exits(box: Box) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay) as host:
        for n in range(3):
            host.call("ant_echo", {"n": n})
        calls = await relay.take_many(3, CallerTool)
        started = asyncio.get_running_loop().time()
        assert await host.leave() == 0
        assert asyncio.get_running_loop().time() - started < 1
        cancels = await relay.take_many(3, Cancel)
        assert {each.params.call_key for each in cancels} == {each.params.call_key for each in calls}


async def test_a_terminated_client_cancels_its_calls_too(box: Box) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay) as host:
        host.call("ant_echo")
        call = await relay.take(CallerTool)
        host.process.terminate()
        assert (await relay.take(Cancel)).params.call_key == call.params.call_key
        assert await host.process.wait() == 0


# ---- the platform's tools


@pytest.mark.seed("OT-NOKEY", "OT-NOKEY.1")
async def test_without_a_key_nothing_is_asked_and_nothing_offered(box: Box) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay:
        relay.platform = [PROJECT_LIST]
        async with box.talk(relay) as host:
            relay.connection.notify("tools_changed", {})
            pending = host.call("ant_echo")
            (await relay.take(CallerTool)).reply(1)
            await pending
            assert await host.tool_names() == ["ant_echo", *BASE]
            assert relay.of(OublietteTools) == []
            assert b"OUBLIETTE_API_KEY" not in host.log


@pytest.mark.seed("OT-DISCOVERY", "OT-NAMING", "OT-NAMING.1", "OTD-START.1", "OTD-START.4")
@eras
async def test_with_a_key_the_first_list_holds_the_platforms_tools(box: Box, era: Era) -> None:
    async with RelayServer(box.folder) as relay:
        relay.platform = [PROJECT_LIST, {**PROJECT_LIST, "name": "token_list", "outputSchema": {"type": "object"}}]
        async with box.talk(relay, era, OUBLIETTE_API_KEY=KEY) as host:
            assert (await relay.take(OublietteTools)).params.api_key == KEY
            tools = await host.tools()
            assert tools[0] == {**PROJECT_LIST, "name": "oubliette_project_list"}
            assert tools[1]["outputSchema"] == {"type": "object"}
            assert [each["name"] for each in tools[2:]] == BASE
            assert b"OUBLIETTE_API_KEY detected, requesting tools..." in host.log


@pytest.mark.seed("OT-EXECUTION.1", "OTD-START.3", "OTD-START.5", "OTD-CALL.3")
@eras
async def test_a_platform_call_carries_the_key_and_passes_the_result_through(box: Box, era: Era) -> None:
    async with RelayServer(box.folder) as relay:
        relay.platform = [PROJECT_LIST]
        async with box.talk(relay, era, OUBLIETTE_API_KEY=KEY) as host:
            pending = host.call("oubliette_project_list", {"limit": 3})
            call = await relay.take(OublietteCallTool)
            assert (call.params.api_key, call.params.tool, call.params.arguments) == (KEY, "project_list", {"limit": 3})
            assert call.params.call_key is not None
            call.reply({"content": [{"type": "text", "text": "exists"}], "isError": True})
            result = await pending
            assert (result["isError"], text(result)) == (True, "exists")
            pending = host.call("oubliette_project_list")
            (await relay.take(OublietteCallTool)).reply({"content": [], "structuredContent": {"a": 1}})
            result = await pending
            assert (result["content"], result["structuredContent"], result["isError"]) == ([], {"a": 1}, False)


@pytest.mark.seed("OT-DISCOVERY.3", "OTD-START.2")
async def test_a_refused_key_is_a_warning_and_the_client_goes_on(box: Box) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay:
        relay.platform = failure(-32001, "invalid or expired API key", "unauthenticated")
        async with box.talk(relay, OUBLIETTE_API_KEY=KEY) as host:
            assert await host.tool_names() == ["ant_echo", *BASE]
            assert await host.leave() == 0
            assert b"WARNING: failed to get oubliette tools: invalid or expired API key" in host.log


@pytest.mark.parametrize(("code", "kind"), [(-32001, "unauthenticated"), (-32002, "forbidden")])
async def test_a_refusal_is_told_and_the_tools_are_asked_for_again(box: Box, code: int, kind: str) -> None:
    async with RelayServer(box.folder) as relay:
        relay.platform = [PROJECT_LIST, {**PROJECT_LIST, "name": "project_create"}]
        async with box.talk(relay, OUBLIETTE_API_KEY=KEY) as host:
            await relay.take(OublietteTools)
            relay.platform = [PROJECT_LIST]
            pending = host.call("oubliette_project_create")
            (await relay.take(OublietteCallTool)).fail(failure(code, "not allowed", kind))
            result = await pending
            assert (text(result), error_of(result)["code"], error_of(result)["kind"]) == ("not allowed", code, kind)
            await relay.take(OublietteTools)
            await host.notification("notifications/tools/list_changed")
            assert await host.tool_names() == ["oubliette_project_list", *BASE]


async def test_a_revoked_key_takes_its_tools_off_the_list(box: Box) -> None:
    async with RelayServer(box.folder) as relay:
        relay.platform = [PROJECT_LIST]
        async with box.talk(relay, OUBLIETTE_API_KEY=KEY) as host:
            relay.platform = failure(-32001, "invalid or expired API key", "unauthenticated")
            relay.connection.notify("tools_changed", {})
            await host.notification("notifications/tools/list_changed")
            assert await host.tool_names() == BASE


async def test_the_platforms_tools_are_asked_for_again_when_told(box: Box) -> None:
    async with RelayServer(box.folder) as relay, box.talk(relay, OUBLIETTE_API_KEY=KEY) as host:
        relay.platform = [PROJECT_LIST]
        relay.connection.notify("tools_changed", {})
        await host.notification("notifications/tools/list_changed")
        assert "oubliette_project_list" in await host.tool_names()


# ---- the client's own tools


async def test_the_base_tools_offer_the_parameters_of_the_wire_and_no_others(box: Box) -> None:
    async with RelayServer(box.folder) as relay, box.talk(relay) as host:
        offered = {each["name"]: each["inputSchema"] for each in await host.tools()}
        for name, params in (("session_message", SessionMessage), ("session_events", SessionEvents)):
            fields = {each.name: each for each in msgspec.structs.fields(params) if each.name != "call_key"}
            assert set(offered[name]["properties"]) == set(fields)
            assert set(offered[name]["required"]) == {each.name for each in fields.values() if each.required}
            defaults = {key: each["default"] for key, each in offered[name]["properties"].items() if "default" in each}
            assert defaults == {key: fields[key].default for key in defaults}


@eras
async def test_a_droid_starts_and_follows_a_child(box: Box, era: Era) -> None:
    async with RelayServer(box.folder) as relay, box.talk(relay, era) as host:
        pending = host.call("session_message", {"message": "do it", "workspace_id": "w", "wait_seconds": 1.5})
        call = await relay.take(SessionMessage)
        assert call.params == SessionMessage(
            message="do it", workspace_id="w", wait_seconds=1.5, call_key=call.params.call_key
        )
        assert call.params.call_key is not None
        call.reply({"session_id": "gogol_child", "status": "working"})
        assert (await pending)["structuredContent"] == {"session_id": "gogol_child", "status": "working"}
        pending = host.call("session_events", {"session_id": "gogol_child", "since_index": 3})
        events = await relay.take(SessionEvents)
        assert events.params == SessionEvents(session_id="gogol_child", since_index=3, call_key=events.params.call_key)
        events.fail(failure(-32000, "no such session", "not_found"))
        assert error_of(await pending)["kind"] == "not_found"


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("session_message", {}, "session_message: message is required"),
        ("session_message", {"message": "x", "call_key": "y"}, 'session_message: there is no argument "call_key"'),
        ("session_events", {"session_id": "x", "api_key": "y"}, 'session_events: there is no argument "api_key"'),
    ],
)
async def test_unknown_or_missing_arguments_of_a_base_tool_are_named(
    box: Box, name: str, arguments: dict[str, Any], problem: str
) -> None:
    async with RelayServer(box.folder) as relay, box.talk(relay) as host:
        result = await host.call(name, arguments)
        assert text(result) == problem
        assert error_of(result) == {"code": -32602, "kind": "invalid_arguments", "retryable": False}


@eras
async def test_an_agent_that_never_looks_again_reaches_later_tools_by_search(box: Box, era: Era) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay:
        relay.attached = msgspec.structs.replace(relay.attached, tools_search=True)
        async with box.talk(relay, era) as host:
            assert await host.tool_names() == ["ant_echo", *BASE, "tools_search", "tools_call"]
            later = tool("book_table", description="Reserves in a restaurant.")
            relay.declare(ECHO, tool("mail", description="Sends a book or a restaurant's bill."), later)
            if era == "legacy":
                await host.notification("notifications/tools/list_changed")
            else:
                await host.ask("tools/list")
            found = (await host.call("tools_search", {"query": "book RESTAURANT"}))["structuredContent"]["tools"]
            assert [each["name"] for each in found] == ["ant_book_table", "ant_mail"]
            assert found[0]["inputSchema"] == {"type": "object"}
            assert (await host.call("tools_search", {"query": "zebra"}))["structuredContent"] == {"tools": []}
            everything = (await host.call("tools_search", {"limit": 2}))["structuredContent"]["tools"]
            assert len(everything) == 2
            pending = host.call("tools_call", {"name": "ant_book_table", "arguments": {"seats": 2}}, token=7)
            call = await relay.take(CallerTool)
            assert (call.params.tool, call.params.arguments) == ("book_table", {"seats": 2})
            relay.connection.notify("progress", {"call_key": call.params.call_key, "progress": 1})
            assert (await host.notification("notifications/progress"))["progressToken"] == 7
            call.reply("booked")
            assert text(await pending) == "booked"
            pending = host.call("tools_call", {"name": "session_events", "arguments": {"session_id": "s"}})
            (await relay.take(SessionEvents)).reply({"events": []})
            assert (await pending)["structuredContent"] == {"events": []}


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"name": "nothing"}, "unknown_tool"),
        ({"name": "tools_call", "arguments": {"name": "tools_call"}}, "unknown_tool"),
        ({"name": ["x"]}, "unknown_tool"),
        ({}, "invalid_arguments"),
        ({"name": "ant_echo", "arguments": 5}, "invalid_arguments"),
        ({"name": "session_message", "arguments": {}}, "invalid_arguments"),
    ],
)
async def test_tools_call_refuses_by_name(box: Box, arguments: dict[str, Any], kind: str) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay:
        relay.attached = msgspec.structs.replace(relay.attached, tools_search=True)
        async with box.talk(relay) as host:
            assert error_of(await host.call("tools_call", arguments))["kind"] == kind


async def test_other_agents_do_not_see_the_search(box: Box) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay) as host:
        for name in ("tools_search", "tools_call"):
            with pytest.raises(RpcError, match="Unknown tool"):
                await host.call(name, {"name": "ant_echo"})


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _value(text: str) -> Any:
    return json.loads(text)
