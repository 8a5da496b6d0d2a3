"""The contract of every way to make a box.

A runtime knows boxes, the workspace they see, files to place and byte streams. No host path and no process id
crosses this contract outward: `Box.handle` is the runtime's own note to itself, stored with the box so that another
server process can find it again.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxSpec:
    box_id: str
    installation: str  # labels the box as ours: another installation leaves it alone
    project_id: str
    session_id: str
    workspace_id: str
    relay_key: str = field(repr=False)  # placed as the file `key` beside the socket
    keeper_key: str = field(repr=False)  # given to the keeper on its stdin, written nowhere
    abandoned_after_s: float = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    box_id: str
    session_id: str
    handle: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where things are from inside a box of this runtime."""

    python: str
    program: str  # the packed client, keeper and droid: `python program client|keeper|droid`
    socket: str
    workspace: str
    home: str


class Runtime(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def isolated(self) -> bool:
        """Whether a box of this runtime holds: no network, no other session, no host file but the system's."""
        ...

    async def check(self) -> None:
        """Raise `NotConfigured`, with the package to install or the setting to change, if boxes cannot be made."""
        ...

    def places(self, box_id: str) -> Places: ...

    async def open_door(self, box_id: str, relay_key: str, accept: Callable[[], asyncio.Protocol]) -> None:
        """Make the box's relay socket and serve every connection to it; again after a restart of the server."""
        ...

    async def create(self, spec: BoxSpec) -> Box:
        """Start a box with the keeper as its first process; its door is open already. Raises `BoxFailed`."""
        ...

    async def is_alive(self, box: Box) -> bool: ...

    async def stop(self, box: Box) -> None:
        """End every process of the box and remove all that it left; stopping twice is no error."""
        ...

    async def list(self, installation: str) -> list[Box]:
        """Every box of this installation that still has a process or a folder, known to the database or not."""
        ...

    async def close(self) -> None:
        """Close the doors and leave the boxes running."""
        ...
