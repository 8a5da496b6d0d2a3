"""All open streams of one server: who has which, and what keeps them honest.

Once a second every stream is looked at: a quiet one gets a heartbeat, a quiet client is asked whether it lives, a
stuck one is broken off, and one whose key or session is no longer good is ended. So is a request that waits, with a
stream or without.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from oubliette.server.endpoints.mcp import frames
from oubliette.server.endpoints.mcp.context import OpenStream
from oubliette.server.endpoints.mcp.contract import SERVER_ERROR, Served
from oubliette.server.endpoints.mcp.exchange import Exchange
from oubliette.server.endpoints.mcp.sessions import McpSession, McpSessions
from oubliette.server.endpoints.mcp.stream import Stream
from oubliette.server.tokens.token import Actor
from oubliette.wire.jsonrpc import Id

logger = logging.getLogger(__name__)

TOUCH_EVERY_LOOKS: Final = 60
SESSIONS_AT_ONCE: Final = 500
_UNAUTHENTICATED: Final = {"kind": "unauthenticated", "retryable": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    look_every_s: float = 1.0
    heartbeat_after_s: float = 15.0
    ping_after_s: float = 30.0
    ping_wait_s: float = 10.0
    cut_wait_s: float = 5.0  # how long a client that is cut may take for its last frame
    stuck_s: float = 30.0  # how long any write may stand still


class Streams:
    def __init__(
        self,
        served: Served,
        sessions: McpSessions,
        *,
        running: AbstractSet[Exchange],
        per_principal: int,
        patience: Patience | None = None,
    ) -> None:
        self._patience = patience or Patience()
        self._served = served
        self._sessions = sessions
        self._running = running  # every request that is not answered yet, with a stream or without
        self._per_principal = per_principal
        self._requests: dict[Exchange, Stream] = {}
        self._standing: dict[str, OpenStream] = {}
        self._count: Counter[str] = Counter()
        self._pings = 0
        self._looks = 0

    # Who is there.

    def is_full(self, principal: str, session_id: str | None) -> bool:
        """Whether this principal may open no further stream; replacing its session's own always works."""
        return session_id not in self._standing and self._count[principal] >= self._per_principal

    def add_request(self, exchange: Exchange, stream: Stream) -> None:
        self._requests[exchange] = stream
        self._count[exchange.actor.principal] += 1

    def remove_request(self, exchange: Exchange) -> None:
        if self._requests.pop(exchange, None) is not None:
            self._forget(exchange.actor)

    def add_session(self, opened: OpenStream) -> None:
        """Register a session's standing stream: the newest wins, the older one is ended."""
        older = self._standing.get(opened.stream_id)
        self._standing[opened.stream_id] = opened
        self._count[opened.actor.principal] += 1
        if older is not None:
            older.channel.end()

    def remove_session(self, opened: OpenStream) -> None:
        self._forget(opened.actor)
        if self._standing.get(opened.stream_id) is opened:
            del self._standing[opened.stream_id]

    def session_changed(self, session: McpSession) -> None:
        opened = self._standing.get(session.id)
        if opened is not None and opened.changed(session):
            self._served.stream_changed(opened)

    async def session_ended(self, session_id: str) -> None:
        opened = self._standing.get(session_id)
        if opened is not None:
            opened.channel.end()
        await self._served.session_ended(session_id)

    def answered(self, session_id: str, request_id: Id) -> bool:
        """Take an answer to a ping; False where nothing here asked."""
        opened = self._standing.get(session_id)
        if opened is None or opened.ping_id != request_id:
            return False
        opened.ping_id = None
        opened.channel.spoke_at = asyncio.get_running_loop().time()
        return True

    def close(self) -> None:
        for opened in list(self._standing.values()):
            opened.channel.end()
        for stream in list(self._requests.values()):
            stream.end()

    def _forget(self, actor: Actor) -> None:
        self._count[actor.principal] -= 1
        if self._count[actor.principal] <= 0:
            del self._count[actor.principal]

    # What keeps them honest.

    async def keep(self) -> None:
        while True:
            await asyncio.sleep(self._patience.look_every_s)
            try:
                await self.look()
            except Exception:
                # A look that fails is tried again in a second; nothing else must suffer from it.
                logger.exception("looking after streams failed")

    async def look(self) -> None:
        now = asyncio.get_running_loop().time()
        for stream in self._all():
            self._care(stream, now)
        await self._check_keys()
        await self._check_sessions(now)
        self._looks += 1
        if self._looks % TOUCH_EVERY_LOOKS == 0:
            touched_at = await self._sessions.touch(list(self._standing))
            for opened in self._standing.values():
                opened.seen_before = touched_at  # that was us, and no answer to a ping
            for session_id in await self._sessions.purge():
                await self.session_ended(session_id)

    def _all(self) -> list[Stream]:
        return [*self._requests.values(), *(opened.channel for opened in self._standing.values())]

    async def _check_keys(self) -> None:
        """End what belongs to a key that was revoked or expired."""
        actors = {*(exchange.actor for exchange in self._running), *(each.actor for each in self._standing.values())}
        asked = list(actors)
        if not asked:
            return
        valid = await self._served.still_valid(asked)
        gone = {actor for actor, good in zip(asked, valid, strict=True) if not good}
        if not gone:
            return
        for opened in list(self._standing.values()):
            if opened.actor in gone:
                opened.channel.end()
        for exchange in list(self._running):
            if exchange.actor in gone:
                exchange.cancel(SERVER_ERROR, "the key was revoked or has expired", _UNAUTHENTICATED)

    async def _check_sessions(self, now: float) -> None:
        """End streams whose session another server ended; ask quiet clients whether they live."""
        ids = list(self._standing)
        for start in range(0, len(ids), SESSIONS_AT_ONCE):
            part = ids[start : start + SESSIONS_AT_ONCE]
            alive = await self._sessions.alive(part)
            for session_id in part:
                opened = self._standing.get(session_id)
                if opened is None:
                    continue
                session = alive.get(session_id)
                if session is None:
                    opened.channel.end()
                    continue
                if opened.changed(session):
                    self._served.stream_changed(opened)
                self._ping(opened, session, now)

    def _ping(self, opened: OpenStream, session: McpSession, now: float) -> None:
        stream = opened.channel
        if opened.ping_id is None:
            if now - stream.spoke_at >= self._patience.ping_after_s:
                self._pings += 1
                opened.ping_id = f"ping-{self._pings}"
                opened.pinged_at, opened.seen_before = now, session.seen_at
                stream.push(frames.event(frames.request(opened.ping_id, "ping")))
        elif session.seen_at > opened.seen_before:
            opened.ping_id = None  # it answered to another server
        elif now - opened.pinged_at >= self._patience.ping_wait_s:
            logger.info("a client left its ping unanswered: its stream is closed")
            stream.abort()

    def _care(self, stream: Stream, now: float) -> None:
        patience = self._patience
        if stream.cut_at is not None and now - stream.cut_at >= patience.cut_wait_s:
            stream.abort()
        elif stream.sending_since is not None and now - stream.sending_since >= patience.stuck_s:
            if stream.is_open:
                stream.cut("the stream was read too slowly: it stood still")
            else:
                stream.abort()  # it has ended, and its last frames are not taken
        elif now - stream.written_at >= patience.heartbeat_after_s:
            stream.heartbeat()
