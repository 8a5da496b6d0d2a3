"""How calls end: the row first, then everybody who waits for it or works on it.

Who ends a call second changes nothing and is told how it ended. An end that the server itself has to see to (its
deadline came, its owner or its droid is gone) is tried again until the database takes it.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from msgspec import structs

from oubliette.server import audit
from oubliette.server.caller_tools import calls, ledger
from oubliette.server.caller_tools.carriers import Carriers
from oubliette.server.caller_tools.desk import Desks, Open
from oubliette.server.caller_tools.ledger import Call, State, Stimulus
from oubliette.server.clock import AlarmClock
from oubliette.server.errors import StorageFailed
from oubliette.server.events.following import Following
from oubliette.server.events.log import EventLog
from oubliette.server.marks import Mark
from oubliette.server.storage.database import Database, Tx
from oubliette.wire.events import CallerToolCancelled, Event

AGAIN_S = 1.0


class Ends:
    def __init__(
        self,
        desks: Desks,
        carriers: Carriers,
        *,
        database: Database,
        clock: AlarmClock,
        events: EventLog,
        following: Following,
        tasks: asyncio.TaskGroup,
        mark: Mark,
    ) -> None:
        self._desks = desks
        self._carriers = carriers
        self._database = database
        self._clock = clock
        self._events = events
        self._following = following
        self._tasks = tasks
        self._mark = mark

    # -- deadlines ----------------------------------------------------------------------------------------------

    def count_down(self, one: Open) -> None:
        """Expire the call when it is due, by the monotonic clock; the wall may jump meanwhile."""
        if one.timer is not None:
            one.timer.cancel()
        one.timer = self._clock.later(max(0.0, one.due - self._clock.monotonic()), self._expire, one)

    def due(self, call: Call) -> float:
        """When a stored call is due, counted from this moment; never later than it was ever allowed to take."""
        left = min(max(0.0, call.deadline_at - self._clock.now()), call.deadline_at - call.created_at)
        return self._clock.monotonic() + left

    def move_deadline(self, one: Open, deadline_at: float) -> None:
        if deadline_at != one.call.deadline_at and one.ended is None:
            one.due += deadline_at - one.call.deadline_at
            one.call = structs.replace(one.call, deadline_at=deadline_at)
            self.count_down(one)

    def _expire(self, one: Open) -> None:
        self._tasks.create_task(self.see_to(one, Stimulus.EXPIRE))

    # -- ends ---------------------------------------------------------------------------------------------------

    async def see_to(self, one: Open, stimulus: Stimulus, reason: str = "", *, door: str = "server") -> bool:
        """End a call, or see to it that it ends. Whether it was this that ended it, or will."""
        if one.index is None:
            one.cut = one.cut or (stimulus, reason)
            return True
        if one.ended is not None:
            return False
        try:
            return await self.end(one.call, stimulus, reason, _entry(one.call, stimulus, door), one=one) is not None
        except StorageFailed:
            self._clock.later(AGAIN_S, self._again, one, stimulus, reason, door)
            return True

    def _again(self, one: Open, stimulus: Stimulus, reason: str, door: str) -> None:
        self._tasks.create_task(self.see_to(one, stimulus, reason, door=door))

    async def end(
        self, call: Call, stimulus: Stimulus, content: bytes | str, entry: audit.Entry, *, one: Open | None
    ) -> Call | None:
        """Move a call to its end, row first; None where it had ended, or an answer came too late."""
        at = self._clock.now()
        now = at if one is None else one.counted(self._clock)
        decided = ledger.ended(call, stimulus, content, now=now, at=at)
        if decided is None:
            return None

        async def write(tx: Tx) -> int | None:
            if not await calls.end(tx, decided.call, stimulus, now):
                return None
            last = await self._events.append(tx, call.session_id, decided.events, at)
            await audit.write(tx, at, entry)
            self._mark("end:after_row")
            return last

        last = await self._database.write(write)
        if last is None:
            await self._look_again(call, one)
            return None
        self._mark("end:after_commit")
        if one is not None:
            self._settle(one, decided.call, decided.events[0], last)
        self._following.wake(call.session_id, last)
        self._mark("end:told")
        return decided.call

    async def end_orphans(self, orphans: Sequence[Call], reason: str) -> None:
        """End calls whose session ended before they could: the server stopped in between."""
        for call in orphans:
            await self.end(call, Stimulus.CANCEL, reason, _entry(call, Stimulus.CANCEL, "server"), one=None)

    async def _look_again(self, call: Call, one: Open | None) -> None:
        """The row was not as it is known here: take over what it says."""
        stored = await self.stored(call.session_id, call.request_id)
        if stored is None or one is None or one.ended is not None:
            return
        if stored.state is not State.PENDING:
            self._settle(one, stored, None, 0)
        else:
            self.move_deadline(one, stored.deadline_at)

    async def stored(self, session_id: str, request_id: str) -> Call | None:
        async def read(tx: Tx) -> Call | None:
            return await calls.find(tx, session_id, request_id)

        return await self._database.read(read)

    def _settle(self, one: Open, call: Call, first: Event | None, last_index: int) -> None:
        """A committed end: tell who waits, and the caller if its work is not wanted any more."""
        one.desk.leave(one)
        root_id = one.desk.tree.root_id
        if isinstance(first, CallerToolCancelled):
            told: dict[str, Any] = {
                "type": "caller_tool_cancelled",
                "session_id": call.session_id,
                "index": last_index - 1,
                "at": call.ended_at,
                "request_id": call.request_id,
                "tool": call.tool,
                "reason": first.reason,
            }
            self._carriers.tell(root_id, call.request_id, told)
        self._carriers.ended(root_id, call.request_id)
        one.tell(call)


def _entry(call: Call, stimulus: Stimulus, door: str) -> audit.Entry:
    return audit.Entry(
        door=door,
        operation="caller_tool",
        outcome=ledger.MOVES[State.PENDING][stimulus].value,
        session_id=call.session_id,
        target=call.request_id,
    )
