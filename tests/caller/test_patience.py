"""How long a caller waits before it tries again."""

from oubliette.caller.patience import ASKED_MAX_S, Patience


def test_waits_grow_to_a_bound_and_begin_anew() -> None:
    patience = Patience(first_s=1.0, most_s=4.0)
    assert [round(patience.next_s() / step) for step in (1, 2, 4, 4)] == [1, 1, 1, 1]
    patience.reset()
    assert patience.next_s() < 1.5


def test_who_is_asked_to_wait_waits_so_long_and_not_for_ever() -> None:
    patience = Patience(first_s=0.1)
    assert patience.next_s(5.0) == 5.0
    assert patience.next_s(3600.0) == ASKED_MAX_S
