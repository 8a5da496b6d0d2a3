"""What the server itself owes to a session is tried again until the database takes it: nobody else would ask again."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from oubliette.server.errors import StorageFailed

logger = logging.getLogger(__name__)

AGAIN_S = 1.0

T = TypeVar("T")


async def insist(session_id: str, step: Callable[[], Awaitable[T]]) -> T:
    """Take a step, from its beginning again where the database failed in it. It ends with the task that takes it."""
    is_first = True
    while True:
        try:
            return await step()
        except StorageFailed as failure:
            if is_first:
                extra = {"session_id": session_id, "reason": failure.message}
                logger.warning("the database failed a session: it is tried again until it takes it", extra=extra)
            is_first = False
            await asyncio.sleep(AGAIN_S)
