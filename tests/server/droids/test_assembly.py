"""Numbered bytes into lines."""

from hypothesis import given
from hypothesis import strategies as st

from oubliette.server.droids import assembly as assemblies
from oubliette.server.droids.assembly import LINE_BYTES_MAX, PIECE_BYTES, Assembly, Line


@given(
    st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b" ")), max_size=12),
    st.lists(st.tuples(st.integers(0, 200), st.integers(1, 60)), max_size=30),
    st.lists(st.booleans(), max_size=40),
)
def test_any_cutting_and_overlap_of_frames_yields_the_same_lines(
    lines: list[bytes], frames: list[tuple[int, int]], settling: list[bool]
) -> None:
    stream = b"".join(line + b"\n" for line in lines)
    assembly = Assembly(0)
    seen: list[Line] = []
    upto = 0
    again = iter(settling)
    for start, size in [*frames, *((at, 7) for at in range(0, len(stream), 5))]:
        assembly.add(start, stream[start : start + size])  # a frame after a gap is refused and changes nothing
        found = assembly.lines(upto)
        seen += found
        upto = found[-1].end if found else upto
        if next(again, True):
            assembly.settle(upto)
    assert [line.data for line in seen] == lines
    assert [line.end for line in seen] == [
        sum(len(line) + 1 for line in lines[: number + 1]) for number in range(len(lines))
    ]
    assert assembly.end == len(stream)


def test_a_gap_is_refused() -> None:
    assembly = Assembly(10)
    assert not assembly.add(11, b"x")
    assert assembly.add(4, b"0123456789")
    assert assembly.end == 14


def test_lines_stay_until_they_are_settled() -> None:
    assembly = Assembly(0)
    assembly.add(0, b"a\nb\nc")
    assert assembly.lines(0) == assembly.lines(0)
    assert [line.data for line in assembly.lines(2)] == [b"b"]
    assembly.settle(2)
    assert [line.data for line in assembly.lines(2)] == [b"b"]
    assert assembly.start == 2


def test_a_batch_has_a_bound() -> None:
    assembly = Assembly(0)
    assembly.add(0, b"x\n" * 1000)
    first = assembly.lines(0)
    assert len(first) == assemblies.BATCH_LINES
    assert assembly.lines(first[-1].end)[0].end == first[-1].end + 2


def in_pieces(stream: bytes, assembly: Assembly) -> list[Line]:
    """Feed a stream as a keeper would that holds little, storing pieces on the way."""
    seen: list[Line] = []
    upto = 0
    for start in range(0, len(stream), 48 * 1024):
        assembly.add(start, stream[start : start + 48 * 1024])
        found = assembly.lines(upto)
        seen += found
        upto = found[-1].end if found else upto
        assembly.settle(upto)
        piece = assembly.piece()
        if piece is not None:
            assembly.settle_piece(piece, skipped=assembly.overflows)
        upto = max(upto, assembly.start)
        assert assembly.end - assembly.start < PIECE_BYTES + 48 * 1024
    return seen


def test_a_long_line_is_put_together_from_pieces() -> None:
    long = b"x" * (3 * 1024 * 1024)
    seen = in_pieces(b"a\n" + long + b"\nb\n", Assembly(0))
    assert [line.data for line in seen] == [b"a", long, b"b"]


def test_a_line_over_the_bound_is_passed_over_without_being_kept() -> None:
    stream = b"a\n" + b"x" * (LINE_BYTES_MAX + PIECE_BYTES * 3) + b"\nb\n"
    seen = in_pieces(stream, Assembly(0))
    assert [line.data for line in seen] == [b"a", None, b"b"]
    assert seen[-1].end == len(stream)


def test_an_assembly_goes_on_from_what_was_stored() -> None:
    assembly = Assembly(5, b"begin")
    assembly.add(5, b"ning\nnext\n")
    assert [line.data for line in assembly.lines(5)] == [b"beginning", b"next"]
    skipping = Assembly(5, skipping=True)
    skipping.add(5, b"rest\nnext\n")
    assert [line.data for line in skipping.lines(5)] == [None, b"next"]
