"""What a token is, and whom it makes its bearer."""

from dataclasses import dataclass
from enum import StrEnum


class Scope(StrEnum):
    """From least to most; each holds what the one before it holds."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"

    def covers(self, needed: "Scope") -> bool:
        ranks = (Scope.READ, Scope.WRITE, Scope.ADMIN)
        return ranks.index(self) >= ranks.index(needed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """On whose behalf something is asked, as established by a key at this very call.

    `principal` is who owns what the actor creates; it survives the rotation of tokens. `session_id` is set when the
    asking comes out of a box, whatever key it carries; `derived` when the key was made by the server for that box.
    """

    principal: str
    scope: Scope
    token_id: str | None = None
    project_id: str | None = None
    session_id: str | None = None
    derived: bool = False

    @property
    def inside(self) -> bool:
        return self.session_id is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A stored token; the secret itself is nowhere, only its hash."""

    id: str
    principal: str
    name: str
    hint: str
    scope: Scope
    project_id: str | None
    session_id: str | None
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None
