"""The product over MCP, by hand: tools, errors, and every vehicle of a caller-tool request."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kit.mcp_rig import Wire, call, legacy, modern, request
from tests.kit.raw_http import SLOW_S, RawConnection, connected
from tests.kit.server import ServerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

LENT = {"caller_id": "ant", "caller_tools": [{"name": "echo", "inputSchema": {"type": "object"}}]}
ASKING = 'Go. <<plan [{"tool": "ant_echo", "args": {"n": 7}}, {"say": "Told: $last"}]>>'
READ_ROW = [
    "config_limits",
    "project_get",
    "project_list",
    "session_events",
    "session_get",
    "session_list",
    "session_watch",
    "workspace_list",
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[ServerProcess]:
    async with ServerProcess(tmp_path_factory.mktemp("product") / "home") as server:
        yield server


@pytest.fixture
def wire(server: ServerProcess) -> Wire:
    host, port = server.url.split("/")[2].split(":")
    return Wire((host, int(port)), server.token)


@pytest_asyncio.fixture(loop_scope="module")
async def project(server: ServerProcess) -> str:
    return (await server.ask("project_create", name="product"))["id"]


async def tool(wire: Wire, session: str, name: str, /, *, key: str = "", **arguments: Any) -> Any:
    """A tool's structured result, after the checks that hold for every one of them."""
    result = (await wire.call(session, name, key=key, **arguments)).json["result"]
    assert json.loads(result["content"][0]["text"]) == result["structuredContent"]
    assert not result.get("isError"), result
    return result["structuredContent"]


async def failure(wire: Wire, session: str, name: str, /, *, key: str = "", **arguments: Any) -> Any:
    """What a failed tool says to a program; to a model it says a sentence."""
    result = (await wire.call(session, name, key=key, **arguments)).json["result"]
    assert result["isError"] is True
    assert "structuredContent" not in result
    assert isinstance(result["content"][0]["text"], str)
    return result["_meta"]["dev.oubliette/error"]


async def token(server: ServerProcess, scope: str) -> str:
    name = f"{scope}-{id(object())}"
    return (await server.ask("token_create", name=name, scope=scope))["token"]


@asynccontextmanager
async def stream(wire: Wire, session: str) -> AsyncGenerator[RawConnection]:
    async with connected(wire.address) as connection:
        assert (await wire.get(connection, session)).status == 200
        assert await connection.frame() == "retry: 3000"
        yield connection


async def pushed(connection: RawConnection, kind: str) -> Any:
    """The next event of a type on a stream of log notifications."""
    while True:
        message = await connection.message()
        assert message is not None, f"the stream ended without {kind}"
        if message.get("method") == "notifications/message" and message["params"]["data"].get("type") == kind:
            assert message["params"]["logger"] == "oubliette.session"
            return message["params"]["data"]


async def result_of(connection: RawConnection) -> Any:
    """The result at the end of a request's own stream of notifications."""
    while "result" not in (told := await connection.message()):
        assert told["method"] == "notifications/message"
    return told["result"]["structuredContent"]


async def answered(wire: Wire, session: str, asked: Any, result: Any = None) -> None:
    """Answer a request, and see it accepted."""
    taken = await tool(
        wire,
        session,
        "caller_tool_response",
        session_id=asked["session_id"],
        request_id=asked["request_id"],
        result=result,
    )
    assert taken["accepted"] is True


async def finished(wire: Wire, session_id: str) -> str:
    """The text of the session's turn, once it is over."""
    message, lines = modern(call("session_watch", session_id=session_id, wait_seconds=SLOW_S))
    told = (await wire.ask(message, *lines)).json["result"]["structuredContent"]
    assert told["ended_by"] == "idle"
    return told["final_response"]


# Tools.


async def test_tools_are_sorted_closed_and_honest(wire: Wire) -> None:
    listed = (await wire.ask(request("tools/list"), legacy(await wire.session()))).json["result"]["tools"]
    names = [each["name"] for each in listed]
    assert names == sorted(names)
    assert {"session_message", "caller_tool_response", "token_create"} <= set(names)
    for each in listed:
        assert each["description"]
        assert each["inputSchema"]["type"] == each["outputSchema"]["type"] == "object"
        assert each["inputSchema"]["additionalProperties"] is False, each["name"]
        assert each["annotations"]["readOnlyHint"] == ("destructiveHint" not in each["annotations"])
    destroying = [each["name"] for each in listed if each["annotations"].get("destructiveHint")]
    assert "project_delete" in destroying
    assert "project_create" not in destroying


async def test_both_eras_list_the_same_tools(wire: Wire) -> None:
    old = (await wire.ask(request("tools/list"), legacy(await wire.session()))).json["result"]["tools"]
    message, lines = modern(request("tools/list"))
    new = (await wire.ask(message, *lines)).json["result"]
    assert new["tools"] == old
    assert new["cacheScope"] == "private"


async def test_a_token_sees_what_its_scope_allows_and_no_more(wire: Wire, server: ServerProcess) -> None:
    key = await token(server, "read")
    session = await wire.session(key=key)
    listed = (await wire.ask(request("tools/list"), legacy(session), key=key)).json["result"]["tools"]
    assert [each["name"] for each in listed] == READ_ROW
    told = await failure(wire, session, "project_create", key=key, name="x")
    assert (told["kind"], told["retryable"]) == ("forbidden", False)


async def test_failures_of_tools_are_results(wire: Wire) -> None:
    session = await wire.session()
    assert (await failure(wire, session, "project_create"))["kind"] == "invalid_params"
    assert (await failure(wire, session, "project_create", name=7))["kind"] == "invalid_params"
    assert (await failure(wire, session, "project_create", name="x", nonsense=1))["kind"] == "invalid_params"
    assert (await failure(wire, session, "session_get", session_id="gogol_no"))["kind"] == "not_found"
    unknown = await wire.call(session, "project_explode")
    assert unknown.json["error"]["code"] == -32602


async def test_a_revoked_token_is_refused_at_once_and_its_stream_ends(wire: Wire, server: ServerProcess) -> None:
    key = await token(server, "write")
    session = await wire.session(key=key)
    async with connected(wire.address) as connection:
        assert (await wire.get(connection, session, key=key)).status == 200
        listed = await server.ask("token_list")
        mine = max(listed["tokens"], key=lambda each: each["created_at"])
        await server.ask("token_revoke", token_id=mine["id"])
        assert (await wire.call(session, "project_list", key=key)).status == 401
        async with asyncio.timeout(3):
            assert await connection.message() is None


# Vehicles.


async def test_a_standing_stream_carries_a_request_and_follows_the_log(wire: Wire, project: str) -> None:
    session = await wire.session()
    async with stream(wire, session) as connection:
        sent = await tool(wire, session, "session_message", project_id=project, message=ASKING, context=LENT)
        asked = await pushed(connection, "caller_tool_request")
        assert asked["session_id"] == sent["session_id"]
        assert (asked["tool"], asked["arguments"], asked["redelivery"]) == ("echo", {"n": 7}, 0)
        await answered(wire, session, asked, {"echoed": 7})
        done = await pushed(connection, "completion")
        assert done["text"] == 'Told: {"echoed":7}'


async def test_what_is_pushed_and_what_is_paged_is_the_log(wire: Wire, project: str) -> None:
    session = await wire.session()
    await wire.ask(request("logging/setLevel", {"level": "debug"}), legacy(session))
    seen: list[Any] = []
    async with stream(wire, session) as connection:
        sent = await tool(wire, session, "session_message", project_id=project, message=ASKING, context=LENT)
        while not seen or seen[-1]["type"] != "completion":
            message = await connection.message()
            seen.append(message["params"]["data"])
            if seen[-1]["type"] == "caller_tool_request":
                await answered(wire, session, seen[-1], 1)
    log = (await tool(wire, session, "session_events", session_id=sent["session_id"], max_events=500))["events"]
    pushed_here = [each for each in seen if each["session_id"] == sent["session_id"]]
    assert len({each["index"] for each in pushed_here}) == len(pushed_here), "nothing comes twice"
    last = seen[-1]["index"]
    by_index = {each["index"]: each for each in log}
    assert {each["index"] for each in pushed_here} == {index for index in by_index if index <= last}
    for each in pushed_here:
        if each["type"] != "caller_tool_request":
            assert each == by_index[each["index"]]


async def test_a_request_moves_to_the_stream_that_comes_next(wire: Wire, project: str) -> None:
    session = await wire.session()
    async with stream(wire, session) as first:
        sent = await tool(wire, session, "session_message", project_id=project, message=ASKING, context=LENT)
        asked = await pushed(first, "caller_tool_request")
    async with stream(wire, session) as second:
        again = await pushed(second, "caller_tool_request")
        assert again["request_id"] == asked["request_id"]
        assert again["redelivery"] == 1
        await answered(wire, session, again, "late")
        assert await finished(wire, sent["session_id"]) == "Told: late"


async def test_a_legacy_caller_without_a_stream_is_told_on_its_own_request(wire: Wire, project: str) -> None:
    session = await wire.session()
    sent = await tool(wire, session, "session_message", project_id=project, message=ASKING, context=LENT)
    async with connected(wire.address) as connection:
        watch = call("session_watch", session_id=sent["session_id"], wait_seconds=SLOW_S)
        await wire.post(connection, watch, legacy(session))
        assert (await connection.head()).is_stream
        asked = await pushed(connection, "caller_tool_request")
        await answered(wire, session, asked, 1)
        assert (await result_of(connection))["ended_by"] == "idle"


async def test_a_watch_whose_client_leaves_lets_the_request_go(wire: Wire, project: str) -> None:
    session = await wire.session()
    sent = await tool(wire, session, "session_message", project_id=project, message=ASKING, context=LENT)
    watch = call("session_watch", session_id=sent["session_id"], wait_seconds=10 * SLOW_S)
    async with connected(wire.address) as leaving:
        await wire.post(leaving, watch, legacy(session))
        await leaving.head()
        asked = await pushed(leaving, "caller_tool_request")
    async with stream(wire, session) as connection:
        again = await pushed(connection, "caller_tool_request")
        assert again["request_id"] == asked["request_id"]
        await answered(wire, session, again, 1)
        await finished(wire, sent["session_id"])


async def test_a_legacy_caller_with_a_stream_gets_nothing_twice(wire: Wire, project: str) -> None:
    session = await wire.session()
    async with stream(wire, session) as connection:
        sent = await tool(wire, session, "session_message", project_id=project, message=ASKING, context=LENT)
        await answered(wire, session, await pushed(connection, "caller_tool_request"), 1)
        # No notifications on the request itself: what it saw is in its result.
        told = await tool(wire, session, "session_watch", session_id=sent["session_id"], wait_seconds=SLOW_S)
        assert "completion" in [event["type"] for event in told["events"]]
        await pushed(connection, "completion")


async def test_a_stateless_caller_gets_events_on_the_request_that_asked_for_them(wire: Wire, project: str) -> None:
    session = await wire.session()  # only to answer by
    message = call("session_message", project_id=project, message=ASKING, context=LENT, wait_seconds=SLOW_S)
    message, lines = modern(message, logLevel="info")
    async with connected(wire.address) as connection:
        await wire.post(connection, message, *lines)
        assert (await connection.head()).is_stream
        asked = await pushed(connection, "caller_tool_request")
        await answered(wire, session, asked, {"n": 8})
        assert (await result_of(connection))["result"] == 'Told: {"n":8}'


async def test_a_stateless_caller_subscribes_and_reads(wire: Wire, project: str) -> None:
    session = await wire.session()
    sent = await tool(wire, session, "session_message", project_id=project, message="Wait.", context=LENT)
    uri = f"oubliette://sessions/{sent['session_id']}/caller-requests"
    message, lines = modern(request("subscriptions/listen", {"notifications": {"resourceSubscriptions": [uri]}}, id=5))
    async with connected(wire.address) as connection:
        await wire.post(connection, message, *lines)
        assert (await connection.head()).is_stream
        first = await connection.message()
        assert first["params"]["notifications"] == {"resourceSubscriptions": [uri]}
        await tool(wire, session, "session_message", session_id=sent["session_id"], message=ASKING)
        updated = await connection.message()
        assert updated["method"] == "notifications/resources/updated"
        assert updated["params"]["uri"] == uri
        message, lines = modern(request("resources/read", {"uri": uri}))
        result = (await wire.ask(message, *lines)).json["result"]
        assert (result["ttlMs"], result["cacheScope"]) == (0, "private")
        (asked,) = json.loads(result["contents"][0]["text"])["requests"]
        assert (asked["tool"], asked["arguments"]) == ("echo", {"n": 7})
        await answered(wire, session, asked, "read")
        assert await finished(wire, sent["session_id"]) == "Told: read"


async def test_a_listener_is_told_at_once_of_what_waits_already(wire: Wire, project: str) -> None:
    session = await wire.session()
    sent = await tool(wire, session, "session_message", project_id=project, message=ASKING, context=LENT)
    async with asyncio.timeout(SLOW_S):
        while not (await tool(wire, session, "caller_tool_pending", session_id=sent["session_id"]))["requests"]:
            await asyncio.sleep(0.02)
    uri = f"oubliette://sessions/{sent['session_id']}/caller-requests"
    message, lines = modern(request("subscriptions/listen", {"notifications": {"resourceSubscriptions": [uri]}}))
    async with connected(wire.address) as connection:
        await wire.post(connection, message, *lines)
        await connection.head()
        told = [(await connection.message())["method"] for _ in range(2)]
    assert told == ["notifications/subscriptions/acknowledged", "notifications/resources/updated"]
    (asked,) = (await tool(wire, session, "caller_tool_pending", session_id=sent["session_id"]))["requests"]
    await answered(wire, session, asked, 1)
    await finished(wire, sent["session_id"])


async def test_a_legacy_subscription_is_a_carrier_too(wire: Wire, project: str, server: ServerProcess) -> None:
    session, other = await wire.session(), await wire.session()
    sent = await tool(wire, session, "session_message", project_id=project, message="Wait.", context=LENT)
    uri = f"oubliette://sessions/{sent['session_id']}/caller-requests"
    # Another MCP session of the same owner, to which nothing is bound.
    assert (await wire.ask(request("resources/subscribe", {"uri": uri}), legacy(other))).json["result"] == {}
    async with stream(wire, other) as connection:
        await tool(wire, session, "session_message", session_id=sent["session_id"], message=ASKING)
        updated = await connection.message()
        assert (updated["method"], updated["params"]) == ("notifications/resources/updated", {"uri": uri})
        (asked,) = (await tool(wire, session, "caller_tool_pending", session_id=sent["session_id"]))["requests"]
        await answered(wire, session, asked, 1)
    await finished(wire, sent["session_id"])


async def test_nobody_else_hears_or_reads_or_answers(wire: Wire, project: str, server: ServerProcess) -> None:
    session = await wire.session()
    key = await token(server, "admin")
    foreign = await wire.session(key=key)
    async with stream(wire, session) as connection:
        sent = await tool(wire, session, "session_message", project_id=project, message=ASKING, context=LENT)
        asked = await pushed(connection, "caller_tool_request")
        uri = f"oubliette://sessions/{sent['session_id']}/caller-requests"
        for reply in (
            await wire.ask(request("resources/read", {"uri": uri}), legacy(foreign), key=key),
            await wire.ask(request("resources/subscribe", {"uri": uri}), legacy(foreign), key=key),
        ):
            assert reply.json["error"]["code"] == -32002
        wishes = {"notifications": {"resourceSubscriptions": [uri]}}
        message, lines = modern(request("subscriptions/listen", wishes))
        async with connected(wire.address) as listener:
            await wire.post(listener, message, *lines, key=key)
            await listener.head()
            assert (await listener.message())["params"]["notifications"] == {}
        refused = await wire.call(
            foreign,
            "caller_tool_response",
            key=key,
            session_id=asked["session_id"],
            request_id=asked["request_id"],
            result="forged",
        )
        assert refused.json["result"]["isError"] is True
        assert refused.json["result"]["structuredContent"]["reason"] == "not_owner"
        await answered(wire, session, asked, "true")
        assert await finished(wire, sent["session_id"]) == "Told: true"


async def test_deltas_come_only_to_who_wants_every_detail(wire: Wire, project: str) -> None:
    session = await wire.session()
    async with stream(wire, session) as connection:
        await tool(wire, session, "session_message", project_id=project, message='<<plan [{"say": "a word"}]>>')
        kinds: list[str] = []
        while not kinds or kinds[-1] != "completion":
            kinds.append((await connection.message())["params"]["data"]["type"])
    assert "delta" not in kinds
    assert "message" in kinds


async def test_a_quiet_level_still_lets_requests_through(wire: Wire, project: str) -> None:
    session = await wire.session()
    await wire.ask(request("logging/setLevel", {"level": "emergency"}), legacy(session))
    async with stream(wire, session) as connection:
        sent = await tool(wire, session, "session_message", project_id=project, message=ASKING, context=LENT)
        message = await connection.message()
        assert message["params"]["data"]["type"] == "caller_tool_request"
        await answered(wire, session, message["params"]["data"])
        await finished(wire, sent["session_id"])


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(2**62, 2**72)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
# What would end or start too much for a test of nonsense.
SPARED = {"session_spawn", "session_message", "token_create", "token_revoke", "project_create"}


def fitting(schema: dict[str, Any], project: str) -> st.SearchStrategy[Any]:
    """Arguments that nearly fit a tool: its own names, values of any kind, and now and then right ones."""
    values = JSON | st.sampled_from([project, "gogol_20260101_000000_00000000", "", -1, 0, 2**70, ["idle"]])
    return st.dictionaries(st.sampled_from(sorted(schema["properties"]) or ["x"]), values, max_size=5)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None)
@given(data=st.data())
async def test_no_arguments_are_a_bug_of_the_server(data: st.DataObject, wire: Wire, project: str) -> None:
    message, lines = modern(request("tools/list"))
    tools = [each for each in (await wire.ask(message, *lines)).json["result"]["tools"] if each["name"] not in SPARED]
    chosen = data.draw(st.sampled_from(tools))
    arguments = data.draw(fitting(chosen["inputSchema"], project))
    arguments.pop("wait_seconds", None)
    if chosen["name"] == "caller_tool_poll":
        arguments["wait_seconds"] = 0
    message, lines = modern(call(chosen["name"], **arguments))
    body = (await wire.ask(json.dumps(message, allow_nan=False).encode(), *lines)).json
    assert "result" in body, (chosen["name"], arguments, body)


@pytest.mark.parametrize("name", ["project_list", "session_list"])
async def test_a_number_that_no_database_holds_is_refused(name: str, wire: Wire, project: str) -> None:
    arguments = {"project_id": project} if name == "session_list" else {}
    told = await failure(wire, await wire.session(), name, offset=2**70, **arguments)
    assert told["kind"] == "invalid_params"


async def test_a_request_outlives_a_killed_server_on_the_same_mcp_session(wire: Wire, server: ServerProcess) -> None:
    project = (await server.ask("project_create", name="killed"))["id"]
    session = await wire.session()
    async with stream(wire, session) as connection:
        sent = await tool(wire, session, "session_message", project_id=project, message=ASKING, context=LENT)
        asked = await pushed(connection, "caller_tool_request")
        await server.kill()
    await server.restart()
    async with stream(wire, session) as connection:
        again = await pushed(connection, "caller_tool_request")
        assert again["request_id"] == asked["request_id"]
        await answered(wire, session, again, "after")
        assert await finished(wire, sent["session_id"]) == "Told: after"
