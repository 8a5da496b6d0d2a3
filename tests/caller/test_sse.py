"""Events are the same wherever the bytes are cut."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oubliette.caller.sse import Frames

LINES = st.text(alphabet='abc:{}" é', min_size=1, max_size=12)


def cut(text: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@given(st.lists(LINES, min_size=1, max_size=5), st.sampled_from(["\n", "\r\n", "\r"]), st.lists(st.integers(0, 500)))
def test_any_cut_of_a_stream_yields_the_same_events(lines: list[str], newline: str, places: list[int]) -> None:
    events = [f"event: message{newline}data: {line}{newline}{newline}" for line in lines]
    text = f": comment{newline}retry: 3000{newline}{newline}" + "".join(events)
    frames = Frames()
    got = [data for chunk in cut(text.encode(), places) for data in frames.feed(chunk)]
    # A lone CR may still wait for the LF that would belong to it.
    got += frames.feed(b"\n") if newline == "\r" else []
    assert got == [line.encode() for line in lines]


def test_several_data_lines_are_one_event() -> None:
    assert Frames().feed(b"data: {\ndata:}\nid: 7\n\n") == [b"{\n}"]


def test_an_event_without_an_end_is_refused() -> None:
    frames = Frames(event_bytes_max=10)
    with pytest.raises(ValueError, match="over the bound"):
        frames.feed(b"data: 0123456789")
