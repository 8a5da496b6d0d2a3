"""Random bodies and headers: always an answer that fits, never a broken server."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kit.mcp_rig import MODERN, Rig, envelope, legacy, request, serving
from tests.kit.raw_http import Reply, connected

pytestmark = pytest.mark.asyncio(loop_scope="module")

TRIED = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
METHODS = (
    "initialize",
    "ping",
    "tools/list",
    "tools/call",
    "resources/read",
    "resources/subscribe",
    "logging/setLevel",
    "notifications/cancelled",
    "notifications/initialized",
    "server/discover",
    "prompts/get",
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
PARAMS = st.dictionaries(
    st.sampled_from(["name", "uri", "arguments", "cursor", "level", "requestId", "_meta", "protocolVersion", "x"]),
    JSON | st.sampled_from(["try_echo", "test://static-text", "info"]),
    max_size=5,
)
MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "jsonrpc": st.just("2.0") | JSON,
        "id": st.integers() | st.text() | JSON,
        "method": st.sampled_from(METHODS) | JSON,
        "params": PARAMS | JSON,
        "result": JSON,
        "error": JSON,
    },
)
HEADER_VALUE = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=20).map(str.strip)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Rig]:
    async with serving(tmp_path_factory.mktemp("random"), per_principal=100_000) as rig:
        yield rig


def fits(reply: Reply) -> None:
    """Whether this is an answer of the protocol, and no bug."""
    assert reply.status in (200, 202, 400, 404, 406, 415, 421), reply
    if reply.status != 202:
        body: dict[str, Any] = reply.json
        assert body["jsonrpc"] == "2.0"
        assert ("result" in body) != ("error" in body)
        if "error" in body:
            assert body["error"]["code"] != -32603, body
            assert isinstance(body["error"]["message"], str)


@TRIED
@given(body=st.binary(max_size=200))
async def test_random_bytes(body: bytes, rig: Rig) -> None:
    session = await rig.session()
    fits(await rig.ask(body, legacy(session)))
    assert (await rig.ask(request("ping"), legacy(session))).status == 200


@TRIED
@given(message=MESSAGES)
async def test_random_messages_of_a_session(message: dict[str, Any], rig: Rig) -> None:
    session = await rig.session()
    fits(await rig.ask(message, legacy(session)))
    assert (await rig.ask(request("ping"), legacy(session))).status == 200


@TRIED
@given(message=MESSAGES, meta=JSON | st.just("ours"), method=st.sampled_from(METHODS) | HEADER_VALUE, name=HEADER_VALUE)
async def test_random_messages_without_a_session(
    message: dict[str, Any], meta: Any, method: str, name: str, rig: Rig
) -> None:
    if isinstance(message.get("params"), dict):
        message["params"]["_meta"] = envelope() if meta == "ours" else meta
    lines = [("MCP-Protocol-Version", MODERN), ("Mcp-Method", method), ("Mcp-Name", name)]
    fits(await rig.ask(message, *lines))


@TRIED
@given(
    head=st.lists(
        st.tuples(
            st.sampled_from(["Accept", "Content-Type", "Mcp-Session-Id", "MCP-Protocol-Version", "Mcp-Name", "X-Y"]),
            HEADER_VALUE,
        ),
        max_size=5,
    )
)
async def test_random_headers(head: list[tuple[str, str]], rig: Rig) -> None:
    body = json.dumps(request("ping")).encode()
    lines = [("Host", rig.host), ("Authorization", "Bearer key-a"), ("Content-Length", str(len(body))), *head]
    async with connected(rig.address) as connection:
        await connection.send("POST", "/mcp", lines, body)
        fits(await connection.reply())


@TRIED
@given(noise=st.binary(min_size=1, max_size=300))
async def test_what_is_no_http_at_all(noise: bytes, rig: Rig) -> None:
    async with connected(rig.address) as connection:
        connection.writer.write(noise + b"\r\n\r\n")
        await connection.writer.drain()
    assert (await rig.ask(request("ping"), legacy(await rig.session()))).status == 200
