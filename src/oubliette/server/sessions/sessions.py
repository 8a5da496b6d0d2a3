"""All sessions: those that live, their ends, and their return after a restart."""

import logging
from collections.abc import Awaitable, Callable

from oubliette.server import audit
from oubliette.server.errors import NotFound
from oubliette.server.sessions import rows
from oubliette.server.sessions.lifecycle import Move
from oubliette.server.sessions.session import LiveSession, Rooms
from oubliette.server.storage.database import Tx
from oubliette.server.tasks import Tasks
from oubliette.server.tokens import tokens
from oubliette.server.tokens.token import Actor, Scope

logger = logging.getLogger(__name__)

# On whose behalf the server itself ends what nobody else will.
_SERVER = Actor(principal="server", scope=Scope.ADMIN)


# Commits with an end what somebody has to know of it after a crash.
Kept = Callable[[Tx, rows.Session], Awaitable[None]]


class Sessions:
    def __init__(self, rooms: Rooms, *, tasks: Tasks, brought: dict[str, str]) -> None:
        self._rooms = rooms
        self._tasks = tasks
        self._brought = brought
        self._live: dict[str, LiveSession] = {}
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

    def redeclare(self, session: rows.Session) -> None:
        """The tools that are lent to a live session changed."""
        self._rooms.exchange.open_desk(session.id, session.root_id, session.owner, session.declaration)
        self.declared(session.id)

    def _take_calls(self, session: rows.Session) -> None:
        exchange = self._rooms.exchange
        exchange.open_desk(session.id, session.root_id, session.owner, session.declaration)
        if session.stream_id is not None:
            exchange.bind(session.id, session.stream_id)

    def _run(self, session: rows.Session, *, resumed: bool = False) -> None:
        live = self._live[session.id] = LiveSession(session, self._rooms, self._over)
        live.task = self._tasks.create_task(live.run(resumed=resumed), name=f"session {session.id}")

    # -- ends ---------------------------------------------------------------------------------------------------

    async def end(self, actor: Actor, door: str, session_id: str, kept: Kept | None = None) -> rows.Session:
        """End a session with its droid, children, pending calls and derived key. Ending twice is no error."""
        now = self._rooms.clock.now()

        async def write(tx: Tx) -> tuple[rows.Session, bool]:
            current = await rows.get(tx, session_id)
            if not current.is_live:
                await _note(tx, actor, door, "session_end", session_id, now, "ended already")
                return current, False
            open_turn = await rows.next_turn(tx, session_id)
            if open_turn is not None:
                await rows.end_turn(
                    tx,
                    session_id,
                    open_turn.number,
                    now,
                    stop_reason="session_ended",
                    text="",
                    error="the session was ended",
                    usage=None,
                )
            await rows.drop_queued(tx, session_id, now)
            await tokens.revoke_derived(tx, session_id, now)
            moved = await rows.move(tx, session_id, Move.END, now, "ended on request")
            await self._rooms.events.append(tx, session_id, moved, now)
            await _note(tx, actor, door, "session_end", session_id, now)
            ended = await rows.get(tx, session_id)
            if kept is not None:
                await kept(tx, ended)
            return ended, True

        session, changed = await self._rooms.database.write(write)
        # After it: a session that has ended starts no more children.
        await self._end_children(actor, door, session_id)
        if changed:
            await self._let_go(session_id, "the session was ended")
            self._rooms.following.wake(session_id, session.next_index - 1)
        return session

    async def _end_children(self, actor: Actor, door: str, session_id: str) -> None:
        for child in await self._rooms.database.read(lambda tx: rows.children(tx, session_id)):
            if child.is_live:
                await self.end(actor, door, child.id)

    async def cancel(self, actor: Actor, door: str, session_id: str) -> bool:
        """Cancel the open turn; what is queued stays queued."""
        now = self._rooms.clock.now()
        live = self._live.get(session_id)
        outcome = "ok" if live is not None and live.has_open_turn else "nothing open"

        async def write(tx: Tx) -> None:
            await _note(tx, actor, door, "session_cancel", session_id, now, outcome)

        # Before it is done: whoever asks may leave while the droid is still letting go.
        await self._rooms.database.write(write)
        return await live.cancel() if live is not None else False

    def _over(self, session_id: str) -> None:
        """A session ended from inside."""
        self._tasks.create_task(self._end_rest(session_id))

    async def _end_rest(self, session_id: str) -> None:
        await self._end_children(_SERVER, "server", session_id)
        await self._let_go(session_id, "the session ended")

    async def _let_go(self, session_id: str, reason: str) -> None:
        self._brought.pop(session_id, None)
        await self._rooms.exchange.close_desk(session_id, reason)
        live = self._live.pop(session_id, None)
        if live is not None:
            await live.stop()

    # -- a server's life ----------------------------------------------------------------------------------------

    async def take_up(self) -> list[str]:
        """After a start, before any door opens: every session that had not ended goes on. Their ids."""
        found = await self._rooms.database.read(rows.live)
        for session in found:
            self._take_calls(session)
        await self._rooms.exchange.load()
        living = {session.id for session in found}
        for session in found:
            self._run(session, resumed=True)
            if session.parent_id is not None and session.parent_id not in living:
                # Its parent's end was stored, and the server did not live to end the children.
                self._tasks.create_task(self.end(_SERVER, "server", session.id))
        return [session.id for session in found]

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
                raise NotFound(f"no session {session_id!r}: session_list shows them", hidden=True)
            one = await self.get(one.parent_id)
        return session


async def _note(tx: Tx, actor: Actor, door: str, operation: str, target: str, now: float, outcome: str = "ok") -> None:
    await audit.write(tx, now, audit.entry(actor, door=door, operation=operation, outcome=outcome, target=target))


def _nobody(session_id: str) -> None:
    del session_id
