"""The client as a box runs it: the packed program, a socket's folder, and a host in front."""

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from oubliette.server.containers.inside import pack
from tests.kit.mcp_host import Era, McpHost, hosted
from tests.kit.relay_server import Listed, RelayServer


class Box:
    """What a box gives the client: the packed program and the socket's folder."""

    def __init__(self, folder: Path) -> None:
        self.program = pack(folder / "program")
        self.folder = folder / "mcp"

    def argv(self, python: str = sys.executable) -> list[str]:
        return [python, "-I", "-S", str(self.program), "client"]

    def env(self) -> dict[str, str]:
        return {"OUBLIETTE_SOCKET": str(self.folder / "relay.sock")}

    @asynccontextmanager
    async def client(self, era: Era = "legacy", **env: str) -> AsyncGenerator[McpHost]:
        async with hosted(self.argv(), {**self.env(), **env}, era=era) as host:
            yield host

    @asynccontextmanager
    async def talk(self, relay: RelayServer, era: Era = "legacy", **env: str) -> AsyncGenerator[McpHost]:
        """A client whose host has begun, and has its list."""
        async with self.client(era, **env) as host:
            await host.open()
            await host.tools()
            await relay.take(Listed)
            yield host
