"""A database that suspends where the embedded one never does, and tries each unit more than once.

The contract says that a unit may run anywhere, wait at every statement and be tried again; this one does all of it,
over a real file, so that code which relies on the embedded database's manners is found out.
"""

import asyncio
import random
import sqlite3
from pathlib import Path
from typing import Any

from oubliette.server.storage.database import Row, Unit
from oubliette.server.storage.sqlite import SqliteDatabase


class _SuspendingTx:
    def __init__(self, connection: sqlite3.Connection, pause: Any) -> None:
        self._connection = connection
        self._pause = pause

    async def one(self, sql: str, *values: Any) -> Row | None:
        await self._pause()
        found: Row | None = self._connection.execute(sql, values).fetchone()
        await self._pause()
        return found

    async def all(self, sql: str, *values: Any) -> list[Row]:
        await self._pause()
        return self._connection.execute(sql, values).fetchall()

    async def run(self, sql: str, *values: Any) -> int:
        await self._pause()
        return self._connection.execute(sql, values).rowcount

    async def add(self, sql: str, *values: Any) -> None:
        await self.run(sql, *values)


class SuspendingDatabase:
    def __init__(self, path: Path, *, seed: int = 0, tries: int = 2) -> None:
        self._maker = SqliteDatabase(path)  # makes the schema, and the settings of the file
        self._random = random.Random(seed)
        self._tries = tries
        self._writer = sqlite3.connect(path, isolation_level=None)
        self._writer.execute("PRAGMA foreign_keys=ON")
        self._reader = sqlite3.connect(path, isolation_level=None)
        self._writing = asyncio.Lock()
        self._reading = asyncio.Lock()

    async def _pause(self) -> None:
        for _ in range(self._random.randrange(4)):
            await asyncio.sleep(0)

    async def read(self, unit: Unit[Any]) -> Any:
        await self._pause()
        async with self._reading:
            self._reader.execute("BEGIN")
            try:
                value = await unit(_SuspendingTx(self._reader, self._pause))
            finally:
                self._reader.execute("COMMIT")
        await self._pause()
        return value

    async def write(self, unit: Unit[Any]) -> Any:
        await self._pause()
        value: Any = None
        async with self._writing:
            for left in reversed(range(self._tries)):
                self._writer.execute("BEGIN IMMEDIATE")
                try:
                    value = await unit(_SuspendingTx(self._writer, self._pause))
                except BaseException:
                    self._writer.execute("ROLLBACK")
                    raise
                self._writer.execute("ROLLBACK" if left else "COMMIT")
        await self._pause()
        return value

    async def close(self) -> None:
        async with self._writing, self._reading:
            self._writer.close()
            self._reader.close()
        await self._maker.close()
