"""The door of a box with a real keeper behind it, joined to `Processes`: the relay socket's keeper side, alone."""

import asyncio
from typing import Any

import msgspec

from oubliette.server.droids.processes import Processes
from oubliette.server.errors import BoxFailed
from oubliette.wire import jsonrpc
from oubliette.wire.relay import Attach, Attached, Limits

BOX = "box_1"


class KeeperDoor:
    """One life of the server at this door; `cut` ends it as a kill would."""

    def __init__(self, processes: Processes, key: str = "keeper-key") -> None:
        self.key = key
        self.processes = processes
        self.lines: set[KeeperConnection] = set()
        self.attached = asyncio.Event()

    def accept(self) -> asyncio.Protocol:
        return KeeperConnection(self)

    def cut(self) -> None:
        for line in tuple(self.lines):
            line.abort()


class KeeperConnection(asyncio.Protocol):
    """A connected keeper, as `KeeperLink` has it."""

    def __init__(self, door: KeeperDoor) -> None:
        self._door = door
        self._transport: asyncio.Transport | None = None
        self._incoming = b""
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._last = 1
        self._is_attached = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._door.lines.add(self)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._door.lines.discard(self)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(BoxFailed("the keeper's connection closed"))
        self._door.processes.detached(BOX, self)

    def data_received(self, data: bytes) -> None:
        *lines, self._incoming = (self._incoming + data).split(b"\n")
        for line in lines:
            self._hear(jsonrpc.decode_frame(line))

    def _hear(self, frame: jsonrpc.Frame) -> None:
        if not self._is_attached:
            assert isinstance(frame.params, msgspec.Raw)
            asked = msgspec.json.decode(frame.params, type=Attach)
            self._is_attached = True
            told = Attached(
                session_id="s",
                depth=0,
                protocol=1,
                limits=Limits(),
                call_timeout_s=60,
                call_timeout_max_s=600,
                acks=self._door.processes.acks(BOX),
            )
            self._write(jsonrpc.result(frame.id, told))
            self._door.processes.attached(BOX, self, asked.processes)
            self._door.attached.set()
        elif isinstance(frame.method, str):
            assert isinstance(frame.params, msgspec.Raw)
            self._door.processes.told(BOX, frame.method, bytes(frame.params))
        else:
            waiting = self._waiting.pop(frame.id)
            if waiting.done():
                return
            if isinstance(frame.error, msgspec.Raw):
                error: dict[str, Any] = msgspec.json.decode(frame.error)
                waiting.set_exception(BoxFailed(f"the keeper refused: {error['message']}"))
            else:
                assert isinstance(frame.result, msgspec.Raw)
                waiting.set_result(bytes(frame.result))

    def _write(self, line: bytes) -> None:
        if self._transport is not None:
            self._transport.write(line)

    async def request(self, method: str, params: object) -> bytes:
        if self._transport is None:
            raise BoxFailed("the keeper is not connected")
        self._last += 1
        waiting = self._waiting[self._last] = asyncio.get_running_loop().create_future()
        self._write(jsonrpc.request(self._last, method, params))
        return await waiting

    def notify(self, method: str, params: object) -> None:
        self._write(jsonrpc.notification(method, params))
