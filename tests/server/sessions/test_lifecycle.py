import pytest

from oubliette.server.errors import Conflict
from oubliette.server.sessions.lifecycle import ENDS, MOVES, Move, State, moved


def test_every_state_has_its_row_in_the_table():
    assert set(MOVES) == set(State)


def test_an_end_is_final():
    for state in State:
        assert (state in ENDS) == (not MOVES[state])
        for move in Move:
            if state in ENDS:
                with pytest.raises(Conflict):
                    moved(state, move)


def test_a_session_can_be_ended_from_every_state_that_lives():
    for state in set(State) - ENDS:
        assert moved(state, Move.END) is State.COMPLETED


def test_a_turn_leads_back_to_idle():
    assert moved(moved(State.IDLE, Move.TURN), Move.REST) is State.IDLE
