"""The protocol's methods: what each reads of its parameters, and what of the served it asks.

One table per era. Tools and resources are in both; what only one era knows stands beside it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec

from oubliette.server.endpoints.mcp import frames
from oubliette.server.endpoints.mcp.context import RequestContext
from oubliette.server.endpoints.mcp.contract import INVALID_PARAMS, LEVELS, SERVER_ERROR, Filter, RpcError, Served
from oubliette.server.endpoints.mcp.posted import SUBSCRIPTION_KEY, Params
from oubliette.server.endpoints.mcp.sessions import McpSessions
from oubliette.server.endpoints.mcp.streams import Streams
from oubliette.server.endpoints.mcp.versions import SUPPORTED, Era

Call = Callable[[RequestContext, Params], Awaitable[object]]

SUBSCRIPTIONS_MAX: Final = 256
_NO_ARGUMENTS: Final = msgspec.Raw(b"{}")


class Methods:
    def __init__(self, served: Served, sessions: McpSessions, streams: Streams) -> None:
        self._served = served
        self._sessions = sessions
        self._streams = streams
        self.of: Mapping[Era, Mapping[str, Call]] = {Era.LEGACY: self._legacy(), Era.MODERN: self._modern()}

    def _shared(self, era: Era) -> dict[str, Call]:
        offered = self._served.capabilities(era)
        methods: dict[str, Call] = {}
        if "tools" in offered:
            methods |= {"tools/list": self._list_tools, "tools/call": self._call_tool}
        if "resources" in offered:
            methods |= {
                "resources/list": self._list_resources,
                "resources/templates/list": self._list_templates,
                "resources/read": self._read_resource,
            }
        return methods | {name: _beyond(method) for name, method in self._served.methods.items()}

    def _legacy(self) -> dict[str, Call]:
        methods = self._shared(Era.LEGACY) | {"ping": _ping}
        offered = self._served.capabilities(Era.LEGACY)
        if "logging" in offered:
            methods["logging/setLevel"] = self._set_level
        if offered.get("resources", {}).get("subscribe"):
            methods |= {"resources/subscribe": self._subscribe, "resources/unsubscribe": self._unsubscribe}
        return methods

    def _modern(self) -> dict[str, Call]:
        methods = self._shared(Era.MODERN)
        return methods | {"server/discover": self._discover, "subscriptions/listen": self._listen}

    async def _discover(self, context: RequestContext, params: Params) -> object:
        result: dict[str, object] = {
            "supportedVersions": SUPPORTED,
            "capabilities": self._served.capabilities(Era.MODERN),
        }
        if self._served.instructions is not None:
            result["instructions"] = self._served.instructions
        return result

    async def _list_tools(self, context: RequestContext, params: Params) -> object:
        _check_cursor(params)
        return {"tools": await self._served.list_tools(context)}

    async def _call_tool(self, context: RequestContext, params: Params) -> object:
        name = text_of(params.name, "name")
        return await self._served.call_tool(context, name, arguments_of(params))

    async def _list_resources(self, context: RequestContext, params: Params) -> object:
        _check_cursor(params)
        return {"resources": await self._served.list_resources(context)}

    async def _list_templates(self, context: RequestContext, params: Params) -> object:
        _check_cursor(params)
        return {"resourceTemplates": await self._served.list_resource_templates(context)}

    async def _read_resource(self, context: RequestContext, params: Params) -> object:
        return {"contents": await self._served.read_resource(context, text_of(params.uri, "uri"))}

    async def _set_level(self, context: RequestContext, params: Params) -> object:
        if params.level not in LEVELS:
            raise RpcError(INVALID_PARAMS, f"`level` is none of {', '.join(LEVELS)}")
        assert context.session is not None
        self._streams.session_changed(await self._sessions.set_level(context.session, params.level))
        return {}

    async def _subscribe(self, context: RequestContext, params: Params) -> object:
        uri, session = text_of(params.uri, "uri"), context.session
        assert session is not None
        await self._served.subscribe(context, uri)
        if uri not in session.subscriptions:
            if len(session.subscriptions) >= SUBSCRIPTIONS_MAX:
                raise RpcError(SERVER_ERROR, f"a session subscribes to at most {SUBSCRIPTIONS_MAX} resources")
            changed = await self._sessions.set_subscriptions(session, (*session.subscriptions, uri))
            self._streams.session_changed(changed)
        return {}

    async def _unsubscribe(self, context: RequestContext, params: Params) -> object:
        uri, session = text_of(params.uri, "uri"), context.session
        assert session is not None
        if uri in session.subscriptions:
            left = tuple(each for each in session.subscriptions if each != uri)
            self._streams.session_changed(await self._sessions.set_subscriptions(session, left))
        return {}

    async def _listen(self, context: RequestContext, params: Params) -> object:
        """Hold a modern client's stream of notifications until one side ends it."""
        try:
            wanted = msgspec.convert(params.notifications, Filter)
        except msgspec.ValidationError as error:
            raise RpcError(INVALID_PARAMS, f"`notifications`: {error}") from None
        if len(wanted.resourceSubscriptions) > SUBSCRIPTIONS_MAX:
            raise RpcError(INVALID_PARAMS, f"a stream subscribes to at most {SUBSCRIPTIONS_MAX} resources")
        if self._streams.is_full(context.actor.principal, None):
            raise RpcError(SERVER_ERROR, "too many streams of this key are open")
        honoured = await self._served.admit(context, wanted)
        tag = {SUBSCRIPTION_KEY: context.request_id}
        ended = frames.encode({"resultType": "complete", "_meta": tag})
        stream = context.exchange.stream(tag=tag, last=frames.event(frames.result(context.request_id, ended)))
        stream.announce("notifications/subscriptions/acknowledged", {"notifications": msgspec.to_builtins(honoured)})
        closed = asyncio.Event()
        stream.on_close(closed.set)
        self._served.listen(context, honoured, stream)
        await closed.wait()
        return {}


def _beyond(method: Callable[[RequestContext], Awaitable[object]]) -> Call:
    async def call(context: RequestContext, params: Params) -> object:
        return await method(context)

    return call


async def _ping(context: RequestContext, params: Params) -> object:
    return {}


def text_of(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise RpcError(INVALID_PARAMS, f"`{name}` is not a string")
    return value


def arguments_of(params: Params) -> msgspec.Raw:
    """The JSON of the arguments, known to begin like an object; it is decoded once, by who knows its type."""
    value = params.arguments
    if value is msgspec.UNSET:
        return _NO_ARGUMENTS
    first = memoryview(value)[0]
    if first == ord("{"):
        return value
    if first == ord("n"):
        return _NO_ARGUMENTS
    raise RpcError(INVALID_PARAMS, "`arguments` is not an object")


def decoded(arguments: msgspec.Raw) -> dict[str, Any]:
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise RpcError(INVALID_PARAMS, "`arguments` is not an object") from None


def _check_cursor(params: Params) -> None:
    if params.cursor is not msgspec.UNSET and params.cursor is not None:
        raise RpcError(INVALID_PARAMS, "`cursor` is none of ours: lists come whole")
