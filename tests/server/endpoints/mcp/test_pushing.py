"""What follows a log by a standing stream: where each log's cursor stands."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from oubliette.server.endpoints.mcp.contract import Channel, StreamContext
from oubliette.server.endpoints.mcp.pushing import CURSORS_PER_STREAM, YOUNG_LOG, Desks, Standing, Standings
from oubliette.wire.events import Status
from tests.kit.exchange_rig import Rig, rig

STREAM = "mcp-1"


class Heard:
    """A channel that keeps what it is told."""

    is_open = True

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self._grown = asyncio.Event()

    def notify(self, method: str, params: Any) -> bool:
        self.events.append((params["data"]["session_id"], params["data"]["index"]))
        self._grown.set()
        return True

    def on_close(self, callback: Callable[[], None]) -> None:
        del callback

    async def drained(self) -> None:
        return

    async def until(self, event: tuple[str, int]) -> None:
        async with asyncio.timeout(10):
            while event not in self.events:
                self._grown.clear()
                await self._grown.wait()


class Open:
    """A standing stream of a legacy session that set nothing."""

    stream_id = STREAM
    log_level = None
    subscriptions = ()

    def __init__(self, channel: Heard) -> None:
        self.channel = cast("Channel", channel)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncGenerator[Rig]:
    async with rig(tmp_path) as made:
        yield made


async def say(world: Rig, session_id: str, status: str, count: int = 1) -> int:
    """Let a log grow; its last index."""
    events = [Status(status=status)] * count
    last = await world.database.write(lambda tx: world.events.append(tx, session_id, events, world.clock.now()))
    world.following.wake(session_id, last)
    return last


async def test_a_long_session_keeps_its_place_however_many_others_end_beside_it(world: Rig) -> None:
    heard = Heard()
    standings = Standings(world.events, world.following, world.carriers)
    stream = cast("StreamContext", Open(heard))
    standing = Standing(stream, standings, cast("Desks", world.exchange), lambda uri: None)
    serving = world.tasks.create_task(standing.serve())
    await world.settle()
    for name in ("long", "young"):
        await world.session(name)
        world.carriers.bind(name, STREAM)
    await heard.until(("long", await say(world, "long", "running", YOUNG_LOG + 8)))
    await heard.until(("young", await say(world, "young", "running", 3)))
    for number in range(CURSORS_PER_STREAM + 1):
        name = f"short-{number}"
        await world.session(name)
        world.carriers.bind(name, STREAM)
        await say(world, name, "completed")
    await heard.until((f"short-{CURSORS_PER_STREAM}", 0))
    heard.events.clear()
    for name in ("long", "young"):
        await heard.until((name, await say(world, name, "idle")))
    assert heard.events == [("long", YOUNG_LOG + 8), ("young", 3)], "nothing twice, nothing left out"
    assert len(standing._cursors) <= CURSORS_PER_STREAM
    serving.cancel()
