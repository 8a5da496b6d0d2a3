"""Just enough of HTTP/1.1 to read the responses of a kept connection, and one that never ends. No I/O.

The general client costs 60 to 110 µs for a small request and a turn of the loop for every chunk of a stream, which
is most of what a relayed call would cost its caller; droids' requests and the answers to them therefore travel on
connections of our own (see `stream.py`, `lane.py`).
"""

from dataclasses import dataclass
from functools import lru_cache

HEAD_BYTES_MAX = 64 * 1024
BODY_BYTES_MAX = 16 * 1024 * 1024


class BadResponse(Exception):
    """The other side does not speak HTTP/1.1 as we understand it."""


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    content_type: bytes
    retry_after: bytes
    body: bytes
    closes: bool


@dataclass(slots=True)
class Head:
    """What of a response's head anybody looks at; not changed once it is read."""

    status: int
    content_type: bytes = b""
    retry_after: bytes = b""
    length: int | None = None
    chunked: bool = False
    closes: bool = False


class Streamed:
    """The head of a response, then its body as it comes."""

    def __init__(self) -> None:
        self._buffer = b""
        self._left = 0  # of the chunk that is being read, with the line end behind it
        self.head: Head | None = None
        self.has_ended = False

    def feed(self, data: bytes) -> bytes:
        """What these bytes add to the body. Raises `BadResponse`."""
        data = self._buffer + data if self._buffer else data
        self._buffer = b""
        if self.head is None:
            end = _end(data, b"\r\n\r\n")
            if end < 0:
                self._buffer = data
                return b""
            self.head = parse_head(data[:end])
            data = data[end + 4 :]
        return self._unchunked(data) if self.head.chunked else data

    def _unchunked(self, data: bytes) -> bytes:
        body: list[bytes] = []
        at = 0
        while at < len(data) and not self.has_ended:
            if self._left:
                piece = data[at : at + self._left]
                at += len(piece)
                # The last two of a chunk are its line end.
                body.append(piece[: max(0, self._left - 2)])
                self._left -= len(piece)
                continue
            line_end = _end(data, b"\r\n", at)
            if line_end < 0:
                self._buffer = data[at:]
                break
            size = _chunk_size(data[at:line_end])
            self.has_ended = size == 0
            at, self._left = line_end + 2, size + 2
        return body[0] if len(body) == 1 else b"".join(body)


class Responses:
    """Feeds bytes in, takes whole responses out, any number per chunk and any cut between them."""

    def __init__(self) -> None:
        self._buffer = b""
        self._head: Head | None = None
        self._body: list[bytes] = []
        self._body_bytes = 0

    def feed(self, data: bytes) -> list[Response]:
        """Every response that these bytes complete. Raises `BadResponse`."""
        self._buffer = self._buffer + data if self._buffer else data
        complete: list[Response] = []
        while True:
            if self._head is None and not self._read_head():
                return complete
            head = self._head
            assert head is not None
            if not (self._read_chunks() if head.chunked else self._read_length(head.length or 0)):
                return complete
            complete.append(
                Response(head.status, head.content_type, head.retry_after, b"".join(self._body), head.closes)
            )
            self._head, self._body, self._body_bytes = None, [], 0

    def _read_head(self) -> bool:
        while True:
            end = _end(self._buffer, b"\r\n\r\n")
            if end < 0:
                return False
            head = parse_head(self._buffer[:end])
            self._buffer = self._buffer[end + 4 :]
            if head.status >= 200:
                if head.length is None and not head.chunked:
                    raise BadResponse("a response has no length")
                self._head = head
                return True

    def _read_length(self, length: int) -> bool:
        if length > BODY_BYTES_MAX:
            raise BadResponse("the body of a response is over the bound")
        if len(self._buffer) < length:
            return False
        self._body = [self._buffer[:length]]
        self._buffer = self._buffer[length:]
        return True

    def _read_chunks(self) -> bool:
        while True:
            line_end = _end(self._buffer, b"\r\n")
            if line_end < 0:
                return False
            size = _chunk_size(self._buffer[:line_end])
            if size == 0:
                end = _end(self._buffer, b"\r\n\r\n", line_end)
                if end < 0:
                    return False
                self._buffer = self._buffer[end + 4 :]
                return True
            if self._body_bytes + size > BODY_BYTES_MAX:
                raise BadResponse("the body of a response is over the bound")
            start = line_end + 2
            if len(self._buffer) < start + size + 2:
                return False
            self._body.append(self._buffer[start : start + size])
            self._body_bytes += size
            self._buffer = self._buffer[start + size + 2 :]


def _end(text: bytes, mark: bytes, at: int = 0) -> int:
    """Where the mark is; -1 while it has not come. Raises `BadResponse` where it should have."""
    end = text.find(mark, at)
    if end < 0 and len(text) - at > HEAD_BYTES_MAX:
        raise BadResponse("the head of a response, or of a part of it, is over the bound")
    return end


def _chunk_size(line: bytes) -> int:
    try:
        size = int(line.partition(b";")[0], 16)
    except ValueError:
        size = -1
    if size < 0:
        raise BadResponse("a chunk has no size")
    return size


@lru_cache(maxsize=32)  # a server says the same again and again
def parse_head(text: bytes) -> Head:
    lines = text.split(b"\r\n")
    version, _, rest = lines[0].partition(b" ")
    if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
        raise BadResponse("not an HTTP/1.1 response")
    head = Head(int(rest[:3]), closes=version == b"HTTP/1.0")
    for line in lines[1:]:
        name, _, value = line.partition(b":")
        name, value = name.lower(), value.strip()
        if name == b"content-length":
            if not value.isdigit():
                raise BadResponse("a content-length is not a number")
            head.length = int(value)
        elif name == b"content-type":
            head.content_type = value
        elif name == b"transfer-encoding":
            head.chunked = value.lower() == b"chunked"
        elif name == b"retry-after":
            head.retry_after = value
        elif name == b"connection" and value.lower() == b"close":
            head.closes = True
    if head.status < 200 or head.status in (204, 304):
        head.length, head.chunked = 0, False
    return head
