"""A session as its caller sees it: send messages, follow events, wait for the end of a turn."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from oubliette.caller.errors import CallerError, Purged, SessionFailed
from oubliette.wire.events import SESSION_ENDED, AnyEvent, Completion, Error

if TYPE_CHECKING:
    from oubliette.caller.caller import Caller

PAGE_EVENTS = 200
PAGE_WAIT_S = 25.0
# States that a session does not leave.
OVER = frozenset({"completed", "failed", "timed_out"})


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """One row of a session's log.

    `event` is a type of `oubliette.wire.events`, or the plain fields where the server is newer than this library.
    """

    index: int
    at: float
    session_id: str
    type: str
    event: AnyEvent | dict[str, Any]
    fields: dict[str, Any]


class Session:
    """Made by `Caller.start` and `Caller.attach`."""

    def __init__(self, caller: "Caller", session_id: str = "") -> None:
        self.id = session_id
        self._caller = caller
        self._since = -1
        self._turn: int | None = None
        self._turn_since = -1
        self.is_over = False
        self._knows = 0  # the state of the caller's tools that this session was told

    async def open(self, arguments: dict[str, Any]) -> None:
        """Send the first message of this handle."""
        answer = await self._message(arguments)
        self.id = answer["session_id"]
        self._since = self._turn_since
        self._caller.adopt(self)

    async def take_up(self) -> None:
        """Follow a session that began before this handle, from the oldest event that is kept."""
        self._since = self._turn_since = await self.meet() - 1

    async def meet(self) -> int:
        """Let the server know by which MCP session its owner can be reached; the oldest index of the log."""
        try:
            return int((await self.page(-1, max_events=1)).get("first_index", 0))
        except Purged as purged:
            return int(purged.details["oldest_index"])

    async def send(self, message: str, **options: Any) -> None:
        """Send another message; a busy session takes it after its turn, with `interrupt=True` at once.

        `options` are parameters of `session_message`.
        """
        await self._message({"session_id": self.id, "message": message} | options)

    async def events(self, since_index: int | None = None) -> AsyncIterator[LoggedEvent]:
        """Every event after an index, in order, none twice, until the session ends.

        Without an index: from where this handle was made. A reader that stops and comes back gives the index of
        the last event that it saw.
        """
        cursor = self._since if since_index is None else since_index
        while True:
            page = await self.page(cursor, wait_s=PAGE_WAIT_S)
            for fields in page["events"]:
                cursor = fields["index"]
                yield _logged(self.id, fields)
            if not page["events"] and not page.get("more") and page["status"] in OVER:
                return

    async def result(self, timeout_s: float | None = None) -> Completion:
        """Wait for the end of the turn that the last message began.

        Raises `SessionFailed` when the session ends first, `TimeoutError` after `timeout_s`.
        """
        async with asyncio.timeout(timeout_s):
            return await self._completion()

    async def wait(self, seconds: float) -> None:
        """Wait so long at most for the end of the turn. How it ends, or why it cannot be seen, `result` tells."""
        if seconds > 0:
            try:
                await self.result(seconds)
            except (TimeoutError, CallerError):
                pass

    async def page(self, since_index: int, *, wait_s: float = 0.0, max_events: int = PAGE_EVENTS) -> dict[str, Any]:
        """One page of the log, as the server gives it."""
        page = await self._caller.call(
            "session_events", session_id=self.id, since_index=since_index, max_events=max_events, wait_seconds=wait_s
        )
        if page["status"] in OVER:
            self._over()
        return page

    async def get(self) -> dict[str, Any]:
        """The session as the server describes it."""
        return await self._caller.call("session_get", session_id=self.id)

    async def cancel(self) -> None:
        """Stop the running turn; the session stays."""
        await self._caller.call("session_cancel", session_id=self.id)

    async def end(self) -> None:
        """End the session with its droid and its open calls."""
        await self._caller.call("session_end", session_id=self.id)
        self._over()

    def _over(self) -> None:
        self.is_over = True
        self._caller.let_go(self.id)

    async def _message(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Send a message, with the tools if this session does not know them as they are now."""
        declaration = self._caller.declaration
        if self._knows != declaration:
            arguments = arguments | {"context": (arguments.get("context") or {}) | self._caller.lent()}
        answer = await self._caller.call("session_message", **arguments)
        self._knows = declaration
        self._turn_since = int(answer.get("last_event_index", -1))
        turn = answer.get("turn")
        self._turn = turn if isinstance(turn, int) else None
        return answer

    async def _completion(self) -> Completion:
        why = ""
        async for logged in self.events(self._turn_since):
            event = logged.event
            if isinstance(event, Error):
                why = event.message
            if isinstance(event, Completion) and (self._turn is None or event.turn >= self._turn):
                if event.stop_reason == SESSION_ENDED:
                    break
                return event
        raise SessionFailed(why or "the session ended before its turn did", details={"session_id": self.id})


def _logged(session_id: str, fields: dict[str, Any]) -> LoggedEvent:
    try:
        event: AnyEvent | dict[str, Any] = msgspec.convert(fields, AnyEvent)
    except msgspec.ValidationError:
        event = fields
    return LoggedEvent(
        index=fields["index"],
        at=fields.get("at", 0.0),
        session_id=fields.get("session_id", session_id),
        type=fields["type"],
        event=event,
        fields=fields,
    )
