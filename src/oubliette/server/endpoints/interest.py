"""Whether anybody still wants the answer to a request out of a box."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from oubliette.server.errors import CallCancelled


class Interest:
    """One request's: lost with its connection, or by a `cancel` of its call key.

    What only reads, or waits for what a write began, ends with it; a write and a call of a caller's tool do not.
    """

    def __init__(self) -> None:
        self.call_key: str | None = None
        self._lost: str | None = None
        self._scope: asyncio.Timeout | None = None

    def lose(self, reason: str) -> None:
        if self._lost is None:
            self._lost = reason
            if self._scope is not None:
                self._scope.reschedule(0)

    @asynccontextmanager
    async def lasting(self) -> AsyncGenerator[None]:
        """Go on for as long as the answer is wanted. Raises `CallCancelled` where it is not any more."""
        if self._lost is not None:
            raise CallCancelled(self._lost)
        try:
            async with asyncio.timeout(None) as self._scope:
                yield
        except TimeoutError:
            if self._lost is None:
                raise
            raise CallCancelled(self._lost) from None
        finally:
            self._scope = None
