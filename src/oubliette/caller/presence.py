"""Being reachable: the server's stream, held open and taken up again, or polls where no stream can be held."""

import asyncio
from collections.abc import Callable, Iterable

import msgspec

from oubliette.caller import messages
from oubliette.caller.crew import Crew
from oubliette.caller.endpoint import Endpoint, NoStream
from oubliette.caller.errors import CallerError, Forbidden, NotFound, Unauthenticated
from oubliette.caller.patience import Patience
from oubliette.caller.sse import Frames
from oubliette.caller.stream import StreamLost

OPEN_S = 5.0
# A stream that lasted for so long is held. One that dies younger may be cut again and again by what it is sent.
HELD_S = 5.0
FAILURES_BEFORE_POLLING = 3
POLL_WAIT_S = 25.0


class Presence:
    def __init__(
        self,
        endpoint: Endpoint,
        crew: Crew,
        *,
        announced: Callable[[messages.Announced], None],
        pinged: Callable[[int | str], None],
        failed: Callable[[CallerError], None],
        sessions: Callable[[], Iterable[str]],
        open_requests: Callable[[], list[str]],
    ) -> None:
        self._endpoint = endpoint
        endpoint.on_pushed = self._pushed
        self._crew = crew
        self._announced = announced
        self._pinged = pinged
        self._failed = failed
        self._sessions = sessions
        self._open_requests = open_requests
        self._pollers: dict[str, asyncio.Task[None]] = {}
        self._frames = Frames()
        self._is_held = False
        self._holding: asyncio.TimerHandle | None = None  # from the stream's first bytes on
        self._loop = asyncio.get_running_loop()
        self._settled = asyncio.Event()
        self.polling = False

    async def settle(self) -> None:
        """Wait until requests can reach us, one way or the other."""
        try:
            async with asyncio.timeout(OPEN_S):
                await self._settled.wait()
        except TimeoutError:
            self._start_polling()

    async def keep(self) -> None:
        """Hold the stream for as long as this task lives, and poll while it cannot be held."""
        patience, failures = Patience(), 0
        while True:
            self._frames, self._is_held = Frames(), False
            try:
                await self._endpoint.stream(self._received)
            except NoStream:
                failures = FAILURES_BEFORE_POLLING
            except Unauthenticated as failure:
                self._failed(failure)
                self._settled.set()
                return
            except (StreamLost, OSError, TimeoutError, CallerError):
                pass
            finally:
                self._let_go()
            if self._is_held:
                patience.reset()
                failures = 0
            failures += 1
            if failures >= FAILURES_BEFORE_POLLING:
                self._start_polling()
            # Not the seconds that the stream's `retry` asks for: the server counts how long its caller is away,
            # and a droid waits.
            await asyncio.sleep(patience.next_s())

    def add(self, session_id: str) -> None:
        """Another session is ours: be reachable for it as well."""
        poller = self._pollers.get(session_id)
        if self.polling and (poller is None or poller.done()):
            self._pollers[session_id] = self._crew.start(self._poll(session_id), "poll")

    def remove(self, session_id: str) -> None:
        """A session is over: the server says so to its poll as well, which ends."""
        self._pollers.pop(session_id, None)

    def _received(self, chunk: bytes) -> None:
        if self._holding is None:
            # Bytes, not the head of the response: a proxy that gathers before it passes on sends the head alone.
            self._holding = self._loop.call_later(HELD_S, self._held)
            self._settled.set()
        for data in self._frames.feed(chunk):
            self._pushed(data)

    def _held(self) -> None:
        self._is_held = True
        self._stop_polling()

    def _let_go(self) -> None:
        if self._holding is not None:
            self._holding.cancel()
            self._holding = None

    def _pushed(self, data: bytes) -> None:
        try:
            pushed = messages.decode_pushed(data)
            if pushed.method == "notifications/message" and pushed.params is not None:
                raw = pushed.params.data
                if raw is not msgspec.UNSET:
                    self._announced(messages.decode_announced(raw))
            elif pushed.method == "ping" and pushed.id is not None:
                self._pinged(pushed.id)
        except msgspec.DecodeError:
            pass  # not for us: a log notification may carry anything

    def _start_polling(self) -> None:
        self.polling = True
        self._settled.set()
        for session_id in self._sessions():
            self.add(session_id)

    def _stop_polling(self) -> None:
        """Let every poll that is under way be the last: its answer may hold what is told nowhere else."""
        self.polling = False

    async def _poll(self, session_id: str) -> None:
        """Fetch requests of a session's tree for as long as it lives and is ours."""
        patience = Patience()
        while self.polling:
            # All that are open, of whichever session: a poll gives those of the children as well.
            known = self._open_requests()
            arguments = {"session_id": session_id, "known": known, "wait_seconds": POLL_WAIT_S}
            try:
                page = await self._endpoint.call("caller_tool_poll", arguments, wait_s=POLL_WAIT_S)
            except (NotFound, Forbidden):
                return
            except Unauthenticated as failure:
                self._failed(failure)
                return
            except CallerError:
                await asyncio.sleep(patience.next_s())
                continue
            requests = [messages.decode_announced(msgspec.json.encode(one)) for one in page.get("requests", [])]
            open_before = frozenset(self._open_requests())
            for request in requests:
                self._announced(request)
            if requests and all(request.request_id in open_before for request in requests):
                await asyncio.sleep(patience.next_s())  # nothing but what we have: asking at once would go in circles
            else:
                patience.reset()
