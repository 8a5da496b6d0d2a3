"""Many at once: sessions and callers that start together never cross."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio

from tests.kit.scene import Scene, lent, scene
from tests.kit.server import ServerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[ServerProcess]:
    async with ServerProcess(tmp_path_factory.mktemp("together") / "home") as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def here(server: ServerProcess) -> AsyncGenerator[Scene]:
    async with scene(server) as made:
        yield made


ROUNDS = 100


async def test_two_sessions_that_start_together_never_cross(here: Scene) -> None:
    """Two callers, one tool name, one project, the same moment: each droid has its own caller's tool and answer."""
    keys = [await here.token("write") for _ in range(2)]

    async def side(number: int, key: str) -> list[str]:
        texts: list[str] = []
        async with here.caller(key) as caller:
            for turn in range(ROUNDS):
                mine = f"side {number} round {turn}"
                name = f"who{number}"
                plan: list[dict[str, Any]] = [
                    {"say": "[$tools]"},
                    {"tool": "ant_who", "args": {"of": mine}, "expect": {"is_error": False, "contains": mine}},
                    {"tool": f"ant_{name}", "args": {}, "expect": {"is_error": False}},
                ]
                context = lent([{"name": "who"}, {"name": name}])
                session_id = await here.start(caller, plan, context=context)
                for _ in range(2):
                    request = await caller.request()
                    assert request["session_id"] == session_id
                    if request["tool"] == "who":
                        assert request["arguments"] == {"of": mine}
                    await caller.answer(request, mine)
                texts.append((await here.turn(session_id)).worked().text)
                await caller.call("session_end", session_id=session_id)
            assert {one["session_id"] for one in caller.heard if one["type"] == "caller_tool_request"}
            assert caller.requests.empty()
        return texts

    both = await asyncio.gather(*(side(number, key["token"]) for number, key in enumerate(keys)))
    for number, texts in enumerate(both):
        for text in texts:
            assert f"ant_who{number}" in text
            assert f"ant_who{1 - number}" not in text


async def test_one_callers_sessions_get_each_their_own_answers(here: Scene) -> None:
    """Six sessions of one caller call the same tool at the same time; answers go out in reverse."""
    async with here.caller() as caller:
        plan = [{"tool": "ant_any", "args": {}, "expect": {"is_error": False}}, {"say": "got $last"}]
        sessions = await asyncio.gather(*(here.start(caller, plan, context=lent()) for _ in range(6)))
        requests = [await caller.request() for _ in sessions]
        assert {one["session_id"] for one in requests} == set(sessions)
        for request in reversed(requests):
            await caller.answer(request, request["session_id"])
        for session_id in sessions:
            assert f"got {session_id}" in (await here.turn(session_id)).worked().text


async def test_a_child_reaches_its_roots_caller_and_its_calls_are_told_apart(here: Scene) -> None:
    async with here.caller() as caller:
        child = '<<plan [{"tool": "ant_any", "args": {"from": "child"}}, {"say": "child got $last"}]>>'
        plan: list[dict[str, Any]] = [
            {
                "parallel": [
                    {"tool": "session_message", "args": {"message": child}},
                    {"tool": "ant_any", "args": {"from": "parent"}, "expect": {"contains": "for the parent"}},
                ]
            }
        ]
        session_id = await here.start(caller, plan, context=lent())
        requests = [await caller.request() for _ in range(2)]
        for request in requests:
            await caller.answer(request, "for the " + request["arguments"]["from"])
        turn = (await here.turn(session_id)).worked()
        (started,) = turn.of("child_started")
        below = started["child_session_id"]
        assert {one["arguments"]["from"]: one["session_id"] for one in requests} == {
            "child": below,
            "parent": session_id,
        }
        assert "child got for the child" in (await here.turn(below)).worked().text
        told = await caller.call("session_events", session_id=session_id, include_children=True, max_events=500)
        assert {one["session_id"] for one in told["events"]} == {session_id, below}
