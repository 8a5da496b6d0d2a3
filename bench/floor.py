"""The raw floor of a relayed call: every hop that ours has, and no logic.

    agent ──pipe──▶ client ──unix socket──▶ server ──SSE──▶ caller ──POST──▶ server ──▶ client ──▶ agent

JSON is read and written at every hop in our messages and sizes; nothing is checked, stored, timed or retried. It is
written as tightly as Python allows: a slow floor would flatter what is measured against it.

    python bench/floor.py server SOCKET      prints its port
    python bench/floor.py caller PORT
    python -I -S bench/floor_client.py SOCKET
"""

import asyncio
import sys
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
import uvloop

SESSION = "gogol_20260101_000000_0123abcd"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-store\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
REPLY_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
POST_HEAD = (
    b"POST /mcp HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer oub_"
    + b"0" * 64
    + b"\r\naccept: application/json, text/event-stream\r\ncontent-type: application/json\r\nmcp-session-id: "
    + b"0" * 32
    + b"\r\nmcp-protocol-version: 2025-11-25\r\ncontent-length: %d\r\n\r\n%b"
)

encode = msgspec.json.Encoder().encode


class CallParams(msgspec.Struct):
    tool: str
    arguments: Any
    call_key: str


class Call(msgspec.Struct):
    id: int
    params: CallParams


class Answer(msgspec.Struct):
    session_id: str
    request_id: str
    result: Any = None
    error: str | None = None


class AnswerParams(msgspec.Struct):
    arguments: Answer


class Post(msgspec.Struct):
    id: int
    params: AnswerParams


class Request(msgspec.Struct):
    type: str
    session_id: str
    request_id: str
    tool: str
    arguments: Any


class PushParams(msgspec.Struct):
    data: Request


class Push(msgspec.Struct):
    params: PushParams


class Reply(msgspec.Struct):
    id: int
    result: Any


decode_call = msgspec.json.Decoder(Call).decode
decode_post = msgspec.json.Decoder(Post).decode
decode_push = msgspec.json.Decoder(Push).decode
decode_reply = msgspec.json.Decoder(Reply).decode


class Relay:
    """The server's state: the stream, and who waits for which answer."""

    def __init__(self) -> None:
        self.stream: Callable[[bytes], None] | None = None
        self.waiting: dict[str, tuple[Callable[[bytes], None], int]] = {}
        self.next = 0


class FromClient(asyncio.Protocol):
    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.rest = b""

    def connection_made(self, transport: Any) -> None:
        self.write = transport.write

    def data_received(self, data: bytes) -> None:
        *lines, self.rest = (self.rest + data if self.rest else data).split(b"\n")
        relay = self.relay
        frames: list[bytes] = []
        for line in lines:
            call = decode_call(line)
            request_id = str(uuid.uuid4())
            relay.waiting[request_id] = (self.write, call.id)
            event = {
                "type": "caller_tool_request",
                "session_id": SESSION,
                "index": call.id,
                "at": 1767225600.123456,
                "request_id": request_id,
                "tool": call.params.tool,
                "arguments": call.params.arguments,
                "deadline_at": 1767225660.123456,
                "redelivery": 0,
            }
            frame = b"event: message\ndata: %b\n\n" % encode(
                {
                    "jsonrpc": "2.0",
                    "method": "notifications/message",
                    "params": {"level": "info", "logger": "oubliette.session", "data": event},
                }
            )
            frames.append(b"%x\r\n%b\r\n" % (len(frame), frame))
        if relay.stream is not None:
            relay.stream(b"".join(frames))


class FromCaller(asyncio.Protocol):
    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.rest = b""

    def connection_made(self, transport: Any) -> None:
        self.write = transport.write

    def data_received(self, data: bytes) -> None:
        data = self.rest + data if self.rest else data
        at = 0
        replies: list[bytes] = []
        answers: dict[Callable[[bytes], None], list[bytes]] = {}
        while (end := data.find(b"\r\n\r\n", at)) >= 0:
            if data.startswith(b"GET", at):
                self.relay.stream = self.write
                self.write(STREAM_HEAD)
                at = end + 4
                continue
            place = data.find(b"content-length: ", at, end) + 16
            stop = end + 4 + int(data[place : data.index(b"\r", place)])
            if len(data) < stop:
                break
            post = decode_post(data[end + 4 : stop])
            at = stop
            write, call_id = self.relay.waiting.pop(post.params.arguments.request_id)
            value = {"accepted": True}
            result = {
                "content": [{"type": "text", "text": encode(value).decode()}],
                "structuredContent": value,
                "isError": False,
            }
            body = encode({"jsonrpc": "2.0", "id": post.id, "result": result})
            replies.append(REPLY_HEAD % (len(body), body))
            answer = encode({"jsonrpc": "2.0", "id": call_id, "result": post.params.arguments.result}) + b"\n"
            answers.setdefault(write, []).append(answer)
        self.rest = data[at:]
        if replies:
            self.write(b"".join(replies))
        for write, lines in answers.items():
            write(b"".join(lines))


async def server(path: str) -> None:
    relay = Relay()
    loop = asyncio.get_running_loop()
    await loop.create_unix_server(lambda: FromClient(relay), path)
    listening = await loop.create_server(lambda: FromCaller(relay), "127.0.0.1", 0)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()


class Answers(asyncio.Protocol):
    """The caller's connection for answers; it reads what the server says to them."""

    def __init__(self) -> None:
        self.rest = b""
        self.next = 0

    def connection_made(self, transport: Any) -> None:
        self.write = transport.write

    def data_received(self, data: bytes) -> None:
        data = self.rest + data if self.rest else data
        at = 0
        while (end := data.find(b"\r\n\r\n", at)) >= 0:
            place = data.find(b"content-length: ", at, end) + 16
            stop = end + 4 + int(data[place : data.find(b"\r", place)])
            if len(data) < stop:
                break
            decode_reply(data[end + 4 : stop])
            at = stop
        self.rest = data[at:]


class Stream(asyncio.Protocol):
    """The caller's stream: runs the tool and answers."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.rest = b""

    def connection_made(self, transport: Any) -> None:
        transport.write(b"GET /mcp HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: text/event-stream\r\n\r\n")

    def data_received(self, data: bytes) -> None:
        *frames, self.rest = (self.rest + data if self.rest else data).split(b"\n\n")
        posts: list[bytes] = []
        for frame in frames:
            start = frame.find(b"data: ")
            if start < 0:
                continue
            request = decode_push(frame[start + 6 :]).params.data
            self.answers.next += 1
            body = encode(
                {
                    "jsonrpc": "2.0",
                    "id": self.answers.next,
                    "method": "tools/call",
                    "params": {
                        "name": "caller_tool_response",
                        "arguments": {
                            "session_id": request.session_id,
                            "request_id": request.request_id,
                            "result": request.arguments,
                        },
                    },
                }
            )
            posts.append(POST_HEAD % (len(body), body))
        if posts:
            self.answers.write(b"".join(posts))


async def caller(port: int) -> None:
    loop = asyncio.get_running_loop()
    _, answers = await loop.create_connection(Answers, "127.0.0.1", port)
    await loop.create_connection(lambda: Stream(answers), "127.0.0.1", port)
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    role, where = sys.argv[1:]
    uvloop.run(server(where) if role == "server" else caller(int(where)))
