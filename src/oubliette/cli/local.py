"""The way from the command line to an operation: the running server's admin socket, or this process itself."""

import asyncio
from contextlib import ExitStack, suppress
from typing import Any, cast

import msgspec

from oubliette.server.config import Settings
from oubliette.server.endpoints.failures import CODES
from oubliette.server.errors import Conflict, OublietteError, StorageFailed
from oubliette.server.home import RETRY_S, Home, HomeLock, address
from oubliette.wire import jsonrpc

ANSWER_S = 30.0
# A server that has just taken the lock opens its socket a moment later; a command gives the lock back.
BUSY_S = 10.0
LINE_BYTES_MAX = 8 * 1024 * 1024


_BY_KIND = {kind.kind: kind for kind in CODES}


def ask(settings: Settings, operation: str, **params: Any) -> dict[str, Any]:
    """Run an operation as this machine's administrator; a parameter that is None was not given."""
    given = {name: value for name, value in params.items() if value is not None}
    return asyncio.run(_ask(settings, operation, given))


async def _ask(settings: Settings, operation: str, params: dict[str, Any]) -> dict[str, Any]:
    home = Home(settings.home)
    home.make()
    with ExitStack() as held:
        door = await reached(home, held)
        if door is not None:
            return await _ask_server(*door, operation, params)
        # The whole server is loaded only where none is running.
        from oubliette.server.app import locally

        done = await locally(settings, operation, msgspec.json.encode(params))
        return cast("dict[str, Any]", msgspec.to_builtins(done))


async def _ask_server(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, operation: str, params: dict[str, Any]
) -> dict[str, Any]:
    try:
        async with asyncio.timeout(ANSWER_S):
            writer.write(jsonrpc.request(1, operation, params))
            line = await reader.readline()
    except (TimeoutError, ConnectionError):
        line = b""
    finally:
        writer.close()
    if not line.endswith(b"\n"):
        raise StorageFailed("the running server closed without an answer; look at its log")
    frame = jsonrpc.decode_frame(line)
    if isinstance(frame.result, msgspec.Raw):
        return msgspec.json.decode(frame.result, type=dict[str, Any])
    raise _failure(frame.error if isinstance(frame.error, msgspec.Raw) else msgspec.Raw(b"{}"))


def _failure(told: msgspec.Raw) -> OublietteError:
    """The server's error as what it was there: in this process it ends the same way."""
    error = msgspec.json.decode(told, type=jsonrpc.ErrorObject)
    kind = str((error.data or {}).get("kind"))
    return _BY_KIND.get(kind, OublietteError)(error.message)


async def reached(home: Home, held: ExitStack) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
    """The running server's door, or none and the home's lock is on `held`: whichever is there first.

    Who has the lock without a door is a server that starts or stops, or another command.
    """
    try:
        async with asyncio.timeout(BUSY_S):
            while True:
                with suppress(Conflict):
                    held.enter_context(HomeLock(home))
                    return None
                with suppress(FileNotFoundError, ConnectionRefusedError), address(home.admin_socket) as near:
                    return await asyncio.open_unix_connection(near, limit=LINE_BYTES_MAX)
                await asyncio.sleep(RETRY_S)
    except TimeoutError:
        raise StorageFailed(f"another process uses {home.path} and does not answer on {home.admin_socket}") from None
