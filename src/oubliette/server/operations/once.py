"""A writing request out of a box happens at most once per call key.

Its row is `running` before the operation begins and holds the outcome with the commit of the effect. The same key again
joins what runs here, or gets the stored outcome; a row found running that nothing here runs was cut off by a crash,
and is answered `outcome_unknown` rather than run again blindly.

Two operations have an effect before the outcome is there. `session_cancel` moves no row but the agent: what it did is
kept behind it. `project_delete` empties a large project in commits of its own, and keeps its outcome with the last.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable

from oubliette.server import ids
from oubliette.server.clock import Clock
from oubliette.server.errors import CallKeyReused, InvalidParams, OutcomeUnknown
from oubliette.server.marks import Mark, unmarked
from oubliette.server.storage.database import Database, Row, Tx
from oubliette.wire.relay import CALL_KEY_MAX

logger = logging.getLogger(__name__)

KIND = "operation"

# Keeps an outcome in the transaction that has the effect. None: it is there, and its answer is not for keeping.
KeepOutcome = Callable[[Tx, bytes | None], Awaitable[None]]


class Once:
    def __init__(self, database: Database, clock: Clock, mark: Mark = unmarked) -> None:
        self._database = database
        self._clock = clock
        self._mark = mark
        self._running: dict[tuple[str, str], asyncio.Future[bytes]] = {}

    async def run(
        self,
        session_id: str,
        call_key: str | None,
        tool: str,
        arguments: bytes,
        work: Callable[[KeepOutcome], Awaitable[bytes]],
        *,
        is_secret: bool = False,
    ) -> bytes:
        """Do the work and keep its outcome, or give what the same key got before.

        The work keeps its outcome with its effect; where it kept none, or has more to say by the end, that is kept
        then. What fails behind an effect does not hide it: the outcome is what was kept. One that is secret is kept
        nowhere.
        """
        key = call_key or ids.new_key()
        if len(key) > CALL_KEY_MAX:
            raise InvalidParams(f"a call key has at most {CALL_KEY_MAX} characters")
        digest = hashlib.sha256(tool.encode() + b"\0" + arguments).digest()
        found = await self._enter(session_id, key, tool, digest)
        if found is not None:
            return await self._again(session_id, key, digest, found)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._running[session_id, key] = future

        async def keep(tx: Tx, outcome: bytes | None) -> None:
            await self._keep(tx, session_id, key, None if is_secret else outcome)

        try:
            outcome = await self._outcome(session_id, key, work, keep)
            future.set_result(outcome)
            return outcome
        except Exception as failure:
            future.set_exception(failure)
            future.exception()
            raise
        finally:
            # Cut off by the end of the server, the row stays `running`: nobody knows.
            future.cancel()
            del self._running[session_id, key]

    async def _outcome(
        self, session_id: str, key: str, work: Callable[[KeepOutcome], Awaitable[bytes]], keep: KeepOutcome
    ) -> bytes:
        try:
            self._mark("operation:after_row")
            outcome = await work(keep)
            self._mark("operation:after_effect")
            await self._database.write(lambda tx: keep(tx, outcome))
            return outcome
        except Exception:
            kept = await self._give_up(session_id, key)
            if kept is None:
                raise
            logger.exception("what follows an effect failed", extra={"session_id": session_id})
            return kept

    async def _enter(self, session_id: str, key: str, tool: str, digest: bytes) -> Row | None:
        now = self._clock.now()

        async def write(tx: Tx) -> Row | None:
            entered = await tx.run(
                "INSERT INTO calls (request_id, session_id, call_key, kind, tool, digest, state, created_at)"
                " VALUES (?, ?, ?, ?, ?, ?, 'running', ?) ON CONFLICT (session_id, request_id) DO NOTHING",
                ids.call_uuid(session_id, key),
                session_id,
                key,
                KIND,
                tool,
                digest,
                now,
            )
            if entered == 1:
                return None
            return await tx.one(
                "SELECT digest, state, outcome FROM calls WHERE session_id = ? AND request_id = ?",
                session_id,
                ids.call_uuid(session_id, key),
            )

        return await self._database.write(write)

    async def _again(self, session_id: str, key: str, digest: bytes, found: Row) -> bytes:
        if found[0] != digest:
            raise CallKeyReused("this call key was used for another call: every call needs a fresh one")
        running = self._running.get((session_id, key))
        if running is not None:
            return await asyncio.shield(running)
        if found[1] == "done":
            if found[2] is None:
                raise OutcomeUnknown("this was done; its answer holds a secret, which is told once and kept nowhere")
            return found[2]
        raise OutcomeUnknown(
            "the server stopped while this call ran: whether it took effect is not known. Look before you repeat it"
        )

    async def _keep(self, tx: Tx, session_id: str, key: str, outcome: bytes | None) -> None:
        await tx.run(
            "UPDATE calls SET state = 'done', outcome = ?, ended_at = ? WHERE session_id = ? AND request_id = ?",
            outcome,
            self._clock.now(),
            session_id,
            ids.call_uuid(session_id, key),
        )

    async def _give_up(self, session_id: str, key: str) -> bytes | None:
        """Free the key for another try, unless an outcome is there: that one, if it is not a secret."""
        call_id = ids.call_uuid(session_id, key)

        async def write(tx: Tx) -> bytes | None:
            found = await tx.one(
                "SELECT outcome FROM calls WHERE session_id = ? AND request_id = ? AND state = 'done'",
                session_id,
                call_id,
            )
            if found is not None:
                return found[0]
            await tx.run("DELETE FROM calls WHERE session_id = ? AND request_id = ?", session_id, call_id)
            return None

        return await self._database.write(write)
