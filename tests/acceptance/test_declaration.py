"""What a caller declares becomes tools in the box: before the first list, at any time later, or not at all."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio

from tests.kit.mcp_caller import Refused
from tests.kit.mcp_host import Era as BoxEra
from tests.kit.scene import ANY, GET_MEMORY, SEND_RESPONSE, Scene, lent, scene
from tests.kit.server import ServerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[ServerProcess]:
    async with ServerProcess(tmp_path_factory.mktemp("declared") / "home", sessions_per_project=200) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def here(server: ServerProcess) -> AsyncGenerator[Scene]:
    async with scene(server) as made:
        yield made


# The design's own example, word for word.
DESIGNED: dict[str, Any] = {
    "caller_id": "ant",
    "caller_tools": [
        {
            "name": "send_response",
            "description": "Send a message via Signal",
            "inputSchema": {
                "type": "object",
                "properties": {
                    "message": {"type": "string", "description": "Message to send"},
                    "recipients": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["message", "recipients"],
            },
        },
        {"name": "get_memory", "description": "Retrieve stored memories for context"},
    ],
}
CONFIG: dict[str, Any] = {
    "caller_id": "ant",
    "tools": [
        {**DESIGNED["caller_tools"][0], "box_name": "ant_send_response"},
        {**DESIGNED["caller_tools"][1], "box_name": "ant_get_memory", "inputSchema": {"type": "object"}},
    ],
}


@pytest.mark.seed("CTR-DATA.1", "CTR-CONFIG.1", "CTR-DATA.2", "CTR-SDK.3")
async def test_the_designs_declaration_becomes_the_designs_notification(here: Scene) -> None:
    async with here.caller() as caller:
        told = await caller.call(
            "session_message", project_id=here.project_id, message="no plan: only a word", context=DESIGNED
        )
        session_id = told["session_id"]
        assert told["caller_tools"] == {"send_response": "ant_send_response", "get_memory": "ant_get_memory"}
        await here.turn(session_id)
        for _ in range(2):  # it is stored with the session: whoever attaches gets it
            async with here.door(session_id) as box:
                assert (await box.attach())["result"]["caller_tools"] is True
                assert await box.frame() == {
                    "jsonrpc": "2.0",
                    "type": "caller_tools_config",
                    "method": "caller_tools_config",
                    "params": CONFIG,
                }
        shown = await caller.call("session_get", session_id=session_id)
        assert (shown["caller_id"], shown["caller_tools"]) == ("ant", told["caller_tools"])


@pytest.mark.seed("CTR-DATA.2")
async def test_a_declaration_outlives_its_server(tmp_path_factory: pytest.TempPathFactory) -> None:
    async with (
        ServerProcess(tmp_path_factory.mktemp("declared") / "home") as server,
        scene(server) as here,
        here.caller() as caller,
    ):
        session_id = await here.rest(caller, context=DESIGNED)
        await server.kill()
        await server.restart()
        async with here.box(session_id) as box:
            assert (await box.told("caller_tools_config"))["params"] == CONFIG


@pytest.mark.seed("REQ-CTR-002", "REQ-CTR-002.1", "REQ-CTR-002.2", "CTR-CONFIG.2", "CTR-SDK.2", "CTR-SDK.3")
@pytest.mark.parametrize("era", ["legacy", "modern"])
async def test_the_real_client_lists_the_declared_tools_with_their_schemas(here: Scene, era: BoxEra) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=DESIGNED)
        async with here.client(session_id, era=era) as agent:
            await agent.open()
            tools = {tool["name"]: tool for tool in await agent.tools()}
            assert {name for name in tools if name.startswith("ant_")} == {"ant_send_response", "ant_get_memory"}
            sends = tools["ant_send_response"]
            assert sends["description"] == "Send a message via Signal"
            assert sends["inputSchema"] == DESIGNED["caller_tools"][0]["inputSchema"]
            assert tools["ant_get_memory"]["inputSchema"]["type"] == "object"
            call = agent.call("ant_get_memory", {"anything": [1]})
            request = await caller.request()
            assert (request["tool"], request["arguments"]) == ("get_memory", {"anything": [1]})
            await caller.answer(request, "remembered")
            assert (await call)["content"][0]["text"] == "remembered"
            refused = await agent.call("ant_send_response", {"message": "to nobody"})
            assert refused["isError"] is True
            assert "recipients" in refused["content"][0]["text"]


@pytest.mark.seed("CTR-DATA.3")
async def test_a_tool_without_schema_takes_any_object(here: Scene) -> None:
    async with here.caller() as caller:
        plan = [
            {"tool": "ant_get_memory", "args": {}, "expect": {"equals": {}}},
            {"tool": "ant_get_memory", "args": {"a": {"b": [None]}}, "expect": {"equals": {"a": {"b": [None]}}}},
        ]
        session_id = await here.start(caller, plan, context=lent([GET_MEMORY]))
        for _ in plan:
            request = await caller.request()
            await caller.answer(request, request["arguments"])
        (await here.turn(session_id)).worked()


async def test_tools_may_stand_at_the_top_level_and_must_then_agree(here: Scene) -> None:
    async with here.caller() as caller:
        plan = [{"list": True, "expect": {"contains": "bee_any"}}]
        session_id = await here.start(caller, plan, caller_id="bee", caller_tools=[ANY])
        (await here.turn(session_id)).worked()
        both = await here.start(caller, plan, caller_id="bee", caller_tools=[ANY], context=lent([ANY], "bee"))
        (await here.turn(both)).worked()
        with pytest.raises(Refused) as refused:
            await here.start(caller, plan, caller_id="bee", caller_tools=[ANY], context=lent([ANY], "ant"))
        assert refused.value.kind == "invalid_params"


@pytest.mark.seed("REQ-CTR-002", "CTR-CONFIG.2")
async def test_redeclaring_on_a_live_session_adds_and_removes_tools_and_tells_the_agent(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent([SEND_RESPONSE, GET_MEMORY]))
        async with here.client(session_id) as agent:
            await agent.open()
            assert {"ant_send_response", "ant_get_memory"} <= set(await agent.tool_names())
            plan: list[dict[str, Any]] = [
                {"wait_tool": "ant_any"},
                {"list": True, "expect": {"contains": "ant_any", "lacks": "ant_send_response"}},
                {"tool": "ant_any", "expect": {"is_error": False}},
                {"tool": "ant_get_memory", "expect": {"is_error": False}},
            ]
            told = await here.more(caller, session_id, plan, context=lent([GET_MEMORY, ANY]))
            assert told["caller_tools"] == {"get_memory": "ant_get_memory", "any": "ant_any"}
            await agent.notification("notifications/tools/list_changed")
            names = [name for name in await agent.tool_names() if name.startswith("ant_")]
            assert sorted(names) == ["ant_any", "ant_get_memory"]
            for _ in range(2):
                await caller.answer(await caller.request(), 1)
            (await here.turn(session_id, 2)).worked()
            await here.more(caller, session_id, [{"say": "nothing left"}], context=lent([]))
            await agent.notification("notifications/tools/list_changed")
            assert [name for name in await agent.tool_names() if name.startswith("ant_")] == []


async def test_a_tool_that_was_removed_stays_answerable_for_calls_that_are_open(here: Scene) -> None:
    async with here.caller() as caller:
        plan = [{"tool": "ant_any", "expect": {"is_error": False, "contains": "still"}}]
        session_id = await here.start(caller, plan, context=lent([ANY]))
        request = await caller.request()
        await caller.call("session_message", session_id=session_id, message="less", context=lent([GET_MEMORY]))
        async with here.box(session_id) as box:
            refused = await box.ask("caller_tool", tool="any", arguments={})
            assert refused["error"]["data"]["kind"] == "unknown_tool"
        assert (await caller.answer(request, "still"))["accepted"]
        (await here.turn(session_id)).worked()


# What cannot be declared, and a word of the reason.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a caller id of the platform": (lent([ANY], "oubliette"), "reserved"),
    "a caller id that begins like the platform": (lent([ANY], "oubliette_x"), "reserved"),
    "a caller id of a base tool": (lent([{"name": "message"}], "session"), "reserved"),
    "a caller id with a space": (lent([ANY], "my ant"), "caller id"),
    "an empty caller id": (lent([ANY], ""), "caller id"),
    "a caller id of 33 characters": (lent([ANY], "a" * 33), "caller id"),
    "tools without a caller id": ({"caller_tools": [ANY]}, "caller_id"),
    "the same tool twice": (lent([ANY, GET_MEMORY, ANY]), "twice"),
    "two names that the box cannot tell apart": (lent([{"name": "a.b"}, {"name": "a-b"}]), "could not tell"),
    "a name with a space": (lent([{"name": "send response"}]), "letters, digits"),
    "an empty name": (lent([{"name": ""}]), "letters, digits"),
    "a name of 129 characters": (lent([{"name": "x" * 129}]), "letters, digits"),
    "a schema that is no object's": (lent([{"name": "x", "inputSchema": {"type": "string"}}]), "object"),
    "a schema that is none": (lent([{"name": "x", "inputSchema": {"type": "object", "properties": 7}}]), "Schema"),
    "a schema that refers elsewhere": (
        lent([{"name": "x", "inputSchema": {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1/a"}}}}]),
        "into itself",
    ),
    "a schema that refers to a file": (
        lent([{"name": "x", "inputSchema": {"type": "object", "allOf": [{"$ref": "file:///etc/passwd"}]}}]),
        "into itself",
    ),
    "a time of nothing": (lent([{"name": "x", "timeoutSeconds": 0}]), "timeoutSeconds"),
    "a time over the server's bound": (lent([{"name": "x", "timeoutSeconds": 601}]), "timeoutSeconds"),
    "129 tools": (lent([{"name": f"t{n}"} for n in range(129)]), "128"),
    "a description of 17 kB": (lent([{"name": "x", "description": "d" * 17_000}]), "description"),
}


async def test_a_declaration_that_cannot_hold_is_refused_with_its_reason_and_nothing_is_registered(
    here: Scene,
) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent([GET_MEMORY]))
        for name, (context, reason) in REFUSED.items():
            with pytest.raises(Refused) as refused:
                await caller.call("session_message", session_id=session_id, message="x", context=context)
            assert reason in refused.value.text, name
            with pytest.raises(Refused):
                await here.start(caller, [], context=context)
        shown = await caller.call("session_get", session_id=session_id)
        assert shown["caller_tools"] == {"get_memory": "ant_get_memory"}
        assert shown["turn_count"] == 1, "no message of a refused declaration was queued"
        sessions = await caller.call("session_list", project_id=here.project_id)
        assert [one["session_id"] for one in sessions["sessions"]] == [session_id]


async def test_callers_whose_names_would_collide_across_the_underscore_are_told_apart_by_refusal(here: Scene) -> None:
    """`a_b` + `c` and `a` + `b_c` are one name in the box; one session has one caller, so they meet in a list only."""
    async with here.caller() as caller:
        with pytest.raises(Refused) as refused:
            await here.start(caller, [], context=lent([{"name": "b/c"}, {"name": "b_c"}], "a"))
        assert "b/c" in refused.value.text


async def test_a_name_that_agents_would_cut_is_mapped_once_and_events_keep_it(here: Scene) -> None:
    long = "a.tool-with/parts." + "x" * 60
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent([{"name": long}]))
        shown = await caller.call("session_get", session_id=session_id)
        (inside,) = shown["caller_tools"].values()
        assert len(inside) <= 47
        assert inside.replace("_", "").isalnum()
        async with here.box(session_id) as box:
            for name in (long, inside):
                asked = await box.request("caller_tool", tool=name, arguments={})
                request = await caller.request()
                assert request["tool"] == long
                await caller.answer(request, name)
                assert (await box.answer(asked))["result"] == name


@pytest.mark.seed("REQ-CTR-002.1")
async def test_the_first_list_of_a_new_session_contains_the_callers_tools_in_a_hundred_runs(here: Scene) -> None:
    """`$tools` is what the droid listed when its session began: no wait, no second list."""
    async with here.caller() as caller:

        async def run(number: int) -> str:
            plan = [{"say": "[$tools]"}]
            session_id = await here.start(caller, plan, context=lent([{"name": f"t{number}"}]))
            turn = (await here.turn(session_id)).worked()
            await here.server.ask("session_end", session_id=session_id)
            return turn.text

        for start in range(0, 100, 4):
            texts = await asyncio.gather(*(run(start + n) for n in range(4)))
            for n, text in enumerate(texts):
                assert f"ant_t{start + n}" in text


async def test_without_caller_tools_the_client_is_ready_at_once(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller)
        async with here.client(session_id) as agent:
            await agent.open()
            loop = asyncio.get_running_loop()
            began = loop.time()
            names = await agent.tool_names()
            assert loop.time() - began < 0.3, "nothing is waited for"
        assert names == ["session_message", "session_events"]


@pytest.mark.seed("CTR-SDK.4", "CTR-RESPONSE.1", "CTR-RESPONSE.2")
async def test_the_answer_is_an_ordinary_mcp_tool_and_no_method_of_our_own(here: Scene) -> None:
    async with here.caller() as caller:
        tools = {tool["name"]: tool for tool in (await caller.ask("tools/list"))["result"]["tools"]}
        tool = tools["caller_tool_response"]
        assert "caller_tool_request" in tool["description"]
        schema = tool["inputSchema"]
        assert schema["type"] == "object"
        assert set(schema["properties"]) == {"session_id", "request_id", "result", "error"}
        assert sorted(schema["required"]) == ["request_id", "session_id"]
        assert "string" in json.dumps(schema["properties"]["error"])
        assert "null" in json.dumps(schema["properties"]["error"])
        assert "type" not in schema["properties"]["result"], "any JSON"
        told = await caller.ask("caller_tool_response", {"session_id": "x", "request_id": "y"})
        assert told["error"]["code"] == -32601


@pytest.mark.seed("CTR-RESPONSE.2", "CTR-RESPONSE.1")
async def test_result_and_error_may_be_left_out_and_not_both_be_given(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent())
        async with here.box(session_id) as box:
            asked = await box.request("caller_tool", tool="any", arguments={})
            request = await caller.request()
            names = {"session_id": session_id, "request_id": request["request_id"]}
            with pytest.raises(Refused, match="both"):
                await caller.call("caller_tool_response", **names, result=1, error="x")
            for missing in names:
                told = {name: value for name, value in names.items() if name != missing}
                with pytest.raises(Refused, match=missing):
                    await caller.call("caller_tool_response", **told, result=1)
            with pytest.raises(Refused, match="error"):
                await caller.call("caller_tool_response", **names, error=7)
            assert (await caller.call("caller_tool_response", **names))["accepted"]
            assert await box.answer(asked) == {"jsonrpc": "2.0", "id": asked, "result": None}
