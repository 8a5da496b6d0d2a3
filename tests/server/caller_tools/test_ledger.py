"""The moves of a call, tried alone."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oubliette.server import errors
from oubliette.server.caller_tools import ledger
from oubliette.server.caller_tools.ledger import ANSWERS, MOVES, UNWANTED, Call, State, Stimulus
from oubliette.wire.events import CallerToolCancelled, CallerToolResolved

ENDS = [state for state in State if state is not State.PENDING]
CALL = Call(
    request_id="r",
    session_id="s",
    call_key="k",
    tool="echo",
    owner="prn",
    created_at=100.0,
    deadline_at=160.0,
    deadline_max_at=700.0,
    timeout_s=60.0,
)
KINDS = {
    Stimulus.FAIL: errors.CallerError,
    Stimulus.EXPIRE: errors.CallTimeout,
    Stimulus.CANCEL: errors.CallCancelled,
    Stimulus.CLIENT_GONE: errors.ClientGone,
    Stimulus.DISCONNECT: errors.CallerGone,
}


def content(stimulus: Stimulus, text: str = "why") -> bytes | str:
    return msgspec.json.encode(text) if stimulus is Stimulus.ANSWER else text


def moved(call: Call, stimulus: Stimulus, now: float = 130.0, text: str = "why") -> ledger.Ended | None:
    return ledger.ended(call, stimulus, content(stimulus, text), now=now, at=now)


@pytest.mark.parametrize("stimulus", Stimulus)
def test_every_stimulus_ends_a_pending_call_once(stimulus: Stimulus) -> None:
    ended = moved(CALL, stimulus)
    assert ended is not None
    assert ended.call.state is MOVES[State.PENDING][stimulus]
    assert [moved(ended.call, again) for again in Stimulus] == [None] * len(Stimulus)


def test_no_end_has_a_way_out() -> None:
    assert all(MOVES[state] == {} for state in ENDS)
    assert set(MOVES[State.PENDING]) == set(Stimulus)
    assert set(MOVES[State.PENDING].values()) == set(ENDS)


@pytest.mark.parametrize("stimulus", Stimulus)
@pytest.mark.parametrize("now", [159.9, 160.0, 1000.0])
def test_only_an_answer_can_be_late(stimulus: Stimulus, now: float) -> None:
    late = stimulus in ANSWERS and now >= CALL.deadline_at
    assert (moved(CALL, stimulus, now) is None) == late


@pytest.mark.parametrize("stimulus", [stimulus for stimulus in Stimulus if stimulus is not Stimulus.ANSWER])
@pytest.mark.parametrize("text", ["", "why", 'quotes " and \\', "ünï\n"])
def test_an_end_without_a_result_is_raised_with_its_text(stimulus: Stimulus, text: str) -> None:
    ended = moved(CALL, stimulus, text=text)
    assert ended is not None
    with pytest.raises(KINDS[stimulus]) as raised:
        ledger.result(ended.call)
    assert type(raised.value) is KINDS[stimulus]
    assert raised.value.message == text if text else "echo" in raised.value.message


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_any_json_is_a_result_even_one_that_looks_like_a_failure(value: object) -> None:
    for wrapped in (value, {"error": value}, {"kind": "timeout", "message": value}):
        encoded = msgspec.json.encode(wrapped)
        ended = ledger.ended(CALL, Stimulus.ANSWER, encoded, now=101.0, at=101.0)
        assert ended is not None
        assert ledger.result(ended.call) == encoded
        assert ledger.is_repeat(ended.call, Stimulus.ANSWER, encoded)
        assert not ledger.is_repeat(ended.call, Stimulus.FAIL, "why")


@pytest.mark.parametrize("first, second", list(itertools.product(Stimulus, sorted(ANSWERS))))
def test_a_second_answer_is_a_repeat_or_told_how_the_call_ended(first: Stimulus, second: Stimulus) -> None:
    ended = moved(CALL, first)
    assert ended is not None
    assert ledger.is_repeat(ended.call, second, content(second)) == (first is second)
    assert not ledger.is_repeat(ended.call, second, content(second, "else"))
    assert ledger.refusal(ended.call) == ("answered" if first in ANSWERS else "expired")


def test_an_answer_to_nothing_is_unknown() -> None:
    assert ledger.refusal(None) == "unknown"


@pytest.mark.parametrize("stimulus", Stimulus)
def test_the_log_says_how_a_call_ended_and_whether_to_stop(stimulus: Stimulus) -> None:
    ended = ledger.ended(CALL, stimulus, content(stimulus), now=130.0, at=99_999.0)
    assert ended is not None
    assert ended.call.ended_at == 99_999.0
    *cancelled, resolved = ended.events
    error = None if stimulus is Stimulus.ANSWER else "why"
    state = MOVES[State.PENDING][stimulus]
    assert resolved == CallerToolResolved(
        request_id="r", tool="echo", outcome=state.value, error=error, duration_ms=30_000
    )
    if state in UNWANTED:
        assert cancelled == [CallerToolCancelled(request_id="r", tool="echo", reason=KINDS[stimulus].kind)]
    else:
        assert cancelled == []


@given(st.lists(st.tuples(st.sampled_from(list(Stimulus)), st.floats(0, 300)), max_size=12))
def test_whatever_comes_in_whatever_order_there_is_one_end(stimuli: list[tuple[Stimulus, float]]) -> None:
    call, now, ends, events = CALL, CALL.created_at, 0, 0
    for stimulus, later in stimuli:
        now += later
        ended = moved(call, stimulus, now)
        if ended is not None:
            call, ends, events = ended.call, ends + 1, events + len(ended.events)
    expected = next(
        (
            MOVES[State.PENDING][stimulus]
            for index, (stimulus, _) in enumerate(stimuli)
            if stimulus not in ANSWERS or CALL.created_at + sum(t for _, t in stimuli[: index + 1]) < CALL.deadline_at
        ),
        State.PENDING,
    )
    assert call.state is expected
    assert ends == (expected is not State.PENDING)
    assert events == ends * (2 if expected in UNWANTED else 1)


def test_a_result_that_looks_like_an_error_is_not_repeated_by_that_error() -> None:
    stored = ledger.outcome(CALL, Stimulus.FAIL, "why")
    ended = ledger.ended(CALL, Stimulus.ANSWER, stored, now=101.0, at=101.0)
    assert ended is not None
    assert not ledger.is_repeat(ended.call, Stimulus.FAIL, "why")


@pytest.mark.parametrize("odd", [b"[" * 5000 + b"]" * 5000, b'"\\ud800"', b"1" * 5000, b"1e999", b'{"a":1,"a":2}'])
def test_json_that_only_others_can_read_is_passed_on_and_compared_as_it_is(odd: bytes) -> None:
    ended = ledger.ended(CALL, Stimulus.ANSWER, odd, now=101.0, at=101.0)
    assert ended is not None
    assert ledger.result(ended.call) == odd
    assert ledger.is_repeat(ended.call, Stimulus.ANSWER, odd)
    assert not ledger.is_repeat(ended.call, Stimulus.ANSWER, b"7")
