"""A client on a box's relay socket, spoken by hand: frames out, frames in."""

import asyncio
import json
import os
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from oubliette.server.containers.folders import Folders

SLOW_S = 20.0  # who waits longer than this has failed
LIMIT = 16 * 1024 * 1024


def box_folder(home: Path, session_id: str) -> Path:
    """The folder of a live session's box, found by the note in it."""
    for box_id, folder in Folders(home).all():
        note = folder.read()
        if note is not None and note.session_id == session_id:
            assert box_id == note.box_id
            return folder.path
    raise AssertionError(f"{session_id} has no box")


class BoxClient:
    """One connection. `folder` is a box's folder; nothing is sent by itself."""

    def __init__(self, folder: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.folder = folder
        self.reader = reader
        self.writer = writer
        self._ids = 100
        self._stash: deque[dict[str, Any]] = deque()

    @property
    def key(self) -> str:
        return (self.folder / "mcp" / "key").read_text()

    async def write(self, line: bytes) -> None:
        self.writer.write(line)
        await self.writer.drain()

    async def send(self, frame: Any) -> None:
        await self.write(json.dumps(frame).encode() + b"\n")

    async def request(self, method: str, /, **params: Any) -> int:
        """Send a request; its id."""
        self._ids += 1
        await self.send({"jsonrpc": "2.0", "id": self._ids, "method": method, "params": params})
        return self._ids

    async def notify(self, method: str, /, **params: Any) -> None:
        await self.send({"jsonrpc": "2.0", "method": method, "params": params})

    async def frame(self) -> dict[str, Any] | None:
        """The next frame, as it came; None at the end."""
        if self._stash:
            return self._stash.popleft()
        return await self._next()

    async def _next(self) -> dict[str, Any] | None:
        try:
            async with asyncio.timeout(SLOW_S):
                line = await self.reader.readline()
        except ConnectionError:
            return None
        # What a connection that was cut leaves of a line is no frame.
        return json.loads(line) if line.endswith(b"\n") else None

    async def answer(self, request_id: Any) -> dict[str, Any]:
        """The frame that answers this request; others are kept."""
        for kept in tuple(self._stash):
            if kept.get("id") == request_id and "method" not in kept:
                self._stash.remove(kept)
                return kept
        while (frame := await self._next()) is not None:
            if frame.get("id") == request_id and "method" not in frame:
                return frame
            self._stash.append(frame)
        raise AssertionError("the connection closed before the answer")

    async def told(self, method: str) -> dict[str, Any]:
        """The next notification of this name; others are kept."""
        for kept in tuple(self._stash):
            if kept.get("method") == method:
                self._stash.remove(kept)
                return kept
        while (frame := await self._next()) is not None:
            if frame.get("method") == method:
                return frame
            self._stash.append(frame)
        raise AssertionError(f"the connection closed before {method}")

    def kept(self) -> list[dict[str, Any]]:
        """Frames that came and that nobody asked for yet."""
        return list(self._stash)

    async def ask(self, method: str, /, **params: Any) -> dict[str, Any]:
        """The whole answer to a request."""
        return await self.answer(await self.request(method, **params))

    async def attach(self, **params: Any) -> dict[str, Any]:
        """Identify as a client, with the box's own key unless told otherwise; the whole answer."""
        told: dict[str, Any] = {"key": self.key, "role": "client", "instance": os.urandom(8).hex(), "protocol": 1}
        await self.send({"jsonrpc": "2.0", "id": 1, "method": "attach", "params": {**told, **params}})
        return await self.answer(1)

    async def closed(self) -> bool:
        """Whether the server closes the connection; frames that come before are kept."""
        while (frame := await self._next()) is not None:
            self._stash.append(frame)
        return True

    @property
    def transport(self) -> asyncio.Transport:
        return cast("asyncio.Transport", self.writer.transport)

    def abort(self) -> None:
        self.writer.transport.abort()


async def _opened(path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A server that has just started opens its doors one after the other."""
    while True:
        try:
            return await asyncio.open_unix_connection(path, limit=LIMIT)
        except ConnectionRefusedError:
            await asyncio.sleep(0.02)


@asynccontextmanager
async def connected(folder: Path) -> AsyncGenerator[BoxClient]:
    """Connect to the box's socket, however deep its folder lies."""
    directory = os.open(folder / "mcp", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        async with asyncio.timeout(SLOW_S):
            reader, writer = await _opened(f"/proc/self/fd/{directory}/relay.sock")
    finally:
        os.close(directory)
    client = BoxClient(folder, reader, writer)
    try:
        yield client
    finally:
        client.abort()


@asynccontextmanager
async def attached(folder: Path, **params: Any) -> AsyncGenerator[BoxClient]:
    """A client that the server has let in."""
    async with connected(folder) as client:
        told = await client.attach(**params)
        assert "result" in told, told
        yield client
