"""A server that speaks the frames of ours and misbehaves on demand: for what the real one never does on request."""

import asyncio
import uuid
from collections.abc import Callable
from typing import Any, Self

import msgspec
from aiohttp import web

TOKEN = "oub_" + "0" * 64


class FakeServer:
    """Holds one session's log and asks its caller for tools.

    `async with FakeServer() as server:` listens on a free port; the attributes below are its manners.
    """

    def __init__(self) -> None:
        self.streams_refused = False  # GET answers 405
        self.streams_mute = False  # GET sends its head and nothing else
        self.streams_cut = False  # GET sends its first bytes and ends
        self.replies_as_events = False  # POST answers as an event stream
        self.pushes_on_replies = False  # session_events is replied to by a stream, and what is pushed goes there
        self.nonsense = 0  # so many answers are replied to with what is no reply
        self.unavailable = 0  # so many POSTs are answered 503
        self.mute_answers = False  # answers are taken and never replied to
        self.revoked = False  # POST answers 401
        self.refused_posts = 0
        self.streams = 0  # so many were opened
        self.polls = 0  # so many are open
        self.hang_ups = 0  # so many answers or messages are taken and the connection closed before a reply
        self.stopping = 0  # so many calls of operations are cut off as by a server that stops
        self.initializes_refused = 0  # so many are answered 503, to be tried again after an hour
        self.forgotten = 0  # so many POSTs came under an MCP session that is not known
        self.failures: dict[str, list[dict[str, Any]]] = {}  # by operation: the errors of its next calls
        self.refusals: dict[str, dict[str, Any]] = {}  # by request id: what an answer is told
        self.answers: list[dict[str, Any]] = []  # arguments of caller_tool_response as they came
        self.progress: list[dict[str, Any]] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.events: list[dict[str, Any]] = []
        self.status = "running"
        self.level = "info"
        self.mcp_sessions: set[str] = set()
        self.pongs: list[Any] = []
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._large: dict[str, dict[str, Any]] = {}
        self._polled: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._streams: dict[str, web.StreamResponse] = {}
        self._changed = asyncio.Condition()
        self._done = asyncio.Event()

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/mcp", self._post)
        app.router.add_get("/mcp", self._get)
        app.router.add_delete("/mcp", self._delete)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await self.listen(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._done.set()
        await self._runner.cleanup()

    async def listen(self, port: int) -> None:
        self._site = web.TCPSite(self._runner, "127.0.0.1", port)
        await self._site.start()
        assert self._site._server is not None
        self.port: int = self._site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self.port}/mcp"

    async def ask(self, tool: str, arguments: Any, *, request_id: str | None = None, by_reference: bool = False) -> Any:
        """Push a request on the stream and wait for its answer, as a droid would."""
        request_id = request_id or str(uuid.uuid4())
        future = self._waiting.setdefault(request_id, asyncio.get_running_loop().create_future())
        await self.announce(tool, arguments, request_id=request_id, by_reference=by_reference)
        async with asyncio.timeout(10):
            return await asyncio.shield(future)

    async def announce(
        self, tool: str, arguments: Any, *, request_id: str, by_reference: bool = False, redelivery: int = 0
    ) -> None:
        event = {
            "type": "caller_tool_request",
            "session_id": "gogol_1",
            "request_id": request_id,
            "tool": tool,
            "deadline_at": 9e9,
            "redelivery": redelivery,
        }
        if by_reference:
            self._large[request_id] = arguments
            event["arguments_bytes"] = len(msgspec.json.encode(arguments))
        else:
            event["arguments"] = arguments
        await self.push(event)

    async def push(self, event: dict[str, Any]) -> None:
        if not self._streams:
            self._polled.put_nowait(event)
            return
        await self.push_together(event)

    async def push_together(self, *events: dict[str, Any]) -> None:
        """Push on the stream, as one piece of it."""
        pushed = {"level": "info", "logger": "oubliette.session"}
        frames = [
            {"jsonrpc": "2.0", "method": "notifications/message", "params": pushed | {"data": event}}
            for event in events
        ]
        await self.push_frame(*frames)

    async def push_frame(self, *frames: Any) -> None:
        newest = list(self._streams.values())[-1]
        await newest.write(b"".join(b"event: message\ndata: %b\n\n" % msgspec.json.encode(one) for one in frames))

    async def log(self, **event: Any) -> None:
        """Append to the session's log."""
        async with self._changed:
            self.events.append({"index": len(self.events), "at": 1.0, "session_id": "gogol_1"} | event)
            self._changed.notify_all()

    async def end_session(self) -> None:
        async with self._changed:
            self.status = "completed"
            self._changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something that callers change is so."""
        async with asyncio.timeout(10), self._changed:
            await self._changed.wait_for(condition)

    async def drop_streams(self) -> None:
        """Cut every stream as a failing network would."""
        for stream in self._streams.values():
            transport = stream._req.transport if stream._req is not None else None  # type: ignore[attr-defined]
            if transport is not None:
                transport.abort()
        self._streams.clear()

    @property
    def has_stream(self) -> bool:
        return bool(self._streams)

    @property
    def is_replying(self) -> bool:
        """Whether a stream that replies to a request is open."""
        return "reply" in self._streams

    async def _post(self, request: web.Request) -> web.StreamResponse:
        if self.revoked or request.headers.get("Authorization") != f"Bearer {TOKEN}":
            async with self._changed:
                self.refused_posts += 1
                self._changed.notify_all()
            return web.json_response(
                {"jsonrpc": "2.0", "id": None, "error": {"code": -32001, "message": "invalid or expired API key"}},
                status=401,
            )
        if self.unavailable:
            self.unavailable -= 1
            return web.Response(status=503, headers={"Retry-After": "0"})
        message = await request.json()
        if message.get("method") == "initialize":
            if self.initializes_refused:
                async with self._changed:
                    self.initializes_refused -= 1
                    self._changed.notify_all()
                return web.Response(status=503, headers={"Retry-After": "3600"})
            session = uuid.uuid4().hex
            self.mcp_sessions.add(session)
            capabilities: Any = {"tools": {}, "logging": {}}
            result = {"protocolVersion": "2025-11-25", "capabilities": capabilities, "serverInfo": {"name": "fake"}}
            return web.json_response(_reply(message, result), headers={"Mcp-Session-Id": session})
        if request.headers.get("Mcp-Session-Id") not in self.mcp_sessions:
            async with self._changed:
                self.forgotten += 1
                self._changed.notify_all()
            return web.Response(status=404)
        if "method" not in message:
            async with self._changed:
                self.pongs.append(message["id"])
                self._changed.notify_all()
            return web.Response(status=202)
        if "id" not in message:
            return web.Response(status=202)
        if message["method"] == "logging/setLevel":
            self.level = message["params"]["level"]
            return web.json_response(_reply(message, {}))
        return await self._tool(request, message)

    async def _tool(self, request: web.Request, message: Any) -> web.StreamResponse:
        name, arguments = message["params"]["name"], message["params"]["arguments"]
        if name != "caller_tool_response":
            async with self._changed:
                self.calls.append((name, arguments))
                self._changed.notify_all()
        if self.stopping:
            self.stopping -= 1
            error = {"code": -32000, "message": "stopping", "data": {"kind": "unavailable", "retryable": True}}
            body = b"data: %b\n\n" % msgspec.json.encode({"jsonrpc": "2.0", "id": message["id"], "error": error})
            return web.Response(body=body, content_type="text/event-stream")
        if self.pushes_on_replies and name == "session_events":
            return await self._streamed(request, message, arguments)
        if self.failures.get(name):
            value: dict[str, Any] = {"is_error": True, "error": self.failures[name].pop(0)}
        else:
            value = await getattr(self, f"_{name}")(arguments)
        if name == "caller_tool_response" and self.mute_answers:
            await self._done.wait()
        if self.hang_ups and name in ("caller_tool_response", "session_message"):
            self.hang_ups -= 1
            assert request.transport is not None
            request.transport.abort()
        is_error = bool(value.pop("is_error", False))
        result = {
            "content": [{"type": "text", "text": msgspec.json.encode(value).decode()}],
            "structuredContent": value,
            "isError": is_error,
        }
        if self.nonsense and name == "caller_tool_response":
            self.nonsense -= 1
            bodies = ("<html>", '{"jsonrpc":"2.0","id":1,"result":7}', "[]")
            return web.Response(text=bodies[self.nonsense % 3], content_type="application/json")
        if self.replies_as_events:
            note = {"jsonrpc": "2.0", "method": "notifications/progress", "params": {}}
            body = b"".join(b"data: %b\n\n" % msgspec.json.encode(one) for one in (note, _reply(message, result)))
            return web.Response(body=body, content_type="text/event-stream")
        return web.json_response(_reply(message, result))

    async def _streamed(self, request: web.Request, message: Any, arguments: Any) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        async with self._changed:
            self._streams["reply"] = stream
            self._changed.notify_all()
        try:
            result = {"structuredContent": await self._session_events(arguments)}
            await stream.write(b"data: " + msgspec.json.encode(_reply(message, result)) + b"\n\n")
        finally:
            del self._streams["reply"]
        return stream

    async def _get(self, request: web.Request) -> web.StreamResponse:
        if self.streams_refused:
            return web.Response(status=405)
        session = request.headers.get("Mcp-Session-Id", "")
        if session not in self.mcp_sessions:
            return web.Response(status=404)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        if not self.streams_mute:
            await stream.write(b"retry: 3000\n\n")
            if self.streams_cut:
                return stream
            async with self._changed:
                self._streams[session] = stream
                self.streams += 1
                self._changed.notify_all()
        try:
            await self._done.wait()
        finally:
            if self._streams.get(session) is stream:
                del self._streams[session]
        return stream

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        self.mcp_sessions.discard(request.headers.get("Mcp-Session-Id", ""))
        return web.Response(status=204)

    async def _caller_tool_response(self, arguments: Any) -> dict[str, Any]:
        async with self._changed:
            self.answers.append(arguments)
            self._changed.notify_all()
        request_id = arguments["request_id"]
        if request_id in self.refusals:
            return dict(self.refusals.pop(request_id))
        future = self._waiting.get(request_id)
        if future is None:
            return {"is_error": True, "accepted": False, "reason": "unknown"}
        if future.done():
            return {"accepted": True, "repeated": True}
        future.set_result({name: arguments.get(name) for name in ("result", "error")})
        return {"accepted": True}

    async def _caller_tool_progress(self, arguments: Any) -> dict[str, Any]:
        async with self._changed:
            self.progress.append(arguments)
            self._changed.notify_all()
        return {}

    async def _caller_tool_pending(self, arguments: Any) -> dict[str, Any]:
        asked = arguments["request_id"]
        return {"requests": [{"request_id": asked, "arguments": self._large[asked]}] if asked in self._large else []}

    async def _caller_tool_poll(self, arguments: Any) -> dict[str, Any]:
        self.polls += 1
        try:
            async with asyncio.timeout(arguments["wait_seconds"]):
                return {"requests": [await self._polled.get()]}
        except TimeoutError:
            return {"requests": []}
        finally:
            self.polls -= 1
            async with self._changed:
                self._changed.notify_all()

    async def _project_list(self, arguments: Any) -> dict[str, Any]:
        names = ("demo", "demolition")
        return {"projects": [{"id": f"id-of-{name}", "name": name} for name in names]}

    async def _session_message(self, arguments: Any) -> dict[str, Any]:
        if arguments["message"] == "refuse":
            error = {"kind": "too_many", "message": "16 messages are waiting", "retryable": True}
            return {"is_error": True, "error": error}
        spawned = "session_id" not in arguments
        await self._turn_ended(arguments.get("wait_seconds", 0))
        return {
            "session_id": "gogol_1",
            "spawned": spawned,
            "last_event_index": -1 if spawned else len(self.events) - 1,
        }

    async def _turn_ended(self, wait_s: float) -> None:
        count = len(self.events)
        try:
            async with asyncio.timeout(wait_s), self._changed:
                await self._changed.wait_for(lambda: any(one["type"] == "completion" for one in self.events[count:]))
        except TimeoutError:
            pass

    async def _session_events(self, arguments: Any) -> dict[str, Any]:
        since = arguments["since_index"]

        def found() -> list[dict[str, Any]]:
            return self.events[since + 1 :][: arguments["max_events"]]

        try:
            async with asyncio.timeout(arguments["wait_seconds"]), self._changed:
                await self._changed.wait_for(lambda: found() or self.status == "completed")
        except TimeoutError:
            pass
        return {"session_id": "gogol_1", "status": self.status, "events": found(), "last_index": len(self.events) - 1}

    async def _session_end(self, arguments: Any) -> dict[str, Any]:
        await self.end_session()
        return {}


def _reply(message: Any, result: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": message["id"], "result": result}
