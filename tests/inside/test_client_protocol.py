"""What the client says as an MCP server on a pipe: both eras, and whatever else may come down it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kit.boxed import Box
from tests.kit.mcp_host import ENVELOPE, McpHost, RpcError
from tests.kit.relay_server import RelayServer, tool

LEGACY = ["2025-11-25", "2025-06-18", "2025-03-26"]


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


async def answer(host: McpHost, message: object) -> dict[str, Any]:
    """Send one thing and wait for what comes back to it."""
    host.write_raw((message if isinstance(message, bytes) else json.dumps(message).encode()) + b"\n")
    return await host.stray()


@pytest.mark.parametrize("version", LEGACY)
async def test_the_version_asked_for_is_spoken(box: Box, version: str) -> None:
    async with box.client() as host:
        result = await host.ask("initialize", {"protocolVersion": version, "capabilities": {}})
        assert result["protocolVersion"] == version
        assert result["capabilities"] == {"tools": {"listChanged": True}}
        assert result["serverInfo"]["name"] == "oubliette"


@pytest.mark.parametrize("version", ["2024-11-05", "2026-07-28", "zzz", None, 5, ["2025-06-18"]])
async def test_an_unknown_version_is_answered_with_the_newest(box: Box, version: object) -> None:
    async with box.client() as host:
        assert (await host.ask("initialize", {"protocolVersion": version}))["protocolVersion"] == "2025-11-25"


async def test_unknown_methods_before_initialize_are_refused_and_nothing_dies(box: Box) -> None:
    async with box.client() as host:
        for method in ("server/discover", "resources/list", "prompts/list", "logging/setLevel", "", "x" * 5000):
            with pytest.raises(RpcError) as caught:
                await host.ask(method)
            assert caught.value.code == -32601
        host.notify("notifications/what")
        host.notify("notifications/cancelled", {"requestId": 1})
        assert await host.ask("ping") == {}
        await host.open()


@pytest.mark.parametrize(
    ("line", "code", "request_id"),
    [
        (b"garbage", -32700, None),
        (b'{"jsonrpc":"2.0","id":1,"method":"ping"', -32700, None),
        (b'{"jsonrpc":"2.0","id":1,"method":"ping"} {}', -32700, None),
        (b'{"jsonrpc":"2.0","id":1,"method":"ping","params":{"a":NaN}}', -32700, None),
        (b"\xff\xfe{}", -32700, None),
        (b"[" * 100_000, -32700, None),
        (b'[{"jsonrpc":"2.0","id":1,"method":"ping"}]', -32600, None),
        (b'"ping"', -32600, None),
        (b"{}", -32600, None),
        (b'{"id":1,"method":"ping"}', -32600, 1),
        (b'{"jsonrpc":"1.0","id":"a","method":"ping"}', -32600, "a"),
        (b'{"jsonrpc":"2.0","id":1,"method":5}', -32600, 1),
        (b'{"jsonrpc":"2.0","id":null,"method":"ping"}', -32600, None),
        (b'{"jsonrpc":"2.0","id":true,"method":"ping"}', -32600, None),
        (b'{"jsonrpc":"2.0","id":1.5,"method":"ping"}', -32600, None),
        (b'{"jsonrpc":"2.0","id":{},"method":"ping"}', -32600, None),
        (b'{"jsonrpc":"2.0","id":9,"method":"tools/call","params":[]}', -32602, 9),
        (b'{"jsonrpc":"2.0","id":9,"method":"tools/call"}', -32602, 9),
        (b'{"jsonrpc":"2.0","id":9,"method":"tools/call","params":{"name":5}}', -32602, 9),
        (
            b'{"jsonrpc":"2.0","id":9,"method":"tools/call","params":{"name":"x","arguments":[]}}',
            -32602,
            9,
        ),
        (b'{"jsonrpc":"2.0","id":9,"method":"tools/list","params":{"cursor":"x"}}', -32602, 9),
    ],
)
async def test_what_is_no_request_is_refused_and_the_next_is_answered(
    box: Box, line: bytes, code: int, request_id: object
) -> None:
    async with RelayServer(box.folder), box.client() as host:
        message = await answer(host, line)
        assert (message["error"]["code"], message["id"]) == (code, request_id)
        assert await host.ask("ping") == {}


async def test_answers_to_nothing_and_empty_lines_are_ignored(box: Box) -> None:
    async with box.client() as host:
        host.write_raw(b'\n  \n\r\n{"jsonrpc":"2.0","id":1,"result":{}}\n{"jsonrpc":"2.0","id":1,"error":{}}\n')
        host.write_raw(b'  {"jsonrpc":"2.0","id":"white","method":"ping"} \r\n')
        assert (await host.stray())["id"] == "white"
        assert len(host.messages) == 1


async def test_a_line_cut_anywhere_is_put_together(box: Box) -> None:
    async with box.client() as host:
        for byte in '{"jsonrpc":"2.0","id":"ä€🐜","method":"ping"}\n'.encode():
            host.write_raw(bytes([byte]))
            await host.process.stdin.drain()  # type: ignore[union-attr]
        assert await host.stray() == {"jsonrpc": "2.0", "id": "ä€🐜", "result": {}}


async def test_a_line_beyond_any_bound_is_refused_and_forgotten(box: Box) -> None:
    async with box.client() as host:
        host.write_raw(b'{"jsonrpc":"2.0","id":1,"method":"' + b"x" * (70 * 1024 * 1024) + b'"}\n')
        message = await host.stray()
        assert (message["id"], message["error"]["code"]) == (None, -32600)
        assert await host.ask("ping") == {}
        assert len(host.messages) == 2


async def test_an_id_that_is_still_open_is_refused(box: Box) -> None:
    async with RelayServer(box.folder, tools=[tool("echo")]) as relay, box.talk(relay) as host:
        call = {"jsonrpc": "2.0", "id": "same", "method": "tools/call", "params": {"name": "ant_echo"}}
        host.write(call)
        message = await answer(host, call)
        assert message["error"]["code"] == -32600
        assert message["id"] == "same"


async def test_ids_are_kept_apart_by_type(box: Box) -> None:
    async with box.client() as host:
        for request_id in (1, "1", 0, -5, "", 2**60):
            message = await answer(host, {"jsonrpc": "2.0", "id": request_id, "method": "ping"})
            assert message["id"] == request_id
            assert type(message["id"]) is type(request_id)


async def test_discover_tells_what_the_stateless_revision_asks(box: Box) -> None:
    async with box.client("modern") as host:
        result = await host.ask("server/discover")
        assert result["supportedVersions"] == ["2026-07-28"]
        assert result["capabilities"] == {"tools": {"listChanged": True}}
        assert (result["resultType"], result["ttlMs"], result["cacheScope"]) == ("complete", 0, "private")
        assert result["_meta"]["io.modelcontextprotocol/serverInfo"]["name"] == "oubliette"


async def test_lists_of_the_stateless_revision_say_how_long_they_hold(box: Box) -> None:
    async with RelayServer(box.folder), box.client("modern") as host:
        result = await host.ask("tools/list")
        assert (result["resultType"], result["ttlMs"], result["cacheScope"]) == ("complete", 0, "private")
        assert "nextCursor" not in result


async def test_requests_of_the_stateless_revision_need_no_beginning(box: Box) -> None:
    async with RelayServer(box.folder), box.client("modern") as host:
        result = await host.call("session_events", {})
        assert result["isError"] is True
        assert result["resultType"] == "complete"


async def test_methods_of_the_other_era_are_unknown(box: Box) -> None:
    async with box.client("modern") as host:
        for method in ("initialize", "ping", "resources/list"):
            with pytest.raises(RpcError) as caught:
                await host.ask(method)
            assert caught.value.code == -32601
    async with box.client() as host:
        with pytest.raises(RpcError) as caught:
            await host.ask("subscriptions/listen", {"notifications": {"toolsListChanged": True}})
        assert caught.value.code == -32601


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"io.modelcontextprotocol/protocolVersion": "2027-01-01"}, -32022),
        ({"io.modelcontextprotocol/protocolVersion": 5}, -32602),
        ({"io.modelcontextprotocol/clientCapabilities": None}, -32602),
    ],
)
async def test_a_wrong_envelope_is_refused(box: Box, change: dict[str, Any], code: int) -> None:
    async with box.client() as host:
        meta = {**ENVELOPE, **change}
        with pytest.raises(RpcError) as caught:
            await host.ask("tools/list", {"_meta": meta})
        assert caught.value.code == code
        if code == -32022:
            assert caught.value.data == {"supported": ["2026-07-28", *LEGACY], "requested": "2027-01-01"}


async def test_a_subscription_hears_only_what_it_asked_for_until_it_is_cancelled(box: Box) -> None:
    acknowledged = "notifications/subscriptions/acknowledged"
    changed = "notifications/tools/list_changed"
    key = "io.modelcontextprotocol/subscriptionId"
    async with RelayServer(box.folder, tools=[tool("echo")]) as relay, box.talk(relay, "modern") as host:
        host.begin_as(70, "subscriptions/listen", {"notifications": {"toolsListChanged": True}})
        assert await host.notification(acknowledged) == {
            "notifications": {"toolsListChanged": True},
            "_meta": {key: 70},
        }
        other = {"promptsListChanged": True, "resourceSubscriptions": ["file:///x"], "toolsListChanged": False}
        host.begin_as("deaf", "subscriptions/listen", {"notifications": other})
        assert await host.notification(acknowledged) == {"notifications": {}, "_meta": {key: "deaf"}}
        relay.declare(tool("one"))
        assert await host.notification(changed) == {"_meta": {key: 70}}
        host.notify("notifications/cancelled", {"requestId": 70})
        host.begin_as("next", "subscriptions/listen", {"notifications": {"toolsListChanged": True}})
        await host.notification(acknowledged)
        relay.declare(tool("two"))
        assert await host.notification(changed) == {"_meta": {key: "next"}}
        assert host.count(changed) == 2


async def test_a_listen_without_a_filter_is_refused_and_many_are_bounded(box: Box) -> None:
    async with box.client("modern") as host:
        with pytest.raises(RpcError) as caught:
            await host.ask("subscriptions/listen")
        assert caught.value.code == -32602
        for number in range(64):
            host.begin_as(f"s{number}", "subscriptions/listen", {"notifications": {}})
        with pytest.raises(RpcError, match="too many subscriptions"):
            await host.begin_as("more", "subscriptions/listen", {"notifications": {}})


async def test_both_eras_are_spoken_on_one_pipe(box: Box) -> None:
    async with RelayServer(box.folder, tools=[tool("echo")]) as relay, box.talk(relay) as host:
        host.era = "modern"
        await host.ask("server/discover")
        await host.follow()
        relay.declare(tool("other"))
        told = [await host.notification("notifications/tools/list_changed") for _ in range(2)]
        assert {} in told
        assert {"_meta": {"io.modelcontextprotocol/subscriptionId": "follow"}} in told


async def test_what_was_asked_before_the_agent_left_is_still_answered(box: Box) -> None:
    async with box.client() as host:
        listing = host.begin("tools/list")
        last = host.begin("ping")
        host.process.stdin.close()  # type: ignore[union-attr]
        assert await last == {}
        assert [each["name"] for each in (await listing)["tools"]] == ["session_message", "session_events"]
        assert await host.process.wait() == 0
