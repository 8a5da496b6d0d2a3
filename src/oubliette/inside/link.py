"""The reconnecting end of the relay socket.

A `Link` keeps one connection to the server: it connects, attaches, hands over every frame, and comes back when the
connection is lost. It never blocks and runs no loop: its owner polls `fileno()`, calls `readable`, `writable` and
`tick`, and is told what happened as a `Peer`. What is written while the link is down is the owner's to repeat: only
the owner knows which requests are still open.

    down ──connect──▶ attaching ──answer──▶ up
      ▲                   │ refused, silent    │ closed, oversized
      └───── backoff ─────┴────────────────────┘
"""

from __future__ import annotations

import json
import json.encoder
import json.scanner
import socket

TYPE_CHECKING = False  # `typing` costs more to import than everything here
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional, Protocol

    from typing_extensions import TypeGuard

    Json = Dict[str, Any]

    class Peer(Protocol):
        """Who owns a link."""

        def introduce(self) -> Json:
            """The parameters of `attach`, made anew for each connection: the key may have been rotated."""
            ...

        def attached(self, answer: Json) -> None: ...
        def received(self, message: Json) -> None: ...

        def oversized(self, head: bytes) -> None:
            """A frame passed the bound; this is how it begins. The link is lost next."""
            ...

        def unreadable(self, head: bytes) -> None:
            """A line is no JSON that can be read here; this is how it begins. The link stays."""
            ...

        def lost(self) -> None:
            """An attached link went down; the next `attached` follows when it is back."""
            ...

        def refused(self, error: Json) -> None:
            """The server does not take us, and says why; the link goes on trying, slowly."""
            ...


PROTOCOL = 1
FRAME_BYTES_MAX = 8 * 1024 * 1024
ATTACH_WAIT_S = 5.0
ATTACH_ID = 1
FIRST_ID = 2  # requests of the owner: every connection begins with `attach`
BACKOFF_FIRST_S = 0.05
BACKOFF_MAX_S = 2.0
REFUSED_RETRY_S = 5.0
# A link that held this long was a good one: the next loss starts from the shortest pause again.
GOOD_AFTER_S = 2.0
READ_BYTES = 256 * 1024
HEAD_BYTES = 256

METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
UNAUTHENTICATED = -32001
FORBIDDEN = -32002
KINDS_BY_CODE = {UNAUTHENTICATED: "unauthenticated", FORBIDDEN: "forbidden", INVALID_PARAMS: "invalid_params"}

# A refusal of these kinds does not pass by itself; any other failure to attach is retried like a lost link.
LASTING = ("unauthenticated", "forbidden", "upgrade_required", "not_found", "invalid_params")


def _refuse(constant: object) -> Any:
    raise ValueError("not JSON: %s" % (constant,))


_decoder = json.JSONDecoder(parse_constant=_refuse)
_BLANK = " \t\n\r"  # what JSON calls white space, which is less than what Python does
_make_scanner: Any = json.scanner.make_scanner
_scan: Any = _make_scanner(_decoder)


def decode(line: bytes) -> Any:
    """The value on a line; ValueError (RecursionError where it nests too deep) if there is none.

    Python's own parser takes `NaN` and its like, which no other JSON reader does: refused here.
    """
    text = line.decode()
    try:
        value, end = _scan(text, 0)
    except StopIteration:
        return _decoder.decode(text)  # white space in front, or an error worth its words
    if end != len(text) and text[end:].strip(_BLANK):
        raise ValueError("more than one value on a line")
    return value


def _make_encode() -> Callable[[Any], str]:
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        plain = json.JSONEncoder(ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":"))
        return plain.encode
    # What JSONEncoder builds anew on every call, built once.
    chunks: Any = make(None, _refuse, json.encoder.encode_basestring, None, ":", ",", False, False, False)
    join = "".join
    return lambda value: join(chunks(value, 0))


encode = _make_encode()  # ValueError for infinities: JSON has none


def is_object(value: object) -> TypeGuard[Json]:
    return type(value) is dict


def is_list(value: object) -> TypeGuard[List[Any]]:
    return type(value) is list


class Lines:
    """Bytes in, whole lines out, none longer than a bound."""

    def __init__(self, bytes_max: int = FRAME_BYTES_MAX) -> None:
        self.bytes_max = bytes_max
        self.rest = bytearray()

    def feed(self, data: bytes) -> List[bytes]:
        lines = data.split(b"\n")
        tail = lines.pop()
        if lines and self.rest:
            self.rest += lines[0]
            lines[0] = bytes(self.rest)
            self.rest = bytearray()
        self.rest += tail
        return lines

    def too_long(self) -> bool:
        """Whether the line that is still coming has passed the bound already."""
        return len(self.rest) > self.bytes_max


def error_kind(error: Json) -> str:
    """The machine word of an error object, also of one that carries none."""
    data: Any = error.get("data")
    kind: Any = data.get("kind") if is_object(data) else None
    if isinstance(kind, str):
        return kind
    code: Any = error.get("code")
    return KINDS_BY_CODE.get(code, "internal") if isinstance(code, int) else "internal"


class Link:
    """One connection to the server, brought back whenever it is lost."""

    def __init__(self, path: str, peer: Peer, log: Callable[[str, str], None]) -> None:
        self.path = path
        self.peer = peer
        self.log = log
        self.is_up = False
        self.wake_at: Optional[float] = 0.0  # when `tick` has something to do
        self.out = bytearray()
        self._socket: Optional[socket.socket] = None
        self._lines = Lines()
        self._attempts = 0
        self._refusals = 0
        self._up_since = 0.0
        self._last_trouble = ""
        self._garbage = 0

    def fileno(self) -> int:
        return -1 if self._socket is None else self._socket.fileno()

    def send(self, frame: bytes) -> None:
        """Queue a frame; on a link that is down it goes nowhere, and the owner repeats it in `attached`."""
        if self.is_up:
            self.out += frame

    def tick(self, now: float) -> None:
        """Do what is due: connect, or give up on a server that does not answer `attach`."""
        if self.wake_at is None or now < self.wake_at:
            return
        if self._socket is None:
            self._connect(now)
        else:
            self._lose(now, "the server did not answer attach within %g s" % ATTACH_WAIT_S)

    def writable(self, now: float) -> None:
        if self._socket is None or not self.out:
            return
        try:
            sent = self._socket.send(self.out)
        except BlockingIOError:
            return
        except OSError as problem:
            self._lose(now, problem.strerror or "lost")
            return
        del self.out[:sent]

    def readable(self, now: float) -> None:
        if self._socket is None:
            return
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as problem:
            self._lose(now, problem.strerror or "lost")
            return
        if not data:
            self._lose(now, "the server closed the connection")
            return
        lines = self._lines
        for line in lines.feed(data):
            if len(line) > lines.bytes_max:
                self._drop_oversized(now, line)
                return
            self._take(line, now)
            if self.fileno() < 0:  # a refusal, or a broken attach
                return
        if lines.too_long():
            self._drop_oversized(now, bytes(lines.rest[:HEAD_BYTES]))

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self.is_up = False
        self.wake_at = None

    def _connect(self, now: float) -> None:
        try:
            introduction = self.peer.introduce()
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except (OSError, ValueError) as problem:
            self._lose(now, "cannot read the key: %s" % (getattr(problem, "strerror", None) or "not text"))
            return
        connection.setblocking(False)
        self._socket = connection
        try:
            connection.connect(self.path)
        except OSError as problem:
            self._lose(now, "cannot connect to the server: %s" % (problem.strerror or problem))
            return
        self._lines = Lines()
        request = {"jsonrpc": "2.0", "id": ATTACH_ID, "method": "attach", "params": introduction}
        self.out = bytearray(encode(request).encode() + b"\n")
        self.wake_at = now + ATTACH_WAIT_S
        self.writable(now)

    def _take(self, line: bytes, now: float) -> None:
        try:
            message: Any = decode(line)
        except (ValueError, RecursionError):
            message = None
        if not is_object(message):
            if line.strip():
                self._note_garbage()
                self.peer.unreadable(line[:HEAD_BYTES])
        elif self.is_up:
            self.peer.received(message)
        elif message.get("id") == ATTACH_ID and "method" not in message:
            self._answered(message, now)

    def _note_garbage(self) -> None:
        self._garbage += 1
        if self._garbage in (1, 10, 100, 1000):  # a server that sends nothing else must not fill the log
            self.log("warning", "ignored a line from the server that is no JSON object (%d so far)" % self._garbage)

    def _answered(self, message: Json, now: float) -> None:
        result: Any = message.get("result")
        error: Any = message.get("error")
        if is_object(result):
            self.is_up = True
            self.wake_at = None
            self._up_since = now
            self._refusals = 0
            if self._last_trouble:
                self.log("info", "connected again")
                self._last_trouble = ""
            self.peer.attached(result)
        elif is_object(error):
            self._turned_away(error, now)
        else:
            self._lose(now, "the server answered attach with neither a result nor an error")

    def _turned_away(self, error: Json, now: float) -> None:
        kind = error_kind(error)
        message = error.get("message")
        text = "attach refused: %s" % (message if isinstance(message, str) else kind)
        if kind not in LASTING:
            self._lose(now, text)
            return
        self._refusals += 1
        if kind == "unauthenticated" and self._refusals == 1:
            # The key may have been rotated between our reading it and the server's looking at it.
            self._lose(now, text, BACKOFF_MAX_S / 4)
            return
        self._lose(now, text, REFUSED_RETRY_S)
        self.peer.refused(error)

    def _drop_oversized(self, now: float, line: bytes) -> None:
        self.log("error", "the server sent a frame over %d bytes: closing the link" % self._lines.bytes_max)
        self.peer.oversized(line[:HEAD_BYTES])
        self._lose(now, "oversized frame")

    def _lose(self, now: float, trouble: str, pause: Optional[float] = None) -> None:
        was_up = self.is_up
        self.close()
        self.out = bytearray()
        self._lines = Lines()
        if was_up and now - self._up_since >= GOOD_AFTER_S:
            self._attempts = 0
        if pause is None:
            pause = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(self._attempts, 16))
            self._attempts += 1
        self.wake_at = now + pause
        if trouble != self._last_trouble:  # once per trouble, not once per attempt
            self._last_trouble = trouble
            self.log("warning", "link down: %s" % trouble)
        if was_up:
            self.peer.lost()
