"""An exchange on a real database and a clock that the test moves; it can be killed and started again."""

import asyncio
import zlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec

from oubliette.server.caller_tools.carriers import Carriers
from oubliette.server.caller_tools.declaration import Declaration, OfferedTool, declare
from oubliette.server.caller_tools.exchange import Exchange
from oubliette.server.errors import OublietteError
from oubliette.server.events.following import Following
from oubliette.server.events.log import EventLog
from oubliette.server.storage.database import Database, Tx
from oubliette.server.storage.sqlite import SqliteDatabase
from oubliette.server.tokens.token import Actor, Scope
from oubliette.wire import relay
from oubliette.wire.events import CallerToolProgress
from tests.kit.clock import MovableClock
from tests.kit.suspending_database import SuspendingDatabase

SESSION = "gogol_20260101_000000_00000000"
OWNER = "prn_owner"
# Ticks of the loop after which whatever can happen without time passing has happened.
TICKS = 200


def database(kind: str, path: Path) -> Database:
    if kind == "suspending":
        return SuspendingDatabase(path, seed=zlib.crc32(path.parent.name.encode()))
    return SqliteDatabase(path, durability="power" if kind == "power" else "process")


def actor(principal: str = OWNER, scope: Scope = Scope.WRITE, **more: Any) -> Actor:
    return Actor(principal=principal, scope=scope, token_id=f"tok_{principal}", **more)


def tools(*names: str, **more: Any) -> Declaration:
    offered = [OfferedTool(name=name) for name in names or ("echo", "other")]
    return declare("ant", offered, timeout_max_s=600, **more)


class Heard:
    """A carrier, and a standing stream, that keeps what it was told."""

    def __init__(self, kind: str = "stream", *stream_ids: str) -> None:
        self.kind = kind
        self.is_here = True
        self.stream_ids = stream_ids
        self.told: list[dict[str, Any]] = []
        self.carries: list[str] = []
        self.leave: Callable[[], None] = lambda: None  # what attaching it gave
        self._queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def has_room(self, again: Callable[[], None]) -> bool:
        return True

    def announce(self, session_id: str, announcement: dict[str, Any]) -> None:
        self.told.append(announcement)
        self._queue.put_nowait(announcement)

    def bound(self, session_id: str) -> None:
        self.carries.append(session_id)

    def unbound(self, session_id: str) -> None:
        self.carries.remove(session_id)

    async def next(self) -> dict[str, Any]:
        async with asyncio.timeout(10):
            return await self._queue.get()

    def requests(self) -> list[str]:
        return [told["request_id"] for told in self.told if told["type"] == "caller_tool_request"]


class Spawned:
    """Stands for the server's task group: tasks that can be cut off together."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self.failures: list[BaseException] = []

    def create_task(self, coro: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coro)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, OublietteError):
            self.failures.append(error)

    async def cut(self) -> None:
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Rig:
    def __init__(self, store: Database, clock: MovableClock, **settings: Any) -> None:
        self.database = store
        self.clock = clock
        self.settings: dict[str, Any] = {"timeout_s": 60.0, "timeout_max_s": 600.0, **settings}
        self.grace_s: float = self.settings.pop("grace_s", 4.0)
        self.marks: list[str] = []
        self.mark: Callable[[str], None] = self.marks.append
        self.progress: list[relay.Progress] = []
        self.sessions: dict[str, tuple[str, Declaration | None]] = {}
        self._begin()

    def _begin(self) -> None:
        self.tasks = Spawned()
        self.events = EventLog(self.database)
        self.following = Following()
        self.carriers = Carriers(self.clock, grace_s=self.grace_s)
        self.exchange = Exchange(
            database=self.database,
            clock=self.clock,
            events=self.events,
            following=self.following,
            carriers=self.carriers,
            tasks=cast(asyncio.TaskGroup, self.tasks),
            mark=lambda name: self.mark(name),
            **self.settings,
        )

    # -- lives --------------------------------------------------------------------------------------------------

    async def kill(self) -> None:
        """End this life as kill -9 would: what is not in the database is gone."""
        self.clock.forget()
        await self.tasks.cut()

    async def start(self, *, restart_grace_s: float = 30.0) -> None:
        self._begin()
        for session_id, (root_id, declaration) in self.sessions.items():
            self.exchange.open_desk(session_id, root_id, OWNER, declaration)
        await self.exchange.load()
        self.carriers.promise_all(restart_grace_s)

    async def session(
        self, session_id: str = SESSION, *, root_id: str | None = None, declaration: Declaration | None = None
    ) -> None:
        root = root_id or session_id
        lent = declaration or tools()

        async def write(tx: Tx) -> None:
            await tx.run(
                "INSERT INTO sessions (id, project_id, workspace_id, owner, state, root_id, depth, settings,"
                " created_at, updated_at) VALUES (?, 'p', 'w', ?, 'running', ?, 0, '{}', 0, 0)",
                session_id,
                OWNER,
                root,
            )
            await self.events.begin(tx, session_id)

        await self.database.write(write)
        self.sessions[session_id] = (root, lent)
        self.exchange.open_desk(session_id, root, OWNER, lent)

    async def session_ended(self, session_id: str = SESSION) -> None:
        """Its row only: what the server does next is the test's."""
        now = self.clock.now()
        await self.database.write(
            lambda tx: tx.run("UPDATE sessions SET ended_at = ?, state = 'completed' WHERE id = ?", now, session_id)
        )
        self.sessions.pop(session_id, None)

    # -- what the two sides do ----------------------------------------------------------------------------------

    def call(
        self,
        key: str | None = "key",
        tool: str = "ant_echo",
        *,
        session_id: str = SESSION,
        instance: str | None = "one",
        **arguments: Any,
    ) -> asyncio.Task[bytes]:
        asked = relay.CallerTool(tool=tool, arguments=arguments, call_key=key)
        return self.tasks.create_task(
            self.exchange.call(session_id, asked, instance=instance, hear=self.progress.append)
        )

    async def answer(
        self,
        request_id: str,
        result: Any = None,
        *,
        error: str | None = None,
        session_id: str = SESSION,
        by: Actor | None = None,
    ) -> Any:
        raw = None if result is None else msgspec.json.encode(result)
        async with asyncio.timeout(10):
            return await self.exchange.answer(
                by or actor(), session_id, request_id, result=raw, error=error, door="mcp"
            )

    async def extend(self, request_id: str, seconds: float | None, **told: Any) -> float | None:
        event = CallerToolProgress(request_id=request_id, **told)
        return await self.exchange.progress(actor(), SESSION, request_id, event, extend_s=seconds, door="mcp")

    async def settle(self) -> None:
        """Let everything happen that needs no time."""
        quiet = 0
        while quiet < (TICKS if isinstance(self.database, SuspendingDatabase) else 12):
            await asyncio.sleep(0)
            busy = isinstance(self.database, SqliteDatabase) and (self.database._queue or self.database._writing)
            quiet = 0 if busy else quiet + 1

    async def pass_time(self, seconds: float) -> None:
        """Let time pass from alarm to alarm, with all that each brings about."""
        left = seconds
        while (next_in := self.clock.next_in()) is not None and next_in <= left:
            self.clock.pass_time(next_in)
            left -= next_in
            await self.settle()
        self.clock.pass_time(left)
        await self.settle()

    # -- what is left of it -------------------------------------------------------------------------------------

    async def rows(self, what: str = "request_id, call_key, state, outcome, redelivery") -> list[Any]:
        return await self.database.read(lambda tx: tx.all(f"SELECT {what} FROM calls ORDER BY created_at, rowid"))

    async def log(self, session_id: str = SESSION) -> list[dict[str, Any]]:
        return (await self.events.page(session_id, -1)).events

    async def audit(self) -> list[tuple[str, str, str | None]]:
        return await self.database.read(lambda tx: tx.all("SELECT operation, outcome, target FROM audit ORDER BY id"))


@asynccontextmanager
async def rig(path: Path, kind: str = "process", **settings: Any) -> AsyncGenerator[Rig]:
    store = database(kind, path / "oubliette.db")
    made = Rig(store, MovableClock(), **settings)
    try:
        yield made
        assert made.tasks.failures == []
    finally:
        await made.kill()
        await store.close()
