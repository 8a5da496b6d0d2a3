"""A home: the folder of one installation, and the lock that lets one process at a time use it."""

import asyncio
import errno
import fcntl
import os
import socket
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from oubliette.server.errors import Conflict, NotConfigured

LOCK_WITHIN_S = 5.0
RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class Home:
    path: Path

    @property
    def database(self) -> Path:
        return self.path / "oubliette.db"

    @property
    def admin_socket(self) -> Path:
        """Where the command line speaks to the server; who may is the kernel's word on the other side's user."""
        return self.path / "admin.sock"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    def make(self) -> None:
        """Make the folder, closed to everybody else; again is no error. Raises `NotConfigured`."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.path.stat()
        except OSError as error:
            raise NotConfigured(f"{self.path}: cannot be made a home: {error.strerror}") from None
        if found.st_uid != os.geteuid():
            raise NotConfigured(f"{self.path}: belongs to another user; choose another home")
        if found.st_mode & 0o077:
            raise NotConfigured(f"{self.path}: is open to other users (chmod 700 it), or choose another home")


@contextmanager
def address(path: Path) -> Generator[str]:
    """A unix socket's path, while the context is open, in words that fit the kernel's 108 bytes however deep it is."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


@asynccontextmanager
async def locked(home: Home) -> AsyncGenerator[None]:
    """Hold the home's lock, for a server. Who serves this home is not waited for, a command with the lock is a moment.

    Raises as `HomeLock` does.
    """
    deadline = time.monotonic() + LOCK_WITHIN_S
    with ExitStack() as held:
        while True:
            try:
                held.enter_context(HomeLock(home))
                break
            except Conflict:
                if _is_served(home) or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(RETRY_S)
        yield


def _is_served(home: Home) -> bool:
    """Whether a server answers at the home's door."""
    kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
    with address(home.admin_socket) as near, socket.socket(socket.AF_UNIX, kind) as knocking:
        return knocking.connect_ex(near) in (0, errno.EAGAIN)  # or there are others before us


class HomeLock:
    """Held from enter to exit, or to the end of the process however it ends.

    Entering raises `Conflict` where another holds it, and `NotConfigured` where there can be no lock.
    """

    def __init__(self, home: Home) -> None:
        self._home = home
        self._file: int | None = None

    def __enter__(self) -> None:
        try:
            file = os.open(self._home.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._unusable(error) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(file, 0)
            os.pwrite(file, b"%d\n" % os.getpid(), 0)
        except BlockingIOError:
            holder = os.pread(file, 32, 0).decode(errors="replace").strip()
            os.close(file)
            process = f" (process {holder})" if holder else ""
            raise Conflict(f"{self._home.path}: another oubliette{process} is using this home") from None
        except OSError as error:
            os.close(file)
            raise self._unusable(error) from None
        self._file = file

    def _unusable(self, error: OSError) -> NotConfigured:
        return NotConfigured(f"{self._home.lock}: cannot be locked ({error.strerror}); choose another home")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            os.ftruncate(self._file, 0)
            os.close(self._file)
            self._file = None
