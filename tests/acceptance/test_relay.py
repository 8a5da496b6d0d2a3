"""A droid in a box calls its caller's tools: from the call to the result and back, over real processes."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.kit.mcp_caller import Era, McpCaller
from tests.kit.scene import ANY, SEND_RESPONSE, Scene, lent, scene
from tests.kit.server import ServerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[ServerProcess]:
    async with ServerProcess(tmp_path_factory.mktemp("relay") / "home", disconnect_grace_s=0.5) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def here(server: ServerProcess) -> AsyncGenerator[Scene]:
    async with scene(server) as made:
        yield made


async def carry(caller: McpCaller, session_id: str) -> None:
    """Be reachable: a legacy caller is by its stream, a modern one by a request that it holds."""
    if caller.era == "modern":
        await caller.watch(session_id)


@pytest.mark.seed("REQ-CTR-001", "REQ-CTR-001.1", "REQ-CTR-002.1", "REQ-CTR-004", "REQ-CTR-004.1")
@pytest.mark.parametrize("era", ["legacy", "modern"])
async def test_a_droid_calls_a_tool_of_its_caller_and_gets_the_result(here: Scene, era: Era) -> None:
    async with here.caller(era=era) as caller:
        plan: list[dict[str, Any]] = [
            {"list": True, "expect": {"contains": "ant_send_response"}},
            {"tool": "ant_send_response", "args": {"message": "hello"}, "expect": {"is_error": False}},
            {"say": "The caller said: $last"},
        ]
        session_id = await here.start(caller, plan, context=lent())
        await carry(caller, session_id)
        request = await caller.request()
        assert request["tool"] == "send_response"
        assert request["arguments"] == {"message": "hello"}
        assert await caller.answer(request, {"status": "sent"}) == {"accepted": True, "state": "answered"}
        turn = (await here.turn(session_id)).worked()
    assert 'The caller said: {"status":"sent"}' in turn.text
    assert [one["outcome"] for one in turn.of("caller_tool_resolved")] == ["answered"]


@pytest.mark.seed("REQ-CTR-003", "REQ-CTR-003.1", "CTR-EVENT.1", "CTR-SDK.1")
async def test_the_request_is_pushed_as_a_log_notification_with_the_shape_of_the_seed(here: Scene) -> None:
    async with here.caller() as caller:
        call = {"tool": "ant_send_response", "args": {"message": "hi", "recipients": ["+1234567890"]}}
        session_id = await here.start(caller, [call, call], context=lent())
        first = await caller.request()
        await caller.answer(first, 1)
        second = await caller.request()
        await caller.answer(second, 2)
        (await here.turn(session_id)).worked()
    pushed = [
        frame
        for frame in caller.frames
        if frame["method"] == "notifications/message" and frame["params"]["data"]["type"] == "caller_tool_request"
    ]
    assert len(pushed) == 2
    for frame in pushed:
        assert set(frame) == {"jsonrpc", "method", "params"}
        assert set(frame["params"]) == {"level", "logger", "data"}
        assert (frame["params"]["level"], frame["params"]["logger"]) == ("info", "oubliette.session")
        data = frame["params"]["data"]
        assert data["tool"] == "send_response", "the name as it was declared"
        assert data["arguments"] == {"message": "hi", "recipients": ["+1234567890"]}
        assert data["session_id"] == session_id, "what the answer needs"
        assert uuid.UUID(data["request_id"]).version == 4
        assert str(uuid.UUID(data["request_id"])) == data["request_id"]
    assert first["request_id"] != second["request_id"]
    logged = [one for one in await here.events(session_id) if one["type"] == "caller_tool_request"]
    assert [one["request_id"] for one in logged] == [first["request_id"], second["request_id"]]
    for event, data in zip(logged, (first, second), strict=True):
        assert {name: data[name] for name in event if name in data} == event, "the log has the same record"


VALUES: dict[str, Any] = {
    "an object": {"status": "sent", "deep": {"a": [1, {"b": None}]}},
    "an array": [1, "two", [3.5], {}],
    "a string": 'just \u00e4 \u2028 \U0001f600 text\n"quoted"',
    "an empty string": "",
    "a number": 12345678901234567,
    "a fraction": -0.125,
    "true": True,
    "false": False,
    "null": None,
    "an object with a key named error": {"error": "not one", "isError": True},
    "an empty object": {},
    "more than a mebibyte": {"text": "0123456789abcdef" * 70_000, "list": list(range(20_000))},
}


@pytest.mark.seed("CTR-SOCKET.2", "REQ-CTR-004.1", "CTR-RESPONSE.1", "REQ-CTR-005")
async def test_a_result_of_any_json_type_and_size_reaches_the_socket_unchanged(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent())
        async with here.box(session_id) as box:
            for name, value in VALUES.items():
                asked = await box.request("caller_tool", tool="any", arguments={"of": name})
                await caller.answer(await caller.request(), value)
                told = await box.answer(asked)
                assert told == {"jsonrpc": "2.0", "id": asked, "result": value}, name
                assert type(told["result"]) is type(value), name


async def test_a_result_of_any_json_type_reaches_the_droid(here: Scene) -> None:
    async with here.caller() as caller:
        names = list(VALUES)
        plan: list[dict[str, Any]] = [
            {"tool": "ant_any", "args": {"of": name}, "expect": {"is_error": False}} for name in names
        ]
        session_id = await here.start(caller, plan, context=lent())
        for name in names:
            request = await caller.request()
            assert request["arguments"] == {"of": name}
            await caller.answer(request, VALUES[name])
        turn = (await here.turn(session_id)).worked()
    assert turn.failed == [False] * len(names)


async def test_content_blocks_are_passed_through_as_they_are(here: Scene) -> None:
    blocks = [
        {"type": "text", "text": "see"},
        {"type": "image", "data": "aGVsbG8=", "mimeType": "image/png"},
        {"type": "resource", "resource": {"uri": "file:///a.txt", "mimeType": "text/plain", "text": "inside"}},
    ]
    async with here.caller() as caller:
        session_id = await here.start(caller, [{"tool": "ant_any", "expect": {"is_error": False}}], context=lent())
        await caller.answer(await caller.request(), {"content": blocks})
        turn = (await here.turn(session_id)).worked()
    shown = json.dumps(turn.results[0]["content"])
    assert '"see"' in shown
    assert "aGVsbG8=" in shown
    assert "file:///a.txt" in shown


@pytest.mark.seed("REQ-CTR-004.2", "CTR-ERROR.3")
@pytest.mark.parametrize("era", ["legacy", "modern"])
async def test_an_error_reaches_the_droid_as_an_error_with_the_exact_text(here: Scene, era: Era) -> None:
    words = "recipient not found: “+1” \n is nobody"
    async with here.caller(era=era) as caller:
        plan = [
            {"tool": "ant_send_response", "args": {"message": "x"}, "expect": {"is_error": True, "contains": words}},
            {"say": "[$last]"},
        ]
        session_id = await here.start(caller, plan, context=lent())
        await carry(caller, session_id)
        assert await caller.answer(await caller.request(), error=words) == {"accepted": True, "state": "failed"}
        turn = (await here.turn(session_id)).worked()
    assert f"[{words}]" in turn.text
    assert turn.failed == [True]


@pytest.mark.seed("REQ-CTR-004.2", "CTR-ERROR.3")
async def test_an_error_on_the_socket_has_a_code_and_a_machine_word(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent())
        async with here.box(session_id) as box:
            asked = await box.request("caller_tool", tool="any", arguments={})
            await caller.answer(await caller.request(), error="no")
            told = await box.answer(asked)
    assert told == {
        "jsonrpc": "2.0",
        "id": asked,
        "error": {"code": -32000, "message": "no", "data": {"kind": "caller_error", "retryable": False}},
    }


@pytest.mark.seed("CTR-ERROR.3")
async def test_a_result_that_contains_a_key_named_error_is_a_result(here: Scene) -> None:
    async with here.caller() as caller:
        plan = [{"tool": "ant_any", "expect": {"is_error": False, "contains": "nothing is wrong"}}]
        session_id = await here.start(caller, plan, context=lent())
        await caller.answer(await caller.request(), {"error": "nothing is wrong"})
        (await here.turn(session_id)).worked()


@pytest.mark.seed("REQ-CTR-001.2", "CTR-TIMEOUT.1", "CTR-TIMEOUT.2", "CTR-TIMEOUT.3", "CTR-ERROR.2")
@pytest.mark.parametrize("by", ["session", "tool"])
async def test_a_caller_that_does_not_answer_in_half_a_second_is_a_timeout(here: Scene, by: str) -> None:
    context = lent(caller_tool_timeout_s=0.5) if by == "session" else lent([{**ANY, "timeoutSeconds": 0.5}])
    async with here.caller() as caller:
        plan: list[dict[str, Any]] = [
            {"tool": "ant_any", "args": {"n": 1}, "expect": {"is_error": True, "contains": "0.5 seconds"}},
            {"say": "still here: $last"},
        ]
        session_id = await here.start(caller, plan, context=context)
        request = await caller.request()
        assert 0.3 < request["deadline_at"] - request["at"] < 0.7
        turn = (await here.turn(session_id)).worked()
        assert [one["outcome"] for one in turn.of("caller_tool_resolved")] == ["expired"]
        assert (await caller.until("caller_tool_cancelled"))["request_id"] == request["request_id"]
        before = await here.events(session_id)
        late = await caller.answer(request, "too late")
        assert late == {"accepted": False, "reason": "expired", "state": "expired"}
        assert await here.events(session_id) == before, "a late answer is nothing that happened"
    assert "still here" in turn.text


@pytest.mark.seed("CTR-ERROR.2", "CTR-TIMEOUT.2")
async def test_a_timeout_on_the_socket_is_told_as_one_when_the_time_is_up(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent(caller_tool_timeout_s=0.6))
        async with here.box(session_id) as box:
            began = time.monotonic()
            told = await box.ask("caller_tool", tool="any", arguments={})
            waited = time.monotonic() - began
            assert told["error"]["data"] == {"kind": "timeout", "retryable": False}
            assert 0.5 < waited < 3
            assert "result" in await box.ask("session_events", session_id=session_id), "the connection is fine"


@pytest.mark.seed("CTR-TIMEOUT.1")
async def test_the_time_is_60_seconds_unless_told_otherwise(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent())
        async with here.door(session_id) as box:
            attached = (await box.attach())["result"]
            assert (attached["call_timeout_s"], attached["call_timeout_max_s"]) == (60, 600)
            assert attached["margin_s"] > 0, "the client waits longer than the server"
            assert attached["wait_max_s"] == 3600, "and as long as it is told that it may"
            await box.request("caller_tool", tool="any", arguments={})
            request = await caller.request()
            assert request["deadline_at"] - request["at"] == pytest.approx(60)
            await caller.answer(request)


@pytest.mark.seed("CTR-TIMEOUT.1")
async def test_a_servers_own_time_ends_a_call_where_session_and_tool_say_nothing(tmp_path: Path) -> None:
    patient = {**ANY, "name": "patient", "timeoutSeconds": 30}
    async with (
        ServerProcess(tmp_path / "home", caller_tool_timeout_s=0.6) as server,
        scene(server) as here,
        here.caller() as caller,
    ):
        session_id = await here.rest(caller, context=lent([ANY, patient]))
        async with here.door(session_id) as box:
            assert (await box.attach())["result"]["call_timeout_s"] == 0.6
            long = await box.request("caller_tool", tool="patient", arguments={})
            request = await caller.request()
            began = time.monotonic()
            told = await box.ask("caller_tool", tool="any", arguments={})
            waited = time.monotonic() - began
            assert told["error"]["data"] == {"kind": "timeout", "retryable": False}
            assert "0.6 seconds" in told["error"]["message"]
            assert 0.5 < waited < 3
            await caller.answer(request, "a tool's own time counts more")
            assert (await box.answer(long))["result"] == "a tool's own time counts more"


async def test_an_answer_after_three_quarters_of_the_time_is_delivered(here: Scene) -> None:
    async with here.caller() as caller:
        plan = [{"tool": "ant_any", "expect": {"is_error": False, "contains": "at last"}}]
        session_id = await here.start(caller, plan, context=lent(caller_tool_timeout_s=4))
        request = await caller.request()
        await asyncio.sleep(request["at"] + 3 - time.time())
        assert (await caller.answer(request, "at last"))["accepted"]
        (await here.turn(session_id)).worked()


@pytest.mark.timeout(150)
@pytest.mark.seed("CTR-TIMEOUT.1")
async def test_an_answer_at_45_of_60_seconds_is_delivered(here: Scene) -> None:
    """The one test that really waits: no timer between droid and caller is shorter than the server's."""
    async with here.caller() as caller:
        plan = [{"tool": "ant_any", "expect": {"is_error": False, "contains": "at last"}}]
        session_id = await here.start(caller, plan, context=lent())
        request = await caller.request()
        await asyncio.sleep(request["at"] + 45 - time.time())
        assert (await caller.answer(request, "at last"))["accepted"]
        (await here.turn(session_id)).worked()


@pytest.mark.seed("CTR-FLOW.1", "CTR-FLOW.2")
async def test_twenty_calls_at_once_are_answered_in_reverse_while_another_tool_works(here: Scene) -> None:
    key = await here.token("write")
    async with here.caller() as caller:
        calls: list[dict[str, Any]] = [
            {"tool": "ant_any", "args": {"n": n}, "expect": {"is_error": False, "equals": {"for": n}}}
            for n in range(20)
        ]
        other = {"tool": "oubliette_project_list", "args": {}, "expect": {"is_error": False}}
        plan = [{"parallel": [*calls, other]}, {"say": "all done"}]
        session_id = await here.start(caller, plan, context=lent(), oubliette_api_key=key["token"])
        requests = [await caller.request() for _ in range(20)]
        # The platform's tool is not behind any of the twenty.
        listed = await here.until(session_id, "tool_result", tool_name="oubliette_project_list")
        assert not listed.get("is_error")
        for request in sorted(requests, key=lambda one: -one["arguments"]["n"]):
            assert (await caller.answer(request, {"for": request["arguments"]["n"]}))["accepted"]
        turn = (await here.turn(session_id)).worked()
    assert len({request["request_id"] for request in requests}) == 20
    assert len(turn.of("caller_tool_resolved")) == 20


@pytest.mark.seed("CTR-FLOW.1", "CTR-FLOW.2", "REQ-CTR-005.1", "CTR-SOCKET.1")
async def test_a_call_on_the_socket_blocks_itself_and_nothing_else(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent())
        async with here.box(session_id) as box:
            first = await box.request("caller_tool", tool="send_response", arguments={"message": "a"})
            second = await box.request("caller_tool", tool="get_memory", arguments={"message": "b"})
            one, two = await caller.request(), await caller.request()
            assert [(one["tool"], one["arguments"]), (two["tool"], two["arguments"])] == [
                ("send_response", {"message": "a"}),
                ("get_memory", {"message": "b"}),
            ]
            assert "result" in await box.ask("session_events", session_id=session_id)
            await caller.answer(two, "second")
            assert (await box.answer(second))["result"] == "second"
            await caller.answer(one, "first")
            assert (await box.answer(first))["result"] == "first"


@pytest.mark.seed("REQ-CTR-005.1")
async def test_the_seeds_own_request_without_a_call_key_is_served(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent([{"name": "x"}]))
        async with here.box(session_id) as box:
            frame = {"jsonrpc": "2.0", "id": 1, "method": "caller_tool", "params": {"tool": "x", "arguments": {}}}
            await box.send(frame)
            await caller.answer(await caller.request(), {"ok": 1})
            assert await box.answer(1) == {"jsonrpc": "2.0", "id": 1, "result": {"ok": 1}}


async def test_arguments_over_a_quarter_megabyte_travel_by_reference(here: Scene) -> None:
    text = "x" * 300_000
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent())
        async with here.box(session_id) as box:
            asked = await box.request("caller_tool", tool="any", arguments={"text": text})
            request = await caller.request()
            assert "arguments" not in request
            assert request["arguments_bytes"] > 300_000
            (listed,) = (await caller.call("caller_tool_pending", session_id=session_id))["requests"]
            assert listed == request
            ids = {"session_id": session_id, "request_id": request["request_id"]}
            (whole,) = (await caller.call("caller_tool_pending", **ids))["requests"]
            assert whole["arguments"] == {"text": text}
            await caller.answer(request, len(text))
            assert (await box.answer(asked))["result"] == 300_000
            assert (await caller.call("caller_tool_pending", **ids))["requests"] == []


async def test_progress_reaches_the_box_and_moves_the_deadline(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent(caller_tool_timeout_s=1.0))
        async with here.box(session_id) as box:
            asked = await box.request("caller_tool", tool="any", arguments={}, call_key="mine")
            request = await caller.request()
            moved = await caller.call(
                "caller_tool_progress",
                session_id=session_id,
                request_id=request["request_id"],
                progress=1,
                total=4,
                message="a quarter",
                extend_seconds=30,
            )
            assert moved["deadline_at"] > request["deadline_at"] + 20
            told = await box.told("progress")
            assert told["params"] == {"call_key": "mine", "progress": 1, "total": 4, "message": "a quarter"}
            await asyncio.sleep(max(0.0, request["deadline_at"] + 0.2 - time.time()))
            assert (await caller.answer(request, "later than the first deadline"))["accepted"]
            assert (await box.answer(asked))["result"] == "later than the first deadline"


async def test_a_cancel_from_the_box_reaches_the_caller(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent())
        async with here.box(session_id) as box:
            asked = await box.request("caller_tool", tool="any", arguments={}, call_key="mine")
            request = await caller.request()
            await box.notify("cancel", call_key="mine", reason="changed its mind")
            told = await box.answer(asked)
            assert told["error"]["data"]["kind"] == "cancelled"
            cancelled = await caller.until("caller_tool_cancelled", request_id=request["request_id"])
            assert cancelled["tool"] == "any"
            late = await caller.answer(request, 1)
            assert late == {"accepted": False, "reason": "expired", "state": "cancelled"}


@pytest.mark.seed("REQ-CTR-002.2")
async def test_arguments_that_do_not_fit_disturb_nobody(here: Scene) -> None:
    async with here.caller() as caller:
        plan = [
            {"tool": "ant_send_response", "args": {"message": 7}, "expect": {"is_error": True, "contains": "message"}},
            {"tool": "ant_send_response", "args": {}, "expect": {"is_error": True, "contains": "message"}},
        ]
        session_id = await here.start(caller, plan, context=lent([SEND_RESPONSE]))
        turn = (await here.turn(session_id)).worked()
        assert turn.of("caller_tool_request") == []
        async with here.box(session_id) as box:
            told = await box.ask("caller_tool", tool="send_response", arguments={"message": []})
            assert told["error"]["code"] == -32602
            assert told["error"]["data"]["kind"] == "invalid_arguments"
            undeclared = await box.ask("caller_tool", tool="format_disk", arguments={})
            assert undeclared["error"]["code"] == -32602
            assert undeclared["error"]["data"]["kind"] == "unknown_tool"
        assert caller.requests.empty()


async def test_the_sixty_fifth_call_at_once_is_refused_and_the_others_go_on(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent())
        async with here.box(session_id) as box:
            asked = [await box.request("caller_tool", tool="any", arguments={"n": n}) for n in range(64)]
            requests = [await caller.request() for _ in range(64)]
            refused = await box.ask("caller_tool", tool="any", arguments={"n": 64})
            assert refused["error"]["data"] == {"kind": "too_many", "retryable": True}
            for request in requests:
                await caller.answer(request, request["arguments"]["n"])
            assert [(await box.answer(one))["result"] for one in asked] == list(range(64))


# JSON as callers may write it, and what the droid's side gets; or a word of why it is refused to the caller.
WRITTEN: dict[str, tuple[bytes, Any]] = {
    "on many lines": (b'{\r\n\t"a": [\n1,\n 2]\n}', {"a": [1, 2]}),
    "with escapes": (b'"\\u0041\\n\\ud83d\\ude00"', "A\n\U0001f600"),
    "with a line separator": ('"a\u2028b"'.encode(), "a\u2028b"),
    "nine hundred levels deep": (b"[" * 900 + b"]" * 900, None),
}
UNREADABLE = {
    "bytes that are no text": (b'"\xff\xfe"', "UTF-8"),
    "half a surrogate pair in bytes": (b'"\xed\xa0\x80"', "UTF-8"),
    "a key that is no text": (b'{"\xff": 1}', "UTF-8"),
}


@pytest.mark.seed("CTR-SOCKET.2")
async def test_a_result_is_one_frame_however_its_json_is_written(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent(caller_tool_timeout_s=20))
        async with here.box(session_id) as box:
            for name, (raw, value) in {**WRITTEN, **UNREADABLE}.items():
                asked = await box.request("caller_tool", tool="any", arguments={})
                request = await caller.request()
                names = {"session_id": session_id, "request_id": request["request_id"], "result": "HERE"}
                message = caller.message("tools/call", {"name": "caller_tool_response", "arguments": names})
                told = (await caller.post(json.dumps(message).encode().replace(b'"HERE"', raw))).json["result"]
                if name in WRITTEN:
                    assert told["structuredContent"]["accepted"], name
                    result = (await box.answer(asked))["result"]
                    assert result == (json.loads(raw) if value is None else value), name
                else:
                    assert told["isError"], name
                    assert value in told["content"][0]["text"]
                    await caller.answer(request, "it stays open for a better one")
                    assert (await box.answer(asked))["result"] == "it stays open for a better one"


async def test_a_result_that_the_box_cannot_read_ends_the_call_as_an_error(here: Scene) -> None:
    """Python reads no numbers of so many digits; the call must not wait for what has come already."""
    async with here.caller() as caller:
        plan = [{"tool": "ant_any", "expect": {"is_error": True, "contains": "cannot be read"}}]
        session_id = await here.start(caller, plan, context=lent())
        request = await caller.request()
        names = {"session_id": session_id, "request_id": request["request_id"], "result": "HERE"}
        message = caller.message("tools/call", {"name": "caller_tool_response", "arguments": names})
        await caller.post(json.dumps(message).encode().replace(b'"HERE"', b"1" * 5000))
        (await here.turn(session_id)).worked()
