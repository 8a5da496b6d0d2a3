"""A clock that a test moves by hand: nothing rings until it is moved."""

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class _Alarm:
    def __init__(self, ring: Callable[..., object], values: tuple[Any, ...]) -> None:
        self._ring = ring
        self._values = values
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def go(self) -> None:
        if not self.cancelled:
            self._ring(*self._values)


class MovableClock:
    """Wall and monotonic time of a test's own; an `AlarmClock`."""

    def __init__(self, now: float = 1_800_000_000.0, monotonic: float = 1_000.0) -> None:
        self._now = now
        self._monotonic = monotonic
        self._alarms: list[tuple[float, int, _Alarm]] = []
        self._numbers = itertools.count()

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._monotonic

    def later(self, seconds: float, ring: Callable[..., object], *values: Any) -> _Alarm:
        alarm = _Alarm(ring, values)
        heapq.heappush(self._alarms, (self._monotonic + max(0.0, seconds), next(self._numbers), alarm))
        return alarm

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward, or back: no time passes."""
        self._now += seconds

    def pass_time(self, seconds: float) -> None:
        """Let time pass; what rings meanwhile rings in its order and at its time."""
        until = self._monotonic + seconds
        while self._alarms and self._alarms[0][0] <= until:
            at, _, alarm = heapq.heappop(self._alarms)
            self._move(max(at, self._monotonic))
            alarm.go()
        self._move(until)

    def _move(self, to: float) -> None:
        self._now += to - self._monotonic
        self._monotonic = to

    def next_in(self) -> float | None:
        """Seconds until the next alarm rings, if one is set."""
        while self._alarms and self._alarms[0][2].cancelled:
            heapq.heappop(self._alarms)
        return max(0.0, self._alarms[0][0] - self._monotonic) if self._alarms else None

    def forget(self) -> None:
        """Drop every alarm, as the end of a process does."""
        self._alarms.clear()

    @property
    def waiting(self) -> int:
        """How many alarms are set and not cancelled."""
        return sum(not alarm.cancelled for _, _, alarm in self._alarms)
