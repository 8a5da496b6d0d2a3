"""All sessions: started, messaged, declared to, cancelled, ended, and taken up again after a restart."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from oubliette.server import audit, ids
from oubliette.server.caller_tools.declaration import Declaration
from oubliette.server.errors import Conflict, Forbidden, NotFound, TooMany
from oubliette.server.projects import projects
from oubliette.server.projects.projects import Project, Resolved
from oubliette.server.sessions import rows
from oubliette.server.sessions.lifecycle import Move, State
from oubliette.server.sessions.rows import Choices
from oubliette.server.sessions.session import LiveSession, Rooms
from oubliette.server.storage.database import Tx
from oubliette.server.tasks import Tasks
from oubliette.server.tokens import tokens
from oubliette.server.tokens.token import Actor, Scope
from oubliette.wire.events import CallerToolsDeclared, ChildStarted, Event, Status, UserMessage

logger = logging.getLogger(__name__)

Autonomy = Literal["off", "low", "medium", "high"]
AUTONOMY: tuple[Autonomy, ...] = ("off", "low", "medium", "high")  # from least to most


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a caller asks a session to be. None keeps what is, or the default."""

    message: str
    workspace_id: str | None = None
    create_workspace: bool = False
    external_id: str | None = None
    source: str | None = None
    autonomy: Autonomy | None = None
    oubliette_scope: Literal["read", "write"] | None = None
    api_key: str | None = None
    declaration: Declaration | None = None
    interrupt: bool = False
    autonomy_max: Autonomy = "high"  # what is asked out of a box gets no box weaker than that one

    def __repr__(self) -> str:
        return f"Wanted(workspace_id={self.workspace_id!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Messaged:
    """What became of a message."""

    session: rows.Session
    turn: int
    spawned: bool
    workspace_created: bool
    last_event_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    sessions_per_project: int
    max_depth: int
    max_descendants: int


class Sessions:
    def __init__(self, rooms: Rooms, *, tasks: Tasks, bounds: Bounds, brought: dict[str, str]) -> None:
        self._rooms = rooms
        self._tasks = tasks
        self._bounds = bounds
        self._brought = brought
        self._live: dict[str, LiveSession] = {}
        self.declared: Callable[[str], None] = _nobody

    @property
    def bounds(self) -> Bounds:
        return self._bounds

    def live(self, session_id: str) -> LiveSession | None:
        return self._live.get(session_id)

    # -- messages -----------------------------------------------------------------------------------------------

    async def message(self, actor: Actor, door: str, project_id: str, wanted: Wanted) -> Messaged:
        """Give a message to the live session of a workspace, or start one with it."""
        await self._rooms.boxes.runtime.check()
        now = self._rooms.clock.now()

        async def write(tx: Tx) -> tuple[Messaged, bool]:
            project = await projects.get(tx, project_id)
            where = await self._workspace(tx, project, wanted, now)
            current = await rows.live_in(tx, project_id, where.workspace.id)
            if current is None:
                started = await self._start(tx, actor, project, where, wanted, now)
                await self._note(tx, actor, door, "session_message", started.session.id, now)
                return started, wanted.declaration is not None
            sent, redeclared = await self._send(tx, actor, current, wanted, now)
            await self._note(tx, actor, door, "session_message", current.id, now)
            return replace(sent, workspace_created=where.created), redeclared

        return await self._settled(await self._rooms.database.write(write), wanted)

    async def send(self, actor: Actor, door: str, session_id: str, wanted: Wanted) -> Messaged:
        """Give a message to this very session."""
        now = self._rooms.clock.now()

        async def write(tx: Tx) -> tuple[Messaged, bool]:
            current = await rows.get(tx, session_id)
            if not current.is_live:
                raise Conflict(f"session {session_id} has ended ({current.state.value}): start another")
            sent = await self._send(tx, actor, current, wanted, now)
            await self._note(tx, actor, door, "session_message", session_id, now)
            return sent

        return await self._settled(await self._rooms.database.write(write), wanted)

    async def spawn(self, actor: Actor, door: str, project_id: str, wanted: Wanted) -> Messaged:
        """Start a new session, whatever else lives in its workspace."""
        await self._rooms.boxes.runtime.check()
        now = self._rooms.clock.now()

        async def write(tx: Tx) -> tuple[Messaged, bool]:
            project = await projects.get(tx, project_id)
            where = await self._workspace(tx, project, wanted, now)
            started = await self._start(tx, actor, project, where, wanted, now)
            await self._note(tx, actor, door, "session_spawn", started.session.id, now)
            return started, wanted.declaration is not None

        return await self._settled(await self._rooms.database.write(write), wanted)

    async def spawn_child(self, actor: Actor, door: str, parent_id: str, wanted: Wanted) -> Messaged:
        """Start a session below another: with its root's owner, budget and, unless told otherwise, caller tools."""
        now = self._rooms.clock.now()

        async def write(tx: Tx) -> tuple[Messaged, bool]:
            parent = await rows.get(tx, parent_id)
            if not parent.is_live:
                raise Conflict(f"session {parent_id} has ended: it starts no more sessions")
            if parent.depth >= parent.choices.max_depth:
                raise TooMany(
                    f"max_recursion_depth ({parent.choices.max_depth}) is reached: this session may start no others"
                )
            if await rows.count_descendants(tx, parent.root_id) >= parent.choices.max_descendants:
                raise TooMany(
                    f"max_agents_per_session ({parent.choices.max_descendants}) is reached: the root session"
                    f" {parent.root_id} has started that many"
                )
            project = await projects.get(tx, parent.project_id)
            where = await self._workspace(tx, project, wanted, now, default=parent.workspace_id)
            started = await self._start(tx, actor, project, where, wanted, now, parent=parent)
            await self._note(tx, actor, door, "session_spawn", started.session.id, now)
            child = ChildStarted(child_session_id=started.session.id)
            await self._rooms.events.append(tx, parent_id, (child,), now)
            return started, False

        messaged = await self._settled(await self._rooms.database.write(write), wanted)
        self._rooms.following.wake(parent_id, 1 << 62)
        return messaged

    async def _settled(self, written: tuple[Messaged, bool], wanted: Wanted) -> Messaged:
        """After the commit: the session's task is woken or begins, and its clients learn of new tools."""
        messaged, redeclared = written
        session = messaged.session
        if messaged.spawned:
            if wanted.api_key is not None:
                self._brought[session.id] = wanted.api_key
            self._go_live(session)
        elif redeclared:
            self._rooms.exchange.open_desk(session.id, session.root_id, session.owner, session.declaration)
            self.declared(session.id)
        live = self._live.get(session.id)
        if live is not None:
            if wanted.interrupt and not messaged.spawned:
                await live.cancel()
            live.wake()
        self._rooms.following.wake(session.id, 1 << 62)
        return messaged

    def _go_live(self, session: rows.Session) -> None:
        self._take_calls(session)
        self._begin(session)

    def _take_calls(self, session: rows.Session) -> None:
        exchange = self._rooms.exchange
        exchange.open_desk(session.id, session.root_id, session.owner, session.declaration)
        if session.stream_id is not None:
            exchange.bind(session.id, session.stream_id)

    def _begin(self, session: rows.Session, *, resumed: bool = False) -> None:
        live = self._live[session.id] = LiveSession(session, self._rooms, self._over)
        live.task = self._tasks.create_task(live.run(resumed=resumed), name=f"session {session.id}")

    async def _workspace(
        self, tx: Tx, project: Project, wanted: Wanted, now: float, default: str | None = None
    ) -> Resolved:
        named = wanted.workspace_id or (default if not wanted.create_workspace else None)
        resolved = await projects.resolve_workspace(
            tx,
            project,
            named,
            create_missing=wanted.create_workspace,
            now=now,
            external_id=wanted.external_id,
            source=wanted.source,
        )
        await projects.touch_workspace(tx, resolved.workspace.id, now)
        return resolved

    async def _start(
        self,
        tx: Tx,
        actor: Actor,
        project: Project,
        where: Resolved,
        wanted: Wanted,
        now: float,
        *,
        parent: rows.Session | None = None,
    ) -> Messaged:
        if parent is None and await rows.count_live(tx, project.id) >= self._bounds.sessions_per_project:
            raise TooMany(
                f"{self._bounds.sessions_per_project} sessions of this project are live: end one with session_end"
            )
        session_id = ids.new_session_id(now)
        declaration = wanted.declaration
        if declaration is None and parent is not None:
            declaration = parent.declaration
        session = rows.Session(
            id=session_id,
            project_id=project.id,
            workspace_id=where.workspace.id,
            owner=parent.owner if parent is not None else actor.principal,
            token_id=parent.token_id if parent is not None else actor.token_id,
            state=State.STARTING,
            reason=None,
            parent_id=parent.id if parent is not None else None,
            root_id=parent.root_id if parent is not None else session_id,
            depth=parent.depth + 1 if parent is not None else 0,
            choices=self._choices(project, wanted, parent),
            declaration=declaration,
            stream_id=parent.stream_id if parent is not None else None,
            next_index=0,
            turns=0,
            external_id=wanted.external_id,
            source=wanted.source,
            created_at=now,
            updated_at=now,
            ended_at=None,
        )
        await rows.insert(tx, session)
        turn = await rows.queue(tx, session_id, wanted.message, wanted.source, now)
        said: list[Event] = [Status(status=State.STARTING.value)]
        if declaration is not None:
            said.append(_declared(declaration))
        said.append(UserMessage(text=wanted.message, turn=turn, source=wanted.source))
        await self._rooms.events.append(tx, session_id, said, now)
        return Messaged(session=session, turn=turn, spawned=True, workspace_created=where.created, last_event_index=-1)

    def _choices(self, project: Project, wanted: Wanted, parent: rows.Session | None) -> Choices:
        if parent is not None:
            # A child has no more than its parent: its scope is the parent's at most, its bounds are the root's.
            scopes = (parent.choices.oubliette_scope, wanted.oubliette_scope)
            scope = None if None in scopes else ("read" if "read" in scopes else "write")
            autonomy = _least(wanted.autonomy or parent.choices.autonomy, parent.choices.autonomy)
            return replace_choices(parent.choices, autonomy=autonomy, oubliette_scope=scope)
        settings = project.settings
        return Choices(
            autonomy=_least(wanted.autonomy or settings.get("autonomy") or "medium", wanted.autonomy_max),
            oubliette_scope=wanted.oubliette_scope,
            brought_key=wanted.api_key is not None,
            max_depth=min(settings.get("max_recursion_depth", self._bounds.max_depth), self._bounds.max_depth),
            max_descendants=min(
                settings.get("max_agents_per_session", self._bounds.max_descendants), self._bounds.max_descendants
            ),
        )

    async def _send(
        self, tx: Tx, actor: Actor, current: rows.Session, wanted: Wanted, now: float
    ) -> tuple[Messaged, bool]:
        """Queue a message for a live session. Only its owner changes what is lent to it."""
        said: list[Event] = []
        redeclared = wanted.declaration is not None and wanted.declaration != current.declaration
        if wanted.declaration is not None and current.owner != actor.principal:
            raise Forbidden("only the token that started this session can lend it tools")
        if wanted.oubliette_scope is not None or wanted.api_key is not None or wanted.autonomy is not None:
            raise Conflict(
                "oubliette_scope, oubliette_api_key and autonomy are chosen when a session starts; this one lives:"
                " end it or start another with session_spawn"
            )
        if _least(current.choices.autonomy, wanted.autonomy_max) != current.choices.autonomy:
            raise Forbidden("a droid cannot send to a session that may do more than its own")
        if redeclared and wanted.declaration is not None:
            await rows.set_declaration(tx, current.id, wanted.declaration)
            said.append(_declared(wanted.declaration))
            current = replace(current, declaration=wanted.declaration)
        turn = await rows.queue(tx, current.id, wanted.message, wanted.source, now)
        said.append(UserMessage(text=wanted.message, turn=turn, source=wanted.source))
        before = current.next_index - 1
        await self._rooms.events.append(tx, current.id, said, now)
        messaged = Messaged(session=current, turn=turn, spawned=False, workspace_created=False, last_event_index=before)
        return messaged, redeclared

    @staticmethod
    async def _note(tx: Tx, actor: Actor, door: str, operation: str, target: str, now: float) -> None:
        await audit.write(tx, now, audit.entry(actor, door=door, operation=operation, outcome="ok", target=target))

    # -- ends ---------------------------------------------------------------------------------------------------

    async def end(self, actor: Actor, door: str, session_id: str) -> rows.Session:
        """End a session with its droid, children, pending calls and derived key. Ending twice is no error."""
        now = self._rooms.clock.now()

        async def write(tx: Tx) -> tuple[rows.Session, bool]:
            current = await rows.get(tx, session_id)
            if not current.is_live:
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
            await self._note(tx, actor, door, "session_end", session_id, now)
            return await rows.get(tx, session_id), True

        session, changed = await self._rooms.database.write(write)
        # After it: a session that has ended starts no more children.
        await self._end_children(actor, door, session_id)
        if changed:
            await self._let_go(session_id, "the session was ended")
        return session

    async def _end_children(self, actor: Actor, door: str, session_id: str) -> None:
        for child in await self._rooms.database.read(lambda tx: rows.children(tx, session_id)):
            if child.is_live:
                await self.end(actor, door, child.id)

    async def cancel(self, actor: Actor, door: str, session_id: str) -> bool:
        """Cancel the open turn; what is queued stays queued."""
        now = self._rooms.clock.now()

        async def write(tx: Tx) -> None:
            await self._note(tx, actor, door, "session_cancel", session_id, now)

        await self._rooms.database.write(write)
        live = self._live.get(session_id)
        return await live.cancel() if live is not None else False

    def _over(self, session_id: str) -> None:
        """A session ended from inside."""
        self._tasks.create_task(self._end_rest(session_id))

    async def _end_rest(self, session_id: str) -> None:
        await self._end_children(Actor(principal="server", scope=Scope.ADMIN), "server", session_id)
        now = self._rooms.clock.now()
        await self._rooms.database.write(lambda tx: tokens.revoke_derived(tx, session_id, now))
        await self._let_go(session_id, "the session ended")

    async def _let_go(self, session_id: str, reason: str) -> None:
        self._brought.pop(session_id, None)
        await self._rooms.exchange.close_desk(session_id, reason)
        live = self._live.pop(session_id, None)
        if live is not None:
            await live.stop()
        self._rooms.following.wake(session_id, 1 << 62)

    # -- a server's life ----------------------------------------------------------------------------------------

    async def take_up(self) -> list[str]:
        """After a start, before any door opens: every session that had not ended goes on. Their ids."""
        found = await self._rooms.database.read(rows.live)
        for session in found:
            self._take_calls(session)
        await self._rooms.exchange.load()
        for session in found:
            self._begin(session, resumed=True)
        return [session.id for session in found]

    async def get(self, session_id: str) -> rows.Session:
        return await self._rooms.database.read(lambda tx: rows.get(tx, session_id))

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
                raise NotFound(f"no session {session_id!r} below this one")
            one = await self.get(one.parent_id)
        return session


def replace_choices(choices: Choices, *, autonomy: str, oubliette_scope: str | None) -> Choices:
    return Choices(
        autonomy=autonomy,
        oubliette_scope=oubliette_scope,
        brought_key=False,
        max_depth=choices.max_depth,
        max_descendants=choices.max_descendants,
    )


def _least(one: str, other: str) -> str:
    return min(one, other, key=AUTONOMY.index)


def _declared(declaration: Declaration) -> CallerToolsDeclared:
    return CallerToolsDeclared(
        caller_id=declaration.caller_id,
        tools=[tool.name for tool in declaration.tools],
        names=declaration.names(),
    )


def _nobody(session_id: str) -> None:
    del session_id
