"""A caller written by hand on plain HTTP, for both eras: every byte that it sends or sees can be asserted.

It does what the protocol's text says (it answers pings) and nothing a library would do beyond that: no retries, no
reconnecting, no answers to droids by itself. What it is told of caller tools lies in `requests`, everything it heard
in `heard`.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp

Era = Literal["legacy", "modern"]
LEGACY = "2025-11-25"
MODERN = "2026-07-28"
SLOW_S = 20.0  # who waits longer than this has failed
META = "io.modelcontextprotocol/"


@dataclass(frozen=True)
class Posted:
    """What came back for one POST that was not a stream."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Refused(AssertionError):
    """A tool call that ended as an error; `text` is its sentence, `kind` its machine word."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        if "content" in told:
            self.text = str(told["content"][0]["text"])
            self.kind = (told.get("_meta") or {}).get("dev.oubliette/error", {}).get("kind", "")
        else:
            self.text = str(told["message"])
            self.kind = (told.get("data") or {}).get("kind", "")
        super().__init__(f"{self.kind}: {self.text}")


class McpCaller:
    """One MCP client. Entering it begins a legacy session and opens its stream; a modern one just begins."""

    def __init__(
        self, url: str, token: str, *, era: Era = "legacy", stream: bool = True, version: str = LEGACY
    ) -> None:
        self.url = url
        self.token = token
        self.era = era
        self.version = version
        self.session = ""
        self.heard: list[dict[str, Any]] = []  # the data of every log notification
        self.frames: list[dict[str, Any]] = []  # every message of every stream
        self.requests: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.seen: set[str] = set()
        self._wants_stream = stream
        self._ids = 0
        self._changed = asyncio.Event()
        self._carriers: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        try:
            if self.era == "legacy":
                await self.begin()
                if self._wants_stream:
                    await self.open_stream()
        except BaseException:
            await self._http.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.drop()
        await self._tasks.__aexit__(None, None, None)
        await self._http.close()

    # -- requests -----------------------------------------------------------------------------------------------

    def message(self, method: str, params: Mapping[str, Any] | None = None, *, level: str | None = None) -> Any:
        """A request of this era, with an id of its own."""
        self._ids += 1
        message: dict[str, Any] = {"jsonrpc": "2.0", "id": self._ids, "method": method}
        if self.era == "modern":
            meta: dict[str, Any] = {f"{META}protocolVersion": MODERN, f"{META}clientCapabilities": {}}
            if level is not None:
                meta[f"{META}logLevel"] = level
            params = {**(params or {}), "_meta": meta}
        return message if params is None else {**message, "params": params}

    def headers(self, message: Any = None) -> dict[str, str]:
        headers = {
            "Authorization": f"Bearer {self.token}",
            "Accept": "application/json, text/event-stream",
            "Content-Type": "application/json",
        }
        if self.era == "legacy":
            if self.session:
                headers |= {"Mcp-Session-Id": self.session, "MCP-Protocol-Version": self.version}
        elif isinstance(message, dict):
            headers |= {"MCP-Protocol-Version": MODERN, "Mcp-Method": message["method"]}
            name = message["params"].get("name", message["params"].get("uri"))
            if name is not None:
                headers["Mcp-Name"] = name
        return headers

    async def post(self, message: Any, **headers: str) -> Posted:
        """POST a message, or bytes as they are; the reply whole, whatever it is."""
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        async with (
            asyncio.timeout(SLOW_S + 45),
            self._http.post(self.url, data=BytesIO(body), headers=self.headers(message) | headers) as reply,
        ):
            return Posted(reply.status, dict(reply.headers), await reply.read())

    async def ask(self, method: str, params: Mapping[str, Any] | None = None) -> Any:
        """The JSON-RPC answer to a request: its whole object, error or result."""
        posted = await self.post(self.message(method, params))
        if posted.headers.get("Content-Type", "").startswith("text/event-stream"):
            for frame in posted.body.decode().split("\n\n"):
                data = "".join(line[6:] for line in frame.split("\n") if line.startswith("data: "))
                told = json.loads(data) if data else {}
                if "id" in told:
                    return told
                if told:
                    self._take(told)
            raise AssertionError("a stream ended without the answer")
        assert posted.body, f"{method}: {posted.status} without a body"
        return posted.json

    async def result(self, tool: str, /, **arguments: Any) -> dict[str, Any]:
        """A tool's MCP result, `isError` or not."""
        told = await self.ask("tools/call", {"name": tool, "arguments": arguments})
        if "error" in told:
            raise Refused(told["error"])
        return told["result"]

    async def call(self, tool: str, /, **arguments: Any) -> Any:
        """A tool's structured result. Raises `Refused`."""
        result = await self.result(tool, **arguments)
        if result.get("isError"):
            raise Refused(result)
        assert json.loads(result["content"][0]["text"]) == result["structuredContent"]
        return result["structuredContent"]

    async def answer(self, request: Mapping[str, Any], result: Any = None, error: str | None = None) -> Any:
        """Answer a caller-tool request; the server's word on it, accepted or not."""
        told = await self.result(
            "caller_tool_response",
            session_id=request["session_id"],
            request_id=request["request_id"],
            result=result,
            error=error,
        )
        if "structuredContent" not in told:
            raise Refused(told)
        assert told.get("isError", False) is not told["structuredContent"]["accepted"]
        return told["structuredContent"]

    # -- legacy sessions ----------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Initialize, and say that it is done."""
        self.session = ""
        params = {
            "protocolVersion": self.version,
            "capabilities": {},
            "clientInfo": {"name": "by hand", "version": "0"},
        }
        posted = await self.post(self.message("initialize", params))
        assert posted.status == 200, posted
        self.session = posted.headers["mcp-session-id"]
        told = await self.post({"jsonrpc": "2.0", "method": "notifications/initialized"})
        assert told.status == 202

    async def end(self) -> None:
        async with self._http.delete(self.url, headers=self.headers()) as reply:
            assert reply.status == 200

    # -- carriers -----------------------------------------------------------------------------------------------

    async def open_stream(self) -> None:
        """GET the standing stream; returns when the server has it."""
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._carry(self._stand(opened))
        async with asyncio.timeout(SLOW_S):
            await opened

    async def watch(self, session_id: str, *, seconds: float = 60) -> None:
        """Hold a `session_watch` whose notifications come on the request itself."""
        arguments = {"session_id": session_id, "wait_seconds": seconds, "until": "end"}
        message = self.message("tools/call", {"name": "session_watch", "arguments": arguments}, level="info")
        await self._hold(message)

    async def listen(self, session_id: str) -> None:
        """Subscribe to a session's requests; each change is read and its requests are taken."""
        uri = f"oubliette://sessions/{session_id}/caller-requests"
        message = self.message("subscriptions/listen", {"notifications": {"resourceSubscriptions": [uri]}})
        await self._hold(message)
        await self._read(uri)

    async def poll(self, session_id: str, *, seconds: float = 10) -> list[dict[str, Any]]:
        """One long poll; what it brought."""
        told = await self.call("caller_tool_poll", session_id=session_id, known=sorted(self.seen), wait_seconds=seconds)
        for request in told["requests"]:
            self._asked(request)
        return told["requests"]

    async def drop(self) -> None:
        """Break every stream off, as a network does."""
        carriers, self._carriers = self._carriers, set()
        for task in carriers:
            task.cancel()
        if carriers:
            await asyncio.wait(carriers)

    async def ended(self) -> None:
        """Wait until the server has ended every stream."""
        if self._carriers:
            await asyncio.wait(self._carriers)

    async def request(self) -> dict[str, Any]:
        """The next request that came by any carrier."""
        async with asyncio.timeout(SLOW_S):
            return await self.requests.get()

    async def until(self, kind: str, **fields: Any) -> dict[str, Any]:
        """The first thing heard of this type with these fields."""
        async with asyncio.timeout(SLOW_S):
            while True:
                for one in self.heard:
                    if one["type"] == kind and all(one.get(name) == value for name, value in fields.items()):
                        return one
                self._changed.clear()
                await self._changed.wait()

    # -- inside -------------------------------------------------------------------------------------------------

    def _carry(self, work: Any) -> None:
        task = self._tasks.create_task(work)
        self._carriers.add(task)
        task.add_done_callback(self._carriers.discard)

    async def _hold(self, message: Any) -> None:
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._carry(self._follow(message, opened))
        async with asyncio.timeout(SLOW_S):
            await opened

    async def _stand(self, opened: asyncio.Future[None]) -> None:
        headers = {"Accept": "text/event-stream"}
        async with self._broken(), self._http.get(self.url, headers=self.headers() | headers) as reply:
            assert reply.status == 200, reply.status
            opened.set_result(None)
            await self._drain(reply)

    async def _follow(self, message: Any, opened: asyncio.Future[None]) -> None:
        body = json.dumps(message).encode()
        async with self._broken(), self._http.post(self.url, data=body, headers=self.headers(message)) as reply:
            assert reply.status == 200, (reply.status, await reply.read())
            assert reply.headers["Content-Type"].startswith("text/event-stream"), await reply.read()
            opened.set_result(None)
            await self._drain(reply)

    @asynccontextmanager
    async def _broken(self) -> AsyncGenerator[None]:
        """A stream may end however it likes: the test looks at what came."""
        try:
            yield
        except (aiohttp.ClientError, ConnectionError):
            pass

    async def _drain(self, reply: aiohttp.ClientResponse) -> None:
        async for data in _events(reply):
            told = json.loads(data)
            self._take(told)
            if told.get("method") == "ping":
                await self.post({"jsonrpc": "2.0", "id": told["id"], "result": {}})
            elif told.get("method") == "notifications/resources/updated":
                await self._read(told["params"]["uri"])

    async def _read(self, uri: str) -> None:
        told = await self.ask("resources/read", {"uri": uri})
        if "result" in told:
            for request in json.loads(told["result"]["contents"][0]["text"])["requests"]:
                self._asked(request)

    def _take(self, told: dict[str, Any]) -> None:
        self.frames.append(told)
        if told.get("method") == "notifications/message":
            data = told["params"]["data"]
            self.heard.append(data)
            if data["type"] == "caller_tool_request":
                self._asked(data)
        self._changed.set()

    def _asked(self, request: dict[str, Any]) -> None:
        self.seen.add(request["request_id"])
        self.requests.put_nowait(request)


async def _events(reply: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """The data of each server-sent event."""
    rest = b""
    async for chunk in reply.content.iter_any():
        *whole, rest = (rest + chunk).split(b"\n\n")
        for event in whole:
            data = [line[6:] for line in event.decode().split("\n") if line.startswith("data: ")]
            if any(data):
                yield "\n".join(data)
