"""Time as a parameter: wall time for what is stored, monotonic time for what is waited for."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Wall time in seconds since the epoch."""
        ...

    def monotonic(self) -> float:
        """Seconds that never jump; the event loop's own time."""
        ...


class Timer(Protocol):
    def cancel(self) -> None: ...


class AlarmClock(Clock, Protocol):
    """A clock that also rings."""

    def later(self, seconds: float, ring: Callable[..., object], *values: Any) -> Timer:
        """Call `ring(*values)` on the loop in so many monotonic seconds, unless cancelled before."""
        ...


class SystemClock:
    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)

    @staticmethod
    def later(seconds: float, ring: Callable[..., object], *values: Any) -> Timer:
        return asyncio.get_running_loop().call_later(seconds, ring, *values)
