"""Callers on other people's SDKs lend a tool to a real droid of a real server, see its request, and answer it."""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.kit.node import NODE, node_peer
from tests.kit.peer_environments import PEERS, python_peer
from tests.kit.server import ServerProcess

PLAN = """<<plan [{"tool": "ant_echo", "args": {"n": 7}, "expect": {"is_error": false}}, {"say": "Heard: $last"}]>>"""


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[ServerProcess]:
    async with ServerProcess(tmp_path / "home") as started:
        yield started


async def run_caller(
    server: ServerProcess, program: Sequence[str | Path], *how: str, plan: str = PLAN
) -> dict[str, Any]:
    """Run a caller's script to its end; what it saw, as it tells."""
    project = await server.ask("project_create", name="peers")
    process = await asyncio.create_subprocess_exec(
        *program, server.url, project["id"], plan, *how, stdin=-1, stdout=-1, stderr=-1, env={"PATH": os.defpath}
    )
    try:
        async with asyncio.timeout(45):
            out, err = await process.communicate(server.token.encode() + b"\n")
    except TimeoutError:
        process.kill()
        _, err = await process.communicate()
        pytest.fail(f"the caller hung: {err.decode()[-2000:]}")
    assert process.returncode == 0, err.decode()[-4000:]
    return json.loads(out.splitlines()[-1])


def check(seen: dict[str, Any], version: str, carrier: str) -> None:
    assert seen["version"] == version
    ids = [request["request_id"] for request in seen["requests"]]
    # Who reads or polls may be given what it heard already.
    assert len(ids if carrier in ("push", "request") else set(ids)) == 1, "one call is one request, and comes once"
    request = seen["requests"][0]
    assert request["type"] == "caller_tool_request"
    assert request["tool"] == "echo"
    assert request["arguments"] == {"n": 7}
    assert seen["taken"]["accepted"] is True
    assert 'Heard: {"echoed":{"n":7}}' in seen["text"]


async def test_python_1_12_gets_the_request_on_its_stream(server: ServerProcess):
    program = [python_peer("mcp-1.12"), PEERS / "python" / "caller_1x.py"]
    check(await run_caller(server, program), "2025-06-18", "push")


@pytest.mark.parametrize(
    "mode, carrier, version",
    [
        ("legacy", "push", "2025-11-25"),
        ("legacy", "poll", "2025-11-25"),
        ("auto", "request", "2026-07-28"),
        ("auto", "listen", "2026-07-28"),
        ("auto", "poll", "2026-07-28"),
    ],
)
async def test_python_2_3_gets_the_request_on_every_carrier(
    server: ServerProcess, mode: str, carrier: str, version: str
):
    program = [python_peer("mcp-2.3"), PEERS / "python" / "caller_2x.py"]
    check(await run_caller(server, program, mode, carrier), version, carrier)


@pytest.mark.parametrize("peer, version", [("sdk-1.17", "2025-06-18"), ("sdk-1.32", "2025-11-25")])
async def test_typescript_1_x_gets_the_request_on_its_stream(server: ServerProcess, peer: str, version: str):
    check(await run_caller(server, [NODE, node_peer(peer).script("caller_1x.mjs")]), version, "push")


@pytest.mark.parametrize(
    "mode, carrier, version",
    [
        ("legacy", "push", "2025-11-25"),
        ("legacy", "poll", "2025-11-25"),
        ("auto", "request", "2026-07-28"),
        ("auto", "listen", "2026-07-28"),
        ("auto", "poll", "2026-07-28"),
    ],
)
async def test_typescript_2_4_gets_the_request_on_every_carrier(
    server: ServerProcess, mode: str, carrier: str, version: str
):
    program = [NODE, node_peer("client-2.4").script("caller_2x.mjs")]
    check(await run_caller(server, program, mode, carrier), version, carrier)


@pytest.mark.parametrize("mode, level", [("legacy", []), ("auto", []), ("auto", ["info"])])
async def test_python_2_3_reads_a_text_that_no_event_of_a_stream_holds(
    server: ServerProcess, mode: str, level: list[str]
):
    program = [python_peer("mcp-2.3"), PEERS / "python" / "large_2x.py"]
    plan = f"<<plan {json.dumps([{'sleep': 1}, {'say': 'TEXT'}])}>>"
    seen = await run_caller(server, program, mode, *level, plan=plan)
    assert seen | {"version": ""} == {
        "version": "",
        "paged": 600_000,
        "watched": ["final_response"],
        "waited": ["result"],
        "shown": 600_000,
    }
