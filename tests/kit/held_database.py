"""A database whose first write is committed and known to everybody, except to who asked for it: until it is let go."""

import asyncio
from typing import Any

from oubliette.server.storage.database import Database, Unit


class HeldDatabase:
    def __init__(self, database: Database) -> None:
        self._database = database
        self.committed = asyncio.Event()
        self._released = asyncio.Event()

    async def read(self, unit: Unit[Any]) -> Any:
        return await self._database.read(unit)

    async def write(self, unit: Unit[Any]) -> Any:
        first = not self.committed.is_set()
        value = await self._database.write(unit)
        self.committed.set()
        if first:
            await self._released.wait()
        return value

    def release(self) -> None:
        self._released.set()

    async def close(self) -> None:
        await self._database.close()
