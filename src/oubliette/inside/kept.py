"""A process that the keeper keeps: its input on the way in, its output until it is acknowledged, its end."""

from __future__ import annotations

import errno
import os
import selectors
import signal
from typing import Callable, Dict, List, Optional, Tuple

from oubliette.inside.parameters import SERVER_ERROR, Params, Program, Refused

HELD_BYTES_MAX = 1024 * 1024
STDERR_BYTES_MAX = 64 * 1024
STDIN_BYTES_MAX = 8 * 1024 * 1024  # taken, and not yet read by the process
STDIN_ANSWER_BYTES = 1024 * 1024  # an answer waits until no more than this is unread
CHUNK_BYTES = 48 * 1024
READ_BYTES = 64 * 1024
# Output that somebody else than the ended process holds open is waited for this long.
DRAIN_WAIT_S = 0.5
PIPE_BYTES_MAX = 1024 * 1024


class Pipe:
    """One end of a process's stdio; -1 once closed."""

    def __init__(self, fd: int, selector: selectors.BaseSelector, wanted: int, ready: Callable[[], None]) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._selector = selector
        self._wanted = wanted
        self._ready = ready
        self._watched = False

    def watch(self, wanted: bool) -> None:
        wanted = wanted and self.fd >= 0
        if wanted and not self._watched:
            self._selector.register(self.fd, self._wanted, self._ready)
        elif self._watched and not wanted:
            self._selector.unregister(self.fd)
        self._watched = wanted

    def read(self, size: int) -> Optional[bytes]:
        """What is there; b"" at the end, None when there is nothing yet."""
        try:
            return os.read(self.fd, size)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def close(self) -> None:
        self.watch(False)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Kept:
    """A process, what it still has to read and what it wrote."""

    def __init__(self, process: str, program: Program, env: Dict[str, str], selector: selectors.BaseSelector) -> None:
        self.process = process
        self.program = program
        self.pid, stdin, stdout, stderr = spawn(program.argv, env, program.cwd)
        self.stdin = Pipe(stdin, selector, selectors.EVENT_WRITE, self.write)
        self.stdout = Pipe(stdout, selector, selectors.EVENT_READ, self.read)
        self.stderr = Pipe(stderr, selector, selectors.EVENT_READ, self.read_err)
        self.stdin_offset = 0
        self.unread = bytearray()  # input on its way to the process
        self.eof = False
        self.held_from = 0  # the number of the first byte in `held`
        self.held = bytearray()
        self.sent_to = 0  # how far output went down the present connection
        self.err = bytearray()
        self.reaped_at: Optional[float] = None
        self.output_end = 0  # once it has ended: no more than this can be its own
        self.exit_code: Optional[int] = None
        self.exit_signal: Optional[int] = None
        self.announced = False  # its end was told on the present connection
        self.waiting: List[Callable[[], None]] = []  # answers to `stdin` that wait for room
        self.stdout.watch(True)
        self.stderr.watch(True)

    @property
    def held_to(self) -> int:
        return self.held_from + len(self.held)

    @property
    def is_running(self) -> bool:
        return self.reaped_at is None

    @property
    def is_over(self) -> bool:
        """Ended, and all that it wrote was read: nothing about it changes any more."""
        return self.reaped_at is not None and self.stdout.fd < 0

    def state(self) -> Params:
        state: Params = {
            "process": self.process,
            "stdin_offset": self.stdin_offset,
            "stdout_from": self.held_from,
            "stdout_to": self.held_to,
        }
        state.update(self.ending())
        return state

    def ending(self) -> Params:
        if not self.is_over:
            return {}
        if self.exit_signal is not None:
            return {"exit_signal": self.exit_signal}
        return {"exit_code": self.exit_code}

    # input

    def take(self, offset: int, data: bytes, eof: bool, answer: Callable[[Params], None]) -> None:
        """Append what is new of `data`, which begins at `offset` of the stream; answered once there is room again."""
        if offset > self.stdin_offset:
            raise Refused(
                SERVER_ERROR, "conflict", f"input has a gap: {self.stdin_offset} bytes were taken, not {offset}"
            )
        new = data[self.stdin_offset - offset :]
        if new and (self.eof or self.stdin.fd < 0):
            raise Refused(SERVER_ERROR, "conflict", "the process takes no more input")
        if new and len(self.unread) + len(new) > STDIN_BYTES_MAX:
            raise Refused(SERVER_ERROR, "too_many", "the process does not read its input", retryable=True)
        self.stdin_offset += len(new)
        self.unread += new
        self.eof = self.eof or eof
        taken = self.stdin_offset
        self.waiting.append(lambda: answer({"stdin_offset": taken}))
        self.write()

    def write(self) -> None:
        if self.stdin.fd >= 0 and self.unread:
            try:
                written = os.write(self.stdin.fd, memoryview(self.unread)[:READ_BYTES])
                del self.unread[:written]
            except BlockingIOError:
                pass
            except OSError:  # it closed its input, or died
                self.unread.clear()
                self.stdin.close()
        if self.eof and not self.unread:
            self.stdin.close()
        self.stdin.watch(bool(self.unread))
        if len(self.unread) <= STDIN_ANSWER_BYTES:
            waiting, self.waiting = self.waiting, []
            for answer in waiting:
                answer()

    # output

    def read(self) -> None:
        room = HELD_BYTES_MAX - len(self.held)
        if room > 0:
            data = self.stdout.read(min(READ_BYTES, room))
            if data:
                self.held += data
            elif data is not None:
                self.stdout.close()
        self.stdout.watch(len(self.held) < HELD_BYTES_MAX)

    def read_err(self) -> None:
        data = self.stderr.read(READ_BYTES) if self.stderr.fd >= 0 else None
        if data:
            self.err += data
            del self.err[:-STDERR_BYTES_MAX]
        elif data is not None:
            self.stderr.close()

    def acknowledge(self, offset: int) -> None:
        gone = min(offset, self.held_to) - self.held_from
        if gone > 0:
            del self.held[:gone]
            self.held_from += gone
            self.sent_to = max(self.sent_to, self.held_from)
        self.stdout.watch(len(self.held) < HELD_BYTES_MAX)

    def connected(self, acknowledged: int) -> None:
        """A new connection: everything that is not stored on the other side goes out again."""
        self.acknowledge(acknowledged)
        self.sent_to = self.held_from
        self.announced = False

    def next_output(self) -> Optional[Tuple[int, bytes]]:
        start = self.sent_to - self.held_from
        data = bytes(self.held[start : start + CHUNK_BYTES])
        if not data:
            return None
        offset = self.sent_to
        self.sent_to += len(data)
        return offset, data

    # end

    def reaped(self, status: int, now: float) -> None:
        self.reaped_at = now
        self.output_end = self.held_to + PIPE_BYTES_MAX
        if os.WIFSIGNALED(status):
            self.exit_signal = os.WTERMSIG(status)
        else:
            self.exit_code = os.WEXITSTATUS(status)
        self.unread.clear()
        self.stdin.close()
        self.write()

    @property
    def settles_at(self) -> Optional[float]:
        """When the rest of an ended process's output is no longer waited for."""
        if self.reaped_at is None or self.stdout.fd < 0 or len(self.held) >= HELD_BYTES_MAX:
            return None
        return self.reaped_at + DRAIN_WAIT_S

    def settle(self, now: float) -> None:
        """Once it has ended: read the rest, and stop waiting for strangers that hold its output open."""
        if self.reaped_at is None or self.stdout.fd < 0:
            return
        self.read_err()
        while self.stdout.fd >= 0 and len(self.held) < HELD_BYTES_MAX:
            before = len(self.held)
            self.read()
            if len(self.held) == before:
                break
        is_empty = len(self.held) < HELD_BYTES_MAX
        if (is_empty and now >= self.reaped_at + DRAIN_WAIT_S) or self.held_to >= self.output_end:
            self.stdout.close()
        if self.stdout.fd < 0:
            self.read_err()
            self.stderr.close()

    def kill(self, number: int) -> None:
        if self.is_running:
            try:
                os.killpg(self.pid, number)
            except OSError:
                pass

    def forget(self) -> None:
        for pipe in (self.stdin, self.stdout, self.stderr):
            pipe.close()


def spawn(argv: List[str], env: Dict[str, str], cwd: str) -> Tuple[int, int, int, int]:
    """Start a program as the leader of a session of its own: pid, stdin, stdout, stderr. Raises `Refused`."""
    pipes: List[Tuple[int, int]] = []
    try:
        for _ in range(4):
            pipes.append(os.pipe())  # noqa: PERF401 - what was made before one fails has to be known
        pid = os.fork()
    except OSError as problem:
        for pair in pipes:
            for fd in pair:
                os.close(fd)
        message = f"no process can be started now: {problem.strerror}"
        raise Refused(SERVER_ERROR, "unavailable", message, retryable=True) from None
    (in_read, in_write), (out_read, out_write), (err_read, err_write), (report_read, report_write) = pipes
    if pid == 0:
        become(argv, env, cwd, (in_read, out_write, err_write), report_write)
    for fd in (in_read, out_write, err_write, report_write):
        os.close(fd)
    report = os.read(report_read, 64)  # ends with the exec
    os.close(report_read)
    if not report:
        return pid, in_write, out_read, err_read
    os.waitpid(pid, 0)
    for fd in (in_write, out_read, err_read):
        os.close(fd)
    where, number = report.decode().split()
    what = f"the folder {cwd!r}" if where == "cwd" else f"the program {argv[0]!r}"
    kind = "not_found" if int(number) in (errno.ENOENT, errno.ENOTDIR) else "unavailable"
    raise Refused(SERVER_ERROR, kind, f"cannot use {what}: {os.strerror(int(number))}")


def become(argv: List[str], env: Dict[str, str], cwd: str, stdio: Tuple[int, int, int], report: int) -> None:
    """In the forked child: turn into the program, or say by `report` why not."""
    where = "cwd"
    try:
        os.setsid()
        for number, fd in enumerate(stdio):
            os.dup2(fd, number)
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGHUP, signal.SIGINT):
            signal.signal(ignored, signal.SIG_DFL)
        os.chdir(cwd)
        where = "program"
        os.execvpe(argv[0], argv, env)  # noqa: S606
    except OSError as problem:
        os.write(report, f"{where} {problem.errno}".encode())
    finally:
        os._exit(127)
