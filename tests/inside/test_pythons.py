"""Client, keeper and droid on every Python from 3.9 on that this machine has."""

import ast
import asyncio
import json
import sys
from pathlib import Path

import pytest
from acp.schema import McpServerStdio

from oubliette.inside import client
from oubliette.server.containers.inside import pack
from oubliette.wire.relay import CallerTool
from tests.kit import tools_server
from tests.kit.acp_host import hosted
from tests.kit.boxed import Box
from tests.kit.keeper_server import KeeperServer
from tests.kit.kept_box import kept_box
from tests.kit.pythons import pythons
from tests.kit.relay_server import RelayServer, tool

each_python = pytest.mark.parametrize("python", pythons())


@pytest.mark.parametrize("path", sorted(Path(client.__file__).parent.glob("*.py")), ids=lambda path: path.name)
def test_everything_in_the_box_is_python_3_9(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 9))


@each_python
async def test_the_client_runs_on(python: str, tmp_path: Path) -> None:
    box = Box(tmp_path)
    async with asyncio.timeout(20), RelayServer(box.folder, tools=[tool("echo")]) as relay:
        process = await asyncio.create_subprocess_exec(
            *box.argv(python), env=box.env(), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdin is not None
        assert process.stdout is not None
        ask = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        process.stdin.write(json.dumps(ask).encode() + b"\n")
        listed = json.loads(await process.stdout.readline())
        assert listed["result"]["tools"][0]["name"] == "ant_echo"
        ask = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "ant_echo"}}
        process.stdin.write(json.dumps(ask).encode() + b"\n")
        (await relay.take(CallerTool)).reply([python])
        called = json.loads(await process.stdout.readline())
        assert called["result"]["structuredContent"] == {"result": [python]}
        process.stdin.close()
        assert await process.wait() == 0


@each_python
async def test_the_keeper_runs_on(python: str, tmp_path: Path) -> None:
    server = KeeperServer()
    async with asyncio.timeout(20), kept_box(tmp_path, server, python=python):
        await server.start("cat", "/bin/cat")
        await server.stdin("cat", 0, b"hello\n")
        await server.until(lambda: bytes(server.output["cat"]) == b"hello\n")
        await server.stdin("cat", 6, b"", eof=True)
        assert (await server.exited("cat")).exit_code == 0
    assert server.problems == []


@each_python
async def test_the_droid_runs_on(python: str, tmp_path: Path) -> None:
    argv = [python, "-I", "-S", str(pack(tmp_path / "programs")), "droid"]
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    tools = McpServerStdio(name="oubliette", command=sys.executable, args=["-I", "-S", tools_server.__file__], env=[])
    steps = [
        {"parallel": [{"tool": "ant_meet", "args": {"n": 2}}, {"tool": "ant_meet", "args": {"n": 2}}]},
        {"tool": "ant_never", "s": 0.1, "expect": {"is_error": True}},
        {"sh": "echo from the shell", "expect": {"contains": "from the shell"}},
        {"wait_tool": "ant_echo"},
        {"repeat": 3, "step": {"tool": "ant_echo", "args": {"n": 1}}},
        {"say": "$last"},
    ]
    async with asyncio.timeout(20), hosted(argv, environment) as agent:
        session = await agent.open(tmp_path, (tools,))
        assert await agent.prompt(session, f"<<plan {json.dumps(steps)}>>") == "end_turn"
        assert agent.host.text == 'ant_echo: {"n": 1}'
        agent.host.updates.clear()
        async with asyncio.TaskGroup() as tasks:
            turn = tasks.create_task(agent.prompt(session, '<<plan [{"tool": "ant_never"}]>>'))
            await agent.host.until(lambda update: update.get("status") == "in_progress")
            await agent.connection.cancel(session_id=session)
        assert turn.result() == "cancelled"
