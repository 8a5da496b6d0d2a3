"""The states of a session and of a turn, as tables; the docs print these."""

from collections.abc import Mapping
from enum import StrEnum

from oubliette.server.errors import Conflict


class State(StrEnum):
    STARTING = "starting"  # its box and droid are being made
    IDLE = "idle"  # a message starts a turn
    RUNNING = "running"  # a turn is open; further messages queue
    COMPLETED = "completed"  # ended on request
    FAILED = "failed"  # ended by a failure that no message can mend
    TIMED_OUT = "timed_out"  # ended after being idle for too long


class Move(StrEnum):
    TURN = "turn"  # a turn begins
    REST = "rest"  # the turn is over
    END = "end"
    FAIL = "fail"
    EXPIRE = "expire"


MOVES: Mapping[State, Mapping[Move, State]] = {
    State.STARTING: {
        Move.TURN: State.RUNNING,
        Move.END: State.COMPLETED,
        Move.FAIL: State.FAILED,
    },
    State.IDLE: {
        Move.TURN: State.RUNNING,
        Move.END: State.COMPLETED,
        Move.FAIL: State.FAILED,
        Move.EXPIRE: State.TIMED_OUT,
    },
    State.RUNNING: {
        Move.TURN: State.RUNNING,
        Move.REST: State.IDLE,
        Move.END: State.COMPLETED,
        Move.FAIL: State.FAILED,
    },
    State.COMPLETED: {},
    State.FAILED: {},
    State.TIMED_OUT: {},
}

ENDS = frozenset({State.COMPLETED, State.FAILED, State.TIMED_OUT})


def moved(state: State, move: Move) -> State:
    """Where a move leads. Raises `Conflict` where the state does not allow it."""
    to = MOVES[state].get(move)
    if to is None:
        raise Conflict(f"the session is {state.value}: it cannot {move.value} any more")
    return to


class TurnState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"  # by its droid, by a failure, or with its session
    CANCELLED = "cancelled"  # before it began


class TurnMove(StrEnum):
    BEGIN = "begin"
    END = "end"
    DROP = "drop"  # its session ends


TURN_MOVES: Mapping[TurnState, Mapping[TurnMove, TurnState]] = {
    TurnState.QUEUED: {TurnMove.BEGIN: TurnState.RUNNING, TurnMove.DROP: TurnState.CANCELLED},
    TurnState.RUNNING: {TurnMove.END: TurnState.ENDED},
    TurnState.ENDED: {},
    TurnState.CANCELLED: {},
}


def turn_step(move: TurnMove) -> tuple[TurnState, TurnState]:
    """From where a move of a turn leads, and where to; a turn that is elsewhere stays there."""
    return next((state, ways[move]) for state, ways in TURN_MOVES.items() if move in ways)
