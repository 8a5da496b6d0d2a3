"""A program for an environment that holds `mcp`: drives a server over stdio with the public SDK.

`sdk_stdio.py MODE COMMAND [ARGUMENT…]`; MODE is `auto`, `legacy` or `1.x`. What it saw goes to stdout as one JSON
object. The server is expected to have `ant_echo`, and to get another tool when `ant_grow` is called.
"""

import asyncio
import json
import os
import sys
from importlib import import_module
from typing import Any

SLOW_S = 20


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("OUBLIETTE_")}


def plain(result: Any) -> dict[str, Any]:
    return result.model_dump(mode="json", by_alias=True, exclude_none=True)


async def drive(mode: str, command: str, arguments: list[str]) -> dict[str, Any]:
    mcp, sdk = import_module("mcp"), import_module("mcp.client.client")
    changed = asyncio.Event()
    progress: list[Any] = []

    async def heard(message: Any) -> None:
        if "ToolListChanged" in type(getattr(message, "root", message)).__name__:
            changed.set()

    async def moved(value: float, total: float | None, message: str | None) -> None:
        progress.append([value, total, message])

    async def follow(client: Any, is_open: asyncio.Event) -> None:
        async with client.listen(tools_list_changed=True) as subscription:
            is_open.set()
            async for _ in subscription:
                changed.set()
                return

    server = mcp.StdioServerParameters(command=command, args=arguments, env=environment())
    async with sdk.Client(server, mode=mode, message_handler=heard) as client, asyncio.TaskGroup() as tasks:
        before = await client.list_tools()
        if mode == "auto":
            is_open = asyncio.Event()
            tasks.create_task(follow(client, is_open))
            await is_open.wait()
        echo = await client.call_tool("ant_echo", {"text": "grüße"}, progress_callback=moved)
        failed = await client.call_tool("ant_echo", {"fail": True})
        many = await asyncio.gather(*(client.call_tool("ant_echo", {"n": n}) for n in range(10)))
        await client.call_tool("ant_grow", {})
        await changed.wait()
        after = await client.list_tools()
        return {
            "version": client.protocol_version,
            "before": [plain(tool) for tool in before.tools],
            "after": [tool.name for tool in after.tools],
            "echo": plain(echo),
            "failed": plain(failed),
            "many": [plain(each)["structuredContent"]["n"] for each in many],
            "progress": progress,
        }


async def drive_1(command: str, arguments: list[str]) -> dict[str, Any]:
    mcp, stdio = import_module("mcp"), import_module("mcp.client.stdio")
    changed = asyncio.Event()
    progress: list[Any] = []

    async def heard(message: Any) -> None:
        if "ToolListChanged" in type(getattr(message, "root", message)).__name__:
            changed.set()

    async def moved(value: float, total: float | None, message: str | None) -> None:
        progress.append([value, total, message])

    server = mcp.StdioServerParameters(command=command, args=arguments, env=environment())
    async with stdio.stdio_client(server) as streams, mcp.ClientSession(*streams, message_handler=heard) as session:
        hello = await session.initialize()
        before = await session.list_tools()
        echo = await session.call_tool("ant_echo", {"text": "grüße"}, progress_callback=moved)
        failed = await session.call_tool("ant_echo", {"fail": True})
        many = await asyncio.gather(*(session.call_tool("ant_echo", {"n": n}) for n in range(10)))
        await session.call_tool("ant_grow", {})
        await changed.wait()
        after = await session.list_tools()
        return {
            "version": hello.protocolVersion,
            "before": [plain(tool) for tool in before.tools],
            "after": [tool.name for tool in after.tools],
            "echo": plain(echo),
            "failed": plain(failed),
            "many": [plain(each)["structuredContent"]["n"] for each in many],
            "progress": progress,
        }


async def main(mode: str, command: str, *arguments: str) -> None:
    async with asyncio.timeout(SLOW_S):
        saw = await (drive_1(command, list(arguments)) if mode == "1.x" else drive(mode, command, list(arguments)))
    print(json.dumps(saw))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
