"""The whole server in this process, without its HTTP door: operations are asked through the gate."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from oubliette.server.app import LOCAL, App, installation
from oubliette.server.config import load
from oubliette.server.home import Home
from oubliette.server.operations.operation import Asked
from oubliette.server.storage.database import Database
from oubliette.server.storage.sqlite import SqliteDatabase
from oubliette.server.tasks import Tasks
from oubliette.server.tokens.token import Actor, Scope
from tests.kit.suspending_database import SuspendingDatabase


class _Done(Exception):
    """Ends the app's task group."""


class World:
    """A running app and short ways to ask it."""

    def __init__(self, app: App, database: Database) -> None:
        self.app = app
        self.database = database
        self.leaves_sessions = False  # with their boxes, as a server that stops does

    async def ask(self, operation: str, *, actor: Actor = LOCAL, door: str = "local", **params: Any) -> Any:
        """The result as JSON; raises what the gate or the operation raises."""
        result = await self.app.gate.call(Asked(actor=actor, door=door), operation, params)
        return msgspec.json.decode(msgspec.json.encode(result))

    async def project(self, name: str = "p", **params: Any) -> str:
        return (await self.ask("project_create", name=name, **params))["id"]

    async def caller(self, name: str, scope: Scope = Scope.WRITE) -> Actor:
        """Somebody with a token of their own."""
        made = await self.ask("token_create", name=name, scope=scope.value)
        return await self.app.tokens.verify(made["token"])

    async def run(self, project_id: str, plan: str, **params: Any) -> Any:
        """Give a plan to the project's session and wait for its end."""
        return await self.ask(
            "session_message", project_id=project_id, message=f"<<plan {plan}>>", wait_seconds=20, **params
        )

    async def events(self, session_id: str) -> list[dict[str, Any]]:
        """The whole log of a session."""
        return (await self.ask("session_events", session_id=session_id, max_events=500))["events"]

    async def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        return await self.database.read(lambda tx: tx.all(sql, *values))


@asynccontextmanager
async def world(
    home: Path, *, suspends: bool = False, over: Callable[[Database], Database] | None = None, **flags: Any
) -> AsyncGenerator[World]:
    """An app on this home; leaving it ends its sessions and their boxes.

    With `suspends`, on a database that waits at every statement and tries every unit twice; what is put `over` it is
    what the app has.
    """
    settings = load("", {}, {"home": str(home), **flags})
    place = Home(settings.home)
    place.make()
    database: Database
    if suspends:
        database = SuspendingDatabase(place.database)
    else:
        database = SqliteDatabase(place.database, durability=settings.durability)
    if over is not None:
        database = over(database)
    try:
        async with Tasks() as tasks:
            app = App(settings, place, database, tasks, lambda name: None, await installation(database))
            await app.start()
            here = World(app, database)
            try:
                yield here
            finally:
                left = "SELECT id FROM sessions WHERE ended_at IS NULL"
                for (session_id,) in [] if here.leaves_sessions else await here.rows(left):
                    await app.sessions.end(LOCAL, "local", session_id)
                await app.close()
            raise _Done
    except* _Done:
        pass
    finally:
        await database.close()
