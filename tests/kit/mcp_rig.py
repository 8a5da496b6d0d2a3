"""Our transport with the fixtures behind it, served on a real socket in the test's own loop."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from oubliette.server.clock import Clock, SystemClock
from oubliette.server.endpoints.http import HttpServer, Routes, listening_socket
from oubliette.server.endpoints.mcp.headers import Doors
from oubliette.server.endpoints.mcp.sessions import McpSessions
from oubliette.server.endpoints.mcp.streams import Patience
from oubliette.server.endpoints.mcp.transport import McpEndpoint
from oubliette.server.storage.sqlite import SqliteDatabase
from tests.kit.mcp_fixtures import Fixtures, ready
from tests.kit.raw_http import HeaderLines, RawConnection, Reply, connected

MODERN = "2026-07-28"
KEYS = {"key-a": "anna", "key-a2": "anna", "key-b": "bert", "key-box": "nobody"}


class MovableClock:
    """Wall time that a test moves; monotonic time goes by itself."""

    def __init__(self) -> None:
        self.ahead = 0.0
        self._real = SystemClock()

    def now(self) -> float:
        return self._real.now() + self.ahead

    def monotonic(self) -> float:
        return self._real.monotonic() + self.ahead


class Wire:
    """An MCP server at an address, spoken to by hand."""

    def __init__(self, address: tuple[str, int], key: str) -> None:
        self.address = address
        self.key = key

    @property
    def host(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"

    def headers(self, *more: tuple[str, str], key: str | None = "", length: int | None = None) -> HeaderLines:
        lines = [
            ("Host", self.host),
            ("Accept", "application/json, text/event-stream"),
            ("Content-Type", "application/json"),
        ]
        if key is not None:
            lines.append(("Authorization", f"Bearer {key or self.key}"))
        if length is not None:
            lines.append(("Content-Length", str(length)))
        return [*lines, *more]

    async def post(self, connection: RawConnection, message: Any, *more: tuple[str, str], key: str | None = "") -> None:
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        await connection.send("POST", "/mcp", self.headers(*more, key=key, length=len(body)), body)

    async def ask(self, message: Any, *more: tuple[str, str], key: str | None = "") -> Reply:
        """Post on a connection of its own and read a whole JSON reply."""
        async with connected(self.address) as connection:
            await self.post(connection, message, *more, key=key)
            return await connection.reply()

    async def get(self, connection: RawConnection, session: str, *, key: str = "") -> Reply:
        """Open a legacy session's standing stream."""
        headers = [*self.headers(key=key), ("Mcp-Session-Id", session)]
        await connection.send("GET", "/mcp", headers)
        head = await connection.head()
        return head if head.is_stream else Reply(head.status, head.headers)

    async def session(self, *, key: str = "", version: str = "2025-11-25") -> str:
        """Begin a legacy session; returns its id."""
        reply = await self.ask(initialize(version), key=key)
        assert reply.status == 200, reply
        session = reply.headers["mcp-session-id"]
        told = await self.ask({"jsonrpc": "2.0", "method": "notifications/initialized"}, legacy(session), key=key)
        assert told.status == 202
        return session

    async def call(self, session: str, tool: str, /, *, key: str = "", **arguments: Any) -> Reply:
        return await self.ask(call(tool, **arguments), legacy(session), key=key)


class Rig(Wire):
    """The transport with the fixtures behind it, and what a test may look at inside."""

    def __init__(self, server: HttpServer, fixtures: Fixtures, endpoint: McpEndpoint, sessions: McpSessions) -> None:
        super().__init__(server.address, "key-a")
        self.server = server
        self.fixtures = fixtures
        self.endpoint = endpoint
        self.sessions = sessions


def initialize(version: str = "2025-11-25") -> dict[str, Any]:
    params = {"protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "test", "version": "0"}}
    return {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}


def call(tool: str, /, *, id: int | str = 1, **arguments: Any) -> dict[str, Any]:  # noqa: A002
    return request("tools/call", {"name": tool, "arguments": arguments}, id=id)


def request(method: str, params: Mapping[str, Any] | None = None, *, id: int | str = 1) -> dict[str, Any]:  # noqa: A002
    message: dict[str, Any] = {"jsonrpc": "2.0", "id": id, "method": method}
    return message if params is None else {**message, "params": params}


def legacy(session: str) -> tuple[str, str]:
    return ("Mcp-Session-Id", session)


def envelope(**more: Any) -> dict[str, Any]:
    return {
        "io.modelcontextprotocol/protocolVersion": MODERN,
        "io.modelcontextprotocol/clientCapabilities": {},
        "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "0"},
        **{name if "/" in name else f"io.modelcontextprotocol/{name}": value for name, value in more.items()},
    }


def modern(message: dict[str, Any], **more: Any) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """A message as the stateless era wants it, and its headers."""
    params = {**message.get("params", {}), "_meta": envelope(**more)}
    headers = [("MCP-Protocol-Version", MODERN), ("Mcp-Method", message["method"])]
    name = params.get("name", params.get("uri"))
    if name is not None:
        headers.append(("Mcp-Name", name))
    return {**message, "params": params}, headers


@asynccontextmanager
async def serving(
    folder: Path,
    *,
    keys: Mapping[str, str] | None = KEYS,
    clock: Clock | None = None,
    doors: Doors | None = None,
    patience: Patience | None = None,
    idle_s: float = 1800.0,
    per_principal: int = 256,
    streams_per_principal: int = 64,
    body_bytes: int = 8 * 1024 * 1024,
    port: int = 0,
) -> AsyncGenerator[Rig]:
    """Serve until the context is left. The same folder again is the same database: a restart of the server."""
    database = SqliteDatabase(folder / "mcp.db")
    listener = listening_socket("127.0.0.1", port)
    fixtures = Fixtures(keys)
    sessions = McpSessions(database, clock or SystemClock(), idle_s=idle_s, per_principal=per_principal)
    endpoint = McpEndpoint(
        fixtures,
        sessions,
        doors=doors,
        patience=patience,
        streams_per_principal=streams_per_principal,
        body_bytes=body_bytes,
    )
    server = HttpServer(Routes(endpoint, ready), listener)
    try:
        async with asyncio.TaskGroup() as tasks, endpoint:
            serving = tasks.create_task(server.serve())
            try:
                yield Rig(server, fixtures, endpoint, sessions)
            finally:
                endpoint.close()
                server.stop()
                async with asyncio.timeout(10):
                    await serving
    finally:
        await database.close()
