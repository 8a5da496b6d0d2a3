"""The life of a caller-tool call, as pure moves.

A call is a row, not a channel: `pending`, then exactly one of the ends. Each move is one conditional statement on
the row; who comes second is told how it ended. What follows from a move (events, and what the droid's side gets)
is decided here; SQL only applies it, and nobody is told before the commit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec
from msgspec import structs

from oubliette.server import errors
from oubliette.wire.events import CallerToolCancelled, CallerToolResolved, Event


class State(StrEnum):
    PENDING = "pending"
    ANSWERED = "answered"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    DISCONNECTED = "disconnected"


class Stimulus(StrEnum):
    ANSWER = "answer"  # the owner gave a result
    FAIL = "fail"  # the owner gave an error
    EXPIRE = "expire"  # the deadline passed
    CANCEL = "cancel"  # the droid, its turn or its session let go
    CLIENT_GONE = "client_gone"  # the droid's MCP server went and did not return
    DISCONNECT = "disconnect"  # the owner has no carrier left


MOVES: Mapping[State, Mapping[Stimulus, State]] = {
    State.PENDING: {
        Stimulus.ANSWER: State.ANSWERED,
        Stimulus.FAIL: State.FAILED,
        Stimulus.EXPIRE: State.EXPIRED,
        Stimulus.CANCEL: State.CANCELLED,
        Stimulus.CLIENT_GONE: State.CANCELLED,
        Stimulus.DISCONNECT: State.DISCONNECTED,
    },
    State.ANSWERED: {},
    State.FAILED: {},
    State.EXPIRED: {},
    State.CANCELLED: {},
    State.DISCONNECTED: {},
}

ANSWERS = frozenset({Stimulus.ANSWER, Stimulus.FAIL})
# After these the caller may still be working on it, and is told to stop.
UNWANTED = frozenset({State.EXPIRED, State.CANCELLED, State.DISCONNECTED})
# What the droid's side gets, by the word that is stored with the outcome.
_FAILURES: Mapping[str, type[errors.CallFailed]] = {
    kind.kind: kind
    for kind in (errors.CallTimeout, errors.CallerGone, errors.CallerError, errors.CallCancelled, errors.ClientGone)
}


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the ledger. `outcome` is the JSON of the result, or of a `Failure`, once the call ended.

    A struct, though it crosses no wire: every call makes two, and this is a tenth of a frozen dataclass's price.
    """

    request_id: str
    session_id: str
    call_key: str
    tool: str
    owner: str
    created_at: float
    deadline_at: float
    deadline_max_at: float
    timeout_s: float
    instance: str | None = None
    state: State = State.PENDING
    redelivery: int = 0
    ended_at: float | None = None
    outcome: bytes | None = None


class Failure(msgspec.Struct, frozen=True):
    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A call at its end, and the events that tell of it."""

    call: Call
    events: tuple[Event, ...]


def ended(call: Call, stimulus: Stimulus, content: bytes | str = "", *, now: float, at: float) -> Ended | None:
    """Move a call; None where its state does not allow it (an answer after the deadline is no answer).

    `content` is the JSON of a result for ANSWER, and for all else the text that the droid will read. `now` is the
    time as it is counted for this call, from its creation on and unmoved by the wall clock; `at` is wall time.
    """
    state = MOVES[call.state].get(stimulus)
    if state is None or (stimulus in ANSWERS and now >= call.deadline_at):
        return None
    error = None if stimulus is Stimulus.ANSWER else said(call, stimulus, content)
    resolved = CallerToolResolved(
        request_id=call.request_id,
        tool=call.tool,
        outcome=state.value,
        error=error,
        duration_ms=max(0, round((now - call.created_at) * 1000)),
    )
    events: tuple[Event, ...] = (resolved,)
    if state in UNWANTED:
        cancelled = CallerToolCancelled(request_id=call.request_id, tool=call.tool, reason=_WORDS[stimulus])
        events = (cancelled, resolved)
    return Ended(
        call=structs.replace(call, state=state, ended_at=at, outcome=outcome(call, stimulus, content)),
        events=events,
    )


_WORDS: Mapping[Stimulus, str] = {
    Stimulus.FAIL: errors.CallerError.kind,
    Stimulus.EXPIRE: errors.CallTimeout.kind,
    Stimulus.CANCEL: errors.CallCancelled.kind,
    Stimulus.CLIENT_GONE: errors.ClientGone.kind,
    Stimulus.DISCONNECT: errors.CallerGone.kind,
}


def outcome(call: Call, stimulus: Stimulus, content: bytes | str) -> bytes:
    """What is stored of an end: the JSON of the result, or of what the droid is told instead."""
    if stimulus is Stimulus.ANSWER:
        assert isinstance(content, bytes)
        return content
    return msgspec.json.encode(Failure(kind=_WORDS[stimulus], message=said(call, stimulus, content)))


def said(call: Call, stimulus: Stimulus, content: bytes | str) -> str:
    """The text that the droid reads of an end without a result."""
    assert isinstance(content, str)
    if content:
        return content
    if stimulus is Stimulus.EXPIRE:
        waited = call.deadline_at - call.created_at
        return f"the caller did not answer {call.tool} within {waited:.6g} seconds"
    return {
        Stimulus.FAIL: f"{call.tool} failed at the caller",
        Stimulus.CANCEL: f"the call of {call.tool} was cancelled",
        Stimulus.CLIENT_GONE: f"the call of {call.tool} was given up: the droid's MCP server did not return",
        Stimulus.DISCONNECT: f"the caller disconnected before it answered {call.tool}",
    }[stimulus]


def result(call: Call) -> bytes:
    """The JSON of an answered call's result; raises what an ended call ended with instead."""
    assert call.outcome is not None
    if call.state is State.ANSWERED:
        return call.outcome
    stored = msgspec.json.decode(call.outcome, type=Failure)
    raise _FAILURES[stored.kind](stored.message)


def is_repeat(call: Call, stimulus: Stimulus, content: bytes | str) -> bool:
    """Whether this answer says what the call already ended with, however its JSON is written."""
    if call.outcome is None or MOVES[State.PENDING][stimulus] is not call.state:
        return False
    again = outcome(call, stimulus, content)
    if again == call.outcome:
        return True
    try:
        return _sorted(again) == _sorted(call.outcome)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return False  # JSON that may be passed on and cannot be read here: only itself is its repeat


_encode_sorted = msgspec.json.Encoder(order="deterministic").encode


def _sorted(encoded: bytes) -> bytes:
    return _encode_sorted(msgspec.json.decode(encoded))


def refusal(call: Call | None) -> str:
    """Why an answer to this call changes nothing: `unknown`, `answered` or `expired`."""
    if call is None:
        return "unknown"
    return "answered" if call.state in (State.ANSWERED, State.FAILED) else "expired"
