"""The contract of every way to talk to a coding agent.

A droid is one process in a box, kept by the keeper. Its stdio is two numbered byte streams: output is acknowledged
in the transaction that stores what it meant, input is stored until the keeper took it. So a droid, its open turn
and all that it wrote outlive the server: after a restart `resume` goes on where the streams were left.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from oubliette.server.storage.database import Tx
from oubliette.wire.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchProfile:
    """How one kind of agent is started and what is known of its ways. Data: one per agent."""

    name: str
    argv: tuple[str, ...]  # {python} {program} {workspace} {home} are filled in
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    mode: str | None = None  # session/set_mode after new and after load
    list_changed: str = "live"  # "live", "next_turn" or "none": when it sees tools declared later by itself
    resume: str | None = None  # "resume" or "load": also how an agent that sees none is shown them between turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a turn ended."""

    stop_reason: str
    text: str
    usage: Mapping[str, Any] | None = None
    error: str | None = None
    error_kind: str | None = None


class Session(Protocol):
    """What a droid needs of the session that it works for. Implemented in `sessions/`."""

    @property
    def id(self) -> str: ...

    @property
    def autonomy(self) -> str: ...

    @property
    def tools(self) -> str:
        """What tells the caller's tools of this moment from any others."""
        ...

    async def turn_ended(self, tx: Tx, turn: int, outcome: Outcome) -> Sequence[Event]:
        """Inside the transaction that stores the droid's last word: move the turn's row; what it adds to the log."""
        ...

    def turn_is_over(self, turn: int, outcome: Outcome) -> None:
        """After that commit."""
        ...

    def droid_ended(self, reason: str) -> None:
        """The process is gone; no turn of it will end by itself any more."""
        ...


class KeeperLink(Protocol):
    """A connected keeper. Requests raise `BoxFailed` when it goes before it answered; the asker has a deadline."""

    async def request(self, method: str, params: object) -> bytes:
        """The raw JSON of the result."""
        ...

    def notify(self, method: str, params: object) -> None: ...


class Droid(Protocol):
    def has_turn(self, turn: int) -> bool:
        """Whether this turn's prompt was stored already; after a restart one that was not must be given again."""
        ...

    async def prompt(self, turn: int, text: str) -> None:
        """Begin a turn: stored before it returns. The session learns of the end by `turn_ended`."""
        ...

    async def cancel(self) -> None:
        """Ask the agent to stop its turn; what does not stop within 5 s is killed."""
        ...

    def touch(self) -> None:
        """A sign of life that came by another way than the agent's output."""
        ...

    async def stop(self) -> None:
        """Close stdin, wait, TERM the group, KILL the group."""
        ...
