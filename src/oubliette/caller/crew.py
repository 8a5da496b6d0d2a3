"""The tasks that work beside the body of an `async with`: they end with it, and a bug of one ends no other."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)


class Crew:
    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self) -> None:
        await self._group.__aenter__()

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self._group.create_task(self._guarded(work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def dismiss(self) -> None:
        """Cancel all and wait until they are gone."""
        for task in list(self._tasks):
            task.cancel()
        await self._group.__aexit__(None, None, None)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:
            logger.exception("a task of the caller failed")
