"""What the README tells a person to type works, in the order in which it stands there."""

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.test_documents import blocks, read

ROOT = Path(__file__).parent.parent
# Commands with tests of their own, or that would start themselves again.
ELSEWHERE = ("./run demo", "./run test", "./run bench", "./run mutants")
UP = "./run up"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


@contextlib.contextmanager
def running(env: dict[str, str]) -> Generator[str]:
    """`./run up` in the background, and what it said when it was ready."""
    with subprocess.Popen(
        UP.split(), cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as server:
        try:
            yield said_until(server, "Ctrl-C stops")
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(20) == 0


def said_until(server: subprocess.Popen[bytes], last: str, within_s: float = 30) -> str:
    assert server.stdout is not None
    said = b""
    ends = time.monotonic() + within_s
    while last.encode() not in said:
        ready, _, _ = select.select([server.stdout], [], [], ends - time.monotonic())
        piece = os.read(server.stdout.fileno(), 65536) if ready else b""
        assert piece, f"not ready: {said.decode()}"
        said += piece
    return said.decode()


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    keep = {name: value for name, value in os.environ.items() if not name.startswith("OUBLIETTE_")}
    return keep | {"OUBLIETTE_HOME": str(tmp_path / "home"), "OUBLIETTE_PORT": str(free_port())}


def test_what_the_readme_tells_to_type_works(env: dict[str, str]):
    shown = blocks(read("README.md"), "sh")
    typed = [block for block in shown if not block.startswith((*ELSEWHERE, UP))]
    assert sum(block == f"{UP}\n" for block in shown) == 1
    assert typed
    with running(env) as said:
        assert f"http://127.0.0.1:{env['OUBLIETTE_PORT']}/mcp" in said
        assert re.search(r"^  oub_[0-9a-f]{64}$", said, re.MULTILINE)
        out = ""
        for block in typed:
            script = block.replace(":8080", f":{env['OUBLIETTE_PORT']}")
            done = subprocess.run(["sh", "-eu", "-c", script], cwd=ROOT, env=env, capture_output=True, timeout=60)
            assert done.returncode == 0, (script, done.stderr.decode())
            out += done.stdout.decode()
    assert "the droid says: hello\n" in out
    assert "Told: sent\n" in out
