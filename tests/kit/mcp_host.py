"""An MCP host over stdio for tests: it starts a server and speaks to it as an agent does, in either era."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

Era = Literal["legacy", "modern"]
ERAS: tuple[Era, ...] = ("legacy", "modern")

LINE_BYTES_MAX = 64 * 1024 * 1024
SLOW_S = 15.0  # a test that waits longer than this for an answer has failed
ENVELOPE = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientInfo": {"name": "tests", "version": "0"},
    "io.modelcontextprotocol/clientCapabilities": {},
}


class RpcError(Exception):
    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error["message"])
        self.code = error["code"]
        self.data = error.get("data")


class McpHost:
    """One server process and what was said with it."""

    def __init__(self, process: asyncio.subprocess.Process, era: Era) -> None:
        self.process = process
        self.era = era
        self.messages: list[dict[str, Any]] = []  # everything that it said, in order
        self.log = b""  # its stderr
        self._next_id = 0
        self._open: dict[Any, asyncio.Future[dict[str, Any]]] = {}
        self._notifications: list[dict[str, Any]] = []
        self._moved = asyncio.Event()

    def begin(self, method: str, params: Mapping[str, Any] | None = None, *, token: Any = None) -> "Pending":
        """Send a request; its answer is awaited later."""
        self._next_id += 1
        return self.begin_as(self._next_id, method, params, token=token)

    def begin_as(
        self, request_id: Any, method: str, params: Mapping[str, Any] | None = None, *, token: Any = None
    ) -> "Pending":
        meta: dict[str, Any] = dict(ENVELOPE) if self.era == "modern" else {}
        if token is not None:
            meta["progressToken"] = token
        full: dict[str, Any] = dict(params or {})
        if meta:
            full["_meta"] = meta
        future = self._open[request_id] = asyncio.get_running_loop().create_future()
        self.write({"jsonrpc": "2.0", "id": request_id, "method": method, "params": full})
        return Pending(request_id, future)

    async def ask(self, method: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return await self.begin(method, params)

    def call(self, name: str, arguments: Mapping[str, Any] | None = None, *, token: Any = None) -> "Pending":
        return self.begin("tools/call", {"name": name, "arguments": arguments or {}}, token=token)

    async def open(self) -> dict[str, Any]:
        """Begin as a host of this era begins; what the server says of itself."""
        if self.era == "modern":
            return await self.ask("server/discover")
        hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "tests", "version": "0"}}
        answer = await self.ask("initialize", hello)
        self.notify("notifications/initialized")
        return answer

    async def tools(self) -> list[dict[str, Any]]:
        return (await self.ask("tools/list"))["tools"]

    async def tool_names(self) -> list[str]:
        return [tool["name"] for tool in await self.tools()]

    async def follow(self) -> None:
        """Ask to be told of changed tools; a host of the older era is told anyway."""
        if self.era == "modern":
            self.begin_as("follow", "subscriptions/listen", {"notifications": {"toolsListChanged": True}})
            await self.notification("notifications/subscriptions/acknowledged")

    def cancel(self, pending: "Pending", reason: str = "changed my mind") -> None:
        self.notify("notifications/cancelled", {"requestId": pending.id, "reason": reason})

    def notify(self, method: str, params: Mapping[str, Any] | None = None) -> None:
        self.write({"jsonrpc": "2.0", "method": method, **({"params": params} if params is not None else {})})

    def write(self, message: object) -> None:
        self.write_raw(json.dumps(message).encode() + b"\n")

    def write_raw(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)

    async def notification(self, method: str) -> dict[str, Any]:
        """The parameters of the next notification of this kind; waits for it."""
        return (await self._next(lambda message: message.get("method") == method))["params"]

    async def stray(self) -> dict[str, Any]:
        """The next answer to no request of ours; waits for it."""
        return await self._next(lambda message: "method" not in message)

    def count(self, method: str) -> int:
        return sum(message.get("method") == method for message in self.messages)

    async def leave(self) -> int:
        """Close its stdin, as an agent does; the exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        async with asyncio.timeout(SLOW_S):
            return await self.process.wait()

    async def logged(self, words: bytes) -> None:
        """Wait until its log says this."""
        async with asyncio.timeout(SLOW_S):
            while words not in self.log:
                self._moved.clear()
                await self._moved.wait()

    async def _next(self, is_wanted: Any) -> dict[str, Any]:
        async with asyncio.timeout(SLOW_S):
            while True:
                for message in self._notifications:
                    if is_wanted(message):
                        self._notifications.remove(message)
                        return message
                self._moved.clear()
                await self._moved.wait()

    async def read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            message = json.loads(line)
            assert message["jsonrpc"] == "2.0"
            self.messages.append(message)
            future = None if "method" in message else self._open.pop(message["id"], None)
            if future is None:
                self._notifications.append(message)
                self._moved.set()
            elif not future.done():
                future.set_result(message)
        for future in self._open.values():
            if not future.done():
                future.set_exception(EOFError("the server ended"))

    async def read_log(self) -> None:
        assert self.process.stderr is not None
        while data := await self.process.stderr.read(65536):
            self.log += data
            self._moved.set()


class Pending:
    """A request whose answer is still to come."""

    def __init__(self, request_id: Any, future: "asyncio.Future[dict[str, Any]]") -> None:
        self.id = request_id
        self._future = future
        future.add_done_callback(lambda done: None if done.cancelled() else done.exception())

    def done(self) -> bool:
        return self._future.done()

    def __await__(self) -> Any:
        return self._result().__await__()

    async def _result(self) -> dict[str, Any]:
        async with asyncio.timeout(SLOW_S):
            message = await asyncio.shield(self._future)
        if "error" in message:
            raise RpcError(message["error"])
        return message["result"]


@asynccontextmanager
async def hosted(argv: Sequence[str], env: Mapping[str, str], *, era: Era = "legacy") -> AsyncGenerator[McpHost]:
    """A host with its server running; at the end the server is made to leave, and killed if it does not."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        env=dict(env),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=LINE_BYTES_MAX,
    )
    host = McpHost(process, era)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(host.read())
        tasks.create_task(host.read_log())
        try:
            yield host
        finally:
            if process.returncode is None:
                try:
                    await host.leave()
                except TimeoutError:
                    process.kill()
                    raise
