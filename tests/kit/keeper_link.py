"""A keeper for tests of the server's side: real processes, their bytes numbered and held, in this very process.

It keeps the contract of the real one and can be cut off and connected to another server at any moment. Frames cross
as JSON, as they would on the socket.
"""

import asyncio
import base64
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from oubliette.server.droids.processes import Processes
from oubliette.server.errors import BoxFailed, OublietteError
from oubliette.wire.relay import KEEPER_HELD_BYTES_MAX, Accepted, ProcessState


class Kept:
    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process
        self.taken = 0
        self.held_from = 0
        self.held = bytearray()
        self.sent_to = 0
        self.room = asyncio.Event()
        self.room.set()
        self.over = False
        self.ended = asyncio.Event()

    @property
    def exit(self) -> dict[str, int]:
        code = self.process.returncode
        if not self.over or code is None:
            return {}
        return {"exit_signal": -code} if code < 0 else {"exit_code": code}

    @property
    def state(self) -> ProcessState:
        end = self.held_from + len(self.held)
        return ProcessState(
            process=self.name, stdin_offset=self.taken, stdout_from=self.held_from, stdout_to=end, **self.exit
        )

    def acknowledge(self, offset: int) -> None:
        gone = min(offset, self.held_from + len(self.held)) - self.held_from
        if gone > 0:
            del self.held[:gone]
            self.held_from += gone
        if len(self.held) < KEEPER_HELD_BYTES_MAX:
            self.room.set()


class Link:
    """One connection of the keeper to one server."""

    def __init__(self, keeper: "FakeKeeper", server: Processes) -> None:
        self.keeper = keeper
        self.server = server
        self.is_open = True

    async def request(self, method: str, params: object) -> bytes:
        if not self.is_open:
            raise BoxFailed("the keeper's connection closed")
        answer = await self.keeper.serve(method, msgspec.json.decode(msgspec.json.encode(params)))
        if not self.is_open:
            raise BoxFailed("the keeper's connection closed")
        return msgspec.json.encode(answer)

    def notify(self, method: str, params: object) -> None:
        told: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(params))
        if self.is_open and method == "ack" and told["process"] in self.keeper.kept:
            self.keeper.kept[told["process"]].acknowledge(told["offset"])
            self.keeper.pump()


class FakeKeeper:
    def __init__(self, box_id: str, tasks: asyncio.TaskGroup) -> None:
        self.box_id = box_id
        self.kept: dict[str, Kept] = {}
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.chunk = 48 * 1024  # bytes per frame
        self.overlap = 0  # how many bytes of each frame come a second time with the next
        self.takes_input = True
        self.refusals: list[OublietteError] = []  # how the next input is refused
        self.takes_at_most: int | None = None  # how many more times it takes input
        self._tasks = tasks
        self._link: Link | None = None

    # -- the connection ---------------------------------------------------------------------------------------

    def connect(self, server: Processes) -> None:
        self.disconnect()
        link = self._link = Link(self, server)
        acks = server.acks(self.box_id)
        for kept in self.kept.values():
            kept.acknowledge(acks.get(kept.name, 0))
            kept.sent_to = kept.held_from
            kept.ended.clear()
        server.attached(self.box_id, link, [kept.state for kept in self.kept.values()])
        self.pump()

    def disconnect(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.is_open = False
            link.server.detached(self.box_id, link)

    def pump(self) -> None:
        """Send what is new."""
        link = self._link
        if link is None:
            return
        for kept in self.kept.values():
            while kept.sent_to < kept.held_from + len(kept.held):
                start = max(kept.sent_to - self.overlap, kept.held_from) - kept.held_from
                data = bytes(kept.held[start : start + self.overlap + self.chunk])
                offset = kept.held_from + start
                kept.sent_to = max(kept.sent_to + 1, offset + len(data))
                self._tell(link, "stdout", process=kept.name, stream="out", offset=offset, data=_encoded(data))
            if kept.over and not kept.ended.is_set():
                kept.ended.set()
                self._tell(link, "exited", process=kept.name, **kept.exit)

    def tell(self, method: str, **params: Any) -> None:
        """Say something out of turn."""
        assert self._link is not None
        self._tell(self._link, method, **params)

    def _tell(self, link: Link, method: str, **params: Any) -> None:
        link.server.told(self.box_id, method, msgspec.json.encode(params))

    # -- what the server asks ---------------------------------------------------------------------------------

    async def serve(self, method: str, params: dict[str, Any]) -> object:
        self.requests.append((method, params))
        if method == "start":
            return await self._start(params)
        kept = self.kept.get(params["process"])
        if kept is None:
            raise BoxFailed("the keeper refused: no such process")
        if method == "signal":
            self.kill(kept, params["signal"])
            return {}
        assert method == "stdin"
        return await self._stdin(kept, params)

    async def _start(self, params: dict[str, Any]) -> ProcessState:
        try:
            process = await asyncio.create_subprocess_exec(
                *params["argv"],
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=params["env"],
                cwd=params["cwd"],
                start_new_session=True,
            )
        except OSError as error:
            raise BoxFailed(f"the keeper refused: {error}") from None
        kept = self.kept[params["process"]] = Kept(params["process"], process)
        self._tasks.create_task(self._read(kept))
        return kept.state

    async def _stdin(self, kept: Kept, params: dict[str, Any]) -> Accepted:
        if params["offset"] > kept.taken:
            raise BoxFailed("the keeper refused: input has a gap")
        if self.refusals:
            raise self.refusals.pop(0)
        while not self.takes_input:
            await asyncio.sleep(0.01)
        if self.takes_at_most is not None:
            self.takes_at_most -= 1
            while (self.takes_at_most or 0) < 0:
                await asyncio.sleep(0.01)
        new = base64.b64decode(params["data"])[kept.taken - params["offset"] :]
        assert kept.process.stdin
        kept.taken += len(new)
        kept.process.stdin.write(new)
        if params.get("eof"):
            kept.process.stdin.close()
        return Accepted(stdin_offset=kept.taken)

    # -- the process ------------------------------------------------------------------------------------------

    async def _read(self, kept: Kept) -> None:
        assert kept.process.stdout
        assert kept.process.stderr
        errors = self._tasks.create_task(self._read_errors(kept, kept.process.stderr))
        while True:
            await kept.room.wait()
            data = await kept.process.stdout.read(64 * 1024)
            if not data:
                break
            kept.held += data
            if len(kept.held) >= KEEPER_HELD_BYTES_MAX:
                kept.room.clear()
            self.pump()
        await errors
        await kept.process.wait()
        kept.over = True
        self.pump()

    async def _read_errors(self, kept: Kept, stderr: asyncio.StreamReader) -> None:
        while data := await stderr.read(4096):
            if self._link is not None:
                self._tell(self._link, "stdout", process=kept.name, stream="err", offset=0, data=_encoded(data))

    def kill(self, kept: Kept, name: str) -> None:
        try:
            os.killpg(kept.process.pid, getattr(signal, f"SIG{name}"))
        except ProcessLookupError:
            pass

    @property
    def running(self) -> list[Kept]:
        return [kept for kept in self.kept.values() if not kept.over]


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


@asynccontextmanager
async def keeping(box_id: str) -> AsyncGenerator[FakeKeeper]:
    """A keeper, and at the end nothing of what it started."""
    async with asyncio.TaskGroup() as tasks:
        keeper = FakeKeeper(box_id, tasks)
        try:
            yield keeper
        finally:
            keeper.disconnect()
            for kept in keeper.kept.values():
                keeper.kill(kept, "KILL")
                kept.acknowledge(1 << 60)
