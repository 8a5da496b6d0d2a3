"""A host for ACP agents that stands on the public library, not on our code: the oracle for agents of our own."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import acp
from acp.client.connection import ClientSideConnection
from acp.schema import ClientCapabilities, RequestPermissionResponse


class Host:
    """Records every update; answers permission requests with the option of the kind in `permits`."""

    def __init__(self) -> None:
        self.updates: list[dict[str, Any]] = []
        self.asked: list[dict[str, Any]] = []
        self.permits = "allow_once"
        self.changed = asyncio.Event()

    async def session_update(self, session_id: str, update: Any, **_: Any) -> None:
        self.updates.append(update.model_dump(by_alias=True, exclude_none=True))
        self.changed.set()

    async def request_permission(
        self, session_id: str, tool_call: Any, options: Any, **_: Any
    ) -> RequestPermissionResponse:
        self.asked.append(tool_call.model_dump(by_alias=True, exclude_none=True))
        chosen = next(option for option in options if option.kind == self.permits)
        return RequestPermissionResponse.model_validate(
            {"outcome": {"outcome": "selected", "optionId": chosen.option_id}}
        )

    def on_connect(self, conn: Any) -> None:
        pass

    async def until(self, is_so: Any, limit_s: float = 5) -> None:
        """Wait until an update for which `is_so` holds has come."""
        async with asyncio.timeout(limit_s):
            while not any(is_so(update) for update in self.updates):
                self.changed.clear()
                await self.changed.wait()

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [update for update in self.updates if update["sessionUpdate"] == kind]

    @property
    def text(self) -> str:
        return "".join(update["content"]["text"] for update in self.of("agent_message_chunk"))


class HostedAgent:
    """An agent's process, connected."""

    def __init__(self, host: Host, connection: ClientSideConnection, process: asyncio.subprocess.Process) -> None:
        self.host = host
        self.connection = connection
        self.process = process

    async def open(self, cwd: Path, servers: Sequence[Any] = ()) -> str:
        await self.initialize()
        return (await self.connection.new_session(cwd=str(cwd), mcp_servers=list(servers))).session_id

    async def initialize(self) -> Any:
        return await self.connection.initialize(
            protocol_version=1, client_capabilities=ClientCapabilities.model_validate({"terminal": False})
        )

    async def prompt(self, session_id: str, text: str) -> str:
        answer = await self.connection.prompt(session_id=session_id, prompt=[acp.text_block(text)])
        return answer.stop_reason


@asynccontextmanager
async def hosted(argv: Sequence[str], env: dict[str, str]) -> AsyncGenerator[HostedAgent]:
    """Start an agent in a process group of its own, and leave nothing of it behind."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=env,
        limit=1 << 26,
        start_new_session=True,
    )
    host = Host()
    connection = acp.connect_to_agent(cast(Any, host), process.stdin, process.stdout)
    try:
        yield HostedAgent(host, connection, process)
    finally:
        await connection.close()
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        await process.wait()
