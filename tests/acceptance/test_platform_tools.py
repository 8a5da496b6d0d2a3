"""The platform's own tools in a box: found and called by a key, and no further than the key goes."""

import asyncio
import json
import sqlite3
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio

from tests.kit.mcp_caller import Refused
from tests.kit.records import records
from tests.kit.scene import Scene, lent, scene
from tests.kit.server import ServerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[ServerProcess]:
    async with ServerProcess(tmp_path_factory.mktemp("platform") / "home", sessions_per_project=50) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def here(server: ServerProcess) -> AsyncGenerator[Scene]:
    async with scene(server) as made:
        yield made


# What each scope is shown in a box, as a list to be read: answering caller tools is for callers, so it is in none.
READ = {
    "project_list",
    "project_get",
    "session_list",
    "session_get",
    "session_events",
    "workspace_list",
    "config_limits",
    "session_watch",  # later than the table, and only reads
}
WRITE = READ | {
    "project_create",
    "project_delete",
    "session_spawn",
    "session_message",
    "session_end",
    "session_cancel",
    "workspace_delete",
}
ADMIN = WRITE | {"token_create", "token_list", "token_revoke"}
SCOPES = {"read": READ, "write": WRITE, "admin": ADMIN}
NOT_A_KEY = "oub_" + "0" * 64
INVALID = "invalid or expired API key"


def platform(names: list[str]) -> set[str]:
    return {name.removeprefix("oubliette_") for name in names if name.startswith("oubliette_")}


@pytest.mark.seed("OTD-SCOPE.1", "OTD-SCOPE.2", "OTD-SCOPE.3", "OTD-SCOPE.4", "OTD-TESTING.1", "OTD-TOOLS.1")
@pytest.mark.seed("OTD-TESTING.2")
@pytest.mark.parametrize("scope", list(SCOPES))
async def test_a_key_is_shown_the_tools_of_its_scope_and_no_other(here: Scene, scope: str) -> None:
    key = await here.token(scope)
    async with here.caller() as caller:
        session_id = await here.rest(caller)
        async with here.box(session_id) as box:
            told = await box.ask("oubliette_tools", api_key=key["token"])
    assert set(told) == {"jsonrpc", "id", "result"}
    assert set(told["result"]) == {"tools"}
    assert {tool["name"] for tool in told["result"]["tools"]} == SCOPES[scope]
    for tool in told["result"]["tools"]:
        assert len(tool["description"]) > 15
        assert tool["inputSchema"]["type"] == "object"
        assert isinstance(tool["inputSchema"]["properties"], dict)


@pytest.mark.seed("OT-DISCOVERY", "OT-DISCOVERY.1", "OT-DISCOVERY.2", "OT-NAMING", "OT-NAMING.1", "OTD-START.4")
@pytest.mark.seed("OTD-START.1")
@pytest.mark.parametrize("scope", list(SCOPES))
async def test_a_client_with_a_key_registers_what_the_server_gave_with_the_prefix(here: Scene, scope: str) -> None:
    key = await here.token(scope)
    async with here.caller() as caller:
        session_id = await here.rest(caller)
        async with here.client(session_id, OUBLIETTE_API_KEY=key["token"]) as agent:
            await agent.open()
            tools = {tool["name"]: tool for tool in await agent.tools()}
            await agent.logged(b"OUBLIETTE_API_KEY detected, requesting tools")
        async with here.box(session_id) as box:
            given = (await box.ask("oubliette_tools", api_key=key["token"]))["result"]["tools"]
    assert platform(list(tools)) == SCOPES[scope]
    assert set(tools) == {"oubliette_" + name for name in SCOPES[scope]} | {"session_message", "session_events"}
    for tool in given:
        registered = tools["oubliette_" + tool["name"]]
        assert registered["description"] == tool["description"]
        assert registered["inputSchema"] == tool["inputSchema"]
    asked = records(here.server.home, "audit", operation="oubliette_tools", token_id=key["id"])
    assert [one["outcome"] for one in asked] == ["ok", "ok"]


@pytest.mark.seed("OT-DISCOVERY", "OT-NAMING.1", "OT-DISCOVERY.1")
async def test_a_droid_with_an_admin_key_sees_every_tool(here: Scene) -> None:
    key = await here.token("admin")
    async with here.caller() as caller:
        session_id = await here.start(caller, [{"say": "[$tools]"}], context=lent(), oubliette_api_key=key["token"])
        turn = (await here.turn(session_id)).worked()
    for name in ADMIN:
        assert f"oubliette_{name}" in turn.text
    assert "ant_send_response" in turn.text


@pytest.mark.seed("OT-DISCOVERY.3", "OTD-TOOLS.2", "OTD-START.2", "OTD-TESTING.3")
@pytest.mark.parametrize("wrong", ["unknown", "revoked", "expired", "no key at all"])
async def test_an_invalid_key_finds_nothing_and_the_client_goes_on(here: Scene, wrong: str) -> None:
    if wrong == "revoked":
        key = await here.token("admin")
        await here.server.ask("token_revoke", token_id=key["id"])
        secret = key["token"]
    elif wrong == "expired":
        key = await here.token("admin", expires_in_s=0.001)
        secret = key["token"]
    else:
        secret = NOT_A_KEY if wrong == "unknown" else "not a key"
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent())
        async with here.box(session_id) as box:
            told = await box.ask("oubliette_tools", api_key=secret)
            assert told["error"]["code"] == -32001
            assert told["error"]["message"] == INVALID
        async with here.client(session_id, OUBLIETTE_API_KEY=secret) as agent:
            await agent.open()
            names = await agent.tool_names()
            await agent.logged(b"failed to get oubliette tools: invalid or expired API key")
            assert b"warning" in agent.log.lower()
            assert platform(names) == set()
            assert "ant_any" in names
            call = agent.call("ant_any")
            await caller.answer(await caller.request(), "still here")
            assert (await call)["content"][0]["text"] == "still here"
        assert secret.encode() not in agent.log
    refused = records(here.server.home, "audit", operation="oubliette_tools", session_id=session_id)
    assert {one["outcome"] for one in refused} == {"refused: unauthenticated"}


@pytest.mark.seed("OT-NOKEY", "OT-NOKEY.1")
async def test_without_a_key_nothing_is_asked_and_nothing_is_there(here: Scene) -> None:
    async with here.caller() as caller:
        plan: list[dict[str, Any]] = [{"list": True, "expect": {"lacks": "oubliette_"}}, {"say": "[$tools]"}]
        session_id = await here.start(caller, plan, context=lent())
        (await here.turn(session_id)).worked()
        async with here.client(session_id) as agent:
            await agent.open()
            names = set(await agent.tool_names())
            assert b"OUBLIETTE_API_KEY" not in agent.log
    assert names == {"ant_send_response", "ant_get_memory", "ant_any", "session_message", "session_events"}
    assert records(here.server.home, "audit", operation="oubliette_tools", session_id=session_id) == []


@pytest.mark.seed("OT-EXECUTION", "OT-EXECUTION.1", "OTD-CALL.1", "OTD-CALL.2", "OTD-TESTING.4", "OTD-START.3")
async def test_a_droid_calls_project_list_with_the_key_it_began_with(here: Scene) -> None:
    key = await here.token("read")
    async with here.caller() as caller:
        plan: list[dict[str, Any]] = [
            {"tool": "oubliette_project_list", "args": {"limit": 1}, "expect": {"is_error": False}},
            {"say": "first: $last.projects.0.id"},
        ]
        session_id = await here.start(caller, plan, oubliette_api_key=key["token"])
        turn = (await here.turn(session_id)).worked()
        assert f"first: {here.project_id}" in turn.text, "newest first"
        async with here.box(session_id) as box:
            asked = {"api_key": key["token"], "tool": "project_list", "arguments": {"limit": 1}}
            told = await box.ask("oubliette_call_tool", **asked)
    result = told["result"]
    assert result["isError"] is False
    (content,) = result["content"]
    assert content["type"] == "text"
    assert json.loads(content["text"])["projects"][0]["id"] == here.project_id
    rows = records(here.server.home, "audit", operation="oubliette_call_tool", token_id=key["id"])
    assert [(one["target"], one["outcome"]) for one in rows] == [("project_list", "ok")] * 2


async def test_every_call_and_every_refusal_leaves_a_row_that_says_how_it_ended(here: Scene) -> None:
    key = await here.token("read")
    writer = await here.token("write")
    nobody = "00000000-0000-4000-8000-000000000000"
    async with here.caller() as caller:
        session_id = await here.rest(caller)

        async def asked(whose: dict[str, Any], tool: str, call_key: str | None = None, **arguments: Any) -> None:
            more = {"call_key": call_key} if call_key is not None else {}
            call = {"api_key": whose["token"], "tool": tool, "arguments": arguments, **more}
            async with here.box(session_id) as box:
                await box.ask("oubliette_call_tool", **call)

        def rows(whose: dict[str, Any]) -> list[tuple[str, str | None, str]]:
            found = records(here.server.home, "audit", token_id=whose["id"])
            return [(one["operation"], one["target"], one["outcome"]) for one in found]

        await asked(key, "project_get", project_id=here.project_id)
        await asked(key, "project_get", project_id=nobody)
        await asked(key, "session_events", session_id=session_id, since_index=-7)
        await asked(key, "no_such_tool")
        await asked(key, "token_list")
        call = "oubliette_call_tool"
        assert rows(key) == [
            (call, f"project_get {here.project_id}", "ok"),
            ("project_get", nobody, "refused: not_found"),
            ("session_events", session_id, "refused: invalid_params"),
            ("no_such_tool", None, "refused: unknown_tool"),
            ("token_list", None, "refused: forbidden"),
        ]
        await asked(writer, "workspace_delete", "mine", project_id=here.project_id, workspace_id="gone")
        await asked(writer, "workspace_delete", "mine", project_id=here.project_id, workspace_id="another")
        await asked(writer, "workspace_delete", "k" * 129, project_id=here.project_id, workspace_id="gone")
        await asked(writer, "workspace_delete", project_id=nobody, workspace_id="gone")
        assert rows(writer) == [
            ("workspace_delete", "gone", "ok"),
            ("workspace_delete", here.project_id, "refused: call_key_reused"),
            ("workspace_delete", here.project_id, "refused: invalid_params"),
            ("workspace_delete", nobody, "refused: not_found"),
        ]
        await here.server.ask("token_revoke", token_id=key["id"])
        await asked(key, "project_get", project_id=here.project_id)
        refused = records(here.server.home, "audit", operation=call, session_id=session_id, token_id=None)
        assert [(one["target"], one["outcome"]) for one in refused] == [
            (f"project_get {here.project_id}", "refused: unauthenticated")
        ]
        async with here.box(session_id) as box:
            for message in ("one", "another"):
                await box.ask("session_message", message=message, session_id=session_id, call_key="child")
        (reused,) = records(here.server.home, "audit", session_id=session_id, outcome="refused: call_key_reused")[1:]
        assert (reused["operation"], reused["target"]) == ("session_message", session_id)


@pytest.mark.parametrize("door", ["mcp", "relay"])
async def test_a_refused_call_leaves_one_row_and_the_same_one_at_every_door(here: Scene, door: str) -> None:
    reader = await here.token("read")
    nobody = "00000000-0000-4000-8000-000000000000"
    async with here.caller() as owner, here.caller(reader["token"]) as caller:
        session_id = await here.rest(owner)
        wanted: list[tuple[str, dict[str, Any], tuple[str, str | None, str]]] = [
            ("project_get", {"project_id": nobody}, ("project_get", nobody, "not_found")),
            ("project_get", {"nonsense": reader["token"]}, ("project_get", None, "invalid_params")),
            ("session_get", {"session_id": "gogol_none"}, ("session_get", None, "not_found")),
            (
                "session_events",
                {"session_id": session_id, "since_index": 10_000},
                ("session_events", session_id, "invalid_params"),
            ),
            ("project_create", {"name": "p"}, ("project_create", None, "forbidden")),
            ("token_list", {}, ("token_list", None, "forbidden")),
            ("no_such_tool", {"project_id": nobody}, ("no_such_tool", nobody, "unknown_tool")),
            ("no_such_tool" * 6, {}, (("no_such_tool" * 6)[:64], None, "unknown_tool")),
            (reader["token"], {}, ("unknown", None, "unknown_tool")),
            ("", {}, ("unknown", None, "unknown_tool")),
        ]
        async with here.box(session_id) as box:
            for tool, arguments, _ in wanted:
                if door == "mcp":
                    told = await caller.ask("tools/call", {"name": tool, "arguments": arguments})
                else:
                    asked = {"api_key": reader["token"], "tool": tool, "arguments": arguments}
                    told = await box.ask("oubliette_call_tool", **asked)
                assert "error" in told or told["result"]["isError"], tool
    rows = records(here.server.home, "audit", token_id=reader["id"], door=door)
    assert [(one["operation"], one["target"], one["outcome"]) for one in rows] == [
        (operation, target, f"refused: {kind}") for _, _, (operation, target, kind) in wanted
    ]
    assert reader["token"] not in json.dumps(records(here.server.home, "audit"))


@pytest.mark.seed("OT-EXECUTION.2", "OTD-TESTING.7", "OTD-SECURITY.5", "OTD-START.5")
async def test_a_droid_creates_a_project_with_its_callers_own_write_key(here: Scene) -> None:
    key = await here.token("write")
    name = f"test-project {key['id']}"
    async with here.caller() as caller:
        plan: list[dict[str, Any]] = [
            {
                "tool": "oubliette_project_create",
                "args": {"name": name, "description": "by a droid"},
                "expect": {"is_error": False, "contains": name},
            },
            {"say": "made $last.id: $last.description"},
        ]
        session_id = await here.start(caller, plan, oubliette_api_key=key["token"])
        turn = (await here.turn(session_id)).worked()
        (made,) = (await caller.call("project_list", name_contains=name))["projects"]
    assert f"made {made['id']}: by a droid" in turn.text
    (row,) = records(here.server.home, "audit", operation="project_create", token_id=key["id"])
    assert (row["target"], row["outcome"], row["door"]) == (made["id"], "ok", "relay")
    assert row["session_id"] == session_id
    await here.server.ask("project_delete", project_id=made["id"])


@pytest.mark.seed("OTD-CALL.3", "OTD-START.5")
async def test_what_the_tool_itself_refuses_is_a_result_and_an_error_at_the_droid(here: Scene) -> None:
    key = await here.token("write")
    nobody = "00000000-0000-4000-8000-000000000000"
    async with here.caller() as caller:
        plan = [
            {"tool": "oubliette_project_get", "args": {"project_id": nobody}, "expect": {"is_error": True}},
            {"tool": "oubliette_project_create", "args": {"name": ""}, "expect": {"is_error": True}},
            {"tool": "oubliette_project_create", "args": {"nom": "x"}, "expect": {"is_error": True, "contains": "nom"}},
        ]
        session_id = await here.start(caller, plan, oubliette_api_key=key["token"])
        turn = (await here.turn(session_id)).worked()
        assert turn.failed == [True, True, True]
        async with here.box(session_id) as box:
            told = await box.ask(
                "oubliette_call_tool", api_key=key["token"], tool="project_get", arguments={"project_id": nobody}
            )
    assert told["result"]["isError"] is True
    assert nobody in told["result"]["content"][0]["text"]


@pytest.mark.seed("OT-EXECUTION.3", "OTD-CALL.5", "OTD-SECURITY.3", "OTD-SCOPE.4", "OTD-TESTING.5", "OT-EXECUTION")
async def test_beyond_the_scope_is_an_error_whatever_was_listed(here: Scene) -> None:
    writer, reader = await here.token("write"), await here.token("read")
    async with here.caller() as caller:
        session_id = await here.rest(caller)
        before = [one["id"] for one in (await caller.call("token_list"))["tokens"]]
        async with here.box(session_id) as box:
            for key, scope in ((writer, "write"), (reader, "read")):
                for tool in sorted(ADMIN - SCOPES[scope]):
                    arguments = {"name": "mine", "scope": "admin"} if tool == "token_create" else {"name": "mine"}
                    asked = {"api_key": key["token"], "tool": tool, "arguments": arguments}
                    told = await box.ask("oubliette_call_tool", **asked)
                    assert told["error"]["code"] == -32002, (scope, tool)
                    assert told["error"]["data"]["kind"] == "forbidden"
                    assert "not allowed for this token" in told["error"]["message"]
        assert [one["id"] for one in (await caller.call("token_list"))["tokens"]] == before
        rows = records(here.server.home, "audit", operation="token_create", token_id=writer["id"])
        assert [one["outcome"] for one in rows] == ["refused: forbidden"]


@pytest.mark.seed("OT-EXECUTION.3", "OTD-SECURITY.3")
async def test_a_droid_whose_list_is_older_than_its_rights_is_told_that_they_are_not_enough(here: Scene) -> None:
    """The client lists by an admin's key; behind its back the same connection's key is one that writes."""
    admin, writer = await here.token("admin"), await here.token("write")
    async with here.caller() as caller:
        session_id = await here.rest(caller, oubliette_api_key=writer["token"])
        async with here.client(session_id, OUBLIETTE_API_KEY=admin["token"]) as agent:
            await agent.open()
            assert "oubliette_token_create" in await agent.tool_names()
            # What the seed's scenario is about: the tool is registered, the key is not enough (any more).
            database = here.server.home / "oubliette.db"
            demote(str(database), admin["id"])
            told = await agent.call("oubliette_token_create", {"name": "mine", "scope": "admin"})
            assert told["isError"] is True
            assert "not allowed for this token" in told["content"][0]["text"]


def demote(database: str, token_id: str) -> None:
    """Give a token the scope write: no door does that, so the row is changed beside the server."""
    connection = sqlite3.connect(database, timeout=10)
    with connection:
        changed = connection.execute("UPDATE tokens SET scope = 'write' WHERE id = ?", (token_id,)).rowcount
    connection.close()
    assert changed == 1


@pytest.mark.seed("OT-EXECUTION.4", "OTD-CALL.4", "OTD-SECURITY.2", "OTD-TESTING.6")
@pytest.mark.parametrize("how", ["expired", "revoked"])
async def test_a_key_that_died_since_the_start_is_an_authentication_error(here: Scene, how: str) -> None:
    key = await here.token("write", **({"expires_in_s": 3} if how == "expired" else {}))
    async with here.caller() as caller:
        session_id = await here.rest(caller)
        async with here.client(session_id, OUBLIETTE_API_KEY=key["token"]) as agent, here.box(session_id) as box:
            await agent.open()
            assert platform(await agent.tool_names()) == WRITE
            assert not (await agent.call("oubliette_project_list")).get("isError")
            if how == "expired":
                await asyncio.sleep(max(0.0, key["expires_at"] - time.time()) + 0.05)
            else:
                await here.server.ask("token_revoke", token_id=key["id"])
            told = await agent.call("oubliette_project_list")
            assert told["isError"] is True
            assert INVALID in told["content"][0]["text"]
            for tool in ("project_list", "project_create"):
                asked = {"api_key": key["token"], "tool": tool, "arguments": {"name": "x"}}
                raw = await box.ask("oubliette_call_tool", **asked)
                assert raw["error"]["code"] == -32001
                assert raw["error"]["message"] == INVALID
    rows = records(here.server.home, "audit", operation="oubliette_call_tool", outcome="refused: unauthenticated")
    assert len([one for one in rows if one["session_id"] == session_id]) == 3


@pytest.mark.seed("OTD-SECURITY.2")
@pytest.mark.parametrize("given", ["derived", "brought"])
async def test_a_droids_key_is_none_from_the_moment_on_that_its_callers_token_is_revoked(
    here: Scene, given: str
) -> None:
    writer = await here.token("write")
    how = {"oubliette_scope": "write"} if given == "derived" else {"oubliette_api_key": writer["token"]}
    listing: dict[str, Any] = {"tool": "oubliette_project_list", "args": {"limit": 1}}
    async with here.caller(writer["token"]) as caller:
        session_id = await here.start(caller, [{**listing, "expect": {"is_error": False}}], **how)
        (await here.turn(session_id)).worked()
    await here.server.ask("token_revoke", token_id=writer["id"])
    async with here.caller() as other:
        await here.more(other, session_id, [{**listing, "expect": {"is_error": True, "contains": INVALID}}])
        (await here.turn(session_id, 2)).worked()


@pytest.mark.seed("OTD-SECURITY.4")
async def test_a_derived_key_is_cut_to_its_creators_rights_and_its_project(here: Scene) -> None:
    writer = await here.token("write")
    async with here.caller(writer["token"]) as caller:
        with pytest.raises(Refused):
            await here.start(caller, [], oubliette_scope="admin")
        other = await caller.call("project_create", name="another")
        plan: list[dict[str, Any]] = [
            {"say": "[$tools]"},
            {"tool": "oubliette_project_get", "args": {"project_id": here.project_id}, "expect": {"is_error": False}},
            {"tool": "oubliette_project_get", "args": {"project_id": other["id"]}, "expect": {"is_error": True}},
            {"tool": "oubliette_project_list", "args": {}, "expect": {"is_error": False, "lacks": other["id"]}},
            {
                "tool": "oubliette_workspace_list",
                "args": {"project_id": other["id"]},
                "expect": {"is_error": True},
            },
        ]
        session_id = await here.start(caller, plan, oubliette_scope="read")
        turn = (await here.turn(session_id)).worked()
        assert "oubliette_project_list" in turn.text
        for name in ADMIN - READ:
            assert f"oubliette_{name}" not in turn.text
        await caller.call("project_delete", project_id=other["id"])


@pytest.mark.seed("OTD-SECURITY.4")
async def test_a_session_that_a_droid_starts_is_a_child_of_its_own_and_no_stronger(here: Scene) -> None:
    async with here.caller() as caller:
        spawn = {"message": "no plan", "autonomy": "high"}
        plan: list[dict[str, Any]] = [
            {"tool": "oubliette_session_spawn", "args": spawn, "expect": {"is_error": False}},
            {"say": "child $last.session_id"},
            {"tool": "oubliette_token_create", "args": {}, "expect": {"is_error": True}},
        ]
        session_id = await here.start(caller, plan, oubliette_scope="write", autonomy="low")
        turn = await here.turn(session_id)
        assert "token_create" in turn.failure, "there is no such tool in its list"
        (started,) = turn.of("child_started")
        child = await caller.call("session_get", session_id=started["child_session_id"])
    assert child["parent_session_id"] == session_id
    assert child["depth"] == 1
    assert child["autonomy"] == "low", "no stronger than its parent"
    assert child["project_id"] == here.project_id


@pytest.mark.seed("OTD-CALL.1")
async def test_missing_parameters_are_named(here: Scene) -> None:
    key = await here.token("read")
    async with here.caller() as caller:
        session_id = await here.rest(caller)
        async with here.box(session_id) as box:
            for method, params in (
                ("oubliette_tools", {}),
                ("oubliette_tools", {"api_key": 7}),
                ("oubliette_call_tool", {"tool": "project_list"}),
                ("oubliette_call_tool", {"api_key": key["token"]}),
                ("oubliette_call_tool", {"api_key": key["token"], "tool": "project_list", "arguments": []}),
            ):
                told = await box.ask(method, **params)
                assert told["error"]["code"] == -32602, (method, params)
            told = await box.ask("oubliette_call_tool", api_key=key["token"], tool="no_such_tool")
            assert (told["error"]["code"], told["error"]["data"]["kind"]) == (-32602, "unknown_tool")
