"""An ACP agent that behaves as badly as it is told to: `acp_agent.py WAY`, standard library only.

What it does in a turn is the prompt's text: a JSON list of messages to write, each a JSON object (an update, unless it
has a `method` or an `id`), a string (written as it is) or one of the acts in `Agent.act`.
"""

import json
import os
import signal
import sys
import time
from typing import Any


class Agent:
    def __init__(self, way: str) -> None:
        self.way = way
        self.prompt_id: Any = None
        self.methods: list[str] = []

    def write(self, line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def send(self, **frame: Any) -> None:
        self.write(json.dumps({"jsonrpc": "2.0", **frame}))

    def update(self, update: Any) -> None:
        self.send(method="session/update", params={"sessionId": "s1", "update": update})

    def say(self, text: str) -> None:
        self.update({"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": text}})

    def run(self) -> None:
        if self.way == "dies-at-start":
            print("no licence found, key " + os.environ.get("KEY", ""), file=sys.stderr, flush=True)
            sys.exit(7)
        if self.way == "ignores-everything":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for line in sys.stdin:
            self.receive(json.loads(line))
        while self.way == "ignores-everything":
            time.sleep(1)

    def receive(self, message: dict[str, Any]) -> None:
        method, request_id, params = message.get("method"), message.get("id"), message.get("params") or {}
        self.methods.append(str(method).removeprefix("session/"))
        if method is None:
            self.update({"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": told(message)}})
            self.send(id=self.prompt_id, result={"stopReason": "end_turn"})
        elif self.way == "silent-at " + method:
            return
        elif self.way == "refuses " + method:
            self.send(id=request_id, error={"code": -32000, "message": "Authentication required", "data": "log in"})
        elif method == "initialize":
            version = 2 if self.way == "from-the-future" else 1
            capabilities = {"loadSession": True, "sessionCapabilities": {} if self.way == "loads" else {"resume": {}}}
            self.send(id=request_id, result={"protocolVersion": version, "agentCapabilities": capabilities})
        elif method == "session/new":
            self.update({"sessionUpdate": "available_commands_update", "availableCommands": []})
            key = json.dumps(params["mcpServers"][0]["env"])
            result = {} if self.way == "nameless" else {"sessionId": "s1", "modes": {"key": key}}
            self.send(id=request_id, result=result)
        elif method in ("session/load", "session/resume"):
            if method == "session/load":
                self.say("what was said long ago")
            self.send(id=request_id, result={})
        elif method == "session/set_mode":
            self.send(id=request_id, result={})
        elif method == "session/prompt":
            self.prompt_id = request_id
            self.turn(params["prompt"][0]["text"])
        elif method == "session/cancel" and self.way not in ("ignores-cancel", "ignores-everything"):
            self.say("stopping")
            self.send(id=self.prompt_id, result={"stopReason": "cancelled"})

    def turn(self, text: str) -> None:
        for item in json.loads(text):
            if isinstance(item, str):
                self.write(item)
            elif "act" in item:
                self.act(item["act"], item)
            elif "method" in item or "id" in item:
                self.send(**item)
            else:
                self.update(item)

    def act(self, name: str, item: dict[str, Any]) -> None:
        if name == "say":
            self.say(item["text"])
        elif name == "say-methods":
            self.say(" ".join(self.methods))
        elif name == "answer":
            self.send(id=self.prompt_id, result=item["result"])
        elif name == "refuse":
            self.send(id=self.prompt_id, error=item["error"])
        elif name == "flood":
            for number in range(item["n"]):
                self.say(f"{number} ")
        elif name == "long":
            self.write("x" * item["n"])
        elif name == "long-say":
            self.say("y" * item["n"])
        elif name == "ask":
            for number in range(item["n"]):
                self.send(id=f"{number}".ljust(item["size"], "i"), method="fs/read_text_file", params={})
        elif name == "trickle":
            for _ in range(item["n"]):
                time.sleep(item["s"])
                sys.stdout.write("z")
                sys.stdout.flush()
            self.write("")
        elif name == "long-key":
            sys.stdout.write("x" * item["n"] + os.environ["KEY"] + "x" * item["n"] + item.get("end", ""))
            sys.stdout.flush()
        elif name == "half-a-line":
            sys.stdout.write('{"jsonrpc": "2.0", "meth')
            sys.stdout.flush()
        elif name == "die":
            print("Segmentation fault", file=sys.stderr, flush=True)
            os._exit(item.get("code", 9))


def told(answer: dict[str, Any]) -> str:
    """What the host answered, for a test to see."""
    return json.dumps(answer.get("result", answer.get("error")))


if __name__ == "__main__":
    Agent(sys.argv[1]).run()
