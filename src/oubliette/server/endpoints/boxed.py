"""What may be asked out of a box, and on whose authority.

A call of a caller's tool and a child session rest on the session itself; the platform's tools rest on a key that is
verified at every call. Whatever the key, the asking comes from inside: the gate knows it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from msgspec import structs

from oubliette.server import audit
from oubliette.server.caller_tools.exchange import REFUSALS, Exchange
from oubliette.server.droids.driver import KeeperLink
from oubliette.server.endpoints import failures
from oubliette.server.endpoints.interest import Interest
from oubliette.server.errors import CallCancelled, Forbidden, OublietteError, Unauthenticated, UnknownTool
from oubliette.server.limits import PENDING_CALLS_PER_SESSION, WATCH_S_MAX
from oubliette.server.operations.gate import Gate, named, target_of
from oubliette.server.operations.once import KeepOutcome, Once
from oubliette.server.operations.operation import Asked, Operation, Rooms
from oubliette.server.operations.schemas import schema
from oubliette.server.sessions.boxes import Boxes
from oubliette.server.storage.database import Tx
from oubliette.server.tasks import Tasks
from oubliette.server.tokens.token import Actor, Scope
from oubliette.wire import relay

logger = logging.getLogger(__name__)

ERROR = "dev.oubliette/error"

_encode = msgspec.json.Encoder().encode
_encode_sorted = msgspec.json.Encoder(order="deterministic").encode


class Keepers(Protocol):
    """Where a keeper's words about its processes go. Implemented by `droids.processes`."""

    def acks(self, box_id: str) -> dict[str, int]: ...
    def attached(self, box_id: str, link: KeeperLink, states: list[relay.ProcessState]) -> None: ...
    def detached(self, box_id: str, link: KeeperLink) -> None: ...
    def told(self, box_id: str, method: str, params: bytes) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    timeout_s: float
    timeout_max_s: float
    client_grace_s: float
    abandoned_after_s: float


# Whether the agent of a session of this autonomy never asks for its tools again, and so needs them searched and called
# by name in the turn in which they change.
NeverRefreshes = Callable[[str], bool]


@dataclass(slots=True, kw_only=True)
class Boxed:
    rooms: Rooms
    gate: Gate
    boxes: Boxes
    keepers: Keepers
    once: Once
    times: Times
    tasks: Tasks
    mark: Callable[[str], None]
    never_refreshes: NeverRefreshes
    _leaving: dict[tuple[str, str], asyncio.TimerHandle] = field(
        default_factory=dict[tuple[str, str], asyncio.TimerHandle]
    )

    @property
    def _exchange(self) -> Exchange:
        return self.rooms.exchange

    # -- who comes and goes -------------------------------------------------------------------------------------

    async def attached(self, session_id: str, box_id: str, asked: relay.Attach) -> relay.Attached:
        session = await self.rooms.sessions.get(session_id)
        declaration = self._exchange.declaration(session_id)
        return relay.Attached(
            session_id=session_id,
            depth=session.depth,
            protocol=asked.protocol,
            limits=relay.Limits(pending_calls=PENDING_CALLS_PER_SESSION),
            call_timeout_s=self.times.timeout_s,
            call_timeout_max_s=self.times.timeout_max_s,
            wait_max_s=WATCH_S_MAX,
            caller_tools=declaration is not None and bool(declaration.tools),
            tools_search=self.never_refreshes(session.choices.autonomy),
            abandoned_after_s=self.times.abandoned_after_s,
            acks=self.keepers.acks(box_id) if asked.role == "keeper" else {},
        )

    def client_attached(self, session_id: str, instance: str) -> None:
        timer = self._leaving.pop((session_id, instance), None)
        if timer is not None:
            timer.cancel()

    def client_left(self, session_id: str, instance: str) -> None:
        """A client's last connection closed: its open calls wait a while for the same instance to return."""
        if instance not in self._exchange.instances(session_id):
            return
        loop = asyncio.get_running_loop()
        key = (session_id, instance)
        older = self._leaving.pop(key, None)
        if older is not None:
            older.cancel()
        self._leaving[key] = loop.call_later(self.times.client_grace_s, self._client_gone, session_id, instance)

    def _client_gone(self, session_id: str, instance: str) -> None:
        self._leaving.pop((session_id, instance), None)
        self.tasks.create_task(self._exchange.client_gone(session_id, instance))

    def expect_clients(self, session_ids: list[str]) -> None:
        """After a restart: clients with open calls have their grace to connect again."""
        for session_id in session_ids:
            for instance in self._exchange.instances(session_id):
                self.client_left(session_id, instance)

    # -- caller tools -------------------------------------------------------------------------------------------

    async def caller_tool(
        self, session_id: str, asked: relay.CallerTool, instance: str | None, hear: Callable[[relay.Progress], None]
    ) -> bytes:
        try:
            result = await self._exchange.call(session_id, asked, instance=instance, hear=hear)
        except REFUSALS as refusal:
            await self._refused(session_id, "caller_tool", refusal, asked.tool[:128])
            raise
        self.mark("call:before_reply")
        return result

    async def cancel(self, session_id: str, asked: relay.Cancel) -> None:
        await self._exchange.cancel(session_id, asked.call_key, asked.reason[:200])

    def listed(self, session_id: str) -> None:
        live = self.rooms.sessions.live(session_id)
        if live is not None:
            live.listed()

    def config(self, session_id: str) -> relay.CallerToolsConfig | None:
        declaration = self._exchange.declaration(session_id)
        if declaration is None:
            return None
        return relay.CallerToolsConfig(caller_id=declaration.caller_id, tools=declaration.config_tools())

    # -- the platform's tools -----------------------------------------------------------------------------------

    async def _actor(self, session_id: str, api_key: str, operation: str, target: str | None = None) -> Actor:
        try:
            return await self.rooms.tokens.verify(api_key, session_id=session_id)
        except Unauthenticated as refusal:
            await self._refused(session_id, operation, refusal, target)
            raise

    async def oubliette_tools(self, session_id: str, asked: relay.OublietteTools, interest: Interest) -> object:
        async with interest.lasting():
            actor = await self._actor(session_id, asked.api_key, "oubliette_tools")
        await self.note(audit.entry(actor, door="relay", operation="oubliette_tools", outcome="ok"))
        return {"tools": [_shown(operation) for operation in self.gate.offered(actor)]}

    async def oubliette_call_tool(self, session_id: str, asked: relay.OublietteCallTool, interest: Interest) -> object:
        interest.call_key = asked.call_key
        arguments = _encode_sorted(asked.arguments)
        actor = await self._actor(session_id, asked.api_key, "oubliette_call_tool", _target(asked.tool, arguments))
        operation = self.gate.find(asked.tool)

        if operation is None or not operation.writes:
            outcome = await self._read(actor, asked.tool, arguments, interest)
        else:

            async def work(keep: KeepOutcome) -> bytes:
                asking = _asking(actor, keep, lambda result: _encode(self._result(operation.name, result)))
                return _encode(await self._operate(asking, operation.name, arguments))

            outcome = await self._once(actor, operation, asked.call_key, arguments, work)
            if operation.wait is not None:
                async with interest.lasting():
                    outcome = await self._waited(Asked(actor=actor, door="relay"), operation, arguments, outcome)
        self.mark("operation:before_reply")
        return msgspec.Raw(outcome)

    async def _read(self, actor: Actor, tool: str, arguments: bytes, interest: Interest) -> bytes:
        """Do what does not write. The gate notes what was refused; what was read, or not waited for, is noted here."""
        entry = audit.entry(
            actor, door="relay", operation="oubliette_call_tool", outcome="ok", target=_target(tool, arguments)
        )
        try:
            async with interest.lasting():
                result = await self._operate(Asked(actor=actor, door="relay"), tool, arguments)
        except CallCancelled as unwanted:
            await self.note(structs.replace(entry, outcome=f"refused: {unwanted.kind}"))
            raise
        if "_meta" not in result:
            await self.note(entry)
        return _encode(result)

    async def _once(
        self,
        actor: Actor,
        operation: Operation[Any],
        call_key: str | None,
        arguments: bytes,
        work: Callable[[KeepOutcome], Awaitable[bytes]],
    ) -> bytes:
        assert actor.session_id is not None
        has_begun = False

        async def begin(keep: KeepOutcome) -> bytes:
            nonlocal has_begun
            has_begun = True
            return await work(keep)

        try:
            return await self.once.run(
                actor.session_id, call_key, operation.name, arguments, begin, is_secret=operation.shown_once
            )
        except OublietteError as refusal:
            # What the operation refused, the gate has noted.
            if not has_begun:
                outcome, target = f"refused: {refusal.kind}", target_of(arguments)
                await self.note(
                    audit.entry(actor, door="relay", operation=operation.name, outcome=outcome, target=target)
                )
            raise

    async def _operate(self, asked: Asked, name: str, arguments: bytes) -> dict[str, Any]:
        """An operation as an MCP result: what the tool itself refuses is a result with `isError`."""
        try:
            result = await self.gate.effect(asked, name, arguments)
        except (Unauthenticated, Forbidden, UnknownTool):
            raise
        except OublietteError as failure:
            told = failures.as_rpc(failure)
            meta = {ERROR: {"code": told.code, **(told.data or {})}}
            return {"content": [{"type": "text", "text": failure.message}], "isError": True, "_meta": meta}
        return self._result(name, result)

    def _result(self, name: str, result: msgspec.Struct) -> dict[str, Any]:
        encoded = _encode(result)
        operation = self.gate.find(name)
        is_error = operation is not None and operation.refused is not None and operation.refused(result)
        return {
            "content": [{"type": "text", "text": encoded.decode()}],
            "structuredContent": msgspec.Raw(encoded),
            "isError": is_error,
        }

    async def _waited(self, asking: Asked, operation: Operation[Any], arguments: bytes, outcome: bytes) -> bytes:
        """What is kept of a call is its effect; the wait behind it is begun anew whenever it is asked for."""
        stored = msgspec.json.decode(outcome, type=_Stored)
        if stored.structuredContent is msgspec.UNSET:
            return outcome
        told = await self.gate.waited(asking, operation, arguments, bytes(stored.structuredContent))
        return _encode(self._result(operation.name, told))

    # -- child sessions -----------------------------------------------------------------------------------------

    async def _creator(self, session_id: str) -> Actor:
        """The authority of the session's creator at this moment, as far as a droid has it: its own tree."""
        session = await self.rooms.sessions.get(session_id)
        # Without a token it was this machine's administrator, by the local door.
        if session.token_id is not None and not await self.rooms.tokens.is_live(session.token_id):
            refusal = Unauthenticated("the token that started this session is revoked or expired")
            await self._refused(session_id, "session_message", refusal, None)
            raise refusal
        return Actor(
            principal=f"session:{session_id}",
            scope=Scope.WRITE,
            token_id=session.token_id,
            project_id=session.project_id,
            session_id=session_id,
            derived=True,
        )

    async def session_message(self, session_id: str, asked: relay.SessionMessage, interest: Interest) -> object:
        interest.call_key = asked.call_key
        actor = await self._creator(session_id)
        told: dict[str, Any] = {"message": asked.message, "wait_seconds": asked.wait_seconds}
        for name in ("session_id", "workspace_id", "create_workspace"):
            value = getattr(asked, name)
            if value:
                told[name] = value
        arguments = _encode_sorted(told)

        operation = self.gate.find("session_message")
        assert operation is not None

        async def work(keep: KeepOutcome) -> bytes:
            return _encode(await self.gate.effect(_asking(actor, keep, _encode), operation.name, arguments))

        outcome = await self._once(actor, operation, asked.call_key, arguments, work)
        async with interest.lasting():
            return await self.gate.waited(Asked(actor=actor, door="relay"), operation, arguments, outcome)

    async def session_events(self, session_id: str, asked: relay.SessionEvents, interest: Interest) -> object:
        interest.call_key = asked.call_key
        arguments = _encode(msgspec.structs.replace(asked, call_key=None))
        async with interest.lasting():
            actor = await self._creator(session_id)
            return await self.gate.call(Asked(actor=actor, door="relay"), "session_events", arguments)

    # -- audit --------------------------------------------------------------------------------------------------

    async def note(self, entry: audit.Entry) -> None:
        now = self.rooms.clock.now()

        async def write(tx: Tx) -> None:
            await audit.write(tx, now, entry)

        await self.rooms.database.write(write)

    async def _refused(self, session_id: str, operation: str, refusal: OublietteError, target: str | None) -> None:
        await self.note(
            audit.Entry(
                door="relay",
                operation=operation,
                outcome=f"refused: {refusal.kind}",
                session_id=session_id,
                target=target,
            )
        )


def _target(tool: str, arguments: bytes) -> str:
    """A tool, and what it was asked to be about."""
    tool, target = named(tool), target_of(arguments)
    return f"{tool} {target}" if target is not None else tool


class _Stored(msgspec.Struct):
    """A tool result as it was kept, as far as it is looked at."""

    structuredContent: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def _asking(actor: Actor, keep: KeepOutcome, told: Callable[[msgspec.Struct], bytes]) -> Asked:
    """A question out of a box whose result is kept, as it will be told, with its effect."""
    return Asked(actor=actor, door="relay", kept=lambda tx, result: keep(tx, told(result)))


def _shown(operation: Operation[Any]) -> dict[str, Any]:
    """An operation as a tool definition."""
    return {
        "name": operation.name,
        "title": operation.title,
        "description": operation.summary,
        "inputSchema": schema(operation.params),
        "outputSchema": schema(operation.result),
        "annotations": {"readOnlyHint": not operation.writes, "destructiveHint": operation.destructive},
    }
