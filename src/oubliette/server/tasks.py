"""Tasks with an owner whose bugs end themselves and nothing else."""

import asyncio
import logging
from collections.abc import Coroutine
from contextvars import Context
from types import TracebackType
from typing import Any, TypeVar

from oubliette.server.errors import OublietteError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Tasks(asyncio.TaskGroup):
    """A task group whose tasks report and do not raise; once it is left, what is asked of it is dropped."""

    _left = False

    def create_task(  # pyright: ignore[reportIncompatibleMethodOverride] - coroutines are all that we run
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        if self._left:
            coro.close()
            return asyncio.get_running_loop().create_task(_nothing())
        return super().create_task(_reporting(coro), name=name, context=context)

    async def to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Do what must not stop half-way in a task of ours: who waits for it may leave. What it raises is theirs."""
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        async def do() -> None:
            try:
                outcome.set_result(await work)
            except Exception as failure:
                outcome.set_exception(failure)
                outcome.exception()  # it may be that nobody waits any more
            finally:
                outcome.cancel()

        self.create_task(do())
        if self._left:
            work.close()
            outcome.cancel()
        return await asyncio.shield(outcome)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the tasks. As none of them raises, what the body raised is all there is: it comes out as it is."""
        self._left = True
        try:
            await super().__aexit__(kind, error, trace)
        except BaseExceptionGroup:
            if error is None:
                raise
            raise error from error.__cause__


async def _nothing() -> None:
    """What becomes of work that comes too late."""


async def _reporting(work: Coroutine[Any, Any, T]) -> T | None:
    try:
        return await work
    except OublietteError as failure:
        logger.warning("a task failed", extra={"kind": failure.kind, "reason": failure.message})
    except Exception:
        logger.exception("a task failed")
    return None
