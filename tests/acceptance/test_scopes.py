"""Every operation by every scope over HTTP, from one table."""

import asyncio
import re
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.kit.mcp_caller import McpCaller, Refused
from tests.kit.records import records
from tests.kit.scene import Scene, lent, scene
from tests.kit.server import ServerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[ServerProcess]:
    async with ServerProcess(tmp_path_factory.mktemp("scopes") / "home", sessions_per_project=50) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def here(server: ServerProcess) -> AsyncGenerator[Scene]:
    async with scene(server) as made:
        yield made


# Who may, by the word of the table: a(dmin), w(rite), r(ead); n(arrowed) to this project, to write, or o(nly) to read
# it; f(oreign), narrowed to another project, or g, that to read. And arguments with which it works for who may.
MATRIX: dict[str, tuple[str, dict[str, Any]]] = {
    "project_create": ("aw", {"name": "made"}),
    "project_list": ("awrnofg", {}),
    "project_get": ("awrno", {"project_id": "PROJECT"}),
    "project_delete": ("awn", {"project_id": "EMPTY"}),
    "workspace_list": ("awrno", {"project_id": "PROJECT"}),
    "workspace_delete": ("awn", {"project_id": "PROJECT", "workspace_id": "gone already"}),
    "session_spawn": ("awn", {"project_id": "PROJECT", "message": "no plan"}),
    "session_message": ("awn", {"session_id": "SESSION", "message": "no plan"}),
    "session_get": ("awrno", {"session_id": "SESSION"}),
    "session_list": ("awrno", {"project_id": "PROJECT"}),
    "session_events": ("awrno", {"session_id": "SESSION"}),
    "session_watch": ("awrno", {"session_id": "SESSION", "wait_seconds": 0}),
    "session_cancel": ("awn", {"session_id": "SESSION"}),
    "session_end": ("awn", {"session_id": "SESSION"}),
    "caller_tool_response": ("awnf", {"session_id": "SESSION", "request_id": "none"}),
    "caller_tool_poll": ("awn", {"session_id": "OWN", "wait_seconds": 0}),
    "caller_tool_pending": ("awn", {"session_id": "OWN"}),
    "caller_tool_progress": ("awn", {"session_id": "OWN", "request_id": "none"}),
    "token_create": ("a", {"name": "NAME", "scope": "read"}),
    "token_list": ("a", {}),
    "token_revoke": ("a", {"token_id": "TOKEN"}),
    "config_limits": ("awrno", {"project_id": "PROJECT"}),
}
# What these arguments lead to for who may: the gate let them in, and there was nothing to be had.
REFUSED_OTHERWISE = {"caller_tool_progress": "not_found", "caller_tool_response": ""}
SCOPES = {"a": "admin", "w": "write", "r": "read"}
NARROWED = {"n": "project:{}", "o": "project:{}:ro", "f": "project:{}", "g": "project:{}:ro"}
FOREIGN = {"f": "n", "g": "o"}  # and whose column would be theirs in the project that they are narrowed to


async def key_for(here: Scene, scope: str, project_id: str) -> dict[str, Any]:
    """A token of this column, for a question about this project."""
    if scope in SCOPES:
        return await here.token(SCOPES[scope])
    if scope in FOREIGN:
        project_id = (await here.server.ask("project_create", name="another"))["id"]
    return await here.token(NARROWED[scope].format(project_id))


async def filled(here: Scene, arguments: dict[str, Any], caller: McpCaller, may: bool) -> dict[str, Any]:
    """Arguments with what they stand for; what is destroyed is made for it."""
    made: dict[str, Any] = {}
    for name, value in arguments.items():
        if value == "NAME":
            value = f"by {here.project_id}"
        elif value == "TOKEN":
            value = (await here.token("read"))["id"]
        elif value == "SESSION" or (value == "OWN" and not may):
            async with here.caller(stream=False) as owner:
                value = await here.rest(owner, context=lent())
        elif value == "OWN":
            value = await here.rest(caller, context=lent())
        made[name] = value
    return made


@pytest.mark.seed("OTD-SCOPE.1", "OTD-SCOPE.2", "OTD-SCOPE.3", "OTD-SCOPE.4")
@pytest.mark.parametrize("scope", ["a", "w", "r", "n", "o"])
async def test_each_scope_is_shown_its_column_and_nothing_else(here: Scene, scope: str) -> None:
    key = await key_for(here, scope, here.project_id)
    for era in ("legacy", "modern"):
        async with here.caller(key["token"], era=era) as caller:
            shown = [tool["name"] for tool in (await caller.ask("tools/list"))["result"]["tools"]]
            assert sorted(shown) == sorted(name for name, (who, _) in MATRIX.items() if scope in who)


@pytest.mark.seed("OTD-SECURITY.3")
@pytest.mark.parametrize("operation", list(MATRIX))
@pytest.mark.parametrize("scope", [*SCOPES, *NARROWED])
async def test_each_operation_does_for_a_scope_what_the_table_says(here: Scene, operation: str, scope: str) -> None:
    who, arguments = MATRIX[operation]
    may = scope in who
    project_id = here.project_id
    if arguments.get("project_id") == "EMPTY":
        project_id = (await here.server.ask("project_create", name="empty"))["id"]
    if "project_id" in arguments:
        arguments = arguments | {"project_id": project_id}
    key = await key_for(here, scope, project_id)
    async with here.caller(key["token"]) as caller:
        arguments = await filled(here, arguments, caller, may)
        if not may:
            with pytest.raises(Refused) as refused:
                await caller.call(operation, **arguments)
            # What another project has is not there, in the words for what never was; and that it was asked is noted.
            kind = "not_found" if FOREIGN.get(scope, "none") in who else "forbidden"
            assert refused.value.kind == kind
            rows = records(here.server.home, "audit", operation=operation, token_id=key["id"])
            assert [one["outcome"] for one in rows] == [f"refused: {kind}"]
        elif operation in REFUSED_OTHERWISE:
            with pytest.raises(Refused) as refused:
                await caller.call(operation, **arguments)
            assert refused.value.kind == REFUSED_OTHERWISE[operation]
        else:
            assert isinstance(await caller.call(operation, **arguments), dict)


async def test_a_narrowed_token_sees_its_project_alone_and_goes_with_it(here: Scene) -> None:
    other = (await here.server.ask("project_create", name="another"))["id"]
    key = await here.token(f"project:{other}")
    reader = await here.token(f"project:{other}:ro")
    assert [key["scope"], reader["scope"]] == [f"project:{other}", f"project:{other}:ro"]
    async with here.caller() as owner:
        foreign = await here.rest(owner)
    async with here.caller(key["token"]) as caller:
        assert [one["id"] for one in (await caller.call("project_list"))["projects"]] == [other]
        told = await caller.call("session_spawn", project_id=other, message="no plan", wait_seconds=20)
        for session_id in (foreign, "gogol_20260101_000000_00000000"):
            with pytest.raises(Refused, match=f"no session '{session_id}': session_list shows them"):
                await caller.call("session_get", session_id=session_id)
        await caller.call("session_end", session_id=told["session_id"])
        await caller.call("project_delete", project_id=other)
        shown = {one["id"]: one for one in (await here.server.ask("token_list"))["tokens"]}
        for one in (key, reader):
            assert shown[one["id"]]["scope"] == one["scope"]
            assert shown[one["id"]]["revoked_at"] is not None
    async with here.caller(era="modern") as nobody:
        for one in (key, reader):
            posted = await nobody.post(nobody.message("tools/list"), Authorization=f"Bearer {one['token']}")
            assert posted.status == 401


@pytest.mark.parametrize("scope", ["project:x", "project:11111111-1111-4111-8111-111111111111", "owner"])
async def test_a_token_is_narrowed_to_a_project_that_is_there_or_not_made(here: Scene, scope: str) -> None:
    async with here.caller() as caller:
        with pytest.raises(Refused) as refused:
            await caller.call("token_create", name=f"no {scope} {here.project_id}", scope=scope)
        assert refused.value.kind == ("not_found" if "1111" in scope else "invalid_params")


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic b3Vi", "Bearer oub_" + "0" * 64, "Bearer x"])
async def test_without_a_good_token_there_is_nothing(here: Scene, header: str | None) -> None:
    async with here.caller(era="modern") as caller:
        message = caller.message("tools/list")
        posted = await caller.post(message, Authorization=header or "")
        assert posted.status == 401
        assert posted.headers["WWW-Authenticate"].startswith("Bearer")
        assert b"oubliette_" not in posted.body
        assert "result" not in posted.json


async def test_strangers_are_in_the_audit_all_of_them_and_cannot_flood_it(tmp_path: Path) -> None:
    def noted() -> list[dict[str, Any]]:
        return records(tmp_path / "home", "audit", operation="authenticate")

    def counted() -> int:
        told = [re.fullmatch(r"refused: unauthenticated(?:, (\d+) times)?", one["outcome"]) for one in noted()]
        return sum(int(one[1] or 1) for one in told if one is not None)

    async def knock(one: McpCaller, times: int) -> None:
        for _ in range(times):
            assert (await one.post(one.message("tools/list"))).status == 401

    async with (
        ServerProcess(tmp_path / "home") as server,
        McpCaller(server.url, "oub_" + "0" * 64, era="modern") as one,
    ):
        await knock(one, 50)
        async with asyncio.timeout(10):
            while counted() < 50:  # nobody comes meanwhile
                await asyncio.sleep(0.01)
        assert counted() == 50
        rows = noted()
        assert {one["token_id"] for one in rows} == {None}
        assert len(rows) <= 2 + (rows[-1]["at"] - rows[0]["at"])
        await knock(one, 7)
    assert counted() == 57, "those of the last second are written at the stop"


@pytest.mark.seed("OTD-SECURITY.4")
async def test_a_derived_key_opens_nothing_over_http_or_elsewhere_and_dies_with_its_session(here: Scene) -> None:
    async with here.caller() as caller:
        # A droid may do with its key what it likes; in the log it would be blacked out, so it goes by a file.
        theft = "cat /proc/*/environ | tr '\\0' '\\n' | grep ^OUBLIETTE_API_KEY= | sort -u > /workspace/stolen"
        session_id = await here.start(caller, [{"sh": theft}], oubliette_scope="write")
        (await here.turn(session_id)).worked()
        secret = (await here.workspace(session_id) / "stolen").read_text().strip().partition("=")[2]
        assert secret.startswith("oub_")
        other = await here.rest(caller)
        async with here.box(session_id) as box, here.box(other) as elsewhere:
            assert "result" in await box.ask("oubliette_tools", api_key=secret), "on its own socket it is good"
            for method in ("oubliette_tools", "oubliette_call_tool"):
                told = await elsewhere.ask(method, api_key=secret, tool="project_list")
                assert told["error"]["code"] == -32001, "on another session's socket it is not"
            for tool, arguments in (
                ("token_list", {}),
                ("project_delete", {"project_id": here.project_id}),
                ("project_create", {"name": "mine"}),
                ("caller_tool_response", {"session_id": session_id, "request_id": "x"}),
                ("session_spawn", {"message": "x", "oubliette_api_key": secret}),
            ):
                told = await box.ask("oubliette_call_tool", api_key=secret, tool=tool, arguments=arguments)
                refused = told.get("error") or told["result"]["_meta"]["dev.oubliette/error"]
                assert refused["code"] == -32002, tool
            async with here.caller(secret, era="modern") as thief:
                assert (await thief.post(thief.message("tools/list"))).status == 401
            await caller.call("session_end", session_id=session_id)
            assert (await elsewhere.ask("oubliette_tools", api_key=secret))["error"]["code"] == -32001
        (row,) = records(here.server.home, "tokens", session_id=session_id)
        assert row["revoked_at"] is not None
