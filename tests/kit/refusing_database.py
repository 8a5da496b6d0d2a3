"""A database that takes nothing for a while, as one whose disk is full: of all units, or of those of some rooms."""

import asyncio
from typing import Any

from oubliette.server.errors import StorageFailed
from oubliette.server.storage.database import Database, Unit


class RefusingDatabase:
    """A unit is known by where it was written: `LiveSession._begin.<locals>.write`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._rooms: tuple[str, ...] = ()
        self._left = 0
        self._refused = asyncio.Event()

    def refuse(self, *rooms: str, times: int = 1_000_000) -> None:
        """From now on take no unit of these rooms, so many times."""
        self._rooms, self._left = rooms, times
        self._refused.clear()

    def take_all(self) -> None:
        self._rooms = ()

    async def refused(self) -> None:
        """Wait until something was."""
        async with asyncio.timeout(20):
            await self._refused.wait()

    def _check(self, unit: Unit[Any]) -> None:
        name = getattr(unit, "__qualname__", "")
        if self._left and any(room in name for room in self._rooms):
            self._left -= 1
            self._refused.set()
            raise StorageFailed("no space left")

    async def read(self, unit: Unit[Any]) -> Any:
        self._check(unit)
        return await self._database.read(unit)

    async def write(self, unit: Unit[Any]) -> Any:
        self._check(unit)
        return await self._database.write(unit)

    async def close(self) -> None:
        await self._database.close()
