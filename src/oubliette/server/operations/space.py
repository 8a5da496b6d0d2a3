"""How much an answer may hold that may go out as one event of a stream.

Some clients' readers stop at an event of 1 MiB, and lose the answer with it. A result stands in its answer twice, as an
object and, for a model, as text. What does not fit is left to the next page, or left out and named; what is read
without waiting is no event of a stream, and whole.
"""

from typing import Any, Final

import msgspec

from oubliette.server.caller_tools.carriers import Announcement
from oubliette.server.limits import ANSWER_EVENT_BYTES, PUSHED_EVENT_BYTES

# Whose size somebody else decides; of all other types every field is short.
LARGE: Final = frozenset({"user_message", "message", "tool_call", "tool_result", "plan", "completion", "error"})
_BETWEEN: Final = 64  # a comma, a name, a count that grew

_encode: Final = msgspec.json.Encoder().encode


class Space:
    """What is left of one answer."""

    def __init__(self) -> None:
        self._left = ANSWER_EVENT_BYTES

    def takes(self, value: Announcement | str) -> bool:
        """Whether this fits as well: then it has its place."""
        body = _encode(value)
        size = len(body) + len(_encode(body.decode())) + _BETWEEN
        if size > self._left:
            return False
        self._left -= size
        return True

    def fitting(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The first of these, as many as fit."""
        count = next((place for place, event in enumerate(events) if not self.takes(event)), len(events))
        return events[:count]


def pushable(event: dict[str, Any]) -> dict[str, Any]:
    """The event, or of a large one what is small, and the names of the fields that were left out."""
    if event["type"] not in LARGE or len(_encode(event)) <= PUSHED_EVENT_BYTES:
        return event
    by_size = sorted(event, key=lambda name: len(_encode(event[name])))
    kept: dict[str, Any] = {}
    room = PUSHED_EVENT_BYTES
    for name in by_size:
        room -= len(_encode(event[name]))
        if room < 0:
            break
        kept[name] = event[name]
    return kept | {"left_out": [name for name in event if name not in kept]}
