"""An MCP server over stdio for tests of agents: standard library only, run as a program of its own.

`tools_server.py [--log FILE] [--way WAY]`; every message that it receives goes to the log, one JSON object a line.
Ways to misbehave: `never-answers`, `dies`, `never-lists`, `noisy`, `dies-on-call`.
"""

import argparse
import json
import os
import sys
import time
from typing import Any

ECHO = {"name": "ant_echo", "description": "Says it back.", "inputSchema": {"type": "object"}}
TOOLS: list[dict[str, Any]] = [
    ECHO,
    {"name": "ant_fails", "inputSchema": {"type": "object"}},
    {"name": "ant_refuses", "inputSchema": {"type": "object"}},
    {"name": "ant_never", "inputSchema": {"type": "object"}},
    {"name": "ant_progresses", "inputSchema": {"type": "object"}},
    {"name": "ant_meet", "description": "Answers when `n` calls are here.", "inputSchema": {"type": "object"}},
    {"name": "ant_structured", "inputSchema": {"type": "object"}},
    {"name": "ant_environment", "inputSchema": {"type": "object"}},
    {"name": "ant_declare", "description": "Adds a tool and says so.", "inputSchema": {"type": "object"}},
    {"name": "ant_blob", "description": "A text of `n` characters.", "inputSchema": {"type": "object"}},
]


class ToolsServer:
    def __init__(self, way: str, log: str | None) -> None:
        self.way = way
        self.log = log
        self.tools = list(TOOLS)
        self.waiting: list[Any] = []

    def send(self, frame: dict[str, Any]) -> None:
        print(json.dumps({"jsonrpc": "2.0", **frame}), flush=True)

    def text(self, request_id: Any, text: str, *, is_error: bool = False, **more: Any) -> None:
        content = [{"type": "text", "text": text}]
        self.send({"id": request_id, "result": {"content": content, "isError": is_error, **more}})

    def run(self) -> None:
        if self.way == "dies":
            sys.exit(3)
        for line in sys.stdin:
            message = json.loads(line)
            if self.log:
                with open(self.log, "a") as file:  # noqa: PTH123
                    file.write(line)
            if self.way == "never-answers":
                continue
            if self.way == "noisy":
                print("INFO starting up, not JSON", flush=True)
            self.receive(message.get("method"), message.get("id"), message.get("params") or {})

    def receive(self, method: str | None, request_id: Any, params: dict[str, Any]) -> None:
        if method == "initialize":
            capabilities = {"tools": {"listChanged": True}}
            info = {"name": "tools", "version": "1"}
            self.send(
                {
                    "id": request_id,
                    "result": {"protocolVersion": "2025-11-25", "capabilities": capabilities, "serverInfo": info},
                }
            )
        elif method == "tools/list" and self.way != "never-lists":
            # Two pages, so that a client that reads only the first is found out.
            first = "cursor" not in params
            page = self.tools[:1] if first else self.tools[1:]
            self.send({"id": request_id, "result": {"tools": page, **({"nextCursor": "rest"} if first else {})}})
        elif method == "tools/call":
            arguments = {**(params.get("arguments") or {})}
            if params["name"] == "ant_progresses":
                arguments["_meta"] = params["_meta"]
            self.call(request_id, params["name"], arguments)

    def call(self, request_id: Any, name: str, arguments: dict[str, Any]) -> None:
        if self.way == "dies-on-call":
            sys.exit(4)
        if name == "ant_progresses":
            token = arguments["_meta"]["progressToken"]
            for number in range(arguments.get("n", 3)):
                time.sleep(arguments.get("every_s", 0))
                self.send({"method": "notifications/progress", "params": {"progressToken": token, "progress": number}})
            self.send({"method": "notifications/progress", "params": {"progressToken": "of nobody", "progress": 1}})
            self.text(request_id, "done")
        elif name == "ant_fails":
            self.text(request_id, "the tool failed", is_error=True)
        elif name == "ant_refuses":
            self.send({"id": request_id, "error": {"code": -32602, "message": "these arguments are no good"}})
        elif name == "ant_meet":
            self.waiting.append(request_id)
            if len(self.waiting) == arguments["n"]:
                for number, waiting in enumerate(reversed(self.waiting)):
                    self.text(waiting, f"met {number}")
                self.waiting = []
        elif name == "ant_structured":
            self.text(request_id, json.dumps(arguments), structuredContent=arguments)
        elif name == "ant_environment":
            self.text(request_id, json.dumps(dict(os.environ)))
        elif name == "ant_declare":
            self.tools.append({"name": arguments["name"], "inputSchema": {"type": "object"}})
            self.send({"method": "notifications/tools/list_changed"})
            self.text(request_id, "declared")
        elif name == "ant_blob":
            self.text(request_id, "x" * arguments["n"])
        elif name != "ant_never":
            self.text(request_id, f"{name}: {json.dumps(arguments)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--log")
    parser.add_argument("--way", default="")
    parser.add_argument("program", nargs="?")  # as the packed program is told: `client`
    given = parser.parse_args()
    ToolsServer(given.way, given.log).run()
