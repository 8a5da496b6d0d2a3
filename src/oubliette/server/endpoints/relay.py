"""The relay socket, as the server speaks it: one connection per client or keeper of a box.

Lines in, lines out. Every request is a task of its own, so that none waits for another. What a client asked to be done
goes on when its connection goes, and is joined again by call key when it returns; what it only reads or waits for ends
with the connection, to be asked again. Nothing here decides: operations, exchange and boxes do.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import msgspec

from oubliette.server import audit
from oubliette.server.endpoints import failures
from oubliette.server.endpoints.boxed import Boxed
from oubliette.server.endpoints.interest import Interest
from oubliette.server.errors import (
    BoxFailed,
    DroidFailed,
    InvalidParams,
    MethodUnknown,
    OublietteError,
    TooMany,
    Unauthenticated,
    UpgradeRequired,
)
from oubliette.server.limits import PENDING_CALLS_PER_SESSION, WAITERS_PER_CALL
from oubliette.server.tasks import Tasks
from oubliette.wire import jsonrpc, relay

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=msgspec.Struct)
WRITE_BUFFER_MAX = 16 * 1024 * 1024
# Of a box: more than all who may wait for its calls of caller tools, whose waits outlive a connection.
OPEN_REQUESTS_MAX = 2 * PENDING_CALLS_PER_SESSION * WAITERS_PER_CALL
# The lines in which they came: twice what a client holds, which asks for all of it again when it comes back.
OPEN_BYTES_MAX = 64 * 1024 * 1024
# So long a peer has to read its last words.
BYE_WAIT_S = 5.0


def decoded(frame: jsonrpc.Frame, kind: type[S]) -> S:
    if frame.params is msgspec.UNSET:
        return msgspec.convert({}, kind)
    assert isinstance(frame.params, msgspec.Raw)
    return msgspec.json.decode(frame.params, type=kind)


@dataclass(slots=True)
class Door:
    """One box's door: the connections that came through it, and how much of what they asked is open."""

    box_id: str
    open: int = 0  # requests, those of connections that are gone included
    open_bytes: int = 0
    connections: set["Connection"] = field(default_factory=set["Connection"])


class Connection(asyncio.Protocol):
    """One peer on a box's socket, from its first byte to its last."""

    def __init__(self, door: Door, relay_door: "Relay") -> None:
        self.door = door
        self._relay = relay_door
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._searched = 0
        self._timer: asyncio.TimerHandle | None = None
        self._parting: asyncio.Transport | None = None  # closing, with last words to be read
        self._interests: set[Interest] = set()  # in the requests that are open
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._ids = 0
        self._lines: list[bytes] = []
        self._attaching = False
        self.session_id: str | None = None
        self.instance: str | None = None
        self.role = ""

    @property
    def box_id(self) -> str:
        return self.door.box_id

    # -- bytes --------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if len(self.door.connections) >= relay.CONNECTIONS_MAX:
            self._bye(failures.problem(jsonrpc.SERVER_ERROR, "too_many", "too many connections from this box"))
            return
        self.door.connections.add(self)
        self._timer = asyncio.get_running_loop().call_later(relay.ATTACH_WAIT_S, self._late)

    def _late(self) -> None:
        self._bye(failures.problem(jsonrpc.INVALID_REQUEST, "invalid_request", "attach did not come in time"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while not self._attaching and self._transport is not None:
            most = relay.FRAME_BYTES_MAX if self.session_id is not None else relay.ATTACH_BYTES_MAX
            end = self._buffer.find(b"\n", self._searched)
            if max(end, len(self._buffer) if end < 0 else 0) > most:
                self._bye(failures.problem(jsonrpc.INVALID_REQUEST, "too_large", f"a frame is over {most} bytes"))
                return
            if end < 0:
                self._searched = len(self._buffer)
                return
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            self._searched = 0
            if line:
                self._line(line)

    def send(self, line: bytes) -> None:
        """Write a line with everything else of this tick: many answers, one system call."""
        if self._transport is None:
            return
        if not self._lines:
            asyncio.get_running_loop().call_soon(self._flush)
        self._lines.append(line)

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        transport = self._transport
        if transport is None:
            return
        if transport.get_write_buffer_size() > WRITE_BUFFER_MAX:
            logger.warning("a peer on a relay socket does not read: cut", extra={"box_id": self.door.box_id})
            said = f"this connection is read too slowly: more than {WRITE_BUFFER_MAX} bytes wait"
            self._bye(failures.problem(jsonrpc.SERVER_ERROR, "too_large", said))
            return
        transport.writelines(lines)

    def abort(self) -> None:
        transport = self._transport or self._parting
        if transport is not None:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._transport = self._parting = None
        if self._timer is not None:
            self._timer.cancel()
        self.door.connections.discard(self)
        # What was asked stays asked, and its outcome is kept for the same call key; nobody waits for it here.
        for interest in self._interests:
            interest.lose("the connection that asked is gone")
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(BoxFailed("the keeper's connection closed"))
        self._waiting.clear()
        if self.session_id is not None:
            self._relay.left(self.door, self)

    def _bye(self, problem: jsonrpc.ErrorObject, request_id: Any = None) -> None:
        """Say why, and close; who does not read that in time is cut off."""
        transport, self._transport = self._transport, None
        if transport is None:
            return
        transport.writelines([*self._lines, jsonrpc.error(request_id, problem)])
        transport.close()
        if self._timer is not None:
            self._timer.cancel()
        self._parting = transport
        self._timer = asyncio.get_running_loop().call_later(BYE_WAIT_S, self.abort)

    # -- frames -------------------------------------------------------------------------------------------------

    def _line(self, line: bytes) -> None:
        try:
            frame = jsonrpc.decode_frame(line)
        except jsonrpc.UNREADABLE:
            wrong = is_json(line)
            code = jsonrpc.INVALID_REQUEST if wrong else jsonrpc.PARSE_ERROR
            said = "not a JSON-RPC object" if wrong else "not JSON"
            self.send(jsonrpc.error(None, failures.problem(code, "invalid_request", said)))
            return
        if self.session_id is None:
            self._attach(frame)
        elif isinstance(frame.method, str):
            self._asked(frame, frame.method, len(line))
        elif frame.result is not msgspec.UNSET or frame.error is not msgspec.UNSET:
            self._answered(frame)
        else:
            self._refuse(frame, jsonrpc.INVALID_REQUEST, "invalid_request", "neither a request nor a response")

    def _refuse(self, frame: jsonrpc.Frame, code: int, kind: str, message: str) -> None:
        request_id = frame.id if isinstance(frame.id, int | str) else None
        self.send(jsonrpc.error(request_id, failures.problem(code, kind, message)))

    def _attach(self, frame: jsonrpc.Frame) -> None:
        """Identify the peer; lines that follow wait until that is done."""
        request_id = frame.id if isinstance(frame.id, int | str) else 0
        try:
            if frame.method != "attach":
                raise InvalidParams("the first frame must be attach")
            asked = decoded(frame, relay.Attach)
        except jsonrpc.UNREADABLE as error:
            self._bye(failures.as_rpc(InvalidParams(f"attach: {error}")), request_id)
        except InvalidParams as refusal:
            self._bye(failures.as_rpc(refusal), request_id)
        else:
            self._attaching = True
            self._relay.spawn(self._finish_attach(request_id, asked))

    async def _finish_attach(self, request_id: jsonrpc.Id, asked: relay.Attach) -> None:
        try:
            attached = await self._relay.attach(self.door, self, asked)
        except Exception as refusal:
            self._relay.refused(self.door, refusal)
            self._bye(failures.as_rpc(refusal), request_id)
            return
        if self._timer is not None and self._transport is not None:
            self._timer.cancel()
        self.session_id = attached.session_id
        self.instance = asked.instance
        self.role = asked.role
        self.send(jsonrpc.result(request_id, attached))
        self._attaching = False
        if self._transport is not None:
            self._relay.arrived(self.door, self, asked)
            self.data_received(b"")

    def _asked(self, frame: jsonrpc.Frame, method: str, size: int) -> None:
        if frame.id is msgspec.UNSET or frame.id is None:
            self._relay.told(self, method, frame)
            return
        if not isinstance(frame.id, int | str):
            self._refuse(frame, jsonrpc.INVALID_REQUEST, "invalid_request", "an id is a string or an integer")
            return
        door = self.door
        if door.open >= OPEN_REQUESTS_MAX or door.open_bytes + size > OPEN_BYTES_MAX:
            said = f"{door.open} requests of this box with {door.open_bytes} bytes are open: wait for one to end"
            self.send(jsonrpc.error(frame.id, failures.as_rpc(TooMany(said))))
            return
        door.open += 1
        door.open_bytes += size
        interest = Interest()
        self._interests.add(interest)
        self._relay.spawn(self._serve(frame.id, method, frame, size, interest))

    async def _serve(
        self, request_id: jsonrpc.Id, method: str, frame: jsonrpc.Frame, size: int, interest: Interest
    ) -> None:
        try:
            answer = self._relay.served(self, method, frame, interest)
            del frame  # it is the whole line, and what is asked in it has been read
            line = jsonrpc.result(request_id, await answer)
        except jsonrpc.UNREADABLE as error:
            line = jsonrpc.error(request_id, failures.as_rpc(InvalidParams(f"{method}: {error}")))
        except Exception as failure:
            line = jsonrpc.error(request_id, failures.as_rpc(failure))
        finally:
            self.door.open -= 1
            self.door.open_bytes -= size
            self._interests.discard(interest)
        if len(line) > relay.FRAME_BYTES_MAX:
            too_large = failures.problem(jsonrpc.SERVER_ERROR, "too_large", "the result is over the frame bound")
            line = jsonrpc.error(request_id, too_large)
        self.send(line)

    def cancel(self, call_key: str) -> None:
        """Nobody wants the answers any more that were asked for by this key."""
        for interest in self._interests:
            if interest.call_key == call_key:
                interest.lose("the call was cancelled")

    # -- requests of the server (to a keeper) -------------------------------------------------------------------

    async def request(self, method: str, params: object) -> bytes:
        if self._transport is None:
            raise BoxFailed("the keeper is not connected")
        self._ids += 1
        request_id = self._ids
        future = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        self.send(jsonrpc.request(request_id, method, params))
        try:
            return await future
        finally:
            self._waiting.pop(request_id, None)

    def notify(self, method: str, params: object) -> None:
        self.send(jsonrpc.notification(method, params))

    def _answered(self, frame: jsonrpc.Frame) -> None:
        future = self._waiting.pop(frame.id, None) if isinstance(frame.id, int) else None
        if future is None or future.done():
            return
        if isinstance(frame.error, msgspec.Raw):
            future.set_exception(_refusal(frame.error))
        else:
            future.set_result(bytes(frame.result) if isinstance(frame.result, msgspec.Raw) else b"null")


class _Refused(msgspec.Struct, frozen=True):
    """A keeper's error: it says whether the same may be asked again."""

    message: str
    data: relay.ErrorData


def _refusal(error: msgspec.Raw) -> DroidFailed:
    try:
        said = msgspec.json.decode(error, type=_Refused)
    except jsonrpc.UNREADABLE:
        return DroidFailed("the keeper refused, and its reason was not understood")
    return DroidFailed(f"the keeper refused: {said.message}", reason=said.data.kind, retryable=said.data.retryable)


def is_json(line: bytes) -> bool:
    """Whether a line that is no frame is JSON at all."""
    try:
        msgspec.json.decode(line)
    except jsonrpc.UNREADABLE:
        return False
    return True


class Relay:
    """What connections ask for, by method; one for all boxes."""

    def __init__(self, boxed: Boxed, tasks: Tasks) -> None:
        self._boxed = boxed
        self._tasks = tasks
        self._doors: dict[str, Door] = {}

    def accept(self, box_id: str) -> Callable[[], asyncio.Protocol]:
        """A protocol factory for the door of this box."""
        door = self._doors.setdefault(box_id, Door(box_id))
        return lambda: Connection(door, self)

    def spawn(self, work: Any) -> asyncio.Task[None]:
        return self._tasks.create_task(work)

    def close(self) -> None:
        """The server stops: every connection ends, and what was asked on it stays asked."""
        for door in self._doors.values():
            for connection in tuple(door.connections):
                connection.abort()

    # -- connections --------------------------------------------------------------------------------------------

    async def attach(self, door: Door, connection: Connection, asked: relay.Attach) -> relay.Attached:
        """Identify a peer. Raises `Unauthenticated`, or `UpgradeRequired` for a protocol that is not spoken."""
        del connection
        session_id = self._boxed.boxes.session_of(door.box_id, asked.key, asked.role)
        if session_id is None:
            raise Unauthenticated("the session key is wrong")
        if asked.protocol not in relay.PROTOCOLS:
            raise UpgradeRequired(f"this server speaks relay protocol {relay.PROTOCOLS}, not {asked.protocol}")
        if not asked.instance or len(asked.instance) > relay.CALL_KEY_MAX:
            raise InvalidParams(f"instance has 1 to {relay.CALL_KEY_MAX} characters")
        return await self._boxed.attached(session_id, door.box_id, asked)

    def arrived(self, door: Door, connection: Connection, asked: relay.Attach) -> None:
        """After the answer to attach: what follows it on the wire."""
        assert connection.session_id is not None
        if asked.role == "keeper":
            self._boxed.keepers.attached(door.box_id, connection, asked.processes)
            self._boxed.boxes.keeper_attached(door.box_id, connection)
            return
        self._boxed.client_attached(connection.session_id, asked.instance)
        self._send_config(connection)

    def left(self, door: Door, connection: Connection) -> None:
        assert connection.session_id is not None
        if connection.role == "keeper":
            self._boxed.keepers.detached(door.box_id, connection)
            self._boxed.boxes.keeper_left(door.box_id, connection)
        elif connection.instance is not None and not any(
            other.instance == connection.instance for other in door.connections
        ):
            self._boxed.client_left(connection.session_id, connection.instance)
        if not door.connections and self._boxed.boxes.find(door.box_id) is None:
            self._doors.pop(door.box_id, None)

    def refused(self, door: Door, refusal: Exception) -> None:
        kind = refusal.kind if isinstance(refusal, OublietteError) else "internal"
        logger.warning("an attach was refused", extra={"box_id": door.box_id, "kind": kind})
        entry = audit.Entry(door="relay", operation="attach", outcome=f"refused: {kind}", target=door.box_id)
        self._tasks.create_task(self._boxed.note(entry))

    def redeclared(self, session_id: str) -> None:
        """A session's caller tools changed: its clients get them whole."""
        for door in self._doors.values():
            for connection in door.connections:
                if connection.session_id == session_id and connection.role == "client":
                    self._send_config(connection)

    def _send_config(self, connection: Connection) -> None:
        assert connection.session_id is not None
        config = self._boxed.config(connection.session_id)
        if config is not None:
            # Keyed by `type`, as the specification has it, and by `method`, as JSON-RPC has it.
            frame = {"jsonrpc": "2.0", "type": "caller_tools_config", "method": "caller_tools_config", "params": config}
            connection.send(msgspec.json.encode(frame) + b"\n")

    # -- methods ------------------------------------------------------------------------------------------------

    def served(
        self, connection: Connection, method: str, frame: jsonrpc.Frame, interest: Interest
    ) -> Awaitable[object]:
        """Read one request, or raise; awaited, it answers it or raises. Nothing of the frame is kept."""
        assert connection.session_id is not None
        boxed, session_id = self._boxed, connection.session_id
        if connection.role == "client":
            if method == "caller_tool":
                return self._caller_tool(connection, session_id, decoded(frame, relay.CallerTool))
            if method == "oubliette_tools":
                return boxed.oubliette_tools(session_id, decoded(frame, relay.OublietteTools), interest)
            if method == "oubliette_call_tool":
                return boxed.oubliette_call_tool(session_id, decoded(frame, relay.OublietteCallTool), interest)
            if method == "session_message":
                return boxed.session_message(session_id, decoded(frame, relay.SessionMessage), interest)
            if method == "session_events":
                return boxed.session_events(session_id, decoded(frame, relay.SessionEvents), interest)
        raise MethodUnknown(f"method not found: {method[:80]}")

    async def _caller_tool(self, connection: Connection, session_id: str, asked: relay.CallerTool) -> object:
        hear = Hearing(connection)
        return msgspec.Raw(await self._boxed.caller_tool(session_id, asked, connection.instance, hear))

    def told(self, connection: Connection, method: str, frame: jsonrpc.Frame) -> None:
        """Take a notification; one that is unknown or wrong is dropped with a log line."""
        assert connection.session_id is not None
        try:
            if connection.role == "keeper":
                params = b"{}" if isinstance(frame.params, msgspec.UnsetType) else bytes(frame.params)
                self._boxed.keepers.told(connection.box_id, method, params)
            elif method == "cancel":
                self._tasks.create_task(self._cancel(connection, decoded(frame, relay.Cancel)))
            elif method == "listed":
                self._boxed.listed(connection.session_id)
            else:
                logger.info("an unknown notification was dropped", extra={"method": method[:40]})
        except (*jsonrpc.UNREADABLE, OublietteError) as error:
            logger.warning("a notification was dropped", extra={"method": method[:40], "reason": str(error)})

    async def _cancel(self, connection: Connection, cancel: relay.Cancel) -> None:
        """A task of its own, and so behind the request that came before it on the wire."""
        assert connection.session_id is not None
        for one in connection.door.connections:
            one.cancel(cancel.call_key)
        await self._boxed.cancel(connection.session_id, cancel)


class Hearing:
    """Where the caller's progress on a call goes: to the connection that waits for it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __call__(self, progress: relay.Progress) -> None:
        self._connection.notify("progress", progress)
