"""What is measured side by side: the raw floor, ours, and the same on the SDK's server."""

import json
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.kit.peer_environments import python_peer

from bench.work import Agent, Contestant
from oubliette.server.containers.inside import pack

HERE = Path(__file__).parent
TOOL = "ant_send_response"
PROGRAM = [sys.executable, "-c", "from oubliette.cli.main import main; main()"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("OUBLIETTE_")}


@contextmanager
def running(argv: Sequence[str | Path], log: Path, *, told: str = "") -> Generator[tuple[int, str]]:
    """A process and the first line that it prints; it ends with its stdin, or is ended."""
    with log.open("wb") as err:
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, env=ENVIRONMENT, cwd=HERE.parent
        )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(told.encode())
        process.stdin.flush()
        line = process.stdout.readline().decode().strip()
        if not line:
            raise RuntimeError(f"{argv} did not start:\n{log.read_text()[-4000:]}")
        yield process.pid, line
    finally:
        process.stdin.close()
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


@contextmanager
def agent(argv: Sequence[str], env: dict[str, str] | None = None) -> Generator[Agent]:
    started = Agent(argv, env)
    try:
        yield started
    finally:
        started.close()


@contextmanager
def floor(folder: Path) -> Generator[Contestant]:
    floor_py = str(HERE / "floor.py")
    door = str(folder / "floor.sock")
    with ExitStack() as open_:
        server, port = open_.enter_context(running([sys.executable, floor_py, "server", door], folder / "floor.log"))
        caller, _ = open_.enter_context(running([sys.executable, floor_py, "caller", port], folder / "floor.log"))
        client = open_.enter_context(agent([sys.executable, "-I", "-S", str(HERE / "floor_client.py"), door]))
        yield Contestant("floor", client, TOOL, {"client": client.pid, "server": server, "caller": caller})


def lender(url: str, token: str, project: str, message: str, log: Path) -> Any:
    return running([sys.executable, "-m", "bench.lender", url, project, message], log, told=token + "\n")


def client(program: Path, door: Path) -> Any:
    """The client of the box, as a box starts it, but outside one: the agent's end of its stdio is ours."""
    environment = {"PATH": os.defpath, "OUBLIETTE_SOCKET": str(door)}
    return agent([sys.executable, "-I", "-S", str(program), "client"], environment)


@contextmanager
def ours(folder: Path, *flags: str) -> Generator[Contestant]:
    """A server as `oubliette up` runs it, a session in a box, and one more client on that session's socket."""
    home = folder / "home"
    up = [*PROGRAM, "up", "--home", str(home), "--port", "0", "--json", *flags]
    with ExitStack() as open_:
        server, line = open_.enter_context(running(up, folder / "server.log"))
        told = json.loads(line)
        project = operation(home, "project_create", name="bench")["id"]
        caller, session = open_.enter_context(
            lender(told["url"], told["first_token"], project, '<<plan [{"say": "ready"}]>>', folder / "caller.log")
        )
        open_.callback(operation, home, "session_end", session_id=session)
        operation(home, "session_watch", session_id=session, wait_seconds=10)
        (door,) = (home / "boxes").glob("*/mcp/relay.sock")
        started = open_.enter_context(client(pack(folder / "program"), door))
        introduce(started)
        yield Contestant("ours", started, TOOL, {"client": started.pid, "server": server, "caller": caller})


@contextmanager
def sdk(folder: Path) -> Generator[Contestant]:
    """The same work on the `mcp` SDK's server, with our client and our caller."""
    place = folder / "sdk"
    place.mkdir()
    (place / "key").write_text("key")
    door = place / "relay.sock"
    relay = [python_peer("mcp-2.3"), HERE / "sdk_relay.py", door]
    with ExitStack() as open_:
        server, port = open_.enter_context(running(relay, folder / "sdk.log"))
        url = f"http://127.0.0.1:{port}/mcp"
        caller, _ = open_.enter_context(lender(url, "none", str(uuid.uuid4()), "go", folder / "sdk-caller.log"))
        started = open_.enter_context(client(pack(folder / "program"), door))
        introduce(started)
        yield Contestant("mcp SDK", started, TOOL, {"client": started.pid, "server": server, "caller": caller})


def introduce(started: Agent) -> None:
    """What an agent says before it calls."""
    about = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "bench", "version": "0"}}
    started.ask("initialize", about)
    started.tell("notifications/initialized")
    names = [tool["name"] for tool in started.ask("tools/list", {})["tools"]]
    if TOOL not in names:
        raise RuntimeError(f"the caller's tool is not offered, only {', '.join(names)}")


def operation(home: Path, word: str, /, **params: Any) -> dict[str, Any]:
    """An operation of the server, by its local door."""
    with socket.socket(socket.AF_UNIX) as door:
        door.settimeout(30)
        door.connect(str(home / "admin.sock"))
        request = {"jsonrpc": "2.0", "id": 1, "method": word, "params": params}
        door.sendall(json.dumps(request).encode() + b"\n")
        with door.makefile("rb") as answers:
            told = json.loads(answers.readline())
    if "error" in told:
        raise RuntimeError(f"{word}: {told['error']}")
    return told["result"]
