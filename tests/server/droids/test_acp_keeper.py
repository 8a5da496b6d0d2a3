"""The driver with the real keeper: a process of its own, reached through a real socket."""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from oubliette.server.droids.driver import LaunchProfile
from tests.kit import acp_agent
from tests.kit.droid_world import Server, World, built_in, serving, world
from tests.kit.keeper_door import KeeperDoor
from tests.kit.kept_box import KeptBox, kept_box
from tests.kit.mortal_database import MortalDatabase

AGENT = LaunchProfile(name="bad", argv=(sys.executable, "-I", "-S", acp_agent.__file__, ""))
DONE = {"act": "answer", "result": {"stopReason": "end_turn"}}


def plan(*steps: Any) -> str:
    return f"<<plan {json.dumps(steps)}>>"


@asynccontextmanager
async def behind(
    box: KeptBox, made: World, *, epoch: int = 1, database: MortalDatabase | None = None
) -> AsyncGenerator[Server]:
    """A server whose keeper is the real one."""
    async with serving(made, epoch=epoch, database=database) as server:
        made.keeper.disconnect()
        door = KeeperDoor(server.processes)
        await box.open_door(door)  # type: ignore[arg-type]
        try:
            await door.attached.wait()
            yield server
        finally:
            box.close_door()
            door.cut()


@asynccontextmanager
async def kept(folder: Path, profile: LaunchProfile) -> AsyncGenerator[tuple[World, KeptBox]]:
    async with asyncio.timeout(60), world(folder, profile) as made:
        door = KeeperDoor(None)  # type: ignore[arg-type]
        async with kept_box(folder / "box", door, is_open=False) as box:  # type: ignore[arg-type]
            yield made, box


async def test_a_turn_runs_behind_the_real_keeper(tmp_path: Path) -> None:
    async with kept(tmp_path, built_in()) as (made, box), behind(box, made) as server:
        droid = await server.start()
        outcome = await server.turn(droid, plan({"tool": "ant_echo"}, {"say": "$last"}))
        assert (outcome.stop_reason, outcome.text) == ("end_turn", "ant_echo: {}")
        await droid.stop()
        assert await made.rows("SELECT state FROM processes") == [("ended",)]


async def test_long_lines_pass_a_keeper_that_holds_one_megabyte(tmp_path: Path) -> None:
    async with kept(tmp_path, AGENT) as (made, box), behind(box, made) as server:
        droid = await server.start()
        items = [
            {"act": "long-say", "n": 3_000_000},
            {"act": "long", "n": 10_000_000},
            {"act": "flood", "n": 5000},
            DONE,
        ]
        outcome = await server.turn(droid, json.dumps(items))
        assert outcome.stop_reason == "end_turn"
        said = "".join(event["text"] for event in await made.log() if event["type"] == "message")
        assert said == "y" * 3_000_000 + "".join(f"{number} " for number in range(5000))


async def test_an_agent_that_asks_and_does_not_read_is_ended(tmp_path: Path) -> None:
    """Pipe, keeper and server hold what they hold; after that it is over."""
    async with kept(tmp_path, AGENT) as (made, box), behind(box, made) as server:
        droid = await server.start()
        outcome = await server.turn(droid, json.dumps([{"act": "ask", "n": 150, "size": 200_000}]))
        assert (outcome.stop_reason, outcome.error_kind) == ("error", "input_unread")
        assert await made.rows("SELECT * FROM process_input") == []
        await droid.stop()
        assert await made.rows("SELECT state FROM processes") == [("ended",)]


async def test_the_droid_and_its_open_turn_outlive_servers(tmp_path: Path) -> None:
    """Each server lives for a few commits; the turn ends as if one had lived through."""
    steps: list[Any] = [{"say": "begin"}]
    for _ in range(5):
        steps += [{"sleep": 0.05}, {"tool": "ant_echo", "args": {"n": 1}}]
    steps += [{"say": "$last"}]
    text = plan(*steps)
    async with kept(tmp_path, built_in()) as (made, box):
        async with behind(box, made) as server:
            droid = await server.start()
            await server.begin(1, text)
            await droid.prompt(1, text)
        deaths = 0
        for epoch in range(2, 40):
            mortal = MortalDatabase(made.file, dies_at=3, when="after" if epoch % 2 else "before")
            async with behind(box, made, epoch=epoch, database=mortal) as server, asyncio.TaskGroup() as tasks:
                if await made.rows("SELECT 1 FROM turns WHERE state = 'ended'"):
                    break
                going_on = tasks.create_task(server.resume())
                over = tasks.create_task(server.session.over())
                dying = tasks.create_task(mortal.died.wait())
                await asyncio.wait((over, dying), return_when=asyncio.FIRST_COMPLETED)
                deaths += mortal.died.is_set()
                for task in (going_on, over, dying):
                    task.cancel()
        assert deaths > 1
        log = [event for event in await made.log() if event["type"] not in ("delta", "plan")]
        assert [event["type"] for event in log] == [
            "message",
            *["tool_call", "tool_result"] * 5,
            "message",
            "completion",
        ]
        assert [event["text"] for event in log if event["type"] == "message"] == ["begin", 'ant_echo: {"n": 1}']
        assert log[-1]["stop_reason"] == "end_turn"
