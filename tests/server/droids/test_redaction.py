"""Keys in what agents say: whole, cut anywhere, and beside what only looks like one."""

from hypothesis import given
from hypothesis import strategies as st

from oubliette.server.droids import redaction
from oubliette.server.droids.assembly import PIECE_BYTES, Assembly
from oubliette.server.droids.redaction import BROKEN_OFF, REDACTED

KEY = "oub_" + "0123456789abcdef" * 4


def test_every_key_is_taken_out_and_nothing_else() -> None:
    other = "oub_" + "ab" * 32
    assert redaction.redacted(f"a {KEY}{other} b".encode()) == b"a [redacted][redacted] b"
    assert redaction.redacted(b"a brought word", b"brought") == b"a [redacted] word"
    for harmless in ("oub_", "oub_" + "ab" * 31, "oub-" + "ab" * 32, "ab" * 32, "OUB_" + "AB" * 32):
        assert redaction.redacted(harmless.encode()) == harmless.encode()


def test_a_masked_key_takes_as_many_bytes() -> None:
    text = f"<{KEY}>".encode()
    assert len(redaction.masked(text)) == len(text)
    assert redaction.masked(text).startswith(b"<[redacted]--")


@given(st.integers(0, 200), st.lists(st.integers(1, 100), min_size=1, max_size=8))
def test_a_piece_of_a_long_line_never_ends_inside_a_key(lead: int, frames: list[int]) -> None:
    line = b"x" * (PIECE_BYTES - lead) + KEY.encode() + b"oub_12 and on"
    assembly, kept, at = Assembly(0), b"", 0
    for size in [PIECE_BYTES - 100, *frames, len(line)]:
        assembly.add(at, line[at : at + size])
        at += size
        assert assembly.lines(assembly.start) == []
        piece = assembly.piece()
        if piece is not None:
            kept += redaction.masked(piece)
            assembly.settle_piece(redaction.masked(piece), skipped=False)
        assert KEY[:12].encode() not in kept
    assembly.add(assembly.end, b"\n")
    (whole,) = assembly.lines(assembly.start)
    assert whole.data is not None
    assert redaction.masked(whole.data) == redaction.masked(line)


@given(st.lists(st.integers(1, 80), max_size=6))
def test_a_key_that_is_said_in_parts_is_never_told(sizes: list[int]) -> None:
    text, told = f"It is {KEY}, and so on", ""
    for size in [*sizes, len(text)]:
        told += redaction.spoken(told[-redaction.SEEN_CHARS :], text[:size])
        text = text[size:]
    assert told in {
        f"It is {begun}{word}, and so on" for begun in ("", "o", "ou", "oub", "oub_") for word in (REDACTED, BROKEN_OFF)
    }


@given(st.lists(st.text("ou b_1z", max_size=5)))
def test_what_is_no_key_is_told_as_it_was_said(parts: list[str]) -> None:
    told = ""
    for part in parts:
        told += redaction.spoken(told[-redaction.SEEN_CHARS :], part)
    said = "".join(parts)
    assert told == said or "oub_1" in said or "oub_b" in said
