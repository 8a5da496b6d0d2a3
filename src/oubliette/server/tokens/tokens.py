"""Issue, verify and revoke tokens.

A token is `oub_` and 64 hex digits, 256 random bits, shown once. Stored is its SHA-256: with that much entropy a
slow password hash would protect nothing and cost every call. Verified at every use, never cached: a key revoked a
second ago must not work.
"""

import hashlib
import re
from dataclasses import dataclass

from oubliette.server import ids
from oubliette.server.clock import Clock
from oubliette.server.errors import Conflict, NotFound, Unauthenticated
from oubliette.server.storage.database import Database, Row, Tx
from oubliette.server.tokens.token import Actor, Scope, Token

PREFIX = "oub_"
_SECRET = re.compile(r"oub_[0-9a-f]{64}\Z")
_COLUMNS = "id, principal, name, hint, scope, project_id, session_id, created_at, expires_at, revoked_at, last_used_at"
_VERIFY = (
    "SELECT id, principal, scope, project_id, session_id, expires_at, revoked_at, last_used_at"
    " FROM tokens WHERE hash = ?"
)
# Whether the token that started a session lives; this machine's administrator has none, and lives.
_STARTER = (
    "SELECT sessions.token_id IS NULL OR (tokens.id IS NOT NULL AND tokens.revoked_at IS NULL"
    " AND (tokens.expires_at IS NULL OR tokens.expires_at > ?))"
    " FROM sessions LEFT JOIN tokens ON tokens.id = sessions.token_id WHERE sessions.id = ?"
)
# Of a token that a person made; its parameter is the time.
_LIVES = "session_id IS NULL AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > ?)"
_SCOPES = {scope.value: scope for scope in Scope}
# `last_used_at` is for people; a write per call would be for nobody.
USED_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class Issued:
    """A fresh token with its secret; the only place where both are together."""

    token: Token
    secret: str

    def __repr__(self) -> str:
        return f"Issued(token={self.token!r})"


def hashed(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def _token(row: Row) -> Token:
    return Token(
        id=row[0],
        principal=row[1],
        name=row[2],
        hint=row[3],
        scope=Scope(row[4]),
        project_id=row[5],
        session_id=row[6],
        created_at=row[7],
        expires_at=row[8],
        revoked_at=row[9],
        last_used_at=row[10],
    )


class Tokens:
    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def verify(self, secret: str | None, *, session_id: str | None = None) -> Actor:
        """Who this key is, now. `session_id` is the session whose relay socket the key came by, if it did.

        Raises `Unauthenticated`. A key that the server derived for a session is good on that session's socket only,
        and no longer than the token that started the session.
        """
        if secret is None or not _SECRET.match(secret):
            raise Unauthenticated
        digest = hashed(secret)
        now = self._clock.now()

        async def find(tx: Tx) -> Row | None:
            row = await tx.one(_VERIFY, digest)
            return row if row is not None and await _is_backed(tx, row[4], now) else None

        row = await self._database.read(find)
        if row is None:
            raise Unauthenticated
        token_id, principal, scope, project_id, derived_for, expires_at, revoked_at, used_at = row
        if revoked_at is not None or (expires_at is not None and expires_at <= now):
            raise Unauthenticated
        if derived_for is not None and derived_for != session_id:
            raise Unauthenticated
        if used_at is None or now - used_at > USED_EVERY_S:
            await self._used(token_id, now)
        return Actor(
            principal=principal,
            scope=_SCOPES[scope],
            token_id=token_id,
            project_id=project_id,
            session_id=session_id,
            derived=derived_for is not None,
        )

    async def is_live(self, token_id: str) -> bool:
        """Whether the token could still be verified now; for streams that outlive the call that opened them."""

        now = self._clock.now()

        async def find(tx: Tx) -> bool:
            row = await tx.one("SELECT session_id, revoked_at, expires_at FROM tokens WHERE id = ?", token_id)
            if row is None or row[1] is not None or (row[2] is not None and row[2] <= now):
                return False
            return await _is_backed(tx, row[0], now)

        return await self._database.read(find)

    async def _used(self, token_id: str, now: float) -> None:
        async def touch(tx: Tx) -> None:
            await tx.run("UPDATE tokens SET last_used_at = ? WHERE id = ?", now, token_id)

        await self._database.write(touch)


async def _is_backed(tx: Tx, derived_for: str | None, now: float) -> bool:
    """Whether what a key was derived from is there: its session, and the token that started that."""
    if derived_for is None:
        return True
    row = await tx.one(_STARTER, now, derived_for)
    return row is not None and bool(row[0])


async def issue(
    tx: Tx,
    *,
    name: str,
    scope: Scope,
    now: float,
    expires_at: float | None = None,
    project_id: str | None = None,
    derived_for: str | None = None,
    creator: str | None = None,
) -> Issued:
    """Make a token. `derived_for` is the session that it lives and dies with; it is then owned by that session."""
    if derived_for is None and await find_name(tx, name, now) is not None:
        raise Conflict(f"a token named {name!r} exists: choose another name or revoke that one first")
    secret = PREFIX + ids.new_key()
    token = Token(
        id=ids.new_token_id(),
        principal=ids.new_principal(),
        name=name,
        hint=secret[-4:],
        scope=scope,
        project_id=project_id,
        session_id=derived_for,
        created_at=now,
        expires_at=expires_at,
        revoked_at=None,
        last_used_at=None,
    )
    await tx.run(
        "INSERT INTO tokens (id, principal, name, hash, hint, scope, project_id, session_id, creator, created_at,"
        " expires_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        token.id,
        token.principal,
        name,
        hashed(secret),
        token.hint,
        scope.value,
        project_id,
        derived_for,
        creator,
        now,
        expires_at,
    )
    return Issued(token, secret)


async def listed(tx: Tx, *, limit: int, offset: int) -> list[Token]:
    """Tokens that people made, newest first."""
    rows = await tx.all(
        f"SELECT {_COLUMNS} FROM tokens WHERE session_id IS NULL ORDER BY created_at DESC, id LIMIT ? OFFSET ?",  # noqa: S608
        limit,
        offset,
    )
    return [_token(row) for row in rows]


async def revoke(tx: Tx, id_or_name: str, now: float) -> Token:
    """Revoke by public id or by name; revoking twice is no error. Refuses to revoke the last live admin token."""
    row = await tx.one(
        f"SELECT {_COLUMNS} FROM tokens WHERE session_id IS NULL AND (id = ? OR name = ?)"  # noqa: S608
        " ORDER BY revoked_at IS NOT NULL, created_at DESC",
        id_or_name,
        id_or_name,
    )
    if row is None:
        raise NotFound(f"no token has the id or name {id_or_name!r}: token_list shows them")
    token = _token(row)
    if token.revoked_at is not None:
        return token
    if token.scope is Scope.ADMIN and (token.expires_at is None or token.expires_at > now):
        other = await tx.one(f"SELECT 1 FROM tokens WHERE scope = 'admin' AND id <> ? AND {_LIVES}", token.id, now)  # noqa: S608
        if other is None:
            raise Conflict("this is the last live admin token: create another before you revoke it")
    await tx.run("UPDATE tokens SET revoked_at = ? WHERE id = ?", now, token.id)
    return token


async def revoke_derived(tx: Tx, session_id: str, now: float) -> None:
    """A session's derived key dies with it."""
    await tx.run("UPDATE tokens SET revoked_at = ? WHERE session_id = ? AND revoked_at IS NULL", now, session_id)


async def revoke_narrowed(tx: Tx, project_id: str, now: float) -> None:
    """A token that is narrowed to a project dies with it."""
    await tx.run("UPDATE tokens SET revoked_at = ? WHERE project_id = ? AND revoked_at IS NULL", now, project_id)


async def forget_derived(tx: Tx, revoked_before: float, rows: int) -> int:
    """Delete so many derived keys that died long ago; the audit keeps who used them."""
    return await tx.run(
        "DELETE FROM tokens WHERE id IN"
        " (SELECT id FROM tokens WHERE session_id IS NOT NULL AND revoked_at < ? LIMIT ?)",
        revoked_before,
        rows,
    )


async def has_admin(tx: Tx, now: float) -> bool:
    return await tx.one(f"SELECT 1 FROM tokens WHERE scope = 'admin' AND {_LIVES}", now) is not None  # noqa: S608


async def find_name(tx: Tx, name: str, now: float) -> str | None:
    """The id of the live token of this name."""
    row = await tx.one(f"SELECT id FROM tokens WHERE name = ? AND {_LIVES}", name, now)  # noqa: S608
    return row[0] if row is not None else None
