"""One posted request and its response: JSON where only the answer is sent, an event stream where more is.

The handler runs in the task of its HTTP request. Nothing else is started for a request that is answered quickly:
only one that takes longer is watched for its client's leaving, and only one that notifies gets a writer.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from typing import Any, Final

from oubliette.server.endpoints.mcp import frames
from oubliette.server.endpoints.mcp.contract import REQUEST_CANCELLED, SERVER_ERROR
from oubliette.server.endpoints.mcp.stream import RawHeaders, Send, Stream
from oubliette.server.tasks import Tasks
from oubliette.server.tokens.token import Actor
from oubliette.wire.jsonrpc import Id

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Answer = tuple[int, bytes]  # the HTTP status where it is sent as JSON, and the message

WATCH_AFTER_S: Final = 0.05
# A request that is silent for so long answers as a stream, so that heartbeats can keep its connection.
COMMIT_AFTER_S: Final = 15.0

_JSON: Final = (b"content-type", b"application/json")


async def send_json(send: Send, status: int, body: bytes, headers: RawHeaders = ()) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [_JSON, (b"content-length", b"%d" % len(body)), *headers],
        }
    )
    await send({"type": "http.response.body", "body": body})


async def send_empty(send: Send, status: int, headers: RawHeaders = ()) -> None:
    # A 204 has no body and says no length.
    length = () if status == 204 else ((b"content-length", b"0"),)
    await send({"type": "http.response.start", "status": status, "headers": [*length, *headers]})
    await send({"type": "http.response.body", "body": b""})


async def until_gone(receive: Receive) -> None:
    """Return when the client has closed its connection, or the response is complete."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Young:
    """Requests that have only just begun; who stays among them is watched. One timer for all of them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._since: dict[Exchange, float] = {}  # oldest first
        self._is_looking = False

    def add(self, exchange: "Exchange") -> None:
        self._since[exchange] = self._loop.time()
        if not self._is_looking:
            self._is_looking = True
            self._loop.call_later(WATCH_AFTER_S, self._look)

    def discard(self, exchange: "Exchange") -> None:
        self._since.pop(exchange, None)

    def _look(self) -> None:
        before = self._loop.time() - WATCH_AFTER_S
        for exchange in [one for one, since in self._since.items() if since <= before]:
            del self._since[exchange]
            exchange.watch()
        self._is_looking = bool(self._since)
        if self._is_looking:
            self._loop.call_later(WATCH_AFTER_S, self._look)


class Exchange:
    def __init__(
        self,
        *,
        actor: Actor,
        request_id: Id,
        receive: Receive,
        send: Send,
        tasks: Tasks,
        abort: Callable[[], None] | None,
        opened: Callable[["Exchange", Stream], None],
        leaving_cancels: bool,
    ) -> None:
        self.actor = actor
        self.request_id = request_id
        self._receive = receive
        self._send = send
        self._tasks = tasks
        self._abort = abort
        self._opened = opened
        self._leaving_cancels = leaving_cancels
        self._task: asyncio.Task[Any] | None = None
        self._cancelled: bytes | None = None  # the answer of a request that was cancelled
        self._stream: Stream | None = None
        self._writer: asyncio.Task[None] | None = None
        self._last: bytes | None = None
        self._watched = False
        self._gone = False

    async def run(self, work: Coroutine[Any, Any, Answer]) -> None:
        """Run the handler to its answer and send that; the handler's own errors are answers already."""
        self._task = asyncio.current_task()
        try:
            status, answer = await work
        except asyncio.CancelledError:
            if self._cancelled is None:
                raise
            status, answer = 200, self._cancelled
        finally:
            task, self._task = self._task, None
        if self._cancelled is not None:
            if task is not None:
                task.uncancel()
            answer = self._cancelled
        if self._gone and self._stream is None:
            return
        if self._stream is None and self._cancelled is None:
            await send_json(self._send, status, answer)
            return
        # Some clients fail on a JSON answer to a request that they have cancelled; an event they ignore.
        self.stream().finish(frames.event(answer))
        if self._writer is not None:
            await self._writer

    def stream(self, *, tag: dict[str, Any] | None = None, last: bytes | None = None) -> Stream:
        """This request's own stream, opened at the first use."""
        if self._stream is None:
            self._last = last
            self._stream = Stream(farewell=self._farewell, abort=self._abort, tag=tag, last=last)
            self._stream.on_close(self._stream_closed)
            if self._gone:
                self._stream.lost()
            else:
                self._opened(self, self._stream)
                self._writer = self._tasks.create_task(self._stream.write(self._send))
                self.watch()
        return self._stream

    def abandon(self) -> None:
        """From here on the client's leaving cancels the request, whatever the era says."""
        self._leaving_cancels = True
        self.watch()
        if self._gone:
            self.cancel()

    def cancel(
        self,
        code: int = REQUEST_CANCELLED,
        message: str = "request cancelled",
        data: Mapping[str, Any] | None = None,
    ) -> None:
        """Stop the handler; the answer then is this error."""
        if self._task is not None and self._cancelled is None:
            self._cancelled = frames.failure(self.request_id, code, message, data)
            self._task.cancel()

    def _farewell(self, reason: str) -> bytes:
        """The last frame where the client reads too slowly."""
        return frames.event(frames.failure(self.request_id, SERVER_ERROR, reason))

    def _stream_closed(self) -> None:
        # Cut, or the client gone: nobody will see the answer.
        if self._leaving_cancels and self._last is None:
            self.cancel()

    def watch(self) -> None:
        """Notice from now on when the client leaves: this takes longer than most."""
        if not self._watched and self._task is not None:
            self._watched = True
            self._tasks.create_task(self._await_leaving())

    async def _await_leaving(self) -> None:
        commit = asyncio.get_running_loop().call_later(COMMIT_AFTER_S, self._commit)
        try:
            await until_gone(self._receive)
        finally:
            commit.cancel()
        if self._task is None and self._stream is None:
            return
        self._gone = True
        if self._stream is not None:
            self._stream.lost()
        if self._leaving_cancels:
            self.cancel()

    def _commit(self) -> None:
        if self._task is not None:
            self.stream()
