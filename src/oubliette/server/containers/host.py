"""Processes of this host: who they are for certain, and their end.

A process id alone names nobody for long: ids are used again. Together with the time that the process was started, and
the boot that it belongs to, it does.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_STOP_LOOKS = 1000


@dataclass(frozen=True, slots=True)
class Proc:
    """One process, for certain."""

    pid: int
    started: str  # clock ticks after the boot, and the boot

    def is_alive(self) -> bool:
        found = find(self.pid)
        return found == self

    def send(self, number: signal.Signals) -> None:
        """Signal it, unless it is gone already."""
        try:
            fd = os.pidfd_open(self.pid)
        except OSError:
            return
        try:
            if self.is_alive():  # looked up after the open: the descriptor is of this process and of no later one
                signal.pidfd_send_signal(fd, number)
        except ProcessLookupError:
            pass
        finally:
            os.close(fd)

    def stop(self) -> None:
        """Stop it, and return when it stands still; a program of one thread does so at once."""
        self.send(signal.SIGSTOP)
        for _ in range(_STOP_LOOKS):
            stat = _stat(self.pid)
            if stat is None or stat[0] not in (b"R", b"S", b"D") or not self.is_alive():
                return
            os.sched_yield()

    async def ended(self, within_s: float) -> bool:
        """Wait for its end; whether it came."""
        try:
            fd = os.pidfd_open(self.pid)
        except OSError:
            return True
        loop = asyncio.get_running_loop()
        over = loop.create_future()
        try:
            if not self.is_alive():
                return True
            loop.add_reader(fd, lambda: over.done() or over.set_result(None))
            async with asyncio.timeout(within_s):
                await over
            return True
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(fd)
            os.close(fd)

    def bury(self) -> None:
        """Take its exit status, where it is a child of ours that has ended."""
        try:
            os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            pass


def find(pid: int) -> Proc | None:
    """The living process of this id."""
    stat = _stat(pid)
    if stat is None or stat[0] in (b"Z", b"X"):
        return None
    return Proc(pid, f"{stat[19].decode()}@{_boot()}")


def arguments(pid: int) -> list[str]:
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")[:-1]
    except OSError:
        return []


def is_first_of_namespace(pid: int) -> bool:
    """Whether it is process 1 of a process namespace below ours."""
    numbers = _status(pid, "NSpid")
    return len(numbers) > 1 and numbers[-1] == "1"


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether it has a handler of its own for this signal."""
    mask = _status(pid, "SigCgt")
    return bool(mask) and bool(int(mask[0], 16) & 1 << (number - 1))


def pids() -> Iterator[int]:
    return (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())


def descendants(root: int) -> list[int]:
    """Everything that this process started, and so on; the living only."""
    parents: dict[int, list[int]] = {}
    for pid in pids():
        stat = _stat(pid)
        if stat is not None and stat[0] not in (b"Z", b"X"):
            parents.setdefault(int(stat[1]), []).append(pid)
    found: list[int] = []
    ahead = [root]
    while ahead:
        below = parents.get(ahead.pop(), [])
        found += below
        ahead += below
    return found


def marked(variable: bytes) -> list[int]:
    """The processes whose environment holds exactly this `NAME=value`, as far as we may look."""
    found: list[int] = []
    for pid in pids():
        try:
            environment = (_PROC / str(pid) / "environ").read_bytes()
        except OSError:
            continue
        if variable in environment.split(b"\0"):
            found.append(pid)
    return found


def _status(pid: int, name: str) -> list[str]:
    """The words of one line of /proc/PID/status."""
    try:
        lines = (_PROC / str(pid) / "status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        if line.startswith(f"{name}:"):
            return line.split()[1:]
    return []


def _stat(pid: int) -> list[bytes] | None:
    """The fields of /proc/PID/stat after the name: the state first."""
    try:
        return (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None


def _boot() -> str:
    return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()[:8]
