"""A live session: one task that makes its box, starts its droid and gives it one turn after the other."""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from oubliette.server.caller_tools.exchange import Exchange
from oubliette.server.clock import Clock
from oubliette.server.droids.driver import Droid, Outcome
from oubliette.server.droids.driver import Session as DroidSession
from oubliette.server.errors import DroidFailed, OublietteError, StorageFailed
from oubliette.server.events.following import Following
from oubliette.server.events.log import EventLog
from oubliette.server.sessions import ends, rows
from oubliette.server.sessions.boxes import Boxes, OpenBox
from oubliette.server.sessions.insistence import insist
from oubliette.server.sessions.lifecycle import Move, TurnState
from oubliette.server.storage.database import Database, Tx
from oubliette.wire.events import Error, Event, TurnStarted, Warn

logger = logging.getLogger(__name__)
_encode = msgspec.json.Encoder(order="deterministic").encode

# An agent that never asked for its tools by then goes on without them, and most do so silently.
LISTED_WITHIN_S = 10.0
# How often a turn that waits for its caller is told from one that has fallen silent.
TOUCH_EVERY_S = 10.0
# After a restart a droid may be back before its client is, and a client that was alone for long listed few tools.
RELISTED_WITHIN_S = 3.0
STOP_WITHIN_S = 10.0
LET_GO_WITHIN_S = 1.0


class Droids(Protocol):
    """Starts and finds droids. Implemented in `droids/`, joined by the app."""

    async def start(self, session: DroidSession, box: OpenBox, *, api_key: str | None) -> Droid:
        """Start the agent in this box and open its conversation. Raises `DroidFailed`."""
        ...

    async def resume(self, session: DroidSession, box: OpenBox) -> Droid | None:
        """Go on with the droid that runs in this box since before a restart; None where there is none."""
        ...


class Keys(Protocol):
    """The key that a session's droid gets for the platform's tools, if it gets one."""

    async def for_droid(self, session_id: str) -> tuple[str | None, Sequence[Event]]:
        """The key, and what the log should say about it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rooms:
    """What every live session stands on."""

    database: Database
    clock: Clock
    events: EventLog
    following: Following
    exchange: Exchange
    boxes: Boxes
    droids: Droids
    keys: Keys
    idle_after_s: float


class LiveSession:
    """Implements what a droid needs of its session (`droids.driver.Session`)."""

    def __init__(self, row: rows.Session, rooms: Rooms, ending: Callable[[str], object]) -> None:
        """`ending` is called when the session has decided its end: somebody else has to see to it."""
        self._id = row.id
        self._row = row
        self._rooms = rooms
        self._ending = ending
        self._woken = asyncio.Event()
        self._over = asyncio.Event()
        self._open_turn: int | None = None
        self._box: OpenBox | None = None
        self._droid: Droid | None = None
        self._loss: str | None = None
        self._listed = asyncio.Event()
        self._has_returned = False
        self._cancelled = 0  # the last turn that was to be cancelled
        self.task: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self._id

    @property
    def autonomy(self) -> str:
        return self._row.choices.autonomy

    @property
    def tools(self) -> str:
        declaration = self._rooms.exchange.declaration(self._id)
        shown = declaration.config_tools() if declaration is not None else []
        return hashlib.blake2b(_encode(shown), digest_size=8).hexdigest()

    @property
    def workspace_id(self) -> str:
        return self._row.workspace_id

    @property
    def open_turn(self) -> int | None:
        return self._open_turn

    # -- asked by operations ------------------------------------------------------------------------------------

    def wake(self) -> None:
        """A message was queued."""
        self._woken.set()

    def listed(self) -> None:
        """The droid asked for its tools as they are now, and was answered."""
        self._listed.set()

    async def cancel(self, turn: int) -> bool:
        """Cancel this turn, and what it waits for; False where it is not open. The next one is let alone."""
        if self._open_turn != turn:
            return False
        over = self._over
        self._cancelled = turn  # one whose droid is still being made ends before the droid is told of it
        # The droid first: one that saw its call fail before it knew would go on with its plan. Most let go of their
        # calls by themselves; for those that forget to, the calls end here.
        if self._droid is not None and self._droid.has_turn(turn):
            await self._droid.cancel()
            try:
                async with asyncio.timeout(LET_GO_WITHIN_S):
                    await over.wait()
            except TimeoutError:
                pass
        if self._open_turn in (turn, None):  # else its calls ended with it, and these are another turn's
            await self._rooms.exchange.cancel_all(self._id, "the turn was cancelled")
        return True

    async def stop(self) -> None:
        """The session's end is decided: end the droid, once it said what it had to say, and its box."""
        task = self.task
        if task is None:
            # Found like this after a restart, it was never run: the droid that runs since before it is found first.
            await self._resume()
        elif not task.done():
            task.cancel()
            # A box that is being made is taken down by the task itself.
            await asyncio.wait((task,), timeout=STOP_WITHIN_S)
        await self._part()
        box, self._box = self._box, None
        if box is not None:
            await self._rooms.boxes.end(box)
        await self._part()  # one whose last words the database did not take: by now it has

    async def _part(self) -> None:
        """Have the droid stop; one that does not in time is left to the end of its box."""
        if self._droid is None:
            return
        try:
            async with asyncio.timeout(STOP_WITHIN_S):
                await self._droid.stop()
        except TimeoutError:
            logger.warning("a droid did not stop in time", extra={"session_id": self._id})
        else:
            self._droid = None

    # -- its own task -------------------------------------------------------------------------------------------

    async def run(self, *, resumed: bool = False) -> None:
        """Live until ended. A fault ends this session and nothing else; a database that fails is waited for."""
        try:
            if resumed:
                await insist(self._id, self._resume)
            while not await insist(self._id, self._round):
                pass
        except OublietteError as failure:
            logger.warning("a session failed", extra={"session_id": self._id, "kind": failure.kind})
            await self._fail(failure.kind, failure.message)
        except Exception:
            logger.exception("a session failed", extra={"session_id": self._id})
            await self._fail("internal", "a bug in the server ended this session; its log has the details")

    async def _round(self) -> bool:
        """Take the next turn, or end for want of one; whether that was the end."""
        self._open_turn = None  # where the database failed in a turn, its row tells how far that came
        if self._loss is not None and self._droid is not None:
            await self._clear()
        turn = await self._next()
        if turn is None:
            return await insist(self._id, self._expire)
        await self._take(turn)
        return False

    async def _next(self) -> rows.Turn | None:
        """The turn to take, or None when none came for too long."""
        while True:
            self._woken.clear()
            turn = await self._rooms.database.read(lambda tx: rows.next_turn(tx, self._id))
            if turn is not None:
                return turn
            try:
                async with asyncio.timeout(self._rooms.idle_after_s):
                    await self._woken.wait()
            except TimeoutError:
                return None

    async def _take(self, turn: rows.Turn) -> None:
        """See a turn to its end, whether it begins now or has been open since before a restart."""
        self._over = asyncio.Event()  # who waits for the end of a turn waits for that one
        self._open_turn = turn.number
        if turn.state is TurnState.QUEUED:
            await self._start(turn)
        elif self._droid is None:
            await self._close(turn.number, _lost("box_lost", self._loss or "the box of this turn is gone"))
        elif not await self._has_ended(turn.number):
            await self._work(turn, self._droid)
        self._open_turn = None
        await self._rooms.exchange.cancel_all(self._id, "the turn is over")

    async def _start(self, turn: rows.Turn) -> None:
        droid = await self._ready()
        if await self._begin(turn):
            await self._work(turn, droid)

    async def _work(self, turn: rows.Turn, droid: Droid) -> None:
        """Give a turn to the droid, unless it has it already, and wait for the end."""
        timer = asyncio.get_running_loop().call_later(LISTED_WITHIN_S, self._look_for_tools)
        try:
            if not droid.has_turn(turn.number):
                await self._wait_relisted()
                if self._cancelled == turn.number:
                    await self._close(turn.number, Outcome(stop_reason="cancelled", text=""))
                    return
                await droid.prompt(turn.number, turn.prompt)
                if self._cancelled == turn.number:  # meanwhile, by somebody who found no turn there to stop
                    await droid.cancel()
            await self._wait_over(droid)
        except DroidFailed as failure:
            self._loss = failure.message
        finally:
            timer.cancel()
        if self._loss is not None:
            await self._close(turn.number, _lost("droid_failed", self._loss))
            await self._clear()

    async def _wait_relisted(self) -> None:
        """Let a droid that was taken up again see its tools before it begins; one that never lists loses a moment."""
        if not self._has_returned:
            return
        self._has_returned = False
        try:
            async with asyncio.timeout(RELISTED_WITHIN_S):
                await self._listed.wait()
        except TimeoutError:
            pass

    async def _has_ended(self, number: int) -> bool:
        """Whether a turn that was open when it was looked up ended meanwhile."""
        turn = await self._rooms.database.read(lambda tx: rows.turn(tx, self._id, number))
        return turn is None or turn.ended_at is not None

    async def _wait_over(self, droid: Droid) -> None:
        """Wait for the turn's end. A droid that waits for its caller is not silent: the caller has its own deadline."""
        while not self._over.is_set():
            try:
                async with asyncio.timeout(TOUCH_EVERY_S):
                    await self._over.wait()
            except TimeoutError:
                if self._rooms.exchange.pending_count(self._id):
                    droid.touch()

    async def _ready(self) -> Droid:
        """The droid, in its box; both are made where they are missing."""
        if self._droid is not None:
            return self._droid
        rooms = self._rooms
        self._loss = None
        self._listed.clear()
        self._has_returned = False
        if self._box is not None and self._box.link is None:
            await self._clear()  # nothing can be started where no keeper is
        if self._box is None:
            row = self._row
            self._box = await rooms.boxes.make(row.id, row.project_id, row.workspace_id, lost=self._box_lost)
        key, said = await rooms.keys.for_droid(self._id)
        if said:
            await self._say(*said)
        try:
            self._droid = await rooms.droids.start(self, self._box, api_key=key)
        except StorageFailed:
            await self._clear()  # it may have been started, and nobody would know it
            raise
        return self._droid

    async def _resume(self) -> None:
        box = self._box or await self._rooms.boxes.adopt(self._id, lost=self._box_lost)
        if box is None:
            return
        self._box = box
        self._has_returned = True
        self._droid = await self._rooms.droids.resume(self, box)
        if self._droid is None:
            await self._clear()

    async def _begin(self, turn: rows.Turn) -> bool:
        now = self._rooms.clock.now()

        async def write(tx: Tx) -> int | None:
            if not await rows.begin_turn(tx, self._id, turn.number, now):
                return None
            moved = await rows.move(tx, self._id, Move.TURN, now)
            return await self._rooms.events.append(tx, self._id, (*moved, TurnStarted(turn=turn.number)), now)

        last = await self._rooms.database.write(write)
        if last is not None:
            self._rooms.following.wake(self._id, last)
        return last is not None

    async def _close(self, number: int, outcome: Outcome) -> None:
        """Close a turn that its droid will not close."""

        async def write(tx: Tx) -> int:
            said = await self.turn_ended(tx, number, outcome)
            return await self._rooms.events.append(tx, self._id, said, self._rooms.clock.now())

        self._rooms.following.wake(self._id, await self._rooms.database.write(write))

    async def _clear(self) -> None:
        """Let go of a droid that is no use any more, with its box: the next turn makes new ones."""
        self._droid = None
        box, self._box = self._box, None
        if box is not None:
            await self._rooms.boxes.end(box)

    async def _say(self, *said: Event) -> None:
        """Add to the log, while there is anything to add: the end is its last event."""
        now = self._rooms.clock.now()

        async def write(tx: Tx) -> int:
            session = await rows.get(tx, self._id)
            if session.ended_at is not None:
                return session.next_index - 1
            return await self._rooms.events.append(tx, self._id, said, now)

        self._rooms.following.wake(self._id, await self._rooms.database.write(write))

    def _box_lost(self, reason: str) -> None:
        """The box ended by itself, and has been cleared away: the next turn makes another."""
        self._box = None
        if self._open_turn is None:
            message = f"{reason}; the next message gets another, whose droid remembers nothing of this one"
            self._rooms.boxes.spawn(self._say(Warn(kind="box_lost", message=message)))
        self.droid_ended(reason)

    def _look_for_tools(self) -> None:
        if not self._listed.is_set() and self._open_turn is not None and self.task is not None:
            message = "the droid has not asked for its tools: it may be working without them"
            # The session's own task waits for the turn; the log line needs one of its own, owned by the box's group.
            self._rooms.boxes.spawn(self._say(Warn(kind="mcp_not_connected", message=message)))

    async def _fail(self, kind: str, message: str) -> None:
        """Decide that the session ends for this, with the turn that it had."""
        turn, now = self._open_turn, self._rooms.clock.now()

        async def write(tx: Tx) -> int:
            said = [*await self.turn_ended(tx, turn, _lost(kind, message))] if turn is not None else []
            session = await rows.get(tx, self._id)
            if session.ended_at is not None:
                return session.next_index - 1
            last = await self._rooms.events.append(tx, self._id, (*said, Error(kind=kind, message=message)), now)
            await ends.decide(tx, self._id, Move.FAIL, message, now)
            return last

        last = await insist(self._id, lambda: self._rooms.database.write(write))
        self._rooms.following.wake(self._id, last)
        self._ending(self._id)

    async def _expire(self) -> bool:
        """End after idling, unless a message came meanwhile, or a session below is at work."""
        now = self._rooms.clock.now()

        async def write(tx: Tx) -> bool:
            if await rows.next_turn(tx, self._id) is not None or await rows.is_busy_below(tx, self._id):
                return False
            await ends.decide(tx, self._id, Move.EXPIRE, "idle for too long", now)
            return True

        if not await self._rooms.database.write(write):
            return False
        self._ending(self._id)
        return True

    # -- asked by the droid -------------------------------------------------------------------------------------

    async def turn_ended(self, tx: Tx, turn: int, outcome: Outcome) -> Sequence[Event]:
        return await ends.end_turn(tx, self._id, turn, outcome, self._rooms.clock.now())

    def turn_is_over(self, turn: int, outcome: Outcome) -> None:
        del outcome
        if turn == self._open_turn:
            self._over.set()

    def droid_ended(self, reason: str) -> None:
        self._loss = reason
        if self._open_turn is not None:
            self._over.set()
        else:
            self._droid = None


def _lost(kind: str, message: str) -> Outcome:
    return Outcome(stop_reason="error", text="", error=message, error_kind=kind)
