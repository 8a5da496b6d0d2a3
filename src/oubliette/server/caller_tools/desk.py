"""What a running server knows of open calls: by session, by call key, and by the tree whose owner answers them.

All of it can be lost and is built anew from the rows.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from oubliette.server.caller_tools import schemas
from oubliette.server.caller_tools.carriers import Announcement
from oubliette.server.caller_tools.declaration import Declaration, Tool
from oubliette.server.caller_tools.ledger import Call, Stimulus
from oubliette.server.caller_tools.schemas import Checked
from oubliette.server.clock import Clock, Timer
from oubliette.server.errors import NotFound, OublietteError, TooMany
from oubliette.server.limits import INLINE_ARGUMENTS_BYTES, WAITERS_PER_CALL
from oubliette.wire import naming, relay

logger = logging.getLogger(__name__)

Hear = Callable[[relay.Progress], None]


@dataclass(slots=True, eq=False)
class Open:
    """A call that has not ended, and who waits for it. Until its row is committed it has no index."""

    desk: "Desk"
    call: Call
    names: tuple[str, str]  # of its tool: as declared, and in the box
    digest: bytes
    arguments: bytes
    due: float  # when its deadline comes, monotonic
    index: int | None = None
    ended: Call | None = None
    cut: tuple[Stimulus, str] | None = None  # how to end it once its row is there
    waiters: list[asyncio.Future[Call]] = field(default_factory=list[asyncio.Future[Call]])
    hears: list[Hear] = field(default_factory=list[Hear])
    instances: set[str] = field(default_factory=set[str])  # the clients that asked for it
    timer: Timer | None = None

    def counted(self, clock: Clock) -> float:
        """The time as it is counted for this call: by the monotonic clock, towards the row's deadline."""
        return self.call.deadline_at - (self.due - clock.monotonic())

    async def wait(self, hear: Hear) -> Call:
        """Wait for the end. The droid's side may go and come back: the call stays open, only this waiter leaves."""
        if self.ended is not None:
            return self.ended
        if len(self.waiters) >= WAITERS_PER_CALL:
            oldest = self.waiters.pop(0)
            if not oldest.done():
                oldest.set_exception(TooMany("this call was joined again too often: the last to join wait for it"))
        waiter: asyncio.Future[Call] = asyncio.get_running_loop().create_future()
        self.waiters.append(waiter)
        self.hears.append(hear)
        try:
            return await waiter
        finally:
            self.hears.remove(hear)
            if waiter in self.waiters:
                self.waiters.remove(waiter)

    def tell(self, call: Call) -> None:
        self.ended = call
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(call)

    def fail(self, failure: Exception) -> None:
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_exception(failure)

    def announcement(self, inline_bytes: int = INLINE_ARGUMENTS_BYTES) -> Announcement:
        """The request as its caller sees it; of arguments larger than this, their size."""
        call = self.call
        told: Announcement = {
            "type": "caller_tool_request",
            "session_id": call.session_id,
            "index": self.index,
            "at": call.created_at,
            "request_id": call.request_id,
            "tool": call.tool,
            "deadline_at": call.deadline_at,
            "redelivery": call.redelivery,
        }
        if len(self.arguments) <= inline_bytes:
            told["arguments"] = msgspec.Raw(self.arguments)
        else:
            told["arguments_bytes"] = len(self.arguments)
        return told


@dataclass(slots=True, eq=False)
class Desk:
    """One session's calls and what may be called."""

    session_id: str
    owner: str
    tree: "Tree"
    declaration: Declaration | None = None
    tools: dict[str, tuple[Tool, Checked]] = field(default_factory=dict[str, tuple[Tool, Checked]])
    open: dict[str, Open] = field(default_factory=dict[str, Open])
    keys: dict[str, Open] = field(default_factory=dict[str, Open])
    closing: str | None = None  # why no call enters any more

    def declare(self, declaration: Declaration | None) -> None:
        """Offer these tools, by their names in the box and by their declared names, which win."""
        self.declaration = declaration
        checked: list[tuple[Tool, Checked]] = []
        for tool in declaration.tools if declaration is not None else ():
            try:
                checked.append((tool, schemas.checked(tool.input_schema)))
            except OublietteError as refusal:
                # Declared to an earlier version that took it: one tool less is better than no server.
                extra = {"session_id": self.session_id, "tool": tool.name, "reason": refusal.message}
                logger.warning("a stored caller tool is not usable any more", extra=extra)
        self.tools = {tool.box_name: (tool, schema) for tool, schema in checked}
        self.tools.update({tool.name: (tool, schema) for tool, schema in checked})

    def names_of(self, tool: str) -> tuple[str, str]:
        """A tool's two names, where it may not be declared any more."""
        return tool, naming.box_name(self.declaration.caller_id, tool) if self.declaration is not None else tool

    def enter(self, one: Open) -> None:
        self.open[one.call.request_id] = one
        self.keys[one.call.call_key] = one

    def leave(self, one: Open) -> None:
        if self.open.get(one.call.request_id) is one:
            del self.open[one.call.request_id]
        if self.keys.get(one.call.call_key) is one:
            del self.keys[one.call.call_key]
        if one.timer is not None:
            one.timer.cancel()
            one.timer = None


@dataclass(slots=True, eq=False)
class Tree:
    """A root session and its children: one owner, reached by one book of carriers under the root's id."""

    root_id: str
    desks: dict[str, Desk] = field(default_factory=dict[str, Desk])

    def pending(self) -> Iterator[Open]:
        """The calls whose rows are committed, by session and in the order they came."""
        for desk in self.desks.values():
            for one in desk.open.values():
                if one.index is not None:
                    yield one

    def find(self, request_id: str) -> Open | None:
        for desk in self.desks.values():
            one = desk.open.get(request_id)
            if one is not None:
                return one if one.index is not None else None
        return None

    @property
    def polls_only(self) -> bool:
        return any(desk.declaration is not None and desk.declaration.delivery == "poll" for desk in self.desks.values())


class Desks:
    """Every live session's desk."""

    def __init__(self) -> None:
        self._desks: dict[str, Desk] = {}
        self._trees: dict[str, Tree] = {}

    def open(self, session_id: str, root_id: str, owner: str) -> Desk:
        desk = self._desks.get(session_id)
        if desk is None:
            tree = self._trees.get(root_id)
            if tree is None:
                tree = self._trees[root_id] = Tree(root_id)
            desk = self._desks[session_id] = tree.desks[session_id] = Desk(session_id, owner, tree)
        return desk

    def close(self, desk: Desk) -> bool:
        """Take a desk away; whether its tree has ended with it."""
        if self._desks.get(desk.session_id) is not desk:
            return False
        del self._desks[desk.session_id]
        del desk.tree.desks[desk.session_id]
        if desk.tree.desks:
            return False
        del self._trees[desk.tree.root_id]
        return True

    def get(self, session_id: str) -> Desk:
        desk = self._desks.get(session_id)
        if desk is None:
            raise NotFound(f"session {session_id} is not live")
        return desk

    def find(self, session_id: str) -> Desk | None:
        return self._desks.get(session_id)

    def tree(self, root_id: str) -> Tree | None:
        return self._trees.get(root_id)

    def find_open(self, session_id: str, request_id: str) -> Open | None:
        desk = self._desks.get(session_id)
        return desk.open.get(request_id) if desk is not None else None
