from collections.abc import AsyncGenerator, Awaitable
from pathlib import Path

import pytest

from oubliette.server.errors import Conflict, NotFound, Unauthenticated
from oubliette.server.storage.database import Tx
from oubliette.server.storage.sqlite import SqliteDatabase
from oubliette.server.tokens import tokens
from oubliette.server.tokens.token import Reach, Scope, Token
from oubliette.server.tokens.tokens import Tokens


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.at = 1_000_000.0

    def now(self) -> float:
        return self.at

    def monotonic(self) -> float:
        return self.at


@pytest.fixture
async def database(tmp_path: Path) -> AsyncGenerator[SqliteDatabase]:
    opened = SqliteDatabase(tmp_path / "tokens.db")
    yield opened
    await opened.close()


async def issue(database: SqliteDatabase, name: str, scope: Scope = Scope.WRITE, **more: object) -> tokens.Issued:
    return await database.write(lambda tx: tokens.issue(tx, name=name, scope=scope, now=1_000_000.0, **more))  # type: ignore[arg-type]


async def test_a_token_is_shown_once_and_only_its_hash_is_stored(database: SqliteDatabase, tmp_path: Path):
    issued = await issue(database, "one")
    assert len(issued.secret) == 4 + 64
    assert issued.secret.startswith("oub_")
    assert issued.secret not in repr(issued)
    await database.close()
    for file in tmp_path.iterdir():
        assert issued.secret.encode() not in file.read_bytes()


async def test_a_live_token_says_who_its_bearer_is(database: SqliteDatabase):
    issued = await issue(database, "one", Scope.READ)
    actor = await Tokens(database, Clock()).verify(issued.secret)
    assert (actor.token_id, actor.principal, actor.scope) == (issued.token.id, issued.token.principal, Scope.READ)
    assert not actor.inside


@pytest.mark.parametrize(
    "secret", [None, "", "oub_", "oub_" + "g" * 64, "oub_" + "0" * 64, "xyz_" + "0" * 64, "\ud800"]
)
async def test_what_is_no_token_of_ours_is_refused(database: SqliteDatabase, secret: str | None):
    with pytest.raises(Unauthenticated, match="invalid or expired API key"):
        await Tokens(database, Clock()).verify(secret)


async def test_an_expired_token_is_refused_from_its_moment_on(database: SqliteDatabase):
    clock = Clock()
    issued = await issue(database, "brief", expires_at=clock.at + 10)
    keys = Tokens(database, clock)
    clock.at += 9.999
    await keys.verify(issued.secret)
    assert await keys.is_live(issued.token.id)
    clock.at += 0.001
    with pytest.raises(Unauthenticated):
        await keys.verify(issued.secret)
    assert not await keys.is_live(issued.token.id)


PROJECT = "11111111-1111-4111-8111-111111111111"


@pytest.mark.parametrize(
    ("written", "scope", "project_id"),
    [
        ("admin", Scope.ADMIN, None),
        ("write", Scope.WRITE, None),
        ("read", Scope.READ, None),
        (f"project:{PROJECT}", Scope.WRITE, PROJECT),
        (f"project:{PROJECT}:ro", Scope.READ, PROJECT),
    ],
)
def test_what_a_token_may_is_read_as_it_is_written(written: str, scope: Scope, project_id: str | None):
    reach = Reach.parse(written)
    assert reach == Reach(scope=scope, project_id=project_id)
    assert str(reach) == written


@pytest.mark.parametrize(
    "written",
    ["", "Admin", "read\n", "project:", "project:x", f"project:{PROJECT}:rw", f"project:{PROJECT}\n", PROJECT],
)
def test_what_is_written_otherwise_is_no_scope(written: str):
    assert Reach.parse(written) is None


@pytest.mark.parametrize("by", ["id", "name"])
async def test_a_token_is_revoked_by_its_id_or_its_name_and_twice_is_no_error(database: SqliteDatabase, by: str):
    issued = await issue(database, "gone")
    named = getattr(issued.token, by)
    for _ in range(2):
        assert (await database.write(lambda tx: tokens.revoke(tx, named, 2.0))).id == issued.token.id
    with pytest.raises(Unauthenticated):
        await Tokens(database, Clock()).verify(issued.secret)


async def test_revoking_what_does_not_exist_says_so(database: SqliteDatabase):
    with pytest.raises(NotFound, match="no token has the id or name 'tok_nothing'"):
        await database.write(lambda tx: tokens.revoke(tx, "tok_nothing", 2.0))


async def test_the_last_admin_cannot_be_revoked(database: SqliteDatabase):
    first = await issue(database, "first", Scope.ADMIN)
    with pytest.raises(Conflict, match="last live admin"):
        await database.write(lambda tx: tokens.revoke(tx, "first", 2.0))
    await issue(database, "second", Scope.ADMIN)
    await database.write(lambda tx: tokens.revoke(tx, "first", 2.0))
    with pytest.raises(Unauthenticated):
        await Tokens(database, Clock()).verify(first.secret)


async def test_a_name_is_free_again_once_its_token_is_revoked(database: SqliteDatabase):
    await issue(database, "name")
    with pytest.raises(Conflict, match="a token named 'name' exists"):
        await issue(database, "name")
    await database.write(lambda tx: tokens.revoke(tx, "name", 2.0))
    await issue(database, "name")


async def test_a_name_is_free_again_from_the_moment_on_that_its_token_expires(database: SqliteDatabase):
    old = await issue(database, "name", expires_at=1_000_000.5)
    with pytest.raises(Conflict, match="a token named 'name' exists"):
        await issue(database, "name")

    def made(tx: Tx) -> Awaitable[tokens.Issued]:
        return tokens.issue(tx, name="name", scope=Scope.WRITE, now=1_000_000.5)

    new = await database.write(made)
    assert await database.read(lambda tx: tokens.find_name(tx, "name", 1_000_001.0)) == new.token.id != old.token.id
    revoked = await database.write(lambda tx: tokens.revoke(tx, "name", 1_000_001.0))
    assert revoked.id == new.token.id, "a name is that of the token that lives"


async def test_an_admin_that_has_expired_is_not_the_last_live_one(database: SqliteDatabase):
    await issue(database, "brief", Scope.ADMIN, expires_at=1_000_010.0)
    with pytest.raises(Conflict, match="last live admin"):
        await database.write(lambda tx: tokens.revoke(tx, "brief", 1_000_009.0))
    await database.write(lambda tx: tokens.revoke(tx, "brief", 1_000_010.0))


async def start(database: SqliteDatabase, session_id: str, token_id: str | None) -> None:
    """A session's row, as far as tokens look at it."""
    await database.write(
        lambda tx: tx.run(
            "INSERT INTO sessions (id, project_id, workspace_id, owner, token_id, state, root_id, depth, settings,"
            " created_at, updated_at) VALUES (?, 'p', 'w', 'o', ?, 'idle', ?, 0, '{}', 1.0, 1.0)",
            session_id,
            token_id,
            session_id,
        )
    )


async def test_a_derived_key_is_good_on_its_sessions_socket_only(database: SqliteDatabase):
    await start(database, "gogol_a", token_id=None)
    issued = await issue(database, "derived", derived_for="gogol_a", project_id="p")
    keys = Tokens(database, Clock())
    actor = await keys.verify(issued.secret, session_id="gogol_a")
    assert (actor.derived, actor.session_id, actor.project_id) == (True, "gogol_a", "p")
    for elsewhere in (None, "gogol_b"):
        with pytest.raises(Unauthenticated):
            await keys.verify(issued.secret, session_id=elsewhere)
    await database.write(lambda tx: tokens.revoke_derived(tx, "gogol_a", 2.0))
    with pytest.raises(Unauthenticated):
        await keys.verify(issued.secret, session_id="gogol_a")


@pytest.mark.parametrize("how", ["revoked", "expired"])
async def test_a_derived_key_dies_with_the_token_that_started_its_session(database: SqliteDatabase, how: str):
    clock = Clock()
    creator = await issue(database, "creator", expires_at=clock.at + 10)
    for session_id, token_id in (("gogol_a", creator.token.id), ("gogol_b", None)):
        await start(database, session_id, token_id)
    keys = Tokens(database, clock)
    derived = await issue(database, "derived", derived_for="gogol_a", project_id="p")
    administrators = await issue(database, "derived", derived_for="gogol_b", project_id="p")
    await keys.verify(derived.secret, session_id="gogol_a")
    assert await keys.is_live(derived.token.id)
    if how == "expired":
        clock.at += 10
    else:
        await database.write(lambda tx: tokens.revoke(tx, "creator", clock.at))
    with pytest.raises(Unauthenticated):
        await keys.verify(derived.secret, session_id="gogol_a")
    assert not await keys.is_live(derived.token.id)
    await keys.verify(administrators.secret, session_id="gogol_b")
    assert await keys.is_live(administrators.token.id), "nobody's token started this one"


async def test_a_derived_key_of_a_session_that_is_gone_is_none(database: SqliteDatabase):
    issued = await issue(database, "derived", derived_for="gogol_a", project_id="p")
    with pytest.raises(Unauthenticated):
        await Tokens(database, Clock()).verify(issued.secret, session_id="gogol_a")
    assert not await Tokens(database, Clock()).is_live(issued.token.id)


async def test_derived_keys_are_in_no_list_and_cannot_be_revoked_by_name(database: SqliteDatabase):
    await issue(database, "derived", derived_for="gogol_a")
    assert await listed(database) == []
    with pytest.raises(NotFound):
        await database.write(lambda tx: tokens.revoke(tx, "derived", 2.0))


async def listed(database: SqliteDatabase, limit: int = 10, offset: int = 0) -> list[Token]:
    return await database.read(lambda tx: tokens.listed(tx, limit=limit, offset=offset))


async def test_lists_are_in_pages(database: SqliteDatabase):
    issued = {(await issue(database, str(number))).token.id for number in range(5)}
    pages = [await listed(database, 2, offset) for offset in (0, 2, 4, 6)]
    assert [len(page) for page in pages] == [2, 2, 1, 0]
    assert {token.id for page in pages for token in page} == issued


async def test_derived_keys_that_died_long_ago_are_forgotten_and_no_others(database: SqliteDatabase):
    await issue(database, "a person's")
    await database.write(lambda tx: tokens.revoke(tx, "a person's", 2.0))
    for session_id, died_at in (("gogol_a", 2.0), ("gogol_b", 2.0), ("gogol_c", 9.0), ("gogol_d", None)):
        await issue(database, "derived", derived_for=session_id)
        if died_at is not None:
            await database.write(lambda tx, of=session_id, at=died_at: tokens.revoke_derived(tx, of, at))
    gone = [await database.write(lambda tx: tokens.forget_derived(tx, 9.0, 1)) for _ in range(3)]
    assert gone == [1, 1, 0]
    left = await database.read(lambda tx: tx.all("SELECT session_id FROM tokens ORDER BY session_id"))
    assert left == [(None,), ("gogol_c",), ("gogol_d",)]


async def test_last_use_is_noted_and_not_at_every_call(database: SqliteDatabase):
    clock = Clock()
    issued = await issue(database, "used")
    keys = Tokens(database, clock)
    for at in (1_000_000.0, 1_000_030.0, 1_000_061.0):
        clock.at = at
        await keys.verify(issued.secret)
        (shown,) = await listed(database)
        assert shown.last_used_at == (1_000_061.0 if at > 1_000_060 else 1_000_000.0)
