"""Driving a client's stdio as an agent would, and reading what it cost whom."""

import os
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

# What is relayed: the arguments of a tool that sends a message.
ARGUMENTS = {"message": "The meeting is moved to half past three.", "recipients": ["+15550100", "+15550101"]}


class Line(msgspec.Struct):
    id: int | None = None
    error: Any = None
    result: Any = None


decode = msgspec.json.Decoder(Line).decode


class Agent:
    """One end of a client's stdio; it writes calls and reads results, nothing else."""

    def __init__(self, argv: Sequence[str], env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, bufsize=0
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._in = self.process.stdin.fileno()
        self._out = self.process.stdout.fileno()
        self._rest = b""
        self._id = 0

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self, method: str, params: Any) -> Any:
        """One request, its result."""
        self._id += 1
        os.write(self._in, msgspec.json.encode(request(self._id, method, params)) + b"\n")
        while True:
            for line in self._lines():
                if line.id == self._id:
                    assert line.error is None, line.error
                    return line.result

    def tell(self, method: str) -> None:
        os.write(self._in, msgspec.json.encode({"jsonrpc": "2.0", "method": method}) + b"\n")

    def calls(self, count: int, in_flight: int, tool: str) -> "Measured":
        """Make so many calls with so many open at a time."""
        pc = time.perf_counter
        sent_at: dict[int, float] = {}
        took: list[float] = []
        left = count
        first = pc()

        def send(number: int) -> None:
            nonlocal left
            lines: list[bytes] = []
            for _ in range(min(number, left)):
                left -= 1
                self._id += 1
                params = {"name": tool, "arguments": ARGUMENTS}
                lines.append(msgspec.json.encode(request(self._id, "tools/call", params)))
                sent_at[self._id] = pc()
            if lines:
                os.write(self._in, b"\n".join(lines) + b"\n")

        send(in_flight)
        while sent_at:
            done = 0
            for line in self._lines():
                if line.id is None:
                    continue
                now = pc()
                took.append(now - sent_at.pop(line.id))
                done += 1
                if line.error is not None or line.result.get("isError"):
                    raise RuntimeError(f"a call failed: {line.error or line.result}")
            send(done)
        return Measured(sorted(took), pc() - first)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _lines(self) -> list[Line]:
        data = os.read(self._out, 1 << 18)
        if not data:
            raise RuntimeError("the client ended")
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [decode(line) for line in lines]


@dataclass(frozen=True, slots=True)
class Measured:
    took_s: list[float]
    wall_s: float

    @property
    def median_ms(self) -> float:
        return statistics.median(self.took_s) * 1e3

    @property
    def p99_ms(self) -> float:
        return self.took_s[int(len(self.took_s) * 0.99)] * 1e3

    @property
    def per_s(self) -> float:
        return len(self.took_s) / self.wall_s


@dataclass
class Contestant:
    """Something that relays: an agent's end of it, and the processes to watch."""

    name: str
    agent: Agent
    tool: str
    pids: dict[str, int]
    alone: list[Measured] = field(default_factory=list[Measured])
    crowded: list[Measured] = field(default_factory=list[Measured])
    alone_cpu: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    crowded_cpu: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    lost: int = 0  # rounds in which somebody lost a connection: they tell of that, not of a relayed call

    @property
    def cpu(self) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
        return self.alone_cpu, self.crowded_cpu

    def warm_up(self, in_flight: int) -> None:
        self.agent.calls(100, 1, self.tool)
        self.agent.calls(500, in_flight, self.tool)

    def round(self, alone: int, crowded: int, in_flight: int) -> None:
        connected = {pid: sockets(pid) for pid in self.pids.values()}
        for count, width, results, cpu in (
            (alone, 1, self.alone, self.alone_cpu),
            (crowded, in_flight, self.crowded, self.crowded_cpu),
        ):
            before = {role: cpu_s(pid) for role, pid in self.pids.items()}
            results.append(self.agent.calls(count, width, self.tool))
            cpu.append({role: (cpu_s(pid) - before[role]) / count * 1e6 for role, pid in self.pids.items()})
        self.lost += any(before - sockets(pid) for pid, before in connected.items())


def request(request_id: int, method: str, params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}


def sockets(pid: int) -> set[str]:
    """The open sockets of a process, by their inodes."""
    found: set[str] = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.add(str(descriptor.readlink()))
        except FileNotFoundError:
            continue
    return {one for one in found if one.startswith("socket:")}


def cpu_s(pid: int) -> float:
    """CPU seconds of a process's living threads, to the nanosecond that the scheduler keeps."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((thread / "schedstat").read_text().split()[0])
        except FileNotFoundError:
            continue
    return total / 1e9
