"""A database whose server can be made to die at a chosen commit: before it happened, or after it and before anybody
heard of it. A write that dies never returns, as in a killed process.
"""

import asyncio
from pathlib import Path
from typing import Any, Literal

from oubliette.server.storage.database import Unit
from oubliette.server.storage.sqlite import SqliteDatabase


class MortalDatabase:
    def __init__(self, path: Path, *, dies_at: int | None = None, when: Literal["before", "after"] = "after") -> None:
        self._database = SqliteDatabase(path)
        self._dies_at = dies_at
        self._when = when
        self.commits = 0
        self.died = asyncio.Event()

    async def read(self, unit: Unit[Any]) -> Any:
        if self.died.is_set():
            await self._never()
        return await self._database.read(unit)

    async def write(self, unit: Unit[Any]) -> Any:
        self.commits += 1
        if self.died.is_set():
            await self._never()
        if self.commits == self._dies_at:
            if self._when == "after":
                await self._database.write(unit)
            self.died.set()
            await self._never()
        return await self._database.write(unit)

    async def _never(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        await self._database.close()
