"""How turns and sessions end, inside a transaction.

The end of a session is decided before it is there: from that commit on it takes nothing more, but its droid may still
say its last words and its calls are still to be ended. The status that tells of the end is the last event of the log.
"""

from collections.abc import Sequence
from dataclasses import replace

from oubliette.server.droids.driver import Outcome
from oubliette.server.sessions import rows
from oubliette.server.sessions.lifecycle import Move, State, moved
from oubliette.server.storage.database import Tx
from oubliette.server.tokens import tokens
from oubliette.wire.events import SESSION_ENDED, Completion, Error, Event


async def end_turn(tx: Tx, session_id: str, number: int, outcome: Outcome, now: float) -> Sequence[Event]:
    """Close a running turn; what that adds to the log, nothing where it was closed already."""
    session = await rows.get(tx, session_id)
    if not session.is_live and outcome.stop_reason in ("cancelled", "error"):
        # Its droid was stopped for it, however that went.
        outcome = replace(outcome, stop_reason=SESSION_ENDED, error=None, error_kind=None)
    started = await rows.end_turn(
        tx,
        session_id,
        number,
        now,
        stop_reason=outcome.stop_reason,
        text=outcome.text,
        error=outcome.error,
        usage=dict(outcome.usage) if outcome.usage is not None else None,
    )
    if started is None:
        return ()
    said: list[Event] = []
    if outcome.error is not None:
        said.append(Error(kind=outcome.error_kind or "droid_failed", message=outcome.error, turn=number))
    duration_ms = max(0, round((now - started) * 1000))
    said.append(Completion(turn=number, stop_reason=outcome.stop_reason, text=outcome.text, duration_ms=duration_ms))
    if session.is_live and session.state is State.RUNNING:
        said += await rows.move(tx, session_id, Move.REST, now)
    return said


async def decide(tx: Tx, session_id: str, step: Move, reason: str, now: float) -> State | None:
    """Decide that a session ends: what it will be then; None where that was decided before. Raises `Conflict`."""
    session = await rows.get(tx, session_id)
    if not session.is_live:
        return None
    will_be = moved(session.state, step)
    await rows.drop_queued(tx, session_id, now)
    await tokens.revoke_derived(tx, session_id, now)
    await rows.set_ending(tx, session_id, step, reason, now)
    return will_be


async def complete(tx: Tx, session_id: str, now: float) -> Sequence[Event]:
    """End a session as it was decided, when nobody has anything more to say: the last events of its log."""
    session = await rows.get(tx, session_id)
    if session.ending is None or session.ended_at is not None:
        return ()
    said: list[Event] = []
    turn = await rows.next_turn(tx, session_id)
    if turn is not None:  # of a droid that could not close it
        said += await end_turn(tx, session_id, turn.number, Outcome(stop_reason=SESSION_ENDED, text=""), now)
    return (*said, *await rows.move(tx, session_id, session.ending, now, session.reason))
