"""A project of its own on a real server, with everything that a test of the whole needs: callers, sessions, boxes."""

import json
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from oubliette.server.containers.inside import pack
from tests.kit import box_client
from tests.kit.box_client import BoxClient
from tests.kit.mcp_caller import Era, McpCaller
from tests.kit.mcp_host import McpHost, hosted
from tests.kit.server import ServerProcess

_numbers = count(1)

SEND_RESPONSE = {
    "name": "send_response",
    "description": "Send a message via Signal",
    "inputSchema": {
        "type": "object",
        "properties": {
            "message": {"type": "string", "description": "Message to send"},
            "recipients": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["message"],
    },
}
GET_MEMORY = {"name": "get_memory", "description": "Retrieve stored memories for context"}
ANY = {"name": "any", "description": "Takes anything"}
TOOLS = [SEND_RESPONSE, GET_MEMORY, ANY]

Plan = Sequence[Mapping[str, Any]]


def planned(plan: Plan) -> str:
    return f"Do this. <<plan {json.dumps(plan)}>>"


def lent(tools: Sequence[Mapping[str, Any]] = TOOLS, caller_id: str = "ant", **more: Any) -> dict[str, Any]:
    """A `context` that lends tools, as the seeds write it."""
    return {"caller_id": caller_id, "caller_tools": list(tools), **more}


@dataclass(frozen=True)
class Turn:
    """A turn that is over, by the log: `events` is the whole log up to there, the rest is of this turn."""

    number: int
    events: list[dict[str, Any]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Events of a type; of those that belong to a turn, this turn's."""
        return [event for event in self.events if event["type"] == kind and event.get("turn") in (None, self.number)]

    @property
    def completion(self) -> dict[str, Any]:
        (completion,) = self.of("completion")
        return completion

    @property
    def failure(self) -> str:
        """What its error events say; empty for a turn that went as planned."""
        return "; ".join(event["message"] for event in self.of("error"))

    @property
    def text(self) -> str:
        return self.completion["text"]

    @property
    def results(self) -> list[dict[str, Any]]:
        return self.of("tool_result")

    @property
    def failed(self) -> list[bool]:
        """Of each tool result whether it was an error."""
        return [event.get("is_error", False) for event in self.results]

    def worked(self) -> "Turn":
        assert self.failure == ""
        assert self.completion["stop_reason"] == "end_turn"
        return self


class Scene:
    def __init__(self, server: ServerProcess, project_id: str) -> None:
        self.server = server
        self.project_id = project_id

    def caller(self, token: str | None = None, *, era: Era = "legacy", **how: Any) -> McpCaller:
        return McpCaller(self.server.url, token or self.server.token, era=era, **how)

    async def token(self, scope: str, **options: Any) -> dict[str, Any]:
        """A new token: `token` is its secret, `id` its public id."""
        name = f"{scope} {next(_numbers)} {self.project_id}"
        return await self.server.ask("token_create", name=name, scope=scope, **options)

    async def start(self, caller: McpCaller, plan: Plan, **more: Any) -> str:
        """Start a session with a plan; its id."""
        more.setdefault("autonomy", "high")
        told = await caller.call("session_spawn", project_id=self.project_id, message=planned(plan), **more)
        return told["session_id"]

    async def rest(self, caller: McpCaller, **more: Any) -> str:
        """A session whose droid has nothing to do any more: its box stands open for the test. Its id."""
        session_id = await self.start(caller, [{"say": "ready"}], **more)
        (await self.turn(session_id)).worked()
        return session_id

    async def more(self, caller: McpCaller, session_id: str, plan: Plan, **more: Any) -> dict[str, Any]:
        """Another message for a session."""
        return await caller.call("session_message", session_id=session_id, message=planned(plan), **more)

    async def turn(self, session_id: str, number: int = 1) -> Turn:
        """Follow the log by a door that is nobody's presence, until this turn is over."""
        events: list[dict[str, Any]] = []
        while True:
            since = events[-1]["index"] if events else -1
            told = await self.server.ask("session_events", session_id=session_id, since_index=since, wait_seconds=30)
            events += told["events"]
            for event in told["events"]:
                if event["type"] == "completion" and event["turn"] == number:
                    return Turn(number, events)
            # An event too large for an answer that waited comes with the next page: an empty one with more behind it.
            assert told["events"] or told["more"], f"turn {number} does not end ({told['status']}): {events[-3:]}"

    async def until(self, session_id: str, kind: str, **fields: Any) -> dict[str, Any]:
        """The first event of this type with these fields, by the same door."""
        since = -1
        while True:
            told = await self.server.ask("session_events", session_id=session_id, since_index=since, wait_seconds=30)
            for event in told["events"]:
                since = event["index"]
                if event["type"] == kind and all(event.get(name) == value for name, value in fields.items()):
                    return event
            assert told["events"] or told["more"], f"no {kind} {fields} comes"

    async def events(self, session_id: str) -> list[dict[str, Any]]:
        """The whole log as it is now."""
        events: list[dict[str, Any]] = []
        while True:
            since = events[-1]["index"] if events else -1
            told = await self.server.ask("session_events", session_id=session_id, since_index=since, max_events=500)
            events += told["events"]
            if not told["more"]:
                return events

    def folder(self, session_id: str) -> Path:
        return box_client.box_folder(self.server.home, session_id)

    async def workspace(self, session_id: str) -> Path:
        """Where the session's /workspace lies on this host."""
        shown = await self.server.ask("session_get", session_id=session_id)
        return self.server.home / "projects" / shown["project_id"] / "workspaces" / shown["workspace_id"]

    def box(self, session_id: str, **params: Any) -> AbstractAsyncContextManager[BoxClient]:
        """A client on this session's relay socket, let in."""
        return box_client.attached(self.folder(session_id), **params)

    def door(self, session_id: str) -> AbstractAsyncContextManager[BoxClient]:
        """The same before it said who it is."""
        return box_client.connected(self.folder(session_id))

    @asynccontextmanager
    async def client(self, session_id: str, *, era: Era = "legacy", **env: str) -> AsyncGenerator[McpHost]:
        """The real client on this session's real socket, with the test as its agent."""
        program = pack(self.server.home.parent / "program")
        argv = [sys.executable, "-I", "-S", str(program), "client"]
        # A unix socket's address is short; this folder may lie deep.
        with tempfile.TemporaryDirectory(prefix="oub") as short:
            link = Path(short) / "mcp"
            link.symlink_to(self.folder(session_id) / "mcp")
            told = {"OUBLIETTE_SOCKET": str(link / "relay.sock"), **env}
            async with hosted(argv, told, era=era) as host:
                yield host

    async def end(self) -> None:
        live = ["starting", "idle", "running"]
        told = await self.server.ask("session_list", project_id=self.project_id, status=live, limit=200)
        for session in told["sessions"]:
            await self.server.ask("session_end", session_id=session["session_id"])


@asynccontextmanager
async def scene(server: ServerProcess) -> AsyncGenerator[Scene]:
    """A project whose sessions are gone afterwards."""
    project = await server.ask("project_create", name=f"scene {next(_numbers)}")
    made = Scene(server, project["id"])
    try:
        yield made
    finally:
        await made.end()
