"""A keeper as a plain process with a door of its own, for tests of the keeper alone."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

from oubliette.server.containers.doors import Doors
from oubliette.server.containers.inside import pack
from tests.kit.keeper_server import KeeperServer, hang_up


class KeptBox:
    def __init__(self, process: asyncio.subprocess.Process, doors: Doors, folder: Path, facts: bytes) -> None:
        self.process = process
        self.facts = facts
        self._doors = doors
        self._folder = folder

    async def open_door(self, server: KeeperServer) -> None:
        await self._doors.open("box", self._folder, "relay-key", server.accept)

    def close_door(self) -> None:
        self._doors.close("box")

    async def ended(self) -> int:
        async with asyncio.timeout(20):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def kept_box(
    folder: Path,
    server: KeeperServer,
    *,
    key: str | None = None,
    abandoned_after_s: float = 60,
    is_open: bool = True,
    python: str = sys.executable,
) -> AsyncGenerator[KeptBox]:
    """A running keeper; ended with everything that it started, however the test ends."""
    doors = Doors()
    folder.mkdir(exist_ok=True)
    if is_open:
        await doors.open("box", folder, "relay-key", server.accept)
    read, write = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(python, "-I", "-S", str(pack(folder / "programs")), "keeper", "--abandoned-after", str(abandoned_after_s)),
        stdin=read,
        stdout=asyncio.subprocess.PIPE,
        env={"OUBLIETTE_SOCKET": str(folder / "relay.sock"), "PATH": os.environ["PATH"]},
        start_new_session=True,
    )
    os.close(read)
    os.write(write, (server.key if key is None else key).encode() + b"\n")
    os.close(write)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(20):
            facts = await process.stdout.readline()
        yield KeptBox(process, doors, folder, facts)
    finally:
        doors.close_all()
        if process.returncode is None:
            process.terminate()
        try:
            async with asyncio.timeout(10):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        await hang_up()
