"""The rows of caller-tool calls: what the ledger decides, applied in one conditional statement each."""

from dataclasses import dataclass

from oubliette.server import ids
from oubliette.server.caller_tools.ledger import ANSWERS, Call, State, Stimulus
from oubliette.server.errors import CallKeyReused
from oubliette.server.storage.database import Row, Tx

KIND = "caller_tool"
_COLUMNS = (
    "calls.request_id, calls.session_id, calls.call_key, calls.tool, calls.owner, calls.created_at, calls.deadline_at,"
    " calls.deadline_max_at, calls.timeout_s, calls.instance, calls.state, calls.redelivery, calls.ended_at,"
    " calls.outcome"
)
_INSERT = (
    "INSERT INTO calls (request_id, session_id, call_key, kind, tool, digest, arguments, owner, instance, state,"
    " created_at, deadline_at, deadline_max_at, timeout_s, request_index)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, (SELECT next_index FROM logs WHERE session_id = ?))"
    " ON CONFLICT (session_id, request_id) DO NOTHING"
)
_BY_KEY = (
    f"SELECT {_COLUMNS}, request_index, digest, kind FROM calls"  # noqa: S608 - names of columns, all ours
    " WHERE session_id = ? AND request_id = ?"
)
_BY_ID = f"SELECT {_COLUMNS} FROM calls WHERE session_id = ? AND request_id = ? AND kind = ?"  # noqa: S608
_PENDING = (
    f"SELECT {_COLUMNS}, request_index, digest, arguments FROM calls"  # noqa: S608
    " JOIN sessions ON sessions.id = calls.session_id WHERE calls.state = 'pending' AND calls.kind = ?"
)
_OLDEST_FIRST = " ORDER BY calls.created_at, calls.request_index"
_END = (
    "UPDATE calls SET state = ?, ended_at = ?, outcome = ?"
    " WHERE session_id = ? AND request_id = ? AND state = 'pending'"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """The call that had this key before."""

    call: Call
    index: int  # of its request in the session's log


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A call as a server takes it up again."""

    call: Call
    index: int
    digest: bytes
    arguments: bytes


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


async def insert(tx: Tx, call: Call, *, digest: bytes, arguments: bytes) -> Recorded | None:
    """Insert a call, or find the one that has its key. Raises `CallKeyReused` where that was another call.

    The next event that the same transaction appends to the session's log must be the call's request.
    """
    inserted = await tx.run(
        _INSERT,
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
    if inserted == 1:
        return None
    row = await tx.one(_BY_KEY, call.session_id, call.request_id)
    assert row is not None
    if row[-2] != digest or row[-1] != KIND:
        raise CallKeyReused("this call key was used for another call: every call needs a fresh one")
    return Recorded(call=_call(row), index=row[-3])


async def end(tx: Tx, call: Call, stimulus: Stimulus, now: float) -> bool:
    """Write a call's end; False where somebody else ended it first, or the deadline says otherwise.

    An answer has to come before the deadline; an expiry is only that of the deadline it waited for.
    """
    ending = (call.state.value, call.ended_at, call.outcome, call.session_id, call.request_id)
    if stimulus in ANSWERS:
        changed = await tx.run(_END + " AND deadline_at > ?", *ending, now)
    elif stimulus is Stimulus.EXPIRE:
        changed = await tx.run(_END + " AND deadline_at <= ?", *ending, call.deadline_at)
    else:
        changed = await tx.run(_END, *ending)
    return changed == 1


async def extend(tx: Tx, session_id: str, request_id: str, deadline_at: float) -> float | None:
    """Move a pending call's deadline on, never back and not beyond its maximum: where it is then."""
    row = await tx.one(
        "UPDATE calls SET deadline_at = min(deadline_max_at, max(deadline_at, ?))"
        " WHERE session_id = ? AND request_id = ? AND state = 'pending' RETURNING deadline_at",
        deadline_at,
        session_id,
        request_id,
    )
    return row[0] if row is not None else None


async def find(tx: Tx, session_id: str, request_id: str) -> Call | None:
    row = await tx.one(_BY_ID, session_id, request_id, KIND)
    return _call(row) if row is not None else None


async def of_key(tx: Tx, session_id: str, call_key: str) -> tuple[Call, bytes] | None:
    """The caller-tool call of this key, with its digest."""
    row = await tx.one(_BY_KEY, session_id, ids.call_uuid(session_id, call_key))
    return (_call(row), row[-2]) if row is not None and row[-1] == KIND else None


async def pending(tx: Tx) -> list[Stored]:
    """Every pending call of a session that lives, oldest first."""
    return [_stored(row) for row in await tx.all(_PENDING + " AND sessions.ended_at IS NULL" + _OLDEST_FIRST, KIND)]


async def orphans(tx: Tx) -> list[Stored]:
    """Pending calls of sessions that have ended: nobody will end them any more."""
    rows = await tx.all(_PENDING + " AND sessions.ended_at IS NOT NULL" + _OLDEST_FIRST, KIND)
    return [_stored(row) for row in rows]


def _stored(row: Row) -> Stored:
    return Stored(call=_call(row), index=row[-3], digest=row[-2], arguments=row[-1])


async def count_delivery(tx: Tx, session_id: str, request_id: str, redelivery: int) -> None:
    await tx.run(
        "UPDATE calls SET redelivery = ? WHERE session_id = ? AND request_id = ? AND state = 'pending'",
        redelivery,
        session_id,
        request_id,
    )


async def forget(tx: Tx, ended_before: float, rows: int) -> int:
    """Delete calls of sessions that ended long ago; later answers to them are `unknown`."""
    return await tx.run(
        "DELETE FROM calls WHERE (session_id, request_id) IN (SELECT calls.session_id, calls.request_id FROM sessions"
        " CROSS JOIN calls WHERE calls.session_id = sessions.id AND sessions.ended_at < ? LIMIT ?)",
        ended_before,
        rows,
    )
