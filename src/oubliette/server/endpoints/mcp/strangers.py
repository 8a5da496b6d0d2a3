"""Who was turned away at the door, in the audit: who may not come in may not fill the disk either."""

import asyncio
from contextlib import suppress
from typing import Final

from oubliette.server import audit
from oubliette.server.clock import Clock
from oubliette.server.errors import StorageFailed, Unauthenticated
from oubliette.server.storage.database import Database, Tx
from oubliette.server.tasks import Tasks

NOTED_EVERY_S: Final = 1.0


class Strangers:
    """Counts them, and writes one row a second at most that says how many. The last ones are not left out."""

    def __init__(self, database: Database, clock: Clock, tasks: Tasks) -> None:
        self._database = database
        self._clock = clock
        self._tasks = tasks
        self._count = 0  # of whom no row tells yet
        self._closing = asyncio.Event()
        self._noting: asyncio.Task[None] | None = None

    def turned_away(self) -> None:
        self._count += 1
        if self._noting is None or self._noting.done():
            self._noting = self._tasks.create_task(self._note_all(), name="strangers")

    async def close(self) -> None:
        """Nobody comes any more: write down whom no row tells of."""
        self._closing.set()
        if self._noting is not None:
            await asyncio.wait((self._noting,))

    async def _note_all(self) -> None:
        while self._count:
            await self._note()
            with suppress(TimeoutError):
                async with asyncio.timeout(NOTED_EVERY_S):
                    await self._closing.wait()

    async def _note(self) -> None:
        count, self._count = self._count, 0
        outcome = f"refused: {Unauthenticated.kind}" + (f", {count} times" if count > 1 else "")
        entry, at = audit.entry(None, door="mcp", operation="authenticate", outcome=outcome), self._clock.now()

        async def write(tx: Tx) -> None:
            await audit.write(tx, at, entry)

        try:
            await self._database.write(write)
        except StorageFailed:
            self._count += count  # told with those who come next
            raise
