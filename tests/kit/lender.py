"""A caller in a process of its own, to be killed: `python -m tests.kit.lender URL FILE SESSION`.

It lends one tool, `work`, which writes a line to FILE each time that it really runs. Given a session it takes that
one up again. It says `ready` once it can be asked.
"""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from oubliette import Caller

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
async def lending(url: str, token: str, ran: Path, session_id: str = "") -> AsyncGenerator[Lender]:
    """A running lender; killed at the end if it was not before."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.kit.lender", url, str(ran), session_id),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "LENDER_TOKEN": token},
        stdout=asyncio.subprocess.PIPE,
    )
    lender = Lender(process)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(20):
            assert await process.stdout.readline() == b"ready\n"
        yield lender
    finally:
        await lender.kill()


async def main(url: str, ran: Path, session_id: str) -> None:
    async with Caller(url, os.environ["LENDER_TOKEN"], caller_id="ant") as caller:

        @caller.tool
        def work(n: int) -> dict[str, int]:
            """Do it, and leave a line."""
            with ran.open("a") as file:
                file.write(f"{n}\n")
            return {"did": n}

        if session_id:
            await caller.attach(session_id)
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
