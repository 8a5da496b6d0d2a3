"""MCP over Streamable HTTP: one ASGI callable for both eras.

A request passes the door (`Host`, `Origin`, methods, sizes), then its bearer is asked for, then its body is read and
its era told. From there legacy and modern share one table of methods; they differ in what a request must carry, in
how errors are dressed, and in what a client's leaving means.
"""

import logging
from collections import Counter
from collections.abc import Callable, MutableMapping
from types import TracebackType
from typing import Any, Final, Self, cast

import msgspec

from oubliette.server.endpoints.mcp import frames, posted
from oubliette.server.endpoints.mcp.browsers import PREFLIGHT, shared_with
from oubliette.server.endpoints.mcp.context import OpenStream, RequestContext
from oubliette.server.endpoints.mcp.contract import (
    HEADER_MISMATCH,
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    LEGACY_RESOURCE_NOT_FOUND,
    METHOD_NOT_FOUND,
    MISSING_CAPABILITY,
    PARSE_ERROR,
    SERVER_ERROR,
    SESSION_NOT_FOUND,
    UNSUPPORTED_VERSION,
    Freshness,
    ResourceNotFound,
    RpcError,
    Served,
    ToolResult,
)
from oubliette.server.endpoints.mcp.door import Door
from oubliette.server.endpoints.mcp.exchange import Answer, Exchange, Receive, Young, send_empty, send_json, until_gone
from oubliette.server.endpoints.mcp.headers import Doors, Headers, accepts, mirror_problem, read
from oubliette.server.endpoints.mcp.methods import Methods, arguments_of, decoded
from oubliette.server.endpoints.mcp.posted import SERVER_KEY, Params, Posted, Refused
from oubliette.server.endpoints.mcp.sessions import McpSession, McpSessions
from oubliette.server.endpoints.mcp.stream import HEADERS, Send, Stream
from oubliette.server.endpoints.mcp.streams import Patience, Streams
from oubliette.server.endpoints.mcp.versions import MODERN, Era, negotiated
from oubliette.server.errors import OublietteError, TooMany
from oubliette.server.limits import HTTP_BODY_BYTES, STREAMS_PER_PRINCIPAL
from oubliette.server.tasks import Tasks
from oubliette.server.tokens.token import Actor
from oubliette.wire.jsonrpc import Id

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]

# Requests of one principal that run at the same time; long polls and watches are among them.
REQUESTS_PER_PRINCIPAL: Final = 1024
_STOPPING: Final = "the server is stopping: try again"
# What a program reads of it: whoever may repeat the request does so.
_UNAVAILABLE: Final = {"kind": "unavailable", "retryable": True}

# How a JSON-RPC error is dressed for a modern client; what is not here is 200.
_STATUS: Final = {
    PARSE_ERROR: 400,
    INVALID_REQUEST: 400,
    INVALID_PARAMS: 400,
    HEADER_MISMATCH: 400,
    MISSING_CAPABILITY: 400,
    UNSUPPORTED_VERSION: 400,
    METHOD_NOT_FOUND: 404,
}
_CACHEABLE: Final = frozenset(
    {
        "server/discover",
        "tools/list",
        "prompts/list",
        "resources/list",
        "resources/templates/list",
        "resources/read",
    }
)
_ALLOW: Final = {Era.LEGACY: (b"allow", b"GET, POST, DELETE"), Era.MODERN: (b"allow", b"POST")}
_RETRY_SOON: Final = (b"retry-after", b"1")


class McpEndpoint:
    """Serve `/mcp`. Enter it before the first request; leaving it ends every stream and every running request."""

    def __init__(
        self,
        served: Served,
        sessions: McpSessions,
        *,
        doors: Doors | None = None,
        body_bytes: int = HTTP_BODY_BYTES,
        streams_per_principal: int = STREAMS_PER_PRINCIPAL,
        patience: Patience | None = None,
    ) -> None:
        self._served = served
        self._sessions = sessions
        self._door = Door(served, doors or Doors(), body_bytes)
        self._tasks = Tasks()
        self._running: set[Exchange] = set()
        self._streams = Streams(
            served, sessions, running=self._running, per_principal=streams_per_principal, patience=patience
        )
        self._cancellable: dict[tuple[str, Id], Exchange] = {}
        self._load: Counter[str] = Counter()
        self._stopping = False
        self._methods = Methods(served, sessions, self._streams).of
        server_info = b'"_meta":{%b:%b}' % (frames.encode(SERVER_KEY), frames.encode(served.info))
        self._complete = (b'"resultType":"complete"', server_info)

    async def __aenter__(self) -> Self:
        self._young = Young()
        await self._tasks.__aenter__()
        self._ticking = self._tasks.create_task(self._streams.keep())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self._ticking.cancel()
        await self._tasks.__aexit__(kind, error, trace)

    def close(self) -> None:
        """End streams and requests, and take no new ones: before the HTTP server waits for its connections."""
        self._stopping = True
        self._streams.close()
        for exchange in list(self._running):
            exchange.cancel(SERVER_ERROR, _STOPPING, _UNAVAILABLE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = read(tuple(scope["headers"]))
        if headers.origin is not None and self._door.admits_origin(headers.origin):
            send = shared_with(headers.origin, send)
        try:
            await self._serve(headers, scope, receive, send)
        except Refused as refused:
            body = frames.failure(refused.request_id, refused.code, refused.message, refused.data)
            await send_json(send, refused.status, body, refused.headers)
        except OublietteError as error:
            await send_json(send, 503, frames.failure(None, SERVER_ERROR, error.message), (_RETRY_SOON,))

    async def _serve(self, headers: Headers, scope: Scope, receive: Receive, send: Send) -> None:
        self._check_running()
        self._door.check(headers)
        method: str = scope["method"]
        if method == "POST":
            actor = await self._door.actor(headers)
            await self._post(actor, headers, scope, receive, send)
        elif posted.claimed(headers) == MODERN:
            raise Refused(405, INVALID_REQUEST, f"{MODERN} knows only POST here", headers=(_ALLOW[Era.MODERN],))
        elif method in ("GET", "DELETE"):
            actor = await self._door.actor(headers)
            posted.check_bodiless(headers)
            if method == "GET":
                await self._get(actor, headers, scope, receive, send)
            else:
                await self._delete(await self._session(actor, headers), send)
        elif method == "OPTIONS" and headers.origin is not None:
            await send_empty(send, 204, PREFLIGHT)
        else:
            raise Refused(405, INVALID_REQUEST, f"no {method} here", headers=(_ALLOW[Era.LEGACY],))

    def _check_running(self) -> None:
        if self._stopping:
            raise Refused(503, SERVER_ERROR, _STOPPING, _UNAVAILABLE, headers=(_RETRY_SOON,))

    async def _session(self, actor: Actor, headers: Headers) -> McpSession:
        if headers.session is None:
            raise Refused(400, INVALID_REQUEST, "mcp-session-id is missing: begin with `initialize`")
        session = await self._sessions.find(headers.session.decode("latin-1"), actor.principal)
        if session is None:
            raise Refused(404, SESSION_NOT_FOUND, "session not found: begin again with `initialize`")
        return session

    # POST.

    async def _post(self, actor: Actor, headers: Headers, scope: Scope, receive: Receive, send: Send) -> None:
        json, events = accepts(headers.accept)
        if not (json and events):
            raise Refused(406, INVALID_REQUEST, "accept must allow application/json and text/event-stream")
        message = posted.read(await self._door.body(headers, receive))
        if posted.era(message, headers) is Era.MODERN:
            if not message.is_request:
                await send_empty(send, 202)  # this era has none that a server could act on
                return
            posted.check_modern(message, headers)
            session = None
        elif message.method == "initialize" and message.is_request:
            await self._initialize(actor, message, send)
            return
        else:
            session = await self._session(actor, headers)
            if not message.is_request:
                await self._told(session, message)
                await send_empty(send, 202)
                return
        if self._load[actor.principal] >= REQUESTS_PER_PRINCIPAL:
            raise Refused(
                503, SERVER_ERROR, f"{REQUESTS_PER_PRINCIPAL} requests of this key are running", None, message.id
            )
        await self._exchange(actor, session, message, headers, scope, receive, send)

    async def _exchange(
        self,
        actor: Actor,
        session: McpSession | None,
        message: Posted,
        headers: Headers,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        assert message.id is not None
        exchange = Exchange(
            actor=actor,
            request_id=message.id,
            receive=receive,
            send=send,
            tasks=self._tasks,
            abort=_abort(scope),
            opened=self._streams.add_request,
            leaving_cancels=session is None,
        )
        context = RequestContext(actor, message, exchange, session)
        key = None if session is None else (session.id, message.id)
        self._load[actor.principal] += 1
        self._running.add(exchange)
        self._young.add(exchange)
        if key is not None:
            self._cancellable[key] = exchange
        try:
            await exchange.run(self._answer(context, message, headers))
        finally:
            self._running.discard(exchange)
            self._young.discard(exchange)
            self._streams.remove_request(exchange)
            if key is not None and self._cancellable.get(key) is exchange:
                del self._cancellable[key]
            self._load[actor.principal] -= 1
            if not self._load[actor.principal]:
                del self._load[actor.principal]

    async def _answer(self, context: RequestContext, message: Posted, headers: Headers) -> Answer:
        """Run the method; whatever it raises becomes an answer here, once."""
        method = cast("str", message.method)
        request_id = cast("Id", message.id)
        modern = context.era is Era.MODERN
        try:
            call = self._methods[context.era].get(method)
            if call is None:
                raise RpcError(METHOD_NOT_FOUND, f"no method {method[:100]!r}")
            if method == "tools/call" and modern:
                self._check_mirrors(message.params, headers)
            value = await call(context, message.params)
            encoded = frames.encode(value)
            if modern:
                encoded = self._dressed(method, value, encoded)
            return 200, frames.result(request_id, encoded)
        except RpcError as error:
            code = error.code
            if isinstance(error, ResourceNotFound) and not modern:
                code = LEGACY_RESOURCE_NOT_FOUND
            status = _STATUS.get(code, 200) if modern else 200
            return status, frames.failure(request_id, code, error.message, error.data)
        except OublietteError as error:
            data = {"kind": error.kind, "retryable": error.retryable}
            return 200, frames.failure(request_id, SERVER_ERROR, error.message, data)
        except Exception:
            logger.exception("the method %s failed", method[:100])
            return 200, frames.failure(request_id, INTERNAL_ERROR, "internal error")

    def _dressed(self, method: str, value: object, encoded: bytes) -> bytes:
        """A result with what the modern era wants in it."""
        kind, server = self._complete
        members: list[bytes] = []
        if isinstance(value, dict):
            known = cast("dict[str, Any]", value)
            members = [member for name, member in (("resultType", kind), ("_meta", server)) if name not in known]
        elif isinstance(value, ToolResult) and value.meta is not msgspec.UNSET:
            members = [kind]
        else:
            members = [kind, server]
        if method in _CACHEABLE:
            fresh = self._served.freshness.get(method, Freshness())
            members.append(b'"ttlMs":%d,"cacheScope":"%b"' % (fresh.ttl_ms, fresh.scope.encode()))
        return frames.with_members(encoded, members)

    def _check_mirrors(self, params: Params, headers: Headers) -> None:
        if not isinstance(params.name, str):
            return
        rules = self._served.mirrored(params.name)
        if rules:
            problem = mirror_problem(rules, decoded(arguments_of(params)), headers.raw)
            if problem is not None:
                raise RpcError(HEADER_MISMATCH, problem)

    # Legacy sessions.

    async def _initialize(self, actor: Actor, message: Posted, send: Send) -> None:
        params, request_id = message.params, message.id
        if not isinstance(params.protocolVersion, str):
            raise Refused(400, INVALID_PARAMS, "`protocolVersion` is not a string", request_id=request_id)
        for name in ("capabilities", "clientInfo"):
            value: Any = getattr(params, name)
            if value is not msgspec.UNSET and not isinstance(value, dict):
                raise Refused(400, INVALID_PARAMS, f"`{name}` is not an object", request_id=request_id)
        version = negotiated(params.protocolVersion)
        try:
            session = await self._sessions.open(actor, version, params.capabilities, params.clientInfo)
        except TooMany as error:
            retry = (b"retry-after", b"60")
            raise Refused(503, SERVER_ERROR, error.message, None, request_id, (retry,)) from None
        result: dict[str, object] = {
            "protocolVersion": version,
            "capabilities": self._served.capabilities(Era.LEGACY),
            "serverInfo": self._served.info,
        }
        if self._served.instructions is not None:
            result["instructions"] = self._served.instructions
        body = frames.result(cast("Id", request_id), frames.encode(result))
        await send_json(send, 200, body, ((b"mcp-session-id", session.id.encode()),))

    async def _told(self, session: McpSession, message: Posted) -> None:
        """Take a notification of a legacy client, or its answer to a ping."""
        if message.method is None:
            if not self._streams.answered(session.id, cast("Id", message.id)):
                await self._sessions.touch([session.id])  # another server may have asked
        elif message.method == "notifications/initialized":
            await self._sessions.initialized(session)
        elif message.method == "notifications/cancelled":
            request_id: Any = message.params.requestId
            if isinstance(request_id, str | int):
                exchange = self._cancellable.get((session.id, request_id))
                if exchange is not None:
                    exchange.cancel()

    async def _delete(self, session: McpSession, send: Send) -> None:
        await self._sessions.end(session)
        await self._streams.session_ended(session.id)
        await send_empty(send, 200)

    async def _get(self, actor: Actor, headers: Headers, scope: Scope, receive: Receive, send: Send) -> None:
        _, events = accepts(headers.accept)
        if not events:
            raise Refused(406, INVALID_REQUEST, "accept must allow text/event-stream")
        session = await self._session(actor, headers)
        if self._streams.is_full(actor.principal, session.id):
            raise Refused(503, SERVER_ERROR, "too many streams of this key are open")
        stream = Stream(first=frames.RETRY, farewell=_slow, abort=_abort(scope))
        opened = OpenStream(actor, session, stream)
        watch = self._tasks.create_task(_watched(receive, stream))
        self._streams.add_session(opened)
        attendance = self._tasks.create_task(self._attend(opened))
        try:
            await stream.write(send, (*HEADERS, (b"mcp-session-id", session.id.encode())))
        finally:
            stream.lost()
            self._streams.remove_session(opened)
            attendance.cancel()
            watch.cancel()

    async def _attend(self, opened: OpenStream) -> None:
        try:
            await self._served.attend(opened)
        except Exception:
            logger.exception("a standing stream failed")
            opened.channel.end()


def _abort(scope: Scope) -> Callable[[], None] | None:
    return scope.get("extensions", {}).get("oubliette.abort")


def _slow(reason: str) -> bytes:
    """The last frame of a standing stream that is read too slowly."""
    data = {"type": "warning", "kind": "slow_reader", "message": reason}
    return frames.event(frames.notification("notifications/message", {"level": "warning", "data": data}))


async def _watched(receive: Receive, stream: Stream) -> None:
    await until_gone(receive)
    stream.lost()
