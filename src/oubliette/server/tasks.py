"""Tasks with an owner whose bugs end themselves and nothing else."""

import asyncio
import logging
from collections.abc import Coroutine
from contextvars import Context
from typing import Any, TypeVar

from oubliette.server.errors import OublietteError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Tasks(asyncio.TaskGroup):
    """A task group whose tasks report and do not raise."""

    def create_task(  # pyright: ignore[reportIncompatibleMethodOverride] - coroutines are all that we run
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        return super().create_task(_reporting(coro), name=name, context=context)


async def _reporting(work: Coroutine[Any, Any, T]) -> T | None:
    try:
        return await work
    except OublietteError as failure:
        logger.warning("a task failed", extra={"kind": failure.kind, "reason": failure.message})
    except Exception:
        logger.exception("a task failed")
    return None
