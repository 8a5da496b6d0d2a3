"""Sessions and turns as rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from oubliette.server.caller_tools.declaration import Declaration
from oubliette.server.errors import NotFound, TooMany
from oubliette.server.limits import QUEUED_MESSAGES_PER_SESSION
from oubliette.server.sessions.lifecycle import ENDS, Move, State, TurnMove, TurnState, moved, turn_step
from oubliette.server.storage.database import Row, Tx
from oubliette.wire.events import Event, Status


class Choices(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was chosen for a session when it started."""

    autonomy: str = "medium"
    oubliette_scope: str | None = None
    brought_key: bool = False  # the caller gave a key of its own; it is in memory only
    own_tools: bool = False  # lent to it, though it is below another: else it has those of its parent
    max_depth: int
    max_descendants: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    id: str
    project_id: str
    workspace_id: str
    owner: str
    token_id: str | None
    state: State
    ending: Move | None  # its end is decided and may still be to come
    reason: str | None
    parent_id: str | None
    root_id: str
    depth: int
    choices: Choices
    declaration: Declaration | None
    stream_id: str | None
    next_index: int
    turns: int
    external_id: str | None
    source: str | None
    created_at: float
    updated_at: float
    ended_at: float | None

    @property
    def is_live(self) -> bool:
        """Whether it takes messages, tools and children."""
        return self.ending is None and self.ended_at is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    number: int
    prompt: str
    state: TurnState
    source: str | None
    created_at: float
    started_at: float | None
    ended_at: float | None
    stop_reason: str | None
    text: str | None
    error: str | None
    usage: dict[str, Any] | None


_SESSION = (
    "id, project_id, workspace_id, owner, token_id, state, ending, reason, parent_id, root_id, depth, settings,"
    " declaration, stream_id, (SELECT next_index FROM logs WHERE logs.session_id = sessions.id), turns, external_id,"
    " source, created_at, updated_at, ended_at"
)
# What is lent to a session may be megabytes: who reads many sessions reads them without.
_BRIEF = _SESSION.replace(" declaration,", " NULL,")
_TURN = "number, prompt, state, source, created_at, started_at, ended_at, stop_reason, text, error, usage"
LAST_PROMPT_CHARS = 80
_COUNT_MAX = 2**63 - 1  # beyond it JSON's readers end
_choices = msgspec.json.Decoder(Choices).decode
_declaration = msgspec.json.Decoder(Declaration).decode
_encode = msgspec.json.Encoder().encode


def _session(row: Row) -> Session:
    return Session(
        id=row[0],
        project_id=row[1],
        workspace_id=row[2],
        owner=row[3],
        token_id=row[4],
        state=State(row[5]),
        ending=Move(row[6]) if row[6] is not None else None,
        reason=row[7],
        parent_id=row[8],
        root_id=row[9],
        depth=row[10],
        choices=_choices(row[11]),
        declaration=_declaration(row[12]) if row[12] is not None else None,
        stream_id=row[13],
        next_index=row[14],
        turns=row[15],
        external_id=row[16],
        source=row[17],
        created_at=row[18],
        updated_at=row[19],
        ended_at=row[20],
    )


def _turn(row: Row) -> Turn:
    return Turn(
        number=row[0],
        prompt=row[1],
        state=TurnState(row[2]),
        source=row[3],
        created_at=row[4],
        started_at=row[5],
        ended_at=row[6],
        stop_reason=row[7],
        text=row[8],
        error=row[9],
        usage=msgspec.json.decode(row[10]) if row[10] is not None else None,
    )


async def insert(tx: Tx, session: Session) -> None:
    await tx.run(
        "INSERT INTO sessions (id, project_id, workspace_id, owner, token_id, state, parent_id, root_id, depth,"
        " settings, declaration, stream_id, external_id, source, created_at, updated_at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        session.id,
        session.project_id,
        session.workspace_id,
        session.owner,
        session.token_id,
        session.state.value,
        session.parent_id,
        session.root_id,
        session.depth,
        _encode(session.choices).decode(),
        _encoded(session.declaration),
        session.stream_id,
        session.external_id,
        session.source,
        session.created_at,
        session.updated_at,
    )


def _encoded(declaration: Declaration | None) -> str | None:
    return _encode(declaration).decode() if declaration is not None else None


async def get(tx: Tx, session_id: str) -> Session:
    row = await tx.one(f"SELECT {_SESSION} FROM sessions WHERE id = ?", session_id)  # noqa: S608
    if row is None:
        raise NotFound(f"no session {session_id!r}: session_list shows them")
    return _session(row)


async def live_in(tx: Tx, project_id: str, workspace_id: str) -> Session | None:
    """The newest live session of a workspace that a caller started (not a child)."""
    row = await tx.one(
        f"SELECT {_SESSION} FROM sessions WHERE project_id = ? AND workspace_id = ? AND parent_id IS NULL"  # noqa: S608
        " AND ended_at IS NULL AND ending IS NULL ORDER BY created_at DESC, id DESC LIMIT 1",
        project_id,
        workspace_id,
    )
    return _session(row) if row is not None else None


async def not_ended(tx: Tx) -> list[Session]:
    """Every session that lives, and every one whose end is still to come."""
    rows = await tx.all(f"SELECT {_SESSION} FROM sessions WHERE ended_at IS NULL ORDER BY created_at")  # noqa: S608
    return [_session(row) for row in rows]


async def count(tx: Tx) -> int:
    """Every session of the server that keeps a box or will."""
    row = await tx.one("SELECT count(*) FROM sessions WHERE ended_at IS NULL")
    assert row is not None
    return row[0]


async def count_roots(tx: Tx, project_id: str) -> int:
    row = await tx.one(
        "SELECT count(*) FROM sessions WHERE project_id = ? AND ended_at IS NULL AND parent_id IS NULL", project_id
    )
    assert row is not None
    return row[0]


async def count_descendants(tx: Tx, root_id: str) -> int:
    """Every session that ever descended from this root, ended ones too: a budget is spent, not lent."""
    row = await tx.one("SELECT count(*) FROM sessions WHERE root_id = ? AND id <> root_id", root_id)
    assert row is not None
    return row[0]


async def children(tx: Tx, session_id: str) -> list[Session]:
    """Oldest first, without what is lent to them."""
    rows = await tx.all(
        f"SELECT {_BRIEF} FROM sessions WHERE parent_id = ? ORDER BY created_at, id",  # noqa: S608
        session_id,
    )
    return [_session(row) for row in rows]


async def tree(tx: Tx, session: Session) -> list[Session]:
    """The session and everything below it, without what is lent to them."""
    rows = await tx.all(
        f"SELECT {_BRIEF} FROM sessions WHERE root_id = ? ORDER BY depth, created_at, id",  # noqa: S608
        session.root_id,
    )
    found = {session.id}
    kept = [session]
    for row in rows:
        one = _session(row)
        if one.parent_id in found and one.id not in found:
            found.add(one.id)
            kept.append(one)
    return kept


async def listed(
    tx: Tx, project_id: str, *, states: Sequence[str], parent_id: str | None, limit: int, offset: int
) -> list[Session]:
    """Newest first, without what is lent to them; without states, of every state; children of the parent named."""
    marks = ", ".join("?" * len(states)) or "NULL"
    rows = await tx.all(
        f"SELECT {_BRIEF} FROM sessions WHERE project_id = ? AND (? = 0 OR state IN ({marks}))"  # noqa: S608
        " AND (? IS NULL OR parent_id = ?) ORDER BY created_at DESC, id DESC LIMIT ? OFFSET ?",
        project_id,
        len(states),
        *states,
        parent_id,
        parent_id,
        limit,
        offset,
    )
    return [_session(row) for row in rows]


async def last_prompts(tx: Tx, session_ids: Sequence[str]) -> dict[str, str]:
    """The beginning of the newest message of each."""
    marks = ", ".join("?" * len(session_ids)) or "NULL"
    found = await tx.all(
        "SELECT sessions.id, substr(prompt, 1, ?) FROM sessions JOIN turns"  # noqa: S608
        f" ON turns.session_id = sessions.id AND turns.number = sessions.turns WHERE sessions.id IN ({marks})",
        LAST_PROMPT_CHARS,
        *session_ids,
    )
    return {row[0]: row[1] for row in found}


async def move(tx: Tx, session_id: str, step: Move, now: float, reason: str | None = None) -> tuple[Event, ...]:
    """Move a session's state; the event that tells of it, if it changed. Raises `Conflict`."""
    row = await tx.one("SELECT state FROM sessions WHERE id = ?", session_id)
    if row is None:
        raise NotFound(f"no session {session_id!r}")
    before = State(row[0])
    after = moved(before, step)
    ended_at = now if after in ENDS else None
    await tx.run(
        "UPDATE sessions SET state = ?, reason = ?, updated_at = ?, ended_at = ? WHERE id = ?",
        after.value,
        reason,
        now,
        ended_at,
        session_id,
    )
    return (Status(status=after.value, reason=reason),) if after is not before else ()


async def set_ending(tx: Tx, session_id: str, step: Move, reason: str, now: float) -> None:
    await tx.run(
        "UPDATE sessions SET ending = ?, reason = ?, updated_at = ? WHERE id = ?", step.value, reason, now, session_id
    )


async def is_busy_below(tx: Tx, session_id: str) -> bool:
    """Whether a session below this one has a turn that is open or queued."""
    row = await tx.one(
        "WITH RECURSIVE below (id) AS (SELECT id FROM sessions WHERE parent_id = ?"
        " UNION ALL SELECT sessions.id FROM sessions JOIN below ON sessions.parent_id = below.id)"
        " SELECT 1 FROM turns JOIN below ON turns.session_id = below.id WHERE turns.state IN ('running', 'queued')"
        " LIMIT 1",
        session_id,
    )
    return row is not None


async def has_open_calls(tx: Tx, session_id: str) -> bool:
    """Whether a call of a caller's tool has not ended."""
    row = await tx.one("SELECT 1 FROM calls WHERE session_id = ? AND state = 'pending' LIMIT 1", session_id)
    return row is not None


async def heirs(tx: Tx, session: Session) -> list[Session]:
    """The live sessions below this one that have its tools, because none between them was lent its own."""
    found = {session.id}
    kept: list[Session] = []
    for one in await tree(tx, session):
        if one.parent_id in found and one.is_live and not one.choices.own_tools:
            found.add(one.id)
            kept.append(one)
    return kept


async def set_declaration(tx: Tx, session_ids: Sequence[str], declaration: Declaration) -> None:
    marks = ", ".join("?" * len(session_ids))
    await tx.run(
        f"UPDATE sessions SET declaration = ? WHERE id IN ({marks})",  # noqa: S608
        _encoded(declaration),
        *session_ids,
    )


async def set_choices(tx: Tx, session_id: str, choices: Choices) -> None:
    await tx.run("UPDATE sessions SET settings = ? WHERE id = ?", _encode(choices).decode(), session_id)


async def set_stream(tx: Tx, session_id: str, stream_id: str) -> None:
    await tx.run("UPDATE sessions SET stream_id = ? WHERE id = ?", stream_id, session_id)


async def queue(tx: Tx, session_id: str, prompt: str, source: str | None, now: float) -> int:
    """Queue a message as a turn; its number. Raises `TooMany`."""
    row = await tx.one("SELECT count(*) FROM turns WHERE session_id = ? AND state = 'queued'", session_id)
    assert row is not None
    if row[0] >= QUEUED_MESSAGES_PER_SESSION:
        raise TooMany(
            f"{QUEUED_MESSAGES_PER_SESSION} messages wait for this session already: wait for a turn to end, or"
            " interrupt it"
        )
    numbered = await tx.one(
        "UPDATE sessions SET turns = turns + 1, updated_at = ? WHERE id = ? RETURNING turns", now, session_id
    )
    assert numbered is not None
    await tx.run(
        "INSERT INTO turns (session_id, number, prompt, state, source, created_at) VALUES (?, ?, ?, 'queued', ?, ?)",
        session_id,
        numbered[0],
        prompt,
        source,
        now,
    )
    return numbered[0]


async def next_turn(tx: Tx, session_id: str) -> Turn | None:
    """The open turn, or else the oldest that is queued."""
    row = await tx.one(
        f"SELECT {_TURN} FROM turns WHERE session_id = ? AND state IN ('running', 'queued')"  # noqa: S608
        " ORDER BY number LIMIT 1",
        session_id,
    )
    return _turn(row) if row is not None else None


async def turn(tx: Tx, session_id: str, number: int) -> Turn | None:
    row = await tx.one(f"SELECT {_TURN} FROM turns WHERE session_id = ? AND number = ?", session_id, number)  # noqa: S608
    return _turn(row) if row is not None else None


async def turns(tx: Tx, session_id: str, *, before: int, last: int, max_bytes: int) -> list[Turn]:
    """The newest turns before a number, oldest first; fewer where they are large, but one at least."""
    found: list[Turn] = []
    room = max_bytes
    # Numbers have no gaps. One after the other: what does not fit is not read.
    for number in range(before - 1, max(0, before - 1 - last), -1):
        one = await turn(tx, session_id, number)
        if one is None:
            break
        room -= len(_encode(one))
        if room < 0 and found:
            break
        found.append(one)
    return found[::-1]


async def usage(tx: Tx, session_id: str) -> dict[str, int]:
    """What the turns of a session used together, by what their droid said."""
    total: dict[str, int] = {}
    for (told,) in await tx.all("SELECT usage FROM turns WHERE session_id = ? AND usage IS NOT NULL", session_id):
        for name, count in msgspec.json.decode(told).items():
            if isinstance(count, int) and count > 0:
                total[name] = min(total.get(name, 0) + count, _COUNT_MAX)
    return total


async def begin_turn(tx: Tx, session_id: str, number: int, now: float) -> bool:
    waiting, begun = turn_step(TurnMove.BEGIN)
    changed = await tx.run(
        "UPDATE turns SET state = ?, started_at = ? WHERE session_id = ? AND number = ? AND state = ?",
        begun.value,
        now,
        session_id,
        number,
        waiting.value,
    )
    return changed == 1


async def end_turn(
    tx: Tx,
    session_id: str,
    number: int,
    now: float,
    *,
    stop_reason: str,
    text: str,
    error: str | None,
    usage: dict[str, Any] | None,
) -> float | None:
    """Close a running turn; when it started, or None where it was not running."""
    open_, over = turn_step(TurnMove.END)
    row = await tx.one(
        "UPDATE turns SET state = ?, ended_at = ?, stop_reason = ?, text = ?, error = ?, usage = ?"
        " WHERE session_id = ? AND number = ? AND state = ? RETURNING started_at",
        over.value,
        now,
        stop_reason,
        text,
        error,
        _encode(usage).decode() if usage is not None else None,
        session_id,
        number,
        open_.value,
    )
    return row[0] if row is not None else None


async def drop_queued(tx: Tx, session_id: str, now: float) -> int:
    waiting, dropped = turn_step(TurnMove.DROP)
    return await tx.run(
        "UPDATE turns SET state = ?, ended_at = ? WHERE session_id = ? AND state = ?",
        dropped.value,
        now,
        session_id,
        waiting.value,
    )
