"""One outbound stream: what is queued for one client, and the one place that writes it.

Announcements go ahead of everything else that waits. What waits is bounded: a client that reads slower than it is
told things is cut, hears so in its last frame if it still reads, and the stream's owner knows at once, so that what
was undelivered can go another way. Frames that wait together are written together.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, cast

from oubliette.server.endpoints.mcp import frames
from oubliette.server.limits import STREAM_QUEUE_BYTES

Send = Callable[[Any], Awaitable[None]]
RawHeaders = Sequence[tuple[bytes, bytes]]

HEADERS: Final[tuple[tuple[bytes, bytes], ...]] = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)
# What is handed to the socket at once; an announcement made meanwhile goes before the rest.
WRITE_BYTES: Final = 128 * 1024
DRAINED_BYTES: Final = 64 * 1024


class Stream:
    """Server-sent events of one response. A `Channel`."""

    def __init__(
        self,
        *,
        first: bytes | None = None,
        last: bytes | None = None,
        farewell: Callable[[str], bytes] | None = None,
        tag: dict[str, Any] | None = None,
        abort: Callable[[], None] | None = None,
        limit: int = STREAM_QUEUE_BYTES,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._last = last  # the last frame of a stream that ends in order
        self._farewell = farewell  # the last frame for a client that is cut, by the reason
        self._tag = tag  # goes into `params._meta` of every notification
        self._abort = abort
        self._limit = limit
        self._ahead: deque[bytes] = deque()
        self._queue: deque[bytes] = deque()
        self._waiting = 0  # bytes
        self._announced = 0  # ... of them that go ahead
        self._wake: asyncio.Future[None] | None = None
        self._drain: asyncio.Future[None] | None = None
        self._ended = False
        self._callbacks: list[Callable[[], None]] = []
        self._wanting: list[Callable[[], None]] = []  # who waits for room
        self.is_open = True
        self.cut_at: float | None = None
        self.sending_since: float | None = None
        self.written_at = self._loop.time()
        self.spoke_at = self.written_at  # the last frame that was not a heartbeat
        if first is not None:
            self.push(first, ahead=True)

    # What owners call.

    def notify(self, method: str, params: object) -> bool:
        return self.push(frames.event(frames.notification(method, self._tagged(params))))

    def announce(self, method: str, params: object) -> bool:
        return self.push(frames.event(frames.notification(method, self._tagged(params))), ahead=True)

    def on_close(self, callback: Callable[[], None]) -> None:
        if self.is_open:
            self._callbacks.append(callback)
        else:
            callback()

    async def drained(self) -> None:
        while self._waiting > DRAINED_BYTES and self.is_open:
            if self._drain is None:
                self._drain = self._loop.create_future()
            await asyncio.shield(self._drain)

    def has_room(self, again: Callable[[], None]) -> bool:
        if self._announced < self._limit // 4 or self._ended:
            return True
        self._wanting.append(again)
        return False

    def end(self) -> None:
        """No more is queued; what is, is written, and the response ends."""
        if self._ended:
            return
        if self._last is not None:
            self._queue.append(self._last)
            self._waiting += len(self._last)
        self._stop()

    # What the transport calls.

    def push(self, frame: bytes, *, ahead: bool = False) -> bool:
        if self._ended:
            return False
        if self._waiting + len(frame) > self._limit:
            self.cut("the stream was read too slowly: what waited for it passed its bound")
            return False
        if ahead:
            self._ahead.append(frame)
            self._announced += len(frame)
        else:
            self._queue.append(frame)
        self._waiting += len(frame)
        self._rouse()
        return True

    def finish(self, frame: bytes) -> None:
        """Queue the last frame, whatever its size, and end."""
        if not self._ended:
            self._queue.append(frame)
            self._waiting += len(frame)
            self._stop()

    def heartbeat(self) -> None:
        """Say something that means nothing, so that whoever stands between keeps the connection."""
        if not self._waiting and not self._ended and self.sending_since is None:
            self._queue.append(frames.HEARTBEAT)
            self._waiting += len(frames.HEARTBEAT)
            self._rouse()

    def cut(self, reason: str) -> None:
        """Drop what waits and end, with the reason as the last frame."""
        if self._ended:
            return
        self._clear()
        if self._farewell is not None:
            frame = self._farewell(reason)
            self._queue.append(frame)
            self._waiting = len(frame)
        self.cut_at = self._loop.time()
        self._stop()

    def lost(self) -> None:
        """The client is gone: nothing can be written any more."""
        self._clear()
        if not self._ended:
            self._stop()

    def abort(self) -> None:
        """Break the connection of a client that does not even take its last frame."""
        self.lost()
        if self._abort is not None:
            self._abort()

    @property
    def undelivered(self) -> int:
        """Bytes that were queued and not handed to the socket."""
        return self._waiting

    async def write(self, send: Send, headers: RawHeaders = HEADERS) -> None:
        """Write the whole response; returns when it has ended."""
        try:
            await self._write(send, headers)
        finally:
            self.lost()

    async def _write(self, send: Send, headers: RawHeaders) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while True:
            batch = self._take()
            last = self._ended and not self._waiting
            if batch or last:
                self.sending_since = self._loop.time()
                await send({"type": "http.response.body", "body": batch, "more_body": not last})
                self.written_at = self._loop.time()
                self.sending_since = None
                if batch and batch != frames.HEARTBEAT:
                    self.spoke_at = self.written_at
            if last:
                return
            if self._waiting <= DRAINED_BYTES:
                self._tell_drained()
            if self._announced <= DRAINED_BYTES:
                self._tell_of_room()
            if not self._waiting and not self._ended:
                self._wake = self._loop.create_future()
                await self._wake

    def _clear(self) -> None:
        self._ahead.clear()
        self._queue.clear()
        self._waiting = self._announced = 0

    def _take(self) -> bytes:
        """Frames to write together: announcements first, then the rest up to a size."""
        taken: list[bytes] = []
        size = 0
        for queue in (self._ahead, self._queue):
            while queue and (not taken or size + len(queue[0]) <= WRITE_BYTES):
                frame = queue.popleft()
                taken.append(frame)
                size += len(frame)
                if queue is self._ahead:
                    self._announced -= len(frame)
            if queue:
                break
        self._waiting -= size
        return taken[0] if len(taken) == 1 else b"".join(taken)

    def _tagged(self, params: object) -> object:
        if self._tag is None or not isinstance(params, dict):
            return params
        return {**cast("dict[str, Any]", params), "_meta": self._tag}

    def _tell_drained(self) -> None:
        if self._drain is not None:
            self._drain.set_result(None)
            self._drain = None

    def _tell_of_room(self) -> None:
        wanting, self._wanting = self._wanting, []
        for again in wanting:
            again()

    def _rouse(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _stop(self) -> None:
        self._ended = True
        self.is_open = False
        self._rouse()
        self._tell_drained()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
