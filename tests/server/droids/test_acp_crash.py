"""The server dies at every commit of a turn, before or after it happened, and the next one goes on.

The keeper and the droid live through it. However the server died, the log is what it would have been without: no
event is missing and none is there twice.
"""

import asyncio
import json
from pathlib import Path
from typing import Any, Literal

import pytest

from oubliette.server.droids.acp import AcpDroid
from tests.kit.droid_world import Server, World, serving, world
from tests.kit.mortal_database import MortalDatabase

PLAN = "<<plan " + json.dumps(
    [
        {"say": "a first word"},
        {"tool": "ant_echo", "args": {"n": 1}},
        {"parallel": [{"tool": "ant_meet", "args": {"n": 2}}, {"tool": "ant_meet", "args": {"n": 2}}]},
        {"say": "the answer was $last"},
        {"tool": "ant_fails"},
        {"say": "last: $last"},
    ]
)
PLAN += ">>"


async def live(server: Server) -> None:
    """What a session does with its droid, from wherever the world is, to the end of its turn."""
    droid: AcpDroid | None = await server.resume()
    if droid is None:
        droid = await server.start()
    await server.begin(1, PLAN)
    if not droid.has_turn(1):
        await droid.prompt(1, PLAN)
    await server.session.until(lambda session: bool(session.outcomes or session.losses))


async def story(made: World, number: int, when: Literal["before", "after"]) -> bool:
    """Run a turn under a server that dies at this commit, then under others until it is over; whether one died."""
    mortal = MortalDatabase(made.file, dies_at=number, when=when)
    died = False
    async with serving(made, epoch=1, database=mortal) as server, asyncio.TaskGroup() as tasks:
        living = tasks.create_task(live(server))
        dying = tasks.create_task(mortal.died.wait())
        await asyncio.wait((living, dying), return_when=asyncio.FIRST_COMPLETED)
        died = mortal.died.is_set()
        dying.cancel()
        while not living.done():  # what it would do about its end, it cannot do any more
            living.cancel()
            await asyncio.sleep(0)
    for epoch in (2, 3):
        if await made.rows("SELECT 1 FROM turns WHERE state = 'ended'"):
            break
        # A droid that was lost before its turn began is replaced, as the session would.
        async with serving(made, epoch=epoch) as server:
            await live(server)
    return died


def essence(log: list[dict[str, Any]]) -> list[Any]:
    """The log without what timing decides: how text was cut into deltas, and the order inside `parallel`."""
    kept: list[Any] = []
    for event in log:
        if event["type"] == "delta":
            continue
        shown = {name: value for name, value in event.items() if name not in ("content", "entries", "turn")}
        kept.append(json.dumps(shown, sort_keys=True))
    first, last = next(i for i, line in enumerate(kept) if "call_2" in line), 0
    for index, line in enumerate(kept):
        if "call_2" in line or "call_3" in line:
            last = index
    return [*kept[:first], *sorted(kept[first : last + 1]), *kept[last + 1 :]]


async def baseline(folder: Path) -> list[Any]:
    folder.mkdir()
    async with world(folder) as made:
        assert not await story(made, 1_000_000, "after")
        return essence(await made.log())


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_server_that_dies_at_any_commit_of_a_turn_loses_and_doubles_nothing(
    tmp_path: Path, when: Literal["before", "after"]
) -> None:
    async with asyncio.timeout(100):
        wanted = await baseline(tmp_path / "baseline")
        assert len(wanted) == 19
        for number in range(1, 100):
            folder = tmp_path / str(number)
            folder.mkdir()
            async with world(folder) as made:
                died = await story(made, number, when)
                log = await made.log()
                assert essence(log) == wanted, (number, when)
                deltas = "".join(event["text"] for event in log if event["type"] == "delta")
                messages = "".join(event["text"] for event in log if event["type"] == "message")
                assert deltas == messages, (number, when)
                assert await made.rows("SELECT * FROM process_pieces") == []
            if not died:
                break
        assert number > 12
