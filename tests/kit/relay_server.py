"""The server's end of a relay socket for tests: it judges every frame by the types of `wire`.

    async with RelayServer(folder) as relay:
        call = await relay.take(CallerTool)
        call.reply({"sent": True})

`attach` and `oubliette_tools` are answered by themselves; everything else waits to be taken by a test. A frame that
the wire's types refuse, or that carries a field they do not know, is kept as a problem and fails the test at the end.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import msgspec

from oubliette.wire import jsonrpc
from oubliette.wire.jsonrpc import ErrorObject
from oubliette.wire.relay import (
    FRAME_BYTES_MAX,
    Attach,
    Attached,
    CallerTool,
    CallerToolsConfig,
    Cancel,
    ConfigTool,
    Limits,
    OublietteCallTool,
    OublietteTools,
    Progress,
    SessionEvents,
    SessionMessage,
)


class Listed(msgspec.Struct, forbid_unknown_fields=True):
    """`listed` says nothing but that it happened."""


REQUESTS: dict[str, type[msgspec.Struct]] = {
    "attach": Attach,
    "caller_tool": CallerTool,
    "oubliette_tools": OublietteTools,
    "oubliette_call_tool": OublietteCallTool,
    "session_message": SessionMessage,
    "session_events": SessionEvents,
}
NOTIFICATIONS: dict[str, type[msgspec.Struct]] = {"cancel": Cancel, "progress": Progress, "listed": Listed}

ATTACHED = Attached(
    session_id="gogol_test",
    depth=0,
    protocol=1,
    limits=Limits(),
    call_timeout_s=60.0,
    call_timeout_max_s=600.0,
)
SLOW_S = 15.0  # a test that waits longer than this for a frame has failed


def tool(name: str, **more: Any) -> ConfigTool:
    return ConfigTool(name=name, box_name=f"ant_{name}", **more)


def failure(code: int, message: str, kind: str, *, retryable: bool = False) -> ErrorObject:
    return ErrorObject(code=code, message=message, data={"kind": kind, "retryable": retryable})


P = TypeVar("P", bound=msgspec.Struct)


class Frame(Generic[P]):
    """One request or notification of the client."""

    def __init__(self, connection: "Connection", method: str, frame_id: Any, params: P) -> None:
        self.connection = connection
        self.method = method
        self.id = frame_id
        self.params = params

    def __repr__(self) -> str:
        return f"<{self.method} {self.id}>"

    def reply(self, value: object) -> None:
        self.connection.write(jsonrpc.result(self.id, value))

    def fail(self, error: ErrorObject) -> None:
        self.connection.write(jsonrpc.error(self.id, error))


class Connection:
    """One connection of a client."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.attach: Attach | None = None
        self.closed = asyncio.Event()

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    def notify(self, method: str, params: object) -> None:
        self.write(jsonrpc.notification(method, params))

    def cut(self) -> None:
        """End the connection at once, as a killed server does."""
        self._writer.transport.abort()


class RelayServer:
    """A socket folder with `relay.sock` and `key`, and who listens there."""

    def __init__(self, folder: Path, *, key: str = "k" * 43, tools: Sequence[ConfigTool] = ()) -> None:
        self.folder = folder
        self.key = key
        self.tools = list(tools)
        self.attached = msgspec.structs.replace(ATTACHED, caller_tools=bool(tools))
        self.platform: list[dict[str, Any]] | ErrorObject = []
        self.refusal: ErrorObject | None = None  # instead of the answer to attach
        self.answers_attach = True
        self.declares = True  # whether the config follows the answer to attach
        self.connections: list[Connection] = []
        self.frames: list[Frame[Any]] = []  # everything that came, in order
        self.problems: list[str] = []
        self.text = b""  # every byte that came
        self._untaken: list[Frame[Any]] = []
        self._moved = asyncio.Condition()
        self._server: asyncio.Server | None = None

    @property
    def path(self) -> Path:
        return self.folder / "relay.sock"

    async def __aenter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.write_key(self.key)
        await self.listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
        assert kind is not None or not self.problems, self.problems

    def write_key(self, key: str) -> None:
        (self.folder / "key").write_text(key + "\n")

    async def listen(self) -> None:
        self.path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self.path, limit=2 * FRAME_BYTES_MAX)

    async def stop(self) -> None:
        """Stop listening and cut everybody off: a killed server."""
        if self._server is None:
            return
        self._server.close()
        for connection in self.connections:
            connection.cut()
        async with asyncio.timeout(SLOW_S):
            for connection in self.connections:
                await connection.closed.wait()
        self.path.unlink(missing_ok=True)
        self._server = None

    @property
    def connection(self) -> Connection:
        """The newest connection that is still open."""
        return next(each for each in reversed(self.connections) if not each.closed.is_set())

    def declare(self, *tools: ConfigTool) -> None:
        """Declare these tools, whole, to every client, in both keys that the wire knows."""
        self.tools = list(tools)
        self.attached = msgspec.structs.replace(self.attached, caller_tools=bool(tools))
        for connection in self.connections:
            if connection.attach is not None and not connection.closed.is_set():
                connection.write(self._config())

    async def take(self, params: type[P], where: Callable[[P], bool] = lambda _: True) -> "Frame[P]":
        """The next frame with these parameters that no test took yet; waits for it."""
        async with asyncio.timeout(SLOW_S), self._moved:
            while True:
                for frame in self._untaken:
                    if isinstance(frame.params, params) and where(frame.params):
                        self._untaken.remove(frame)
                        return frame
                await self._moved.wait()

    async def take_many(self, count: int, params: type[P]) -> "list[Frame[P]]":
        return [await self.take(params) for _ in range(count)]

    def of(self, params: type[P]) -> "list[Frame[P]]":
        """Every frame of this kind that ever came."""
        return [frame for frame in self.frames if isinstance(frame.params, params)]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(writer)
        self.connections.append(connection)
        try:
            with contextlib.suppress(ConnectionError):
                while line := await reader.readline():
                    self.text += line
                    await self._take_line(connection, line)
        except (msgspec.MsgspecError, ValueError) as problem:
            self.problems.append(f"{type(problem).__name__}: {problem}")
        finally:
            connection.closed.set()
            writer.transport.abort()
            async with self._moved:
                self._moved.notify_all()

    async def _take_line(self, connection: Connection, line: bytes) -> None:
        frame = judge(line)
        received = Frame(connection, *frame)
        if isinstance(received.params, Attach):
            connection.attach = received.params
            self._answer_attach(received)
        elif isinstance(received.params, OublietteTools):
            self._answer_tools(received)
        self.frames.append(received)
        async with self._moved:
            self._untaken.append(received)
            self._moved.notify_all()

    def _answer_attach(self, frame: Frame[Any]) -> None:
        if not self.answers_attach:
            return
        refusal = self.refusal
        if refusal is None and frame.params.key != self.key:
            refusal = failure(jsonrpc.UNAUTHENTICATED, "wrong session key", "unauthenticated")
        if refusal is not None:
            frame.fail(refusal)
            frame.connection._writer.close()
            return
        frame.reply(self.attached)
        if self.attached.caller_tools and self.declares:
            frame.connection.write(self._config())

    def _answer_tools(self, frame: Frame[Any]) -> None:
        if isinstance(self.platform, ErrorObject):
            frame.fail(self.platform)
        else:
            frame.reply({"tools": self.platform})

    def _config(self) -> bytes:
        return config_frame(self.tools)


def config_frame(tools: Sequence[ConfigTool]) -> bytes:
    """`caller_tools_config` as the server writes it: with the seeds' `type` and JSON-RPC's `method`."""
    name = "caller_tools_config"
    params = CallerToolsConfig(caller_id="ant", tools=list(tools))
    return msgspec.json.encode({"jsonrpc": "2.0", "type": name, "method": name, "params": params}) + b"\n"


def judge(line: bytes) -> tuple[str, Any, msgspec.Struct]:
    """A frame of the client as the wire understands it: method, id, parameters; ValueError where it does not."""
    if len(line) > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {len(line)} bytes")
    frame = jsonrpc.decode_frame(line)
    if frame.jsonrpc != "2.0" or isinstance(frame.params, msgspec.UnsetType):
        raise ValueError(f"not a frame: {line[:200]!r}")
    is_request = frame.id is not msgspec.UNSET
    known = (REQUESTS if is_request else NOTIFICATIONS).get(frame.method)
    if known is None or (is_request and (type(frame.id) is not int or frame.id < 1)):
        raise ValueError(f"no such frame: {line[:200]!r}")
    params = msgspec.json.decode(frame.params, type=known)
    unknown = set(msgspec.json.decode(frame.params)) - {field.encode_name for field in msgspec.structs.fields(known)}
    if unknown:
        raise ValueError(f"{frame.method} does not know {unknown}")
    return frame.method, frame.id, params
