"""What the product serves over MCP: its operations as tools, and the calls of a session's droid as a resource.

Everything here goes through the gate. A failure of an operation is a tool result with `isError`, so that a model
reads it; only what is no call of a tool at all is an error of the protocol.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

import msgspec

from oubliette.server.caller_tools.carriers import Carriers
from oubliette.server.endpoints import failures
from oubliette.server.endpoints.mcp.contract import (
    INVALID_PARAMS,
    Channel,
    Context,
    Filter,
    Freshness,
    Method,
    Mirrored,
    ResourceNotFound,
    RpcError,
    StreamContext,
    ToolResult,
)
from oubliette.server.endpoints.mcp.pushing import Pushed, Standing, Standings, Updates
from oubliette.server.endpoints.mcp.strangers import Strangers
from oubliette.server.endpoints.mcp.versions import Era
from oubliette.server.errors import OublietteError, Unauthenticated, UnknownTool
from oubliette.server.operations.gate import Gate
from oubliette.server.operations.operation import Asked, Operation, Rooms
from oubliette.server.operations.schemas import schema
from oubliette.server.tokens.token import Actor

TEMPLATE: Final = "oubliette://sessions/{session_id}/caller-requests"
_REQUESTS: Final = re.compile(r"oubliette://sessions/([A-Za-z0-9_]{1,64})/caller-requests")
# The operation that a read of the resource, and a subscription to it, are judged by.
_PENDING: Final = "caller_tool_pending"
ERROR_META: Final = "dev.oubliette/error"

_INSTRUCTIONS: Final = (
    "oubliette runs coding agents (droids) in boxes without network or secrets. session_message starts a session and"
    " can lend it your own tools (context.caller_id, context.caller_tools). When the droid calls one you get a"
    " caller_tool_request: as a log notification, by subscribing to oubliette://sessions/{session_id}/caller-requests,"
    " or from caller_tool_poll. Answer it with caller_tool_response. session_events and session_watch follow the work."
)
_encode: Final = msgspec.json.Encoder().encode


class Product:
    """A `Served`."""

    methods: Mapping[str, Method] = {}
    # What a token may call changes with the server's version alone.
    freshness: Mapping[str, Freshness] = {
        "server/discover": Freshness(300_000),
        "tools/list": Freshness(300_000),
        "resources/list": Freshness(300_000),
        "resources/templates/list": Freshness(300_000),
    }

    def __init__(self, rooms: Rooms, gate: Gate, carriers: Carriers, strangers: Strangers, *, version: str) -> None:
        self._rooms = rooms
        self._gate = gate
        self._standings = Standings(rooms.events, rooms.following, carriers)
        self._strangers = strangers
        self.info: Mapping[str, str] = {"name": "oubliette", "title": "oubliette", "version": version}
        self.instructions: str | None = _INSTRUCTIONS

    def capabilities(self, era: Era) -> Mapping[str, Any]:
        offered: dict[str, Any] = {"tools": {}, "resources": {"subscribe": True}, "logging": {}}
        return offered | {"experimental": {"dev.oubliette/pipeline": {}}}  # see `endpoints.posts`

    async def authenticate(self, bearer: str | None) -> Actor:
        try:
            return await self._rooms.tokens.verify(bearer)
        except Unauthenticated:
            self._strangers.turned_away()
            raise

    async def still_valid(self, actors: Sequence[Actor]) -> Sequence[bool]:
        return [actor.token_id is not None and await self._rooms.tokens.is_live(actor.token_id) for actor in actors]

    # Tools.

    async def list_tools(self, context: Context) -> Sequence[object]:
        return [tool(operation) for operation in self._gate.offered(context.actor)]

    def mirrored(self, tool: str) -> Sequence[Mirrored]:
        return ()  # no argument of ours has to be routed on

    async def call_tool(self, context: Context, name: str, arguments: msgspec.Raw) -> object:
        asked = Asked(
            actor=context.actor,
            door="mcp",
            stream_id=context.stream_id,
            followed=Pushed(context, self._standings),
        )
        try:
            result = await self._gate.call(asked, name, arguments)
        except UnknownTool as unknown:
            raise RpcError(INVALID_PARAMS, unknown.message) from None
        except OublietteError as error:
            return failed(error)
        body = _encode(result)
        operation = self._gate.find(name)
        refused = operation is not None and operation.refused is not None and operation.refused(result)
        return ToolResult([{"type": "text", "text": body.decode()}], msgspec.Raw(body), refused)

    # The pending requests of a session, for its owner.

    async def list_resources(self, context: Context) -> Sequence[object]:
        return ()

    async def list_resource_templates(self, context: Context) -> Sequence[object]:
        return (
            {
                "uriTemplate": TEMPLATE,
                "name": "caller-requests",
                "title": "Pending caller tool requests",
                "description": "Calls of your tools in a session and its children that wait for caller_tool_response."
                " Subscribe to hear of new ones. Where one has arguments_bytes, caller_tool_pending gives its arguments"
                " by the request_id.",
                "mimeType": "application/json",
            },
        )

    async def read_resource(self, context: Context, uri: str) -> Sequence[object]:
        session_id = _session_id(uri)
        pending = await self._pending(context, session_id) if session_id is not None else None
        if pending is None:
            raise ResourceNotFound(uri)
        return ({"uri": uri, "mimeType": "application/json", "text": pending.decode()},)

    async def subscribe(self, context: Context, uri: str) -> None:
        await self.read_resource(context, uri)

    async def admit(self, context: Context, wanted: Filter) -> Filter:
        """Of a session's requests its owner may hear; nothing else here changes while somebody listens."""
        honoured: list[str] = []
        for uri in dict.fromkeys(wanted.resourceSubscriptions):
            session_id = _session_id(uri)
            if session_id is not None and await self._pending(context, session_id) is not None:
                honoured.append(uri)
        return Filter(resourceSubscriptions=honoured)

    def listen(self, context: Context, honoured: Filter, channel: Channel) -> None:
        for uri in honoured.resourceSubscriptions:
            session_id = _session_id(uri)
            assert session_id is not None
            Updates(channel, uri).attach(self._rooms.exchange, session_id)

    async def _pending(self, context: Context, session_id: str) -> bytes | None:
        """The JSON of a session's pending requests, or None where the asker is not its owner."""
        asked = Asked(actor=context.actor, door="mcp", stream_id=context.stream_id)
        try:
            return _encode(await self._gate.call(asked, _PENDING, _encode({"session_id": session_id})))
        except OublietteError:
            return None

    # Legacy sessions and their streams.

    async def attend(self, stream: StreamContext) -> None:
        await Standing(stream, self._standings, self._rooms.exchange, _session_id).serve()

    def stream_changed(self, stream: StreamContext) -> None:
        self._standings.changed(stream)

    async def session_ended(self, stream_id: str) -> None:
        self._standings.forget(stream_id)


def failed(error: OublietteError) -> ToolResult:
    """A failure as a tool result: a sentence for a model, and the same for a program."""
    told = failures.as_rpc(error)
    meta = {ERROR_META: told.data}
    return ToolResult([{"type": "text", "text": told.message}], isError=True, meta=meta)


@cache
def tool(operation: Operation[Any]) -> msgspec.Raw:
    """An operation as `tools/list` shows it."""
    shown: dict[str, Any] = {
        "name": operation.name,
        "description": operation.summary,
        "inputSchema": schema(operation.params),
        "outputSchema": schema(operation.result),
        "annotations": annotations(operation),
    }
    if operation.title:
        shown["title"] = operation.title
    return msgspec.Raw(_encode(shown))


def annotations(operation: Operation[Any]) -> dict[str, bool]:
    """Hints, each of them true of the operation."""
    if not operation.writes:
        return {"readOnlyHint": True}
    return {"readOnlyHint": False, "destructiveHint": operation.destructive}


def _session_id(uri: str) -> str | None:
    match = _REQUESTS.fullmatch(uri)
    return match[1] if match is not None else None
