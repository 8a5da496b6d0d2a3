"""Legacy MCP sessions: rows, so that any server takes up any session, before or after a restart.

A session belongs to the principal that opened it: to anybody else it does not exist. Answers about a session are
kept for a second; a change made by another server is seen within it.
"""

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from oubliette.server.clock import Clock
from oubliette.server.errors import TooMany
from oubliette.server.ids import new_key
from oubliette.server.limits import MCP_SESSION_IDLE_S, MCP_SESSIONS_PER_PRINCIPAL
from oubliette.server.storage.database import Database, Row, Tx
from oubliette.server.tokens.token import Actor

BELIEVED_S = 1.0
# A session's last use is written at most this often.
TOUCH_S = 60.0
KEPT_MAX = 4096
PURGE_ROWS = 500

_COLUMNS = "id, principal, version, capabilities, log_level, subscriptions, seen_at"


@dataclass(frozen=True, slots=True)
class McpSession:
    id: str
    principal: str
    version: str
    capabilities: dict[str, Any]
    log_level: str | None
    subscriptions: tuple[str, ...]
    seen_at: float


class McpSessions:
    def __init__(
        self,
        database: Database,
        clock: Clock,
        *,
        idle_s: float = MCP_SESSION_IDLE_S,
        per_principal: int = MCP_SESSIONS_PER_PRINCIPAL,
    ) -> None:
        self._database = database
        self._clock = clock
        self._idle_s = idle_s
        self._per_principal = per_principal
        self._believed: dict[str, tuple[float, McpSession]] = {}

    async def open(self, actor: Actor, version: str, capabilities: object, client: object) -> McpSession:
        """Raises `TooMany` where the principal has as many as it may."""
        now = self._clock.now()
        session = McpSession(new_key(), actor.principal, version, _object(capabilities), None, (), now)

        async def unit(tx: Tx) -> int:
            await tx.run(
                "DELETE FROM mcp_sessions WHERE principal = ? AND seen_at < ?", actor.principal, now - self._idle_s
            )
            row = await tx.one("SELECT COUNT(*) FROM mcp_sessions WHERE principal = ?", actor.principal)
            assert row is not None
            if row[0] < self._per_principal:
                await tx.run(
                    "INSERT INTO mcp_sessions (id, principal, token_id, version, capabilities, client, created_at,"
                    " seen_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    session.id,
                    actor.principal,
                    actor.token_id,
                    version,
                    msgspec.json.encode(session.capabilities).decode(),
                    msgspec.json.encode(_object(client)).decode(),
                    now,
                    now,
                )
            return int(row[0])

        if await self._database.write(unit) >= self._per_principal:
            raise TooMany(
                f"this key has {self._per_principal} MCP sessions open: end one (DELETE), or wait until one"
                f" has been idle for {self._idle_s / 60:.0f} minutes"
            )
        return session

    async def find(self, session_id: str, principal: str) -> McpSession | None:
        """The session, if it lives and is this principal's; using it keeps it alive."""
        kept = self._believed.get(session_id)
        if kept is not None and kept[0] > self._clock.monotonic():
            session: McpSession | None = kept[1]
        else:
            session = await self._load(session_id)
        if session is None or session.principal != principal:
            return None
        now = self._clock.now()
        if session.seen_at < now - self._idle_s:
            self._believed.pop(session_id, None)
            return None
        if session.seen_at < now - min(TOUCH_S, self._idle_s / 4):
            session = self._believe(replace(session, seen_at=now))
            await self.touch([session_id])
        return session

    async def touch(self, session_ids: list[str]) -> float:
        """Note that these are in use; returns the time that was noted."""
        now = self._clock.now()

        async def unit(tx: Tx) -> None:
            for session_id in session_ids:
                await tx.run("UPDATE mcp_sessions SET seen_at = ? WHERE id = ?", now, session_id)

        if session_ids:
            await self._database.write(unit)
        return now

    async def alive(self, session_ids: list[str]) -> dict[str, McpSession]:
        """Those of these that still exist, as they are in the database now."""

        async def unit(tx: Tx) -> list[Row]:
            marks = ", ".join("?" * len(session_ids))
            return await tx.all(f"SELECT {_COLUMNS} FROM mcp_sessions WHERE id IN ({marks})", *session_ids)  # noqa: S608

        if not session_ids:
            return {}
        return {row[0]: _session(row) for row in await self._database.read(unit)}

    async def initialized(self, session: McpSession) -> None:
        await self._update(session, "initialized = ?", 1)

    async def set_level(self, session: McpSession, level: str) -> McpSession:
        await self._update(session, "log_level = ?", level)
        return self._believe(replace(session, log_level=level))

    async def set_subscriptions(self, session: McpSession, uris: tuple[str, ...]) -> McpSession:
        await self._update(session, "subscriptions = ?", msgspec.json.encode(uris).decode())
        return self._believe(replace(session, subscriptions=uris))

    async def end(self, session: McpSession) -> None:
        self._believed.pop(session.id, None)

        async def unit(tx: Tx) -> int:
            return await tx.run("DELETE FROM mcp_sessions WHERE id = ?", session.id)

        await self._database.write(unit)

    async def purge(self) -> list[str]:
        """Remove sessions that nobody used for too long; returns which."""
        before = self._clock.now() - self._idle_s

        async def unit(tx: Tx) -> list[str]:
            rows = await tx.all("SELECT id FROM mcp_sessions WHERE seen_at < ? LIMIT ?", before, PURGE_ROWS)
            for (session_id,) in rows:
                await tx.run("DELETE FROM mcp_sessions WHERE id = ?", session_id)
            return [row[0] for row in rows]

        gone = await self._database.write(unit)
        for session_id in gone:
            self._believed.pop(session_id, None)
        return gone

    async def _load(self, session_id: str) -> McpSession | None:
        async def unit(tx: Tx) -> Row | None:
            return await tx.one(f"SELECT {_COLUMNS} FROM mcp_sessions WHERE id = ?", session_id)  # noqa: S608

        row = await self._database.read(unit)
        if row is None:
            self._believed.pop(session_id, None)
            return None
        return self._believe(_session(row))

    def _believe(self, session: McpSession) -> McpSession:
        if len(self._believed) >= KEPT_MAX:
            self._believed.clear()
        self._believed[session.id] = (self._clock.monotonic() + BELIEVED_S, session)
        return session

    async def _update(self, session: McpSession, assignment: str, value: object) -> None:
        async def unit(tx: Tx) -> int:
            return await tx.run(f"UPDATE mcp_sessions SET {assignment} WHERE id = ?", value, session.id)  # noqa: S608

        await self._database.write(unit)
        self._believed.pop(session.id, None)


def _session(row: Row) -> McpSession:
    session_id, principal, version, capabilities, log_level, subscriptions, seen_at = row
    return McpSession(
        session_id,
        principal,
        version,
        msgspec.json.decode(capabilities),
        log_level,
        tuple(msgspec.json.decode(subscriptions)),
        seen_at,
    )


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}  # pyright: ignore[reportUnknownVariableType]
