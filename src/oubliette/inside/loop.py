"""The loop around the client: the agent's pipes, the server's socket and the clock, in one thread."""

from __future__ import annotations

import os
import select
import time

TYPE_CHECKING = False  # see link.py
if TYPE_CHECKING:
    from typing import Dict, Optional

    from oubliette.inside.client import Client
    from oubliette.inside.link import Link
    from oubliette.inside.stdio import Stdio

AGENT_UNREAD_MAX = 64 * 1024 * 1024  # an agent that does not read is not read from either
SERVER_PAUSE_AT = 16 * 1024 * 1024
GOODBYE_S = 0.5
SLEEP_MAX_S = 3600.0

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "none": 100}


class Stderr:
    """Log lines, dropped rather than waited for where nobody reads them."""

    def __init__(self, level: str) -> None:
        self._least = LEVELS.get(level.lower(), LEVELS["info"])
        self._poll = select.poll()
        self._poll.register(2, select.POLLOUT)

    def __call__(self, level: str, text: str) -> None:
        if LEVELS[level] < self._least:
            return
        line = "oubliette-client: %s: %s" % (level.upper(), " ".join(text.split()))
        try:
            # A pipe that is writable takes a page without blocking; descriptor 2 is often the agent's own, so it
            # must not be made non-blocking.
            if any(event & select.POLLOUT for _, event in self._poll.poll(0)):
                os.write(2, line.encode("utf-8", "replace")[:1000] + b"\n")
        except OSError:
            pass


def serve(client: Client, link: Link, stdio: Stdio) -> None:
    """Carry lines and frames until the agent is gone."""
    poller = select.poll()
    masks: Dict[int, int] = {}
    monotonic = time.monotonic
    now = monotonic()
    while not stdio.has_ended:
        link.tick(now)
        client.tick(now)
        _write(client, link, stdio, now)
        socket_fd = link.fileno()
        wanted = _interests(link, stdio, socket_fd)
        if wanted != masks:
            for fd in masks.keys() - wanted.keys():
                poller.unregister(fd)
            for fd, mask in wanted.items():
                poller.register(fd, mask)
            masks = wanted
        ready = poller.poll(_wait_ms(link.wake_at, client.wake_at, now))
        now = client.now = monotonic()
        for fd, event in sorted(ready, reverse=True):  # the server first: a lost link is known before more is sent
            if fd == 0:
                _read_agent(client, stdio)
            elif fd == socket_fd and event & ~select.POLLOUT:
                link.readable(now)


def say_goodbye(client: Client, link: Link, stdio: Stdio) -> None:
    """Write what is left, for a moment at most: nobody may be reading."""
    client.finish("the agent is gone")
    until = time.monotonic() + GOODBYE_S
    while True:
        now = time.monotonic()
        _write(client, link, stdio, now)
        poller = select.poll()
        if link.out and link.fileno() >= 0:
            poller.register(link.fileno(), select.POLLOUT)
        elif not stdio.out:
            return
        if stdio.out:
            poller.register(1, select.POLLOUT)
        if now >= until or not poller.poll(max(1, int((until - now) * 1000))):
            return


def _interests(link: Link, stdio: Stdio, socket_fd: int) -> Dict[int, int]:
    wanted = {0: select.POLLIN if len(stdio.out) < AGENT_UNREAD_MAX else 0}
    if stdio.out:
        wanted[1] = select.POLLOUT
    if socket_fd >= 0:
        reads = select.POLLIN if len(stdio.out) < SERVER_PAUSE_AT else 0
        wanted[socket_fd] = reads | (select.POLLOUT if link.out else 0)
    return wanted


def _write(client: Client, link: Link, stdio: Stdio, now: float) -> None:
    out = client.agent.out
    if out:
        stdio.write("".join(out))
        out.clear()
    if stdio.out:
        stdio.flush()
    if link.out:
        link.writable(now)


def _read_agent(client: Client, stdio: Stdio) -> None:
    for line in stdio.read():
        client.agent.line(line)
    while stdio.too_long:
        stdio.too_long -= 1
        client.agent.line_too_long()


def _wait_ms(first: Optional[float], second: Optional[float], now: float) -> Optional[int]:
    due = first if second is None else second if first is None else min(first, second)
    return None if due is None else max(0, int(min(due - now, SLEEP_MAX_S) * 1000) + 1)
