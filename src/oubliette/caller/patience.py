"""How long to wait before the next try."""

import random

# A server, or a proxy before it, may ask for more; a droid waits meanwhile.
ASKED_MAX_S = 30.0


class Patience:
    """Doubles from a twentieth of a second to two; spread, so that many callers do not return in step."""

    def __init__(self, first_s: float = 0.05, most_s: float = 2.0) -> None:
        self._first, self._most, self._next = first_s, most_s, first_s

    def next_s(self, at_least_s: float = 0.0) -> float:
        wait, self._next = self._next, min(self._next * 2, self._most)
        return max(min(at_least_s, ASKED_MAX_S), wait * random.uniform(0.75, 1.25))  # noqa: S311 - spreading, not secrecy

    def reset(self) -> None:
        self._next = self._first
