"""Other people's clients start ours as their server, list its tools and call them."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from oubliette.wire.relay import Attach, CallerTool
from tests.kit import sdk_stdio
from tests.kit.boxed import Box
from tests.kit.node import NODE, node_peer
from tests.kit.peer_environments import python_peer
from tests.kit.relay_server import RelayServer, failure, tool

SCHEMA = {
    "type": "object",
    "properties": {"text": {"anyOf": [{"type": "string"}, {"const": None}]}, "n": {"$ref": "#/$defs/n"}},
    "$defs": {"n": {"type": "integer", "x-kept": True}},
}
ECHO = tool("echo", description="Says it back.", inputSchema=SCHEMA, annotations={"readOnlyHint": True})
GROW = tool("grow")
SLOW_S = 60


async def serve(relay: RelayServer) -> None:
    """Answer as a caller would: echo, fail when asked to, declare one more tool when asked to."""
    while True:
        call = await relay.take(CallerTool)
        if call.params.tool == "grow":
            relay.declare(ECHO, GROW, tool("grown"))
        if call.params.arguments.get("fail"):
            call.fail(failure(-32000, "as you wish", "caller_error"))
            continue
        if "text" in call.params.arguments:
            call.connection.notify("progress", {"call_key": call.params.call_key, "progress": 1, "total": 2})
        call.reply(call.params.arguments)


async def run(box: Box, *command: str) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        *command,
        *box.argv(),
        env={**box.env(), "PATH": "/usr/bin:/bin"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(SLOW_S):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return json.loads(out)


def check(saw: dict[str, Any]) -> None:
    assert saw["before"][0]["name"] == "ant_echo"
    assert saw["before"][0]["inputSchema"] == SCHEMA
    assert saw["before"][0]["annotations"] == {"readOnlyHint": True}
    assert saw["after"] == ["ant_echo", "ant_grow", "ant_grown", "session_message", "session_events"]
    assert saw["echo"]["structuredContent"] == {"text": "grüße"}
    assert saw["failed"]["isError"] is True
    assert saw["failed"]["content"][0]["text"] == "as you wish"
    assert saw["failed"]["_meta"]["dev.oubliette/error"]["kind"] == "caller_error"
    assert saw["many"] == list(range(10))


@asynccontextmanager
async def served(box: Box) -> AsyncGenerator[RelayServer]:
    async with RelayServer(box.folder, tools=[ECHO, GROW]) as relay, asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(serve(relay))
        yield relay
        serving.cancel()


@pytest.mark.parametrize(
    ("peer", "mode", "version"),
    [
        ("mcp-2.3", "auto", "2026-07-28"),
        ("mcp-2.3", "legacy", "2025-11-25"),
        ("mcp-1.12", "1.x", "2025-06-18"),
    ],
)
async def test_the_python_sdk_lists_calls_and_hears_of_changes(
    tmp_path: Path, peer: str, mode: str, version: str
) -> None:
    box = Box(tmp_path)
    interpreter = await asyncio.to_thread(python_peer, peer)
    async with served(box):
        saw = await run(box, str(interpreter), sdk_stdio.__file__, mode)
        check(saw)
        assert saw["version"] == version
        assert saw["progress"] == [[1.0, 2.0, None]]


@pytest.mark.parametrize(
    ("peer", "mode"),
    [
        ("sdk-1.17", "legacy"),
        ("sdk-1.32", "legacy"),
        ("client-2.4", "legacy"),
        ("client-2.4", "auto"),
    ],
)
async def test_the_typescript_sdk_lists_calls_and_hears_of_changes(tmp_path: Path, peer: str, mode: str) -> None:
    box = Box(tmp_path)
    script = (await asyncio.to_thread(node_peer, peer)).script("stdio.mjs")
    package = f"@modelcontextprotocol/{peer.partition('-')[0]}"
    async with served(box) as relay:
        check(await run(box, str(NODE), str(script), package, mode))
        # In auto mode a second, short-lived process probes: it attaches like any other.
        assert len({each.params.instance for each in relay.of(Attach)}) in ((1, 2) if mode == "auto" else (1,))
