"""Agents that never see that their tools changed: their session is opened anew between turns."""

import asyncio
import dataclasses
import json
import sys
from pathlib import Path

import pytest

from oubliette.server.droids.dialogue import Patience
from oubliette.server.droids.driver import LaunchProfile
from tests.kit import acp_agent
from tests.kit.droid_world import built_in, serving, world

HISTORY = json.dumps([{"act": "say-methods"}, {"act": "answer", "result": {"stopReason": "end_turn"}}])
KEY = "oub_" + "56" * 32


def agent(way: str = "", **chosen: str) -> LaunchProfile:
    """One that never refreshes, unless it is told otherwise."""
    told = {"list_changed": "none", "resume": "resume", "mode": "full", **chosen}
    return LaunchProfile(name="agent", argv=(sys.executable, "-I", "-S", acp_agent.__file__, way), **told)  # type: ignore[arg-type]


OPENED = "initialize new set_mode prompt"


@pytest.mark.parametrize(
    "way, profile, then",
    [
        ("", {}, "resume set_mode prompt"),
        ("loads", {}, "load set_mode prompt"),
        ("", {"resume": "load"}, "load set_mode prompt"),
        ("", {"list_changed": "live"}, "prompt"),
        ("", {"list_changed": "next_turn"}, "prompt"),
    ],
    ids=["resumes", "cannot resume", "loads", "live", "next turn"],
)
async def test_an_agent_is_shown_changed_tools_before_its_next_turn(
    tmp_path: Path, way: str, profile: dict[str, str], then: str
) -> None:
    async with asyncio.timeout(20), world(tmp_path, agent(way, **profile)) as made, serving(made) as server:
        droid = await server.start()
        server.session.tools = "others"
        assert (await server.turn(droid, HISTORY)).text == f"{OPENED.removesuffix('prompt')}{then}"
        assert (await server.turn(droid, HISTORY, 2)).text == f"{OPENED.removesuffix('prompt')}{then} prompt"
        log = await made.log()
        assert "what was said long ago" not in str(log), "what a load replays is history"
        assert [event for event in log if event["type"] == "warning"] == []


async def test_tools_that_changed_while_the_server_was_away_are_shown_too(tmp_path: Path) -> None:
    async with asyncio.timeout(20), world(tmp_path, agent()) as made:
        async with serving(made, epoch=1) as server:
            await server.turn(await server.start(), HISTORY)
        async with serving(made, epoch=2) as server:
            server.session.tools = "others"
            droid = await server.resume()
            assert droid is not None
            assert (await server.turn(droid, HISTORY, 2)).text == f"{OPENED} resume set_mode prompt"


async def test_an_agent_whose_key_is_gone_works_on_with_the_tools_that_it_knows(tmp_path: Path) -> None:
    async with asyncio.timeout(20), world(tmp_path, agent()) as made:
        async with serving(made, epoch=1) as server:
            await server.turn(await server.start(KEY), HISTORY)
        async with serving(made, epoch=2) as server:
            server.session.tools = "others"
            droid = await server.resume()
            assert droid is not None
            assert (await server.turn(droid, HISTORY, 2)).text == f"{OPENED} prompt"
            assert (await server.turn(droid, HISTORY, 3)).text == f"{OPENED} prompt prompt"
        warned = [event["kind"] for event in await made.log() if event["type"] == "warning"]
        assert warned == ["tools_not_shown"]


async def test_a_turn_that_is_cancelled_while_the_session_opens_again_does_not_begin(tmp_path: Path) -> None:
    async with asyncio.timeout(20), world(tmp_path, agent("silent-at session/resume")) as made, serving(made) as server:
        droid = await server.start()
        server.session.tools = "others"
        await server.begin(1, HISTORY)
        await droid.prompt(1, HISTORY)
        await droid.cancel()
        assert (await server.session.over()).stop_reason == "cancelled"


async def test_an_agent_that_does_not_open_its_session_again_fails_the_turn(tmp_path: Path) -> None:
    profile, patience = agent("silent-at session/resume"), Patience(opening_s=0.3)
    async with asyncio.timeout(20), world(tmp_path, profile, patience) as made, serving(made) as server:
        droid = await server.start()
        server.session.tools = "others"
        outcome = await server.turn(droid, HISTORY)
        assert (outcome.stop_reason, outcome.error) == ("error", "the droid did not answer session/resume within 0.3 s")
        assert made.keeper.running == []


async def test_the_built_in_droid_goes_on_with_the_conversation_when_its_session_opens_again(tmp_path: Path) -> None:
    profile = dataclasses.replace(built_in(), list_changed="none")
    async with asyncio.timeout(20), world(tmp_path, profile) as made, serving(made) as server:
        droid = await server.start(KEY)
        for number, word in enumerate(("before", "after"), start=1):
            server.session.tools = word
            assert (await server.turn(droid, f'<<plan [{{"say": "{word}"}}]>>', number)).text == word
        (history,) = (tmp_path / "home" / ".oubliette-droid" / "sessions").iterdir()
        assert [entry["content"]["text"] for entry in json.loads(history.read_text())["updates"]][1::2] == [
            "before",
            "after",
        ]
