"""Being woken when a session's log grows.

A follower is told (session, last index) after the commit and reads rows from its own cursor: there is no queue of
events to fall behind or to lose a seam. A wake may be lost, doubled or late; whoever waits looks again every second.
"""

import asyncio
import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

Wake = Callable[[str, int], None]
LOOK_AGAIN_S = 1.0


class Following:
    def __init__(self) -> None:
        self._wakes: dict[str, set[Wake]] = {}

    def subscribe(self, session_id: str, wake: Wake) -> Callable[[], None]:
        """Call `wake(session_id, last_index)` after each commit to this log, until the returned function is called."""
        wakes = self._wakes.setdefault(session_id, set())
        wakes.add(wake)

        def end() -> None:
            wakes.discard(wake)
            if not wakes and self._wakes.get(session_id) is wakes:
                del self._wakes[session_id]

        return end

    def wake(self, session_id: str, last_index: int) -> None:
        """Say that the log reached this index; called after the commit, never before."""
        wakes = self._wakes.get(session_id)
        if wakes:
            for one in tuple(wakes):
                try:
                    one(session_id, last_index)
                except Exception:  # whoever commits next must not fail by this
                    logger.exception("a follower failed", extra={"session_id": session_id})

    async def grown(self, session_id: str, since_index: int, seconds: float) -> None:
        """Return when the log may have grown beyond `since_index`, or after at most `seconds`, whichever is first."""
        loop = asyncio.get_running_loop()
        grown: asyncio.Future[None] = loop.create_future()

        def wake(_: str, last_index: int) -> None:
            if last_index > since_index and not grown.done():
                grown.set_result(None)

        end = self.subscribe(session_id, wake)
        try:
            await asyncio.wait((grown,), timeout=seconds)
        finally:
            end()
