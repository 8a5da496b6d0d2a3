"""The server dies at every commit of a turn, before or after it happened, and the next one goes on.

The keeper and the droid live through it. However the server died, the log is what it would have been without: no
event is missing and none is there twice.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from oubliette.server.droids.acp import AcpDroid
from oubliette.server.droids.dialogue import Patience
from oubliette.server.droids.driver import LaunchProfile
from oubliette.server.errors import DroidFailed
from oubliette.server.storage.sqlite import SqliteDatabase
from tests.kit import acp_agent, leaks
from tests.kit.droid_world import BOX, Server, World, serving, world
from tests.kit.mortal_database import MortalDatabase

When = Literal["before", "after"]
STEPS = [
    {"say": "a first word"},
    {"tool": "ant_echo", "args": {"n": 1}},
    {"parallel": [{"tool": "ant_meet", "args": {"n": 2}}, {"tool": "ant_meet", "args": {"n": 2}}]},
    {"say": "the answer was $last"},
    {"tool": "ant_fails"},
    {"say": "last: $last"},
]
PLAN = f"<<plan {json.dumps(STEPS)}>>"


async def live(server: Server, text: str = PLAN) -> None:
    """What a session does with its droid, from wherever the world is, to the end of its turn."""
    droid: AcpDroid | None = await server.resume()
    if droid is None:
        droid = await server.start()
    await server.begin(1, text)
    if not droid.has_turn(1):
        await droid.prompt(1, text)
    await server.session.until(lambda session: bool(session.outcomes or session.losses))


async def story(made: World, lives: Sequence[tuple[int, When]], text: str = PLAN) -> int:
    """A turn under servers that die at these commits, each in its turn, and then one that lives; how many died."""
    for epoch in range(1, len(lives) + 6):
        number, when = lives[epoch - 1] if epoch <= len(lives) else (1_000_000, "after")
        mortal = MortalDatabase(made.file, dies_at=number, when=when)
        async with serving(made, epoch=epoch, database=mortal) as server, asyncio.TaskGroup() as tasks:
            living = tasks.create_task(live(server, text))
            dying = tasks.create_task(mortal.died.wait())
            await asyncio.wait((living, dying), return_when=asyncio.FIRST_COMPLETED)
            dying.cancel()
            while not living.done():  # what it would do about its end, it cannot do any more
                living.cancel()
                await asyncio.sleep(0)
        # A droid that was lost before its turn began is replaced by the next server, as the session would.
        if await made.rows("SELECT 1 FROM turns WHERE state = 'ended'"):
            return epoch - (not mortal.died.is_set())
    raise AssertionError("the turn never ended")


def essence(log: list[dict[str, Any]]) -> list[Any]:
    """The log without what timing decides: how text was cut into deltas, and the order inside `parallel`."""
    kept: list[Any] = []
    for event in log:
        if event["type"] == "delta":
            continue
        shown = {name: value for name, value in event.items() if name not in ("content", "entries", "turn")}
        kept.append(json.dumps(shown, sort_keys=True))
    inside = [index for index, line in enumerate(kept) if "call_2" in line or "call_3" in line]
    first, last = inside[0], inside[-1]
    return [*kept[:first], *sorted(kept[first : last + 1]), *kept[last + 1 :]]


async def check(made: World, wanted: list[Any], told: object) -> None:
    log = await made.log()
    assert essence(log) == wanted, told
    deltas = "".join(event["text"] for event in log if event["type"] == "delta")
    messages = "".join(event["text"] for event in log if event["type"] == "message")
    assert deltas == messages, told
    assert await made.rows("SELECT * FROM process_pieces") == []


async def baseline(folder: Path) -> list[Any]:
    folder.mkdir()
    async with world(folder) as made:
        assert await story(made, ()) == 0
        wanted = essence(await made.log())
        assert len(wanted) == 19
        return wanted


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_server_that_dies_at_any_commit_of_a_turn_loses_and_doubles_nothing(tmp_path: Path, when: When) -> None:
    async with asyncio.timeout(100):
        wanted = await baseline(tmp_path / "baseline")
        for number in range(1, 100):
            folder = tmp_path / str(number)
            folder.mkdir()
            async with world(folder) as made:
                deaths = await story(made, [(number, when)])
                await check(made, wanted, (number, when))
            if deaths == 0:
                assert number > 12
                return
        raise AssertionError("it dies for ever")


@pytest.mark.parametrize("life", [2, 3, 5])
async def test_servers_that_live_for_a_few_commits_each_finish_a_turn_together(tmp_path: Path, life: int) -> None:
    async with asyncio.timeout(100):
        wanted = await baseline(tmp_path / "baseline")
        async with world(tmp_path) as made:
            deaths = await story(made, [(life, "after" if number % 2 else "before") for number in range(60)])
            assert deaths > 1
            await check(made, wanted, life)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_frames_that_are_cut_anywhere_and_overlap_change_nothing(tmp_path: Path, when: When) -> None:
    async with asyncio.timeout(100):
        wanted = await baseline(tmp_path / "baseline")
        for number in (4, 6, 8, 10):
            folder = tmp_path / str(number)
            folder.mkdir()
            async with world(folder) as made:
                made.keeper.chunk, made.keeper.overlap = 61, 17
                await story(made, [(number, when)])
                await check(made, wanted, (number, when))


async def test_a_line_in_pieces_survives_a_server_that_dies_between_them(tmp_path: Path) -> None:
    library = LaunchProfile(name="bad", argv=(sys.executable, "-I", "-S", acp_agent.__file__, ""))
    answer = {"act": "answer", "result": {"stopReason": "end_turn"}}
    text = json.dumps([{"act": "long-say", "n": 2_500_000}, {"act": "long", "n": 16_000_000}, answer])
    async with asyncio.timeout(100):
        for number in (5, 8, 12, 40, 50, 60):
            folder = tmp_path / str(number)
            folder.mkdir()
            async with world(folder, library) as made:
                await story(made, [(number, "after"), (2, "before"), (3, "after")], text)
                log = [event for event in await made.log() if event["type"] != "delta"]
                assert [event["type"] for event in log] == ["warning", "message", "completion"], number
                assert log[0]["kind"] == "line_too_long"
                assert log[1]["text"] == "y" * 2_500_000
                assert await made.rows("SELECT * FROM process_pieces") == []


async def test_a_key_that_was_not_delivered_is_asked_for_again_and_never_guessed(tmp_path: Path) -> None:
    """Dies when `session/new`, which carries the key, is written and before the keeper took it."""
    key = "oub_" + "12" * 32
    async with asyncio.timeout(30), world(tmp_path) as made:
        mortal = MortalDatabase(made.file)
        async with serving(made, epoch=1, database=mortal) as server, asyncio.TaskGroup() as tasks:
            made.keeper.takes_input = False
            starting = tasks.create_task(server.start(key))
            await until_written(made, "initialize")
            mortal.dies_at = mortal.commits + 2  # one says that `initialize` was taken, one is `session/new`
            made.keeper.takes_input = True
            made.keeper.takes_at_most = 1
            await mortal.died.wait()
            while not starting.done():
                starting.cancel()
                await asyncio.sleep(0)
        assert key.encode() not in made.file.read_bytes()
        made.keeper.takes_at_most = None
        async with serving(made, epoch=2) as server:
            assert await server.resume() is None
            assert made.keeper.running == [] or await gone(made)
            assert (await server.turn(await server.start(key), PLAN)).stop_reason == "end_turn"


async def test_a_key_of_before_a_restart_is_not_logged_after_it(tmp_path: Path) -> None:
    key = "oub_" + "34" * 32
    tell = '<<plan [{"tool": "ant_environment"}, {"say": "$last"}]>>'
    async with asyncio.timeout(30), world(tmp_path) as made:
        async with serving(made, epoch=1) as server:
            await server.turn(await server.start(key), PLAN)
        async with serving(made, epoch=2) as server:
            droid = await server.resume()
            assert droid is not None
            outcome = await server.turn(droid, tell, 2)
            assert json.loads(outcome.text)["OUBLIETTE_API_KEY"] == "[redacted]"
            assert leaks.in_files({"key": key}, [tmp_path]) == []
        assert leaks.in_files({"key": key}, [tmp_path]) == []


async def test_a_cancelled_turn_is_still_cancelled_by_the_next_server(tmp_path: Path) -> None:
    library = LaunchProfile(name="bad", argv=(sys.executable, "-I", "-S", acp_agent.__file__, "ignores-cancel"))
    async with asyncio.timeout(30), world(tmp_path, library, Patience(cancel_s=0.3)) as made:
        async with serving(made, epoch=1) as server:
            droid = await server.start()
            await server.begin(1, "")
            await droid.prompt(1, "[]")
            await droid.cancel()
        async with serving(made, epoch=2) as server:
            assert await server.resume() is not None
            outcome = await server.session.over()
            assert (outcome.stop_reason, outcome.error_kind) == ("cancelled", "turn_stuck")


async def test_a_turn_that_was_silent_before_a_restart_is_watched_after_it(tmp_path: Path) -> None:
    library = LaunchProfile(name="bad", argv=(sys.executable, "-I", "-S", acp_agent.__file__, ""))
    async with asyncio.timeout(30), world(tmp_path, library, Patience(silence_s=0.5)) as made:
        async with serving(made, epoch=1) as server:
            droid = await server.start()
            await server.begin(1, "")
            await droid.prompt(1, "[]")
        async with serving(made, epoch=2) as server:
            assert await server.resume() is not None
            assert (await server.session.over()).error_kind == "turn_silent"


async def test_the_time_of_a_turn_goes_on_while_the_server_is_away(tmp_path: Path) -> None:
    library = LaunchProfile(name="bad", argv=(sys.executable, "-I", "-S", acp_agent.__file__, ""))
    async with asyncio.timeout(30), world(tmp_path, library) as made:
        async with serving(made, epoch=1) as server:
            droid = await server.start()
            await server.begin(1, "")
            await droid.prompt(1, "[]")
        made.clock.jump(14_400)
        async with serving(made, epoch=2) as server:
            assert await server.resume() is not None
            assert (await server.session.over()).error_kind == "turn_too_long"


async def test_a_keeper_that_is_away_for_a_while_costs_nothing(tmp_path: Path) -> None:
    async with asyncio.timeout(30):
        wanted = await baseline(tmp_path / "baseline")
        async with world(tmp_path) as made, serving(made) as server:
            droid = await server.start()
            await server.begin(1, PLAN)
            made.keeper.disconnect()
            await droid.prompt(1, PLAN)
            for _ in range(5):
                made.keeper.connect(server.processes)
                made.keeper.disconnect()
            made.keeper.connect(server.processes)
            await server.session.over()
            await check(made, wanted, "away")


async def test_a_droid_whose_box_was_ended_is_let_go_without_a_word(tmp_path: Path) -> None:
    async with asyncio.timeout(30), world(tmp_path) as made, serving(made) as server:
        droid = await server.start()
        await server.database.write(lambda tx: tx.run("UPDATE processes SET state = 'ended', ended_at = 1"))
        assert list(server.processes.acks(BOX))
        made.keeper.disconnect()
        while server.processes.acks(BOX):
            await asyncio.sleep(0.01)
        assert server.session.losses == []
        with pytest.raises(DroidFailed, match="has ended"):
            await droid.prompt(1, PLAN)
        await droid.stop()


async def test_a_process_that_no_row_asks_for_is_killed_when_its_keeper_comes(tmp_path: Path) -> None:
    async with asyncio.timeout(30), world(tmp_path) as made:
        async with serving(made, epoch=1) as server:
            await server.start()
            await server.database.write(lambda tx: tx.run("UPDATE processes SET state = 'ended', ended_at = 1"))
        async with serving(made, epoch=2) as server:
            assert await server.resume() is None
            assert await gone(made)


async def test_a_storage_that_suspends_at_every_call_changes_nothing(tmp_path: Path) -> None:
    async with asyncio.timeout(30):
        wanted = await baseline(tmp_path / "baseline")
        async with world(tmp_path) as made:
            database = MortalDatabase(made.file, suspends=True)
            async with serving(made, database=database) as server:
                await live(server)
            await check(made, wanted, "suspends")


async def test_a_turn_survives_power_cuts_where_that_is_asked_for(tmp_path: Path) -> None:
    """Units run in a thread then, and may touch nothing that the loop has."""
    async with asyncio.timeout(30):
        wanted = await baseline(tmp_path / "baseline")
        async with world(tmp_path) as made:
            async with serving(made, database=SqliteDatabase(made.file, durability="power")) as server:
                await live(server)
            await check(made, wanted, "power")


async def test_a_server_whose_process_was_taken_over_lets_go_of_it(tmp_path: Path) -> None:
    async with asyncio.timeout(30), world(tmp_path) as made, serving(made, epoch=1) as first:
        droid = await first.start()
        async with serving(made, epoch=2) as second:
            taken = await second.resume()
            assert taken is not None
            assert (await second.turn(taken, PLAN)).stop_reason == "end_turn"
            with pytest.raises(DroidFailed, match="taken over"):
                await droid.prompt(2, PLAN)
            assert first.session.losses == []
            assert (await second.turn(taken, PLAN, 2)).stop_reason == "end_turn"


async def until_written(made: World, method: str) -> None:
    while not any(method.encode() in data for (data,) in await made.rows("SELECT data FROM process_input")):
        await asyncio.sleep(0.01)


async def gone(made: World) -> bool:
    while made.keeper.running:
        await asyncio.sleep(0.01)
    return True
