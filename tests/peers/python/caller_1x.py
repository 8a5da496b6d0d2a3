"""A caller on the `mcp` SDK 1.x: lends one tool, gets the request on its stream, answers it, waits for the turn.

python caller_1x.py URL PROJECT MESSAGE < TOKEN      prints what it saw as one JSON object
"""
# pyright: basic, reportMissingImports=false

import asyncio
import json
import sys

from mcp import ClientSession
from mcp.client.streamable_http import streamablehttp_client

TOOL = {
    "name": "echo",
    "description": "Give back what was given.",
    "inputSchema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
}


async def main(url: str, project: str, message: str) -> None:
    headers = {"Authorization": f"Bearer {sys.stdin.readline().strip()}"}
    requests: asyncio.Queue[dict] = asyncio.Queue()

    async def heard(params) -> None:
        # Answering from in here would deadlock this SDK.
        if params.data["type"] == "caller_tool_request":
            requests.put_nowait(params.data)

    async with (
        streamablehttp_client(url, headers=headers) as (reader, writer, _),
        ClientSession(reader, writer, logging_callback=heard) as session,
    ):
        opened = await session.initialize()
        context = {"caller_id": "ant", "caller_tools": [TOOL]}
        arguments = {"project_id": project, "message": message, "context": context}
        started = (await session.call_tool("session_message", arguments)).structuredContent
        request = await requests.get()
        answer = {
            "session_id": request["session_id"],
            "request_id": request["request_id"],
            "result": {"echoed": request["arguments"]},
        }
        taken = (await session.call_tool("caller_tool_response", answer)).structuredContent
        watch = {"session_id": started["session_id"], "wait_seconds": 20}
        watched = (await session.call_tool("session_watch", watch)).structuredContent
        seen = {
            "version": opened.protocolVersion,
            "requests": [request, *(requests.get_nowait() for _ in range(requests.qsize()))],
            "taken": taken,
            "text": watched["final_response"],
        }
    print(json.dumps(seen))


asyncio.run(main(*sys.argv[1:]))
