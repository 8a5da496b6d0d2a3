"""Posts on a kept connection, worked on without what a general server does for each.

uvicorn reads the first request of a connection. A post that follows with the very same head but for its length, and
whole in what has arrived, says nothing new about itself: it gets a cycle here that is ASGI like uvicorn's and costs a
fraction. All else goes back to uvicorn, in its turn.

Responses leave in the order of their requests, and those of one moment leave together. One post is worked on at a
time, as HTTP has it; a client that says `Oubliette-Pipeline: parallel` has its posts worked on together, so that
they share a commit.
"""

import asyncio
import logging
import re
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping, Sequence
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Final, Protocol

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
App = Callable[[Any, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]
RawHeaders = Sequence[tuple[bytes, bytes]]

logger = logging.getLogger(__name__)

PIPELINE: Final = (b"oubliette-pipeline", b"parallel")
PARALLEL_MAX: Final = 64
BODY_BYTES_MAX: Final = 64 * 1024
# What arrived and cannot be begun yet; beyond it nothing more is read.
HELD_BYTES_MAX: Final = 256 * 1024
SCOPES_KEPT: Final = 64
_LENGTH: Final = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,7})(?=\r\n)", re.IGNORECASE)
# A request with one of these is more than its body.
_SPECIAL: Final = frozenset({b"connection", b"expect", b"transfer-encoding", b"upgrade"})


class Known:
    """The head of a post as the parser read it: the same bytes with another length need no reading."""

    __slots__ = ("_after", "_before", "_headers", "_length_at", "_scope", "_scopes", "at_once")

    def __init__(self, head: bytes, length: re.Match[bytes], scope: Scope) -> None:
        self._before = head[: length.start(1)]
        self._after = head[length.end(1) :]
        self._scope = scope
        self._scopes: dict[int, Scope] = {}
        self._headers: list[tuple[bytes, bytes]] = list(scope["headers"])
        self._length_at = next(place for place, (name, _) in enumerate(self._headers) if name == b"content-length")
        self.at_once = PARALLEL_MAX if PIPELINE in self._headers else 1

    @classmethod
    def of(cls, request: bytes, scope: Scope) -> "Known | None":
        """What is known from one whole request and what the parser made of it, if posts like it can be cut out."""
        head = request[: request.find(b"\r\n\r\n") + 4]
        headers: RawHeaders = scope["headers"]
        lengths = list(_LENGTH.finditer(head))
        if scope["method"] != "POST" or scope["http_version"] != "1.1" or len(lengths) != 1:
            return None
        (length,) = lengths
        # Where our reading of the bytes could differ from the parser's, it is the parser's turn.
        if len(request) != len(head) + int(length[1]) or head.count(b"\n") != head.count(b"\r\n"):
            return None
        if (b"content-length", length[1]) not in headers or any(name in _SPECIAL for name, _ in headers):
            return None
        return cls(head, length, scope)

    def cut(self, data: bytes, at: int) -> tuple[int, int] | None:
        """Where the body of a post lies that begins here, if all of it is here."""
        if not data.startswith(self._before, at):
            return None
        number_at = at + len(self._before)
        end = data.find(b"\r", number_at, number_at + 8)
        if end < 0 or not data.startswith(self._after, end):
            return None
        number = data[number_at:end]
        if not number.isdigit() or (length := int(number)) > BODY_BYTES_MAX:
            return None
        start = end + len(self._after)
        return (start, start + length) if start + length <= len(data) else None

    def scope(self, length: int) -> Scope:
        """What a post of this length says of itself; one of the same length says the same. Not to be changed."""
        scope = self._scopes.get(length)
        if scope is None:
            if len(self._scopes) >= SCOPES_KEPT:
                self._scopes.clear()
            headers = self._headers.copy()
            headers[self._length_at] = (b"content-length", b"%d" % length)
            scope = self._scopes[length] = {**self._scope, "headers": headers}
        return scope


class Connection(Protocol):
    """What a line of posts needs of its connection."""

    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...

    async def drain(self) -> None: ...

    def moved(self) -> None:
        """A post has been answered: there is room for another, or for something else."""
        ...

    @property
    def default_headers(self) -> RawHeaders: ...


class Line:
    """The posts of one connection that are not answered yet, oldest first."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._posts: deque[Post] = deque()
        self._is_scheduled = False
        self.is_lost = False
        self.is_ending = False
        self.used_at = 0.0

    def __len__(self) -> int:
        return len(self._posts)

    def begin(self, app: App, scope: Scope, body: bytes) -> Coroutine[Any, Any, None]:
        """Take a post in; what is returned works on it."""
        post = Post(self, scope, body)
        self._posts.append(post)
        return post.run(app)

    def end(self) -> None:
        """Close the connection after the last answer."""
        self.is_ending = True

    def lost(self) -> None:
        """The connection is gone, and whoever works on something for it hears so."""
        self.is_lost = True
        posts, self._posts = self._posts, deque()
        for post in posts:
            post.leave()

    def is_first(self, post: "Post") -> bool:
        return bool(self._posts) and self._posts[0] is post

    def is_last(self, post: "Post") -> bool:
        return bool(self._posts) and self._posts[-1] is post

    @property
    def default_headers(self) -> RawHeaders:
        return self._connection.default_headers

    async def drain(self) -> None:
        await self._connection.drain()

    def grown(self, post: "Post") -> None:
        """A post has something to send: it goes after what else happens in this turn of the loop and the next.

        The answers of one commit so leave in one write, and after what they brought about: who waits for the outcome
        of a call gets it before who reported it is thanked.
        """
        if not self._is_scheduled and self.is_first(post):
            self._is_scheduled = True
            self._loop.call_soon(self._loop.call_soon, self._flush)

    def _flush(self) -> None:
        self._is_scheduled = False
        if self.is_lost:
            return
        out: list[bytes] = []
        closes = False
        has_moved = False
        while self._posts and not closes:
            post = self._posts[0]
            out += post.taken()
            if not post.is_done:
                break
            self._posts.popleft()
            has_moved = True
            closes = post.closes
        if out:
            self._connection.write(b"".join(out))
        self.used_at = self._loop.time()
        if closes or (self.is_ending and not self._posts):
            self._connection.close()
        elif has_moved:
            self._connection.moved()


class Post:
    """One request and its response, as ASGI has them."""

    __slots__ = (
        "_body",
        "_has_begun",
        "_is_chunked",
        "_line",
        "_out",
        "_scope",
        "_turn",
        "_until_left",
        "closes",
        "is_done",
    )

    def __init__(self, line: Line, scope: Scope, body: bytes) -> None:
        self._line = line
        self._scope = scope
        self._body: bytes | None = body
        self._out: list[bytes] = []
        self._has_begun = False
        self._is_chunked = False
        self._turn: asyncio.Future[None] | None = None
        self._until_left: asyncio.Future[None] | None = None
        self.is_done = False
        self.closes = False

    async def run(self, app: App) -> None:
        try:
            await app(self._scope, self.receive, self.send)
        except Exception:
            logger.exception("a request failed")
        finally:
            if not self.is_done and not self._line.is_lost:
                self._break_off()

    async def receive(self) -> Message:
        body = self._body
        if body is not None:
            self._body = None
            return {"type": "http.request", "body": body, "more_body": False}
        if not self.is_done and not self._line.is_lost:
            if self._until_left is None:
                self._until_left = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._until_left)
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self._line.is_lost or self.is_done:
            return
        if message["type"] == "http.response.start":
            self._begin(message["status"], message["headers"])
            self._line.grown(self)
            return
        body: bytes = message.get("body", b"")
        more: bool = message.get("more_body", False)
        if not self._is_chunked:
            self._out.append(body)
        elif body:
            self._out.append(b"%x\r\n%b\r\n" % (len(body), body))
        if more:
            self._line.grown(self)
            await self._written()
            return
        if self._is_chunked:
            self._out.append(b"0\r\n\r\n")
        self.is_done = True
        self.leave()
        self._line.grown(self)

    def taken(self) -> list[bytes]:
        """What is to be written now that it is this post's turn."""
        out, self._out = self._out, []
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)
        return out

    def leave(self) -> None:
        """Nothing more will be sent: end whatever waits for that."""
        for waiting in (self._turn, self._until_left):
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

    async def _written(self) -> None:
        """Wait for this post's turn, and then for a client that reads slowly."""
        if not self._line.is_first(self) and not self._line.is_lost:
            self._turn = asyncio.get_running_loop().create_future()
            await self._turn
        await self._line.drain()

    def _begin(self, status: int, headers: RawHeaders) -> None:
        ends = self._line.is_ending and self._line.is_last(self)
        out, self._is_chunked, self.closes = head(status, (*self._line.default_headers, *headers), ends)
        self._out.append(out)
        self._has_begun = True

    def _break_off(self) -> None:
        """Whoever worked on this has failed: say so if that is still possible, and close in any case."""
        if not self._has_begun:
            self._begin(500, ((b"content-length", b"0"), (b"connection", b"close")))
        self.closes = self.is_done = True
        self.leave()
        self._line.grown(self)


_PHRASES: Final = {status.value: status.phrase.encode() for status in HTTPStatus}


@lru_cache(maxsize=256)
def head(status: int, headers: tuple[tuple[bytes, bytes], ...], ends: bool) -> tuple[bytes, bool, bool]:
    """The head of a response, whether its body is chunked, and whether it closes the connection."""
    is_chunked = status not in (204, 304)
    closes = ends
    lines = [b"HTTP/1.1 %d %b\r\n" % (status, _PHRASES.get(status, b""))]
    for name, value in headers:
        if name == b"content-length":
            is_chunked = False
        elif name == b"connection" and value == b"close":
            closes, ends = True, False
        lines.append(b"%b: %b\r\n" % (name, value))
    if ends:
        lines.append(b"connection: close\r\n")
    lines.append(b"transfer-encoding: chunked\r\n\r\n" if is_chunked else b"\r\n")
    encoded = b"".join(lines)
    if encoded.count(b"\n") != len(lines) + is_chunked:
        raise ValueError("a header of a response holds a line end")
    return encoded, is_chunked, closes
