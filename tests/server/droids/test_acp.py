"""The driver with good agents: the built-in droid, and one that stands on the public ACP library."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from oubliette.server.droids.dialogue import Patience
from oubliette.server.droids.driver import LaunchProfile
from oubliette.server.errors import Conflict, DroidFailed
from tests.kit import acp_library_agent
from tests.kit.droid_world import Server, World, built_in, serving, world

LIBRARY = LaunchProfile(name="library", argv=(sys.executable, acp_library_agent.__file__), mode="full", resume="load")


def plan(*steps: Any) -> str:
    return f"<<plan {json.dumps(steps)}>>"


def kinds(log: list[dict[str, Any]], *without: str) -> list[str]:
    return [event["type"] for event in log if event["type"] not in without]


async def test_a_turn_becomes_events_of_the_log(tmp_path: Path) -> None:
    async with asyncio.timeout(20), world(tmp_path) as made:
        async with serving(made) as server:
            droid = await server.start()
            step = {"tool": "ant_echo", "args": {"message": "hi"}}
            outcome = await server.turn(droid, plan({"say": "one"}, step, {"say": "two: $last"}))
            assert (outcome.stop_reason, outcome.error) == ("end_turn", None)
            assert outcome.text == 'one\n\ntwo: ant_echo: {"message": "hi"}'
            assert server.woken == sorted(server.woken)
            assert server.woken[-1] == len(await made.log()) - 1
        log = await made.log()
        assert kinds(log, "plan", "delta") == ["message", "tool_call", "tool_result", "message", "completion"]
        call, result = (event for event in log if event["type"].startswith("tool"))
        assert call["tool_call_id"] == result["tool_call_id"]
        assert (call["tool_name"], call["arguments"], call["turn"]) == ("ant_echo", {"message": "hi"}, 1)
        assert (result["tool_name"], result.get("is_error")) == ("ant_echo", None)
        assert result["content"]["content"][0]["text"] == 'ant_echo: {"message": "hi"}'


async def test_turns_follow_each_other_and_each_has_its_own_text(tmp_path: Path) -> None:
    async with asyncio.timeout(20), world(tmp_path) as made, serving(made) as server:
        droid = await server.start()
        for number in (1, 2, 3):
            outcome = await server.turn(droid, plan({"say": f"number {number}"}), number)
            assert outcome.text == f"number {number}"
            assert droid.has_turn(number)
            assert not droid.has_turn(number + 1)
        await droid.prompt(3, plan({"say": "again"}))  # begun already: left alone
        assert [number for number, _ in server.session.outcomes] == [1, 2, 3]


async def test_a_failed_plan_is_an_error_with_the_agents_own_words(tmp_path: Path) -> None:
    async with asyncio.timeout(20), world(tmp_path) as made:
        async with serving(made) as server:
            droid = await server.start()
            outcome = await server.turn(droid, plan({"say": "trying"}, {"fail": "no way"}))
            assert (outcome.stop_reason, outcome.error, outcome.error_kind) == ("error", "no way", "agent_error")
            assert outcome.text == "trying"
            assert (await server.turn(droid, plan({"say": "alive"}), 2)).text == "alive"
        assert kinds(await made.log(), "plan", "delta")[:3] == ["message", "error", "completion"]


async def test_a_cancelled_turn_ends_as_cancelled_and_the_next_one_runs(tmp_path: Path) -> None:
    async with asyncio.timeout(20), world(tmp_path) as made, serving(made) as server:
        droid = await server.start()
        await server.begin(1, "")
        await droid.prompt(1, plan({"say": "started"}, {"tool": "ant_never"}))
        await until_logged(made, server, "tool_call")
        with pytest.raises(Conflict):
            await droid.prompt(2, plan({"say": "me too"}))
        await droid.cancel()
        outcome = await server.session.over()
        assert (outcome.stop_reason, outcome.text, outcome.error) == ("cancelled", "started", None)
        assert (await server.turn(droid, plan({"say": "next"}), 2)).text == "next"
        await droid.cancel()  # with no turn open there is nothing to cancel
        assert server.session.losses == []


async def until_logged(made: World, server: Server, kind: str) -> None:
    while all(event["type"] != kind for event in await made.log()):
        await asyncio.sleep(0.01)


async def test_a_stopped_droid_leaves_no_process(tmp_path: Path) -> None:
    async with asyncio.timeout(20), world(tmp_path) as made, serving(made) as server:
        droid = await server.start()
        await server.begin(1, "")
        await droid.prompt(1, plan({"tool": "ant_never"}))
        await droid.stop()
        outcome = await server.session.over()
        assert (outcome.stop_reason, outcome.error) == ("cancelled", None)
        assert made.keeper.running == []
        assert server.session.losses == []
        assert await made.rows("SELECT state FROM processes") == [("ended",)]
        await droid.stop()
        await droid.cancel()
        with pytest.raises(DroidFailed, match="has ended"):
            await droid.prompt(2, plan({"say": "too late"}))


async def test_a_key_is_stored_nowhere(tmp_path: Path) -> None:
    key = "oub_" + "ab" * 32
    async with asyncio.timeout(20), world(tmp_path) as made:
        async with serving(made) as server:
            droid = await server.start(api_key=key)
            await server.turn(droid, plan({"tool": "ant_echo"}))
        for file in tmp_path.rglob("*"):
            assert not file.is_file() or key.encode() not in file.read_bytes(), file
        start = next(params for method, params in made.keeper.requests if method == "start")
        assert set(start["env"]) == {"HOME", "PATH", "LANG"}


async def test_the_mcp_server_gets_socket_and_key_and_an_agent_that_repeats_the_key_does_not_get_it_logged(
    tmp_path: Path,
) -> None:
    key = "oub_" + "ef" * 32
    async with asyncio.timeout(20), world(tmp_path) as made:
        async with serving(made) as server:
            droid = await server.start(api_key=key)
            outcome = await server.turn(droid, plan({"tool": "ant_environment"}, {"say": "$last"}))
            seen = json.loads(outcome.text)
            assert seen["OUBLIETTE_SOCKET"] == made.box.places.socket
            assert seen["OUBLIETTE_API_KEY"] == "[redacted]"
        for file in tmp_path.glob("database*"):
            assert key.encode() not in file.read_bytes()


@pytest.mark.parametrize("autonomy, allowed", [("off", False), ("low", True)])
async def test_the_autonomy_of_the_session_answers_permission_requests(
    tmp_path: Path, autonomy: str, allowed: bool
) -> None:
    async with asyncio.timeout(20), world(tmp_path, built_in(mode="ask")) as made:
        async with serving(made) as server:
            server.session.autonomy = autonomy
            droid = await server.start()
            outcome = await server.turn(droid, plan({"tool": "ant_echo"}, {"say": "$last"}))
            assert outcome.text == ("ant_echo: {}" if allowed else "permission denied")
        (asked,) = (event for event in await made.log() if event["type"] == "permission")
        assert asked["decision"] == ("allow_once" if allowed else "reject_once")
        assert asked["tool_name"] == "ant_echo"


async def test_a_new_droid_in_the_same_box_goes_on_with_the_conversation(tmp_path: Path) -> None:
    async with asyncio.timeout(20), world(tmp_path) as made, serving(made) as server:
        droid = await server.start()
        await server.turn(droid, plan({"say": "before"}))
        await droid.stop()
        droid = await server.start()
        await server.turn(droid, plan({"say": "after"}), 2)
        (history,) = (tmp_path / "home" / ".oubliette-droid" / "sessions").iterdir()
        said = [entry["content"]["text"] for entry in json.loads(history.read_text())["updates"]]
        assert said == [plan({"say": "before"}), "before", plan({"say": "after"}), "after"]


async def test_a_conversation_that_the_agent_lost_begins_anew_and_says_so(tmp_path: Path) -> None:
    async with asyncio.timeout(20), world(tmp_path) as made:
        async with serving(made) as server:
            await (await server.start()).stop()
            (history,) = (tmp_path / "home" / ".oubliette-droid" / "sessions").iterdir()
            history.unlink()
            droid = await server.start()
            assert (await server.turn(droid, plan({"say": "hello"}))).text == "hello"
        warning = (await made.log())[0]
        assert (warning["type"], warning["kind"]) == ("warning", "conversation_lost")


# ------------------------------------------------------------------------------------- an agent on the public library


async def test_an_agent_on_the_public_library_is_understood(tmp_path: Path) -> None:
    async with asyncio.timeout(30), world(tmp_path, LIBRARY) as made:
        async with serving(made) as server:
            droid = await server.start(api_key="oub_" + "0" * 64)
            outcome = await server.turn(droid, "tell think talk plan call use ask talk")
            assert outcome.stop_reason == "end_turn"
            assert outcome.usage == {"total_tokens": 30, "input_tokens": 10, "output_tokens": 20}
        log = await made.log()
        said = [(event.get("role", "assistant"), event["text"]) for event in log if event["type"] == "message"]
        assert said == [
            ("assistant", "oubliette client ['OUBLIETTE_SOCKET', 'OUBLIETTE_API_KEY']; mode full"),
            ("thought", "let me see"),
            ("assistant", "all is well"),
            ("assistant", "nowall is well"),
        ]
        assert kinds(log, "delta", "message") == [
            "plan",
            "tool_call",
            "tool_result",
            "usage",
            "permission",
            "usage",
            "completion",
        ]
        by_type = {event["type"]: event for event in log}
        assert by_type["plan"]["entries"][0]["content"] == "look"
        assert by_type["tool_result"]["content"][0]["content"]["text"] == "done"
        assert by_type["permission"]["decision"] == "allow_once"
        assert next(event for event in log if event["type"] == "usage")["cost_usd"] == 0.5


async def test_an_agent_on_the_public_library_is_cancelled(tmp_path: Path) -> None:
    async with asyncio.timeout(30), world(tmp_path, LIBRARY) as made, serving(made) as server:
        droid = await server.start()
        await server.begin(1, "")
        await droid.prompt(1, "talk wait")
        await until_logged(made, server, "delta")
        await droid.cancel()
        outcome = await server.session.over()
        assert (outcome.stop_reason, outcome.text) == ("cancelled", "all is well")


async def test_the_history_that_a_loaded_session_replays_is_not_logged_again(tmp_path: Path) -> None:
    async with asyncio.timeout(30), world(tmp_path, LIBRARY) as made:
        async with serving(made) as server:
            await (await server.start()).stop()
            droid = await server.start()
            outcome = await server.turn(droid, "tell")
            assert outcome.text == "loaded one; mode full"
        log = await made.log()
        assert [event["text"] for event in log if event["type"] == "message"] == ["loaded one; mode full"]


async def test_many_chunks_become_few_deltas(tmp_path: Path) -> None:
    async with asyncio.timeout(30), world(tmp_path, built_in(), Patience()) as made:
        async with serving(made) as server:
            droid = await server.start()
            outcome = await server.turn(droid, plan({"repeat": 2000, "step": {"say": "word"}}))
            assert outcome.text == "\n".join(["word"] * 2000)
        log = await made.log()
        deltas = [event["text"] for event in log if event["type"] == "delta"]
        assert "".join(deltas) == outcome.text
        assert len(deltas) < 40
        assert kinds(log, "delta", "plan") == ["message", "completion"]
