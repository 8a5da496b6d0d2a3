"""The rows of caller-tool calls: what the ledger decides, applied in one conditional statement each."""

from dataclasses import dataclass

from oubliette.server.caller_tools.ledger import Call, State, Stimulus
from oubliette.server.errors import CallKeyReused
from oubliette.server.storage.database import Row, Tx

KIND = "caller_tool"
_COLUMNS = (
    "request_id, session_id, call_key, tool, owner, created_at, deadline_at, deadline_max_at, timeout_s, instance,"
    " state, redelivery, ended_at, outcome"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A call of this key: the one just inserted, or the one that was there."""

    call: Call
    index: int  # of its request in the session's log
    is_new: bool


def _call(row: Row) -> Call:
    return Call(
        request_id=row[0],
        session_id=row[1],
        call_key=row[2],
        tool=row[3],
        owner=row[4],
        created_at=row[5],
        deadline_at=row[6],
        deadline_max_at=row[7],
        timeout_s=row[8],
        instance=row[9],
        state=State(row[10]),
        redelivery=row[11],
        ended_at=row[12],
        outcome=row[13],
    )


async def insert(tx: Tx, call: Call, *, digest: bytes, arguments: bytes) -> Recorded:
    """Insert a call, or find the one that has its key. Raises `CallKeyReused` where that was another call.

    The next event that the same transaction appends to the session's log must be the call's request.
    """
    inserted = await tx.one(
        "INSERT INTO calls (request_id, session_id, call_key, kind, tool, digest, arguments, owner, instance, state,"
        " created_at, deadline_at, deadline_max_at, timeout_s, request_index)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, (SELECT next_index FROM sessions WHERE id = ?))"
        " ON CONFLICT (session_id, call_key) DO NOTHING RETURNING request_index",
        call.request_id,
        call.session_id,
        call.call_key,
        KIND,
        call.tool,
        digest,
        arguments,
        call.owner,
        call.instance,
        call.state.value,
        call.created_at,
        call.deadline_at,
        call.deadline_max_at,
        call.timeout_s,
        call.session_id,
    )
    if inserted is not None:
        return Recorded(call=call, index=inserted[0], is_new=True)
    row = await tx.one(
        f"SELECT {_COLUMNS}, request_index, digest, kind FROM calls WHERE session_id = ? AND call_key = ?",  # noqa: S608
        call.session_id,
        call.call_key,
    )
    assert row is not None
    if row[-2] != digest or row[-1] != KIND:
        raise CallKeyReused("this call key was used for another call: every call needs a fresh one")
    return Recorded(call=_call(row), index=row[-3], is_new=False)


async def end(tx: Tx, call: Call, stimulus: Stimulus, now: float) -> bool:
    """Write a call's end; False where somebody else ended it first, or an answer came after the deadline."""
    if stimulus in (Stimulus.ANSWER, Stimulus.FAIL):
        condition, extra = " AND deadline_at > ?", (now,)
    else:
        condition, extra = "", ()
    changed = await tx.run(
        "UPDATE calls SET state = ?, ended_at = ?, outcome = ?"  # noqa: S608
        f" WHERE request_id = ? AND state = 'pending'{condition}",
        call.state.value,
        call.ended_at,
        call.outcome,
        call.request_id,
        *extra,
    )
    return changed == 1


async def extend(tx: Tx, request_id: str, deadline_at: float) -> bool:
    changed = await tx.run(
        "UPDATE calls SET deadline_at = min(deadline_max_at, max(deadline_at, ?))"
        " WHERE request_id = ? AND state = 'pending'",
        deadline_at,
        request_id,
    )
    return changed == 1


async def find(tx: Tx, session_id: str, request_id: str) -> Call | None:
    row = await tx.one(
        f"SELECT {_COLUMNS} FROM calls WHERE request_id = ? AND session_id = ? AND kind = ?",  # noqa: S608
        request_id,
        session_id,
        KIND,
    )
    return _call(row) if row is not None else None


async def arguments(tx: Tx, request_id: str) -> bytes:
    row = await tx.one("SELECT arguments FROM calls WHERE request_id = ?", request_id)
    return row[0] if row is not None else b"{}"


async def pending(tx: Tx) -> list[tuple[Call, int, bytes]]:
    """Every pending call of this database, oldest first, with the index of its request and its arguments."""
    rows = await tx.all(
        f"SELECT {_COLUMNS}, request_index, arguments FROM calls"  # noqa: S608
        " WHERE state = 'pending' AND kind = ? ORDER BY created_at",
        KIND,
    )
    return [(_call(row), row[-2], row[-1]) for row in rows]


async def count_delivery(tx: Tx, request_id: str, redelivery: int) -> None:
    await tx.run("UPDATE calls SET redelivery = ? WHERE request_id = ? AND state = 'pending'", redelivery, request_id)


async def forget(tx: Tx, ended_before: float, rows: int) -> int:
    """Delete outcomes of sessions that ended long ago; later answers to them are `unknown`."""
    return await tx.run(
        "DELETE FROM calls WHERE request_id IN (SELECT request_id FROM calls JOIN sessions ON sessions.id = session_id"
        " WHERE sessions.ended_at < ? AND calls.ended_at IS NOT NULL LIMIT ?)",
        ended_before,
        rows,
    )
