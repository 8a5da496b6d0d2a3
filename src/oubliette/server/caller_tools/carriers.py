"""Ways to a caller, and which of them a request is on.

A carrier of a session is a stream, a poll or a watch that names it, or the streams of the MCP session that last
declared, messaged, watched or paged it. A request is on one carrier at a time, the newest; only when that one goes
is it announced on another, with `redelivery` counted up.
"""

from typing import Any, Protocol

# An announcement is the flat JSON object of a `caller_tool_request` event (or of `caller_tool_cancelled`,
# `caller_tool_progress`): see oubliette.wire.events.
Announcement = dict[str, Any]


class Carrier(Protocol):
    """One way to a session's caller. All methods are called on the loop and must not wait."""

    @property
    def kind(self) -> str:
        """A word for logs and tests: `stream`, `request`, `listen`, `poll`."""
        ...

    def announce(self, session_id: str, announcement: Announcement) -> None:
        """Queue an announcement ahead of the carrier's other frames. What cannot be queued ends the carrier."""
        ...
