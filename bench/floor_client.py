"""The floor's client: standard library only, as what runs in a box must be. See floor.py."""

import json
import os
import select
import socket
import sys


def client(path: str) -> None:
    link = socket.socket(socket.AF_UNIX)
    link.connect(path)
    link_fd = link.fileno()
    loads, dumps = json.loads, json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    poller = select.poll()
    poller.register(0, select.POLLIN)
    poller.register(link_fd, select.POLLIN)
    from_agent = from_server = b""
    while True:
        for fd, _ in poller.poll():
            data = os.read(fd, 1 << 18)
            if not data:
                return
            out: list[str] = []
            if fd == 0:
                *lines, from_agent = (from_agent + data).split(b"\n")
                for line in lines:
                    call = loads(line)
                    params = call["params"]
                    sent = {
                        "tool": params["name"][4:],
                        "arguments": params["arguments"],
                        "call_key": os.urandom(16).hex(),
                    }
                    out.append(dumps({"jsonrpc": "2.0", "id": call["id"], "method": "caller_tool", "params": sent}))
                os.write(link_fd, ("\n".join(out) + "\n").encode())
            else:
                *lines, from_server = (from_server + data).split(b"\n")
                for line in lines:
                    answer = loads(line)
                    value = answer["result"]
                    result = {
                        "content": [{"type": "text", "text": dumps(value)}],
                        "structuredContent": value,
                        "isError": False,
                    }
                    out.append(dumps({"jsonrpc": "2.0", "id": answer["id"], "result": result}))
                os.write(1, ("\n".join(out) + "\n").encode())


if __name__ == "__main__":
    client(sys.argv[1])
