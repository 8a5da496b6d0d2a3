"""What the conformance suite expects to find behind a transport, by the names that it asks for.

Run as a program it serves them without authentication on a free port of 127.0.0.1 and prints the URL:
`python -m tests.kit.mcp_fixtures`. Nothing of this ships.
"""

import asyncio
import base64
import json
import re
import struct
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from oubliette.server.clock import SystemClock
from oubliette.server.endpoints.http import HttpServer, Routes, listening_socket
from oubliette.server.endpoints.mcp.contract import (
    INVALID_PARAMS,
    Channel,
    Context,
    Filter,
    Freshness,
    Method,
    Mirrored,
    MissingCapability,
    ResourceNotFound,
    RpcError,
    StreamContext,
    ToolResult,
)
from oubliette.server.endpoints.mcp.headers import mirrored
from oubliette.server.endpoints.mcp.sessions import McpSessions
from oubliette.server.endpoints.mcp.transport import McpEndpoint
from oubliette.server.endpoints.mcp.versions import Era
from oubliette.server.errors import Forbidden, Unauthenticated
from oubliette.server.storage.sqlite import SqliteDatabase
from oubliette.server.tokens.token import Actor, Scope

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
SILENCE = base64.b64encode(
    struct.pack("<4sI8sIHHIIHH4sI", b"RIFF", 36, b"WAVEfmt ", 16, 1, 1, 8000, 8000, 1, 8, b"data", 0)
).decode()
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
VOCABULARY: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}
ROUTED: dict[str, Any] = {
    "type": "object",
    "properties": {"region": {"type": "string", "x-mcp-header": "Region"}, "query": {"type": "string"}},
    "required": ["region"],
}

Arguments = dict[str, Any]
Tool = Callable[[Context, Arguments], Awaitable[object]]


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image() -> dict[str, Any]:
    return {"type": "image", "data": PIXEL, "mimeType": "image/png"}


def embedded(uri: str, content: str, kind: str = "text/plain") -> dict[str, Any]:
    return {"type": "resource", "resource": {"uri": uri, "mimeType": kind, "text": content}}


class Fixtures:
    """A `Served` of what oubliette offers, tools and resources; with `keys`, a bearer becomes whom it names.

    There is a list of prompts, an empty one: how lists may be kept is checked by the suite on this one too.
    """

    info: Mapping[str, str] = {"name": "fixtures", "version": "1"}
    instructions: str | None = "Nothing here is real."
    freshness: Mapping[str, Freshness] = {"tools/list": Freshness(60_000, "private")}

    def __init__(self, keys: Mapping[str, str] | None = None) -> None:
        self.keys = dict(keys) if keys is not None else None
        self.listeners: list[tuple[Filter, Channel]] = []
        self.standing: dict[str, StreamContext] = {}
        self.ended: list[str] = []
        self.changed: list[tuple[str | None, tuple[str, ...]]] = []
        self.started = asyncio.Event()  # a tool that hangs has begun
        self.stopped: list[str] = []  # tools that hung and were cancelled
        self.methods: Mapping[str, Method] = {"prompts/list": self._list_prompts}
        self.tools: dict[str, tuple[str, dict[str, Any], Tool]] = {
            "json_schema_2020_12_tool": ("Has a schema with much in it.", VOCABULARY, self._echo),
            "test_audio_content": ("Returns a sound.", NOTHING, self._audio),
            "test_embedded_resource": ("Returns a resource.", NOTHING, self._embedded),
            "test_error_handling": ("Always fails.", NOTHING, self._failing),
            "test_image_content": ("Returns a picture.", NOTHING, self._image),
            "test_logging_tool": ("Logs once.", NOTHING, self._logging_once),
            "test_missing_capability": ("Needs a client that can sample.", NOTHING, self._needing),
            "test_multiple_content_types": ("Returns several things.", NOTHING, self._mixed),
            "test_simple_text": ("Returns a sentence.", NOTHING, self._simple),
            "test_streaming_elicitation": ("Reports progress while it works.", NOTHING, self._streaming),
            "test_tool_with_logging": ("Logs thrice.", NOTHING, self._logging),
            "test_tool_with_progress": ("Reports progress.", NOTHING, self._progress),
            "test_trigger_prompt_change": ("Changes the prompts.", NOTHING, self._change_prompts),
            "test_trigger_tool_change": ("Changes the tools.", NOTHING, self._change_tools),
            "test_x_mcp_header": ("Has an argument that a header repeats.", ROUTED, self._echo),
            # Ours, for the transport's own tests.
            "try_crash": ("Raises what nobody expects.", NOTHING, self._crash),
            "try_echo": ("Returns its arguments.", {"type": "object"}, self._echo),
            "try_hang": ("Never returns.", {"type": "object"}, self._hang),
            "try_push": ("Pushes notifications.", {"type": "object"}, self._push),
        }

    def capabilities(self, era: Era) -> Mapping[str, Any]:
        return {
            "tools": {"listChanged": True},
            "resources": {"subscribe": True},
            "prompts": {},
            "logging": {},
        }

    async def authenticate(self, bearer: str | None) -> Actor:
        if self.keys is None:
            return Actor(principal="anybody", scope=Scope.ADMIN)
        principal = self.keys.get(bearer or "")
        if principal is None:
            raise Unauthenticated
        if principal == "nobody":
            raise Forbidden("this key is for a box")
        return Actor(principal=principal, scope=Scope.ADMIN, token_id=bearer)

    async def still_valid(self, actors: Sequence[Actor]) -> Sequence[bool]:
        return [self.keys is None or actor.token_id in self.keys for actor in actors]

    async def list_tools(self, context: Context) -> Sequence[object]:
        return [
            {"name": name, "description": description, "inputSchema": schema}
            for name, (description, schema, _) in sorted(self.tools.items())
        ]

    def mirrored(self, tool: str) -> Sequence[Mirrored]:
        return mirrored(self.tools[tool][1]) if tool in self.tools else ()

    async def call_tool(self, context: Context, name: str, arguments: msgspec.Raw) -> object:
        if name not in self.tools:
            raise RpcError(INVALID_PARAMS, f"no tool {name!r}")
        return await self.tools[name][2](context, msgspec.json.decode(arguments))

    async def list_resources(self, context: Context) -> Sequence[object]:
        return [
            {"uri": "test://static-text", "name": "text", "mimeType": "text/plain"},
            {"uri": "test://static-binary", "name": "picture", "mimeType": "image/png"},
            {"uri": "test://watched-resource", "name": "watched", "mimeType": "text/plain"},
        ]

    async def list_resource_templates(self, context: Context) -> Sequence[object]:
        return [{"uriTemplate": "test://template/{id}/data", "name": "data", "mimeType": "application/json"}]

    async def read_resource(self, context: Context, uri: str) -> Sequence[object]:
        if uri == "test://static-binary":
            return [{"uri": uri, "mimeType": "image/png", "blob": PIXEL}]
        if uri in ("test://static-text", "test://watched-resource"):
            return [{"uri": uri, "mimeType": "text/plain", "text": "This is a static text."}]
        template = re.fullmatch("test://template/([^/]+)/data", uri)
        if template is None:
            raise ResourceNotFound(uri)
        content = json.dumps({"id": template[1], "templateTest": True, "data": f"Data for ID: {template[1]}"})
        return [{"uri": uri, "mimeType": "application/json", "text": content}]

    async def _list_prompts(self, context: Context) -> object:
        return {"prompts": []}

    async def subscribe(self, context: Context, uri: str) -> None:
        await self.read_resource(context, uri)

    async def admit(self, context: Context, wanted: Filter) -> Filter:
        uris = [uri for uri in wanted.resourceSubscriptions if uri.startswith("test://")]
        return Filter(wanted.toolsListChanged, wanted.promptsListChanged, False, uris)

    def listen(self, context: Context, honoured: Filter, channel: Channel) -> None:
        entry = (honoured, channel)
        self.listeners.append(entry)
        channel.on_close(lambda: self.listeners.remove(entry))

    async def attend(self, stream: StreamContext) -> None:
        def closed() -> None:
            if self.standing.get(stream.stream_id) is stream:
                del self.standing[stream.stream_id]

        self.standing[stream.stream_id] = stream
        stream.channel.on_close(closed)

    def stream_changed(self, stream: StreamContext) -> None:
        self.changed.append((stream.log_level, tuple(stream.subscriptions)))

    async def session_ended(self, stream_id: str) -> None:
        self.ended.append(stream_id)

    def updated(self, uri: str) -> None:
        """Tell everybody who listens that a resource has changed."""
        params = {"uri": uri}
        for honoured, channel in list(self.listeners):
            if uri in honoured.resourceSubscriptions:
                channel.announce("notifications/resources/updated", params)
        for stream in list(self.standing.values()):
            if uri in stream.subscriptions:
                stream.channel.announce("notifications/resources/updated", params)

    # Tools.

    async def _simple(self, context: Context, arguments: Arguments) -> object:
        return ToolResult([text("This is a simple text response for testing.")])

    async def _image(self, context: Context, arguments: Arguments) -> object:
        return ToolResult([image()])

    async def _audio(self, context: Context, arguments: Arguments) -> object:
        return ToolResult([{"type": "audio", "data": SILENCE, "mimeType": "audio/wav"}])

    async def _embedded(self, context: Context, arguments: Arguments) -> object:
        return ToolResult([embedded("test://embedded-resource", "This is an embedded resource content.")])

    async def _mixed(self, context: Context, arguments: Arguments) -> object:
        inner = embedded("test://mixed-content-resource", '{"test":"data","value":123}', "application/json")
        return ToolResult([text("Multiple content types test:"), image(), inner])

    async def _failing(self, context: Context, arguments: Arguments) -> object:
        return ToolResult([text("This tool intentionally returns an error for testing")], isError=True)

    async def _logging(self, context: Context, arguments: Arguments) -> object:
        for words in ("Tool execution started", "Tool processing data", "Tool execution completed"):
            context.log("info", words)
            await asyncio.sleep(0.05)
        return ToolResult([text("logged")])

    async def _logging_once(self, context: Context, arguments: Arguments) -> object:
        context.log("info", "Tool execution started")
        return ToolResult([text("logged")])

    async def _progress(self, context: Context, arguments: Arguments) -> object:
        for done in (0, 50, 100):
            context.progress(done, 100)
            await asyncio.sleep(0.05)
        return ToolResult([text("done")])

    async def _streaming(self, context: Context, arguments: Arguments) -> object:
        context.progress(1, 1)
        return ToolResult([text("done")])

    async def _needing(self, context: Context, arguments: Arguments) -> object:
        if "sampling" not in context.capabilities:
            raise MissingCapability({"sampling": {}})
        return ToolResult([text("the client can sample")])

    async def _change_tools(self, context: Context, arguments: Arguments) -> object:
        for honoured, channel in list(self.listeners):
            if honoured.toolsListChanged:
                channel.notify("notifications/tools/list_changed", {})
        return ToolResult([text("changed")])

    async def _change_prompts(self, context: Context, arguments: Arguments) -> object:
        for honoured, channel in list(self.listeners):
            if honoured.promptsListChanged:
                channel.notify("notifications/prompts/list_changed", {})
        return ToolResult([text("changed")])

    async def _echo(self, context: Context, arguments: Arguments) -> object:
        return ToolResult([text(json.dumps(arguments))], structuredContent=arguments)

    async def _crash(self, context: Context, arguments: Arguments) -> object:
        raise ZeroDivisionError("a secret that must not be told")

    async def _hang(self, context: Context, arguments: Arguments) -> object:
        self.started.set()
        if arguments.get("push"):
            context.log("error", "hanging")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.stopped.append(str(context.request_id))
            raise
        return ToolResult([])

    async def _push(self, context: Context, arguments: Arguments) -> object:
        """`count` notifications of `bytes` each; `ahead` announcements are queued after them."""
        filler = "x" * int(arguments.get("bytes", 1))
        sent = 0
        for number in range(int(arguments.get("count", 1))):
            sent += context.channel.notify("notifications/message", {"level": "info", "data": [number, filler]})
        for number in range(int(arguments.get("ahead", 0))):
            context.channel.announce("notifications/message", {"level": "info", "data": f"announcement {number}"})
        return ToolResult([text(str(sent))])


async def ready() -> str | None:
    return None


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        database = SqliteDatabase(Path(folder) / "fixtures.db")
        listener = listening_socket("127.0.0.1", 0)
        endpoint = McpEndpoint(Fixtures(), McpSessions(database, SystemClock()))
        server = HttpServer(Routes(endpoint, ready), listener)
        try:
            async with endpoint:
                print(f"http://{server.address[0]}:{server.address[1]}/mcp", flush=True)
                await server.serve()
        finally:
            await database.close()


if __name__ == "__main__":
    if "--uvloop" in sys.argv:
        import uvloop

        uvloop.run(main())
    else:
        asyncio.run(main())
