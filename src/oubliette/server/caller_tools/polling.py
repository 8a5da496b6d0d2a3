"""Callers that ask again and again instead of holding a stream.

A tree's polls are one carrier: there while one waits, and for as long as the last one's answer promises the next. A
request is handed to one of several polls that wait together; a later poll that does not know it gets it again,
because the answer that held it may have been lost.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection

from oubliette.server.caller_tools.carriers import POLL, Announcement, Carriers
from oubliette.server.caller_tools.desk import Desk, Desks, Tree
from oubliette.server.clock import AlarmClock, Timer
from oubliette.server.limits import PROMISE_POLL_S, WAIT_S_MAX

Takes = Callable[[Announcement], bool]


def _anything(announcement: Announcement) -> bool:
    del announcement
    return True


class Poll:
    """The carrier: what is put on it waits here for a poll."""

    kind = POLL

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self.polling = 0
        self.asking: Counter[str] = Counter()  # the MCP sessions that poll now
        self.begun = 0  # counts polls and what they were given, in one order
        self.given: dict[str, int] = {}
        self.leaving: Timer | None = None

    def has_room(self, again: Callable[[], None]) -> bool:
        del again  # what does not fit into one answer is there for the next
        return True

    def announce(self, session_id: str, announcement: Announcement) -> None:
        del session_id, announcement  # a poll reads what is pending itself
        self.arrived.set()

    @property
    def is_here(self) -> bool:
        return self.polling > 0

    @property
    def stream_ids(self) -> Collection[str]:
        return self.asking.keys()

    def next(self) -> int:
        self.begun += 1
        return self.begun


class Polling:
    def __init__(self, desks: Desks, carriers: Carriers, clock: AlarmClock) -> None:
        self._desks = desks
        self._carriers = carriers
        self._clock = clock
        self._polls: dict[str, Poll] = {}

    async def poll(
        self,
        session_id: str,
        known: frozenset[str],
        wait_s: float,
        *,
        stream_id: str | None = None,
        takes: Takes = _anything,
    ) -> list[Announcement]:
        """Requests that the poller does not know yet and no other carrier has; waits for the first, so long at most.

        `stream_id` is the MCP session that polls: what went to its own stream was evidently not heard there. `takes`
        says of each whether the answer has space for it; the first goes in any case, what is left with the next poll.
        """
        desk = self._desks.get(session_id)
        root_id = desk.tree.root_id
        poll = self._polls.setdefault(root_id, Poll())
        if poll.leaving is not None:
            poll.leaving.cancel()
        poll.polling += 1
        asker = Counter([stream_id] if stream_id is not None else [])
        poll.asking += asker
        self._carriers.attach(root_id, poll)
        answered = False
        try:
            found = await self._wait(desk, poll, known, wait_s, stream_id, takes)
            answered = True
            return found
        finally:
            poll.polling -= 1
            poll.asking -= asker
            self._left(root_id, poll, answered)

    async def _wait(
        self, desk: Desk, poll: Poll, known: frozenset[str], wait_s: float, stream_id: str | None, takes: Takes
    ) -> list[Announcement]:
        begun = poll.next()
        over = False

        def ring() -> None:
            nonlocal over
            over = True
            poll.arrived.set()

        timer = self._clock.later(min(wait_s, WAIT_S_MAX), ring) if wait_s > 0 else None
        try:
            while True:
                poll.arrived.clear()
                found = self._found(desk.tree, poll, known, begun, stream_id, takes)
                if found or timer is None or over or desk.closing is not None:
                    return found
                await poll.arrived.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def _found(
        self, tree: Tree, poll: Poll, known: frozenset[str], begun: int, stream_id: str | None, takes: Takes
    ) -> list[Announcement]:
        pending = {one.call.request_id: one for one in tree.pending()}
        poll.given = {request_id: poll.given[request_id] for request_id in pending if request_id in poll.given}
        found: list[Announcement] = []
        for request_id, one in pending.items():
            given = poll.given.get(request_id)
            if request_id in known or (given is not None and given > begun):
                continue
            if not takes(one.announcement()) and found:
                break
            told = self._carriers.take(tree.root_id, request_id, poll, stream_id=stream_id, again=given is not None)
            if told is not None:
                poll.given[request_id] = poll.next()
                found.append(told)
        return found

    def _left(self, root_id: str, poll: Poll, answered: bool) -> None:
        """A poll is over. An answer promises the next: the carrier stays so long; a poll that was cut off does not."""
        if poll.polling > 0 or self._polls.get(root_id) is not poll:
            return  # others wait, or the tree has ended meanwhile
        if answered:
            poll.leaving = self._clock.later(PROMISE_POLL_S, self._leave, root_id, poll)
        else:
            self._leave(root_id, poll)

    def _leave(self, root_id: str, poll: Poll) -> None:
        poll.given.clear()
        self._carriers.detach(root_id, poll)

    def closing(self, root_id: str) -> None:
        """A session of this tree ends: who polls for it is answered."""
        poll = self._polls.get(root_id)
        if poll is not None:
            poll.arrived.set()

    def forget(self, root_id: str) -> None:
        poll = self._polls.pop(root_id, None)
        if poll is not None:
            poll.arrived.set()
            if poll.leaving is not None:
                poll.leaving.cancel()
