"""All sessions: those that live, their ends, and their return after a restart."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from oubliette.server import audit
from oubliette.server.errors import NotFound, StorageFailed
from oubliette.server.sessions import ends, rows
from oubliette.server.sessions.insistence import insist
from oubliette.server.sessions.lifecycle import Move
from oubliette.server.sessions.session import LiveSession, Rooms
from oubliette.server.storage.database import Tx
from oubliette.server.tasks import Tasks
from oubliette.server.tokens.token import Actor, Scope

logger = logging.getLogger(__name__)

# On whose behalf the server itself ends what nobody else will.
_SERVER = Actor(principal="server", scope=Scope.ADMIN)


PARENT_ENDED = "its parent ended"
# Who asks for an end waits for so long; each part of it takes less, as long as the database takes what is stored.
ENDED_WITHIN_S = 60.0
CALLS_END_WITHIN_S = 10.0
LOOK_EVERY_S = 0.1


T = TypeVar("T")
# Commits with an effect what somebody has to know of it after a crash.
Kept = Callable[[Tx, T], Awaitable[None]]


class Sessions:
    def __init__(self, rooms: Rooms, *, tasks: Tasks, brought: dict[str, str]) -> None:
        self._rooms = rooms
        self._tasks = tasks
        self._brought = brought
        self._live: dict[str, LiveSession] = {}
        self._endings: dict[str, asyncio.Task[None]] = {}
        self._declaring = asyncio.Lock()
        self.declared: Callable[[str], None] = _nobody

    def live(self, session_id: str) -> LiveSession | None:
        return self._live.get(session_id)

    async def get(self, session_id: str) -> rows.Session:
        return await self._rooms.database.read(lambda tx: rows.get(tx, session_id))

    # -- beginnings ---------------------------------------------------------------------------------------------

    def begin(self, session: rows.Session, *, api_key: str | None) -> None:
        """A session was stored: let it live."""
        if api_key is not None:
            self._brought[session.id] = api_key
        self._take_calls(session)
        self._run(session)

    async def redeclare(self, session_ids: Iterable[str]) -> None:
        """The tools that are lent to these sessions changed: to what the rows say."""
        async with self._declaring:  # so that who read them last is the last to tell of them
            for session_id in session_ids:
                # It is committed: whoever sees to it may not leave it half done.
                session = await insist(session_id, partial(self.get, session_id))
                if session.is_live and session.id in self._live:
                    self._rooms.exchange.open_desk(session.id, session.root_id, session.owner, session.declaration)
                    self.declared(session.id)

    def _take_calls(self, session: rows.Session) -> None:
        exchange = self._rooms.exchange
        exchange.open_desk(session.id, session.root_id, session.owner, session.declaration)
        if session.stream_id is not None:
            exchange.bind(session.id, session.stream_id)

    def _run(self, session: rows.Session, *, resumed: bool = False) -> None:
        live = self._live[session.id] = self._made(session)
        live.task = self._tasks.create_task(live.run(resumed=resumed), name=f"session {session.id}")

    def _made(self, session: rows.Session) -> LiveSession:
        return LiveSession(session, self._rooms, self._see_to_end)

    # -- ends ---------------------------------------------------------------------------------------------------

    async def end(
        self,
        actor: Actor,
        door: str,
        session_id: str,
        kept: Kept[rows.Session] | None = None,
        *,
        reason: str = "ended on request",
    ) -> rows.Session:
        """End a session with its droid, children, pending calls and derived key. Ending twice is no error.

        Raises `StorageFailed` where that is decided and still to come.
        """
        ending = await self._decided(actor, door, session_id, kept, reason=reason)
        if ending is not None:
            await asyncio.wait((ending,), timeout=ENDED_WITHIN_S)
        session = await self.get(session_id)
        if session.ended_at is None:
            raise StorageFailed(f"the end of session {session_id} is decided and not stored yet: ask again")
        return session

    async def _decided(
        self, actor: Actor, door: str, session_id: str, kept: Kept[rows.Session] | None = None, *, reason: str
    ) -> asyncio.Task[None] | None:
        """Decide that a session ends: the task that sees to it, None where it has ended."""
        now = self._rooms.clock.now()

        async def write(tx: Tx) -> bool:
            will_be = await ends.decide(tx, session_id, Move.END, reason, now)
            outcome = "ok" if will_be is not None else "ended already"
            await audit.note(tx, now, actor, door=door, operation="session_end", target=session_id, outcome=outcome)
            if will_be is not None and kept is not None:
                # It is decided: whoever hears of this after a crash hears of an end that comes, if not here.
                await kept(tx, replace(await rows.get(tx, session_id), state=will_be))
            return (await rows.get(tx, session_id)).ended_at is None

        async def decided() -> asyncio.Task[None] | None:
            is_to_come = await self._rooms.database.write(write)
            return self._see_to_end(session_id, actor, door) if is_to_come else None

        return await self._tasks.to_the_end(decided())

    def _see_to_end(self, session_id: str, actor: Actor = _SERVER, door: str = "server") -> asyncio.Task[None]:
        """The one task that ends a session whose end is decided; it outlives whoever asked for it."""
        task = self._endings.get(session_id)
        if task is None:
            task = self._tasks.create_task(self._end_all_of(actor, door, session_id), name=f"end of {session_id}")
            self._endings[session_id] = task
            task.add_done_callback(lambda _: self._endings.pop(session_id, None))
        return task

    async def _end_all_of(self, actor: Actor, door: str, session_id: str) -> None:
        """The droid first, then its calls; the last event when there is nobody left who could add another."""
        for fault in await asyncio.gather(
            insist(session_id, lambda: self._stop(session_id)),
            insist(session_id, lambda: self._end_children(actor, door, session_id)),
            return_exceptions=True,
        ):
            if isinstance(fault, Exception):  # no reason to stop here: the sweep and the next start end what is left
                logger.error("not all of a session was ended", exc_info=fault, extra={"session_id": session_id})
        await self._rooms.exchange.close_desk(session_id, "the session was ended")
        await self._wait_for_calls(session_id)
        now = self._rooms.clock.now()

        async def write(tx: Tx) -> int:
            return await self._rooms.events.append(tx, session_id, await ends.complete(tx, session_id, now), now)

        last = await insist(session_id, lambda: self._rooms.database.write(write))
        self._brought.pop(session_id, None)
        self._live.pop(session_id, None)
        self._rooms.following.wake(session_id, last)

    async def _wait_for_calls(self, session_id: str) -> None:
        """Let the ends of its calls be stored that were not at once: they are tried again where calls end."""
        for _ in range(round(CALLS_END_WITHIN_S / LOOK_EVERY_S)):
            if not await insist(
                session_id, lambda: self._rooms.database.read(lambda tx: rows.has_open_calls(tx, session_id))
            ):
                return
            await asyncio.sleep(LOOK_EVERY_S)
        logger.error("calls of a session outlive it", extra={"session_id": session_id})

    async def _stop(self, session_id: str) -> None:
        live = self._live.get(session_id)
        if live is not None:
            await live.stop()
        await self._rooms.boxes.end_of(session_id)

    async def _end_children(self, actor: Actor, door: str, session_id: str) -> None:
        # Of a session that ends, these are all: it starts no more of them.
        children = await self._rooms.database.read(lambda tx: rows.children(tx, session_id))
        endings: list[asyncio.Task[None] | None] = []
        for child in children:
            if child.is_live:
                endings.append(await self._decided(actor, door, child.id, reason=PARENT_ENDED))
            elif child.ended_at is None:
                endings.append(self._see_to_end(child.id, actor, door))
        coming = [ending for ending in endings if ending is not None]
        if coming:
            await asyncio.wait(coming)

    async def cancel(self, actor: Actor, door: str, session_id: str) -> bool:
        """Cancel the turn that is open now; what is queued stays queued."""
        now = self._rooms.clock.now()
        live = self._live.get(session_id)
        turn = live.open_turn if live is not None else None
        outcome = "ok" if turn is not None else "nothing open"

        async def write(tx: Tx) -> None:
            await audit.note(tx, now, actor, door=door, operation="session_cancel", target=session_id, outcome=outcome)

        # Before it is done: whoever asks may leave while the droid is still letting go.
        await self._rooms.database.write(write)
        return live is not None and turn is not None and await live.cancel(turn)

    # -- a server's life ----------------------------------------------------------------------------------------

    async def take_up(self) -> list[str]:
        """After a start, before any door opens: every session that had not ended goes on. Their ids."""
        found = await self._rooms.database.read(rows.not_ended)
        for session in found:
            self._take_calls(session)
        await self._rooms.exchange.load()
        unended = {session.id for session in found}
        for session in found:
            if session.ending is not None:
                self._live[session.id] = self._made(session)
                self._see_to_end(session.id)
            elif session.parent_id is not None and session.parent_id not in unended:
                # Its parent's end was stored, and the server did not live to end the children.
                self._live[session.id] = self._made(session)
                self._tasks.create_task(self._end_orphan(session.id))
            else:
                self._run(session, resumed=True)
        return [session.id for session in found]

    async def _end_orphan(self, session_id: str) -> None:
        await insist(session_id, lambda: self._decided(_SERVER, "server", session_id, reason=PARENT_ENDED))

    async def bind(self, actor: Actor, session: rows.Session, stream_id: str | None) -> None:
        """The owner touched this session by an MCP session: that one's stream carries it from now on."""
        if stream_id is None or actor.principal != session.owner or actor.inside or session.id not in self._live:
            return
        root_id = session.root_id
        if self._rooms.exchange.bind(session.id, stream_id):
            await self._rooms.database.write(lambda tx: rows.set_stream(tx, root_id, stream_id))

    async def check_descends(self, session_id: str, ancestor_id: str) -> rows.Session:
        """The session, if it is this one or below it. Raises `NotFound`: a droid sees its own tree and no other."""
        session = await self.get(session_id)
        one = session
        while one.id != ancestor_id:
            if one.parent_id is None:
                raise NotFound(f"no session {session_id!r}: session_list shows them")
            one = await self.get(one.parent_id)
        return session


def _nobody(session_id: str) -> None:
    del session_id
