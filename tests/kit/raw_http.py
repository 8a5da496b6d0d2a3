"""HTTP/1.1 by hand, so that tests can send what no client would, and see what is really on the wire."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

SLOW_S = 10.0  # who waits longer than this has failed
HeaderLines = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type") == "text/event-stream"


class RawConnection:
    """One TCP connection; what is read is read within a bound."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._events = b""

    async def send(self, method: str, path: str, headers: HeaderLines, body: bytes = b"") -> None:
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
        self.writer.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)
        await self.writer.drain()

    async def head(self) -> Reply:
        """The reply up to its body."""
        async with asyncio.timeout(SLOW_S):
            raw = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = raw.decode("latin-1").split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines if line)
        return Reply(int(first.split(" ")[1]), {name.lower(): value for name, value in headers.items()})

    async def reply(self) -> Reply:
        """A whole reply of known length."""
        head = await self.head()
        length = int(head.headers.get("content-length", "0"))
        async with asyncio.timeout(SLOW_S):
            return Reply(head.status, head.headers, await self.reader.readexactly(length))

    async def chunk(self) -> bytes:
        """One chunk of a chunked body; empty at its end. Raises `IncompleteReadError` where it is cut off."""
        async with asyncio.timeout(SLOW_S):
            size = int((await self.reader.readuntil(b"\r\n")).strip(), 16)
            return (await self.reader.readexactly(size + 2))[:-2]

    async def frame(self) -> str | None:
        """The next server-sent event, whole, as text; None at the stream's end."""
        while b"\n\n" not in self._events:
            chunk = await self.chunk()
            if not chunk:
                return None
            self._events += chunk
        event, self._events = self._events.split(b"\n\n", 1)
        return event.decode()

    async def message(self) -> Any:
        """The next JSON-RPC message of the stream; None at its end. Comments and `retry` are passed over."""
        while (event := await self.frame()) is not None:
            data = [line.removeprefix("data: ") for line in event.split("\n") if line.startswith("data: ")]
            if data:
                return json.loads("".join(data))
        return None

    def close(self) -> None:
        self.writer.close()

    def abort(self) -> None:
        self.writer.transport.abort()


@asynccontextmanager
async def connected(address: tuple[str, int]) -> AsyncGenerator[RawConnection]:
    reader, writer = await asyncio.open_connection(*address)
    connection = RawConnection(reader, writer)
    try:
        yield connection
    finally:
        connection.abort()
