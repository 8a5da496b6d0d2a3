"""The same requests to our transport and to the official SDK's server: where answers differ, we know why."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio

from tests.kit.mcp_rig import MODERN, Rig, Wire, call, envelope, initialize, legacy, modern, request, serving
from tests.kit.peer_environments import PEERS, python_peer
from tests.kit.raw_http import Reply

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ours(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Rig]:
    async with serving(tmp_path_factory.mktemp("ours"), keys=None) as rig:
        yield rig


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def theirs() -> AsyncGenerator[Wire]:
    program = await asyncio.create_subprocess_exec(
        python_peer("mcp-2.3"), PEERS / "python" / "server_2x.py", stdout=asyncio.subprocess.PIPE
    )
    assert program.stdout is not None
    async with asyncio.timeout(30):
        port = int(await program.stdout.readline())
    yield Wire(("127.0.0.1", port), "unused")
    program.kill()
    await program.wait()


def told(reply: Reply) -> tuple[int, int | None, Any]:
    """What must agree: the status, the error's code, and what a result holds beside names and wording."""
    if not reply.body:
        return reply.status, None, None
    body = reply.json
    if "error" in body:
        return reply.status, body["error"]["code"], body["id"]
    result = body["result"]
    return reply.status, None, (body["id"], sorted(result), result.get("structuredContent"), result.get("contents"))


LEGACY: dict[str, Any] = {
    "ping": request("ping"),
    "a call": call("try_echo", a=[1, {"b": None}]),
    "a call without arguments": request("tools/call", {"name": "try_echo"}),
    "an id in words": request("ping", id="seven"),
    "a level": request("logging/setLevel", {"level": "info"}),
    "a level that is none": request("logging/setLevel", {"level": "loud"}),
    "a resource": request("resources/read", {"uri": "test://static-text"}),
    "a resource that is not there": request("resources/read", {"uri": "test://no"}),
    "an unknown method": request("tools/eat"),
    "an unknown tool": call("no_such_tool"),
    "a call by number": request("tools/call", {"name": 7}),
    "a notification": {"jsonrpc": "2.0", "method": "notifications/initialized"},
    "an unknown notification": {"jsonrpc": "2.0", "method": "notifications/unheard"},
    "an answer to nothing": {"jsonrpc": "2.0", "id": 99, "result": {}},
}
BODIES: dict[str, bytes] = {
    "no JSON": b"{",
    "an empty object": b"{}",
    "a batch": b"[]",
    "a string": b'"x"',
}
STATELESS: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "a list": modern(request("resources/list")),
    "a call": modern(call("try_echo", a=1)),
    "a resource": modern(request("resources/read", {"uri": "test://static-text"})),
    "a resource that is not there": modern(request("resources/read", {"uri": "test://no"})),
    "an unknown method": modern(request("tools/eat")),
    "an unknown tool": modern(call("no_such_tool")),
    "ping": modern(request("ping")),
    "initialize": modern(request("initialize")),
    "no meta": (request("tools/list"), modern(request("tools/list"))[1]),
    "no capabilities": (
        request("tools/list", {"_meta": {"io.modelcontextprotocol/protocolVersion": MODERN}}),
        modern(request("tools/list"))[1],
    ),
    "another method header": (
        modern(request("tools/list"))[0],
        [("MCP-Protocol-Version", MODERN), ("Mcp-Method", "tools/call")],
    ),
    "no name header": (modern(call("try_echo"))[0], modern(call("try_echo"))[1][:2]),
    "two method headers": (modern(request("tools/list"))[0], [*modern(request("tools/list"))[1], ("Mcp-Method", "x")]),
    "a future version": (
        request("tools/list", {"_meta": envelope(protocolVersion="2099-01-01")}),
        [("MCP-Protocol-Version", "2099-01-01"), ("Mcp-Method", "tools/list")],
    ),
    "a notification": (
        {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}},
        [("MCP-Protocol-Version", MODERN), ("Mcp-Method", "notifications/cancelled")],
    ),
}
# Where the SDK does otherwise, and why we do not follow.
OTHERWISE = {
    "an empty object": "no version is an invalid request to JSON-RPC; the SDK's model says invalid params",
    "a batch": "the SDK's model says invalid params; a batch is an invalid request",
    "a string": "the SDK's model says invalid params; a string is an invalid request",
}


@pytest.mark.parametrize("kind", LEGACY)
async def test_a_session_answers_alike(kind: str, ours: Rig, theirs: Wire) -> None:
    answers = [told(await wire.ask(LEGACY[kind], legacy(await wire.session()))) for wire in (ours, theirs)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kind", BODIES)
async def test_bad_bodies_are_answered_alike(kind: str, ours: Rig, theirs: Wire) -> None:
    answers = [told(await wire.ask(BODIES[kind], legacy(await wire.session()))) for wire in (ours, theirs)]
    assert answers[0][0] == answers[1][0] == 400
    assert (answers[0] == answers[1]) == (kind not in OTHERWISE), answers


@pytest.mark.parametrize("kind", STATELESS)
async def test_the_stateless_era_answers_alike(kind: str, ours: Rig, theirs: Wire) -> None:
    message, lines = STATELESS[kind]
    answers = [told(await wire.ask(message, *lines)) for wire in (ours, theirs)]
    assert answers[0] == answers[1]


async def test_initialize_answers_alike(ours: Rig, theirs: Wire) -> None:
    for version in ("2025-03-26", "2025-06-18", "2025-11-25"):
        replies = [await wire.ask(initialize(version)) for wire in (ours, theirs)]
        results = [reply.json["result"] for reply in replies]
        assert {result["protocolVersion"] for result in results} == {version}
        assert all(reply.headers["mcp-session-id"] for reply in replies)


async def test_sessions_are_refused_alike(ours: Rig, theirs: Wire) -> None:
    for lines in ([], [legacy("f" * 32)]):
        statuses = [(await wire.ask(request("ping"), *lines)).status for wire in (ours, theirs)]
        assert statuses[0] == statuses[1], lines
