"""How events reach a caller over MCP: three vehicles over the one log, and the carriers that they are.

*Standing*: a legacy session's stream carries, and follows, the sessions that are bound to it. *Pushed*: a request
that takes notifications gets them on its own stream. *Updates*: a subscription says that a session's pending
requests changed, and its client reads them.

A caller-tool request is announced, not followed: it goes to one carrier at a time, ahead of other frames and
whatever the log level. So who follows a log on such a stream leaves requests out; a client that took a record for a
call would run its tool twice.

What is pushed is small: some clients' readers stop at an event of 1 MiB, and their stream with it. A larger record
comes without what makes it large, and says so; the log has it whole.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, Protocol

from oubliette.server.caller_tools.carriers import Announcement, Carriers
from oubliette.server.endpoints.mcp.contract import SEVERITY, Channel, Context, StreamContext
from oubliette.server.endpoints.mcp.versions import Era
from oubliette.server.errors import NotFound, Purged
from oubliette.server.events.following import LOOK_AGAIN_S, Following
from oubliette.server.events.log import EventLog
from oubliette.server.operations.space import pushable
from oubliette.server.sessions.lifecycle import ENDS
from oubliette.wire.events import LOGGER

logger = logging.getLogger(__name__)

MESSAGE: Final = "notifications/message"
UPDATED: Final = "notifications/resources/updated"
REQUEST: Final = "caller_tool_request"
# Said of a request to the carrier that it is on.
ANNOUNCED: Final = frozenset({REQUEST, "caller_tool_cancelled", "caller_tool_progress"})
LEVELS: Final = {"delta": "debug", "warning": "warning", "error": "error"}
DEFAULT_LEVEL: Final = "info"
# Wakes of a busy log are gathered for so long: many events are then one read and one write.
GATHER_S: Final = 0.02
# A log this short is pushed from its start when a stream first follows it: the session has only just begun.
YOUNG_LOG: Final = 32
CURSORS_PER_STREAM: Final = 256
STREAMS_REMEMBERED: Final = 4096


def message(event: dict[str, Any], level: str = DEFAULT_LEVEL) -> dict[str, Any]:
    """An event as a log notification's parameters: the vehicle that every legacy client has."""
    return {"level": level, "logger": LOGGER, "data": event}


class Desks(Protocol):
    """Where carriers that name a session attach. Implemented by the exchange."""

    def attach(self, session_id: str, carrier: Any) -> Callable[[], None]: ...


class Updates:
    """A carrier that says only that there is something to read."""

    kind = "listen"
    is_here = True
    stream_ids = ()

    def __init__(self, channel: Channel, uri: str) -> None:
        self._channel = channel
        self._uri = uri

    def attach(self, desks: Desks, session_id: str) -> None:
        """Carry the session as long as the channel is open."""
        self._channel.on_close(desks.attach(session_id, self))

    def has_room(self, again: Callable[[], None]) -> bool:
        return self._channel.has_room(again)

    def announce(self, session_id: str, announcement: Announcement) -> None:
        self._channel.announce(UPDATED, {"uri": self._uri})


class Pushed:
    """The `Followed` of one request."""

    def __init__(self, context: Context, standings: "Standings") -> None:
        self._context = context
        self._standings = standings
        self._told = 0
        self._said: set[tuple[str, int]] = set()

    @property
    def wants_events(self) -> bool:
        """A modern client says so on the request; a legacy one gets them here if it holds no stream for them."""
        context = self._context
        if context.era is Era.MODERN:
            return context.wants(DEFAULT_LEVEL)
        return context.stream_id is None or not self._standings.is_open(context.stream_id)

    def ends_with_asker(self) -> None:
        self._context.abandon()

    def has_room(self, again: Callable[[], None]) -> bool:
        return self._context.channel.has_room(again)

    def push(self, event: dict[str, Any]) -> None:
        if event["type"] in ANNOUNCED:
            # What is said of a request comes from its carrier and again from the log.
            place = (event["session_id"], event["index"])
            if event["type"] == REQUEST or place not in self._said:
                self._said.add(place)
                self._context.channel.announce(MESSAGE, message(event))
            return
        level = LEVELS.get(event["type"], DEFAULT_LEVEL)
        if self._context.wants(level) or event["type"] == "delta":  # deltas come where they were asked for by name
            self._context.channel.notify(MESSAGE, message(pushable(event), level))

    def progress(self, message: str) -> None:
        self._told += 1
        self._context.progress(self._told, None, message)


class Standings:
    """The standing streams of all legacy sessions, and how far each was told."""

    def __init__(self, events: EventLog, following: Following, carriers: Carriers) -> None:
        self.events = events
        self.following = following
        self.carriers = carriers
        self._open: dict[str, Standing] = {}
        # By MCP session: a stream that comes again goes on where the one before it stopped.
        self._cursors: dict[str, dict[str, int]] = {}

    def is_open(self, stream_id: str) -> bool:
        return stream_id in self._open

    def opened(self, standing: "Standing") -> dict[str, int]:
        """Register a stream; returns the cursors of its MCP session."""
        self._open[standing.stream_id] = standing
        while len(self._cursors) >= STREAMS_REMEMBERED:
            del self._cursors[next(iter(self._cursors))]
        return self._cursors.setdefault(standing.stream_id, {})

    def closed(self, standing: "Standing") -> None:
        if self._open.get(standing.stream_id) is standing:
            del self._open[standing.stream_id]

    def changed(self, stream: StreamContext) -> None:
        standing = self._open.get(stream.stream_id)
        if standing is not None:
            standing.subscriptions_changed()

    def forget(self, stream_id: str) -> None:
        self._cursors.pop(stream_id, None)


class Standing:
    """One legacy session's stream: a carrier of what is bound to it, and a follower of its logs."""

    kind = "stream"
    is_here = True
    stream_ids = ()

    def __init__(
        self, stream: StreamContext, standings: Standings, desks: Desks, session_of: Callable[[str], str | None]
    ) -> None:
        self.stream_id = stream.stream_id
        self._stream = stream
        self._channel = stream.channel
        self._standings = standings
        self._desks = desks
        self._session_of = session_of
        self._cursors: dict[str, int] = {}
        self._followed: dict[str, Callable[[], None]] = {}
        self._subscribed: dict[str, Callable[[], None]] = {}  # what ends each
        self._grown: set[str] = set()
        self._wake = asyncio.Event()

    async def serve(self) -> None:
        """Carry and follow until the stream has ended."""
        self._cursors = self._standings.opened(self)
        self._channel.on_close(self._closed)
        if not self._channel.is_open:
            return
        self._standings.carriers.attach_stream(self.stream_id, self)
        self.subscriptions_changed()
        while True:
            try:
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await self._wake.wait()
            except TimeoutError:
                self._grown.update(self._followed)
            self._wake.clear()
            grown, self._grown = self._grown, set()
            for session_id in grown:
                await self._tell(session_id)
            await asyncio.sleep(GATHER_S)

    # As a carrier.

    def has_room(self, again: Callable[[], None]) -> bool:
        return self._channel.has_room(again)

    def announce(self, session_id: str, announcement: Announcement) -> None:
        self._channel.announce(MESSAGE, message(announcement))

    def bound(self, session_id: str) -> None:
        if session_id not in self._followed:
            self._followed[session_id] = self._standings.following.subscribe(session_id, self._woken)
            self._woken(session_id, 0)

    def unbound(self, session_id: str) -> None:
        end = self._followed.pop(session_id, None)
        if end is not None:
            end()

    # As a subscriber.

    def subscriptions_changed(self) -> None:
        """Carry the sessions whose requests the client subscribed to, and no longer those that it left."""
        wanted = set(self._stream.subscriptions)
        for uri in [uri for uri in self._subscribed if uri not in wanted]:
            self._subscribed.pop(uri)()
        for uri in wanted - self._subscribed.keys():
            session_id = self._session_of(uri)
            if session_id is None:
                continue
            try:
                self._subscribed[uri] = self._desks.attach(session_id, Updates(self._channel, uri))
            except NotFound:
                continue  # the session has ended since

    # Inside.

    def _woken(self, session_id: str, last_index: int) -> None:
        self._grown.add(session_id)
        self._wake.set()

    async def _tell(self, session_id: str) -> None:
        """Push what the log has beyond the cursor, no faster than the client reads."""
        if session_id not in self._followed:
            return
        over = False
        try:
            cursor = self._cursors.get(session_id)
            if cursor is None:
                cursor = await self._first_cursor(session_id)
            while self._channel.is_open and session_id in self._followed:
                page = await self._standings.events.page(session_id, cursor)
                for event in page.events:
                    self._push(event)
                    over = over or (event["type"] == "status" and event["status"] in ENDS)
                cursor = self._keep(session_id, page.last_index)
                await self._channel.drained()
                if page.last_index >= page.end_index:
                    break
            if over:
                self.unbound(session_id)
        except Purged as purged:
            self._keep(session_id, purged.details["oldest_index"] - 1)
            self._woken(session_id, 0)
        except NotFound:
            self.unbound(session_id)

    async def _first_cursor(self, session_id: str) -> int:
        end = await self._standings.events.end_index(session_id)
        return self._keep(session_id, -1 if end < YOUNG_LOG else end)

    def _keep(self, session_id: str, cursor: int) -> int:
        self._cursors.pop(session_id, None)
        if len(self._cursors) >= CURSORS_PER_STREAM:
            # One that is not followed any more; else the one that was quiet for longest.
            over = (one for one in self._cursors if one not in self._followed)
            del self._cursors[next(over, next(iter(self._cursors)))]
        self._cursors[session_id] = cursor
        return cursor

    def _push(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind in (REQUEST, "caller_tool_cancelled"):
            return  # announced, here or on the carrier that has the request
        level = LEVELS.get(kind, DEFAULT_LEVEL)
        least = self._stream.log_level or DEFAULT_LEVEL
        if SEVERITY[level] >= SEVERITY[least]:
            self._channel.notify(MESSAGE, message(pushable(event), level))

    def _closed(self) -> None:
        self._standings.closed(self)
        self._standings.carriers.detach_stream(self.stream_id, self)
        for session_id in list(self._followed):
            self.unbound(session_id)
        for uri in list(self._subscribed):
            self._subscribed.pop(uri)()
