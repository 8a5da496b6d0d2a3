"""The caller: lends functions to droids, starts sessions, and answers what their droids ask.

    async with Caller(url, token, caller_id="ant") as caller:

        @caller.tool
        def send_response(message: str) -> str:
            "Send a message to the person."
            return "sent"

        session = await caller.start("my-project", "Say hello with your tools.")
        print((await session.result()).text)

A request of a droid arrives on the server's stream, is run once, and its answer is sent until the server took it;
blips, restarts of the server and repeated requests change nothing of that.
"""

import asyncio
import math
import ssl
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar, overload

import aiohttp
import msgspec

from oubliette.caller import messages
from oubliette.caller.crew import Crew
from oubliette.caller.endpoint import Endpoint
from oubliette.caller.errands import Errands, current
from oubliette.caller.errors import CallerError, NotFound, Unauthenticated
from oubliette.caller.http1 import Response
from oubliette.caller.lane import Address, Lanes
from oubliette.caller.outbox import Outbox
from oubliette.caller.presence import Presence
from oubliette.caller.reports import Reports
from oubliette.caller.session import Session
from oubliette.caller.tool import Tool, tool_of

F = TypeVar("F", bound=Callable[..., Any])
LANES = 16
LANE_SHARE = 32  # of open requests that one connection carries before another is used, where that is faster
DRAIN_S = 5.0


class Caller:
    """An async context manager; the module's own text tells its idea."""

    def __init__(
        self,
        url: str,
        token: str,
        caller_id: str = "caller",
        *,
        parallel_max: int = 64,
        patience_s: float = 60.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.caller_id = caller_id
        self._address = Address.of(url)
        self._url, self._token, self._tls = url, token, tls
        self._parallel_max = parallel_max
        self._patience_s = patience_s
        self._tools: dict[str, Tool] = {}
        self._declaration = 0  # counts the changes of what is lent
        self._sessions: dict[str, Session] = {}
        self._failure: CallerError | None = None
        self._errands: Errands | None = None
        self._renewal: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._crew = Crew()
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._tls or True, limit=0), cookie_jar=aiohttp.DummyCookieJar()
        )
        self._endpoint = Endpoint(self._http, self._url, self._token, self._patience_s, self._tls)
        self._endpoint.on_renewed = self._renewed
        self._lanes = Lanes(LANES, self._address, self._tls, self._endpoint.lane_headers)
        self._outbox = Outbox(self._lanes, self._endpoint.next_id, self._forgotten, self._failed)
        errands = Errands(self._tools, self._crew, self._parallel_max, self._outbox.give, self._fetch_arguments)
        self._errands = errands
        self._outbox.replaced = errands.replaced
        self._reports = Reports(self._lanes, self._crew, self._endpoint.next_id)
        self._presence = Presence(
            self._endpoint,
            self._crew,
            announced=lambda announced: _take(errands, announced),
            pinged=self._pinged,
            failed=self._failed,
            sessions=lambda: list(self._sessions),
            open_requests=errands.open_requests,
        )
        try:
            await self._endpoint.open()
            self._lanes.share = LANE_SHARE if self._endpoint.is_parallel else 1
            self._lanes.keep(self._crew)
            self._crew.start(self._presence.keep(), "stream")
            await self._presence.settle()
            if self._failure is not None:
                raise self._failure
        except BaseException:
            await self._leave(drain_s=0)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave(drain_s=DRAIN_S if kind is None and self._failure is None else 0)

    @overload
    def tool(self, function: F, /) -> F: ...

    @overload
    def tool(
        self,
        /,
        *,
        name: str | None = None,
        description: str | None = None,
        timeout_s: float | None = None,
        threaded: bool = False,
    ) -> Callable[[F], F]: ...

    def tool(self, function: Any = None, /, **options: Any) -> Any:
        """Lend a function to the droids of sessions that start, or are sent a message, from now on.

        A plain function runs on the loop, which is the fastest way there is and right for what does not wait; one
        that waits is async, or `threaded`. What it raises reaches the droid as an error with the exception's
        message; what it returns, as JSON.
        """

        def lend(function: F) -> F:
            tool = tool_of(function, **options)
            self._tools[tool.name] = tool
            self._declaration += 1
            if self._errands is not None:
                self._loop.call_soon_threadsafe(self._errands.lent)
            return function

        return lend if function is None else lend(function)

    def withdraw(self, name: str) -> None:
        """Lend a tool no more, to sessions that start or are sent a message from now on."""
        del self._tools[name]
        self._declaration += 1

    async def start(self, project: str, message: str, *, wait_seconds: float = 0, **options: Any) -> Session:
        """Send the first message to a project, by id or name, and lend it this caller's tools.

        With `wait_seconds` the turn may end first, or not. `options` are other parameters of `session_message`.
        Raises `CallerError` by its kind.
        """
        if not 0 <= wait_seconds < math.inf:
            raise ValueError(f"wait_seconds is a number of seconds, not {wait_seconds}")
        session = Session(self)
        await session.open({"project_id": await self.project_id(project), "message": message} | options)
        # Not as long as the message waits: until its answer we know of no session, to poll for or to come back to.
        await session.wait(wait_seconds)
        return session

    async def attach(self, session_id: str) -> Session:
        """Take up a session again that this token started, its open requests included.

        Lend first what its droid may call. Requests that come while nothing was lent yet wait for that; once
        something is, one for a tool that is not among it is answered with an error.
        """
        session = Session(self, session_id)
        await session.take_up()
        self.adopt(session)
        return session

    async def call(self, operation: str, *, answer_in_s: float | None = None, **arguments: Any) -> dict[str, Any]:
        """Call any operation of the server. Raises `CallerError` by its kind.

        `answer_in_s` is how long the operation itself may wait before it answers; without it, its `wait_seconds`.
        """
        if self._failure is not None:
            raise self._failure
        if answer_in_s is None:
            wait = arguments.get("wait_seconds")
            answer_in_s = float(wait) if isinstance(wait, int | float) else 0.0  # what is no number the server refuses
        return await self._endpoint.call(operation, arguments, wait_s=answer_in_s)

    def progress(
        self,
        progress: float | None = None,
        total: float | None = None,
        message: str | None = None,
        *,
        extend_s: float | None = None,
    ) -> None:
        """Tell the droid how far the tool is that calls this; `extend_s` from now on it may take, up to a bound.

        Outside a tool this does nothing. From a threaded tool it is safe as well.
        """
        errand = current.get()
        if errand is not None:
            told = {"progress": progress, "total": total, "message": message, "extend_seconds": extend_s}
            self._loop.call_soon_threadsafe(self._reports.send, errand, told)

    async def project_id(self, project: str) -> str:
        """The id of a project given by id or by its exact name. Raises `NotFound`."""
        try:
            return str(uuid.UUID(project))
        except ValueError:
            pass
        page = await self.call("project_list", name_contains=project)
        found = [one for one in page["projects"] if one["name"] == project]
        if len(found) != 1:
            raise NotFound(f"{len(found)} projects are named {project!r}; give the id of one that exists")
        return found[0]["id"]

    @property
    def declaration(self) -> int:
        """Which state of the lent tools is now: a session that knows another is told with its next message."""
        return self._declaration

    def lent(self) -> dict[str, Any]:
        """What is lent, as the context of a message declares it."""
        return {
            "caller_id": self.caller_id,
            "caller_tools": [tool.declaration() for tool in self._tools.values()],
        }

    def adopt(self, session: Session) -> None:
        """Be reachable for this session's droid, unless it has none any more."""
        if not session.is_over:
            self._sessions[session.id] = session
            self._presence.add(session.id)

    def let_go(self, session_id: str) -> None:
        """This session is over: nothing of it need be kept."""
        self._sessions.pop(session_id, None)
        self._presence.remove(session_id)

    def _pinged(self, ping_id: int | str) -> None:
        self._lanes.post(messages.pong(ping_id), _not_looked_at)

    async def _fetch_arguments(self, asked: messages.Announced) -> msgspec.Raw:
        page = await self.call("caller_tool_pending", session_id=asked.session_id, request_id=asked.request_id)
        if not page["requests"]:
            raise NotFound("the call ended before its arguments could be fetched")
        return msgspec.Raw(msgspec.json.encode(page["requests"][0]["arguments"]))

    def _forgotten(self) -> None:
        if self._renewal is None or self._renewal.done():
            self._renewal = self._crew.start(self._renew(self._endpoint.session_id), "renew")

    async def _renew(self, stale: str | None) -> None:
        try:
            await self._endpoint.renew(stale)
        except Unauthenticated as failure:
            self._failed(failure)
        except CallerError:
            pass  # the next answer that is refused tries again

    async def _renewed(self) -> None:
        """Another MCP session: let it be the way to our sessions."""
        self._lanes.share = LANE_SHARE if self._endpoint.is_parallel else 1
        self._lanes.drop()
        for session in list(self._sessions.values()):
            try:
                await session.meet()
            except NotFound:
                self.let_go(session.id)
            except CallerError:
                pass  # whoever follows the session meets it again

    def _failed(self, failure: CallerError) -> None:
        """Nothing will work any more: every later call says so."""
        self._failure = failure

    async def _leave(self, drain_s: float) -> None:
        """End everything. To be cancelled meanwhile is to give no more answers, and to end no less."""
        ending = self._loop.create_task(self._end(drain_s), name="leave")
        cancelled: asyncio.CancelledError | None = None
        while not ending.done():
            try:
                await asyncio.wait([ending])
            except asyncio.CancelledError as failure:
                cancelled = failure
                self._outbox.shut()
        if cancelled is not None:
            raise cancelled
        ending.result()

    async def _end(self, drain_s: float) -> None:
        errands, self._errands = self._errands, None
        try:
            await self._outbox.close(drain_s)
            if errands is not None:
                errands.close()
            await self._crew.dismiss()
        finally:
            self._lanes.drop()
            await self._endpoint.close()
            await self._http.close()


def _take(errands: Errands, announced: messages.Announced) -> None:
    if announced.type == "caller_tool_request":
        errands.asked(announced)
    elif announced.type == "caller_tool_cancelled":
        errands.withdrawn(announced.request_id)


def _not_looked_at(response: Response | None) -> None:
    """A pong is worth one try."""
