"""Time as a parameter: wall time for what is stored, monotonic time for what is waited for."""

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Wall time in seconds since the epoch."""
        ...

    def monotonic(self) -> float:
        """Seconds that never jump; the event loop's own time."""
        ...


class SystemClock:
    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)
