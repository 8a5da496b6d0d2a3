"""A server process that can be told to die, or to stand still, at a named commit point.

Run as `python -m tests.kit.marked_server SETTINGS MARK`: SETTINGS is the JSON of the flags, MARK is empty, or `name`
or `name@n`, the n-th passing of a commit point, at which the process kills itself as a power cut would. With an `=`
behind it the process stops there instead, says so on its output, and goes on when it is sent a line.
"""

import asyncio
import json
import os
import signal
import sys
from collections import Counter

import uvloop

from oubliette.server.app import Ready, serve
from oubliette.server.config import load


def main() -> None:
    flags, wanted = json.loads(sys.argv[1]), sys.argv[2]
    holds, wanted = wanted.endswith("="), wanted.rstrip("=")
    name, _, number = wanted.rpartition("@") if "@" in wanted else (wanted, "", "1")
    passed: Counter[str] = Counter()

    def mark(point: str) -> None:
        passed[point] += 1
        if point != name or passed[point] != int(number):
            return
        if not holds:
            os.kill(os.getpid(), signal.SIGKILL)
        # Nothing else of this process happens meanwhile: that is the point.
        print(json.dumps({"at": point}), flush=True)
        sys.stdin.readline()

    def ready(started: Ready) -> None:
        print(json.dumps({"url": started.url, "first_token": started.first_token}), flush=True)

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(serve(load("", {}, flags), ready=ready, mark=mark))


if __name__ == "__main__":
    main()
