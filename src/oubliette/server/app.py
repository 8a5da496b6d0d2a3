"""The composition root: builds every room, joins their contracts, and owns every task.

Only this module knows which database, runtime and driver run. The order of a start is the order of trust: settings,
lock, database, what was open before, and only then the doors.
"""

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version

from oubliette.server import ids, logs
from oubliette.server.caller_tools import calls
from oubliette.server.caller_tools.carriers import Carriers
from oubliette.server.caller_tools.exchange import Exchange
from oubliette.server.clock import SystemClock
from oubliette.server.config import Settings
from oubliette.server.containers.bubblewrap import BubblewrapRuntime
from oubliette.server.containers.folders import Folders
from oubliette.server.containers.process import ProcessRuntime
from oubliette.server.containers.runtime import Runtime
from oubliette.server.droids.acp import AcpDroids, Patience
from oubliette.server.droids.driver import LaunchProfile
from oubliette.server.droids.processes import Processes
from oubliette.server.droids.profiles import builtin
from oubliette.server.endpoints.boxed import Boxed, Times
from oubliette.server.endpoints.http import HttpServer, Routes, listening_socket
from oubliette.server.endpoints.local import local_door
from oubliette.server.endpoints.mcp.headers import Doors
from oubliette.server.endpoints.mcp.product import Product
from oubliette.server.endpoints.mcp.sessions import McpSessions
from oubliette.server.endpoints.mcp.strangers import Strangers
from oubliette.server.endpoints.mcp.transport import McpEndpoint
from oubliette.server.endpoints.relay import Relay
from oubliette.server.errors import NotConfigured, OublietteError, StorageFailed
from oubliette.server.events.following import Following
from oubliette.server.events.log import EventLog
from oubliette.server.home import Home, locked
from oubliette.server.limits import BULK_ROWS
from oubliette.server.marks import Mark, unmarked
from oubliette.server.operations.gate import Gate
from oubliette.server.operations.once import Once
from oubliette.server.operations.operation import Asked, Rooms
from oubliette.server.projects import projects
from oubliette.server.projects.premises import Premises
from oubliette.server.sessions.boxes import Boxes
from oubliette.server.sessions.keys import SessionKeys
from oubliette.server.sessions.messages import Bounds, Messages
from oubliette.server.sessions.session import Rooms as SessionRooms
from oubliette.server.sessions.sessions import Sessions
from oubliette.server.storage.database import Database, Tx
from oubliette.server.storage.sqlite import SqliteDatabase
from oubliette.server.tasks import Tasks
from oubliette.server.tokens import tokens
from oubliette.server.tokens.token import Actor, Scope
from oubliette.server.tokens.tokens import Tokens

logger = logging.getLogger(__name__)

SWEEP_EVERY_S = 60.0
GC_AFTER = 50_000
FIRST_TOKEN = "first-admin"  # noqa: S105 - its name, not its secret
# Who runs the command line on this machine, as this user: the kernel vouches for it, no token does.
LOCAL = Actor(principal="local", scope=Scope.ADMIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What a server that has started tells: where it is, and the first token if it made one."""

    url: str
    first_token: str | None

    def __repr__(self) -> str:
        return f"Ready(url={self.url!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    id: str
    epoch: int


class _Stopping(Exception):
    """Ends the app's task group: everything it owns is cancelled."""


async def serve(settings: Settings, *, ready: Callable[[Ready], None] | None = None, mark: Mark = unmarked) -> None:
    """Run a server until SIGTERM or SIGINT. Boxes and their droids stay, and are taken up by the next one."""
    logs.install(settings.log_level)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    async with running(settings, mark=mark) as started:
        # What was made so far lives as long as the server: the collector need not look at it again and again.
        gc.freeze()
        gc.set_threshold(GC_AFTER, 50, 100)
        if ready is not None:
            ready(started)
        await stop.wait()


@asynccontextmanager
async def running(settings: Settings, *, mark: Mark = unmarked) -> AsyncGenerator[Ready]:
    """A server from its first commit to its last, for whoever owns the event loop."""
    home = Home(settings.home)
    home.make()
    async with locked(home):
        database = SqliteDatabase(home.database, durability=settings.durability)
        try:
            try:
                async with Tasks() as tasks:
                    async with _doors(settings, home, database, tasks, mark) as started:
                        yield started
                    raise _Stopping
            except _Stopping:
                pass
        finally:
            await database.close()


async def locally(settings: Settings, operation: str, params: bytes) -> object:
    """Do one operation in this process, opening no door and taking up nothing. The home's lock is the caller's."""
    database = SqliteDatabase(Home(settings.home).database, durability=settings.durability)
    try:
        async with Tasks() as tasks:
            app = App(settings, Home(settings.home), database, tasks, unmarked, await installation(database))
            return await app.ask_locally(operation, params)
    finally:
        await database.close()


@asynccontextmanager
async def _doors(settings: Settings, home: Home, database: Database, tasks: Tasks, mark: Mark) -> AsyncGenerator[Ready]:
    # The address first: a start that cannot listen must not have shown, or lost, a first token.
    listener = _listen(settings)
    app = App(settings, home, database, tasks, mark, await installation(database))
    first_token = await app.start()
    async with McpEndpoint(
        app.product, app.mcp_sessions, doors=Doors([settings.host, *settings.allowed_hosts], settings.allowed_origins)
    ) as mcp:
        http = HttpServer(Routes(mcp, app.why_not_ready), listener)
        serving = tasks.create_task(http.serve(), name="http")
        try:
            async with local_door(home.admin_socket, app.ask_locally):
                host, port = http.address
                shown = f"[{host}]" if ":" in host else host
                yield Ready(url=f"http://{shown}:{port}/mcp", first_token=first_token)
        finally:
            # Streams and long polls end first: the HTTP server waits for what is open.
            mcp.close()
            http.stop()
            await asyncio.wait((serving,))
            await app.close()


def _listen(settings: Settings) -> socket.socket:
    try:
        return listening_socket(settings.host, settings.port)
    except OSError as error:
        raise NotConfigured(
            f"cannot listen on {settings.host}:{settings.port} ({error.strerror}): stop what is there, or choose"
            " another port with --port"
        ) from None


async def installation(database: Database) -> Installation:
    """Who we are, and for which time we start."""
    fresh = ids.new_key()[:16]

    async def write(tx: Tx) -> Installation:
        row = await tx.one("UPDATE installation SET epoch = epoch + 1 RETURNING id, epoch")
        if row is None:
            await tx.run("INSERT INTO installation (id, epoch) VALUES (?, 1)", fresh)
            return Installation(id=fresh, epoch=1)
        return Installation(id=row[0], epoch=row[1])

    return await database.write(write)


class App:
    """Every room, built and joined."""

    def __init__(
        self,
        settings: Settings,
        home: Home,
        database: Database,
        tasks: Tasks,
        mark: Mark,
        identity: Installation,
    ) -> None:
        self._settings = settings
        self._folders = Folders(home.path)
        self._clearing = asyncio.Lock()
        self._database = database
        self._tasks = tasks
        self._clock = clock = SystemClock()
        self._runtime = runtime = _runtime(settings)
        self._carriers = carriers = Carriers(clock, grace_s=settings.disconnect_grace_s)
        self.tokens = keys = Tokens(database, clock)
        events = EventLog(database, events_kept=settings.events_kept, bytes_kept=settings.event_bytes_kept)
        following = Following()
        exchange = Exchange(
            database=database,
            clock=clock,
            events=events,
            following=following,
            carriers=carriers,
            tasks=tasks,
            timeout_s=settings.caller_tool_timeout_s,
            timeout_max_s=settings.caller_tool_timeout_max_s,
            mark=mark,
        )
        processes = Processes(database, clock, tasks)
        boxes = Boxes(
            database=database,
            clock=clock,
            runtime=runtime,
            installation=identity.id,
            tasks=tasks,
            abandoned_after_s=settings.box_abandoned_after_s,
            accept=lambda box_id: self._relay.accept(box_id),
        )
        brought: dict[str, str] = {}
        stands = SessionRooms(
            database=database,
            clock=clock,
            events=events,
            following=following,
            exchange=exchange,
            boxes=boxes,
            droids=AcpDroids(
                processes,
                append=events.append,
                after=following.wake,
                epoch=identity.epoch,
                profile=self._profile,
                patience=Patience(silence_s=settings.turn_silence_s, turn_max_s=settings.turn_max_s),
            ),
            keys=SessionKeys(database, clock, brought),
            idle_after_s=settings.idle_after_s,
        )
        self.sessions = sessions = Sessions(stands, tasks=tasks, brought=brought)
        premises = Premises(database, tasks, self._vacate)
        messages = Messages(
            stands,
            sessions,
            tasks=tasks,
            premises=premises,
            bounds=Bounds(
                sessions=settings.sessions_max,
                sessions_per_project=settings.sessions_per_project,
                max_depth=settings.max_depth,
                max_descendants=settings.max_children,
            ),
        )
        self._boxes = boxes
        rooms = Rooms(
            database=database,
            clock=clock,
            tokens=keys,
            events=events,
            following=following,
            exchange=exchange,
            sessions=sessions,
            messages=messages,
            timeout_max_s=settings.caller_tool_timeout_max_s,
            premises=premises,
        )
        self.gate = Gate(rooms)
        self._boxed = Boxed(
            rooms=rooms,
            gate=self.gate,
            boxes=boxes,
            keepers=processes,
            once=Once(database, clock, mark),
            times=Times(
                timeout_s=settings.caller_tool_timeout_s,
                timeout_max_s=settings.caller_tool_timeout_max_s,
                client_grace_s=settings.client_grace_s,
                abandoned_after_s=settings.box_abandoned_after_s,
            ),
            tasks=tasks,
            mark=mark,
            never_refreshes=lambda autonomy: self._profile(autonomy).list_changed == "none",
        )
        self._relay = Relay(self._boxed, tasks)
        sessions.declared = self._relay.redeclared
        self._strangers = Strangers(database, clock, tasks)
        self.product = Product(rooms, self.gate, carriers, self._strangers, version=version("oubliette"))
        self.mcp_sessions = McpSessions(database, clock)

    async def start(self) -> str | None:
        """Take up what was open, and make the first token if nobody could come in otherwise: its secret."""
        await self._vacate_strays()
        restarted = await self.sessions.take_up()
        if restarted:
            self._carriers.promise_all(self._settings.restart_grace_s)
            self._boxed.expect_clients(restarted)
        self._tasks.create_task(self._sweep(), name="sweep")
        now = self._clock.now()

        async def write(tx: Tx) -> str | None:
            if await tokens.has_admin(tx, now):
                return None
            taken = await tokens.find_name(tx, FIRST_TOKEN, now) is not None
            name = f"{FIRST_TOKEN}-{round(now)}" if taken else FIRST_TOKEN
            return (await tokens.issue(tx, name=name, scope=Scope.ADMIN, now=now)).secret

        return await self._database.write(write)

    async def close(self) -> None:
        """Close the doors to the boxes and leave the boxes running."""
        await self._strangers.close()
        await self._runtime.close()
        self._relay.close()

    async def why_not_ready(self) -> str | None:
        try:
            await self._runtime.check()
        except OublietteError as reason:
            return reason.message
        return None

    async def ask_locally(self, operation: str, params: bytes) -> object:
        return await self.gate.call(Asked(actor=LOCAL, door="local"), operation, params)

    def _profile(self, autonomy: str) -> LaunchProfile:
        return builtin.profile(commands=self._runtime.isolated or self._settings.unsafe_no_sandbox, autonomy=autonomy)

    async def _vacate(self, project_id: str, workspace_id: str | None) -> None:
        await asyncio.to_thread(self._folders.set_aside, project_id, workspace_id)
        self._tasks.create_task(self._clear())

    async def _clear(self) -> None:
        async with self._clearing:  # it may take long, and threads are few
            await asyncio.to_thread(self._folders.clear)

    async def _vacate_strays(self) -> None:
        """Take out of the way what a server that died had deleted, while nobody can make a workspace there."""
        kept = set(await self._database.read(projects.every_workspace))
        alive = {project_id for project_id, _ in kept}  # each has one at least
        for project_id, workspace_id in await asyncio.to_thread(self._folders.workspaces):
            if (project_id, workspace_id) not in kept:
                stray = workspace_id if project_id in alive else None
                await asyncio.to_thread(self._folders.set_aside, project_id, stray)

    async def _sweep(self) -> None:
        """End what nobody keeps, at once and now and then; forget what is kept no longer."""
        # First the trial box of a fresh start, which is nobody's, so that it is not taken for an orphan.
        await self.why_not_ready()
        await self._clear()
        while True:
            try:
                await self._sweep_once()
            except StorageFailed as failure:
                logger.warning("a sweep was cut short", extra={"reason": failure.message})
            await asyncio.sleep(SWEEP_EVERY_S)

    async def _sweep_once(self) -> None:
        await self._boxes.reap()
        before = self._clock.now() - self._settings.outcomes_kept_s
        for forget in (calls.forget, tokens.forget_derived):
            while await self._database.write(lambda tx, forget=forget: forget(tx, before, BULK_ROWS)):
                pass


def _runtime(settings: Settings) -> Runtime:
    return ProcessRuntime(settings.home) if settings.runtime == "process" else BubblewrapRuntime(settings.home)
