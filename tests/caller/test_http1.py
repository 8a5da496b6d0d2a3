"""Responses are the same wherever the bytes are cut, and what is not HTTP is said to be so."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oubliette.caller.http1 import BadResponse, Response, Responses, Streamed
from tests.caller.test_sse import cut

STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
    b"HTTP/1.1 100 Continue\r\n\r\n"
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    b"5;x=y\r\ndata:\r\n4\r\n 1\n\n\r\n0\r\nTrailer: x\r\n\r\n"
    b"HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\n\r\n"
    b"HTTP/1.1 204 No Content\r\n\r\n"
    b"HTTP/1.1 503 Busy\r\nRetry-After: 2\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
)
WHOLE = [
    Response(200, b"application/json", b"", b"{}", False),
    Response(200, b"text/event-stream", b"", b"data: 1\n\n", False),
    Response(202, b"", b"", b"", False),
    Response(204, b"", b"", b"", False),
    Response(503, b"", b"2", b"", True),
]


@given(st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_any_cut_of_the_bytes_yields_the_same_responses(places: list[int]) -> None:
    responses = Responses()
    assert [one for chunk in cut(STREAM, places) for one in responses.feed(chunk)] == WHOLE


@given(st.lists(st.integers(0, 200), max_size=30), st.booleans())
def test_any_cut_of_a_stream_yields_the_same_body(places: list[int], chunked: bool) -> None:
    body = b"retry: 3000\n\n" + b"data: {}\n\n" * 3
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    if chunked:
        pieces = [body[:1], body[1:12], body[12:]]
        body_sent = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        text = head + b"Transfer-Encoding: chunked\r\n\r\n" + body_sent
    else:
        text = head + b"\r\n" + body
    stream = Streamed()
    assert b"".join(stream.feed(chunk) for chunk in cut(text, places)) == body
    assert stream.head is not None
    assert stream.head.content_type == b"text/event-stream"
    assert stream.has_ended is chunked


@pytest.mark.parametrize(
    "text",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: ten\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 70_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"x" * 70_000,
        b"x" * 70_000,
    ],
)
def test_what_is_not_http_is_refused(text: bytes) -> None:
    with pytest.raises(BadResponse):
        Responses().feed(text)


@pytest.mark.parametrize(
    "text",
    [
        b"SSH-2.0\r\n\r\n",
        b"x" * 70_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 70_000,
    ],
)
def test_what_is_no_stream_is_refused(text: bytes) -> None:
    with pytest.raises(BadResponse):
        Streamed().feed(text)
