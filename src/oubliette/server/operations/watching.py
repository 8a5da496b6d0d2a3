"""Following a session's log on a request of its own, and paging a tree of logs."""

import base64
import binascii
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec

from oubliette.server.caller_tools.carriers import Announcement
from oubliette.server.errors import InvalidParams, Purged, Unauthenticated
from oubliette.server.events.following import LOOK_AGAIN_S
from oubliette.server.events.log import Page
from oubliette.server.limits import EVENTS_PAGE, PAGE_BYTES
from oubliette.server.operations.operation import Asked, Followed, Rooms
from oubliette.server.operations.space import Space, pushable
from oubliette.server.sessions import rows
from oubliette.server.sessions.lifecycle import ENDS, State
from oubliette.server.storage.database import Tx

PROGRESS_EVERY_S = 10.0
T = TypeVar("T")


@dataclass(slots=True)
class Seen:
    """How far a follower is, and what it could not push."""

    last_index: int
    deltas: bool = False
    kept: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    space: Space = field(default_factory=Space)


class Watch:
    """A request that takes notifications carries its session's caller-tool requests while it lasts."""

    kind = "request"
    is_here = True

    def __init__(self, followed: Followed, stream_id: str | None) -> None:
        self._followed = followed
        self.stream_ids = () if stream_id is None else (stream_id,)

    def has_room(self, again: Callable[[], None]) -> bool:
        return self._followed.has_room(again)

    def announce(self, session_id: str, announcement: Announcement) -> None:
        del session_id
        self._followed.push(announcement)


class Checked:
    """The asker's key, looked at once a second for as long as a wait goes on: it may be revoked meanwhile."""

    def __init__(self, rooms: Rooms, asked: Asked) -> None:
        self._rooms = rooms
        self._token_id = asked.actor.token_id  # none: this machine's administrator
        self._due = rooms.clock.monotonic() + LOOK_AGAIN_S

    def due_in_s(self) -> float:
        return max(0.0, self._due - self._rooms.clock.monotonic())

    async def again(self) -> None:
        """Raises `Unauthenticated`."""
        now = self._rooms.clock.monotonic()
        if now < self._due:
            return
        self._due = now + LOOK_AGAIN_S
        if self._token_id is not None and not await self._rooms.tokens.is_live(self._token_id):
            raise Unauthenticated


async def follow(
    rooms: Rooms,
    asked: Asked,
    session: rows.Session,
    seen: Seen,
    *,
    seconds: float,
    until: str,
    turn: int | None = None,
) -> str:
    """Follow a log until the session is idle or ended, the turn is over, an event came, or the time is up.

    Events are pushed where the request takes them and kept in `seen` elsewhere. Says what ended it.
    """
    followed = asked.followed if asked.followed is not None and asked.followed.wants_events else None
    if followed is not None:
        # Events for somebody who has gone would keep requests from those who have not.
        followed.ends_with_asker()
    is_owner = asked.actor.principal == session.owner and not asked.actor.inside
    carrier = Watch(followed, asked.stream_id) if followed is not None and is_owner and session.is_live else None
    live = rooms.sessions.live(session.id) is not None
    detach = rooms.exchange.attach(session.id, carrier) if carrier is not None and live else None
    try:
        return await _follow(rooms, asked, session.id, seen, followed, carrier, seconds, until, turn)
    finally:
        if detach is not None:
            detach()


async def _follow(
    rooms: Rooms,
    asked: Asked,
    session_id: str,
    seen: Seen,
    followed: Followed | None,
    carrier: Watch | None,
    seconds: float,
    until: str,
    turn: int | None,
) -> str:
    clock = rooms.clock.monotonic
    deadline = clock() + seconds
    progress_at = clock() + PROGRESS_EVERY_S
    checked = Checked(rooms, asked)
    while True:
        await checked.again()
        page = await rooms.events.page(session_id, seen.last_index)
        if page.events and until == "event":
            return "event"
        if not _take(page, seen, followed, carrier):
            return "page"
        if page.last_index < page.end_index:
            continue
        ended = await rooms.database.read(lambda tx: _over(tx, session_id, until, turn))
        if ended is not None and await rooms.events.end_index(session_id) == seen.last_index:
            return ended
        left = deadline - clock()
        if left <= 0:
            return "time"
        await rooms.following.grown(session_id, seen.last_index, min(left, checked.due_in_s()))
        if asked.followed is not None and clock() >= progress_at:
            progress_at = clock() + PROGRESS_EVERY_S
            asked.followed.progress(f"following {session_id}")


def _take(page: Page, seen: Seen, followed: Followed | None, carrier: Watch | None) -> bool:
    """Push a page's events, or keep them; False when no more can be kept."""
    for event in page.events:
        is_wanted = seen.deltas or event["type"] != "delta"
        if followed is not None:
            announced = carrier is not None and event["type"] == "caller_tool_request"
            if is_wanted and not announced:
                followed.push(event)
        elif is_wanted:
            shown = pushable(event)
            if len(seen.kept) >= EVENTS_PAGE or not seen.space.takes(shown):
                return False
            seen.kept.append(shown)
        seen.last_index = event["index"]
    return True


async def _over(tx: Tx, session_id: str, until: str, turn: int | None) -> str | None:
    """Why following may end now, or None."""
    session = await rows.get(tx, session_id)
    if session.state in ENDS:
        return "end"
    if turn is not None:
        followed = await rows.turn(tx, session_id, turn)
        return "idle" if followed is not None and followed.ended_at is not None else None
    if until == "idle" and session.state is State.IDLE and await rows.next_turn(tx, session_id) is None:
        return "idle"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TreePage:
    """Events of a session and those below it, merged by time; the cursor holds how far each log was read."""

    events: list[dict[str, Any]]
    cursor: str
    more: bool
    last_index: int  # how far the session's own log was read
    waited: bool


async def page_of_tree(
    rooms: Rooms,
    asked: Asked,
    session: rows.Session,
    since_index: int,
    cursor: str | None,
    max_events: int,
    *,
    wait_s: float,
    space: Space,
) -> TreePage:
    """The next page of a tree; where there is none yet, wait so long at most for its first event.

    What was waited for is what fits into `space`.
    """
    read_to = _decoded(cursor) if cursor is not None else {session.id: since_index}
    deadline = rooms.clock.monotonic() + wait_s
    checked = Checked(rooms, asked)
    events, more = await _merged(rooms, session, read_to, max_events)
    waited = False
    while not events and not more and (left := deadline - rooms.clock.monotonic()) > 0:
        # Whoever begins below is not known yet: the session's own log wakes this, and every second does.
        await rooms.following.grown(session.id, read_to.get(session.id, -1), min(left, checked.due_in_s()))
        await checked.again()
        events, more = await _merged(rooms, session, read_to, max_events, space)
        waited = True
    cursor, last_index = _encoded(read_to), read_to.get(session.id, -1)
    return TreePage(events=events, cursor=cursor, more=more, last_index=last_index, waited=waited)


async def _merged(
    rooms: Rooms, session: rows.Session, read_to: dict[str, int], max_events: int, space: Space | None = None
) -> tuple[list[dict[str, Any]], bool]:
    """Take the next events of all logs, as a page holds them, and move `read_to` behind them; whether there are more.

    Which they are is told by outlines: only what goes into the page is read.
    """
    found: list[tuple[float, str, int, int]] = []
    more = False
    for one in await rooms.database.read(lambda tx: rows.tree(tx, session)):
        next_ones = partial(rooms.events.outline, one.id, max_events=max_events)
        outline = await _on(next_ones, read_to.get(one.id))
        latest, last = 0.0, outline.end_index
        for last, at, size in outline.events:
            # Two commits of one log may carry their times in the other order; the cursor may skip neither.
            latest = max(latest, at)
            found.append((latest, one.id, last, size))
        more = more or last < outline.end_index
    found.sort()
    chosen = _chosen(found[:max_events])
    read: dict[tuple[str, int], dict[str, Any]] = {}
    for session_id, count in Counter(session_id for session_id, _ in chosen).items():
        page = await _on(partial(rooms.events.page, session_id, max_events=count), read_to.get(session_id))
        read |= {(session_id, event["index"]): event for event in page.events}
    taken = [read[key] for key in chosen if key in read]  # what is not was purged in between
    if space is not None:
        taken = space.fitting(taken)
    for event in taken:
        read_to[event["session_id"]] = event["index"]
    return taken, more or len(taken) < len(found)


def _chosen(found: Sequence[tuple[float, str, int, int]]) -> list[tuple[str, int]]:
    """The first of these that fit into a page, whatever logs they are of; the very first always does."""
    room = PAGE_BYTES
    chosen: list[tuple[str, int]] = []
    for _, session_id, index, size in found:
        room -= size
        if room < 0 and chosen:
            break
        chosen.append((session_id, index))
    return chosen


async def _on(read: Callable[[int], Awaitable[T]], since: int | None) -> T:
    """Read a log on; one of which nothing was read yet begins with the oldest event that is kept."""
    try:
        return await read(-1 if since is None else since)
    except Purged as purged:
        if since is not None:
            raise
        return await read(purged.details["oldest_index"] - 1)


def _encoded(read_to: dict[str, int]) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(read_to)).decode()


def _decoded(cursor: str) -> dict[str, int]:
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(cursor), type=dict[str, int])
    except (binascii.Error, msgspec.DecodeError, ValueError):
        raise InvalidParams("cursor is not one that session_events gave") from None
