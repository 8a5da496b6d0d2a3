"""Operations on tokens."""

from typing import Annotated

import msgspec
from msgspec import Meta

from oubliette.server import audit
from oubliette.server.errors import InvalidParams
from oubliette.server.limits import NAME_CHARS, TOKEN_LIFE_S_MAX
from oubliette.server.operations.choices import Limit, Offset
from oubliette.server.operations.operation import Asked, Operation, Rooms, Target
from oubliette.server.projects import projects
from oubliette.server.storage.database import Tx
from oubliette.server.tokens import tokens
from oubliette.server.tokens.token import Reach, Scope, Token


class TokenCreate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=NAME_CHARS, description="Unique among tokens that live.")]
    scope: Annotated[
        str,
        Meta(
            max_length=NAME_CHARS,
            description="admin, write or read; or project:<id> to write in one project alone, project:<id>:ro to read"
            " it.",
        ),
    ]
    expires_in_s: (
        Annotated[float, Meta(gt=0, le=TOKEN_LIFE_S_MAX, description="Lives so many seconds; without, until revoked.")]
        | None
    ) = None


class TokenCreated(msgspec.Struct, kw_only=True):
    id: str
    token: Annotated[str, Meta(description="The secret. It is shown this once and stored nowhere.")]
    name: str
    scope: str
    expires_at: float | None


class TokenList(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    limit: Limit = 50
    offset: Offset = 0


class TokenShown(msgspec.Struct, kw_only=True):
    id: str
    name: str
    scope: str
    hint: Annotated[str, Meta(description="The secret's last four digits.")]
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None


class TokensShown(msgspec.Struct, kw_only=True):
    tokens: list[TokenShown]


class TokenRevoke(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    token_id: Annotated[str, Meta(description="The public id (tok_…) or the name.")]


class TokenRevoked(msgspec.Struct, kw_only=True):
    id: str
    name: str
    revoked: bool


async def create(rooms: Rooms, asked: Asked, params: TokenCreate) -> TokenCreated:
    now = rooms.clock.now()
    expires_at = now + params.expires_in_s if params.expires_in_s is not None else None
    reach = Reach.parse(params.scope)
    if reach is None:
        raise InvalidParams(
            f"scope {params.scope!r} is none: admin, write, read, or for one project project:<id> or project:<id>:ro"
        )

    async def write(tx: Tx) -> TokenCreated:
        if reach.project_id is not None:
            await projects.get(tx, reach.project_id)
        issued = await tokens.issue(
            tx,
            name=params.name,
            scope=reach.scope,
            project_id=reach.project_id,
            now=now,
            expires_at=expires_at,
            creator=asked.actor.principal,
        )
        await audit.write(tx, now, asked.entry("token_create", issued.token.id))
        created = TokenCreated(
            id=issued.token.id, token=issued.secret, name=params.name, scope=str(reach), expires_at=expires_at
        )
        await asked.keep(tx, created)
        return created

    return await rooms.database.write(write)


def _shown(token: Token) -> TokenShown:
    return TokenShown(
        id=token.id,
        name=token.name,
        scope=str(token.reach),
        hint=token.hint,
        created_at=token.created_at,
        expires_at=token.expires_at,
        revoked_at=token.revoked_at,
        last_used_at=token.last_used_at,
    )


async def listed(rooms: Rooms, asked: Asked, params: TokenList) -> TokensShown:
    del asked
    found = await rooms.database.read(lambda tx: tokens.listed(tx, limit=params.limit, offset=params.offset))
    return TokensShown(tokens=[_shown(token) for token in found])


async def revoke(rooms: Rooms, asked: Asked, params: TokenRevoke) -> TokenRevoked:
    now = rooms.clock.now()

    async def write(tx: Tx) -> TokenRevoked:
        token = await tokens.revoke(tx, params.token_id, now)
        await audit.write(tx, now, asked.entry("token_revoke", token.id))
        revoked = TokenRevoked(id=token.id, name=token.name, revoked=True)
        await asked.keep(tx, revoked)
        return revoked

    return await rooms.database.write(write)


OPERATIONS = (
    Operation(
        name="token_create",
        title="Create a token",
        scope=Scope.ADMIN,
        target=Target.NOTHING,
        everywhere=True,
        params=TokenCreate,
        result=TokenCreated,
        summary="Create an API token. The answer holds its secret, once.",
        run=create,
        writes=True,
        shown_once=True,
        derived=False,
    ),
    Operation(
        name="token_list",
        title="List tokens",
        scope=Scope.ADMIN,
        target=Target.NOTHING,
        everywhere=True,
        params=TokenList,
        result=TokensShown,
        summary="List the tokens that people made, newest first, without their secrets.",
        run=listed,
        writes=False,
        derived=False,
    ),
    Operation(
        name="token_revoke",
        title="Revoke a token",
        scope=Scope.ADMIN,
        target=Target.NOTHING,
        everywhere=True,
        params=TokenRevoke,
        result=TokenRevoked,
        summary="Revoke a token by its id or name; it stops working at once, its open streams within a second.",
        run=revoke,
        writes=True,
        destructive=True,
        derived=False,
    ),
)
