"""Callers in processes of their own, to be killed: ours and the SDK's.

Ours, `python -m tests.kit.lender URL FILE SESSION GO`, lends one tool, `work`, which writes a line to FILE each time
that it really runs. Given a session it takes that one up again. Given GO, the tool tells of its progress, and ends when
there is a file of that name. It says `ready` once it can be asked.
"""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from oubliette import Caller
from tests.kit.peer_environments import PEERS, python_peer

ROOT = Path(__file__).parents[2]


class Lender:
    """The process, as a test sees it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


@asynccontextmanager
async def lending(
    url: str, token: str, ran: Path, session_id: str = "", go: Path | None = None
) -> AsyncGenerator[Lender]:
    """A running lender; killed at the end if it was not before."""
    command = (sys.executable, "-m", "tests.kit.lender", url, str(ran), session_id, str(go or ""))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    async with _running(command, token, environment) as lender:
        yield lender


@asynccontextmanager
async def working(
    url: str, token: str, ran: Path, session_id: str, mode: str, go: Path | None = None
) -> AsyncGenerator[Lender]:
    """The same on the official SDK, in the era that `mode` says: it does the work of a session whose tool is lent."""
    program = (str(python_peer("mcp-2.3")), str(PEERS / "python" / "worker_2x.py"))
    command = (*program, url, session_id, str(ran), mode, str(go or ""))
    async with _running(command, token, os.environ) as worker:
        yield worker


@asynccontextmanager
async def _running(command: Sequence[str], token: str, environment: Mapping[str, str]) -> AsyncGenerator[Lender]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe)
    lender = Lender(process)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(token.encode() + b"\n")
        async with asyncio.timeout(20):
            assert await process.stdout.readline() == b"ready\n"
        yield lender
    finally:
        await lender.kill()


async def main(url: str, ran: Path, session_id: str, go: str) -> None:
    async with Caller(url, sys.stdin.readline().strip(), caller_id="ant") as caller:

        @caller.tool
        async def work(n: int) -> dict[str, int]:
            """Do it, and leave a line."""
            with ran.open("a") as file:
                file.write(f"{n}\n")
            if go:
                caller.progress(1, extend_s=300)
                while not Path(go).exists():
                    await asyncio.sleep(0.02)
            return {"did": n}

        if session_id:
            await caller.attach(session_id)
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
