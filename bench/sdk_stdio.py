"""A tool server on the `mcp` SDK over stdio, as small as it gets: a peer for `bench/start.py`."""
# pyright: basic, reportMissingImports=false

import asyncio

from mcp import types
from mcp.server.lowlevel.server import Server
from mcp.server.stdio import stdio_server


async def list_tools(ctx, params) -> types.ListToolsResult:
    return types.ListToolsResult(tools=[])


async def main() -> None:
    server = Server("sdk", version="0", on_list_tools=list_tools)
    async with stdio_server() as (reader, writer):
        await server.run(reader, writer, server.create_initialization_options())


asyncio.run(main())
