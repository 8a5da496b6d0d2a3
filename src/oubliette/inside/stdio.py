"""A program's own standard input and output as lines, without ever blocking."""

from __future__ import annotations

import os

from oubliette.inside.link import Lines

TYPE_CHECKING = False  # see link.py
if TYPE_CHECKING:
    from typing import List

READ_BYTES = 256 * 1024
LINE_BYTES_MAX = 64 * 1024 * 1024


class Stdio:
    """Lines from descriptor 0, text to descriptor 1."""

    def __init__(self) -> None:
        self.out = bytearray()
        self.has_ended = False  # the other side is gone
        self.too_long = 0  # lines that passed the bound and were dropped
        self._lines = Lines(LINE_BYTES_MAX)
        self._is_skipping = False
        # A terminal's descriptor is shared with the shell, which would stay non-blocking after us.
        self._restore = not os.isatty(1)
        self._set_blocking(False)

    def read(self) -> List[bytes]:
        """The lines that one read brings; call when descriptor 0 is readable."""
        try:
            data = os.read(0, READ_BYTES)
        except InterruptedError:
            return []
        except OSError:
            data = b""
        if not data:
            self.has_ended = True
            return [bytes(self._lines.rest)] if self._lines.rest and not self._is_skipping else []
        lines = self._lines.feed(data)
        if self._is_skipping and lines:
            del lines[0]
            self._is_skipping = False
        if self._lines.too_long():
            self._lines.rest = bytearray()
            if not self._is_skipping:
                self.too_long += 1
            self._is_skipping = True
        return lines

    def write(self, text: str) -> None:
        try:
            self.out += text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair: a question mark is better than no answer
            self.out += text.encode("utf-8", "replace")

    def flush(self) -> None:
        while self.out:
            try:
                written = os.write(1, self.out)
            except BlockingIOError:
                return
            except OSError:
                self.has_ended = True
                self.out.clear()
                return
            del self.out[:written]

    def close(self) -> None:
        self._set_blocking(True)

    def _set_blocking(self, blocking: bool) -> None:
        if self._restore:
            try:
                os.set_blocking(1, blocking)
            except OSError:  # closed before we began: the first write will tell
                pass
