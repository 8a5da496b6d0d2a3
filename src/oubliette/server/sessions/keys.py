"""The key that a droid gets for the platform's tools.

Either one that the server derives for it, at each start of a droid: no more than the creator's rights at that
moment, for the session's project, good on the session's own socket, dead with it. Or one that the caller brought,
which is in memory and nowhere else: after a restart a new box does without, and the log says so.
"""

from collections.abc import Sequence

from oubliette.server.clock import Clock
from oubliette.server.sessions import rows
from oubliette.server.storage.database import Database, Tx
from oubliette.server.tokens import tokens
from oubliette.server.tokens.token import Scope
from oubliette.wire.events import Event, Warn


class SessionKeys:
    def __init__(self, database: Database, clock: Clock, brought: dict[str, str]) -> None:
        self._database = database
        self._clock = clock
        self._brought = brought

    async def for_droid(self, session_id: str) -> tuple[str | None, Sequence[Event]]:
        now = self._clock.now()
        brought = self._brought.get(session_id)

        async def write(tx: Tx) -> tuple[str | None, Sequence[Event]]:
            session = await rows.get(tx, session_id)
            if session.choices.brought_key:
                return brought, () if brought is not None else (_NEEDS_KEY,)
            wanted = session.choices.oubliette_scope
            if wanted is None:
                return None, ()
            await tokens.revoke_derived(tx, session_id, now)
            scope = await _cut(tx, Scope(wanted), session.token_id, now)
            if scope is None:
                return None, (_CREATOR_GONE,)
            issued = await tokens.issue(
                tx,
                name=f"derived for {session_id}",
                scope=scope,
                now=now,
                project_id=session.project_id,
                derived_for=session_id,
                creator=session.owner,
            )
            return issued.secret, ()

        return await self._database.write(write)


async def _cut(tx: Tx, wanted: Scope, creator_id: str | None, now: float) -> Scope | None:
    """What is wanted, cut to what the creating token has now; None where that token is dead."""
    if creator_id is None:
        return wanted  # this machine's administrator, by the local door
    row = await tx.one(
        "SELECT scope FROM tokens WHERE id = ? AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > ?)",
        creator_id,
        now,
    )
    if row is None:
        return None
    return wanted if Scope(row[0]).covers(wanted) else Scope(row[0])


_NEEDS_KEY = Warn(
    kind="needs_key",
    message="the key that the caller gave was in memory only and is gone: the droid works without oubliette_* tools",
)
_CREATOR_GONE = Warn(
    kind="creator_gone",
    message="the token that started this session is revoked or expired: the droid gets no oubliette_* tools",
)
