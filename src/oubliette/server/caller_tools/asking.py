"""The droid's side: a tool is put to the caller once per call key, and waited for as often as somebody joins."""

import asyncio
import hashlib

import msgspec

from oubliette.server import audit, ids
from oubliette.server.caller_tools import calls, ledger
from oubliette.server.caller_tools.carriers import Carriers
from oubliette.server.caller_tools.declaration import Tool
from oubliette.server.caller_tools.desk import Desk, Desks, Hear, Open
from oubliette.server.caller_tools.ends import Ends
from oubliette.server.caller_tools.ledger import Call, State, Stimulus
from oubliette.server.clock import AlarmClock
from oubliette.server.errors import (
    CallCancelled,
    CallKeyReused,
    InvalidParams,
    OublietteError,
    TooLarge,
    TooMany,
    UnknownTool,
)
from oubliette.server.events.following import Following
from oubliette.server.events.log import EventLog
from oubliette.server.limits import ARGUMENTS_BYTES, INLINE_ARGUMENTS_BYTES, PENDING_CALLS_PER_SESSION
from oubliette.server.marks import Mark
from oubliette.server.storage.database import Database, Tx
from oubliette.wire import relay
from oubliette.wire.events import CallerToolRequest

_encode_sorted = msgspec.json.Encoder(order="deterministic").encode

# What a droid may be refused with before anyone was disturbed; each leaves an audit row.
REFUSALS: tuple[type[OublietteError], ...] = (UnknownTool, InvalidParams, TooMany, TooLarge, CallKeyReused)


class Asking:
    def __init__(
        self,
        desks: Desks,
        carriers: Carriers,
        ends: Ends,
        *,
        database: Database,
        clock: AlarmClock,
        events: EventLog,
        following: Following,
        timeout_s: float,
        timeout_max_s: float,
        mark: Mark,
    ) -> None:
        self._desks = desks
        self._carriers = carriers
        self._ends = ends
        self._database = database
        self._clock = clock
        self._events = events
        self._following = following
        self._timeout_s = timeout_s
        self._timeout_max_s = timeout_max_s
        self._mark = mark

    async def call(self, session_id: str, asked: relay.CallerTool, *, instance: str | None, hear: Hear) -> bytes:
        """Put a tool to the session's caller and wait for the JSON of its result.

        The same call key joins the call that it names, or gets its stored outcome. Raises a `CallFailed`, or what
        refused the call before anyone was disturbed.
        """
        desk = self._desks.get(session_id)
        key = asked.call_key or ids.new_key()
        if len(key) > relay.CALL_KEY_MAX:
            raise InvalidParams(f"a call key has at most {relay.CALL_KEY_MAX} characters")
        encoded = _encode_sorted(asked.arguments)
        one = desk.keys.get(key)
        if one is not None:
            _check_same(one.names, one.call.tool, one.digest, asked.tool, encoded)
            if instance is not None:
                one.instances.add(instance)
            return ledger.result(await one.wait(hear))
        try:
            tool = _check(desk, asked, encoded)
        except REFUSALS:
            # What was asked under this key before counts, whatever has become of the tool since.
            ended = await self._outcome(desk, asked.tool, key, encoded) if asked.call_key is not None else None
            if ended is None:
                raise
            return ledger.result(ended)
        return ledger.result(await self._put(self._enter(desk, tool, key, instance, encoded), hear))

    def _enter(self, desk: Desk, tool: Tool, key: str, instance: str | None, arguments: bytes) -> Open:
        assert desk.declaration is not None
        now = self._clock.now()
        timeout_s = tool.timeout_s or desk.declaration.timeout_s or self._timeout_s
        call = Call(
            request_id=ids.call_uuid(desk.session_id, key),
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
        one = Open(
            desk=desk,
            call=call,
            names=(tool.name, tool.box_name),
            digest=_digest(tool.name, arguments),
            arguments=arguments,
            due=self._clock.monotonic() + timeout_s,
        )
        if instance is not None:
            one.instances.add(instance)
        desk.enter(one)
        return one

    async def _put(self, one: Open, hear: Hear) -> Call:
        """Write the call's row, then announce it, then wait."""
        try:
            before, index = await self._record(one)
        except BaseException as failure:
            one.desk.leave(one)
            one.fail(failure if isinstance(failure, Exception) else CallCancelled("the server is stopping"))
            raise
        self._mark("call:after_commit")
        if one.ended is not None:
            return one.ended  # answered already: by somebody who read the log
        redelivery = 0
        if before is not None:
            one.desk.leave(one)
            one.call = before
            if before.state is not State.PENDING:
                one.tell(before)
                return before
            one.due = self._ends.due(before)
            one.desk.enter(one)
            redelivery = before.redelivery + 1
        one.index = index
        if one.cut is None:
            self._ends.count_down(one)
            self._carriers.put(one.desk.tree.root_id, one.call.request_id, redelivery=redelivery)
            self._mark("call:announced")
        self._following.wake(one.call.session_id, index)
        if one.cut is not None:
            await self._ends.see_to(one, *one.cut)
        return await one.wait(hear)

    async def _record(self, one: Open) -> tuple[Call | None, int]:
        """Write the row with its event, unless its key has one: that one, and the index of its request."""
        call, digest, arguments = one.call, one.digest, one.arguments
        entry = audit.Entry(
            door="relay", operation="caller_tool", outcome="asked", session_id=call.session_id, target=call.request_id
        )
        event = _request(call, arguments)

        async def write(tx: Tx) -> tuple[Call | None, int]:
            before = await calls.insert(tx, call, digest=digest, arguments=arguments)
            if before is not None:
                return before.call, before.index
            index = await self._events.append(tx, call.session_id, (event,), call.created_at)
            await audit.write(tx, call.created_at, entry)
            self._mark("call:after_row")
            return None, index

        return await self._database.write(write)

    async def _outcome(self, desk: Desk, asked_tool: str, key: str, arguments: bytes) -> Call | None:
        """How the call of this key ended, if it is this call."""

        async def read(tx: Tx) -> tuple[Call, bytes] | None:
            return await calls.of_key(tx, desk.session_id, key)

        found = await self._database.read(read)
        if found is None or found[0].state is State.PENDING:
            return None
        _check_same(desk.names_of(found[0].tool), found[0].tool, found[1], asked_tool, arguments)
        return found[0]

    # -- letting go ---------------------------------------------------------------------------------------------

    async def cancel(self, session_id: str, call_key: str, reason: str) -> bool:
        """The droid's side lets a call go; unknown and finished keys change nothing."""
        desk = self._desks.find(session_id)
        one = desk.keys.get(call_key) if desk is not None else None
        return one is not None and await self._ends.see_to(one, Stimulus.CANCEL, reason, door="relay")

    async def cancel_all(self, session_id: str, reason: str) -> None:
        """The turn or the session is over: nobody waits for any of its calls."""
        desk = self._desks.find(session_id)
        if desk is not None:
            await asyncio.gather(*(self._ends.see_to(one, Stimulus.CANCEL, reason) for one in desk.open.values()))

    async def client_gone(self, session_id: str, instance: str) -> None:
        """A client did not return within its grace: what nobody else asked is given up."""
        desk = self._desks.find(session_id)
        given_up: list[Open] = []
        for one in desk.open.values() if desk is not None else ():
            if instance in one.instances:
                one.instances.discard(instance)
                if not one.instances:
                    given_up.append(one)
        await asyncio.gather(*(self._ends.see_to(one, Stimulus.CLIENT_GONE) for one in given_up))

    def instances(self, session_id: str) -> set[str]:
        """The clients that have open calls in this session."""
        desk = self._desks.find(session_id)
        return {name for one in desk.open.values() for name in one.instances} if desk is not None else set()


def _check(desk: Desk, asked: relay.CallerTool, encoded: bytes) -> Tool:
    """The tool, if it may be called like this."""
    found = desk.tools.get(asked.tool)
    if found is None:
        raise UnknownTool(f"no caller tool is named {asked.tool[:128]!r} in this session")
    tool, schema = found
    if len(encoded) > ARGUMENTS_BYTES:
        raise TooLarge(f"the arguments are {len(encoded)} bytes; a caller tool takes at most {ARGUMENTS_BYTES}")
    if desk.closing is not None:
        raise CallCancelled(f"{tool.box_name} was not called: {desk.closing}")
    if len(desk.open) >= PENDING_CALLS_PER_SESSION:
        raise TooMany(f"{PENDING_CALLS_PER_SESSION} calls of this session wait for answers: wait for one to end")
    schema.check(asked.arguments, encoded, tool.box_name)
    return tool


def _check_same(names: tuple[str, str], tool: str, digest: bytes, asked_tool: str, arguments: bytes) -> None:
    """A key names one call: this tool, by either of its names, with these arguments."""
    if asked_tool not in names or digest != _digest(tool, arguments):
        raise CallKeyReused("this call key was used for another call: every call needs a fresh one")


def _digest(tool: str, arguments: bytes) -> bytes:
    return hashlib.sha256(tool.encode() + b"\0" + arguments).digest()


def _request(call: Call, arguments: bytes) -> CallerToolRequest:
    inline = len(arguments) <= INLINE_ARGUMENTS_BYTES
    return CallerToolRequest(
        request_id=call.request_id,
        tool=call.tool,
        arguments=msgspec.Raw(arguments) if inline else msgspec.UNSET,
        arguments_bytes=None if inline else len(arguments),
        deadline_at=call.deadline_at,
    )
