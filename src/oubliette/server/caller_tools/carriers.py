"""Ways to a caller, and which of them a request is on.

A carrier of a session is a stream, a poll or a watch that names it, or the stream of the MCP session that last
declared, messaged, watched or paged it. (One that has no stream yet leaves the session where it was: a caller that
merely looks in by another program does not deafen itself.) A request is on one carrier at a time, the newest that is
here; only when that one goes is it announced on another, with `redelivery` counted up. While none is here, or the
newest is read slower than it is told, requests wait on no carrier.

Presence follows from the same book: a session whose owner has no live carrier, for longer than the grace and
beyond what was promised, is *absent*, and its pending calls end as disconnected. What promises: an answer to
`session_message` (the caller is about to listen), a poll or a page (the next one comes), a restart of the server
(everybody is coming back).

A *reach* is how a tree of sessions reaches its owner; its id is that of the tree's root session.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from oubliette.server.clock import AlarmClock, Timer

logger = logging.getLogger(__name__)

# An announcement is the flat JSON object of a `caller_tool_request` event (or of `caller_tool_cancelled`,
# `caller_tool_progress`): see oubliette.wire.events.
Announcement = dict[str, Any]
POLL = "poll"


class Carrier(Protocol):
    """One way to a session's caller. All methods are called on the loop and must not wait."""

    @property
    def kind(self) -> str:
        """A word for logs and tests: `stream`, `request`, `listen`, `poll`."""
        ...

    @property
    def stream_ids(self) -> Collection[str]:
        """The MCP sessions whose requests this stands on; none where it stands on a stream of its own."""
        ...

    @property
    def is_here(self) -> bool:
        """Whether it can be told of a request now; between two polls nobody can, though the next is promised."""
        ...

    def has_room(self, again: Callable[[], None]) -> bool:
        """Whether another request may be announced now; if not, `again` is called once when it may.

        A carrier that ends first need not call it.
        """
        ...

    def announce(self, session_id: str, announcement: Announcement) -> None:
        """Queue an announcement ahead of the carrier's other frames. What cannot be queued ends the carrier.

        Ending, it may detach itself before this returns; one that raises is taken to be gone.
        """
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
    """What carriers carry. Implemented by the exchange."""

    def announcement(self, reach_id: str, request_id: str, redelivery: int) -> Announcement | None:
        """What to announce, or None if the request is no longer pending."""
        ...

    def absent(self, reach_id: str) -> None:
        """The owner is not reachable any more."""
        ...


@dataclass(slots=True)
class _Reach:
    """How a tree's owner can be reached; times are monotonic."""

    carriers: list[Carrier] = field(default_factory=list[Carrier])  # oldest first
    stream_id: str | None = None  # the MCP session that last touched the tree
    stream: Stream | None = None  # the standing stream among the carriers: that one's, once it has one
    polls_only: bool = False
    on: dict[str, Carrier | None] = field(default_factory=dict[str, Carrier | None])
    full: Carrier | None = None  # it says when it has room again; requests wait for that on no carrier
    deliveries: dict[str, int] = field(default_factory=dict[str, int])
    gone_at: float | None = None
    promised_until: float = 0.0
    timer: Timer | None = None

    def newest(self) -> Carrier | None:
        """What takes requests now."""
        here = [one for one in self.carriers if one.is_here]
        poll = next((one for one in reversed(here) if one.kind == POLL), None)
        if self.polls_only or not here:
            return poll
        newest = here[-1]
        if poll is not None and not set(poll.stream_ids).isdisjoint(newest.stream_ids):
            return poll  # who polls beside another request may not hear what is said on that one before its answer
        return newest

    @property
    def is_held(self) -> bool:
        """Whether the owner is there, or has promised to be."""
        return any(one.kind == POLL for one in self.carriers) if self.polls_only else bool(self.carriers)

    def waits(self) -> bool:
        """Whether some request is on no carrier."""
        return None in self.on.values()


@dataclass(slots=True)
class _Line:
    """One MCP session: the reaches that are bound to it, and those that its open stream has to do with."""

    bound: set[str] = field(default_factory=set[str])
    stream: Stream | None = None
    carries: set[str] = field(default_factory=set[str])


class Carriers:
    def __init__(self, clock: AlarmClock, *, grace_s: float) -> None:
        self._clock = clock
        self._grace_s = grace_s
        self._reaches: dict[str, _Reach] = {}
        self._lines: dict[str, _Line] = {}
        self._requests: Requests | None = None
        self._all_promised_until = 0.0

    def join(self, requests: Requests) -> None:
        self._requests = requests

    # -- who can be reached -------------------------------------------------------------------------------------

    def attach(self, reach_id: str, carrier: Carrier) -> None:
        """Add a carrier that names this tree, or name it again; it is now the newest."""
        reach = self._reach(reach_id)
        if carrier in reach.carriers:
            reach.carriers.remove(carrier)
        reach.carriers.append(carrier)
        self._arrived(reach_id, reach)

    def detach(self, reach_id: str, carrier: Carrier) -> None:
        """Take a carrier away; twice is no error."""
        reach = self._reaches.get(reach_id)
        if reach is not None and carrier in reach.carriers:
            self._lose(reach_id, reach, carrier)

    def attach_stream(self, stream_id: str, stream: Stream) -> None:
        """An MCP session opened its standing stream: it carries what is bound to that MCP session."""
        line = self._lines.setdefault(stream_id, _Line())
        older, line.stream = line.stream, stream
        if older is stream:
            return
        carried, line.carries = line.carries, set()
        for reach_id in tuple(line.bound):
            self._carry(reach_id, self._reach(reach_id), line, stream)
        if older is not None:
            self._drop(carried, older)

    def detach_stream(self, stream_id: str, stream: Stream) -> None:
        line = self._lines.get(stream_id)
        if line is None or line.stream is not stream:
            return
        line.stream = None
        carried, line.carries = line.carries, set()
        self._tidy(stream_id, line)
        self._drop(carried, stream)

    def bind(self, reach_id: str, stream_id: str) -> bool:
        """The owner touched the tree by this MCP session: its streams carry it now. Whether that is news."""
        reach = self._reach(reach_id)
        if reach.stream_id == stream_id:
            return False
        self._unbind(reach_id, reach)
        reach.stream_id = stream_id
        line = self._lines.setdefault(stream_id, _Line())
        line.bound.add(reach_id)
        if line.stream is not None:
            self._carry(reach_id, reach, line, line.stream)
        return True

    def poll_only(self, reach_id: str, polls_only: bool) -> None:
        """Whether this owner fetches its requests: nothing is pushed to it, and it is never taken to be gone."""
        reach = self._reach(reach_id)
        if reach.polls_only != polls_only:
            reach.polls_only = polls_only
            self._announce_waiting(reach_id, reach)
            self._watch_absence(reach_id, reach)

    def promise(self, reach_id: str, seconds: float) -> None:
        """The owner will be back within so many seconds; until then nobody counts as gone."""
        reach = self._reach(reach_id)
        reach.promised_until = max(reach.promised_until, self._clock.monotonic() + seconds)

    def promise_all(self, seconds: float) -> None:
        """After a start of the server nobody counts as gone for a while."""
        self._all_promised_until = self._clock.monotonic() + seconds

    def forget(self, reach_id: str) -> None:
        """The tree has ended: its carriers carry nothing of it any more."""
        reach = self._reaches.pop(reach_id, None)
        if reach is None:
            return
        if reach.timer is not None:
            reach.timer.cancel()
        self._unbind(reach_id, reach)
        for stream_id, line in tuple(self._lines.items()):
            line.carries.discard(reach_id)
            self._tidy(stream_id, line)

    def is_absent(self, reach_id: str) -> bool:
        """Whether the owner has no carrier, for longer than the grace and beyond every promise."""
        reach = self._reaches.get(reach_id)
        return reach is not None and not reach.is_held and self._gone_in(reach) <= 0

    def is_on(self, reach_id: str, request_id: str) -> Carrier | None:
        """The carrier that has this request."""
        reach = self._reaches.get(reach_id)
        return reach.on.get(request_id) if reach is not None else None

    # -- requests -----------------------------------------------------------------------------------------------

    def put(self, reach_id: str, request_id: str, *, redelivery: int = 0) -> None:
        """Put a committed request on the newest carrier; without one it waits for the next to come."""
        reach = self._reach(reach_id)
        reach.on[request_id] = None
        reach.deliveries[request_id] = redelivery
        carrier = reach.newest()
        if carrier is not None:
            self._give(reach_id, reach, request_id, carrier)
        else:
            self._watch_absence(reach_id, reach)

    def take(
        self, reach_id: str, request_id: str, carrier: Carrier, *, stream_id: str | None, again: bool
    ) -> Announcement | None:
        """Hand a request out by hand, to a carrier that fetches; None where another carrier has it.

        What stands on the MCP session that fetches is no other: who asks for a request has not heard of it there.
        """
        reach = self._reaches.get(reach_id)
        if reach is None or self._requests is None:
            return None
        on = reach.on.get(request_id)
        line = self._lines.get(stream_id) if stream_id is not None else None
        is_own = line is not None and on is line.stream
        if on is not None and stream_id is not None:
            is_own = is_own or stream_id in on.stream_ids
        if on is not None and on is not carrier and not is_own:
            return None
        count = reach.deliveries.get(request_id, 0)
        if on is carrier and not again:
            count -= 1  # counted when it was put there
        reach.on[request_id] = carrier
        reach.deliveries[request_id] = count + 1
        return self._requests.announcement(reach_id, request_id, count)

    def tell(self, reach_id: str, request_id: str, announcement: Announcement) -> None:
        """Say something about a request to the carrier that it is on: nobody waits for it any more."""
        reach = self._reaches.get(reach_id)
        carrier = reach.on.get(request_id) if reach is not None else None
        if reach is not None and carrier is not None:
            self._announce(reach_id, reach, carrier, announcement)

    def ended(self, reach_id: str, request_id: str) -> None:
        reach = self._reaches.get(reach_id)
        if reach is not None:
            reach.on.pop(request_id, None)
            reach.deliveries.pop(request_id, None)

    # -- inside -------------------------------------------------------------------------------------------------

    def _reach(self, reach_id: str) -> _Reach:
        reach = self._reaches.get(reach_id)
        if reach is None:
            reach = self._reaches[reach_id] = _Reach()
        return reach

    def _unbind(self, reach_id: str, reach: _Reach) -> None:
        line = self._lines.get(reach.stream_id) if reach.stream_id is not None else None
        if reach.stream_id is not None and line is not None:
            line.bound.discard(reach_id)
            self._tidy(reach.stream_id, line)

    def _tidy(self, stream_id: str, line: _Line) -> None:
        if line.stream is None and not line.bound and self._lines.get(stream_id) is line:
            del self._lines[stream_id]

    def _carry(self, reach_id: str, reach: _Reach, line: _Line, stream: Stream) -> None:
        """This stream carries the reach from now on. What is on the one before it stays there while that is open."""
        former, reach.stream = reach.stream, stream
        line.carries.add(reach_id)
        if former is not None:
            reach.carriers.remove(former)
        reach.carriers.append(stream)
        if former is not stream:
            if former is not None:
                former.unbound(reach_id)
            stream.bound(reach_id)
        self._arrived(reach_id, reach)

    def _drop(self, reach_ids: Iterable[str], stream: Stream) -> None:
        """A stream has ended."""
        for reach_id in tuple(reach_ids):
            reach = self._reaches.get(reach_id)
            if reach is not None:
                self._lose(reach_id, reach, stream)

    def _lose(self, reach_id: str, reach: _Reach, carrier: Carrier) -> None:
        """A carrier went: what was on it goes to the next, or waits."""
        if carrier in reach.carriers:
            reach.carriers.remove(carrier)
        if reach.stream is carrier:
            reach.stream = None
        if reach.full is carrier:
            reach.full = None
        for request_id, on in reach.on.items():
            if on is carrier:
                reach.on[request_id] = None
        if reach.is_held:
            self._announce_waiting(reach_id, reach)
            return
        if reach.gone_at is None:
            reach.gone_at = self._clock.monotonic()
        self._watch_absence(reach_id, reach)

    def _arrived(self, reach_id: str, reach: _Reach) -> None:
        """A carrier came: what waits for one is announced on it."""
        reach.gone_at = None
        if reach.timer is not None:
            reach.timer.cancel()
            reach.timer = None
        self._announce_waiting(reach_id, reach)

    def _announce_waiting(self, reach_id: str, reach: _Reach) -> None:
        for request_id in [one for one, on in reach.on.items() if on is None]:
            # Each announcement may end its carrier, and that moves what was on it: look anew.
            carrier = reach.newest()
            if carrier is None or carrier is reach.full:
                return
            if request_id in reach.on and reach.on[request_id] is None:
                self._give(reach_id, reach, request_id, carrier)

    def _give(self, reach_id: str, reach: _Reach, request_id: str, carrier: Carrier) -> None:
        """Announce a request on a carrier; one that is read slower than it is told leaves it waiting."""
        if carrier is reach.full or not carrier.has_room(partial(self._room_again, reach_id, carrier)):
            reach.full = carrier
            return
        count = reach.deliveries.get(request_id, 0)
        announcement = self._requests.announcement(reach_id, request_id, count) if self._requests is not None else None
        if announcement is not None:
            reach.on[request_id] = carrier
            reach.deliveries[request_id] = count + 1
            self._announce(reach_id, reach, carrier, announcement)

    def _room_again(self, reach_id: str, carrier: Carrier) -> None:
        reach = self._reaches.get(reach_id)
        if reach is not None and reach.full is carrier:
            reach.full = None
            self._announce_waiting(reach_id, reach)

    def _announce(self, reach_id: str, reach: _Reach, carrier: Carrier, announcement: Announcement) -> None:
        try:
            carrier.announce(reach_id, announcement)
        except Exception:
            logger.exception("a carrier failed", extra={"session_id": reach_id, "carrier": carrier.kind})
            self._lose(reach_id, reach, carrier)

    def _watch_absence(self, reach_id: str, reach: _Reach) -> None:
        """See to it that pending calls end once the owner counts as gone."""
        if reach.timer is not None:
            reach.timer.cancel()
            reach.timer = None
        if not reach.is_held and reach.waits():
            wait = self._gone_in(reach)
            if wait < math.inf:
                reach.timer = self._clock.later(max(0.0, wait), self._look_for, reach_id)

    def _gone_in(self, reach: _Reach) -> float:
        """Seconds until the owner counts as gone, if no carrier comes."""
        if reach.polls_only:
            return math.inf
        grace_until = 0.0 if reach.gone_at is None else reach.gone_at + self._grace_s
        return max(grace_until, reach.promised_until, self._all_promised_until) - self._clock.monotonic()

    def _look_for(self, reach_id: str) -> None:
        reach = self._reaches.get(reach_id)
        if reach is None:
            return
        reach.timer = None
        if not self.is_absent(reach_id):
            self._watch_absence(reach_id, reach)
        elif self._requests is not None:
            logger.info("the caller of a session is gone", extra={"session_id": reach_id})
            self._requests.absent(reach_id)
