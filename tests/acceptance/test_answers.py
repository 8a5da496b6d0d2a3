"""Who may answer a droid's call, and once only."""

from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio

from tests.kit.mcp_caller import Refused
from tests.kit.records import records
from tests.kit.scene import Scene, lent, scene
from tests.kit.server import ServerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[ServerProcess]:
    async with ServerProcess(tmp_path_factory.mktemp("answers") / "home") as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def here(server: ServerProcess) -> AsyncGenerator[Scene]:
    async with scene(server) as made:
        yield made


@pytest.mark.seed("CTR-SECURITY.1")
@pytest.mark.parametrize("scope", ["admin", "write"])
async def test_another_token_may_not_answer_and_the_request_stays_pending(here: Scene, scope: str) -> None:
    owner, other = await here.token("write"), await here.token(scope)
    async with here.caller(owner["token"]) as caller, here.caller(other["token"]) as stranger:
        session_id = await here.rest(caller, context=lent())
        async with here.box(session_id) as box:
            asked = await box.request("caller_tool", tool="any", arguments={})
            request = await caller.request()
            for answer in ({"result": "mine"}, {"error": "mine"}):
                told = await stranger.answer(request, **answer)
                assert told == {"accepted": False, "reason": "not_owner"}
            with pytest.raises(Refused):
                await stranger.call("caller_tool_pending", session_id=session_id)
            with pytest.raises(Refused):
                await stranger.poll(session_id, seconds=0)
            with pytest.raises(Refused):
                await stranger.call(
                    "caller_tool_progress", session_id=session_id, request_id=request["request_id"], extend_seconds=500
                )
            still = await caller.call("caller_tool_pending", session_id=session_id)
            assert [one["request_id"] for one in still["requests"]] == [request["request_id"]]
            assert still["requests"][0]["deadline_at"] == request["deadline_at"]
            assert await caller.answer(request, "the owner's") == {"accepted": True, "state": "answered"}
            assert (await box.answer(asked))["result"] == "the owner's"
        assert stranger.requests.empty()
    refused = records(here.server.home, "audit", operation="caller_tool_response", token_id=other["id"])
    assert [one["outcome"] for one in refused] == ["refused: not_owner"] * 2
    assert {one["target"] for one in refused} == {request["request_id"]}


async def test_a_token_that_only_reads_may_not_answer(here: Scene) -> None:
    reader = await here.token("read")
    async with here.caller() as caller, here.caller(reader["token"]) as stranger:
        session_id = await here.rest(caller, context=lent())
        async with here.box(session_id) as box:
            asked = await box.request("caller_tool", tool="any", arguments={})
            request = await caller.request()
            with pytest.raises(Refused) as refused:
                await stranger.answer(request, "read")
            assert refused.value.kind == "forbidden"
            assert (await caller.answer(request, "mine"))["accepted"]
            assert (await box.answer(asked))["result"] == "mine"


@pytest.mark.seed("CTR-SECURITY.1")
async def test_a_message_of_another_token_does_not_make_it_the_caller(here: Scene) -> None:
    owner, other = await here.token("write"), await here.token("write")
    async with here.caller(owner["token"]) as caller, here.caller(other["token"]) as stranger:
        session_id = await here.rest(caller, context=lent())
        with pytest.raises(Refused):
            await here.more(stranger, session_id, [{"say": "x"}], context=lent([{"name": "theirs"}]))
        plan = [{"tool": "ant_any", "expect": {"is_error": False, "contains": "the owner's"}}]
        await here.more(stranger, session_id, plan)
        await caller.answer(await caller.request(), "the owner's")
        (await here.turn(session_id, 2)).worked()
        assert stranger.requests.empty()


@pytest.mark.seed("CTR-SECURITY.3")
async def test_an_answer_under_another_session_is_unknown(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent())
        other = await here.rest(caller, context=lent())
        async with here.box(session_id) as box:
            asked = await box.request("caller_tool", tool="any", arguments={})
            request = await caller.request()
            for wrong in (other, "gogol_20260101_000000_00000000", ""):
                told = await caller.answer({**request, "session_id": wrong}, "misled")
                assert told == {"accepted": False, "reason": "unknown"}
            assert (await caller.answer(request, "right"))["accepted"]
            assert (await box.answer(asked))["result"] == "right"


@pytest.mark.seed("CTR-SECURITY.2")
async def test_a_second_answer_does_nothing_and_the_same_again_is_only_a_repeat(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent())
        async with here.box(session_id) as box:
            asked = await box.request("caller_tool", tool="any", arguments={}, call_key="k")
            request = await caller.request()
            assert await caller.answer(request, {"n": 1}) == {"accepted": True, "state": "answered"}
            assert await caller.answer(request, {"n": 1}) == {"accepted": True, "repeated": True, "state": "answered"}
            told = await caller.answer(request, {"n": 2})
            assert told == {"accepted": False, "reason": "answered", "state": "answered"}
            told = await caller.answer(request, error="no, it failed")
            assert told == {"accepted": False, "reason": "answered", "state": "answered"}
            assert (await box.answer(asked))["result"] == {"n": 1}
            # A replay does not reach the next call of the same tool either.
            again = await box.request("caller_tool", tool="any", arguments={})
            fresh = await caller.request()
            assert not (await caller.answer(request, {"n": 3}))["accepted"]
            assert (await caller.answer(fresh, "fresh"))["accepted"]
            assert (await box.answer(again))["result"] == "fresh"
            # And the droid's side gets the stored outcome for the same key, without another call.
            assert (await box.ask("caller_tool", tool="any", arguments={}, call_key="k"))["result"] == {"n": 1}
            other = await box.ask("caller_tool", tool="any", arguments={"x": 1}, call_key="k")
            assert other["error"]["data"]["kind"] == "call_key_reused"
            assert caller.requests.empty()


@pytest.mark.seed("CTR-ERROR.4")
async def test_an_invalid_request_id_is_a_warning_in_the_log_and_changes_nothing(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent())
        before = await here.events(session_id)
        nobody = {"session_id": session_id, "request_id": "00000000-0000-4000-8000-00000000beef"}
        assert await caller.answer(nobody, "x") == {"accepted": False, "reason": "unknown"}
        assert await caller.answer({**nobody, "request_id": "no uuid"}, "x") == {"accepted": False, "reason": "unknown"}
        assert await here.events(session_id) == before
    lines = [line for line in here.server.log.read_text().splitlines() if nobody["request_id"] in line]
    assert len(lines) == 1
    assert "warning" in lines[0].lower()
    assert "ignored" in lines[0]


@pytest.mark.seed("CTR-SECURITY.3")
async def test_an_answer_after_the_end_of_its_session_does_nothing(here: Scene) -> None:
    async with here.caller() as caller:
        session_id = await here.rest(caller, context=lent())
        async with here.box(session_id) as box:
            asked = await box.request("caller_tool", tool="any", arguments={})
            request = await caller.request()
            await caller.call("session_end", session_id=session_id)
            told = await box.answer(asked)
            assert told["error"]["data"]["kind"] == "cancelled"
        before = await here.events(session_id)
        late = await caller.answer(request, "late")
        assert late == {"accepted": False, "reason": "expired", "state": "cancelled"}
        assert await here.events(session_id) == before


async def test_a_revoked_owner_answers_nothing_any_more_and_is_gone(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    home = tmp_path_factory.mktemp("answers") / "home"
    async with (
        ServerProcess(home, disconnect_grace_s=0.5) as server,
        scene(server) as here,
        here.caller((owner := await here.token("write"))["token"]) as caller,
    ):
        session_id = await here.rest(caller, context=lent(caller_tool_timeout_s=20))
        async with here.box(session_id) as box:
            asked = await box.request("caller_tool", tool="any", arguments={})
            request = await caller.request()
            await here.server.ask("token_revoke", token_id=owner["id"])
            posted = await caller.post(
                caller.message(
                    "tools/call",
                    {
                        "name": "caller_tool_response",
                        "arguments": {"session_id": session_id, "request_id": request["request_id"], "result": 1},
                    },
                )
            )
            assert posted.status == 401
            assert (await box.answer(asked))["error"]["data"]["kind"] == "disconnected"


@pytest.mark.seed("CTR-SECURITY.1")
async def test_a_droid_does_not_answer_its_own_calls_even_by_its_callers_key(here: Scene) -> None:
    owner = await here.token("admin")
    async with here.caller(owner["token"]) as caller:
        session_id = await here.rest(caller, context=lent(), oubliette_api_key=owner["token"])
        async with here.box(session_id) as box:
            asked = await box.request("caller_tool", tool="any", arguments={})
            request = await caller.request()
            names = {"session_id": session_id, "request_id": request["request_id"]}
            for tool in ("caller_tool_response", "caller_tool_pending", "caller_tool_poll", "caller_tool_progress"):
                told = await box.ask("oubliette_call_tool", api_key=owner["token"], tool=tool, arguments=names)
                assert told["error"]["code"] == -32002, tool
            assert (await caller.answer(request, "from outside"))["accepted"]
            assert (await box.answer(asked))["result"] == "from outside"
