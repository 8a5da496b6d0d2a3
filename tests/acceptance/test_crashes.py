"""Any of the parties is killed at any named commit point, and the droid's call succeeds inside its deadline.

What is shown of which point, by whose death and with whose caller, is a matrix that the tests fill as they are read.
How often the tool really ran is counted at the caller; the outcome is delivered exactly once.
"""

import asyncio
import itertools
import os
import re
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import oubliette
from oubliette import Caller
from oubliette.server.containers import host
from oubliette.server.containers.boxes import MARK
from oubliette.server.containers.folders import Folder
from oubliette.server.operations.catalogue import OPERATIONS
from tests.kit.inhabitants import Namespace, inhabitants, namespace
from tests.kit.lender import Lender, lending, working
from tests.kit.mcp_caller import McpCaller
from tests.kit.records import records
from tests.kit.scene import Scene, Turn, lent, planned, scene
from tests.kit.server import ServerProcess

# The commit points that one relayed call passes, in their order.
CALL = (
    "call:after_row",
    "call:after_commit",
    "call:announced",
    "end:after_row",
    "end:after_commit",
    "end:told",
    "answer:before_reply",
    "call:before_reply",
)
# Those of progress, and of an operation of the platform.
PROGRESS = ("progress:after_row", "progress:after_commit")
OPERATION = ("operation:after_row", "operation:after_effect", "operation:before_reply")
WORK = {
    "name": "work",
    "inputSchema": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
}
PLAN = [
    {"tool": "ant_work", "args": {"n": 7}, "expect": {"is_error": False, "equals": {"did": 7}}},
    {"say": "done: $last"},
]


# Who may be killed: the client for good, or one that comes back with its call key.
PARTIES = ("server", "client", "returning client", "caller")
# Whose caller is asked: our library, the official SDK, or lines written by hand. An operation has none.
CALLERS = ("ours", "the SDK's", "by hand")
LIBRARIES = ("ours", "the SDK's")
MATRIX: set[tuple[str, str, str]] = set()


def shows(killed: str, *callers: str, points: Sequence[str] = CALL) -> pytest.MarkDecorator:
    """Run a test at each of these points, with each of these callers where it takes several: rows of the matrix."""
    MATRIX.update(itertools.product(points, [killed], callers))
    if len(callers) == 1:
        return pytest.mark.parametrize("point", points)
    return pytest.mark.parametrize(("point", "whose"), list(itertools.product(points, callers)))


def test_every_commit_point_of_the_product_is_in_the_matrix() -> None:
    source = Path(oubliette.__file__).parent / "server"
    found = {name for path in source.rglob("*.py") for name in re.findall(r'mark\("([^"]+)"\)', path.read_text())}
    assert found == {*CALL, *PROGRESS, *OPERATION}


def test_at_every_commit_point_each_party_is_killed_with_each_caller() -> None:
    wanted = {
        *itertools.product(CALL, PARTIES, CALLERS),
        *itertools.product(PROGRESS, ("server", "client", "caller"), LIBRARIES),
        *itertools.product(OPERATION, ("server", "client", "returning client"), ["nobody's"]),
    }
    assert wanted - MATRIX == set()


@asynccontextmanager
async def stage(folder: Path, mark: str, *, client_grace_s: float = 1) -> AsyncGenerator[tuple[Scene, str]]:
    """A server with a mark, and a session at rest that may call `work`."""
    async with (
        ServerProcess(folder / "home", mark=mark, disconnect_grace_s=10, client_grace_s=client_grace_s) as server,
        scene(server) as here,
        here.caller(stream=False) as starter,
    ):
        yield here, await here.rest(starter, context=lent([WORK]))


async def begin(here: Scene, session_id: str, plan: list[dict[str, Any]] = PLAN) -> None:
    """Give the droid its turn, by a door that is nobody's presence."""
    await here.server.ask("session_message", session_id=session_id, message=planned(plan))


def delivered_once(here: Scene, session_id: str, turn: Turn, outcome: str = "answered") -> None:
    """One row, one record of the request, one end."""
    (row,) = records(here.server.home, "calls", session_id=session_id, kind="caller_tool")
    assert row["state"] == outcome
    (request,) = turn.of("caller_tool_request")
    assert request["request_id"] == row["request_id"]
    (resolved,) = turn.of("caller_tool_resolved")
    assert resolved["outcome"] == outcome
    ends = [
        one["outcome"]
        for one in records(here.server.home, "audit", target=row["request_id"])
        if one["outcome"] != "asked" and not one["outcome"].startswith("refused")
    ]
    assert ends, "its end is in the trail"
    indices = [event["index"] for event in turn.events]
    assert indices == list(range(len(indices)))


def worked_once(here: Scene, session_id: str, turn: Turn) -> None:
    turn.worked()
    assert 'done: {"did":7}' in turn.text.replace('": 7', '":7')
    calls = [event for event in turn.results if event.get("tool_name") == "ant_work" or "did" in str(event)]
    assert len(calls) == 1
    delivered_once(here, session_id, turn)


@dataclass
class Foreign:
    """A caller without a library: it runs what it has not run yet, and gives what it has as often as it is asked."""

    caller: McpCaller
    ran: list[int] = field(default_factory=list[int])
    answers: dict[str, Any] = field(default_factory=dict[str, Any])

    async def serve(self) -> None:
        while True:
            request = await self.caller.requests.get()
            if request["request_id"] not in self.answers:
                self.ran.append(request["arguments"]["n"])
                self.answers[request["request_id"]] = {"did": request["arguments"]["n"]}
            try:
                await self.caller.answer(request, self.answers[request["request_id"]])
            except (aiohttp.ClientError, ConnectionError, AssertionError):
                continue  # the server died; it will ask again, or had the answer


@asynccontextmanager
async def foreign(here: Scene, session_id: str) -> AsyncGenerator[Foreign]:
    """A foreign caller that is there for the session and answers."""
    async with here.caller() as caller, asyncio.TaskGroup() as tasks:
        await caller.call("session_events", session_id=session_id, max_events=1)
        one = Foreign(caller)
        serving = tasks.create_task(one.serve())
        try:
            yield one
        finally:
            serving.cancel()


def peer(
    whose: str, here: Scene, session_id: str, ran: Path, go: Path | None = None
) -> AbstractAsyncContextManager[Lender]:
    """A caller in a process of its own that is there for the session and answers; given `go`, after some progress."""
    names = (here.server.url, here.server.token, ran, session_id)
    return lending(*names, go) if whose == "ours" else working(*names, "auto", go)


# -- the server is killed ---------------------------------------------------------------------------------------------


@pytest.mark.seed("CTR-DATA.2")
@shows("server", "ours")
async def test_a_killed_server_joins_droid_and_our_caller_again(tmp_path: Path, point: str) -> None:
    ran: list[int] = []
    async with (
        stage(tmp_path, point) as (here, session_id),
        Caller(here.server.url, here.server.token, caller_id="ant") as caller,
    ):

        @caller.tool
        def work(n: int) -> dict[str, int]:
            ran.append(n)
            return {"did": n}

        await caller.attach(session_id)
        await begin(here, session_id)
        assert await here.server.died() == -signal.SIGKILL
        await here.server.restart()
        worked_once(here, session_id, await here.turn(session_id, 2))
    assert ran == [7], "the tool ran once"


@shows("server", "by hand")
async def test_a_killed_server_joins_droid_and_a_foreign_caller_again(tmp_path: Path, point: str) -> None:
    async with stage(tmp_path, point) as (here, session_id), foreign(here, session_id) as one:
        await begin(here, session_id)
        assert await here.server.died() == -signal.SIGKILL
        await here.server.restart()
        await one.caller.open_stream()
        worked_once(here, session_id, await here.turn(session_id, 2))
    assert one.ran == [7], "the tool ran once"


@pytest.mark.parametrize("mode", ["legacy", "auto"])
@shows("server", "the SDK's")
async def test_a_killed_server_joins_droid_and_the_sdks_caller_again(tmp_path: Path, point: str, mode: str) -> None:
    ran = tmp_path / "ran"
    async with (
        stage(tmp_path, point) as (here, session_id),
        working(here.server.url, here.server.token, ran, session_id, mode),
    ):
        await begin(here, session_id)
        assert await here.server.died() == -signal.SIGKILL
        await here.server.restart()
        worked_once(here, session_id, await here.turn(session_id, 2))
    assert ran.read_text() == "7\n", "the tool ran once"


# Points that are passed again after a death at the one before.
ONE_AFTER_THE_OTHER = ("call:after_row", "call:after_commit", "end:after_row", "end:after_commit", "call:before_reply")


async def test_a_server_killed_over_and_over_still_delivers_once(tmp_path: Path) -> None:
    async with stage(tmp_path, ONE_AFTER_THE_OTHER[0]) as (here, session_id), foreign(here, session_id) as one:
        await begin(here, session_id)
        for point in (*ONE_AFTER_THE_OTHER[1:], ""):
            assert await here.server.died() == -signal.SIGKILL
            await here.server.restart(mark=point)
            await one.caller.open_stream()
        worked_once(here, session_id, await here.turn(session_id, 2))
    assert one.ran == [7]


@shows("server", "nobody's", points=OPERATION)
async def test_a_killed_server_does_not_do_an_operation_twice(tmp_path: Path, point: str) -> None:
    """The outcome is there with the effect; without either the droid is told so, and nothing is just run again."""
    async with ServerProcess(tmp_path / "home", mark=point) as server, scene(server) as here:
        key = await here.token("write")
        plan = [
            {"tool": "oubliette_project_create", "args": {"name": "only one"}},
            {"say": "[$last]"},
        ]
        async with here.caller() as caller:
            session_id = await here.start(caller, plan, oubliette_api_key=key["token"])
            assert await server.died() == -signal.SIGKILL
            await server.restart()
            turn = (await here.turn(session_id)).worked()
        made = (await server.ask("project_list", name_contains="only one"))["projects"]
        assert len(made) == (0 if point == "operation:after_row" else 1)
        if made:
            assert turn.failed == [False]
            assert made[0]["id"] in turn.text
        else:
            assert turn.failed == [True]
            assert "whether it took effect is not known" in turn.text
        done = records(server.home, "audit", operation="project_create", token_id=key["id"], outcome="ok")
        assert len(done) == len(made)


class Writes:
    """What each writing operation is asked for out of a box, by its name."""

    def __init__(self, here: Scene, session_id: str) -> None:
        self.here = here
        self.session_id = session_id

    async def session_message(self) -> dict[str, Any]:
        return {"session_id": self.session_id, "message": planned([{"say": "again"}])}

    async def session_spawn(self) -> dict[str, Any]:
        return {"project_id": self.here.project_id, "message": planned([{"say": "another"}])}

    async def session_end(self) -> dict[str, Any]:
        async with self.here.box(self.session_id) as box:
            told = await box.ask("session_message", message=planned([{"sleep": 60}]))
        return {"session_id": told["result"]["session_id"]}

    async def token_create(self) -> dict[str, Any]:
        return {"name": "of a droid", "scope": "read"}

    async def token_revoke(self) -> dict[str, Any]:
        return {"token_id": (await self.here.token("read"))["id"]}

    async def project_delete(self) -> dict[str, Any]:
        return {"project_id": (await self.here.server.ask("project_create", name="to go"))["id"]}

    async def workspace_delete(self) -> dict[str, Any]:
        return {"project_id": self.here.project_id, "workspace_id": "none"}


WRITES = [name for name in vars(Writes) if not name.startswith("_")]


@pytest.mark.parametrize("tool", WRITES)
async def test_the_outcome_of_every_writing_operation_is_there_with_its_effect(tmp_path: Path, tool: str) -> None:
    async with ServerProcess(tmp_path / "home") as server, scene(server) as here, here.caller() as caller:
        key = await here.token("admin")
        session_id = await here.rest(caller)
        arguments = await getattr(Writes(here, session_id), tool)()
        call = {"api_key": key["token"], "tool": tool, "arguments": arguments, "call_key": "k"}
        await server.stop()
        await server.restart(mark="operation:after_effect")
        async with here.box(session_id) as box:
            await box.request("oubliette_call_tool", **call)
            assert await server.died() == -signal.SIGKILL
        await server.restart()
        async with here.box(session_id) as box:
            told = await box.ask("oubliette_call_tool", **call)
        (done,) = records(server.home, "audit", operation=tool, token_id=key["id"], outcome="ok")
        if tool == "token_create":
            assert "holds a secret" in told["error"]["message"]
        else:
            assert told["result"]["isError"] is False
            named = [told["result"]["structuredContent"].get(name) for name in ("id", "session_id")]
            assert done["target"] in named


def test_every_writing_operation_that_a_box_may_ask_is_among_them() -> None:
    asked = {one.name for one in OPERATIONS if one.writes and one.inside}
    # One has its own test; the other moves no row, so nothing is kept with what it does.
    assert asked == {*WRITES, "project_create", "session_cancel"}


@pytest.mark.parametrize("tool", ["session_message", "oubliette_session_spawn"])
async def test_a_droid_that_waits_for_its_child_is_joined_with_it_again(tmp_path: Path, tool: str) -> None:
    """The child was started once and for all; only the wait for it was cut off, and is begun anew."""
    child = 'Wait. <<plan [{"sleep": 1.5}, {"say": "the child is done"}]>>'
    async with ServerProcess(tmp_path / "home") as server, scene(server) as here, here.caller() as caller:
        plan: list[dict[str, Any]] = [
            {
                "tool": tool,
                "args": {"message": child, "wait_seconds": 30},
                "expect": {"is_error": False, "contains": "the child is done"},
            }
        ]
        session_id = await here.start(caller, plan, oubliette_scope="write")
        await here.until(session_id, "child_started")
        await server.kill()
        await server.restart()
        turn = (await here.turn(session_id)).worked()
        assert len(turn.of("child_started")) == 1


@shows("server", "by hand", points=PROGRESS)
async def test_a_server_killed_over_progress_keeps_the_call(tmp_path: Path, point: str) -> None:
    async with stage(tmp_path, point) as (here, session_id), here.caller() as caller:
        await caller.call("session_events", session_id=session_id, max_events=1)
        await begin(here, session_id)
        request = await caller.request()
        names = {"session_id": session_id, "request_id": request["request_id"]}
        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            await caller.call("caller_tool_progress", **names, progress=1, extend_seconds=300)
        await here.server.died()
        await here.server.restart()
        await caller.open_stream()
        again = await caller.request()
        assert again["request_id"] == request["request_id"]
        moved = again["deadline_at"] - request["deadline_at"] > 200
        assert moved is (point == "progress:after_commit"), "moved if, and only if, it was committed"
        await caller.answer(again, {"did": 7})
        worked_once(here, session_id, await here.turn(session_id, 2))


@shows("server", *LIBRARIES, points=PROGRESS)
async def test_a_server_killed_over_progress_keeps_the_call_of_a_library(
    tmp_path: Path, point: str, whose: str
) -> None:
    ran, go = tmp_path / "ran", tmp_path / "go"
    async with stage(tmp_path, point) as (here, session_id), peer(whose, here, session_id, ran, go):
        await begin(here, session_id)
        assert await here.server.died() == -signal.SIGKILL
        await here.server.restart()
        go.touch()
        worked_once(here, session_id, await here.turn(session_id, 2))
    assert ran.read_text() == "7\n", "the tool ran once"


# -- the client in the box is killed ----------------------------------------------------------------------------------


# One that is killed for good is not waited for.
FOR_GOOD_S = 0.1


def clients(box: Namespace) -> list[int]:
    """The client programs that run in a box."""
    found = [(pid, (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0")) for pid in inhabitants(box)]
    return [pid for pid, argv in found if b"client" in argv]


async def lose_client(here: Scene, session_id: str, point: str) -> None:
    """Kill the client in the box while the server stands at this point; the droid says so, and ends its turn."""
    box = namespace(here.folder(session_id))
    assert await here.server.held() == point
    (client,) = clients(box)
    os.kill(client, signal.SIGKILL)
    here.server.go_on()
    turn = await here.turn(session_id, 2)
    assert turn.failure, "an agent whose MCP server died does not go on in silence"


async def ended_once(here: Scene, session_id: str) -> dict[str, Any]:
    """The row of a call that has one end in the log."""
    await here.until(session_id, "caller_tool_resolved")
    (resolved,) = [event for event in await here.events(session_id) if event["type"] == "caller_tool_resolved"]
    (row,) = records(here.server.home, "calls", session_id=session_id)
    assert resolved["outcome"] == row["state"]
    return row


@shows("client", "by hand")
async def test_a_killed_client_is_an_error_of_its_droid_and_of_nothing_else(tmp_path: Path, point: str) -> None:
    """The droid's MCP server is gone for good: no call hangs, none ends twice, and the next session is fine."""
    async with (
        stage(tmp_path, f"{point}=", client_grace_s=FOR_GOOD_S) as (here, session_id),
        foreign(here, session_id) as one,
    ):
        await begin(here, session_id)
        await lose_client(here, session_id, point)
        row = await ended_once(here, session_id)
        assert len(one.ran) <= 1
        assert row["state"] in ("answered", "cancelled")
        fresh = await here.start(one.caller, PLAN, context=lent([WORK]))
        (await here.turn(fresh)).worked()


@shows("client", *LIBRARIES)
async def test_a_killed_client_costs_a_library_no_more_than_one_run(tmp_path: Path, point: str, whose: str) -> None:
    ran = tmp_path / "ran"
    async with (
        stage(tmp_path, f"{point}=", client_grace_s=FOR_GOOD_S) as (here, session_id),
        peer(whose, here, session_id, ran),
    ):
        await begin(here, session_id)
        await lose_client(here, session_id, point)
        row = await ended_once(here, session_id)
        assert row["state"] in ("answered", "cancelled")
    runs = ran.read_text() if ran.exists() else ""
    assert runs == "7\n" or (runs == "" and row["state"] == "cancelled")


@shows("client", *LIBRARIES, points=PROGRESS)
async def test_a_client_killed_over_progress_ends_its_call(tmp_path: Path, point: str, whose: str) -> None:
    ran, go = tmp_path / "ran", tmp_path / "go"
    async with (
        stage(tmp_path, f"{point}=", client_grace_s=FOR_GOOD_S) as (here, session_id),
        peer(whose, here, session_id, ran, go),
    ):
        await begin(here, session_id)
        await lose_client(here, session_id, point)
        assert (await ended_once(here, session_id))["state"] == "cancelled"
        go.touch()
        if whose == "the SDK's":  # ours was told that it is not wanted any more, and gives none
            answer = {"operation": "caller_tool_response", "session_id": session_id}
            async with asyncio.timeout(20):
                while not records(here.server.home, "audit", **answer):
                    await asyncio.sleep(0.02)
        assert (await ended_once(here, session_id))["state"] == "cancelled", "a late answer changes nothing"
    assert ran.read_text() == "7\n"


@shows("client", "nobody's", points=OPERATION)
async def test_an_operation_whose_client_is_killed_is_done_once(tmp_path: Path, point: str) -> None:
    """What a write has begun goes on when nobody is there any more to hear of it."""
    async with (
        ServerProcess(tmp_path / "home", mark=f"{point}=", client_grace_s=FOR_GOOD_S) as server,
        scene(server) as here,
        here.caller() as caller,
    ):
        key = await here.token("write")
        session_id = await here.rest(caller, oubliette_api_key=key["token"])
        plan = [
            {"tool": "oubliette_project_create", "args": {"name": "only one"}, "expect": {"is_error": False}},
        ]
        await begin(here, session_id, plan)
        await lose_client(here, session_id, point)
        async with asyncio.timeout(10):
            while not (made := (await server.ask("project_list", name_contains="only one"))["projects"]):
                await asyncio.sleep(0.02)
        assert len(made) == 1
        done = records(server.home, "audit", operation="project_create", token_id=key["id"], outcome="ok")
        assert [one["target"] for one in done] == [made[0]["id"]]


@shows("returning client", "nobody's", points=OPERATION)
async def test_a_client_that_comes_back_with_its_key_gets_the_outcome_of_its_operation(
    tmp_path: Path, point: str
) -> None:
    async with (
        ServerProcess(tmp_path / "home", mark=f"{point}=") as server,
        scene(server) as here,
        here.caller() as caller,
    ):
        key = await here.token("write")
        session_id = await here.rest(caller)
        call = {"api_key": key["token"], "tool": "project_create", "arguments": {"name": "one"}, "call_key": "k"}
        async with here.box(session_id, instance="me") as box:
            await box.request("oubliette_call_tool", **call)
            assert await server.held() == point
            box.abort()
        server.go_on()
        async with here.box(session_id, instance="me") as box:
            told = (await box.ask("oubliette_call_tool", **call))["result"]
        (made,) = (await server.ask("project_list", name_contains="one"))["projects"]
        assert told["structuredContent"]["id"] == made["id"]
        assert len(records(server.home, "audit", operation="project_create", token_id=key["id"], outcome="ok")) == 1


@shows("returning client", "by hand")
async def test_a_client_that_comes_back_with_its_key_gets_the_outcome_once(tmp_path: Path, point: str) -> None:
    call: dict[str, Any] = {"tool": "work", "arguments": {"n": 7}, "call_key": "the same"}
    async with stage(tmp_path, f"{point}=") as (here, session_id), foreign(here, session_id) as one:
        async with here.box(session_id, instance="me") as box:
            await box.request("caller_tool", **call)
            assert await here.server.held() == point
            box.abort()
        here.server.go_on()
        async with here.box(session_id, instance="me") as box:
            assert (await box.ask("caller_tool", **call))["result"] == {"did": 7}
            assert (await box.ask("caller_tool", **call))["result"] == {"did": 7}, "and again"
        (row,) = records(here.server.home, "calls", session_id=session_id)
        assert row["state"] == "answered"
        assert len([event for event in await here.events(session_id) if event["type"] == "caller_tool_resolved"]) == 1
    assert one.ran == [7]


@shows("returning client", *LIBRARIES)
async def test_a_client_that_comes_back_finds_that_the_caller_was_asked_once(
    tmp_path: Path, point: str, whose: str
) -> None:
    ran = tmp_path / "ran"
    call: dict[str, Any] = {"tool": "work", "arguments": {"n": 7}, "call_key": "the same"}
    async with stage(tmp_path, f"{point}=") as (here, session_id), peer(whose, here, session_id, ran):
        async with here.box(session_id, instance="me") as box:
            await box.request("caller_tool", **call)
            assert await here.server.held() == point
            box.abort()
        here.server.go_on()
        async with here.box(session_id, instance="me") as box:
            assert (await box.ask("caller_tool", **call))["result"] == {"did": 7}
        (row,) = records(here.server.home, "calls", session_id=session_id)
        assert row["state"] == "answered"
    assert ran.read_text() == "7\n"


async def test_a_client_that_does_not_come_back_gives_up_its_calls(tmp_path: Path) -> None:
    async with stage(tmp_path, "") as (here, session_id), here.caller() as caller:
        await caller.call("session_events", session_id=session_id, max_events=1)
        async with here.box(session_id, instance="me") as box:
            await box.request("caller_tool", tool="work", arguments={"n": 1}, call_key="k")
            request = await caller.request()
        await caller.until("caller_tool_cancelled", request_id=request["request_id"])
        assert not (await caller.answer(request, 1))["accepted"]
        async with here.box(session_id, instance="another") as box:
            told = await box.ask("caller_tool", tool="work", arguments={"n": 1}, call_key="k")
            assert told["error"]["data"]["kind"] == "client_gone", "the stored outcome"


# -- the caller is killed ---------------------------------------------------------------------------------------------


@shows("caller", "ours")
async def test_our_caller_killed_and_started_again_takes_its_calls_up(tmp_path: Path, point: str) -> None:
    ran = tmp_path / "ran"
    async with stage(tmp_path, f"{point}=") as (here, session_id), AsyncExitStack() as stack:
        first = await stack.enter_async_context(lending(here.server.url, here.server.token, ran, session_id))
        await begin(here, session_id)
        assert await here.server.held() == point
        await first.kill()
        here.server.go_on()
        await stack.enter_async_context(lending(here.server.url, here.server.token, ran, session_id))
        worked_once(here, session_id, await here.turn(session_id, 2))
    assert ran.read_text() == "7\n", "the tool ran once"


@shows("caller", "by hand")
async def test_a_foreign_caller_that_is_replaced_loses_no_call(tmp_path: Path, point: str) -> None:
    async with stage(tmp_path, f"{point}=") as (here, session_id):
        async with foreign(here, session_id) as one:
            await begin(here, session_id)
            assert await here.server.held() == point
            await one.caller.drop()
        here.server.go_on()
        async with foreign(here, session_id) as two:
            worked_once(here, session_id, await here.turn(session_id, 2))
    assert one.ran + two.ran == [7]


@shows("caller", "the SDK's")
async def test_the_sdks_caller_killed_and_started_again_takes_its_calls_up(tmp_path: Path, point: str) -> None:
    ran = tmp_path / "ran"
    async with stage(tmp_path, f"{point}=") as (here, session_id), AsyncExitStack() as stack:
        names = (here.server.url, here.server.token, ran, session_id)
        first = await stack.enter_async_context(working(*names, "legacy"))
        await begin(here, session_id)
        assert await here.server.held() == point
        await first.kill()
        here.server.go_on()
        await stack.enter_async_context(working(*names, "legacy"))
        worked_once(here, session_id, await here.turn(session_id, 2))
    assert ran.read_text() == "7\n", "the tool ran once"


@shows("caller", *LIBRARIES, points=PROGRESS)
async def test_a_caller_killed_over_its_progress_is_asked_again(tmp_path: Path, point: str, whose: str) -> None:
    """It was in the middle of its tool: nobody but the caller could know better than to run that again."""
    ran, go = tmp_path / "ran", tmp_path / "go"
    async with stage(tmp_path, f"{point}=") as (here, session_id), AsyncExitStack() as stack:
        first = await stack.enter_async_context(peer(whose, here, session_id, ran, go))
        await begin(here, session_id)
        assert await here.server.held() == point
        await first.kill()
        here.server.go_on()
        go.touch()
        await stack.enter_async_context(peer(whose, here, session_id, ran, go))
        worked_once(here, session_id, await here.turn(session_id, 2))
    assert ran.read_text() == "7\n7\n"


async def test_a_caller_killed_in_the_middle_of_its_tool_is_asked_again(tmp_path: Path) -> None:
    """Nobody can know whether it took effect: at the caller a tool runs at least once, and is told so."""
    async with stage(tmp_path, "") as (here, session_id):
        async with here.caller() as caller:
            await caller.call("session_events", session_id=session_id, max_events=1)
            await begin(here, session_id)
            first = await caller.request()
        async with foreign(here, session_id) as two:
            worked_once(here, session_id, await here.turn(session_id, 2))
            (again,) = [one for one in two.caller.heard if one["type"] == "caller_tool_request"]
    assert two.ran == [7]
    assert again["request_id"] == first["request_id"]
    assert again["redelivery"] >= 1


# -- the keeper is killed ---------------------------------------------------------------------------------------------


async def test_a_killed_keeper_of_a_box_without_walls_leaves_nothing_behind(tmp_path: Path) -> None:
    """What fled from the droid's process group is found by the mark that everything in such a box bears."""
    async with (
        ServerProcess(tmp_path / "home", runtime="process", unsafe_no_sandbox=True) as server,
        scene(server) as here,
        here.caller() as caller,
    ):
        flee = "setsid sleep 600 >/dev/null 2>&1 & echo $!"
        session_id = await here.start(caller, [{"sh": flee}, {"say": "$last"}], context=lent())
        fled = host.find(int((await here.turn(session_id)).worked().text))
        assert fled is not None
        note = Folder(here.folder(session_id)).read()
        assert note is not None
        started = {pid: host.arguments(pid) for pid in host.marked(f"{MARK}={note.box_id}".encode())}
        assert fled.pid in started
        assert any("client" in argv for argv in started.values()), "the droid's MCP server bears it too"
        os.kill(int(note.handle["pid"]), signal.SIGKILL)
        await server.ask("session_end", session_id=session_id)
        async with asyncio.timeout(20):
            while fled.is_alive() or host.marked(f"{MARK}={note.box_id}".encode()):
                await asyncio.sleep(0.05)
