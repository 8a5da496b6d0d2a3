"""The HTTP door: three routes, no framework, and the server that runs them.

`/mcp` is the product; `/health` says that the process answers, `/ready` that it can work.
"""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Generator, Mapping, MutableMapping, Sequence
from typing import Any, Final, cast

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from oubliette.server.endpoints import posts

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]
# None: ready. Otherwise why not.
Readiness = Callable[[], Awaitable[str | None]]

BACKLOG: Final = 1024
KEEP_ALIVE_S: Final = 75
# How long the head of a request may take, from the connection's or its own first byte.
HEAD_WAIT_S: Final = 30.0
CONNECTIONS_MAX: Final = 4096
# A peer that has vanished is noticed after so long: data unacknowledged, or probes of a silent connection.
PEER_GONE_MS: Final = 20_000
PROBE_AFTER_S: Final = 15
PROBE_EVERY_S: Final = 5
PROBES: Final = 3
STOP_WITHIN_S: Final = 5


class Routes:
    """The ASGI application."""

    def __init__(self, mcp: Asgi, ready: Readiness) -> None:
        self._mcp = mcp
        self._ready = ready
        self._routes: Mapping[str, Asgi] = {"/mcp": mcp, "/health": self._health, "/ready": self._readiness}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        route = self._routes.get(scope["path"])
        if route is None:
            await _answer(send, 404, {"error": "no such path: oubliette is at /mcp"})
        else:
            await route(scope, receive, send)

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _answer_get(scope, send, 200, {"status": "ok"})

    async def _readiness(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = await self._ready()
        if reason is None:
            await _answer_get(scope, send, 200, {"status": "ready"})
        else:
            await _answer_get(scope, send, 503, {"status": "not ready", "reason": reason})


async def _answer_get(scope: Scope, send: Send, status: int, body: Mapping[str, str]) -> None:
    if scope["method"] in ("GET", "HEAD"):
        await _answer(send, status, body)
    else:
        await _answer(send, 405, {"error": "only GET here"}, (b"allow", b"GET, HEAD"))


async def _answer(send: Send, status: int, body: Mapping[str, str], *headers: tuple[bytes, bytes]) -> None:
    content = msgspec.json.encode(body)
    length = (b"content-length", b"%d" % len(content))
    kind = (b"content-type", b"application/json")
    await send({"type": "http.response.start", "status": status, "headers": [kind, length, *headers]})
    await send({"type": "http.response.body", "body": content})


def listening_socket(host: str, port: int) -> socket.socket:
    """A bound socket, listening, whose connections notice a peer that has vanished.

    What is set here is inherited by every accepted connection. Raises `OSError` where the address is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", PROBE_AFTER_S),
            ("TCP_KEEPINTVL", PROBE_EVERY_S),
            ("TCP_KEEPCNT", PROBES),
            ("TCP_USER_TIMEOUT", PEER_GONE_MS),
        ):
            option = getattr(socket, name, None)  # what another system lacks, `ping` makes up for
            if option is not None:
                listener.setsockopt(socket.IPPROTO_TCP, option, value)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


class _Joining:
    """A transport that sends a response's head together with the first bytes of its body: one write, not two."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._head = b""
        self.is_closing = transport.is_closing
        self.abort = transport.abort
        self.get_extra_info = transport.get_extra_info

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/1.1 "):
            self._head = data
            self._loop.call_soon(self._flush)  # where no body follows at once
            return
        self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)


class _Connection(HttpToolsProtocol):
    """uvicorn's connection, with three things of ours.

    A request can break it off; the head of a request is not waited for for ever; and a post like the one before it
    goes to a line of its own, past uvicorn (see `posts`).
    """

    _deadline: asyncio.TimerHandle | None = None
    _known: posts.Known | None = None
    _begun = 0  # requests that the parser saw the beginning of
    _is_inside = False  # the parser has seen the beginning of a request, and not its end
    _held = b""  # what came after posts that are not answered yet, and is not one that can be begun

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.write = transport.write
        self.close = transport.close
        self.drain = self.flow.drain
        self.transport = _Joining(transport)  # type: ignore[assignment]
        self._app = cast("Asgi", self.config.app)
        self._line = posts.Line(self)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if self._held:
            data, self._held = self._held + data, b""
        data = self._begin_posts(data)
        if not data:
            return
        if len(self._line):
            self._held = data
            if len(data) > posts.HELD_BYTES_MAX:
                self.flow.pause_reading()
        else:
            self._feed(data)

    def _begin_posts(self, data: bytes) -> bytes:
        """Take posts like the last one out of what came; returns the rest."""
        known = self._known
        if known is None or self._is_inside or not self.cycle.response_complete or self.transport.is_closing():
            return data
        at = 0
        while len(self._line) < known.at_once and not self.flow.write_paused:
            body = known.cut(data, at)
            if body is None:
                break
            start, at = body
            work = self._line.begin(self._app, known.scope(at - start), data[start:at])
            task = self.loop.create_task(work)
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        return data[at:] if at else data

    def _feed(self, data: bytes) -> None:
        """Let the parser read it; a whole post teaches what the next may look like."""
        begun = self._begun
        is_fresh = not self._is_inside
        super().data_received(data)
        if self._deadline is None and self.cycle.response_complete:
            self._expect_head()  # the beginning of another request, and not all of its head
        if is_fresh and not self._is_inside and self._begun == begun + 1 and data.startswith(b"POST "):
            self._known = posts.Known.of(data, cast("Scope", self.scope))

    def _expect_head(self) -> None:
        self._deadline = asyncio.get_running_loop().call_later(HEAD_WAIT_S, self.transport.abort)

    def _head_is_here(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def on_message_begin(self) -> None:
        self._begun += 1
        self._is_inside = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_is_here()
        self.scope["extensions"] = {"oubliette.abort": self.transport.abort}  # type: ignore[typeddict-item]
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_inside = False
        super().on_message_complete()

    @property
    def default_headers(self) -> Sequence[tuple[bytes, bytes]]:
        return self.server_state.default_headers

    def moved(self) -> None:
        if self._held and not self.transport.is_closing():
            data, self._held = self._held, b""
            self.flow.resume_reading()
            self.data_received(data)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.moved()

    def timeout_keep_alive_handler(self) -> None:
        idle_s = self.loop.time() - self._line.used_at
        if len(self._line) or idle_s < KEEP_ALIVE_S:
            left_s = max(1.0, KEEP_ALIVE_S - idle_s)
            self.timeout_keep_alive_task = self.loop.call_later(left_s, self.timeout_keep_alive_handler)
        else:
            super().timeout_keep_alive_handler()

    def shutdown(self) -> None:
        if len(self._line):
            self._line.end()
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        self._line.lost()
        super().connection_lost(exc)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to the program: it knows what has to end first."""
        yield


class HttpServer:
    """uvicorn on one socket, started and stopped by its owner."""

    def __init__(self, app: Asgi, listener: socket.socket) -> None:
        self._listener = listener
        config = uvicorn.Config(
            app,  # type: ignore[arg-type]
            http=_Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            limit_concurrency=CONNECTIONS_MAX,
            timeout_graceful_shutdown=STOP_WITHIN_S,
        )
        self._server = _Server(config)

    @property
    def address(self) -> tuple[str, int]:
        host, port, *_ = self._listener.getsockname()
        return host, port

    async def serve(self) -> None:
        """Accept connections until `stop` is called; then wait for the running requests, but not for long."""
        await self._server.serve(sockets=[self._listener])

    def stop(self) -> None:
        """End streams and long polls first: what is open is waited for."""
        self._server.should_exit = True
