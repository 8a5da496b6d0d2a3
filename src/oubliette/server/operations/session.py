"""Operations on sessions."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from oubliette.server.caller_tools.declaration import Declaration, OfferedTool, declare
from oubliette.server.errors import Forbidden, InvalidParams
from oubliette.server.limits import (
    EVENTS_PAGE,
    LIST_MAX,
    MESSAGE_BYTES,
    NAME_CHARS,
    OFFSET_MAX,
    PAGE_BYTES,
    PROMISE_ANSWER_S,
    PROMISE_POLL_S,
    WAIT_S_MAX,
    WATCH_S_MAX,
)
from oubliette.server.operations.choices import ChosenAutonomy
from oubliette.server.operations.operation import Asked, Operation, Rooms, Target
from oubliette.server.operations.space import Space
from oubliette.server.operations.watching import Seen, follow, page_of_tree
from oubliette.server.sessions import rows
from oubliette.server.sessions.lifecycle import State
from oubliette.server.sessions.messages import Autonomy, Messaged, Wanted
from oubliette.server.storage.database import Tx
from oubliette.server.tokens.token import Scope

FAILURES = (State.FAILED, State.TIMED_OUT)
SessionId = Annotated[str, Meta(description="The session's id.")]
LeftOut = Annotated[list[str], Meta(description="Fields that are too large here: session_get shows the turn's text.")]
Wait = Annotated[float, Meta(ge=0, le=WAIT_S_MAX, description="Wait so many seconds at most.")]


class Context(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a caller lends to a session, and to those below it that were lent nothing themselves."""

    caller_id: Annotated[str | None, Meta(description="Prefix of your tools' names in the box, e.g. ant.")] = None
    caller_tools: list[OfferedTool] | None = None
    caller_tool_timeout_s: Annotated[float, Meta(gt=0)] | None = None
    delivery: Annotated[
        Literal["push", "poll"], Meta(description="poll: you only ever poll, and never count as disconnected.")
    ] = "push"


class _Lending(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Parameters that session_message and session_spawn share."""

    workspace_id: Annotated[str | None, Meta(description="Without one, the project's default workspace.")] = None
    create_workspace: Annotated[bool, Meta(description="Make the workspace if it is missing.")] = False
    external_id: (
        Annotated[str, Meta(max_length=NAME_CHARS, description="Yours; kept with what is made for this message.")]
        | None
    ) = None
    source: (
        Annotated[str, Meta(max_length=NAME_CHARS, description="Where the message comes from; kept with its turn.")]
        | None
    ) = None
    context: Context | None = None
    caller_id: Annotated[str | None, Meta(description="The same as context.caller_id.")] = None
    caller_tools: Annotated[list[OfferedTool] | None, Meta(description="The same as context.caller_tools.")] = None
    autonomy: ChosenAutonomy | None = None
    oubliette_scope: Annotated[
        Literal["read", "write"] | None,
        Meta(
            description="Give the droid oubliette_* tools by a key of its own: no more than your rights, for this"
            " project, good in this session only."
        ),
    ] = None
    oubliette_api_key: Annotated[
        str | None, Meta(description="Give the droid this key of yours instead. It is kept in memory only.")
    ] = None
    wait_seconds: Annotated[
        float, Meta(ge=0, le=WAIT_S_MAX, description="Wait so long at most for the turn to end.")
    ] = 0


class SessionMessage(_Lending, kw_only=True, forbid_unknown_fields=True):
    project_id: Annotated[
        str | None,
        Meta(description="Needed unless session_id is given, or with a key that a box was given by oubliette_scope."),
    ] = None
    session_id: Annotated[str | None, Meta(description="Send to this very session.")] = None
    message: Annotated[str, Meta(min_length=1, max_length=MESSAGE_BYTES)]
    interrupt: Annotated[bool, Meta(description="Cancel the running turn first.")] = False


class SessionSpawn(_Lending, kw_only=True, forbid_unknown_fields=True):
    project_id: Annotated[
        str | None, Meta(description="Needed, except with a key that a box was given by oubliette_scope.")
    ] = None
    message: Annotated[str, Meta(min_length=1, max_length=MESSAGE_BYTES)]


class SessionMessaged(msgspec.Struct, kw_only=True, omit_defaults=True):
    session_id: str
    spawned: bool
    workspace_id: str
    workspace_created: bool
    last_event_index: Annotated[int, Meta(description="Events after this one are about this message; -1: all.")]
    turn: int
    status: str
    caller_tools: Annotated[dict[str, str] | None, Meta(description="Your tools' names as the droid sees them.")] = None
    pending_caller_requests: Annotated[
        int, Meta(description="Calls of your tools that wait: caller_tool_pending shows them.")
    ] = 0
    result: Annotated[str | None, Meta(description="The turn's text, where wait_seconds saw its end.")] = None
    stop_reason: str | None = None
    error: str | None = None
    left_out: LeftOut = []


class SessionNamed(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    session_id: SessionId


class SessionGet(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    session_id: SessionId
    turns: Annotated[int, Meta(ge=0, le=100, description="Show so many of the newest turns, as far as they fit.")] = 1
    before_turn: Annotated[int, Meta(ge=1, description="Only turns before this one.")] | None = None


class SessionList(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    project_id: str
    status: Annotated[list[State], Meta(description="Only sessions in one of these states.")] = []
    parent_session_id: Annotated[str | None, Meta(description="Only children of this one.")] = None
    limit: Annotated[int, Meta(ge=1, le=LIST_MAX)] = 50
    offset: Annotated[int, Meta(ge=0, le=OFFSET_MAX)] = 0


class TurnShown(msgspec.Struct, kw_only=True, omit_defaults=True):
    turn: int
    status: str
    prompt: str
    created_at: float
    started_at: float | None = None
    ended_at: float | None = None
    stop_reason: str | None = None
    text: str | None = None
    error: str | None = None
    usage: dict[str, Any] | None = None


class SessionShown(msgspec.Struct, kw_only=True, omit_defaults=True):
    session_id: str
    project_id: str
    workspace_id: str
    status: str
    reason: str | None = None
    parent_session_id: str | None = None
    depth: int
    autonomy: str
    oubliette_scope: str | None = None
    caller_id: str | None = None
    caller_tools: dict[str, str] | None = None
    turn_count: int
    last_prompt: Annotated[
        str | None,
        Meta(description=f"In a list: the first {rows.LAST_PROMPT_CHARS} characters of its newest message."),
    ] = None
    last_index: int
    created_at: float
    updated_at: float
    ended_at: float | None = None
    external_id: str | None = None
    source: str | None = None
    children: list[str] | None = None
    pending_caller_requests: int = 0
    turns: list[TurnShown] | None = None
    usage: Annotated[
        dict[str, int] | None, Meta(description="The tokens that all its turns used, where the droid counts them.")
    ] = None
    turns_left_out: Annotated[
        int, Meta(description="So many of the turns asked for did not fit: ask with before_turn for older ones.")
    ] = 0


class SessionsShown(msgspec.Struct, kw_only=True):
    sessions: list[SessionShown]


class SessionEnded(msgspec.Struct, kw_only=True):
    session_id: str
    status: str


class SessionCancelled(msgspec.Struct, kw_only=True):
    session_id: str
    cancelled: Annotated[bool, Meta(description="Whether a turn was open.")]


class SessionEvents(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    session_id: SessionId
    since_index: Annotated[int, Meta(ge=-1, description="Events after this one; -1: from the start.")] = -1
    max_events: Annotated[int, Meta(ge=1, le=EVENTS_PAGE)] = 100
    wait_seconds: Wait = 0
    include_children: Annotated[
        bool, Meta(description="Events of the sessions below, too, merged by time; page on by cursor.")
    ] = False
    cursor: Annotated[str | None, Meta(description="The cursor of the page before, with include_children.")] = None


class SessionWatch(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    session_id: SessionId
    since_index: Annotated[int, Meta(ge=-1)] = -1
    wait_seconds: Annotated[float, Meta(ge=0, le=WATCH_S_MAX, description="Follow for so long at most.")] = WAIT_S_MAX
    until: Annotated[
        Literal["idle", "end"], Meta(description="Return when no turn is open or queued, or when the session ended.")
    ] = "idle"
    deltas: Annotated[bool, Meta(description="Push token deltas, too.")] = False


def _declaration(rooms: Rooms, params: _Lending) -> Declaration | None:
    """What is lent, from `context` or from the top level; where both speak they must say the same."""
    context = params.context or Context()
    for name in ("caller_id", "caller_tools"):
        inner, outer = getattr(context, name), getattr(params, name)
        if inner is not None and outer is not None and inner != outer:
            raise InvalidParams(f"{name} stands in context and at the top level, and they differ: give it once")
    caller_id = context.caller_id if context.caller_id is not None else params.caller_id
    tools = context.caller_tools if context.caller_tools is not None else params.caller_tools
    if caller_id is None and tools is None:
        if context.caller_tool_timeout_s is not None or context.delivery != "push":
            raise InvalidParams("context says how caller tools are called, and lends none: caller_id is missing")
        return None
    if caller_id is None:
        raise InvalidParams("caller_tools need a caller_id: it is the prefix of their names in the box")
    return declare(
        caller_id,
        tools or [],
        timeout_s=context.caller_tool_timeout_s,
        timeout_max_s=rooms.timeout_max_s,
        delivery=context.delivery,
    )


async def _wanted(rooms: Rooms, asked: Asked, params: SessionMessage | SessionSpawn) -> Wanted:
    if params.oubliette_api_key is not None:
        if params.oubliette_scope is not None:
            raise InvalidParams("oubliette_scope and oubliette_api_key are two ways to the same thing: give one")
        if asked.actor.inside:
            raise Forbidden("a droid cannot hand keys to other droids")
        await rooms.tokens.verify(params.oubliette_api_key)
    if params.oubliette_scope is not None and not asked.actor.scope.covers(Scope(params.oubliette_scope)):
        raise Forbidden(f"oubliette_scope {params.oubliette_scope} is more than this token's own")
    actor = asked.actor
    declaration = _declaration(rooms, params)
    if declaration is not None and (actor.inside or actor.derived):
        # Its owner answers for it, and would be asked for what it never lent: even with the owner's own key.
        raise Forbidden("caller tools cannot be declared out of a box: a child has those of the session it is below")
    inside = await rooms.sessions.get(actor.session_id) if actor.session_id is not None else None
    return Wanted(
        autonomy_max=cast("Autonomy", inside.choices.autonomy) if inside is not None else "high",
        message=params.message,
        workspace_id=params.workspace_id,
        create_workspace=params.create_workspace,
        external_id=params.external_id,
        source=params.source,
        autonomy=params.autonomy,
        oubliette_scope=params.oubliette_scope,
        api_key=params.oubliette_api_key,
        declaration=declaration,
        interrupt=isinstance(params, SessionMessage) and params.interrupt,
    )


async def message(rooms: Rooms, asked: Asked, params: SessionMessage) -> SessionMessaged:
    if params.session_id is not None and (params.create_workspace or params.external_id is not None):
        raise InvalidParams("session_id names a session that is there: create_workspace and external_id make one")
    wanted = await _wanted(rooms, asked, params)
    actor, messages, kept = asked.actor, rooms.messages, _kept(asked)
    if params.session_id is not None:
        messaged = await messages.send(actor, asked.door, params.session_id, wanted, kept)
    elif actor.derived and actor.session_id is not None:
        messaged = await messages.spawn_child(actor, asked.door, actor.session_id, wanted, kept)
    elif params.project_id is None:
        raise InvalidParams("project_id is missing: say which project, or which session by session_id")
    else:
        messaged = await messages.message(actor, asked.door, params.project_id, wanted, kept)
    return await _messaged(rooms, asked, messaged)


async def spawn(rooms: Rooms, asked: Asked, params: SessionSpawn) -> SessionMessaged:
    wanted = await _wanted(rooms, asked, params)
    actor, messages, kept = asked.actor, rooms.messages, _kept(asked)
    if actor.derived and actor.session_id is not None:
        messaged = await messages.spawn_child(actor, asked.door, actor.session_id, wanted, kept)
    elif params.project_id is None:
        raise InvalidParams("project_id is missing: say in which project")
    else:
        messaged = await messages.spawn(actor, asked.door, params.project_id, wanted, kept)
    return await _messaged(rooms, asked, messaged)


def _kept(asked: Asked) -> Callable[[Tx, Messaged], Awaitable[None]]:
    return lambda tx, messaged: asked.keep(tx, _told(messaged))


async def _messaged(rooms: Rooms, asked: Asked, messaged: Messaged) -> SessionMessaged:
    await rooms.sessions.bind(asked.actor, messaged.session, asked.stream_id)
    return await _as_it_is_now(rooms, asked, _told(messaged))


def _told(messaged: Messaged) -> SessionMessaged:
    session = messaged.session
    return SessionMessaged(
        session_id=session.id,
        spawned=messaged.spawned,
        workspace_id=session.workspace_id,
        workspace_created=messaged.workspace_created,
        last_event_index=messaged.last_event_index,
        turn=messaged.turn,
        status=session.state.value,
    )


async def waited(
    rooms: Rooms, asked: Asked, params: SessionMessage | SessionSpawn, told: SessionMessaged
) -> SessionMessaged:
    """What is told of a message once its turn ended, or once so long was waited for it."""
    if params.wait_seconds <= 0:
        return told
    session = await rooms.sessions.get(told.session_id)
    seen = Seen(told.last_event_index)
    await follow(rooms, asked, session, seen, seconds=params.wait_seconds, turn=told.turn, until="idle")
    return await _as_it_is_now(rooms, asked, told)


async def _as_it_is_now(rooms: Rooms, asked: Asked, told: SessionMessaged) -> SessionMessaged:
    session = await rooms.sessions.get(told.session_id)
    is_owner = asked.actor.principal == session.owner and not asked.actor.inside
    if is_owner:
        rooms.exchange.promise(session.id, PROMISE_ANSWER_S)
    turn = await rooms.database.read(lambda tx: rows.turn(tx, session.id, told.turn))
    if turn is not None and turn.ended_at is None:
        turn = None
    text, left_out = _text(turn, Space(), "result")
    declaration = session.declaration if is_owner else None
    return msgspec.structs.replace(
        told,
        status=session.state.value,
        caller_tools=declaration.names() if declaration is not None else None,
        pending_caller_requests=rooms.exchange.pending_count(session.id) if is_owner else 0,
        result=text,
        stop_reason=turn.stop_reason if turn is not None else None,
        error=turn.error if turn is not None else None,
        left_out=left_out,
    )


def _text(turn: rows.Turn | None, space: Space | None, name: str) -> tuple[str | None, list[str]]:
    """The text of a turn that is over, or where it does not fit the field that is left out."""
    if turn is None or turn.ended_at is None or turn.text is None:
        return None, []
    fits = space is None or space.takes(turn.text)
    return (turn.text, []) if fits else (None, [name])


def _turn_shown(turn: rows.Turn) -> TurnShown:
    return TurnShown(
        turn=turn.number,
        status=turn.state.value,
        prompt=turn.prompt,
        created_at=turn.created_at,
        started_at=turn.started_at,
        ended_at=turn.ended_at,
        stop_reason=turn.stop_reason,
        text=turn.text,
        error=turn.error,
        usage=turn.usage,
    )


def _shown(rooms: Rooms, session: rows.Session) -> SessionShown:
    declaration = session.declaration
    return SessionShown(
        session_id=session.id,
        project_id=session.project_id,
        workspace_id=session.workspace_id,
        status=session.state.value,
        reason=session.reason,
        parent_session_id=session.parent_id,
        depth=session.depth,
        autonomy=session.choices.autonomy,
        oubliette_scope=session.choices.oubliette_scope,
        caller_id=declaration.caller_id if declaration is not None else None,
        caller_tools=declaration.names() if declaration is not None else None,
        turn_count=session.turns,
        last_index=session.next_index - 1,
        created_at=session.created_at,
        updated_at=session.updated_at,
        ended_at=session.ended_at,
        external_id=session.external_id,
        source=session.source,
        pending_caller_requests=rooms.exchange.pending_count(session.id),
    )


async def get(rooms: Rooms, asked: Asked, params: SessionGet) -> SessionShown:
    del asked

    async def read(tx: Tx) -> SessionShown:
        session = await rows.get(tx, params.session_id)
        shown = _shown(rooms, session)
        shown.children = [child.id for child in await rows.children(tx, params.session_id)]
        shown.usage = await rows.usage(tx, params.session_id) or None
        if params.turns:
            newest = session.turns + 1
            before = min(params.before_turn or newest, newest)
            turns = await rows.turns(tx, session.id, before=before, last=params.turns, max_bytes=PAGE_BYTES)
            shown.turns = [_turn_shown(turn) for turn in turns]
            shown.turns_left_out = min(params.turns, before - 1) - len(turns)
        return shown

    return await rooms.database.read(read)


async def listed(rooms: Rooms, asked: Asked, params: SessionList) -> SessionsShown:
    async def find(tx: Tx) -> list[rows.Session]:
        if asked.actor.derived and asked.actor.session_id is not None:
            # A droid sees its own tree and no other.
            found = [
                one
                for one in await rows.tree(tx, await rows.get(tx, asked.actor.session_id))
                if (not params.status or one.state in params.status)
                and params.parent_session_id in (None, one.parent_id)
            ]
            found.sort(key=lambda one: (one.created_at, one.id), reverse=True)
            return found[params.offset : params.offset + params.limit]
        return await rows.listed(
            tx,
            params.project_id,
            states=[state.value for state in params.status],
            parent_id=params.parent_session_id,
            limit=params.limit,
            offset=params.offset,
        )

    async def read(tx: Tx) -> tuple[list[rows.Session], dict[str, str]]:
        found = await find(tx)
        return found, await rows.last_prompts(tx, [one.id for one in found])

    found, prompts = await rooms.database.read(read)
    shown = [msgspec.structs.replace(_shown(rooms, one), last_prompt=prompts.get(one.id)) for one in found]
    return SessionsShown(sessions=shown)


async def end(rooms: Rooms, asked: Asked, params: SessionNamed) -> SessionEnded:
    if asked.actor.derived and params.session_id == asked.actor.session_id:
        raise Forbidden("a droid cannot end its own session: end the turn instead")
    session = await rooms.sessions.end(
        asked.actor, asked.door, params.session_id, lambda tx, ended: asked.keep(tx, _ended(ended))
    )
    return _ended(session)


def _ended(session: rows.Session) -> SessionEnded:
    return SessionEnded(session_id=session.id, status=session.state.value)


async def cancel(rooms: Rooms, asked: Asked, params: SessionNamed) -> SessionCancelled:
    cancelled = await rooms.sessions.cancel(asked.actor, asked.door, params.session_id)
    return SessionCancelled(session_id=params.session_id, cancelled=cancelled)


class EventsShown(msgspec.Struct, kw_only=True, omit_defaults=True):
    session_id: str
    status: str
    last_index: Annotated[
        int, Meta(description="Of this session's last event here: the next page is since_index=last_index.")
    ]
    first_index: Annotated[int, Meta(description="The oldest event that is kept.")]
    more: bool
    events: list[Any]
    completed: bool
    failed: bool
    error: Annotated[str | None, Meta(description="Why the session failed, where it did.")] = None
    cursor: Annotated[str | None, Meta(description="With include_children: pass it on for the next page.")] = None
    pending_caller_requests: int = 0
    final_response: Annotated[str | None, Meta(description="The last turn's text, once no turn is open.")] = None
    left_out: LeftOut = []


async def events(rooms: Rooms, asked: Asked, params: SessionEvents) -> EventsShown:
    if params.cursor is not None and (not params.include_children or params.since_index != -1):
        raise InvalidParams("cursor goes with include_children, and says itself from where on")
    session = await rooms.sessions.get(params.session_id)
    await rooms.sessions.bind(asked.actor, session, asked.stream_id)
    seen = Seen(params.since_index)
    if params.include_children:
        tree = await page_of_tree(
            rooms,
            asked,
            session,
            params.since_index,
            params.cursor,
            params.max_events,
            wait_s=params.wait_seconds,
            space=seen.space,
        )
        page = await rooms.events.page(session.id, tree.last_index, max_events=1)
        shown, more, last, cursor, waited = tree.events, tree.more, tree.last_index, tree.cursor, tree.waited
    else:
        cursor = None
        page = await rooms.events.page(session.id, params.since_index, max_events=params.max_events)
        waited = not page.events and params.wait_seconds > 0
        if waited:
            await follow(rooms, asked, session, seen, seconds=params.wait_seconds, until="event")
            page = await rooms.events.page(session.id, params.since_index, max_events=params.max_events)
        # An event that does not fit comes with the next page, which need not be waited for.
        shown = seen.space.fitting(page.events) if waited else page.events
        last = shown[-1]["index"] if shown else params.since_index
        more = last < page.end_index
    current, turn = await _standing(rooms, asked, session)
    text, left_out = _text(turn, seen.space if waited else None, "final_response")
    return EventsShown(
        session_id=session.id,
        status=current.state.value,
        last_index=last,
        first_index=page.first_index,
        more=more,
        events=shown,
        completed=current.state is State.COMPLETED,
        failed=current.state in FAILURES,
        error=_error(current),
        cursor=cursor,
        pending_caller_requests=rooms.exchange.pending_count(session.id),
        final_response=text,
        left_out=left_out,
    )


def _error(session: rows.Session) -> str | None:
    return session.reason if session.state in FAILURES else None


async def _standing(rooms: Rooms, asked: Asked, session: rows.Session) -> tuple[rows.Session, rows.Turn | None]:
    """The session as it is now, and its last turn.

    It is told with a page or a watch: where they are the owner's, they promise the next one.
    """
    if asked.actor.principal == session.owner and not asked.actor.inside:
        rooms.exchange.promise(session.id, PROMISE_POLL_S)

    async def read(tx: Tx) -> tuple[rows.Session, rows.Turn | None]:
        current = await rows.get(tx, session.id)
        return current, await rows.turn(tx, session.id, current.turns)

    return await rooms.database.read(read)


class Watched(msgspec.Struct, kw_only=True, omit_defaults=True):
    session_id: str
    status: str
    last_index: int
    ended_by: Annotated[str, Meta(description="idle, end, time, or page: call again from last_index.")]
    events: Annotated[
        list[Any], Meta(description="Where this request takes no notifications, the events themselves.")
    ] = []
    error: Annotated[str | None, Meta(description="Why the session failed, where it did.")] = None
    final_response: str | None = None
    left_out: LeftOut = []


async def watch(rooms: Rooms, asked: Asked, params: SessionWatch) -> Watched:
    session = await rooms.sessions.get(params.session_id)
    await rooms.sessions.bind(asked.actor, session, asked.stream_id)
    seen = Seen(params.since_index, deltas=params.deltas)
    ended_by = await follow(rooms, asked, session, seen, seconds=params.wait_seconds, until=params.until)
    current, turn = await _standing(rooms, asked, session)
    text, left_out = _text(turn, seen.space, "final_response")
    return Watched(
        session_id=session.id,
        status=current.state.value,
        last_index=seen.last_index,
        ended_by=ended_by,
        events=seen.kept,
        error=_error(current),
        final_response=text,
        left_out=left_out,
    )


OPERATIONS = (
    Operation(
        name="session_message",
        title="Send a message",
        scope=Scope.WRITE,
        target=Target.SESSION_OR_PROJECT,
        params=SessionMessage,
        result=SessionMessaged,
        summary="Give a droid a message, and lend it your tools. Goes to the workspace's live session, or starts one"
        " in a box of its own; asked with a key that a box was given by oubliette_scope, starts a child of the box's"
        " session unless session_id names one. Returns at once; follow by session_watch, session_events or your stream."
        " A message for a busy session waits its turn.",
        run=message,
        wait=waited,
        writes=True,
    ),
    Operation(
        name="session_spawn",
        title="Start a session",
        scope=Scope.WRITE,
        target=Target.PROJECT,
        params=SessionSpawn,
        result=SessionMessaged,
        summary="Start a new session with a first message, whatever else lives in its workspace. Asked with a key that"
        " a box was given by oubliette_scope it is a child of the box's session; with any other key it is a session of"
        " its own with that key's rights, out of a box too.",
        run=spawn,
        wait=waited,
        writes=True,
    ),
    Operation(
        name="session_get",
        title="Show a session",
        scope=Scope.READ,
        target=Target.SESSION,
        params=SessionGet,
        result=SessionShown,
        summary="Show one session: its state, choices, children, and its newest turns with their text.",
        run=get,
        writes=False,
    ),
    Operation(
        name="session_list",
        title="List sessions",
        scope=Scope.READ,
        target=Target.PROJECT,
        params=SessionList,
        result=SessionsShown,
        summary="List a project's sessions, newest first.",
        run=listed,
        writes=False,
    ),
    Operation(
        name="session_end",
        title="End a session",
        scope=Scope.WRITE,
        target=Target.SESSION,
        params=SessionNamed,
        result=SessionEnded,
        summary="End a session with its droid, its box, its children, its pending calls and its derived key.",
        run=end,
        writes=True,
        destructive=True,
    ),
    Operation(
        name="session_cancel",
        title="Cancel a turn",
        scope=Scope.WRITE,
        target=Target.SESSION,
        params=SessionNamed,
        result=SessionCancelled,
        summary="Cancel the turn that runs, and the calls it waits for. The session stays, and so do queued messages.",
        run=cancel,
        writes=True,
    ),
    Operation(
        name="session_events",
        title="Read events",
        scope=Scope.READ,
        target=Target.SESSION,
        params=SessionEvents,
        result=EventsShown,
        summary="Read a session's log from a cursor on; wait_seconds waits for the next event where there is none yet."
        " Loop with since_index=last_index: nothing is lost and nothing comes twice.",
        run=events,
        writes=False,
    ),
    Operation(
        name="session_watch",
        title="Watch a session",
        scope=Scope.READ,
        target=Target.SESSION,
        params=SessionWatch,
        result=Watched,
        summary="Follow a session while it works: events come as notifications on this request where it takes them,"
        " else in the result. Returns when the session is idle, ended, or the time is up.",
        run=watch,
        writes=False,
    ),
)
