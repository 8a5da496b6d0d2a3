"""Doors: the relay socket of each box, in a folder of its own that the box sees read-only.

The address of a unix socket holds 107 bytes. A door is therefore bound through a descriptor of its folder, and may lie
as deep as it likes; it appears under its name only when it is ready, so that a restart never shows a dead socket for
longer than the restart takes.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

SOCKET = "relay.sock"
KEY = "key"
_BACKLOG = 64


class Doors:
    def __init__(self) -> None:
        self._open: dict[str, asyncio.Server] = {}

    async def open(self, name: str, folder: Path, key: str, accept: Callable[[], asyncio.Protocol]) -> None:
        """Serve every connection to the folder's socket; the key that opens it lies beside."""
        self.close(name)
        listener = await asyncio.to_thread(_make, folder, key)
        try:
            self._open[name] = await asyncio.get_running_loop().create_unix_server(accept, sock=listener)
        except BaseException:
            listener.close()
            raise

    def close(self, name: str) -> None:
        server = self._open.pop(name, None)
        if server is not None:
            server.close()

    def close_all(self) -> None:
        for name in list(self._open):
            self.close(name)


def _make(folder: Path, key: str) -> socket.socket:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _place(folder, KEY, key.encode())
    return _listen(folder)


def _listen(folder: Path) -> socket.socket:
    directory = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    beside = f"{SOCKET}.new"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside, dir_fd=directory)
        listener.bind(f"/proc/self/fd/{directory}/{beside}")
        os.chmod(beside, 0o600, dir_fd=directory)
        listener.listen(_BACKLOG)
        os.rename(beside, SOCKET, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        listener.close()
        raise
    finally:
        os.close(directory)
    return listener


def _place(folder: Path, name: str, content: bytes) -> None:
    """Write a file whole or not at all, for its owner's eyes."""
    beside = folder / f".{name}.new"
    beside.unlink(missing_ok=True)
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
    beside.rename(folder / name)
