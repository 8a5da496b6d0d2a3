"""A request as what is served sees it."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from oubliette.server.endpoints.mcp.contract import SEVERITY, Channel
from oubliette.server.endpoints.mcp.exchange import Exchange
from oubliette.server.endpoints.mcp.posted import Posted
from oubliette.server.endpoints.mcp.sessions import McpSession
from oubliette.server.endpoints.mcp.stream import Stream
from oubliette.server.endpoints.mcp.versions import MODERN, Era
from oubliette.server.tokens.token import Actor
from oubliette.wire.jsonrpc import Id

LEGACY_LEVEL = "info"  # what a legacy session gets that never set a level


class RequestContext:
    __slots__ = ("_exchange", "_posted", "actor", "era", "log_level", "session")

    def __init__(self, actor: Actor, posted: Posted, exchange: Exchange, session: McpSession | None) -> None:
        self.actor = actor
        self.session = session
        self.era = Era.MODERN if session is None else Era.LEGACY
        self._posted = posted
        self._exchange = exchange
        level = posted.meta.level if session is None else session.log_level
        self.log_level: str | None = level if isinstance(level, str) else None

    @property
    def version(self) -> str:
        return MODERN if self.session is None else self.session.version

    @property
    def stream_id(self) -> str | None:
        return None if self.session is None else self.session.id

    @property
    def request_id(self) -> Id:
        return self._exchange.request_id

    @property
    def capabilities(self) -> Mapping[str, Any]:
        if self.session is not None:
            return self.session.capabilities
        return cast("dict[str, Any]", self._posted.meta.capabilities)

    @property
    def meta(self) -> Mapping[str, Any]:
        raw = self._posted.params.meta
        return {} if raw is msgspec.UNSET else msgspec.json.decode(raw) or {}

    @property
    def params(self) -> Mapping[str, Any]:
        raw = self._posted.raw_params
        return {} if raw is None else msgspec.json.decode(raw)

    @property
    def exchange(self) -> Exchange:
        return self._exchange

    @property
    def channel(self) -> Channel:
        return self._exchange.stream()

    def abandon(self) -> None:
        self._exchange.abandon()

    def wants(self, level: str) -> bool:
        least = self.log_level
        if least is None:
            if self.session is None:
                return False
            least = LEGACY_LEVEL
        return SEVERITY[level] >= SEVERITY[least]

    def notify(self, method: str, params: object) -> bool:
        return self._exchange.stream().notify(method, params)

    def log(self, level: str, data: object, logger: str | None = None) -> bool:
        if not self.wants(level):
            return False
        params = {"level": level, "data": data}
        return self.notify("notifications/message", params if logger is None else {**params, "logger": logger})

    def progress(self, progress: float, total: float | None = None, message: str | None = None) -> bool:
        token = self._posted.progress_token
        if token is None:
            return False
        params: dict[str, Any] = {"progressToken": token, "progress": progress}
        if total is not None:
            params["total"] = total
        if message is not None:
            params["message"] = message
        return self.notify("notifications/progress", params)


class OpenStream:
    """A legacy session's standing stream."""

    __slots__ = ("_session", "actor", "channel", "ping_id", "pinged_at", "seen_before")

    def __init__(self, actor: Actor, session: McpSession, stream: Stream) -> None:
        self.actor = actor
        self._session = session
        self.channel = stream
        self.ping_id: str | None = None
        self.pinged_at = 0.0
        self.seen_before = 0.0  # the session's last use when it was pinged

    @property
    def stream_id(self) -> str:
        return self._session.id

    @property
    def log_level(self) -> str | None:
        return self._session.log_level

    @property
    def subscriptions(self) -> Sequence[str]:
        return self._session.subscriptions

    def changed(self, session: McpSession) -> bool:
        """Take over what the session says now; tell whether that is another thing than before."""
        before, self._session = self._session, session
        return (before.log_level, before.subscriptions) != (session.log_level, session.subscriptions)
