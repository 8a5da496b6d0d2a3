"""The door of this machine's administrator: `<home>/admin.sock`, JSON-RPC by lines, one operation per request.

Who asks is the kernel's word: only the user that the server runs as, and root, get an answer. No token is needed,
so none has to be kept for the command line.
"""

import asyncio
import os
import socket
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import msgspec

from oubliette.server.endpoints import failures
from oubliette.server.home import address
from oubliette.server.tasks import Tasks
from oubliette.wire import jsonrpc

LINE_BYTES_MAX = 1024 * 1024
CONNECTIONS_MAX = 16
END_WITHIN_S = 2.0
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

# An operation's name and its parameters as JSON, to its result. Raises `OublietteError`.
Ask = Callable[[str, bytes], Awaitable[object]]


@asynccontextmanager
async def local_door(path: Path, ask: Ask) -> AsyncGenerator[None]:
    """Serve `path` while the context is open. The home's lock is held, so a socket found there is a dead server's.

    Its end waits for what is being answered, though not for long: nothing is asked behind it.
    """
    listener = _listen(path)
    is_closing = False
    open_connections: dict[asyncio.Task[None], tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}

    async with Tasks() as tasks:

        def met(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if is_closing or len(open_connections) >= CONNECTIONS_MAX or not _is_ours(writer):
                writer.close()
                return
            task = tasks.create_task(_converse(reader, writer, ask), name="local door")
            open_connections[task] = reader, writer
            task.add_done_callback(left)

        def left(task: asyncio.Task[None]) -> None:
            _, writer = open_connections.pop(task)
            writer.close()

        server = await asyncio.start_unix_server(met, sock=listener, limit=LINE_BYTES_MAX)
        try:
            yield
        finally:
            is_closing = True
            server.close()
            _remove(path)
            for reader, writer in open_connections.values():
                cast("asyncio.ReadTransport", writer.transport).pause_reading()
                reader.feed_eof()  # whoever asks nothing at the moment goes
            if open_connections:
                await asyncio.wait(open_connections, timeout=END_WITHIN_S)
            for task in open_connections:
                task.cancel()


def _listen(path: Path) -> socket.socket:
    _remove(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        with address(path) as near:
            listener.bind(near)
        path.chmod(0o600)
    except BaseException:
        listener.close()
        raise
    return listener


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def _is_ours(writer: asyncio.StreamWriter) -> bool:
    peer: socket.socket = writer.get_extra_info("socket")
    _, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return may_ask(uid, os.geteuid())


def may_ask(uid: int, server_uid: int) -> bool:
    return uid in (0, server_uid)


async def _converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ask: Ask) -> None:
    while True:
        try:
            line = await reader.readline()
        except (ValueError, ConnectionError):  # longer than LINE_BYTES_MAX, or gone
            return
        if not line.endswith(b"\n"):
            return
        writer.write(await _reply(line, ask))
        try:
            await writer.drain()
        except ConnectionError:
            return


async def _reply(line: bytes, ask: Ask) -> bytes:
    try:
        frame = jsonrpc.decode_frame(line)
    except jsonrpc.UNREADABLE:
        return jsonrpc.error(None, failures.problem(jsonrpc.PARSE_ERROR, "invalid_request", "no JSON object"))
    if not isinstance(frame.method, str) or not isinstance(frame.id, int | str):
        problem = failures.problem(jsonrpc.INVALID_REQUEST, "invalid_request", "a request has an id and a method")
        return jsonrpc.error(None, problem)
    params = b"{}" if isinstance(frame.params, msgspec.UnsetType) else bytes(frame.params)
    try:
        return jsonrpc.result(frame.id, await ask(frame.method, params))
    except Exception as failure:
        return jsonrpc.error(frame.id, failures.as_rpc(failure))
