"""Numbered bytes into lines, without I/O: whatever way a stream is cut into frames, its lines are the same."""

from dataclasses import dataclass

from oubliette.server.droids.redaction import cut_key
from oubliette.wire.relay import FRAME_BYTES_MAX

LINE_BYTES_MAX = FRAME_BYTES_MAX
PIECE_BYTES = 256 * 1024  # a line this long without its end is stored in pieces
BATCH_BYTES = 1024 * 1024
BATCH_LINES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A whole line; `data` is None for one that was longer than the bound and was passed over."""

    data: bytes | None
    end: int


class Assembly:
    """Numbered bytes in, whole lines out. Nothing leaves it before `settle`, so a failed commit can be repeated."""

    def __init__(self, start: int, partial: bytes = b"", *, skipping: bool = False) -> None:
        self.start = start  # the offset of the first byte that is not settled
        self._bytes = bytearray()
        self._partial = partial  # settled bytes of a line whose end has not come
        self._skipping = skipping  # that line is over the bound: its bytes are not kept
        self._tail: int = start  # where the unfinished line begins, and
        self._scanned: int = start  # how far its end was looked for

    @property
    def end(self) -> int:
        """The offset after the last byte that arrived."""
        return self.start + len(self._bytes)

    def add(self, offset: int, data: bytes) -> bool:
        """Take what is new of a frame; False where bytes are missing before it."""
        if offset > self.end:
            return False
        self._bytes += data[self.end - offset :]
        return True

    def lines(self, after: int) -> list[Line]:
        """Whole lines behind `after`, which is the end of a line; a batch at most."""
        found: list[Line] = []
        begin = after
        while len(found) < BATCH_LINES and begin - after < BATCH_BYTES:
            look_from = self._scanned if begin == self._tail else begin
            newline = self._bytes.find(b"\n", look_from - self.start)
            if newline < 0:
                self._tail, self._scanned = begin, self.end
                break
            data: bytes | None = bytes(self._bytes[begin - self.start : newline])
            if begin == self.start:
                data = None if self._skipping else self._partial + data
            if data is not None and len(data) > LINE_BYTES_MAX:
                data = None
            begin = self.start + newline + 1
            found.append(Line(data=data, end=begin))
        return found

    def piece(self) -> bytes | None:
        """The beginning of a line that grows too long to wait for its end; to be asked after `lines` found none.

        It ends before what may be a key that is cut: only a whole one is known for one.
        """
        if len(self._bytes) < PIECE_BYTES or self._tail != self.start or self._scanned != self.end:
            return None
        return bytes(self._bytes[: len(self._bytes) - cut_key(self._bytes)])

    @property
    def overflows(self) -> bool:
        """Whether the unfinished line is over the bound already."""
        return self._skipping or len(self._partial) + len(self._bytes) > LINE_BYTES_MAX

    def settle(self, end: int) -> None:
        """Everything before `end`, the end of a line, is stored."""
        if end > self.start:
            del self._bytes[: end - self.start]
            self.start = end
            self._partial, self._skipping = b"", False
            if self._tail < end:
                self._tail = self._scanned = end

    def settle_piece(self, piece: bytes, *, skipped: bool) -> None:
        """This beginning of a line is stored, or was passed over."""
        del self._bytes[: len(piece)]
        self.start += len(piece)
        self._tail = self._scanned = self.start
        self._partial = b"" if skipped else self._partial + piece
        self._skipping = skipped
