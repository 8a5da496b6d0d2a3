"""What was asked, by whom, and how it ended: rows that are only ever added.

An audit row is written in the transaction of what it tells about. It names things by their public ids and holds no
argument, no result and no secret.
"""

import msgspec

from oubliette.server.storage.database import Tx
from oubliette.server.tokens.token import Actor


class Entry(msgspec.Struct, frozen=True, kw_only=True):  # every call makes two: see `Actor`
    door: str
    operation: str
    outcome: str
    token_id: str | None = None
    principal: str | None = None
    session_id: str | None = None
    target: str | None = None


def entry(actor: Actor | None, *, door: str, operation: str, outcome: str, target: str | None = None) -> Entry:
    """An entry about something that this actor asked; without one, nobody could be established."""
    return Entry(
        door=door,
        operation=operation,
        outcome=outcome,
        target=target,
        token_id=actor.token_id if actor else None,
        principal=actor.principal if actor else None,
        session_id=actor.session_id if actor else None,
    )


async def write(tx: Tx, at: float, told: Entry) -> None:
    await tx.add(
        "INSERT INTO audit (at, token_id, principal, session_id, door, operation, target, outcome)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        at,
        told.token_id,
        told.principal,
        told.session_id,
        told.door,
        told.operation,
        told.target,
        told.outcome,
    )


async def note(tx: Tx, at: float, actor: Actor, *, door: str, operation: str, target: str, outcome: str = "ok") -> None:
    """Write that what this actor asked was done, or what became of it."""
    await write(tx, at, entry(actor, door=door, operation=operation, outcome=outcome, target=target))
