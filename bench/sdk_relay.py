"""The same relay, written straightforwardly on the `mcp` SDK's server: a peer for `bench/relay.py`.

It lends the caller's one tool to one client on a unix socket and keeps everything in memory: no rows, no checks, no
restarts. Run by the interpreter of the environment `mcp-2.3` (tests/kit/peer_environments.py):

    python bench/sdk_relay.py SOCKET      prints its port
"""
# pyright: basic, reportMissingImports=false

import asyncio
import json
import socket
import sys
import uuid
import warnings
from typing import Any

import uvicorn
from mcp import types
from mcp.server.lowlevel.server import Server

SESSION = "gogol_20260101_000000_0123abcd"
warnings.simplefilter("ignore")  # logging is deprecated in the newest revision, and the only push there is


class Relay:
    def __init__(self) -> None:
        self.caller: Any = None
        self.tools: list[dict[str, Any]] = []
        self.waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.server = Server("sdk-relay", version="0", on_list_tools=self.list_tools, on_call_tool=self.call_tool)

    async def list_tools(self, ctx: Any, params: Any) -> types.ListToolsResult:
        schema = {"type": "object"}
        names = ("session_message", "caller_tool_response")
        return types.ListToolsResult(
            tools=[types.Tool(name=name, description=name, input_schema=schema) for name in names]
        )

    async def call_tool(self, ctx: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        arguments = params.arguments or {}
        if params.name == "session_message":
            self.caller = ctx.session
            context = arguments["context"]
            self.tools = [
                tool | {"box_name": f"{context['caller_id']}_{tool['name']}"} for tool in context["caller_tools"]
            ]
            return _result({"session_id": SESSION, "spawned": True, "last_event_index": -1})
        if params.name != "caller_tool_response":
            return types.CallToolResult(content=[], is_error=True)
        future = self.waiting.pop(arguments["request_id"], None)
        if future is None:
            return _result({"accepted": False, "reason": "unknown"})
        future.set_result(arguments)
        return _result({"accepted": True})

    async def serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            frame = json.loads(line)
            if frame["method"] == "attach":
                _write(writer, {"id": frame["id"], "result": self.attached()})
                config = {"caller_id": "ant", "tools": self.tools}
                _write(writer, {"method": "caller_tools_config", "type": "caller_tools_config", "params": config})
            elif frame["method"] == "caller_tool":
                task = asyncio.get_running_loop().create_task(self.relay(frame, writer))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)

    async def relay(self, frame: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        request_id = str(uuid.uuid4())
        future = self.waiting[request_id] = asyncio.get_running_loop().create_future()
        event = {
            "type": "caller_tool_request",
            "session_id": SESSION,
            "request_id": request_id,
            "tool": frame["params"]["tool"],
            "arguments": frame["params"]["arguments"],
            "deadline_at": 1767225660.123456,
            "redelivery": 0,
        }
        await self.caller.send_log_message("info", event, logger="oubliette.session")
        try:
            answer = await asyncio.wait_for(future, 60)
        except TimeoutError:
            _write(writer, {"id": frame["id"], "error": {"code": -32000, "message": "timeout"}})
            return
        _write(writer, {"id": frame["id"], "result": answer.get("result")})

    def attached(self) -> dict[str, Any]:
        return {
            "session_id": SESSION,
            "depth": 0,
            "protocol": 1,
            "limits": {"frame_bytes": 8388608, "pending_calls": 64},
            "call_timeout_s": 60.0,
            "call_timeout_max_s": 600.0,
            "margin_s": 15.0,
            "caller_tools": True,
        }


def _result(value: dict[str, Any]) -> types.CallToolResult:
    content = [types.TextContent(type="text", text=json.dumps(value))]
    return types.CallToolResult(content=content, structured_content=value)


def _write(writer: asyncio.StreamWriter, frame: dict[str, Any]) -> None:
    writer.write(json.dumps({"jsonrpc": "2.0"} | frame).encode() + b"\n")


async def main(path: str) -> None:
    relay = Relay()
    door = await asyncio.start_unix_server(relay.serve_client, path, limit=8 * 1024 * 1024)
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    app = relay.server.streamable_http_app(streamable_http_path="/mcp")
    config = uvicorn.Config(app, log_level="warning", access_log=False, loop="uvloop", http="httptools")
    async with door:
        await uvicorn.Server(config).serve([listening])


if __name__ == "__main__":
    import uvloop

    uvloop.run(main(sys.argv[1]))
