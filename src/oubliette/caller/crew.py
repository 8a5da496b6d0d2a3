"""The tasks that work beside the body of an `async with`: they end with it, and a bug of one ends no other."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)

DISMISS_S = 5.0


class Crew:
    """No `TaskGroup`: that one waits without end for a tool that will not end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_dismissed = False

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Do this beside the rest; nothing of it once the crew is dismissed."""
        if self._is_dismissed:
            work.close()
            work = _nothing()
        task = asyncio.get_running_loop().create_task(self._guarded(work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # one that is cancelled before its first step never ran
        return task

    async def dismiss(self) -> None:
        """Cancel all and wait until they are gone, within reason."""
        self._is_dismissed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            _, stubborn = await asyncio.wait(self._tasks, timeout=DISMISS_S)
            for task in stubborn:
                logger.error("a task of the caller was cancelled and does not end: %s", task.get_name())

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:
            logger.exception("a task of the caller failed")


async def _nothing() -> None:
    pass
