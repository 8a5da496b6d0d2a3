"""What a token is, and whom it makes its bearer."""

import re
from dataclasses import dataclass
from enum import StrEnum

import msgspec

_NARROWED = re.compile(r"project:([0-9a-f-]{36})(:ro)?")


class Scope(StrEnum):
    """From least to most; each holds what the one before it holds."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"

    def covers(self, needed: "Scope") -> bool:
        return _RANKS[self] >= _RANKS[needed]


_RANKS = {scope: rank for rank, scope in enumerate(Scope)}
_WRITTEN = {scope.value: scope for scope in Scope}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What a token may, and where: everywhere, or in the one project that it is narrowed to.

    Written `admin`, `write` or `read`; narrowed `project:<id>`, which writes there, or `project:<id>:ro`.
    """

    scope: Scope
    project_id: str | None = None

    def __str__(self) -> str:
        if self.project_id is None:
            return self.scope.value
        return f"project:{self.project_id}" + (":ro" if self.scope is Scope.READ else "")

    @classmethod
    def parse(cls, written: str) -> "Reach | None":
        if written in _WRITTEN:
            return cls(scope=_WRITTEN[written])
        narrowed = _NARROWED.fullmatch(written)
        if narrowed is None:
            return None
        return cls(scope=Scope.READ if narrowed[2] else Scope.WRITE, project_id=narrowed[1])


class Actor(msgspec.Struct, frozen=True, kw_only=True):
    """On whose behalf something is asked, as established by a key at this very call.

    `principal` is who owns what the actor creates; it survives the rotation of tokens. `session_id` is set when the
    asking comes out of a box, whatever key it carries; `derived` when the key was made by the server for that box.

    A struct, though it crosses no wire: every request makes one, at a tenth of a frozen dataclass's price.
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

    @property
    def reach(self) -> Reach:
        return Reach(scope=self.scope, project_id=self.project_id)

    def reaches(self, project_id: str) -> bool:
        """Whether this project is there for the actor at all."""
        return self.project_id in (None, project_id)


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

    @property
    def reach(self) -> Reach:
        return Reach(scope=self.scope, project_id=self.project_id)
