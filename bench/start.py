"""How long starting takes: the client in the box, and a session until its droid has its tools.

    ./run bench start [--rounds N]

The client is started as a box starts it; beside it, in the same rounds, a Python that does nothing and a tool server
on the `mcp` SDK. Memory is the resident set once `initialize` is answered. A session is measured from the caller's
message until the droid's first call reaches the caller, which is after its first `tools/list`.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.kit.peer_environments import python_peer
from tests.kit.server import ServerProcess

from bench.work import Agent
from oubliette import Caller
from oubliette.server.containers.inside import pack

HELLO = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "bench", "version": "0"}}
# What we aim at.
CLIENT_RATIO = 5.0  # to a Python that does nothing
MEMORY_RATIO = 1 / 3  # to the SDK's server
SESSION_S = 1.0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args(arguments).rounds
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        good = clients(Path(folder), rounds)
        return 0 if asyncio.run(sessions(Path(folder), rounds)) and good else 1


def clients(folder: Path, rounds: int) -> bool:
    program = str(pack(folder))
    sdk_server = [str(python_peer("mcp-2.3")), str(Path(__file__).with_name("sdk_stdio.py"))]
    contestants: dict[str, Callable[[], tuple[float, float]]] = {
        "python -c pass": lambda: nothing([sys.executable, "-c", "pass"]),
        "oubliette-client": lambda: server([sys.executable, "-I", "-S", program, "client"]),
        "mcp SDK, low level": lambda: server(sdk_server),
    }
    took: dict[str, list[float]] = {name: [] for name in contestants}
    memory: dict[str, float] = {}
    for _ in range(rounds):
        for name, start in contestants.items():
            seconds, memory[name] = start()
            took[name].append(seconds)
    print(f"{'':22}{'median ms':>12}{'least':>10}{'most':>10}{'RSS MiB':>10}")
    for name, seconds in took.items():
        cells = (statistics.median(seconds), min(seconds), max(seconds))
        rss = f"{memory[name]:.1f}" if memory[name] else ""
        print(f"{name:22}{cells[0] * 1e3:12.1f}{cells[1] * 1e3:10.1f}{cells[2] * 1e3:10.1f}{rss:>10}")
    bare, client, sdk = contestants
    ratio = statistics.median(mine / least for mine, least in zip(took[client], took[bare], strict=True))
    lean = memory[client] / memory[sdk]
    verdict = [
        said("client / python -c pass", ratio, CLIENT_RATIO),
        said("client's memory / the SDK's", lean, MEMORY_RATIO),
    ]
    return all(verdict)


def nothing(argv: Sequence[str]) -> tuple[float, float]:
    began = time.perf_counter()
    subprocess.run(argv, check=True)
    return time.perf_counter() - began, 0.0


def server(argv: Sequence[str]) -> tuple[float, float]:
    """Start it and wait for its answer to `initialize`."""
    began = time.perf_counter()
    agent = Agent(argv, {"PATH": os.defpath, "OUBLIETTE_SOCKET": "/nonexistent/relay.sock"})
    try:
        agent.ask("initialize", HELLO)
        return time.perf_counter() - began, resident_mib(agent.pid)
    finally:
        agent.close()


def resident_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("the kernel does not tell a resident set")


async def sessions(folder: Path, rounds: int) -> bool:
    took: list[float] = []
    async with ServerProcess(folder / "home") as running, Caller(running.url, running.token, "ant") as caller:
        arrived = asyncio.Event()

        @caller.tool
        def here() -> None:
            arrived.set()

        project = (await caller.call("project_create", name="bench"))["id"]
        for _ in range(rounds):
            arrived.clear()
            began = time.perf_counter()
            session = await caller.start(project, '<<plan [{"tool": "ant_here"}]>>')
            async with asyncio.timeout(30):
                await arrived.wait()
            took.append(time.perf_counter() - began)
            await session.end()
    print(f"\n{'message to first call':22}{statistics.median(took) * 1e3:12.1f}", end="")
    print(f"{min(took) * 1e3:10.1f}{max(took) * 1e3:10.1f}   (in a box by bubblewrap)")
    return said("a session's first tools/list, s", max(took), SESSION_S)


def said(name: str, value: float, goal: float) -> bool:
    print(f"{'reached' if value <= goal else 'MISSED':9}{name}: {value:.2f}, the goal is at most {goal:.2f}")
    return value <= goal


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
