"""What an operation is: declared once, offered by every door.

A door (MCP, the relay socket, later REST and the command line) knows a name and JSON parameters; the gate decides
whether this actor may; `run` does it. Parameters and results are msgspec structs, so the schemas that doors show
are the types that the code uses.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from oubliette.server import audit
from oubliette.server.caller_tools.exchange import Exchange
from oubliette.server.clock import Clock
from oubliette.server.events.following import Following
from oubliette.server.events.log import EventLog
from oubliette.server.projects.premises import Premises
from oubliette.server.sessions.messages import Messages
from oubliette.server.sessions.sessions import Sessions
from oubliette.server.storage.database import Database, Tx
from oubliette.server.tokens.token import Actor, Scope
from oubliette.server.tokens.tokens import Tokens

P = TypeVar("P", bound=msgspec.Struct)


Keep = Callable[[Tx, msgspec.Struct], Awaitable[None]]


class Target(StrEnum):
    """What an operation acts on; the project is resolved from it, never believed from an argument."""

    NOTHING = "nothing"
    PROJECT = "project"
    SESSION = "session"
    SESSION_OR_PROJECT = "session or project"
    OWNED_SESSION = "owned session"  # only its owner


class Followed(Protocol):
    """The asker's own channel back while a request runs, where its door has one."""

    @property
    def wants_events(self) -> bool:
        """Whether the asker opted in to notifications on this request."""
        ...

    def ends_with_asker(self) -> None:
        """From here on the request is for its asker's eyes only: if they leave, it is cancelled."""
        ...

    def has_room(self, again: Callable[[], None]) -> bool:
        """Whether more may be pushed now; if not, `again` is called once when it may."""
        ...

    def push(self, event: dict[str, Any]) -> None:
        """Queue one event for the asker; a channel that is full or gone ends itself."""
        ...

    def progress(self, message: str) -> None:
        """Tell the asker that the request lives, if it asked to be told."""
        ...


class Asked(msgspec.Struct, frozen=True, kw_only=True):  # every call makes one: see `Actor`
    """One call of an operation: by whom, through which door, and with which channel back."""

    actor: Actor
    door: str  # "mcp", "relay", "local"
    stream_id: str | None = None  # the MCP session that asked; its streams become carriers of what it touches
    followed: Followed | None = None
    kept: Keep | None = None  # where the same request may come again: what keeps its result for that

    async def keep(self, tx: Tx, result: msgspec.Struct) -> None:
        """Let the result be committed with the effect: after a crash both are there, or neither is."""
        if self.kept is not None:
            await self.kept(tx, result)

    def entry(self, operation: str, target: str | None = None, outcome: str = "ok") -> audit.Entry:
        """The audit entry of this call."""
        return audit.entry(self.actor, door=self.door, operation=operation, outcome=outcome, target=target)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rooms:
    """What operations stand on."""

    database: Database
    clock: Clock
    tokens: Tokens
    events: EventLog
    following: Following
    exchange: Exchange
    sessions: Sessions
    messages: Messages
    timeout_max_s: float
    premises: Premises


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation(Generic[P]):
    name: str
    scope: Scope
    target: Target
    params: type[P]
    summary: str  # honest, for a model to read
    run: Callable[[Rooms, Asked, P], Awaitable[msgspec.Struct]]
    result: type[msgspec.Struct]
    writes: bool  # changes something, and leaves an audit row in the transaction that does
    # What may be waited for once the effect is there, by the result so far; a wait that is cut off undoes nothing.
    wait: Callable[[Rooms, Asked, P, Any], Awaitable[msgspec.Struct]] | None = None
    refused: Callable[[Any], bool] | None = None  # whether a result tells of a refusal
    title: str = ""
    shown_once: bool = False  # its result holds a secret: it is kept nowhere
    destructive: bool = False  # loses something that cannot be had back
    everywhere: bool = False  # beyond any one project: not for a token that is narrowed to one
    inside: bool = True  # whether it may be asked out of a box at all
    derived: bool = True  # whether a key that the server derived for a box may ask it
