"""A caller on the `mcp` SDK 2.x whose droid says more than one event of a stream holds.

    python large_2x.py URL PROJECT MESSAGE legacy|auto [LEVEL] < TOKEN

prints what it got of the droid's text, for which TEXT stands in the message, as one JSON object. This SDK's reader
stops at an event of 1 MiB.
"""
# pyright: basic, reportMissingImports=false

import asyncio
import json
import sys
import warnings

import httpx2
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client

warnings.simplefilter("ignore")  # logging is deprecated in the newest revision


async def called(client: Client, name: str, arguments: dict) -> dict:
    async def told(*_) -> None: ...

    async with asyncio.timeout(25):
        result = await client.call_tool(name, arguments, progress_callback=told)
    assert not result.is_error, result.content
    return result.structured_content


async def paged(client: Client, session_id: str) -> str:
    """The text of the last turn, read from the log page by page."""
    since = -1
    while True:
        page = await called(
            client, "session_events", {"session_id": session_id, "since_index": since, "wait_seconds": 20}
        )
        since = page["last_index"]
        for event in page["events"]:
            if event["type"] == "completion":
                return event["text"]


async def main(url: str, project: str, message: str, mode: str, level: str | None = None) -> None:
    async def heard(_) -> None: ...

    message = message.replace("TEXT", "x" * 600_000)

    http = httpx2.AsyncClient(headers={"Authorization": f"Bearer {sys.stdin.readline().strip()}"}, timeout=30)
    transport = streamable_http_client(url, http_client=http)
    async with http, Client(transport, mode=mode, logging_callback=heard, log_level=level) as client:
        spawned = await called(client, "session_spawn", {"project_id": project, "message": message})
        session = {"session_id": spawned["session_id"]}
        text, watched = await asyncio.gather(
            paged(client, spawned["session_id"]), called(client, "session_watch", session | {"wait_seconds": 20})
        )
        again = await called(client, "session_message", session | {"message": message, "wait_seconds": 20})
        shown = await called(client, "session_get", session)
        version = client.protocol_version
    print(
        json.dumps(
            {
                "version": version,
                "paged": len(text),
                "watched": watched.get("left_out"),
                "waited": again.get("left_out"),
                "shown": len(shown["turns"][-1]["text"]),
            }
        )
    )


asyncio.run(main(*sys.argv[1:]))
