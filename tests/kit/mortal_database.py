"""A database whose server can be made to die at a chosen commit: before it happened, or after it and before anybody
heard of it. A write that dies never returns, as in a killed process.
"""

import asyncio
from pathlib import Path
from typing import Any, Literal

from oubliette.server.storage.database import Unit
from oubliette.server.storage.sqlite import SqliteDatabase


class MortalDatabase:
    def __init__(
        self,
        path: Path,
        *,
        dies_at: int | None = None,
        when: Literal["before", "after"] = "after",
        suspends: bool = False,
    ) -> None:
        self._database = SqliteDatabase(path)
        self.dies_at = dies_at
        self._suspends = suspends
        self._when = when
        self.commits = 0
        self.died = asyncio.Event()

    async def read(self, unit: Unit[Any]) -> Any:
        if self.died.is_set():
            await self._never()
        await self._suspend()
        read = await self._database.read(unit)
        await self._suspend()
        return read

    async def write(self, unit: Unit[Any]) -> Any:
        self.commits += 1
        if self.died.is_set():
            await self._never()
        await self._suspend()
        if self.commits == self.dies_at:
            if self._when == "after":
                await self._database.write(unit)
            self.died.set()
            await self._never()
        written = await self._database.write(unit)
        await self._suspend()
        return written

    async def _suspend(self) -> None:
        """As a database at the other end of a wire would."""
        for _ in range(3 if self._suspends else 0):
            await asyncio.sleep(0)

    async def _never(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        await self._database.close()
