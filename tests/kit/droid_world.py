"""One session and its droid, from a database file up: what `sessions/` does with a driver, in a few lines.

A `World` is the file, the box's keeper and the workspace; a `Server` is the Python state of one life of the server
on top of them. Servers come and go; the world stays.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from oubliette.inside import droid
from oubliette.server.droids.acp import AcpDroid, AcpDroids
from oubliette.server.droids.dialogue import Patience
from oubliette.server.droids.driver import LaunchProfile, Outcome
from oubliette.server.droids.processes import Processes
from oubliette.server.events.log import PLACES, EventLog
from oubliette.server.storage.database import Database, Tx
from oubliette.server.storage.sqlite import SqliteDatabase
from oubliette.wire.events import Completion, Error, Event
from tests.kit import tools_server
from tests.kit.clock import MovableClock
from tests.kit.keeper_link import FakeKeeper, keeping

SESSION = "gogol_20261118_000000_00000001"
BOX = "box_1"
SETUP = (
    "INSERT INTO sessions"
    " (id, project_id, workspace_id, owner, state, root_id, depth, settings, created_at, updated_at)"
    " VALUES (?, 'p', 'w', 'o', 'running', ?, 0, '{}', 0, 0)"
)


async def _begun(tx: Tx) -> None:
    """The one session of this world; its log is the first."""
    await tx.run(SETUP, SESSION, SESSION)
    await EventLog.begin(tx, SESSION)


@dataclass(frozen=True)
class Places:
    python: str
    program: str
    socket: str
    workspace: str
    home: str


@dataclass(frozen=True)
class Box:
    id: str
    places: Places


def built_in(*more: str, mode: str = "auto") -> LaunchProfile:
    """The real built-in droid, from its source file."""
    return LaunchProfile(
        name="builtin", argv=("{python}", "-I", "-S", droid.__file__, *more), mode=mode, resume="resume"
    )


class RecordingSession:
    """Implements what a droid needs of its session, with the turn as a row and every call on record."""

    def __init__(self, autonomy: str = "high") -> None:
        self.id = SESSION
        self.autonomy = autonomy
        self.tools = ""
        self.outcomes: list[tuple[int, Outcome]] = []
        self.losses: list[str] = []
        self.changed = asyncio.Event()

    async def turn_ended(self, tx: Tx, turn: int, outcome: Outcome) -> Sequence[Event]:
        moved = await tx.run(
            "UPDATE turns SET state = 'ended', stop_reason = ?, text = ?, error = ?"
            " WHERE session_id = ? AND number = ? AND state = 'running'",
            outcome.stop_reason,
            outcome.text,
            outcome.error,
            self.id,
            turn,
        )
        if moved != 1:
            return ()
        done = Completion(turn=turn, stop_reason=outcome.stop_reason, text=outcome.text, duration_ms=0)
        if outcome.error is None:
            return (done,)
        return (Error(kind=outcome.error_kind or "", message=outcome.error, turn=turn), done)

    def turn_is_over(self, turn: int, outcome: Outcome) -> None:
        self.outcomes.append((turn, outcome))
        self.changed.set()

    def droid_ended(self, reason: str) -> None:
        self.losses.append(reason)
        self.changed.set()

    async def until(self, is_so: Callable[["RecordingSession"], bool]) -> None:
        while not is_so(self):
            self.changed.clear()
            await self.changed.wait()

    async def over(self, turn: int = 1) -> Outcome:
        """The outcome of this turn."""
        await self.until(lambda session: any(number == turn for number, _ in session.outcomes))
        return next(outcome for number, outcome in self.outcomes if number == turn)


@dataclass
class World:
    folder: Path
    keeper: FakeKeeper
    box: Box
    profile: LaunchProfile
    patience: Patience = field(default_factory=Patience)
    clock: MovableClock = field(default_factory=MovableClock)

    @property
    def file(self) -> Path:
        return self.folder / "database"

    async def log(self) -> list[dict[str, Any]]:
        """Every event of the session, read by a database connection of its own."""
        database = SqliteDatabase(self.file)
        rows = await database.read(lambda tx: tx.all("SELECT place - ?, body FROM events ORDER BY place", PLACES))
        await database.close()
        assert [index for index, _ in rows] == list(range(len(rows)))
        return [msgspec.json.decode(body) for _, body in rows]

    async def rows(self, sql: str, *values: Any) -> list[Any]:
        database = SqliteDatabase(self.file)
        rows = await database.read(lambda tx: tx.all(sql, *values))
        await database.close()
        return rows


class Server:
    """One life of the server."""

    def __init__(self, world: World, database: Database, tasks: asyncio.TaskGroup, epoch: int) -> None:
        self.world = world
        self.database = database
        self.processes = Processes(database, world.clock, tasks)
        self.session = RecordingSession()
        self.woken: list[int] = []
        self.droids = AcpDroids(
            self.processes,
            append=EventLog(database).append,
            after=lambda _, last: self.woken.append(last),
            epoch=epoch,
            profile=lambda _: world.profile,
            patience=world.patience,
        )

    async def start(self, api_key: str | None = None) -> AcpDroid:
        return await self.droids.start(self.session, self.world.box, api_key=api_key)

    async def resume(self) -> AcpDroid | None:
        return await self.droids.resume(self.session, self.world.box)

    async def begin(self, number: int, text: str) -> None:
        """The turn's row, as the session would have it; once."""

        async def write(tx: Tx) -> None:
            await tx.run(
                "INSERT INTO turns (session_id, number, prompt, state, created_at) VALUES (?, ?, ?, 'running', 0)"
                " ON CONFLICT DO NOTHING",
                SESSION,
                number,
                text,
            )

        await self.database.write(write)

    async def turn(self, droid: AcpDroid, text: str, number: int = 1) -> Outcome:
        """One turn from its prompt to its end."""
        await self.begin(number, text)
        await droid.prompt(number, text)
        return await self.session.over(number)


@asynccontextmanager
async def world(
    folder: Path, profile: LaunchProfile | None = None, patience: Patience | None = None
) -> AsyncGenerator[World]:
    home = folder / "home"
    home.mkdir()
    # The droid's MCP server is the kit's, under the name of the packed client.
    places = Places(sys.executable, tools_server.__file__, str(folder / "relay.sock"), str(folder), str(home))
    async with keeping(BOX) as keeper:
        made = World(folder, keeper, Box(BOX, places), profile or built_in(), patience or Patience())
        database = SqliteDatabase(made.file)
        await database.write(_begun)
        await database.close()
        yield made


@asynccontextmanager
async def serving(world: World, *, epoch: int = 1, database: Database | None = None) -> AsyncGenerator[Server]:
    """A server that ends as a killed one does: its tasks stop where they are."""
    own = database or SqliteDatabase(world.file)
    try:
        async with asyncio.TaskGroup() as tasks:
            server = Server(world, own, tasks, epoch)
            world.keeper.connect(server.processes)
            try:
                yield server
            finally:
                world.keeper.disconnect()
                for task in asyncio.all_tasks():
                    if task in tasks._tasks:
                        task.cancel()
    finally:
        await own.close()
