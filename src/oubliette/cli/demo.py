"""`oubliette demo`: watch a droid in a box call its caller's tools, each step checked from the outside.

Three parties, as in real use: a server in a process of its own with a home that is made for this and removed again, a
caller (this process) that lends two functions, and the built-in droid in a box, which follows a plan instead of
thinking. Nothing needs a key, a network or an answer.
"""

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oubliette.caller.caller import Caller
from oubliette.caller.errors import CallerError, NotConfigured
from oubliette.caller.session import LoggedEvent
from oubliette.wire.events import Completion, Delta, Message, Plan, ToolCall, ToolResult, UserMessage

WHOLE_S = 55.0
START_S = 20.0
STOP_S = 10.0
WIDTH = 118
MADE = "made by a droid"
NOTE = "written in the box"


class Failed(Exception):
    """A step did not do what it was said to do."""


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    token: str
    pid: int
    home: Path
    port: int


def demo() -> int:
    """Watch a droid in a box call its caller's tools: under a minute, no key, no network, no questions."""
    folder = Path(tempfile.mkdtemp(prefix="oubliette-demo-"))
    began = time.monotonic()
    try:
        asyncio.run(_demo(folder))
    except NotConfigured as failure:
        _fail(f"no box can be made here: {failure.message}")
        return 1
    except (Failed, CallerError, TimeoutError) as failure:
        _fail(str(failure) or "it took too long", _last_lines(folder / "server.log"))
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    _prove(not folder.exists(), f"{folder} is gone")
    print(f"\nEverything worked, in {time.monotonic() - began:.1f} seconds. Next: README.md, `./run up`.")
    return 0


async def _demo(folder: Path) -> None:
    async with asyncio.timeout(WHOLE_S):
        _step("A server, in a process and a home of its own")
        async with _server(folder) as server:
            _say(f"process {server.pid} listens on {server.url}; its home is {server.home}")
            async with Caller(server.url, server.token, caller_id="ant") as caller:
                await _lend(caller, server)
            await asyncio.to_thread(_check_boxes, server.home)
        _step("The server is stopped and its home removed")
        _prove(not _answers(server.port), f"nothing listens on port {server.port} any more")


async def _lend(caller: Caller, server: Server) -> None:
    ran: list[tuple[int, str]] = []

    @caller.tool
    def send_response(message: str) -> dict[str, Any]:
        """Send a message to the person who asked."""
        ran.append((os.getpid(), message))
        return {"sent": True, "by_process": os.getpid()}

    @caller.tool
    async def find_person(name: str) -> str:
        """Find somebody's address."""
        raise LookupError(f"nobody here is called {name}")

    _step(f"A caller, this process ({os.getpid()}), lends two functions: send_response and find_person")
    project = await caller.call("project_create", name="demo")
    _say(f"project {project['id']}")

    key = await caller.call("token_create", name="for the demo's droid", scope="write")
    _say("a key for the droid, of scope write: with it the platform's own tools are the droid's, too")

    _step("A session: the built-in droid, in a box without network, gets a plan")
    session = await caller.start(project["id"], _prompt(server), autonomy="high", oubliette_api_key=key["token"])
    _say(f"session {session.id}; every event of it, as the log has them:")
    seen: list[LoggedEvent] = []
    async for logged in session.events():
        _show(logged)
        seen.append(logged)
        if logged.type == "completion":
            await session.end()

    _step("What really happened, seen from outside")
    _check_log(seen)
    _check_tools(seen, ran)
    projects = await caller.call("project_list", name_contains=MADE)
    _prove([one["name"] for one in projects["projects"]] == [MADE], f"the project {MADE!r} exists: the droid made it")
    _check_isolation(seen, server)
    shown = await session.get()
    written = server.home / "projects" / project["id"] / "workspaces" / shown["workspace_id"] / "note.txt"
    _prove(
        written.is_file() and written.read_text() == NOTE + "\n",
        f"what the droid wrote to /workspace/note.txt lies in {written.relative_to(server.home)}",
    )
    _prove(shown["status"] == "completed", "the session is over")
    held = await asyncio.to_thread(_holds, server.home.parent, key["token"])
    _prove(not held, "the droid's key is in no file, no log, no event")
    await caller.call("token_revoke", token_id=key["id"])


def _prompt(server: Server) -> str:
    """The plan: what a thinking agent would decide by itself."""
    look = (
        f"for place in {' '.join(map(str, _hidden(server)))}; do"
        " if [ -e $place ]; then echo there: $place; else echo absent: $place; fi; done;"
        " if touch /mcp/mine 2>/dev/null; then echo writable: /mcp; else echo read-only: /mcp; fi;"
        " env | grep -q KEY && echo the environment of commands holds a key; readlink /proc/self/ns/net"
    )
    connect = (
        f"if bash -c 'exec 3<>/dev/tcp/127.0.0.1/{server.port}' 2>/dev/null; then echo connected;"
        " else echo refused; fi;"
        " tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '"
    )
    worked = {"is_error": False}
    failed = {"is_error": True, "contains": "nobody here is called Bob"}
    plan: list[dict[str, Any]] = [
        {"list": True, "expect": {"contains": "ant_send_response"}},
        {"say": "My tools: $tools"},
        {"tool": "ant_send_response", "args": {"message": "Hello from the box"}, "expect": worked},
        {"say": "The caller said: $last"},
        {
            "tool": "ant_find_person",
            "args": {"name": "Bob"},
            "expect": failed | {"contains": "nobody here is called Bob"},
        },
        {"say": "That failed, and I go on: $last"},
        {"tool": "oubliette_project_create", "args": {"name": MADE}, "expect": worked},
        {"sh": f"echo {NOTE} > /workspace/note.txt && cat /workspace/note.txt", "expect": worked},
        {"sh": look, "expect": {"lacks": "there:"}},
        {"sh": connect, "expect": {"contains": "refused"}},
        {"say": "Done."},
    ]
    return f"Use your tools, and try to get out. <<plan {json.dumps(plan)}>>"


# What the droid says of itself is its word: each of these looks at what the server stored, or at this machine.


def _check_log(seen: list[LoggedEvent]) -> None:
    _prove([one.index for one in seen] == list(range(len(seen))), f"the log has {len(seen)} events, dense from 0")
    ends = [one.event for one in seen if isinstance(one.event, Completion)]
    _prove(len(ends) == 1 and ends[0].stop_reason == "end_turn", "the turn ended by itself, every step as planned")


def _check_tools(seen: list[LoggedEvent], ran: list[tuple[int, str]]) -> None:
    said = " ".join(one.event.text for one in seen if isinstance(one.event, Message))
    names = ("ant_send_response", "ant_find_person", "oubliette_project_create")
    _prove(all(name in said for name in names), f"the droid's list had {', '.join(names)}")
    _prove(ran == [(os.getpid(), "Hello from the box")], f"send_response ran once, here in process {os.getpid()}")
    asked = [one.fields["tool"] for one in seen if one.type == "caller_tool_request"]
    _prove(asked == ["send_response", "find_person"], "the server relayed two calls, by the names as declared")
    results = _results(seen)
    _prove(results["find_person"].is_error, "the droid saw the failed call as an error, and went on")
    _prove(not results["project_create"].is_error, "the platform's own tool took the droid's key")


def _check_isolation(seen: list[LoggedEvent], server: Server) -> None:
    outputs = [json.dumps(one.event.content) for one in seen if isinstance(one.event, ToolResult)]
    tried = next((text for text in outputs if "absent: " in text), "")
    places = _hidden(server)
    _prove(
        all(f"absent: {place}" in tried for place in places) and all(place.exists() for place in places),
        f"{', '.join(map(str, places))} exist here and not in the box",
    )
    _prove("read-only: /mcp" in tried, "the folder of the box's one socket is read-only in there")
    _prove("holds a key" not in tried, "the key is not in the environment of the droid's commands")
    namespace = str(Path("/proc/self/ns/net").readlink())
    _prove("net:[" in tried and namespace not in tried, f"the box's network is not ours ({namespace})")
    _prove(
        _answers(server.port) and any("refused" in text and "lo" in text for text in outputs),
        f"port {server.port} answers here; in the box nothing does, and there is no interface but lo",
    )


def _hidden(server: Server) -> list[Path]:
    """What is on this machine and not in a box: the server's home with every session's folders, ours, the system's."""
    places = {server.home, Path.home(), Path("/root"), Path("/run")} - {Path("/")}
    return sorted(place for place in places if place == server.home or place.exists())


def _check_boxes(home: Path) -> None:
    left = [place.name for place in (home / "boxes").iterdir() if place.is_dir()] if (home / "boxes").exists() else []
    _prove(not left, "its box is gone: no folder is left")
    _prove(not _processes_of(home), "no process is left of it")


def _holds(folder: Path, secret: str) -> bool:
    """Whether the secret stands in any file below, whatever kind of file."""
    files = (Path(at) / name for at, _, names in os.walk(folder) for name in names)
    return any(file.is_file() and secret.encode() in file.read_bytes() for file in files)


def _results(seen: list[LoggedEvent]) -> Mapping[str, ToolResult]:
    """The results of calls of tools, by the tool's name without what agents put before it."""
    calls = {one.event.tool_call_id: one.event.tool_name or "" for one in seen if isinstance(one.event, ToolCall)}
    found: dict[str, ToolResult] = {}
    for one in seen:
        if isinstance(one.event, ToolResult):
            name = one.event.tool_name or calls.get(one.event.tool_call_id, "")
            for known in ("send_response", "find_person", "project_create"):
                if name.endswith(known):
                    found[known] = one.event
    return found


@asynccontextmanager
async def _server(folder: Path) -> AsyncGenerator[Server]:
    """A server as `oubliette up` starts it, with nothing of this shell's settings."""
    home = folder / "home"
    start = "import sys; from oubliette.cli.main import main; sys.argv[0] = 'oubliette'; main()"
    flags = ["up", "--home", str(home), "--port", "0", "--runtime", "bubblewrap", "--json"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OUBLIETTE_")}
    with (folder / "server.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-c", start, *flags), stdout=-1, stderr=log, env=environment, start_new_session=True
        )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            line = await process.stdout.readline()
        if not line:
            raise Failed(f"the server did not start (exit {await process.wait()})")
        told = json.loads(line)
        port = int(told["url"].rpartition(":")[2].partition("/")[0])
        yield Server(told["url"], told["first_token"], process.pid, home, port)
    finally:
        await _stop(process, home)


async def _stop(process: asyncio.subprocess.Process, home: Path) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
    # Where a step failed the box still waits for its server: nobody will come back to it.
    for pid in _processes_of(home):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _processes_of(home: Path) -> list[int]:
    """Processes of the boxes of this home, known by the paths in their command lines."""
    found: list[int] = []
    mark = os.fsencode(home / "boxes")
    for place in Path("/proc").iterdir():
        try:
            if place.name.isdigit() and mark in (place / "cmdline").read_bytes():
                found.append(int(place.name))
        except OSError:
            continue
    return found


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2):
            return True
    except OSError:
        return False


def _last_lines(path: Path) -> str:
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-15:])
    except OSError:
        return ""


_steps = iter(range(1, 100))


def _step(title: str) -> None:
    print(f"\n{next(_steps)}. {title}", flush=True)


def _say(text: str) -> None:
    print(f"   {text}", flush=True)


def _prove(holds: bool, claim: str) -> None:
    if not holds:
        raise Failed(f"this does not hold: {claim}")
    _say(f"ok  {claim}")


def _fail(why: str, log: str = "") -> None:
    print(f"\nThe demo failed: {why}", file=sys.stderr)
    if log:
        print(f"\nThe server's last words:\n{log}", file=sys.stderr)


def _show(logged: LoggedEvent) -> None:
    line = f"   {logged.index:4}  {logged.type:21}  {_told(logged)}"
    print(line if len(line) <= WIDTH else line[: WIDTH - 1] + "…", flush=True)


def _told(logged: LoggedEvent) -> str:
    """What a person wants to read of an event; everything else is its fields."""
    event, fields = logged.event, logged.fields
    if isinstance(event, Plan):
        states = [entry["status"] for entry in event.entries]
        now = next((entry["content"] for entry in event.entries if entry["status"] == "in_progress"), "")
        return f"{states.count('completed')} of {len(states)} steps done" + (f"; now: {now}" if now else "")
    if isinstance(event, Message | Delta | UserMessage):
        return " ".join(event.text.split())
    if isinstance(event, ToolCall):
        return f"{event.tool_call_id}: {event.tool_name} {_json(event.arguments)}"
    if isinstance(event, ToolResult):
        return f"{event.tool_call_id}: {'failed ' if event.is_error else ''}{_json(event.content)}"
    if isinstance(event, Completion):
        return f"turn {event.turn}: {event.stop_reason} after {event.duration_ms} ms"
    known = ("index", "at", "session_id", "type", "deadline_at", "redelivery")
    return _json({name: value for name, value in fields.items() if name not in known})


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
