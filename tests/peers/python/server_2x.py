"""The official SDK's server over HTTP, with tools like the fixtures': what ours is compared with.

    python server_2x.py

runs in the environment of `mcp` 2.3, where nothing of ours is, and prints its port.
"""
# pyright: basic, reportMissingImports=false

import socket

import mcp_types as types
import uvicorn
from mcp.server.lowlevel.server import Server
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.exceptions import MCPError

TOOLS = {"try_echo": {"type": "object"}}


async def list_tools(ctx, params):
    return types.ListToolsResult(
        tools=[types.Tool(name=name, description="A tool.", input_schema=schema) for name, schema in TOOLS.items()]
    )


async def call_tool(ctx, params):
    if params.name not in TOOLS:
        raise MCPError(-32602, "no such tool")
    return types.CallToolResult(
        content=[types.TextContent(type="text", text="echo")], structured_content=params.arguments or {}
    )


async def list_resources(ctx, params):
    return types.ListResourcesResult(resources=[types.Resource(uri="test://static-text", name="text")])


async def read_resource(ctx, params):
    if params.uri != "test://static-text":
        # The code that the client's revision uses.
        modern = ctx.protocol_version == "2026-07-28"
        raise MCPError(-32602 if modern else -32002, "resource not found", {"uri": params.uri})
    return types.ReadResourceResult(
        contents=[types.TextResourceContents(uri=params.uri, mime_type="text/plain", text="This is a static text.")]
    )


async def set_level(ctx, params):
    return types.EmptyResult()


def main() -> None:
    server = Server(
        "sdk",
        version="1",
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_resources=list_resources,
        on_read_resource=read_resource,
        on_set_logging_level=set_level,
    )
    doors = TransportSecuritySettings(
        allowed_hosts=["127.0.0.1:*", "localhost", "localhost:*"], allowed_origins=["http://localhost:*"]
    )
    app = server.streamable_http_app(streamable_http_path="/mcp", json_response=True, transport_security=doors)
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])


if __name__ == "__main__":
    main()
