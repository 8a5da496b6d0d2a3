"""Calls of caller tools while they are open, for whoever asks, answers, polls or carries.

The rows decide (see `ledger` and `calls`). What a running server knows beside them stands on `desk`; who asks is
served by `asking`, who answers by `answering` and `polling`, and every call ends in `ends`.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from msgspec import structs

from oubliette.server.caller_tools import calls
from oubliette.server.caller_tools.answering import Answering
from oubliette.server.caller_tools.asking import REFUSALS, Asking
from oubliette.server.caller_tools.carriers import Announcement, Carrier, Carriers
from oubliette.server.caller_tools.declaration import Declaration
from oubliette.server.caller_tools.desk import Desks, Open
from oubliette.server.caller_tools.ends import Ends
from oubliette.server.caller_tools.ledger import Stimulus
from oubliette.server.caller_tools.polling import Polling
from oubliette.server.clock import AlarmClock
from oubliette.server.events.following import Following
from oubliette.server.events.log import EventLog
from oubliette.server.limits import INLINE_ARGUMENTS_BYTES, PENDING_ARGUMENTS_BYTES
from oubliette.server.marks import Mark, unmarked
from oubliette.server.storage.database import Database, Tx

__all__ = ["REFUSALS", "Exchange"]


class Exchange:
    def __init__(
        self,
        *,
        database: Database,
        clock: AlarmClock,
        events: EventLog,
        following: Following,
        carriers: Carriers,
        tasks: asyncio.TaskGroup,
        timeout_s: float,
        timeout_max_s: float,
        mark: Mark = unmarked,
    ) -> None:
        self._database = database
        self._carriers = carriers
        self._tasks = tasks
        self._desks = desks = Desks()
        self._ends = Ends(
            desks=desks,
            carriers=carriers,
            database=database,
            clock=clock,
            events=events,
            following=following,
            tasks=tasks,
            mark=mark,
        )
        self._asking = Asking(
            desks=desks,
            carriers=carriers,
            ends=self._ends,
            database=database,
            clock=clock,
            events=events,
            following=following,
            timeout_s=timeout_s,
            timeout_max_s=timeout_max_s,
            mark=mark,
        )
        self._answering = Answering(
            desks=desks,
            ends=self._ends,
            database=database,
            clock=clock,
            events=events,
            following=following,
            mark=mark,
        )
        self._polling = Polling(desks, carriers, clock)
        # The droid's side.
        self.call = self._asking.call
        self.cancel = self._asking.cancel
        self.cancel_all = self._asking.cancel_all
        self.client_gone = self._asking.client_gone
        self.instances = self._asking.instances
        # The caller's side.
        self.answer = self._answering.answer
        self.progress = self._answering.progress
        self.poll = self._polling.poll
        carriers.join(self)

    # -- sessions -----------------------------------------------------------------------------------------------

    def open_desk(self, session_id: str, root_id: str, owner: str, declaration: Declaration | None) -> None:
        """Take a session's calls from now on; again after a restart, or when its tools changed."""
        desk = self._desks.open(session_id, root_id, owner)
        desk.declare(declaration)
        self._carriers.poll_only(root_id, desk.tree.polls_only)

    async def close_desk(self, session_id: str, reason: str) -> None:
        """The session ended: so do its pending calls, and none enters any more."""
        desk = self._desks.find(session_id)
        if desk is None:
            return
        desk.closing = reason
        root_id = desk.tree.root_id
        self._polling.closing(root_id)
        await self._asking.cancel_all(session_id, reason)
        if self._desks.close(desk):
            self._polling.forget(root_id)
            self._carriers.forget(root_id)

    async def load(self) -> None:
        """Take up every pending call of the database: after a start of the server, before any door opens."""

        async def read(tx: Tx) -> tuple[list[calls.Stored], list[calls.Stored]]:
            return await calls.pending(tx), await calls.orphans(tx)

        pending, orphans = await self._database.read(read)
        await self._ends.end_orphans([stored.call for stored in orphans], "the session has ended")
        for stored in pending:
            desk = self._desks.find(stored.call.session_id)
            if desk is not None:
                one = Open(
                    desk=desk,
                    call=stored.call,
                    names=desk.names_of(stored.call.tool),
                    digest=stored.digest,
                    arguments=stored.arguments,
                    due=self._ends.due(stored.call),
                    index=stored.index,
                    instances={stored.call.instance} if stored.call.instance is not None else set(),
                )
                desk.enter(one)
                self._ends.count_down(one)
                # It may have been announced before: whether it arrived, nobody knows.
                self._carriers.put(desk.tree.root_id, stored.call.request_id, redelivery=stored.call.redelivery + 1)

    def declaration(self, session_id: str) -> Declaration | None:
        desk = self._desks.find(session_id)
        return desk.declaration if desk is not None else None

    def pending_count(self, session_id: str) -> int:
        desk = self._desks.find(session_id)
        return len(desk.open) if desk is not None else 0

    def listed(self, session_id: str, request_id: str | None = None) -> list[Announcement]:
        """Every pending request of a session and its children, with the arguments that fit; or this one, whole."""
        tree = self._desks.get(session_id).tree
        if request_id is not None:
            one = tree.find(request_id)
            return [one.announcement(len(one.arguments))] if one is not None else []
        found: list[Announcement] = []
        room = PENDING_ARGUMENTS_BYTES
        for one in tree.pending():
            found.append(one.announcement(min(INLINE_ARGUMENTS_BYTES, room)))
            room -= len(one.arguments) if "arguments" in found[-1] else 0
        return found

    # -- carriers: who names a session reaches its whole tree ---------------------------------------------------

    def attach(self, session_id: str, carrier: Carrier) -> Callable[[], None]:
        """Let this carrier carry the session's tree, until the returned function is called.

        The named session may end before its tree does; what was attached by it goes all the same.
        """
        root_id = self._desks.get(session_id).tree.root_id
        self._carriers.attach(root_id, carrier)
        return partial(self._carriers.detach, root_id, carrier)

    def bind(self, session_id: str, stream_id: str) -> bool:
        return self._carriers.bind(self._desks.get(session_id).tree.root_id, stream_id)

    def promise(self, session_id: str, seconds: float) -> None:
        desk = self._desks.find(session_id)
        if desk is not None:
            self._carriers.promise(desk.tree.root_id, seconds)

    # -- Requests, as the carriers see them ---------------------------------------------------------------------

    def announcement(self, reach_id: str, request_id: str, redelivery: int) -> Announcement | None:
        tree = self._desks.tree(reach_id)
        one = tree.find(request_id) if tree is not None else None
        if one is None:
            return None
        if redelivery > one.call.redelivery:
            one.call = structs.replace(one.call, redelivery=redelivery)
            self._tasks.create_task(self._count_delivery(one.call.session_id, request_id, redelivery))
        return one.announcement()

    def absent(self, reach_id: str) -> None:
        self._tasks.create_task(self._disconnect_all(reach_id))

    async def _disconnect_all(self, reach_id: str) -> None:
        """End what is on no carrier, unless one came meanwhile."""
        tree = self._desks.tree(reach_id)
        if tree is None or not self._carriers.is_absent(reach_id):
            return
        unreached = [one for one in tree.pending() if self._carriers.is_on(reach_id, one.call.request_id) is None]
        await asyncio.gather(*(self._ends.see_to(one, Stimulus.DISCONNECT) for one in unreached))

    async def _count_delivery(self, session_id: str, request_id: str, redelivery: int) -> None:
        async def write(tx: Tx) -> None:
            await calls.count_delivery(tx, session_id, request_id, redelivery)

        await self._database.write(write)
