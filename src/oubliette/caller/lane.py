"""Kept connections of our own for small requests that must be cheap: answers, progress, pongs.

Requests are pipelined and those of one turn of the loop leave in one write. A lane connects when it has something
to send, gives back what a lost connection left unanswered, and knows nothing of what it carries.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from oubliette.caller.crew import Crew
from oubliette.caller.http1 import BadResponse, Response, Responses
from oubliette.caller.patience import Patience

# Called with the response, or with None when the connection was lost before one came.
Done = Callable[[Response | None], None]

PIPELINED_MAX = 64
CONNECT_S = 10.0
# A connection with open requests that says nothing for this long is dead.
SILENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where requests go, taken from a URL."""

    host: str
    port: int
    path: str
    authority: str
    tls: bool

    @classmethod
    def of(cls, url: str) -> "Address":
        """Raises `ValueError` for anything but an http(s) URL."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            # Not shown: a token that was given in the place of the URL is a secret.
            raise ValueError("the server's address is not an http or https URL")
        tls = parts.scheme == "https"
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return cls(parts.hostname, parts.port or (443 if tls else 80), path, parts.netloc.rpartition("@")[2], tls)


class Lane(asyncio.Protocol):
    def __init__(self, address: Address, tls: ssl.SSLContext | None, headers: Callable[[], dict[str, str]]) -> None:
        self._address = address
        self._tls = tls
        self._headers = headers
        self._waiting: deque[tuple[bytes, Done]] = deque()
        self._in_flight: deque[Done] = deque()
        self._responses = Responses()
        self._transport: asyncio.Transport | None = None
        self._lost = asyncio.Event()
        self._wanted = asyncio.Event()
        self._flushing = False
        self._answered = 0
        self._head = b""
        self._patience = Patience()
        self._loop = asyncio.get_running_loop()

    @property
    def load(self) -> int:
        return len(self._waiting) + len(self._in_flight)

    def post(self, body: bytes, done: Done) -> None:
        """Send together with what else is posted in this turn of the loop: together it is worked on and answered."""
        self._waiting.append((body, done))
        if self._transport is None:
            self._wanted.set()
        elif not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    async def keep(self) -> None:
        """Connect whenever something waits, for as long as this task lives."""
        while True:
            await self._wanted.wait()
            self._lost.clear()
            try:
                async with asyncio.timeout(CONNECT_S):
                    await self._loop.create_connection(
                        lambda: self, self._address.host, self._address.port, ssl=self._context()
                    )
            except (OSError, TimeoutError):
                await asyncio.sleep(self._patience.next_s())
                continue
            await self._watch()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, not a check: uvloop's transports are none of asyncio's classes.
        self._transport = cast("asyncio.Transport", transport)
        self._responses = Responses()
        # The head is made once per connection: what it says changes only with the MCP session.
        self._head = self._make_head()
        self._wanted.clear()
        self._flush()

    def data_received(self, data: bytes) -> None:
        try:
            for response in self._responses.feed(data):
                self._answered += 1
                self._patience.reset()
                self._in_flight.popleft()(response)
                if response.closes:
                    self.close()
        except (BadResponse, IndexError):
            self.close()
            return
        if self._waiting and not self._flushing:
            self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        unanswered, self._in_flight = self._in_flight, deque()
        for done in unanswered:
            done(None)
        if self._waiting:
            self._wanted.set()
        self._lost.set()

    def _flush(self) -> None:
        self._flushing = False
        if self._transport is None or self._transport.is_closing():
            return
        parts: list[bytes] = []
        while self._waiting and len(self._in_flight) < PIPELINED_MAX:
            body, done = self._waiting.popleft()
            self._in_flight.append(done)
            parts.append(b"%b%d\r\n\r\n%b" % (self._head, len(body), body))
        if parts:
            self._transport.write(parts[0] if len(parts) == 1 else b"".join(parts))

    async def _watch(self) -> None:
        """Wait until the connection is lost, and drop one that fell silent."""
        seen, silent = self._answered, False
        while not self._lost.is_set():
            try:
                async with asyncio.timeout(SILENCE_S / 2):
                    await self._lost.wait()
            except TimeoutError:
                if self._in_flight and seen == self._answered:
                    if silent:
                        self.close()
                    silent = True
                else:
                    seen, silent = self._answered, False
        if self._wanted.is_set():
            await asyncio.sleep(self._patience.next_s())

    def _make_head(self) -> bytes:
        lines = [f"POST {self._address.path} HTTP/1.1", f"Host: {self._address.authority}"]
        lines += [f"{name}: {value}" for name, value in self._headers().items()]
        return "\r\n".join([*lines, "Content-Length: "]).encode("latin-1")

    def _context(self) -> ssl.SSLContext | None:
        if not self._address.tls:
            return None
        return self._tls or ssl.create_default_context()


class Lanes:
    """Lanes to one address, each connected when the others have their share.

    Most servers work on the requests of one connection in turn: an answer on a lane of its own does not wait behind
    another's commit, and those that arrive together share one. Where a server says that it works on them together,
    a lane's share is larger: what leaves together arrives, and is answered, together.
    """

    def __init__(
        self, count: int, address: Address, tls: ssl.SSLContext | None, headers: Callable[[], dict[str, str]]
    ) -> None:
        self._lanes = [Lane(address, tls, headers) for _ in range(count)]
        self.share = 1

    def post(self, body: bytes, done: Done) -> None:
        best = self._lanes[0]
        least = best.load
        for lane in self._lanes:
            if least < self.share:
                break
            if (load := lane.load) < least:
                best, least = lane, load
        best.post(body, done)

    def keep(self, crew: Crew) -> None:
        for lane in self._lanes:
            crew.start(lane.keep(), "lane")

    def drop(self) -> None:
        """Drop the connections: those that follow carry the headers of now."""
        for lane in self._lanes:
            lane.close()
