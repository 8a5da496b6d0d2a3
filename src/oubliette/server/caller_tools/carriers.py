"""Ways to a caller, and which of them a request is on.

A carrier of a session is a stream, a poll or a watch that names it, or the stream of the MCP session that last
declared, messaged, watched or paged it. A request is on one carrier at a time, the newest; only when that one goes
is it announced on another, with `redelivery` counted up.

Presence follows from the same book: a session whose owner has no live carrier, for longer than the grace and
beyond what was promised, is *absent*, and its pending calls end as disconnected. What promises: an answer to
`session_message` (the caller is about to listen), a poll or a page (the next one comes), a restart of the server
(everybody is coming back).
"""

import asyncio
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from oubliette.server.clock import Clock

logger = logging.getLogger(__name__)

# An announcement is the flat JSON object of a `caller_tool_request` event (or of `caller_tool_cancelled`,
# `caller_tool_progress`): see oubliette.wire.events.
Announcement = dict[str, Any]


class Carrier(Protocol):
    """One way to a session's caller. All methods are called on the loop and must not wait."""

    @property
    def kind(self) -> str:
        """A word for logs and tests: `stream`, `request`, `listen`, `poll`."""
        ...

    def announce(self, session_id: str, announcement: Announcement) -> None:
        """Queue an announcement ahead of the carrier's other frames. What cannot be queued ends the carrier."""
        ...


class Stream(Carrier, Protocol):
    """The standing stream of an MCP session: carries every session that is bound to it."""

    def bound(self, session_id: str) -> None:
        """From now on this stream carries the session, and may follow its log."""
        ...

    def unbound(self, session_id: str) -> None:
        """Another MCP session took the session over."""
        ...


class Requests(Protocol):
    """The pending requests that carriers carry. Implemented by the exchange.

    `reach` is the id of a tree's root session: an owner is reached, or not, for a session and all its children.
    """

    def announcement(self, reach: str, request_id: str, redelivery: int) -> Announcement | None:
        """What to announce, or None if the request is no longer pending."""
        ...

    def pending(self, reach: str) -> Iterable[str]:
        """Ids of the pending requests, oldest first."""
        ...

    def absent(self, reach: str) -> None:
        """The owner is not reachable any more."""
        ...


@dataclass(slots=True)
class _Reach:
    """How a session's caller can be reached; times are monotonic."""

    named: list[Carrier] = field(default_factory=list[Carrier])  # oldest first
    stream_id: str | None = None
    stream_since: float = 0.0
    since: dict[int, float] = field(default_factory=dict[int, float])
    on: dict[str, Carrier | None] = field(default_factory=dict[str, Carrier | None])
    deliveries: dict[str, int] = field(default_factory=dict[str, int])
    gone_at: float | None = None
    promised_until: float = 0.0
    timer: asyncio.TimerHandle | None = None


class Carriers:
    def __init__(self, clock: Clock, *, grace_s: float) -> None:
        self._clock = clock
        self._grace_s = grace_s
        self._reaches: dict[str, _Reach] = {}
        self._streams: dict[str, Stream] = {}
        self._bound: dict[str, set[str]] = {}
        self._requests: Requests | None = None
        self._all_promised_until = 0.0

    def join(self, requests: Requests) -> None:
        self._requests = requests

    # -- who can be reached -------------------------------------------------------------------------------------

    def attach(self, session_id: str, carrier: Carrier) -> None:
        """Add a carrier that names this session; it is now the newest."""
        reach = self._reach(session_id)
        if carrier in reach.named:
            return
        reach.named.append(carrier)
        reach.since[id(carrier)] = self._clock.monotonic()
        self._arrived(session_id, reach)

    def detach(self, session_id: str, carrier: Carrier) -> None:
        """Take a carrier away; twice is no error."""
        reach = self._reaches.get(session_id)
        if reach is None or carrier not in reach.named:
            return
        reach.named.remove(carrier)
        reach.since.pop(id(carrier), None)
        self._left(session_id, reach, carrier)

    def attach_stream(self, stream_id: str, stream: Stream) -> None:
        """An MCP session opened its standing stream: it carries what is bound to that MCP session."""
        older = self._streams.get(stream_id)
        if older is not None and older is not stream:
            self.detach_stream(stream_id, older)
        self._streams[stream_id] = stream
        for session_id in tuple(self._bound.get(stream_id, ())):
            reach = self._reach(session_id)
            reach.stream_since = self._clock.monotonic()
            stream.bound(session_id)
            self._arrived(session_id, reach)

    def detach_stream(self, stream_id: str, stream: Stream) -> None:
        if self._streams.get(stream_id) is not stream:
            return
        del self._streams[stream_id]
        for session_id in tuple(self._bound.get(stream_id, ())):
            self._left(session_id, self._reach(session_id), stream)

    def bind(self, session_id: str, stream_id: str) -> bool:
        """The owner touched the session by this MCP session: its streams carry it now. Whether that is news."""
        reach = self._reach(session_id)
        if reach.stream_id == stream_id:
            return False
        before = self._stream_of(reach)
        if reach.stream_id is not None:
            self._bound[reach.stream_id].discard(session_id)
        reach.stream_id = stream_id
        reach.stream_since = self._clock.monotonic()
        self._bound.setdefault(stream_id, set()).add(session_id)
        if before is not None:
            before.unbound(session_id)
            self._left(session_id, reach, before)
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.bound(session_id)
            self._arrived(session_id, reach)
        return True

    def promise(self, session_id: str, seconds: float) -> None:
        """The owner will be back within so many seconds; until then nobody counts as gone."""
        reach = self._reach(session_id)
        reach.promised_until = max(reach.promised_until, self._clock.monotonic() + seconds)

    def promise_all(self, seconds: float) -> None:
        """After a start of the server nobody counts as gone for a while."""
        self._all_promised_until = self._clock.monotonic() + seconds

    def forget(self, session_id: str) -> None:
        """The session ended: its carriers carry nothing of it any more."""
        reach = self._reaches.pop(session_id, None)
        if reach is None:
            return
        if reach.timer is not None:
            reach.timer.cancel()
        if reach.stream_id is not None:
            self._bound[reach.stream_id].discard(session_id)

    def has_carrier(self, session_id: str) -> bool:
        reach = self._reaches.get(session_id)
        return reach is not None and self._newest(reach) is not None

    def is_on(self, session_id: str, request_id: str, carrier: Carrier) -> bool:
        """Whether this request is on this carrier, or on none and may be taken by it."""
        reach = self._reaches.get(session_id)
        return reach is not None and reach.on.get(request_id) in (None, carrier)

    # -- requests -----------------------------------------------------------------------------------------------

    def announce(self, session_id: str, request_id: str, announcement: Announcement, *, redelivery: int = 0) -> None:
        """Put a committed request on the newest carrier; without one it waits for the next to come."""
        reach = self._reach(session_id)
        carrier = self._newest(reach)
        reach.on[request_id] = carrier
        reach.deliveries[request_id] = redelivery + (1 if carrier is not None else 0)
        if carrier is not None:
            carrier.announce(session_id, announcement)
        else:
            self._watch_absence(session_id, reach)

    def tell(self, session_id: str, request_id: str, announcement: Announcement) -> None:
        """Say something about a request to the carrier that it is on: progress was extended, nobody waits."""
        reach = self._reaches.get(session_id)
        carrier = reach.on.get(request_id) if reach is not None else None
        if carrier is not None:
            carrier.announce(session_id, announcement)

    def ended(self, session_id: str, request_id: str) -> None:
        reach = self._reaches.get(session_id)
        if reach is not None:
            reach.on.pop(request_id, None)
            reach.deliveries.pop(request_id, None)

    # -- inside -------------------------------------------------------------------------------------------------

    def _reach(self, session_id: str) -> _Reach:
        reach = self._reaches.get(session_id)
        if reach is None:
            reach = self._reaches[session_id] = _Reach()
        return reach

    def _stream_of(self, reach: _Reach) -> Stream | None:
        return self._streams.get(reach.stream_id) if reach.stream_id is not None else None

    def _newest(self, reach: _Reach) -> Carrier | None:
        stream = self._stream_of(reach)
        if not reach.named:
            return stream
        newest = reach.named[-1]
        if stream is not None and reach.stream_since > reach.since[id(newest)]:
            return stream
        return newest

    def _arrived(self, session_id: str, reach: _Reach) -> None:
        """A carrier came: what waits for one is announced on it."""
        reach.gone_at = None
        if reach.timer is not None:
            reach.timer.cancel()
            reach.timer = None
        self._announce_waiting(session_id, reach)

    def _left(self, session_id: str, reach: _Reach, carrier: Carrier) -> None:
        """A carrier went: what was on it goes to the next, or waits."""
        for request_id, on in reach.on.items():
            if on is carrier:
                reach.on[request_id] = None
        if self._newest(reach) is not None:
            self._announce_waiting(session_id, reach)
        else:
            reach.gone_at = self._clock.monotonic()
            self._watch_absence(session_id, reach)

    def _announce_waiting(self, session_id: str, reach: _Reach) -> None:
        carrier = self._newest(reach)
        if carrier is None or self._requests is None:
            return
        for request_id in tuple(self._requests.pending(session_id)):
            if reach.on.get(request_id) is not None:
                continue
            count = reach.deliveries.get(request_id, 0)
            announcement = self._requests.announcement(session_id, request_id, count)
            if announcement is not None:
                reach.on[request_id] = carrier
                reach.deliveries[request_id] = count + 1
                carrier.announce(session_id, announcement)

    def _watch_absence(self, session_id: str, reach: _Reach) -> None:
        """See to it that pending calls end once the owner counts as gone."""
        if reach.timer is not None:
            reach.timer.cancel()
            reach.timer = None
        if not reach.on:
            return
        wait = self._gone_in(reach)
        if wait == math.inf:
            return
        loop = asyncio.get_running_loop()
        reach.timer = loop.call_later(max(0.0, wait), self._look_for, session_id)

    def _gone_in(self, reach: _Reach) -> float:
        """Seconds until the owner counts as gone, if no carrier comes."""
        grace_until = 0.0 if reach.gone_at is None else reach.gone_at + self._grace_s
        return max(grace_until, reach.promised_until, self._all_promised_until) - self._clock.monotonic()

    def _look_for(self, session_id: str) -> None:
        reach = self._reaches.get(session_id)
        if reach is None or self._newest(reach) is not None:
            return
        reach.timer = None
        if self._gone_in(reach) > 0:
            self._watch_absence(session_id, reach)
        elif self._requests is not None:
            logger.info("the caller of a session is gone", extra={"session_id": session_id})
            self._requests.absent(session_id)
