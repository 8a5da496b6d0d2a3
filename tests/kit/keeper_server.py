"""A server side for keepers, as small as can be: it attaches them, asks of them, stores what they send.

It outlives its connections like a server's database does: what it stored and acknowledged is told to the next one.
Every frame that arrives is decoded by the wire's types, so a keeper that strays from them fails the test.
"""

import asyncio
import base64
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, cast
from weakref import WeakSet

import msgspec

from oubliette.wire import jsonrpc, relay

WAIT_S = 20.0


class Refusal(Exception):
    def __init__(self, error: jsonrpc.ErrorObject) -> None:
        super().__init__(error.message)
        self.code = error.code
        self.kind = (error.data or {}).get("kind")


class ConnectionCut(Exception):
    """The connection ended before the answer came."""


class KeeperServer:
    def __init__(self, key: str = "keeper-key", *, abandoned_after_s: float = 900.0, acknowledges: bool = True) -> None:
        self.key = key
        self.abandoned_after_s = abandoned_after_s
        self.acknowledges = acknowledges
        self.attaches: list[relay.Attach] = []
        self.refused = 0
        self.output: dict[str, bytearray] = defaultdict(bytearray)
        self.acks: dict[str, int] = {}
        self.errors: dict[str, bytearray] = defaultdict(bytearray)
        self.exits: dict[str, list[relay.Exited]] = defaultdict(list)
        self.problems: list[str] = []
        self.raw_errors: list[jsonrpc.ErrorObject] = []  # what came with no id
        self.first_frame: bytes | None = None  # instead of the answer to attach
        self.cuts: list[int] = []  # bytes after which the next connections are cut
        self.line: KeeperLine | None = None
        self._changed = asyncio.Event()
        self._next_id = 100

    def accept(self) -> asyncio.Protocol:
        return KeeperLine(self)

    def changed(self) -> None:
        self._changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not holds():
                self._changed.clear()
                await self._changed.wait()

    async def attached(self, times: int = 1) -> "KeeperLine":
        """The live connection, after so many attaches in all."""
        await self.until(lambda: len(self.attaches) >= times and self.line is not None)
        assert self.line is not None
        return self.line

    async def exited(self, process: str) -> relay.Exited:
        await self.until(lambda: bool(self.exits[process]))
        return self.exits[process][-1]

    async def request(self, method: str, params: object) -> Any:
        """Ask whichever keeper is attached. Raises `Refusal`, and `ConnectionCut` when it went."""
        line = await self.attached()
        self._next_id += 1
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        line.waiting[self._next_id] = answer
        line.write(jsonrpc.request(self._next_id, method, params))
        async with asyncio.timeout(WAIT_S):
            return await answer

    async def start(self, process: str, *argv: str, cwd: str = "/", **env: str) -> relay.ProcessState:
        params = relay.Start(process=process, argv=list(argv), env=env, cwd=cwd)
        return msgspec.convert(await self.request("start", params), relay.ProcessState)

    async def stdin(self, process: str, offset: int, data: bytes, *, eof: bool = False) -> int:
        params = relay.Stdin(process=process, offset=offset, data=base64.b64encode(data).decode(), eof=eof)
        return msgspec.convert(await self.request("stdin", params), relay.Accepted).stdin_offset

    async def signal(self, process: str, name: str) -> None:
        await self.request("signal", {"process": process, "signal": name})

    def ack(self, process: str, offset: int) -> None:
        self.acks[process] = offset
        if self.line is not None:
            self.line.write(jsonrpc.notification("ack", relay.Ack(process=process, offset=offset)))

    def cut(self) -> None:
        """End the connection, as a killed server does."""
        if self.line is not None:
            self.line.cut()

    # what arrives

    def take_output(self, frame: relay.Stdout, told: Mapping[str, int]) -> None:
        data = base64.b64decode(frame.data, validate=True)
        if frame.stream == "err":
            self.errors[frame.process] += data
            return
        stored = self.output[frame.process]
        if frame.offset > len(stored):
            self.problems.append(f"gap: {len(stored)} bytes are stored and {frame.offset} came")
        if frame.offset < told.get(frame.process, 0):
            self.problems.append(f"doubled: {frame.offset} was acknowledged")
        stored += data[len(stored) - frame.offset :]
        if self.acknowledges:
            self.ack(frame.process, len(stored))


class KeeperLine(asyncio.Protocol):
    """One connection."""

    def __init__(self, server: KeeperServer) -> None:
        self.server = server
        self.waiting: dict[int, asyncio.Future[Any]] = {}
        self._buffer = b""
        self._told: dict[str, int] = {}  # the acknowledgements of the answer to attach
        self._transport: asyncio.Transport | None = None
        self._bytes_left = server.cuts.pop(0) if server.cuts else None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        _open.add(self)

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def pause_reading(self) -> None:
        assert self._transport is not None
        self._transport.pause_reading()

    def cut(self) -> None:
        transport, self._transport = self._transport, None
        if self.server.line is self:
            self.server.line = None
        for answer in self.waiting.values():
            if not answer.done():
                answer.set_exception(ConnectionCut())
        self.waiting.clear()
        if transport is not None:
            transport.abort()
        self.server.changed()

    def connection_lost(self, exc: Exception | None) -> None:
        self.cut()

    def data_received(self, data: bytes) -> None:
        if self._bytes_left is not None:
            data = data[: self._bytes_left]
            self._bytes_left -= len(data)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            if self._transport is not None:
                self._hear(line)
        if self._bytes_left == 0:
            self.cut()
        self.server.changed()

    def _hear(self, line: bytes) -> None:
        if len(line) > relay.FRAME_BYTES_MAX:
            self.server.problems.append("a frame is too long")
        frame = jsonrpc.decode_frame(line)
        if frame.method == "attach":
            if len(line) > relay.ATTACH_BYTES_MAX:
                self.server.problems.append("attach is too long")
            self._attach(frame)
        elif frame.method == "stdout":
            self.server.take_output(msgspec.json.decode(_raw(frame.params), type=relay.Stdout), self._told)
        elif frame.method == "exited":
            exited = msgspec.json.decode(_raw(frame.params), type=relay.Exited)
            self.server.exits[exited.process].append(exited)
        elif frame.method is not msgspec.UNSET:
            self.server.problems.append(f"unknown method {frame.method!r}")
        else:
            self._answer(frame)

    def _attach(self, frame: jsonrpc.Frame) -> None:
        attach = msgspec.json.decode(_raw(frame.params), type=relay.Attach)
        if self.server.first_frame is not None:
            self.write(self.server.first_frame)
            return
        if attach.key != self.server.key or attach.role != "keeper":
            self.server.refused += 1
            error = jsonrpc.ErrorObject(code=jsonrpc.UNAUTHENTICATED, message="wrong key")
            self.write(jsonrpc.error(frame.id, error))
            if self._transport is not None:
                self._transport.close()
            return
        self.server.attaches.append(attach)
        self.server.line = self
        self._told = dict(self.server.acks)
        attached = relay.Attached(
            session_id="gogol_20261118_000000_00000000",
            depth=0,
            protocol=relay.PROTOCOL,
            limits=relay.Limits(),
            call_timeout_s=60,
            call_timeout_max_s=600,
            abandoned_after_s=self.server.abandoned_after_s,
            acks=dict(self.server.acks),
        )
        self.write(jsonrpc.result(frame.id, attached))

    def _answer(self, frame: jsonrpc.Frame) -> None:
        if frame.id is None:
            self.server.raw_errors.append(msgspec.json.decode(_raw(frame.error), type=jsonrpc.ErrorObject))
            return
        answer = self.waiting.pop(frame.id, None)
        if answer is None or answer.done():
            self.server.problems.append(f"an answer to nothing: {frame.id!r}")
        elif frame.error is not msgspec.UNSET:
            answer.set_exception(Refusal(msgspec.json.decode(_raw(frame.error), type=jsonrpc.ErrorObject)))
        else:
            answer.set_result(msgspec.json.decode(_raw(frame.result)))


_open: WeakSet[KeeperLine] = WeakSet()


async def hang_up() -> None:
    """End every connection, before the test's loop does: an end that nobody read yet would be found by another test."""
    for line in tuple(_open):
        line.cut()
    await asyncio.sleep(0)  # a transport closes in the turn after


def _raw(value: msgspec.Raw | msgspec.UnsetType) -> msgspec.Raw:
    assert value is not msgspec.UNSET
    return value
