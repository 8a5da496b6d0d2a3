"""Starting a keeper as a process of this host: the key goes in by a pipe, one line of facts comes out by another."""

import asyncio
import contextlib
import fcntl
import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_LINE_BYTES_MAX = 64 * 1024
# The started program's descriptors are numbered from 0; ours are moved out of their way.
_OWN_DESCRIPTORS_FROM = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to start; `files` are handed over as descriptors of these numbers, `news` is one that it writes to."""

    argv: list[str]
    env: Mapping[str, str]
    cwd: str | None = None
    files: Mapping[int, bytes] = field(default_factory=dict[int, bytes])
    news: int | None = None


@dataclass(frozen=True, slots=True)
class Launched:
    pid: int
    facts: int  # where the line of facts comes from
    news: int | None

    def close(self) -> None:
        for fd in (self.facts, self.news):
            if fd is not None:
                os.close(fd)


def start(launch: Launch, key: str, log: Path) -> Launched:
    """Start it in a session of its own, so that it outlives us; the key is written before this returns."""
    with contextlib.ExitStack() as ours:
        key_read, key_write = _pipe()
        ours.callback(os.close, key_read)
        ours.callback(os.close, key_write)
        facts_read, facts_write = _pipe()
        ours.callback(os.close, facts_write)
        log_fd = _high(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
        ours.callback(os.close, log_fd)
        given = {0: key_read, 1: facts_write, 2: log_fd}
        for number, content in launch.files.items():
            given[number] = _memory(content)
            ours.callback(os.close, given[number])
        news_read = None
        if launch.news is not None:
            news_read, given[launch.news] = _pipe()
            ours.callback(os.close, given[launch.news])
        os.write(key_write, key.encode() + b"\n")
        try:
            pid = os.posix_spawn(
                launch.argv[0],
                launch.argv,
                launch.env,
                file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in given.items()],
                setsid=True,
                setsigmask=[],
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGHUP],
            )
        except BaseException:
            Launched(0, facts_read, news_read).close()
            raise
        for fd in (facts_read, news_read):
            if fd is not None:
                os.set_blocking(fd, False)
        return Launched(pid, facts_read, news_read)


async def read_line(fd: int) -> dict[str, Any] | None:
    """One line of JSON; None if the other side ended without it."""
    loop = asyncio.get_running_loop()
    text = b""
    while b"\n" not in text and len(text) < _LINE_BYTES_MAX:
        ready = loop.create_future()
        loop.add_reader(fd, lambda ready=ready: ready.done() or ready.set_result(None))
        try:
            await ready
        finally:
            loop.remove_reader(fd)
        data = os.read(fd, _LINE_BYTES_MAX)
        if not data:
            return None
        text += data
    try:
        return json.loads(text)
    except ValueError:
        return None


def _pipe() -> tuple[int, int]:
    read, write = os.pipe2(os.O_CLOEXEC)
    return _high(read), _high(write)


def _memory(content: bytes) -> int:
    fd = _high(os.memfd_create("oubliette", os.MFD_CLOEXEC))
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _high(fd: int) -> int:
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _OWN_DESCRIPTORS_FROM)
    os.close(fd)
    return high
