"""A caller on the `mcp` SDK 2.x that stays with a session whatever happens to the server.

    python worker_2x.py URL SESSION FILE legacy|auto GO < TOKEN

It lends nothing itself: the session's tools are lent already. Each time that it really runs one it writes a line to
FILE; given GO, it then tells of its progress, and goes on when there is a file of that name. In the older era requests
come as notifications, by its stream or by the watch that it holds; in the newer one it subscribes to them and reads.
What breaks is begun anew. It says `ready` once it can be asked.
"""
# pyright: basic, reportMissingImports=false

import asyncio
import json
import sys
import warnings
from pathlib import Path

import httpx2
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client

warnings.simplefilter("ignore")  # logging is deprecated in the newest revision


class Worker:
    def __init__(self, session_id: str, path: str, go: str) -> None:
        self.session_id = session_id
        self.path = Path(path)
        self.go = go
        self.answers: dict[str, dict] = {}
        self.asked: asyncio.Queue[dict] = asyncio.Queue()
        self.is_ready = False

    async def heard(self, params) -> None:
        if params.data["type"] == "caller_tool_request":
            self.asked.put_nowait(params.data)

    def ready(self) -> None:
        if not self.is_ready:
            self.is_ready = True
            print("ready", flush=True)

    async def serve(self, client: Client, mode: str) -> None:
        async with asyncio.TaskGroup() as tasks:
            answering = tasks.create_task(self.answer(client))
            await (self.listen(client) if mode == "auto" else self.watch(client))
            answering.cancel()

    async def watch(self, client: Client) -> None:
        page = await call(client, "session_events", {"session_id": self.session_id, "max_events": 1})
        self.ready()
        while True:
            # The answer to a request that a killed server had never comes: who waits longer than this asks again.
            async with asyncio.timeout(6):
                watch = {"session_id": self.session_id, "until": "end", "since_index": page["last_index"]}
                await call(client, "session_watch", watch | {"wait_seconds": 2})

    async def listen(self, client: Client) -> None:
        uri = f"oubliette://sessions/{self.session_id}/caller-requests"
        async with client.listen(resource_subscriptions=[uri]) as subscription:
            self.ready()
            async for _ in subscription:
                read = await client.read_resource(uri)
                for request in json.loads(read.contents[0].text)["requests"]:
                    self.asked.put_nowait(request)

    async def answer(self, client: Client) -> None:
        while True:
            request = await self.asked.get()
            request_id, n = request["request_id"], request["arguments"]["n"]
            ids = {"session_id": request["session_id"], "request_id": request_id}
            if request_id not in self.answers:
                with self.path.open("a") as file:
                    file.write(f"{n}\n")
                self.answers[request_id] = {"did": n}
                if self.go:
                    await self.report(client, ids)
            async with asyncio.timeout(6):
                await client.call_tool("caller_tool_response", ids | {"result": self.answers[request_id]})

    async def report(self, client: Client, ids: dict) -> None:
        async with asyncio.timeout(6):
            await call(client, "caller_tool_progress", ids | {"progress": 1, "extend_seconds": 300})
        while not Path(self.go).exists():
            await asyncio.sleep(0.02)


async def call(client: Client, name: str, arguments: dict) -> dict:
    result = await client.call_tool(name, arguments)
    assert not result.is_error, result.content
    return result.structured_content


async def main(url: str, session_id: str, path: str, mode: str, go: str) -> None:
    worker = Worker(session_id, path, go)
    headers = {"Authorization": f"Bearer {sys.stdin.readline().strip()}"}
    while True:
        try:
            async with httpx2.AsyncClient(headers=headers, timeout=30) as http:
                transport = streamable_http_client(url, http_client=http)
                async with Client(transport, mode=mode, logging_callback=worker.heard) as client:
                    await worker.serve(client, mode)
        except Exception as error:
            print(repr(error), file=sys.stderr, flush=True)
        await asyncio.sleep(0.2)


asyncio.run(main(*sys.argv[1:]))
