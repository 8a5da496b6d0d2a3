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


# Who may, by the word of the table: a(dmin), w(rite), r(ead); and arguments with which it works for who may.
MATRIX: dict[str, tuple[str, dict[str, Any]]] = {
    "project_create": ("aw", {"name": "made"}),
    "project_list": ("awr", {}),
    "project_get": ("awr", {"project_id": "PROJECT"}),
    "project_delete": ("aw", {"project_id": "EMPTY"}),
    "workspace_list": ("awr", {"project_id": "PROJECT"}),
    "workspace_delete": ("aw", {"project_id": "PROJECT", "workspace_id": "gone already"}),
    "session_spawn": ("aw", {"project_id": "PROJECT", "message": "no plan"}),
    "session_message": ("aw", {"session_id": "SESSION", "message": "no plan"}),
    "session_get": ("awr", {"session_id": "SESSION"}),
    "session_list": ("awr", {"project_id": "PROJECT"}),
    "session_events": ("awr", {"session_id": "SESSION"}),
    "session_watch": ("awr", {"session_id": "SESSION", "wait_seconds": 0}),
    "session_cancel": ("aw", {"session_id": "SESSION"}),
    "session_end": ("aw", {"session_id": "SESSION"}),
    "caller_tool_response": ("aw", {"session_id": "SESSION", "request_id": "none"}),
    "caller_tool_poll": ("aw", {"session_id": "OWN", "wait_seconds": 0}),
    "caller_tool_pending": ("aw", {"session_id": "OWN"}),
    "caller_tool_progress": ("aw", {"session_id": "OWN", "request_id": "none"}),
    "token_create": ("a", {"name": "NAME", "scope": "read"}),
    "token_list": ("a", {}),
    "token_revoke": ("a", {"token_id": "TOKEN"}),
    "config_limits": ("awr", {"project_id": "PROJECT"}),
}
# What these arguments lead to for who may: the gate let them in, and there was nothing to be had.
REFUSED_OTHERWISE = {"caller_tool_progress": "not_found", "caller_tool_response": ""}
SCOPES = {"a": "admin", "w": "write", "r": "read"}


async def filled(here: Scene, arguments: dict[str, Any], caller: McpCaller, may: bool) -> dict[str, Any]:
    """Arguments with what they stand for; what is destroyed is made for it."""
    made: dict[str, Any] = {}
    for name, value in arguments.items():
        if value == "PROJECT":
            value = here.project_id
        elif value == "EMPTY":
            value = (await here.server.ask("project_create", name="empty"))["id"]
        elif value == "NAME":
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
@pytest.mark.parametrize("scope", ["a", "w", "r"])
async def test_each_scope_is_shown_its_column_and_nothing_else(here: Scene, scope: str) -> None:
    key = await here.token(SCOPES[scope])
    for era in ("legacy", "modern"):
        async with here.caller(key["token"], era=era) as caller:
            shown = [tool["name"] for tool in (await caller.ask("tools/list"))["result"]["tools"]]
            assert sorted(shown) == sorted(name for name, (who, _) in MATRIX.items() if scope in who)


@pytest.mark.seed("OTD-SECURITY.3")
@pytest.mark.parametrize("operation", list(MATRIX))
@pytest.mark.parametrize("scope", ["a", "w", "r"])
async def test_each_operation_does_for_a_scope_what_the_table_says(here: Scene, operation: str, scope: str) -> None:
    who, arguments = MATRIX[operation]
    key = await here.token(SCOPES[scope])
    may = scope in who
    async with here.caller(key["token"]) as caller:
        arguments = await filled(here, arguments, caller, may)
        if not may:
            with pytest.raises(Refused) as refused:
                await caller.call(operation, **arguments)
            assert refused.value.kind == "forbidden"
            rows = records(here.server.home, "audit", operation=operation, token_id=key["id"])
            assert [one["outcome"] for one in rows] == ["refused: forbidden"]
        elif operation in REFUSED_OTHERWISE:
            with pytest.raises(Refused) as refused:
                await caller.call(operation, **arguments)
            assert refused.value.kind == REFUSED_OTHERWISE[operation]
        else:
            assert isinstance(await caller.call(operation, **arguments), dict)


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic b3Vi", "Bearer oub_" + "0" * 64, "Bearer x"])
async def test_without_a_good_token_there_is_nothing(here: Scene, header: str | None) -> None:
    async with here.caller(era="modern") as caller:
        message = caller.message("tools/list")
        posted = await caller.post(message, Authorization=header or "")
        assert posted.status == 401
        assert posted.headers["WWW-Authenticate"].startswith("Bearer")
        assert b"oubliette_" not in posted.body
        assert "result" not in posted.json


async def test_strangers_are_in_the_audit_and_cannot_flood_it(tmp_path: Path) -> None:
    async with (
        ServerProcess(tmp_path / "home") as server,
        McpCaller(server.url, "oub_" + "0" * 64, era="modern") as one,
    ):
        for _ in range(50):
            assert (await one.post(one.message("tools/list"))).status == 401

        def noted() -> list[dict[str, Any]]:
            return records(server.home, "audit", operation="authenticate")

        first = noted()[0]
        assert (first["outcome"], first["token_id"]) == ("refused: unauthenticated", None)
        async with asyncio.timeout(10):
            while not re.fullmatch(r"refused: unauthenticated, \d+ times", noted()[-1]["outcome"]):
                await one.post(one.message("tools/list"))
        assert len(noted()) <= 1.5 + (noted()[-1]["at"] - first["at"])


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
