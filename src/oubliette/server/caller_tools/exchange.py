"""Calls of caller tools while they are open: put to the caller, waited for, ended.

The rows decide (see `ledger` and `calls`); here is what a running server knows beside them: who waits for which
row, when its deadline comes, and which carrier it is on. All of it can be lost: `load` builds it anew.
"""

import asyncio
import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from oubliette.server import audit, ids
from oubliette.server.caller_tools import calls, ledger
from oubliette.server.caller_tools.carriers import Announcement, Carrier, Carriers
from oubliette.server.caller_tools.declaration import Arguments, Declaration, Tool
from oubliette.server.caller_tools.ledger import Call, State, Stimulus
from oubliette.server.clock import Clock
from oubliette.server.errors import (
    InvalidArguments,
    InvalidParams,
    NotFound,
    OublietteError,
    StorageFailed,
    TooLarge,
    TooMany,
    UnknownTool,
)
from oubliette.server.events.following import Following
from oubliette.server.events.log import EventLog
from oubliette.server.limits import (
    ARGUMENTS_BYTES,
    INLINE_ARGUMENTS_BYTES,
    PENDING_CALLS_PER_SESSION,
    PROMISE_POLL_S,
    RESULT_BYTES,
    WAIT_S_MAX,
)
from oubliette.server.storage.database import Database, Tx
from oubliette.server.tasks import Tasks
from oubliette.server.tokens.token import Actor
from oubliette.wire import relay
from oubliette.wire.events import CallerToolProgress, CallerToolRequest

logger = logging.getLogger(__name__)

_encode_sorted = msgspec.json.Encoder(order="deterministic").encode
_NULL = b"null"
Mark = Callable[[str], None]
Hear = Callable[[relay.Progress], None]


@dataclass(slots=True)
class Open:
    """A pending call and who waits for it."""

    call: Call
    index: int
    arguments: bytes
    waiters: list[asyncio.Future[Call]] = field(default_factory=list[asyncio.Future[Call]])
    hears: list[Hear] = field(default_factory=list[Hear])
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class Desk:
    """One session's calls and what may be called."""

    session_id: str
    root_id: str  # the owner is reached by the tree's root: a child has its root's caller
    owner: str
    declaration: Declaration | None = None
    tools: dict[str, tuple[Tool, Arguments]] = field(default_factory=dict[str, tuple[Tool, Arguments]])
    open: dict[str, Open] = field(default_factory=dict[str, Open])
    keys: dict[str, str] = field(default_factory=dict[str, str])  # of open calls: call key to request id
    entering: int = 0
    poll: "Poll | None" = None

    def declare(self, declaration: Declaration | None) -> None:
        self.declaration = declaration
        self.tools = {}
        for tool in reversed(declaration.tools if declaration is not None else ()):
            checked = (tool, Arguments(tool))
            self.tools[tool.box_name] = checked
        for tool in declaration.tools if declaration is not None else ():
            self.tools[tool.name] = self.tools[tool.box_name]


class Poll:
    """A caller that asks again and again: the requests wait here for its next poll."""

    kind = "poll"

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self.polling = 0
        self.timer: asyncio.TimerHandle | None = None

    def announce(self, session_id: str, announcement: Announcement) -> None:
        del session_id, announcement  # the poll reads what is pending itself
        self.arrived.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What became of an answer; `reason` is empty where it was accepted."""

    accepted: bool
    reason: str = ""
    repeated: bool = False
    state: str = ""


def _unmarked(name: str) -> None:
    """Commit points are named so that tests can stop a server right there; a server itself does not."""


class Exchange:
    def __init__(
        self,
        *,
        database: Database,
        clock: Clock,
        events: EventLog,
        following: Following,
        carriers: Carriers,
        tasks: Tasks,
        timeout_s: float,
        timeout_max_s: float,
        mark: Mark = _unmarked,
    ) -> None:
        self._database = database
        self._clock = clock
        self._events = events
        self._following = following
        self._carriers = carriers
        self._tasks = tasks
        self._timeout_s = timeout_s
        self._timeout_max_s = timeout_max_s
        self._mark = mark
        self._desks: dict[str, Desk] = {}
        self._trees: dict[str, dict[str, Desk]] = {}
        carriers.join(self)

    # -- sessions -----------------------------------------------------------------------------------------------

    def open_desk(self, session_id: str, root_id: str, owner: str, declaration: Declaration | None) -> None:
        """Take a session's calls from now on; again after a restart, or when its tools changed."""
        desk = self._desks.get(session_id)
        if desk is None:
            desk = self._desks[session_id] = Desk(session_id, root_id, owner)
            self._trees.setdefault(root_id, {})[session_id] = desk
        desk.declare(declaration)
        if declaration is not None and declaration.delivery == "poll":
            self._carriers.promise(root_id, math.inf)

    # Who names a session reaches its whole tree: these translate.

    def attach(self, session_id: str, carrier: Carrier) -> None:
        self._carriers.attach(self._desk(session_id).root_id, carrier)

    def detach(self, session_id: str, carrier: Carrier) -> None:
        desk = self._desks.get(session_id)
        if desk is not None:
            self._carriers.detach(desk.root_id, carrier)

    def bind(self, session_id: str, stream_id: str) -> bool:
        return self._carriers.bind(self._desk(session_id).root_id, stream_id)

    def promise(self, session_id: str, seconds: float) -> None:
        desk = self._desks.get(session_id)
        if desk is not None:
            self._carriers.promise(desk.root_id, seconds)

    def declaration(self, session_id: str) -> Declaration | None:
        desk = self._desks.get(session_id)
        return desk.declaration if desk is not None else None

    async def close_desk(self, session_id: str, reason: str) -> None:
        """The session ended: so do its pending calls."""
        await self.cancel_all(session_id, reason)
        desk = self._desks.pop(session_id, None)
        if desk is None:
            return
        if desk.poll is not None:
            desk.poll.arrived.set()
        tree = self._trees[desk.root_id]
        del tree[session_id]
        if not tree:
            del self._trees[desk.root_id]
            self._carriers.forget(desk.root_id)

    async def load(self) -> None:
        """Take up every pending call of the database: after a start of the server, before any door opens."""
        rows = await self._database.read(calls.pending)
        for call, index, arguments in rows:
            if call.session_id in self._desks:
                again = replace(call, redelivery=call.redelivery + 1)
                self._opened(self._desks[call.session_id], again, index, arguments, announce=False)

    def pending_count(self, session_id: str) -> int:
        desk = self._desks.get(session_id)
        return len(desk.open) if desk is not None else 0

    # -- the droid's side ---------------------------------------------------------------------------------------

    async def call(self, session_id: str, asked: relay.CallerTool, *, instance: str | None, hear: Hear) -> bytes:
        """Put a tool to the session's caller and wait for the JSON of its result.

        The same call key joins the call that it names, or gets its stored outcome. Raises a `CallFailed`, or what
        refused the call before anyone was disturbed.
        """
        desk = self._desk(session_id)
        found = desk.tools.get(asked.tool)
        if found is None:
            raise UnknownTool(f"no caller tool is named {asked.tool!r} in this session")
        tool, arguments = found
        encoded = _encode_sorted(asked.arguments)
        if len(encoded) > ARGUMENTS_BYTES:
            raise TooLarge(f"the arguments are {len(encoded)} bytes; a caller tool takes at most {ARGUMENTS_BYTES}")
        key = asked.call_key or ids.new_key()
        if len(key) > relay.CALL_KEY_MAX:
            raise InvalidParams(f"a call key has at most {relay.CALL_KEY_MAX} characters")
        if key not in desk.keys and len(desk.open) + desk.entering >= PENDING_CALLS_PER_SESSION:
            raise TooMany(f"{PENDING_CALLS_PER_SESSION} calls of this session wait for answers: wait for one to end")
        arguments.check(asked.arguments)
        desk.entering += 1
        try:
            recorded = await self._record(desk, tool, key, instance, encoded)
        finally:
            desk.entering -= 1
        if recorded.call.state is not State.PENDING:
            return ledger.result(recorded.call)
        return await self._wait(self._opened(desk, recorded.call, recorded.index, encoded), instance, hear)

    async def _record(self, desk: Desk, tool: Tool, key: str, instance: str | None, arguments: bytes) -> calls.Recorded:
        assert desk.declaration is not None
        now = self._clock.now()
        timeout_s = tool.timeout_s or desk.declaration.timeout_s or self._timeout_s
        call = Call(
            request_id=ids.new_uuid(),
            session_id=desk.session_id,
            call_key=key,
            tool=tool.name,
            owner=desk.owner,
            created_at=now,
            deadline_at=now + timeout_s,
            deadline_max_at=now + max(timeout_s, self._timeout_max_s),
            timeout_s=timeout_s,
            instance=instance,
        )
        digest = hashlib.sha256(tool.name.encode() + b"\0" + arguments).digest()
        entry = audit.Entry(
            door="relay", operation="caller_tool", outcome="asked", session_id=desk.session_id, target=call.request_id
        )
        event = self._request(call, arguments)

        async def record(tx: Tx) -> tuple[calls.Recorded, int]:
            recorded = await calls.insert(tx, call, digest=digest, arguments=arguments)
            if not recorded.is_new:
                return recorded, -1
            last = await self._events.append(tx, desk.session_id, (event,), now)
            await audit.write(tx, now, entry)
            self._mark("call:after_row")
            return recorded, last

        recorded, last = await self._database.write(record)
        self._mark("call:after_commit")
        if recorded.is_new:
            self._following.wake(desk.session_id, last)
        return recorded

    async def _wait(self, one: Open, instance: str | None, hear: Hear) -> bytes:
        if instance is not None and one.call.instance != instance:
            one.call = replace(one.call, instance=instance)
        waiter: asyncio.Future[Call] = asyncio.get_running_loop().create_future()
        one.waiters.append(waiter)
        one.hears.append(hear)
        try:
            return ledger.result(await waiter)
        finally:
            # The droid's side may go and come back: the call stays open, only this waiter leaves.
            one.hears.remove(hear)
            if waiter in one.waiters:
                one.waiters.remove(waiter)

    async def cancel(self, session_id: str, call_key: str, reason: str) -> bool:
        """The droid's side lets a call go; unknown and finished keys change nothing."""
        desk = self._desks.get(session_id)
        request_id = desk.keys.get(call_key) if desk is not None else None
        if desk is None or request_id is None:
            return False
        return await self._end(desk.open[request_id].call, Stimulus.CANCEL, reason) is not None

    async def cancel_all(self, session_id: str, reason: str) -> None:
        """The turn or the session is over: nobody waits for any of its calls."""
        desk = self._desks.get(session_id)
        for one in tuple(desk.open.values()) if desk is not None else ():
            await self._end(one.call, Stimulus.CANCEL, reason)

    async def client_gone(self, session_id: str, instance: str) -> None:
        """A client did not return within its grace: what it asked is given up."""
        desk = self._desks.get(session_id)
        for one in tuple(desk.open.values()) if desk is not None else ():
            if one.call.instance == instance:
                await self._end(one.call, Stimulus.CLIENT_GONE, "")

    def instances(self, session_id: str) -> set[str]:
        """The clients that have open calls in this session."""
        desk = self._desks.get(session_id)
        return {one.call.instance for one in desk.open.values() if one.call.instance} if desk is not None else set()

    # -- the caller's side --------------------------------------------------------------------------------------

    async def answer(
        self, actor: Actor, session_id: str, request_id: str, *, result: bytes | None, error: str | None, door: str
    ) -> Answered:
        """Give a call its result or its error. What changes nothing says why."""
        if error is not None and result is not None and result != _NULL:
            raise InvalidParams("both result and error are given: an answer is one of them")
        if result is not None and len(result) > RESULT_BYTES:
            raise TooLarge(f"the result is {len(result)} bytes; at most {RESULT_BYTES} are taken")
        call = await self._find(session_id, request_id)
        stimulus = Stimulus.ANSWER if error is None else Stimulus.FAIL
        content = (result if result is not None else _NULL) if error is None else error
        entry = audit.entry(actor, door=door, operation="caller_tool_response", outcome="ok", target=request_id)
        if call is not None and call.owner != actor.principal:
            return await self._refuse(entry, "not_owner", session_id, call)
        if call is not None and call.state is State.PENDING:
            ended = await self._end(call, stimulus, content, entry)
            if ended is not None:
                self._mark("answer:before_reply")
                return Answered(accepted=True, state=ended.state.value)
            call = await self._stored(session_id, request_id)
        outcome = content if isinstance(content, bytes) else ledger.failure(stimulus, content)
        reason = ledger.refusal(call, outcome)
        if reason == "" and call is not None:
            return Answered(accepted=True, repeated=True, state=call.state.value)
        return await self._refuse(entry, reason, session_id, call)

    async def _refuse(self, entry: audit.Entry, reason: str, session_id: str, call: Call | None) -> Answered:
        logger.warning(
            "an answer to a caller-tool request was ignored",
            extra={"session_id": session_id, "request_id": entry.target, "reason": reason},
        )
        now = self._clock.now()
        refused = replace(entry, outcome=f"refused: {reason}")

        async def write(tx: Tx) -> None:
            await audit.write(tx, now, refused)

        await self._database.write(write)
        state = call.state.value if call is not None and reason != "not_owner" else ""
        return Answered(accepted=False, reason=reason, state=state)

    async def progress(
        self,
        actor: Actor,
        session_id: str,
        request_id: str,
        told: CallerToolProgress,
        *,
        extend_s: float | None,
        door: str,
    ) -> float | None:
        """Pass the caller's progress to the droid; `extend_s` moves the deadline, up to its maximum.

        The deadline after that, or None where the request is not pending or not the actor's.
        """
        one = self._desk(session_id).open.get(request_id)
        if one is None or one.call.owner != actor.principal:
            return None
        now = self._clock.now()
        deadline_at = one.call.deadline_at
        if extend_s is not None:
            deadline_at = min(one.call.deadline_max_at, max(deadline_at, now + extend_s))
            told = msgspec.structs.replace(told, deadline_at=deadline_at)
        entry = audit.entry(actor, door=door, operation="caller_tool_progress", outcome="ok", target=request_id)

        async def write(tx: Tx) -> int | None:
            if not await calls.extend(tx, request_id, deadline_at):
                return None
            last = await self._events.append(tx, session_id, (told,), now)
            await audit.write(tx, now, entry)
            return last

        last = await self._database.write(write)
        if last is None:
            return None
        if deadline_at != one.call.deadline_at:
            one.call = replace(one.call, deadline_at=deadline_at)
            self._arm(one)
        self._following.wake(session_id, last)
        heard = relay.Progress(
            call_key=one.call.call_key, progress=told.progress, total=told.total, message=told.message
        )
        for hear in tuple(one.hears):
            hear(heard)
        return deadline_at

    async def poll(self, session_id: str, known: frozenset[str], wait_s: float) -> list[Announcement]:
        """Requests that the poller does not know yet and no other carrier has; waits for the first, so long at most."""
        desk = self._desk(session_id)
        poll = desk.poll
        if poll is None:
            poll = desk.poll = Poll()
        if poll.timer is not None:
            poll.timer.cancel()
        poll.polling += 1
        self._carriers.attach(desk.root_id, poll)
        self._carriers.promise(desk.root_id, PROMISE_POLL_S)
        until = self._clock.monotonic() + min(wait_s, WAIT_S_MAX)
        try:
            while True:
                poll.arrived.clear()
                found = self._on_poll(desk, poll, known)
                left = until - self._clock.monotonic()
                if found or left <= 0 or self._desks.get(session_id) is not desk:
                    return found
                try:
                    async with asyncio.timeout(left):
                        await poll.arrived.wait()
                except TimeoutError:
                    pass
        finally:
            poll.polling -= 1
            if poll.polling == 0:
                self._carriers.promise(desk.root_id, PROMISE_POLL_S)
                loop = asyncio.get_running_loop()
                poll.timer = loop.call_later(PROMISE_POLL_S, self._carriers.detach, desk.root_id, poll)

    def _on_poll(self, desk: Desk, poll: Poll, known: frozenset[str]) -> list[Announcement]:
        return [
            self._announcement(one, redelivery=one.call.redelivery)
            for one in self._tree(desk.root_id)
            if one.call.request_id not in known and self._carriers.is_on(desk.root_id, one.call.request_id, poll)
        ]

    def listed(self, session_id: str) -> list[Announcement]:
        """Every pending request of a session and its children, whole: with arguments too large for an event."""
        desk = self._desk(session_id)
        return [
            {**self._announcement(one, redelivery=one.call.redelivery), "arguments": msgspec.Raw(one.arguments)}
            for one in self._tree(desk.root_id)
        ]

    # -- Requests, as the carriers see them ---------------------------------------------------------------------

    def announcement(self, reach: str, request_id: str, redelivery: int) -> Announcement | None:
        one = next((one for one in self._tree(reach) if one.call.request_id == request_id), None)
        if one is None:
            return None
        redelivery = max(redelivery, one.call.redelivery)
        if redelivery > one.call.redelivery:
            one.call = replace(one.call, redelivery=redelivery)
            self._tasks.create_task(self._count_delivery(request_id, redelivery))
        return self._announcement(one, redelivery=redelivery)

    def pending(self, reach: str) -> Iterable[str]:
        return [one.call.request_id for one in self._tree(reach)]

    def absent(self, reach: str) -> None:
        self._tasks.create_task(self._disconnect_all(reach))

    # -- inside -------------------------------------------------------------------------------------------------

    def _desk(self, session_id: str) -> Desk:
        desk = self._desks.get(session_id)
        if desk is None:
            raise NotFound(f"session {session_id} is not live")
        return desk

    def _tree(self, root_id: str) -> list[Open]:
        """Everything that is open in a session and its descendants."""
        return [one for desk in self._trees.get(root_id, {}).values() for one in desk.open.values()]

    @staticmethod
    def _request(call: Call, arguments: bytes) -> CallerToolRequest:
        inline = len(arguments) <= INLINE_ARGUMENTS_BYTES
        return CallerToolRequest(
            request_id=call.request_id,
            tool=call.tool,
            arguments=msgspec.Raw(arguments) if inline else msgspec.UNSET,
            arguments_bytes=None if inline else len(arguments),
            deadline_at=call.deadline_at,
        )

    @staticmethod
    def _announcement(one: Open, *, redelivery: int) -> Announcement:
        call = one.call
        told: Announcement = {
            "type": "caller_tool_request",
            "session_id": call.session_id,
            "index": one.index,
            "at": call.created_at,
            "request_id": call.request_id,
            "tool": call.tool,
            "deadline_at": call.deadline_at,
            "redelivery": redelivery,
        }
        if len(one.arguments) <= INLINE_ARGUMENTS_BYTES:
            told["arguments"] = msgspec.Raw(one.arguments)
        else:
            told["arguments_bytes"] = len(one.arguments)
        return told

    def _opened(self, desk: Desk, call: Call, index: int, arguments: bytes, *, announce: bool = True) -> Open:
        one = desk.open.get(call.request_id)
        if one is not None:
            return one
        one = desk.open[call.request_id] = Open(call, index, arguments)
        desk.keys[call.call_key] = call.request_id
        self._arm(one)
        told = self._announcement(one, redelivery=call.redelivery)
        if announce or call.redelivery:
            self._carriers.announce(desk.root_id, call.request_id, told, redelivery=call.redelivery)
        return one

    def _arm(self, one: Open) -> None:
        """Count a deadline down by the monotonic clock from here on; the wall may jump meanwhile."""
        if one.timer is not None:
            one.timer.cancel()
        left = one.call.deadline_at - self._clock.now()
        left = min(max(0.0, left), one.call.deadline_max_at - one.call.created_at)
        one.timer = asyncio.get_running_loop().call_later(left, self._expire, one)

    def _expire(self, one: Open) -> None:
        self._tasks.create_task(self._end_late(one))

    async def _end_late(self, one: Open) -> None:
        try:
            await self._end(one.call, Stimulus.EXPIRE, "")
        except StorageFailed:
            one.timer = asyncio.get_running_loop().call_later(1.0, self._expire, one)

    async def _disconnect_all(self, root_id: str) -> None:
        for one in self._tree(root_id):
            if self._carriers.has_carrier(root_id):
                return
            await self._end(one.call, Stimulus.DISCONNECT, "")

    async def _count_delivery(self, request_id: str, redelivery: int) -> None:
        async def write(tx: Tx) -> None:
            await calls.count_delivery(tx, request_id, redelivery)

        await self._database.write(write)

    async def _find(self, session_id: str, request_id: str) -> Call | None:
        desk = self._desks.get(session_id)
        one = desk.open.get(request_id) if desk is not None else None
        return one.call if one is not None else await self._stored(session_id, request_id)

    async def _stored(self, session_id: str, request_id: str) -> Call | None:
        async def read(tx: Tx) -> Call | None:
            return await calls.find(tx, session_id, request_id)

        return await self._database.read(read)

    async def _end(
        self, call: Call, stimulus: Stimulus, content: bytes | str, entry: audit.Entry | None = None
    ) -> Call | None:
        """Move a call to its end, row first; None where it was not pending any more."""
        now = self._clock.now()
        decided = ledger.ended(call, stimulus, now, content)
        if decided is None:
            return None
        told = entry or audit.Entry(
            door="server",
            operation="caller_tool",
            outcome=decided.call.state.value,
            session_id=call.session_id,
            target=call.request_id,
        )

        async def write(tx: Tx) -> Sequence[int]:
            if not await calls.end(tx, decided.call, stimulus, now):
                return ()
            last = await self._events.append(tx, call.session_id, decided.events, now)
            await audit.write(tx, now, told)
            self._mark("end:after_row")
            return (last,)

        written = await self._database.write(write)
        if not written:
            stored = await self._stored(call.session_id, call.request_id)
            if stored is not None and stored.state is not State.PENDING:
                self._closed(stored, 0)
            return None
        self._mark("end:after_commit")
        self._closed(decided.call, written[0])
        self._following.wake(call.session_id, written[0])
        return decided.call

    def _closed(self, call: Call, last_index: int) -> None:
        """A committed end: tell who waits, and the caller if its work is not wanted any more."""
        desk = self._desks.get(call.session_id)
        one = desk.open.pop(call.request_id, None) if desk is not None else None
        if desk is None or one is None:
            return
        del desk.keys[call.call_key]
        if one.timer is not None:
            one.timer.cancel()
        if last_index and call.state not in (State.ANSWERED, State.FAILED):
            told: dict[str, Any] = {
                "type": "caller_tool_cancelled",
                "session_id": call.session_id,
                "index": last_index - 1,
                "at": call.ended_at,
                "request_id": call.request_id,
                "tool": call.tool,
                "reason": call.state.value,
            }
            self._carriers.tell(desk.root_id, call.request_id, told)
        self._carriers.ended(desk.root_id, call.request_id)
        for waiter in one.waiters:
            if not waiter.done():
                waiter.set_result(call)


# What a droid may be refused with before anyone was disturbed; each leaves an audit row.
REFUSALS: tuple[type[OublietteError], ...] = (UnknownTool, InvalidArguments, TooMany, TooLarge)
