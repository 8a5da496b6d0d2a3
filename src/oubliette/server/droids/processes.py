"""Processes in boxes: numbered input and output that survive the server.

Input is a row before it is sent and until the keeper took it. Output arrives in numbered frames and is cut into
lines; what a line means and how far the output is stored are one transaction, and only then is it acknowledged. So
after any accident the keeper sends again what was not stored, frames that overlap are cut by their offset, and no
line counts twice. The keeper holds 1 MiB: the beginning of a longer line is stored in pieces until its end comes,
without the keys in it.

Input that carries a secret has no row. If the server stops before the keeper took it, the process is given up: what
is missing cannot be guessed.
"""

import asyncio
import base64
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from oubliette.server.clock import Clock
from oubliette.server.droids.assembly import Assembly
from oubliette.server.droids.driver import KeeperLink
from oubliette.server.droids.redaction import masked
from oubliette.server.errors import BoxFailed, OublietteError, StorageFailed
from oubliette.server.storage.database import Database, Row, Tx
from oubliette.wire.relay import KEEPER_HELD_BYTES_MAX, Accepted, Exited, ProcessState, Stdout

logger = logging.getLogger(__name__)

STDIN_CHUNK_BYTES = 512 * 1024
LAST_WORDS_BYTES = 4096
# Of input, what may wait for a process that does not read: several of the longest prompts.
UNSENT_BYTES_MAX = 16 * 1024 * 1024
UNSENT_MAX = 1024
EARLY_FRAMES_MAX = 4096  # what a keeper may say in the moment before its rows are read
KEEPER_ANSWER_S = 30.0
SIGNAL_WAIT_S = 5.0
RETRY_S = 0.5
LOOK_EVERY_S = 1.0

_EVERYTHING = 1 << 53  # nobody reads the output of a process that ended: the keeper may forget it
_DROP_LINE = "DELETE FROM process_pieces WHERE process_id = ? AND kind IN ('line', 'skipped')"
_LINE = "line"
_SKIPPED = "skipped"
_stdout = msgspec.json.Decoder(Stdout).decode
_exited = msgspec.json.Decoder(Exited).decode
_accepted = msgspec.json.Decoder(Accepted).decode


class TakenOver(Exception):
    """Another server, or the end of its box, moved this process's row: it is no longer ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A line for the process. What is `secret` is kept in memory only."""

    data: bytes = field(repr=False)
    secret: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    code: int | None
    signal: int | None

    def __str__(self) -> str:
        return f"killed by signal {self.signal}" if self.signal is not None else f"exit code {self.code}"


async def _asked(link: KeeperLink, method: str, params: object, within_s: float | None = None) -> bytes:
    """What the keeper answers. Raises `BoxFailed` for one that is there and stands still."""
    patience_s = KEEPER_ANSWER_S if within_s is None else within_s
    try:
        async with asyncio.timeout(patience_s):
            return await link.request(method, params)
    except TimeoutError:
        raise BoxFailed(f"the box's keeper did not answer {method} within {patience_s:g} s") from None


class Process:
    """One process in a box, as the server sees it: made by `Processes`, read by exactly one driver."""

    def __init__(
        self,
        processes: "Processes",
        process_id: str,
        *,
        box_id: str,
        session_id: str,
        state: str = "starting",
        stdout_offset: int = 0,
        stdin_offset: int = 0,
        conversation: str = "",
        made_here: bool = False,
    ) -> None:
        self.id = process_id
        self.box_id = box_id
        self.session_id = session_id
        self.conversation = conversation
        self.state = state
        self.changed = asyncio.Event()
        self.exit: Exit | None = None
        self.lost: str | None = None
        self.lost_kind = "droid_failed"
        self.output = Assembly(stdout_offset)
        self.last_words = bytearray()
        self._processes = processes
        self._made_here = made_here
        self._written = stdin_offset  # the end of all input, sent or not
        self._accepted = stdin_offset
        self._unsent: deque[tuple[int, bytes]] = deque()
        self._wants_input = asyncio.Event()
        self._sender: asyncio.Task[None] | None = None
        self._closing_input = False

    # -- what the keeper says -----------------------------------------------------------------------------------

    @property
    def link(self) -> KeeperLink | None:
        return self._processes.link(self.box_id)

    @property
    def is_over(self) -> bool:
        return self.state == "ended"

    def hear(self, offset: int, data: bytes) -> None:
        """Output arrived."""
        if self.lost is not None or self.is_over:
            return
        if not self.output.add(offset, data):
            self.lose(f"the keeper skipped output: expected byte {self.output.end}, got {offset}")
        elif self.output.end - self.output.start > 2 * KEEPER_HELD_BYTES_MAX:
            self.lose("the keeper sent more output than it may hold")
        self.changed.set()

    def hear_error(self, data: bytes) -> None:
        self.last_words += data
        del self.last_words[:-LAST_WORDS_BYTES]

    def exited(self, end: Exit) -> None:
        self.exit = end
        self.changed.set()
        self._wants_input.set()

    def lose(self, reason: str, kind: str = "droid_failed") -> None:
        """Nothing more is to be had from this process."""
        if self.lost is None:
            self.lost, self.lost_kind = reason, kind
            self.changed.set()
            self._wants_input.set()

    def reattached(self, state: ProcessState | None) -> None:
        """A keeper is connected: what does it know of this process?"""
        if self.is_over:
            return
        if state is None:
            # One that this server is about to start is not known yet.
            if self.state == "running" or not self._made_here:
                self.lose("the box's keeper does not know the process any more")
            return
        if self.state == "starting":
            self.state = "running"
        if state.stdout_from > self.output.end:
            self.lose("the keeper no longer holds output that was not stored")
        else:
            self._take_up(state.stdin_offset)

    def _take_up(self, accepted: int) -> None:
        """Go on sending where the keeper is, if nothing is missing from there on."""
        self._drop_sent(accepted)
        expected = accepted
        for start, data in self._unsent:
            if start > expected:
                break
            expected = start + len(data)
        if expected != self._written:
            self.lose(
                "the server stopped before a key was delivered to the droid, and keys are never stored:"
                " it has to be given again",
                "needs_key",
            )
            return
        self._accepted = accepted
        self._wants_input.set()
        self._start_sender()

    # -- input --------------------------------------------------------------------------------------------------

    def restore_input(self, rows: Sequence[tuple[int, bytes]]) -> None:
        self._unsent = deque(rows)

    def _queue(self, start: int, data: bytes) -> None:
        self._unsent.append((start, data))
        self._written = start + len(data)
        self._wants_input.set()
        self._start_sender()

    def has_room(self, inputs: Sequence[Input]) -> bool:
        """Whether so much more may wait for it: what it does not read is ours to keep."""
        waiting = self._written - self._accepted + sum(len(one.data) for one in inputs)
        return waiting <= UNSENT_BYTES_MAX and len(self._unsent) + len(inputs) <= UNSENT_MAX

    def close_input(self) -> None:
        """Its stdin ends after what was written so far."""
        self._closing_input = True
        self._wants_input.set()
        self._start_sender()

    def _start_sender(self) -> None:
        if self._sender is None and self.state == "running":
            self._sender = self._processes.spawn(self._send())

    def _drop_sent(self, accepted: int) -> None:
        while self._unsent and self._unsent[0][0] + len(self._unsent[0][1]) <= accepted:
            self._unsent.popleft()

    def _next_chunk(self) -> bytes:
        parts: list[bytes] = []
        size = 0
        for start, data in self._unsent:
            part = data[max(0, self._accepted - start) :][: STDIN_CHUNK_BYTES - size]
            parts.append(part)
            size += len(part)
            if size >= STDIN_CHUNK_BYTES:
                break
        return b"".join(parts)

    async def _send(self) -> None:
        """Send input in order, each piece until the keeper took it."""
        while not self.is_over and self.lost is None and self.exit is None:
            link = self.link
            is_last = self._accepted == self._written and self._closing_input
            if link is None or (self._accepted == self._written and not is_last):
                self._wants_input.clear()
                await self._wants_input.wait()
                continue
            try:
                accepted = await self._offer(link, self._next_chunk(), eof=is_last)
            except BoxFailed:
                if self.link is link:
                    await asyncio.sleep(RETRY_S)
            except msgspec.MsgspecError:
                self.lose("the keeper's answer to input was not understood")
                return
            except OublietteError as failure:
                if not failure.retryable:
                    if not is_last:
                        self.lose(f"its input was refused: {failure.message}")
                    return
                await asyncio.sleep(RETRY_S)
            else:
                if is_last:
                    return
                await self._took(accepted)

    async def _offer(self, link: KeeperLink, data: bytes, *, eof: bool) -> int:
        encoded = base64.b64encode(data).decode()
        # The keeper answers once there is room for more; meanwhile, the same again does no harm.
        answer = await _asked(
            link, "stdin", {"process": self.id, "offset": self._accepted, "data": encoded, "eof": eof}
        )
        return _accepted(answer).stdin_offset

    async def _took(self, accepted: int) -> None:
        if accepted > self._written:
            self.lose("the keeper took more input than there is")
            return
        self._accepted = max(self._accepted, accepted)
        self._drop_sent(self._accepted)

        async def forget(tx: Tx) -> None:
            await tx.run(
                "DELETE FROM process_input WHERE process_id = ? AND start + length(data) <= ?", self.id, accepted
            )

        try:
            await self._processes.database.write(forget)
        except StorageFailed:
            pass  # what the keeper took next is forgotten with this

    # -- the driver's side --------------------------------------------------------------------------------------

    async def start(self, argv: Sequence[str], env: dict[str, str], cwd: str) -> None:
        """Have the keeper start it. Raises `BoxFailed` or `DroidFailed`."""
        link = self.link
        if link is None:
            raise BoxFailed("the box's keeper is not connected")
        await _asked(link, "start", {"process": self.id, "argv": list(argv), "env": env, "cwd": cwd})
        self.state = "running"

        async def note(tx: Tx) -> None:
            await tx.run("UPDATE processes SET state = 'running' WHERE id = ? AND state = 'starting'", self.id)

        await self._processes.database.write(note)
        self._start_sender()

    async def commit(
        self,
        *,
        upto: int,
        inputs: Sequence[Input] = (),
        conversation: str | None = None,
        also: Callable[[Tx], Awaitable[Any]] | None = None,
    ) -> Any:
        """Store how far output was read, new input and what both mean, in one unit; then acknowledge and send.

        Returns what `also` returned. Raises `TakenOver` where somebody else moved this process meanwhile.
        """
        before = self.output.start
        starts: list[int] = []
        end = self._written
        for one in inputs:
            starts.append(end)
            end += len(one.data)
        told = self.conversation if conversation is None else conversation

        async def write(tx: Tx) -> Any:
            moved = await tx.run(
                "UPDATE processes SET stdout_offset = ?, stdin_offset = ?, conversation = ?"
                " WHERE id = ? AND stdout_offset = ? AND ended_at IS NULL",
                upto,
                end,
                told,
                self.id,
                before,
            )
            if moved != 1:
                raise TakenOver("the droid's process was taken over or ended by somebody else")
            for start, one in zip(starts, inputs, strict=True):
                if not one.secret:
                    await tx.run(
                        "INSERT INTO process_input (process_id, start, data) VALUES (?, ?, ?)", self.id, start, one.data
                    )
            if upto > before:
                await tx.run(_DROP_LINE, self.id)
            return await also(tx) if also is not None else None

        result = await self._processes.database.write(write)
        self.conversation = told
        for start, one in zip(starts, inputs, strict=True):
            self._queue(start, one.data)
        if upto > before:
            self.output.settle(upto)
            self._acknowledge()
        return result

    async def store_piece(self) -> bool:
        """Store the beginning of a line that the keeper cannot hold any longer; whether there was one."""
        piece = self.output.piece()
        if piece is None:
            return False
        piece = masked(piece)
        before, upto = self.output.start, self.output.start + len(piece)
        skipped = self.output.overflows

        async def write(tx: Tx) -> None:
            moved = await tx.run(
                "UPDATE processes SET stdout_offset = ? WHERE id = ? AND stdout_offset = ? AND ended_at IS NULL",
                upto,
                self.id,
                before,
            )
            if moved != 1:
                raise TakenOver("the droid's process was taken over or ended by somebody else")
            if skipped:
                await tx.run(_DROP_LINE, self.id)
            await tx.run(
                "INSERT INTO process_pieces (process_id, kind, start, data) VALUES (?, ?, ?, ?)",
                self.id,
                _SKIPPED if skipped else _LINE,
                before,
                b"" if skipped else piece,
            )

        await self._processes.database.write(write)
        self.output.settle_piece(piece, skipped=skipped)
        self._acknowledge()
        return True

    def _acknowledge(self) -> None:
        link = self.link
        if link is not None:
            link.notify("ack", {"process": self.id, "offset": self.output.start})

    async def signal(self, name: str) -> None:
        """Signal its process group; a keeper that is away or silent cannot be asked."""
        link = self.link
        if link is None:
            return
        try:
            await _asked(link, "signal", {"process": self.id, "signal": name}, SIGNAL_WAIT_S)
        except OublietteError:
            logger.warning("a signal was not delivered", extra={"process_id": self.id, "signal": name})

    async def finish(self, also: Callable[[Tx], Awaitable[Any]] | None = None) -> Any:
        """It is over: its row says so, and nothing waits for it any more. Raises `TakenOver`."""
        now = self._processes.clock.now()

        async def write(tx: Tx) -> Any:
            moved = await tx.run(
                "UPDATE processes SET state = 'ended', ended_at = ? WHERE id = ? AND ended_at IS NULL", now, self.id
            )
            if moved != 1:
                raise TakenOver("the droid's process was ended by somebody else")
            told = await also(tx) if also is not None else None
            await tx.run("DELETE FROM process_input WHERE process_id = ?", self.id)
            await tx.run("DELETE FROM process_pieces WHERE process_id = ?", self.id)
            return told

        result = await self._processes.database.write(write)
        link = self.link
        if link is not None and self.exit is not None:
            link.notify("ack", {"process": self.id, "offset": self.output.end})
        self.abandon()
        return result

    def abandon(self) -> None:
        """It is somebody else's, or nobody's: stop looking after it."""
        self.state = "ended"
        self._wants_input.set()
        self._processes.forget(self)

    async def was_ended(self) -> bool:
        """Whether its row was ended by whoever ended its box."""

        async def read(tx: Tx) -> Row | None:
            return await tx.one("SELECT ended_at FROM processes WHERE id = ?", self.id)

        row = await self._processes.database.read(read)
        return row is None or row[0] is not None


class Processes:
    """All processes that this server keeps, and the keepers that hold them."""

    def __init__(self, database: Database, clock: Clock, tasks: asyncio.TaskGroup) -> None:
        self.database = database
        self.clock = clock
        self._tasks = tasks
        self._links: dict[str, KeeperLink] = {}
        self._live: dict[str, Process] = {}
        self._known: dict[str, dict[str, ProcessState]] = {}  # what each keeper said when it attached
        self._early: dict[str, deque[Stdout | Exited]] = {}  # what it said before its processes' rows were read
        self._taking_up: dict[str, asyncio.Task[None]] = {}

    def spawn(self, work: Any) -> asyncio.Task[None]:
        """Run work beside, owned by the app; it reports and does not raise."""

        async def guarded() -> None:
            try:
                await work
            except Exception:
                logger.exception("a task of a droid failed")

        return self._tasks.create_task(guarded())

    def link(self, box_id: str) -> KeeperLink | None:
        return self._links.get(box_id)

    def _of(self, box_id: str) -> list[Process]:
        return [process for process in self._live.values() if process.box_id == box_id]

    # -- the keeper's connection --------------------------------------------------------------------------------

    def acks(self, box_id: str) -> dict[str, int]:
        """How far output is stored, for the answer to `attach`; what is missing here comes twice and is cut."""
        return {process.id: process.output.start for process in self._of(box_id)}

    def attached(self, box_id: str, link: KeeperLink, states: Sequence[ProcessState]) -> None:
        """A keeper was answered; what it says may follow at once, before the rows of its processes are read."""
        self._links[box_id] = link
        self._known[box_id] = {state.process: state for state in states}
        self._early[box_id] = deque()
        self._taking_up[box_id] = self.spawn(self._take_up(box_id, link))

    async def _take_up(self, box_id: str, link: KeeperLink) -> None:
        async def read(tx: Tx) -> list[Row]:
            return await tx.all("SELECT id FROM processes WHERE box_id = ? AND ended_at IS NULL", box_id)

        for (process_id,) in await self.database.read(read):
            await self.resume(process_id)
        if self._links.get(box_id) is not link:
            return  # it left, or came again
        known = self._known[box_id]
        for process in self._of(box_id):
            process.reattached(known.get(process.id))
        for frame in self._early.pop(box_id, ()):
            self._deliver(box_id, frame)
        for process_id, state in known.items():
            if process_id not in self._live:
                self.spawn(self._dismiss(link, state))

    async def _dismiss(self, link: KeeperLink, state: ProcessState) -> None:
        """A process that the keeper holds and no row asks for."""
        link.notify("ack", {"process": state.process, "offset": _EVERYTHING})
        if state.exit_code is not None or state.exit_signal is not None:
            return
        try:
            await _asked(link, "signal", {"process": state.process, "signal": "KILL"}, SIGNAL_WAIT_S)
        except OublietteError:
            logger.warning("a process without a row was not killed", extra={"process_id": state.process})

    def detached(self, box_id: str, link: KeeperLink) -> None:
        if self._links.get(box_id) is link:
            del self._links[box_id]
            self._taking_up.pop(box_id, None)
            self._known.pop(box_id, None)
            self._early.pop(box_id, None)
            for process in self._of(box_id):
                process.changed.set()

    def told(self, box_id: str, method: str, params: bytes) -> None:
        """A notification of this box's keeper: `stdout` or `exited`. Raises `msgspec.ValidationError`."""
        if method == "stdout":
            frame: Stdout | Exited = _stdout(params)
        elif method == "exited":
            frame = _exited(params)
        else:
            return
        early = self._early.get(box_id)
        if early is None:
            self._deliver(box_id, frame)
        elif len(early) < EARLY_FRAMES_MAX:
            early.append(frame)

    def _deliver(self, box_id: str, frame: Stdout | Exited) -> None:
        process = self._live.get(frame.process)
        if process is None or process.box_id != box_id:
            return  # ended already, or never ours: a keeper speaks for its own box only
        if isinstance(frame, Exited):
            process.exited(Exit(code=frame.exit_code, signal=frame.exit_signal))
            return
        try:
            data = base64.b64decode(frame.data, validate=True)
        except ValueError:
            process.lose("the keeper sent output that is not base64")
            return
        if frame.stream == "err":
            process.hear_error(data)
        else:
            process.hear(frame.offset, data)

    # -- the drivers' side --------------------------------------------------------------------------------------

    async def create(self, process_id: str, *, box_id: str, session_id: str, conversation: str) -> Process:
        now = self.clock.now()

        async def write(tx: Tx) -> None:
            await tx.run(
                "INSERT INTO processes (id, box_id, session_id, conversation, state, created_at)"
                " VALUES (?, ?, ?, ?, 'starting', ?)",
                process_id,
                box_id,
                session_id,
                conversation,
                now,
            )

        await self.database.write(write)
        process = Process(
            self, process_id, box_id=box_id, session_id=session_id, conversation=conversation, made_here=True
        )
        self._live[process_id] = process
        return process

    async def running(self, box_id: str, session_id: str) -> Process | None:
        """The session's process in this box that has not ended, once it is known what its keeper knows of it."""
        taking_up = self._taking_up.get(box_id)
        if taking_up is not None:
            await asyncio.wait((taking_up,))

        async def read(tx: Tx) -> Row | None:
            return await tx.one(
                "SELECT id FROM processes WHERE session_id = ? AND box_id = ? AND ended_at IS NULL"
                " ORDER BY created_at DESC LIMIT 1",
                session_id,
                box_id,
            )

        row = await self.database.read(read)
        return await self.resume(row[0]) if row is not None else None

    async def resume(self, process_id: str) -> Process | None:
        """Go on with a process of an earlier server: its row, unsent input, and output from the stored offset."""
        if process_id in self._live:
            return self._live[process_id]

        async def read(tx: Tx) -> tuple[Row | None, list[Row], list[Row]]:
            return (
                await tx.one(
                    "SELECT box_id, session_id, state, stdout_offset, stdin_offset, conversation FROM processes"
                    " WHERE id = ? AND ended_at IS NULL",
                    process_id,
                ),
                await tx.all("SELECT start, data FROM process_input WHERE process_id = ? ORDER BY start", process_id),
                await tx.all(
                    "SELECT kind, data FROM process_pieces WHERE process_id = ? AND kind IN ('line', 'skipped')"
                    " ORDER BY start",
                    process_id,
                ),
            )

        row, inputs, pieces = await self.database.read(read)
        if row is None:
            return None
        if process_id in self._live:
            return self._live[process_id]
        process = Process(
            self,
            process_id,
            box_id=row[0],
            session_id=row[1],
            state=row[2],
            stdout_offset=row[3],
            stdin_offset=row[4],
            conversation=row[5] or "",
        )
        process.output = Assembly(
            row[3],
            b"".join(data for kind, data in pieces if kind == _LINE),
            skipping=any(kind == _SKIPPED for kind, _ in pieces),
        )
        process.restore_input([(start, data) for start, data in inputs])
        self._live[process_id] = process
        if row[0] in self._links and row[0] not in self._early:
            process.reattached(self._known[row[0]].get(process_id))
        return process

    def forget(self, process: Process) -> None:
        if self._live.get(process.id) is process:
            del self._live[process.id]
