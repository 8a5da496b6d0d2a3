"""A caller on the `mcp` SDK 2.x, in either era and on each carrier that the era has.

    python caller_2x.py URL PROJECT MESSAGE legacy|auto push|request|listen|poll < TOKEN

prints what it saw as one JSON object. `push` is the legacy stream, `request` notifications on the caller's own
`session_watch`, `listen` a subscription and reads of the resource, `poll` the operation of that name.
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
TOOL = {
    "name": "echo",
    "description": "Give back what was given.",
    "inputSchema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
}


class Seen:
    def __init__(self) -> None:
        self.requests: list[dict] = []
        self.arrived: asyncio.Queue[dict] = asyncio.Queue()

    def take(self, data: dict) -> None:
        self.requests.append(data)
        self.arrived.put_nowait(data)

    async def heard(self, params) -> None:
        if params.data["type"] == "caller_tool_request":
            self.take(params.data)


async def called(client: Client, name: str, arguments: dict) -> dict:
    result = await client.call_tool(name, arguments)
    assert not result.is_error, result.content
    return result.structured_content


async def answer(client: Client, seen: Seen) -> dict:
    request = await seen.arrived.get()
    result = {"echoed": request["arguments"]}
    ids = {"session_id": request["session_id"], "request_id": request["request_id"]}
    return await called(client, "caller_tool_response", ids | {"result": result})


async def carry(client: Client, seen: Seen, carrier: str, session_id: str) -> dict:
    """Get the request by this carrier and answer it."""
    if carrier == "listen":
        uri = f"oubliette://sessions/{session_id}/caller-requests"
        async with client.listen(resource_subscriptions=[uri]) as subscription:
            async for _ in subscription:
                read = await client.read_resource(uri)
                for request in json.loads(read.contents[0].text)["requests"]:
                    seen.take(request)
                if seen.requests:
                    return await answer(client, seen)
    if carrier == "poll":
        page = await called(client, "caller_tool_poll", {"session_id": session_id, "wait_seconds": 20})
        for request in page["requests"]:
            seen.take(request)
    return await answer(client, seen)


async def main(url: str, project: str, message: str, mode: str, carrier: str) -> None:
    http = httpx2.AsyncClient(headers={"Authorization": f"Bearer {sys.stdin.readline().strip()}"}, timeout=30)
    seen = Seen()
    level = "info" if carrier == "request" else None
    transport = streamable_http_client(url, http_client=http)
    async with http, Client(transport, mode=mode, logging_callback=seen.heard, log_level=level) as client:
        context = {"caller_id": "ant", "caller_tools": [TOOL]}
        arguments = {"project_id": project, "message": message, "context": context}
        session_id = (await called(client, "session_message", arguments))["session_id"]
        watch = {"session_id": session_id, "wait_seconds": 20}
        if carrier == "request":
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(called(client, "session_watch", watch))
                taken = await carry(client, seen, carrier, session_id)
            watched = watching.result()
        else:
            taken = await carry(client, seen, carrier, session_id)
            watched = await called(client, "session_watch", watch)
        version = client.protocol_version
    print(
        json.dumps({"version": version, "requests": seen.requests, "taken": taken, "text": watched["final_response"]})
    )


asyncio.run(main(*sys.argv[1:]))
