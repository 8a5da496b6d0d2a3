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

import msgspec

from oubliette.server.endpoints import failures
from oubliette.server.home import address
from oubliette.wire import jsonrpc

LINE_BYTES_MAX = 1024 * 1024
CONNECTIONS_MAX = 16
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

# An operation's name and its parameters as JSON, to its result. Raises `OublietteError`.
Ask = Callable[[str, bytes], Awaitable[object]]


@asynccontextmanager
async def local_door(path: Path, ask: Ask) -> AsyncGenerator[None]:
    """Serve `path` while the context is open. The home's lock is held, so a socket found there is a dead server's."""
    listener = _listen(path)
    open_connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_connections
        open_connections += 1
        try:
            if open_connections <= CONNECTIONS_MAX and _is_ours(writer):
                await _converse(reader, writer, ask)
        except ConnectionError:
            pass
        finally:
            open_connections -= 1
            writer.close()

    server = await asyncio.start_unix_server(serve, sock=listener, limit=LINE_BYTES_MAX)
    try:
        yield
    finally:
        server.close()
        _remove(path)


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
        except ValueError:  # longer than LINE_BYTES_MAX
            return
        if not line.endswith(b"\n"):
            return
        writer.write(await _reply(line, ask))
        await writer.drain()


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
