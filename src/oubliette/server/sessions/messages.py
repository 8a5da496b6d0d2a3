"""Messages to sessions: which session a message goes to, and what a session is started with."""

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from oubliette.server import audit, ids
from oubliette.server.caller_tools.declaration import Declaration
from oubliette.server.errors import Conflict, Forbidden, TooMany
from oubliette.server.projects import projects
from oubliette.server.projects.premises import Premises
from oubliette.server.projects.projects import Project, Resolved
from oubliette.server.sessions import rows
from oubliette.server.sessions.lifecycle import State
from oubliette.server.sessions.rows import Choices
from oubliette.server.sessions.session import Rooms
from oubliette.server.sessions.sessions import Kept, Sessions
from oubliette.server.storage.database import Tx
from oubliette.server.tasks import Tasks
from oubliette.server.tokens.token import Actor
from oubliette.wire.events import CallerToolsDeclared, ChildStarted, Event, Status, UserMessage

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
    last_event_index: int  # before the message
    log_end: int  # with it


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """What was committed with a message, and who is to hear of it."""

    messaged: Messaged
    redeclared: Mapping[str, int] = field(default_factory=dict[str, int])  # whose tools changed, and their logs' ends
    interrupts: int | None = None  # the turn that it found before it
    parent_end: int | None = None  # where the parent's log ends with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    sessions: int  # of the whole server, children too
    sessions_per_project: int  # that callers started
    max_depth: int
    max_descendants: int


class Messages:
    def __init__(self, rooms: Rooms, sessions: Sessions, *, bounds: Bounds, premises: Premises, tasks: Tasks) -> None:
        self._rooms = rooms
        self._premises = premises
        self._sessions = sessions
        self._bounds = bounds
        self._tasks = tasks

    @property
    def bounds(self) -> Bounds:
        return self._bounds

    async def message(self, actor: Actor, door: str, project_id: str, wanted: Wanted, kept: Kept[Messaged]) -> Messaged:
        """Give a message to the live session of a workspace, or start one with it."""
        await self._rooms.boxes.runtime.check()

        async def give(tx: Tx, now: float) -> _Written:
            project = await projects.get(tx, project_id)
            where = await self._workspace(tx, project, wanted, now)
            current = await rows.live_in(tx, project_id, where.workspace.id)
            if current is None:
                return _Written(messaged=await self._start(tx, actor, project, where, wanted, now))
            written = await self._send(tx, actor, current, wanted, now)
            return replace(written, messaged=replace(written.messaged, workspace_created=where.created))

        return await self._do(actor, door, "session_message", give, wanted, kept)

    async def send(self, actor: Actor, door: str, session_id: str, wanted: Wanted, kept: Kept[Messaged]) -> Messaged:
        """Give a message to this very session."""

        async def give(tx: Tx, now: float) -> _Written:
            current = await rows.get(tx, session_id)
            if not current.is_live:
                raise Conflict(f"session {session_id} has ended ({current.reason}): start another")
            if wanted.workspace_id not in (None, current.workspace_id):
                raise Conflict(
                    f"session {session_id} works in workspace {current.workspace_id}: leave workspace_id out"
                )
            return await self._send(tx, actor, current, wanted, now)

        return await self._do(actor, door, "session_message", give, wanted, kept)

    async def spawn(self, actor: Actor, door: str, project_id: str, wanted: Wanted, kept: Kept[Messaged]) -> Messaged:
        """Start a new session, whatever else lives in its workspace."""
        await self._rooms.boxes.runtime.check()

        async def give(tx: Tx, now: float) -> _Written:
            project = await projects.get(tx, project_id)
            where = await self._workspace(tx, project, wanted, now)
            return _Written(messaged=await self._start(tx, actor, project, where, wanted, now))

        return await self._do(actor, door, "session_spawn", give, wanted, kept)

    async def spawn_child(
        self, actor: Actor, door: str, parent_id: str, wanted: Wanted, kept: Kept[Messaged]
    ) -> Messaged:
        """Start a session below another: with its root's owner and budget, and its parent's caller tools."""

        async def give(tx: Tx, now: float) -> _Written:
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
            child = ChildStarted(child_session_id=started.session.id)
            return _Written(messaged=started, parent_end=await self._rooms.events.append(tx, parent_id, (child,), now))

        return await self._do(actor, door, "session_spawn", give, wanted, kept)

    async def _do(
        self,
        actor: Actor,
        door: str,
        operation: str,
        give: Callable[[Tx, float], Awaitable[_Written]],
        wanted: Wanted,
        kept: Kept[Messaged],
    ) -> Messaged:
        """Commit a message with its audit, and let it take effect; whoever asked may leave in between."""
        now = self._rooms.clock.now()

        async def write(tx: Tx) -> _Written:
            written = await give(tx, now)
            session_id = written.messaged.session.id
            await audit.note(tx, now, actor, door=door, operation=operation, target=session_id)
            await kept(tx, written.messaged)
            return written

        chooses = wanted.create_workspace and wanted.workspace_id is not None

        async def done() -> Messaged:
            async with self._premises.naming if chooses else contextlib.nullcontext():
                written = await self._rooms.database.write(write)
            return await self._settled(written, wanted)

        return await self._tasks.to_the_end(done())

    async def _settled(self, written: _Written, wanted: Wanted) -> Messaged:
        """After the commit: the session's task begins or is woken, and its clients learn of new tools."""
        messaged = written.messaged
        session = messaged.session
        if messaged.spawned:
            self._sessions.begin(session, api_key=wanted.api_key)
            if session.parent_id is not None:  # which may have been lent others since
                await self._sessions.redeclare([session.id])
        elif written.redeclared:
            await self._sessions.redeclare(written.redeclared)
            for session_id, end in written.redeclared.items():
                self._rooms.following.wake(session_id, end)
        live = self._sessions.live(session.id)
        if live is not None:
            if written.interrupts is not None:
                await live.cancel(written.interrupts)
            live.wake()
        self._rooms.following.wake(session.id, messaged.log_end)
        if written.parent_end is not None and session.parent_id is not None:
            self._rooms.following.wake(session.parent_id, written.parent_end)
        return messaged

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
        await self._check_room(tx, project.id, is_root=parent is None)
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
            ending=None,
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
        await self._rooms.events.begin(tx, session_id)
        turn = await rows.queue(tx, session_id, wanted.message, wanted.source, now)
        said: list[Event] = [Status(status=State.STARTING.value)]
        if declaration is not None:
            said.append(_declared(declaration))
        said.append(UserMessage(text=wanted.message, turn=turn, source=wanted.source))
        end = await self._rooms.events.append(tx, session_id, said, now)
        return Messaged(
            session=session,
            turn=turn,
            spawned=True,
            workspace_created=where.created,
            last_event_index=-1,
            log_end=end,
        )

    async def _check_room(self, tx: Tx, project_id: str, *, is_root: bool) -> None:
        bounds = self._bounds
        if is_root and await rows.count_roots(tx, project_id) >= bounds.sessions_per_project:
            raise TooMany(f"{bounds.sessions_per_project} sessions of this project are live: end one with session_end")
        if await rows.count(tx) >= bounds.sessions:
            raise TooMany(f"sessions_max ({bounds.sessions}) is reached: that many sessions live on this server")

    def _choices(self, project: Project, wanted: Wanted, parent: rows.Session | None) -> Choices:
        if parent is not None:
            # A child has no more than its parent: its scope is the parent's at most, its bounds are the root's.
            scopes = (parent.choices.oubliette_scope, wanted.oubliette_scope)
            scope = None if None in scopes else ("read" if "read" in scopes else "write")
            return msgspec.structs.replace(
                parent.choices,
                autonomy=_least(wanted.autonomy or parent.choices.autonomy, parent.choices.autonomy),
                oubliette_scope=scope,
                brought_key=False,
                own_tools=wanted.declaration is not None,
            )
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

    async def _send(self, tx: Tx, actor: Actor, current: rows.Session, wanted: Wanted, now: float) -> _Written:
        """Queue a message for a live session. Only its owner changes what is lent to it."""
        said: list[Event] = []
        if wanted.declaration is not None and current.owner != actor.principal:
            raise Forbidden("only the token that started this session can lend it tools")
        if wanted.oubliette_scope is not None or wanted.api_key is not None or wanted.autonomy is not None:
            raise Conflict(
                "oubliette_scope, oubliette_api_key and autonomy are chosen when a session starts; this one lives:"
                " end it or start another with session_spawn"
            )
        if _least(current.choices.autonomy, wanted.autonomy_max) != current.choices.autonomy:
            raise Forbidden("a droid cannot send to a session that may do more than its own")
        redeclared: dict[str, int] = {}
        if wanted.declaration is not None and current.parent_id is not None and not current.choices.own_tools:
            await rows.set_choices(tx, current.id, msgspec.structs.replace(current.choices, own_tools=True))
        if wanted.declaration is not None and wanted.declaration != current.declaration:
            redeclared = await self._lend(tx, current, wanted.declaration, now)
            said.append(_declared(wanted.declaration))
            current = replace(current, declaration=wanted.declaration)
        before = await rows.next_turn(tx, current.id) if wanted.interrupt else None
        turn = await rows.queue(tx, current.id, wanted.message, wanted.source, now)
        said.append(UserMessage(text=wanted.message, turn=turn, source=wanted.source))
        end = await self._rooms.events.append(tx, current.id, said, now)
        messaged = Messaged(
            session=current,
            turn=turn,
            spawned=False,
            workspace_created=False,
            last_event_index=current.next_index - 1,
            log_end=end,
        )
        interrupts = before.number if before is not None else None
        return _Written(messaged=messaged, redeclared=redeclared, interrupts=interrupts)

    async def _lend(self, tx: Tx, current: rows.Session, declaration: Declaration, now: float) -> dict[str, int]:
        """Change a session's tools, also for those below that have them of it: where the log of each ends with that.

        Its own log is told of it with the message.
        """
        heirs = await rows.heirs(tx, current)
        await rows.set_declaration(tx, [current.id, *(heir.id for heir in heirs)], declaration)
        ends = {current.id: current.next_index}
        for heir in heirs:
            ends[heir.id] = await self._rooms.events.append(tx, heir.id, (_declared(declaration),), now)
        return ends


def _least(one: str, other: str) -> str:
    return min(one, other, key=AUTONOMY.index)


def _declared(declaration: Declaration) -> CallerToolsDeclared:
    return CallerToolsDeclared(
        caller_id=declaration.caller_id,
        tools=[tool.name for tool in declaration.tools],
        names=declaration.names(),
    )
