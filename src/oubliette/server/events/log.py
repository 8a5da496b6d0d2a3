"""The append-only log of a session: what every carrier, page and follower is a view of.

The index comes from a counter on the log's row, inside the transaction that writes the event, so commit order is
index order and no index is ever used twice. Beyond a bound the oldest events go, and who asks for them is told the
oldest that is left.

Logs are numbered, and an event's place is its log's number and its index in one integer: a log lies together, and
grows at its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from oubliette.server.config import EVENT_BYTES_KEPT, EVENTS_KEPT
from oubliette.server.errors import InvalidParams, NotFound, Purged
from oubliette.server.limits import EVENTS_PAGE, PAGE_BYTES
from oubliette.server.storage.database import Database, Row, Tx
from oubliette.wire.events import Event

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode
PURGE_EVERY = 64  # the bound is looked at once in so many events
PURGE_ROWS = 500
PLACES = 1 << 32  # of each log: more than one ever comes to
_APPEND = (
    "UPDATE logs SET next_index = next_index + ?, event_bytes = event_bytes + ? WHERE session_id = ?"
    " RETURNING number, next_index, first_index, event_bytes"
)
_EVENT = "INSERT INTO events (place, type, at, body) VALUES (?, ?, ?, ?)"
_OUTLINE = "SELECT place - ?, at, length(body) FROM events WHERE place > ? AND place < ? ORDER BY place LIMIT ?"
_BODIES = "SELECT place - ?, at, body FROM events WHERE place > ? AND place <= ? ORDER BY place"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Some events in order. `last_index` is that of the last event *here*, so that paging loses nothing."""

    events: list[dict[str, Any]]
    last_index: int
    end_index: int  # the last index of the log; more pages follow while it is above `last_index`
    first_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What is known of the next events without reading one: the index, the time and the size of each."""

    events: Sequence[tuple[int, float, int]]
    end_index: int  # the last index of the log


class EventLog:
    def __init__(
        self, database: Database, *, events_kept: int = EVENTS_KEPT, bytes_kept: int = EVENT_BYTES_KEPT
    ) -> None:
        self._database = database
        self._events_kept = events_kept
        self._bytes_kept = bytes_kept

    @staticmethod
    async def begin(tx: Tx, session_id: str) -> None:
        """Begin the log of a session."""
        await tx.run("INSERT INTO logs (session_id) VALUES (?)", session_id)

    async def append(self, tx: Tx, session_id: str, events: Sequence[Event], now: float) -> int:
        """Add events to a session's log; the last index so far (with no events, that of the log)."""
        bodies = [_encode(event) for event in events]
        row = await tx.one(_APPEND, len(bodies), sum(map(len, bodies)), session_id)
        if row is None:
            raise NotFound(f"no session {session_id}")
        number, end, first, size = row
        place = number * PLACES + end - len(bodies)
        for event, body in zip(events, bodies, strict=True):
            await tx.add(_EVENT, place, event.__struct_config__.tag, now, body)
            place += 1
        if (end - first > self._events_kept or size > self._bytes_kept) and self._purges_now(end, first, size):
            await self._purge(tx, number, end=end, first=first, size=size)
        return end - 1

    def _purges_now(self, end: int, first: int, size: int) -> bool:
        """Once in so many events, or when the log is beyond its bounds by much."""
        much = end - first > self._events_kept + PURGE_EVERY or size > self._bytes_kept + self._bytes_kept // 8
        return end % PURGE_EVERY == 0 or much

    async def _purge(self, tx: Tx, number: int, *, end: int, first: int, size: int) -> None:
        """Let the oldest go, so many at a time, until the rest is within the bounds; the last event always stays."""
        for index, _, length in await _outlined(tx, number, first - 1, PURGE_ROWS):
            if (end - first <= self._events_kept and size <= self._bytes_kept) or first >= end - 1:
                break
            first, size = index + 1, size - length
        start = number * PLACES
        await tx.run("DELETE FROM events WHERE place >= ? AND place < ?", start, start + first)
        await tx.run("UPDATE logs SET first_index = ?, event_bytes = ? WHERE number = ?", first, size, number)

    async def page(
        self, session_id: str, since_index: int, *, max_events: int = EVENTS_PAGE, max_bytes: int = PAGE_BYTES
    ) -> Page:
        """Events after `since_index` (-1: from the start). Raises `Purged` where the log no longer reaches back."""
        max_events = max(1, min(max_events, EVENTS_PAGE))
        since_index = max(since_index, -1)

        async def read(tx: Tx) -> Page:
            number, first, end = await _reach(tx, session_id, since_index)
            until = min(since_index + max_events, end - 1)
            if until - since_index > 1:
                # What does not fit is not read: an event may be large, and this is the loop.
                until = _within(await _outlined(tx, number, since_index, max_events), max_bytes, since_index)
            start = number * PLACES
            rows = await tx.all(_BODIES, start, start + since_index, start + until)
            events = [{"session_id": session_id, "index": index, "at": at, **_decode(body)} for index, at, body in rows]
            last: int = rows[-1][0] if rows else max(since_index, first - 1)
            return Page(events=events, last_index=last, end_index=end - 1, first_index=first)

        return await self._database.read(read)

    async def outline(self, session_id: str, since_index: int, *, max_events: int) -> Outline:
        """What a page of so many events would be of, for who merges several logs; raises what it would."""
        since_index = max(since_index, -1)

        async def read(tx: Tx) -> Outline:
            number, _, end = await _reach(tx, session_id, since_index)
            rows = await _outlined(tx, number, since_index, min(max_events, EVENTS_PAGE))
            return Outline(events=[(index, at, size) for index, at, size in rows], end_index=end - 1)

        return await self._database.read(read)

    async def end_index(self, session_id: str) -> int:
        async def read(tx: Tx) -> int:
            row = await tx.one("SELECT next_index FROM logs WHERE session_id = ?", session_id)
            if row is None:
                raise NotFound(f"no session {session_id}")
            return row[0] - 1

        return await self._database.read(read)


async def empty(tx: Tx, sessions: str, *values: Any, limit: int) -> int:
    """Let so many events go of the logs of these sessions, a query of their ids; how many went."""
    await tx.run(
        "UPDATE logs SET first_index = next_index, event_bytes = 0"  # noqa: S608 - the query is the caller's own text
        f" WHERE session_id IN ({sessions}) AND first_index < next_index",
        *values,
    )
    return await tx.run(
        "DELETE FROM events WHERE place IN (SELECT place FROM logs JOIN events"  # noqa: S608
        " ON place >= logs.number * ? AND place < (logs.number + 1) * ?"
        f" WHERE logs.session_id IN ({sessions}) LIMIT ?)",
        PLACES,
        PLACES,
        *values,
        limit,
    )


async def _outlined(tx: Tx, number: int, since_index: int, limit: int) -> list[Row]:
    """Index, time and size of a log's next events."""
    start = number * PLACES
    return await tx.all(_OUTLINE, start, start + since_index, start + PLACES, limit)


async def _reach(tx: Tx, session_id: str, since_index: int) -> tuple[int, int, int]:
    """A log's number, its first index and the one behind its last, where there may be events after `since_index`."""
    row = await tx.one("SELECT number, first_index, next_index FROM logs WHERE session_id = ?", session_id)
    if row is None:
        raise NotFound(f"no session {session_id}")
    number, first, end = row
    if since_index >= end:
        raise InvalidParams(f"since_index {since_index} is ahead of the log, which ends at {end - 1}")
    if since_index + 1 < first:
        raise Purged(f"events before index {first} have been purged (oldest available: {first})", oldest_index=first)
    return number, first, end


def _within(outlined: Sequence[Row], max_bytes: int, since_index: int) -> int:
    """The last index up to which events fit into so many bytes; the first always does."""
    last, room = since_index, max_bytes
    for index, _, length in outlined:
        room -= length
        if room < 0 and last > since_index:
            break
        last = index
    return last
