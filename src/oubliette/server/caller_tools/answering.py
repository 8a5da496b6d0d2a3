"""The caller's side: results, errors and progress, by the owner only. The first valid answer wins."""

import logging
from dataclasses import dataclass

import msgspec
from msgspec import structs

from oubliette.server import audit
from oubliette.server.caller_tools import calls, ledger
from oubliette.server.caller_tools.desk import Desks
from oubliette.server.caller_tools.ends import Ends
from oubliette.server.caller_tools.ledger import Call, State, Stimulus
from oubliette.server.clock import AlarmClock
from oubliette.server.errors import InvalidParams, TooLarge
from oubliette.server.events.following import Following
from oubliette.server.events.log import EventLog
from oubliette.server.limits import ERROR_BYTES, RESULT_BYTES
from oubliette.server.marks import Mark
from oubliette.server.storage.database import Database, Tx
from oubliette.server.tokens.token import Actor
from oubliette.wire import relay
from oubliette.wire.events import CallerToolProgress

logger = logging.getLogger(__name__)

_NULL = b"null"
# Names that a caller made up are kept in the audit as far as they can mean something.
_SHOWN_CHARS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What became of an answer; `reason` is empty where it was accepted."""

    accepted: bool
    reason: str = ""
    repeated: bool = False
    state: str = ""


class Answering:
    def __init__(
        self,
        desks: Desks,
        ends: Ends,
        *,
        database: Database,
        clock: AlarmClock,
        events: EventLog,
        following: Following,
        mark: Mark,
    ) -> None:
        self._desks = desks
        self._ends = ends
        self._database = database
        self._clock = clock
        self._events = events
        self._following = following
        self._mark = mark

    async def answer(
        self, actor: Actor, session_id: str, request_id: str, *, result: bytes | None, error: str | None, door: str
    ) -> Answered:
        """Give a call its result or its error. What changes nothing says why."""
        stimulus, content = _content(result, error)
        entry = _entry(actor, door, "caller_tool_response", session_id, request_id)
        one = self._desks.find_open(session_id, request_id)
        call = one.call if one is not None else await self._ends.stored(session_id, request_id)
        if call is not None and (call.owner != actor.principal or actor.derived):
            return await self._refuse(entry, "not_owner", None)
        if call is not None and call.state is State.PENDING:
            ended = await self._ends.end(call, stimulus, content, entry, one=one)
            if ended is not None:
                self._mark("answer:before_reply")
                return Answered(accepted=True, state=ended.state.value)
            call = await self._ends.stored(session_id, request_id)
        if call is not None and ledger.is_repeat(call, stimulus, content):
            await self._note(structs.replace(entry, outcome="repeated"))
            return Answered(accepted=True, repeated=True, state=call.state.value)
        return await self._refuse(entry, ledger.refusal(call), call)

    async def _refuse(self, entry: audit.Entry, reason: str, call: Call | None) -> Answered:
        logger.warning(
            "an answer to a caller-tool request was ignored",
            extra={"session_id": entry.session_id, "request_id": entry.target, "reason": reason},
        )
        await self._note(structs.replace(entry, outcome=f"refused: {reason}"))
        return Answered(accepted=False, reason=reason, state=call.state.value if call is not None else "")

    async def _note(self, entry: audit.Entry) -> None:
        now = self._clock.now()

        async def write(tx: Tx) -> None:
            await audit.write(tx, now, entry)

        await self._database.write(write)

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
        one = self._desks.get(session_id).open.get(request_id)
        if one is None or one.index is None or one.call.owner != actor.principal or actor.derived:
            return None
        at = self._clock.now()
        wanted = one.call.deadline_at if extend_s is None else one.counted(self._clock) + extend_s
        entry = _entry(actor, door, "caller_tool_progress", session_id, request_id)

        async def write(tx: Tx) -> tuple[float, int] | None:
            deadline_at = await calls.extend(tx, session_id, request_id, wanted)
            if deadline_at is None:
                return None
            event = told if extend_s is None else msgspec.structs.replace(told, deadline_at=deadline_at)
            last = await self._events.append(tx, session_id, (event,), at)
            await audit.write(tx, at, entry)
            self._mark("progress:after_row")
            return deadline_at, last

        written = await self._database.write(write)
        if written is None:
            return None
        self._mark("progress:after_commit")
        deadline_at, last = written
        # Should a later extension have been heard of first, the expiry finds out: it ends no deadline but its own.
        self._ends.move_deadline(one, deadline_at)
        self._following.wake(session_id, last)
        heard = relay.Progress(
            call_key=one.call.call_key, progress=told.progress, total=told.total, message=told.message
        )
        for hear in tuple(one.hears):
            hear(heard)
        return deadline_at


def _content(result: bytes | None, error: str | None) -> tuple[Stimulus, bytes | str]:
    """What an answer says: its error if it has one, else its result, which may be null."""
    if error is not None:
        if result is not None and result != _NULL:
            raise InvalidParams("both result and error are given: an answer is one of them")
        if len(error.encode(errors="replace")) > ERROR_BYTES:
            raise TooLarge(f"the error is longer than {ERROR_BYTES} bytes: say it shorter")
        return Stimulus.FAIL, error
    if result is None:
        return Stimulus.ANSWER, _NULL
    if len(result) > RESULT_BYTES:
        raise TooLarge(f"the result is {len(result)} bytes; at most {RESULT_BYTES} are taken")
    return Stimulus.ANSWER, _passable(result)


def _passable(result: bytes) -> bytes:
    """The same JSON as text on one line, as frames have it: a caller may have written it on many, or in no encoding."""
    if not result.isascii():
        try:
            result.decode()
        except UnicodeDecodeError as error:
            raise InvalidParams(f"the result is not UTF-8: {error.reason}") from None
    return msgspec.json.format(result, indent=-1) if b"\n" in result or b"\r" in result else result


def _entry(actor: Actor, door: str, operation: str, session_id: str, request_id: str) -> audit.Entry:
    return audit.Entry(
        door=door,
        operation=operation,
        outcome="ok",
        token_id=actor.token_id,
        principal=actor.principal,
        session_id=session_id[:_SHOWN_CHARS],
        target=request_id[:_SHOWN_CHARS],
    )
