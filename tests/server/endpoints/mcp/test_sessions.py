"""Legacy MCP sessions: whose they are, how long they live, and what of them outlives a server."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from oubliette.server.errors import StorageFailed
from oubliette.server.tokens.token import Actor, Scope
from tests.kit.mcp_rig import MovableClock, Rig, initialize, legacy, request, serving
from tests.kit.raw_http import connected

ANNA = Actor(principal="anna", scope=Scope.ADMIN)


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncGenerator[Rig]:
    async with serving(tmp_path) as rig:
        yield rig


async def test_a_session_survives_a_restart_with_all_that_it_set(tmp_path: Path) -> None:
    async with serving(tmp_path) as before:
        session = await before.session(version="2025-06-18")
        await before.ask(request("logging/setLevel", {"level": "error"}), legacy(session))
        await before.ask(request("resources/subscribe", {"uri": "test://static-text"}), legacy(session))
    async with serving(tmp_path) as after:
        assert (await after.call(session, "try_echo", a=1)).json["result"]["structuredContent"] == {"a": 1}
        async with connected(after.address) as stream:
            assert (await after.get(stream, session)).status == 200
            found = await after.sessions.find(session, "anna")
            assert found is not None
            assert (found.version, found.log_level, found.subscriptions) == (
                "2025-06-18",
                "error",
                ("test://static-text",),
            )


async def test_another_principals_session_does_not_exist(rig: Rig) -> None:
    session = await rig.session(key="key-a")
    foreign = await rig.ask(request("ping"), legacy(session), key="key-b")
    unknown = await rig.ask(request("ping"), legacy("f" * 64), key="key-b")
    assert foreign.status == 404
    assert (foreign.status, foreign.body) == (unknown.status, unknown.body)
    async with connected(rig.address) as connection:
        assert (await rig.get(connection, session, key="key-b")).status == 404
    async with connected(rig.address) as connection:
        await connection.send("DELETE", "/mcp", [*rig.headers(key="key-b"), legacy(session)])
        assert (await connection.reply()).status == 404
    assert (await rig.ask(request("ping"), legacy(session))).status == 200


async def test_another_key_of_the_same_principal_may_use_a_session(rig: Rig) -> None:
    session = await rig.session(key="key-a")
    assert (await rig.ask(request("ping"), legacy(session), key="key-a2")).status == 200


async def test_a_deleted_session_is_gone_and_its_stream_ends(rig: Rig) -> None:
    session = await rig.session()
    async with connected(rig.address) as stream, connected(rig.address) as connection:
        await rig.get(stream, session)
        await connection.send("DELETE", "/mcp", [*rig.headers(), legacy(session)])
        assert (await connection.reply()).status == 200
        assert await stream.message() is None
    assert (await rig.ask(request("ping"), legacy(session))).status == 404
    assert rig.fixtures.ended == [session]


async def test_a_session_that_another_server_ended_is_gone_within_a_second(tmp_path: Path) -> None:
    clock = MovableClock()
    async with serving(tmp_path, clock=clock) as one, serving(tmp_path, clock=clock) as other:
        session = await one.session()
        assert (await other.ask(request("ping"), legacy(session))).status == 200
        async with connected(one.address) as connection:
            await connection.send("DELETE", "/mcp", [*one.headers(), legacy(session)])
            await connection.reply()
        clock.ahead += 1.1
        assert (await other.ask(request("ping"), legacy(session))).status == 404


async def test_an_idle_session_expires_and_use_keeps_it(tmp_path: Path) -> None:
    clock = MovableClock()
    async with serving(tmp_path, clock=clock, idle_s=1800) as rig:
        used, idle = await rig.session(), await rig.session()
        for _ in range(3):
            clock.ahead += 1000
            assert (await rig.ask(request("ping"), legacy(used))).status == 200
        assert (await rig.ask(request("ping"), legacy(idle))).status == 404
        assert await rig.sessions.purge() == [idle]


async def test_one_principal_has_only_so_many_sessions(tmp_path: Path) -> None:
    clock = MovableClock()
    async with serving(tmp_path, clock=clock, per_principal=2, idle_s=1800) as rig:
        first = await rig.session()
        await rig.session(key="key-a2")
        refused = await rig.ask(initialize())
        assert (refused.status, refused.headers["retry-after"]) == (503, "60")
        assert "DELETE" in refused.json["error"]["message"]
        assert (await rig.ask(initialize(), key="key-b")).status == 200
        # One that has ended, or expired, makes room.
        async with connected(rig.address) as connection:
            await connection.send("DELETE", "/mcp", [*rig.headers(), legacy(first)])
            await connection.reply()
        await rig.session()
        assert (await rig.ask(initialize())).status == 503
        clock.ahead += 1801
        assert (await rig.ask(initialize())).status == 200


async def test_a_session_that_only_listens_is_kept(tmp_path: Path) -> None:
    clock = MovableClock()
    async with serving(tmp_path, clock=clock, idle_s=1800) as rig:
        session = await rig.session()
        async with connected(rig.address) as stream:
            await rig.get(stream, session)
            clock.ahead += 1000
            await rig.sessions.touch([session])
            clock.ahead += 1000
            assert await rig.sessions.purge() == []
            assert (await rig.ask(request("ping"), legacy(session))).status == 200


async def test_a_database_that_fails_is_an_error_to_try_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    session = await rig.session()

    async def failing(*_: object) -> None:
        raise StorageFailed("the disk is full")

    monkeypatch.setattr(rig.sessions, "set_level", failing)
    reply = await rig.ask(request("logging/setLevel", {"level": "info"}), legacy(session))
    assert reply.json["error"]["data"] == {"kind": "unavailable", "retryable": True}
    monkeypatch.setattr(rig.sessions, "find", failing)
    reply = await rig.ask(request("ping"), legacy(session))
    assert (reply.status, reply.headers["retry-after"]) == (503, "1")
    assert reply.json["error"]["message"] == "the disk is full"
    monkeypatch.undo()
    monkeypatch.setattr(rig.fixtures, "authenticate", failing)
    assert (await rig.ask(request("ping"), legacy(session))).status == 503
    assert "Traceback" not in caplog.text


async def test_a_session_shows_no_more_than_it_must(rig: Rig) -> None:
    session = await rig.sessions.open(ANNA, "2025-11-25", {"roots": {}}, "not an object")
    found = await rig.sessions.find(session.id, "anna")
    assert found is not None
    assert found.capabilities == {"roots": {}}
    assert await rig.sessions.find(session.id, "bert") is None


@pytest.mark.parametrize("level", ["debug", "emergency"])
async def test_a_level_is_kept_by_the_session(level: str, rig: Rig) -> None:
    session = await rig.session()
    reply = await rig.ask(request("logging/setLevel", {"level": level}), legacy(session))
    assert reply.json["result"] == {}
    found = await rig.sessions.find(session, "anna")
    assert found is not None
    assert found.log_level == level


async def test_subscriptions_are_taken_and_given_up(rig: Rig) -> None:
    session = await rig.session()
    async with connected(rig.address) as stream:
        await rig.get(stream, session)
        for method in ("resources/subscribe", "resources/subscribe", "resources/unsubscribe", "resources/unsubscribe"):
            reply = await rig.ask(request(method, {"uri": "test://watched-resource"}), legacy(session))
            assert reply.json["result"] == {}
            rig.fixtures.updated("test://watched-resource")
        # Twice while it was subscribed, and not after.
        for _ in range(2):
            message = await stream.message()
            assert message["method"] == "notifications/resources/updated"
            assert message["params"] == {"uri": "test://watched-resource"}
        rig.endpoint.close()
        assert await stream.message() is None
    assert rig.fixtures.changed == [(None, ("test://watched-resource",)), (None, ())]
