"""The client as a program: what it needs, how fast it starts, how little it takes, and what no input can do to it."""

import ast
import asyncio
import inspect
import json
import re
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oubliette.inside import calls, client, mcp, results, toolbox
from oubliette.inside.client import Client
from oubliette.inside.link import decode
from oubliette.wire import jsonrpc, naming
from oubliette.wire import relay as wire
from oubliette.wire.relay import ConfigTool, SessionMessage
from tests.kit.boxed import Box
from tests.kit.mcp_host import ENVELOPE
from tests.kit.peer_environments import ROOT, python_peer
from tests.kit.relay_server import ATTACHED, RelayServer, config_frame, judge, tool

INSIDE = Path(client.__file__).parent
SLOW_S = 20
OWN_MODULES = ("__main__", "calls", "client", "link", "loop", "mcp", "results", "stdio", "toolbox")


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


# ---- the program


def test_the_client_imports_little_and_only_the_standard_library() -> None:
    imported = {
        name.split(".")[0]
        for module in OWN_MODULES
        for node in ast.walk(ast.parse((INSIDE / f"{module}.py").read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= {
        *("__future__", "json", "os", "re", "select", "signal", "socket", "sys", "time", "oubliette"),
        *("typing", "typing_extensions"),  # for the type checker alone
    }


def test_arguments_and_unknown_programs_are_refused(box: Box) -> None:
    for argv in ([*box.argv(), "more"], [*box.argv()[:-1], "cliet"], box.argv()[:-1]):
        done = subprocess.run(argv, capture_output=True, timeout=SLOW_S, check=False)
        assert done.returncode == 2
        assert done.stdout == b""
        assert len(done.stderr.splitlines()) == 1


def test_initialize_is_answered_within_five_times_a_bare_python(box: Box) -> None:
    bare: list[float] = []
    ours: list[float] = []
    for _ in range(20):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True, timeout=SLOW_S)
        bare.append(time.perf_counter() - started)
        ours.append(greeted(box.argv(), box.env())[0])
    ratio = statistics.median(ours) / statistics.median(bare)
    print(f"bare {statistics.median(bare):.4f} s, client {statistics.median(ours):.4f} s, ratio {ratio:.2f}")
    assert ratio < 5


def test_it_takes_less_than_a_third_of_the_memory_of_a_server_on_the_sdk(box: Box) -> None:
    sdk = [str(python_peer("mcp-2.3")), str(ROOT / "bench" / "sdk_stdio.py")]
    ours, theirs = (greeted(argv, box.env())[1] for argv in (box.argv(), sdk))
    print(f"client {ours} KiB, a server on the SDK {theirs} KiB")
    assert ours < theirs / 3


def greeted(argv: Sequence[str], env: dict[str, str]) -> tuple[float, int]:
    """How long a tool server takes to answer `initialize`, and its resident KiB then."""
    told = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "0"}}
    started = time.perf_counter()
    with subprocess.Popen(
        argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(jsonrpc.request(1, "initialize", told))
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["id"] == 1
        took = time.perf_counter() - started
        status = Path(f"/proc/{process.pid}/status").read_text()
        process.stdin.close()
        assert process.wait(SLOW_S) == 0
    return took, int(status.split("VmRSS:")[1].split()[0])


def test_a_closed_stdout_ends_it_quietly(box: Box) -> None:
    code = "import os, sys; os.close(1); os.execv(sys.argv[1], sys.argv[1:])"
    ping = b'{"jsonrpc":"2.0","id":1,"method":"ping"}\n'
    argv = [sys.executable, "-c", code, *box.argv()]
    done = subprocess.run(argv, input=ping, capture_output=True, timeout=SLOW_S, check=False, env=box.env())
    assert b"Traceback" not in done.stderr


def test_it_tells_the_version_of_the_distribution() -> None:
    pyproject = tomllib.loads((INSIDE.parents[2] / "pyproject.toml").read_text())
    assert pyproject["project"]["version"] == results.VERSION


def test_odd_media_are_judged_in_the_time_that_their_length_takes() -> None:
    for data in (" " * 4_000_000 + "!", "=" * 4_000_000, "A" * 4_000_000 + "=\n=\n=", "= " * 2_000_000):
        started = time.process_time()
        assert not results.is_block({"type": "image", "data": data, "mimeType": "image/png"})
        assert time.process_time() - started < 2
    assert results.is_block({"type": "image", "data": "aGk\n=\n", "mimeType": "image/png"})


# ---- what it shares with the wire


def test_the_clients_numbers_and_names_are_the_wires() -> None:
    assert client.HOLD_S == wire.HOLD_S
    assert calls.PROGRESS_EVERY_S == wire.PROGRESS_EVERY_S
    assert ATTACHED.call_timeout_s + wire.MARGIN_S == calls.PATIENCE_S
    assert toolbox.PLATFORM_PREFIX == naming.PLATFORM_PREFIX
    assert tuple(each["name"] for each in toolbox.BASE_TOOLS) == naming.BASE_TOOLS
    assert tuple(each["name"] for each in toolbox.SEARCH_TOOLS) == naming.SEARCH_TOOLS
    assert mcp.PARSE_ERROR == jsonrpc.PARSE_ERROR
    assert mcp.INVALID_REQUEST == jsonrpc.INVALID_REQUEST
    assert mcp.INTERNAL_ERROR == jsonrpc.INTERNAL_ERROR
    assert calls.SERVER_ERROR == jsonrpc.SERVER_ERROR
    assert wire.CALL_KEY_MAX >= 32


def test_every_kind_that_the_client_says_is_a_word_of_the_wire() -> None:
    said = {
        kind
        for module in (calls, client, toolbox, results)
        for kind in re.findall(r'\berror\(\s*"([a-z_]+)"|"kind": "([a-z_]+)"', inspect.getsource(module))
        for kind in kind
        if kind
    }
    assert {"too_large", "timeout", "outcome_unknown", "unknown_tool"} <= said
    assert said <= set(wire.KINDS)


def test_every_golden_frame_of_the_server_is_understood() -> None:
    talk = Conversation(api_key="oub_x")
    talk.server_says(jsonrpc.result(1, msgspec.structs.replace(ATTACHED, caller_tools=True)), attach=True)
    named = ConfigTool(name="a.b", box_name="ant_a_b", description="d", title="t", annotations={"readOnlyHint": True})
    talk.server_says(config_frame([named]))
    talk.server_says(jsonrpc.result(2, {"tools": [{"name": "project_list"}]}))
    assert list(talk.client.toolbox.routes) == [
        "ant_a_b",
        "oubliette_project_list",
        "session_message",
        "session_events",
    ]
    talk.agent_says(1, "tools/call", {"name": "ant_a_b", "_meta": {"progressToken": "t"}})
    (call,) = talk.frames("caller_tool")
    assert call.tool == "a.b"
    talk.server_says(jsonrpc.notification("progress", wire.Progress(call_key=call.call_key, progress=0.5, total=1)))
    assert talk.last()["params"] == {"progressToken": "t", "progress": 0.5, "total": 1}
    talk.server_says(jsonrpc.notification("tools_changed", {}))
    assert len(talk.frames("oubliette_tools")) == 2
    problem = jsonrpc.ErrorObject(code=-32000, message="m", data={"kind": "timeout", "retryable": True})
    talk.server_says(jsonrpc.error(3, problem))
    assert talk.last()["result"]["_meta"] == {
        "dev.oubliette/error": {"code": -32000, "kind": "timeout", "retryable": True}
    }


# ---- the core alone, under a clock that a test moves


class Conversation:
    """The client's core between two lists: what the agent was told and what the server was told."""

    def __init__(self, api_key: str = "") -> None:
        self.sent: list[bytes] = []
        self.is_up = True
        self.client = Client(api_key, lambda: "key", lambda level, text: None)
        self.client.link = self  # type: ignore[assignment]
        self.told: list[dict[str, Any]] = []

    def send(self, frame: bytes) -> None:
        if self.is_up:
            self.sent.append(frame)

    def agent_says(self, request_id: Any, method: str, params: object = None) -> None:
        message = {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}
        self.client.agent.line(json.dumps(message).encode())
        self.read()

    def server_says(self, line: bytes, *, attach: bool = False) -> None:
        message = decode(line)
        self.client.attached(message["result"]) if attach else self.client.received(message)
        self.read()

    def at(self, seconds: float) -> None:
        self.client.tick(seconds)
        self.read()

    def read(self) -> None:
        self.told += [json.loads(line) for line in "".join(self.client.agent.out).splitlines()]
        self.client.agent.out.clear()

    def last(self) -> dict[str, Any]:
        return self.told[-1]

    def frames(self, method: str) -> list[Any]:
        return [params for name, _, params in map(judge, self.sent) if name == method]

    def begin(self, **attached: Any) -> None:
        answer = msgspec.structs.replace(ATTACHED, caller_tools=True, **attached)
        self.server_says(jsonrpc.result(1, answer), attach=True)
        self.server_says(config_frame([tool("echo")]))


def test_a_reply_after_45_seconds_is_taken() -> None:
    talk = Conversation()
    talk.begin(call_timeout_s=60.0, call_timeout_max_s=60.0)
    talk.agent_says(1, "tools/call", {"name": "ant_echo"})
    for second in range(46):
        talk.at(second)
    assert talk.told == []
    talk.server_says(jsonrpc.result(2, "late"))
    assert talk.last()["result"]["content"][0]["text"] == "late"


def test_before_any_server_answered_a_call_waits_for_the_usual_deadline() -> None:
    talk = Conversation()
    talk.client.calls.cancel_all("")
    talk.is_up = False
    talk.agent_says(1, "tools/call", {"name": "session_message", "arguments": {"message": "x"}})
    talk.at(74.9)
    assert talk.told == []
    talk.at(75.1)
    assert talk.last()["result"]["_meta"]["dev.oubliette/error"]["kind"] == "unavailable"
    assert talk.client.wake_at is None


@pytest.mark.parametrize("meta", [{}, ENVELOPE], ids=["legacy", "modern"])
def test_a_waiting_agent_hears_something_every_ten_seconds(meta: dict[str, Any]) -> None:
    talk = Conversation()
    talk.begin()
    talk.agent_says(1, "tools/call", {"name": "ant_echo", "_meta": {**meta, "progressToken": 0}})
    talk.agent_says(2, "tools/call", {"name": "ant_echo", "_meta": meta})  # gave no token
    for tenth in range(356):
        talk.at(tenth / 10)
    assert [each["params"]["message"] for each in talk.told] == [
        f"waiting for ant_echo: {seconds} s" for seconds in (10, 20, 30)
    ]
    (call, _) = talk.frames("caller_tool")
    said = wire.Progress(call_key=call.call_key, progress=50, total=100, message="half")
    talk.server_says(jsonrpc.notification("progress", said))
    talk.at(40)
    talk.server_says(jsonrpc.notification("progress", wire.Progress(call_key=call.call_key, progress=51)))
    numbers = [each["params"]["progress"] for each in talk.told]
    assert all(each["params"]["progressToken"] == 0 for each in talk.told)
    assert numbers == sorted(set(numbers))
    assert numbers[3] == 50
    assert numbers[-1] == 51
    talk.server_says(jsonrpc.result(2, "done"))
    talk.at(100)
    assert talk.last()["id"] == 1


def test_the_loop_sleeps_until_something_is_due() -> None:
    talk = Conversation()
    talk.begin(call_timeout_max_s=600.0, margin_s=15.0)
    assert talk.client.wake_at is None
    talk.agent_says(1, "tools/call", {"name": "ant_echo"})
    assert talk.client.wake_at == 615
    talk.agent_says(2, "tools/call", {"name": "ant_echo", "_meta": {"progressToken": 1}})
    assert talk.client.wake_at == 10


def test_a_shorter_patience_holds_for_calls_that_wait_already() -> None:
    talk = Conversation()
    talk.agent_says(1, "tools/call", {"name": "session_message", "arguments": {"message": "x"}})
    talk.begin(call_timeout_max_s=5.0, margin_s=0.0)
    assert talk.client.wake_at is not None
    talk.at(talk.client.wake_at)
    assert talk.client.wake_at == 5
    talk.at(5)
    assert talk.last()["result"]["_meta"]["dev.oubliette/error"]["kind"] == "timeout"


def test_the_longest_wait_that_is_offered_is_waited_for() -> None:
    talk = Conversation(api_key="oub_x")
    talk.begin(call_timeout_max_s=600.0, margin_s=15.0, wait_max_s=3600.0)
    talk.server_says(jsonrpc.result(2, {"tools": [{"name": "session_watch", "inputSchema": {"type": "object"}}]}))
    talk.agent_says(1, "tools/call", {"name": "oubliette_session_watch", "arguments": {"wait_seconds": 3600}})
    talk.agent_says(2, "tools/call", {"name": "ant_echo"})
    talk.at(3614)
    assert [told["id"] for told in talk.told if "id" in told] == [2], "a caller's tool has its own, shorter time"
    assert "615 s" in talk.last()["result"]["content"][0]["text"]
    talk.server_says(jsonrpc.result(3, {"content": [], "isError": False}))
    assert (talk.last()["id"], talk.last()["result"]["isError"]) == (1, False)


def test_a_question_that_was_lost_with_its_link_is_asked_again() -> None:
    talk = Conversation(api_key="oub_x")
    talk.begin()
    talk.client.lost()
    talk.begin()
    assert len(talk.frames("oubliette_tools")) == 2
    talk.at(31)
    talk.server_says(jsonrpc.notification("tools_changed", {}))  # and one that was never answered
    assert len(talk.frames("oubliette_tools")) == 3


def test_open_calls_are_bounded_in_number_and_bytes() -> None:
    talk = Conversation()
    talk.begin()
    for number in range(calls.CALLS_MAX):
        talk.agent_says(number, "tools/call", {"name": "ant_echo"})
    assert talk.told == []
    talk.agent_says("more", "tools/call", {"name": "ant_echo"})
    assert talk.last()["result"]["_meta"]["dev.oubliette/error"] == {
        "code": -32000,
        "kind": "too_many",
        "retryable": True,
    }
    talk.server_says(jsonrpc.result(2, None))
    talk.agent_says("again", "tools/call", {"name": "ant_echo"})
    assert talk.last()["id"] == 0
    assert len(talk.client.calls) == calls.CALLS_MAX
    heavy = Conversation()
    heavy.begin()
    for number in range(8):
        heavy.agent_says(number, "tools/call", {"name": "ant_echo", "arguments": {"text": "x" * 8_000_000}})
    heavy.agent_says("more", "tools/call", {"name": "ant_echo", "arguments": {"text": "x" * 8_000_000}})
    assert heavy.last()["result"]["_meta"]["dev.oubliette/error"]["kind"] == "too_many"


def test_nothing_is_kept_of_calls_that_ended() -> None:
    talk = Conversation()
    talk.begin(call_timeout_max_s=5.0, margin_s=0.0)
    for number in range(100):
        talk.agent_says(number, "tools/call", {"name": "ant_echo", "_meta": {"progressToken": number}})
    for number in range(25):
        talk.server_says(jsonrpc.result(2 + number, number))
    for number in range(25, 50):
        talk.client.calls.cancel(number, None)
    talk.client.lost()
    for number in range(50, 75):
        talk.client.calls.cancel(number, "x")
    talk.begin(call_timeout_max_s=5.0, margin_s=0.0)
    talk.at(6)
    for number in range(77, 102):  # the server ends what it was told to cancel
        talk.server_says(jsonrpc.result(number, None))
    kept = {name: value for name, value in vars(talk.client.calls).items() if isinstance(value, dict | set | list)}
    assert kept
    assert not any(kept.values()), kept
    assert talk.client.calls._held_bytes == 0


def test_a_call_that_knows_its_tool_from_before_waits_for_the_config() -> None:
    talk = Conversation()
    talk.agent_says("early", "tools/call", {"name": "ant_echo"})
    assert talk.told == []
    talk.begin()
    assert len(talk.frames("caller_tool")) == 1
    talk = Conversation()
    talk.agent_says("early", "tools/call", {"name": "ant_nothing"})
    talk.at(0.8)
    assert talk.last()["error"]["code"] == -32602


# ---- no input can end it

NAMES = st.sampled_from(["ant_echo", "session_message", "tools_search", "tools_call", "what"])
IDS = st.one_of(st.integers(-3, 5), st.text(max_size=2), st.none(), st.booleans(), st.floats(), st.just([]))
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
METAS = st.one_of(VALUES, st.just(dict(ENVELOPE)), st.fixed_dictionaries({"progressToken": VALUES}))
METHODS = st.sampled_from(
    [
        *("initialize", "ping", "tools/list", "tools/call", "server/discover", "subscriptions/listen"),
        *("notifications/cancelled", "notifications/initialized", "progress", "cancel", "tools_changed"),
        *("caller_tools_config", "x"),
    ]
)
PARAMS = st.one_of(
    VALUES,
    st.fixed_dictionaries(
        {},
        optional={
            "name": NAMES | VALUES,
            "arguments": VALUES,
            "_meta": METAS,
            "requestId": IDS,
            "notifications": VALUES,
            "protocolVersion": VALUES,
            "tools": st.lists(st.fixed_dictionaries({"name": VALUES, "box_name": NAMES | VALUES}) | VALUES, max_size=3),
            "call_key": VALUES,
            "progress": VALUES,
            "total": VALUES,
            "message": VALUES,
            "cursor": VALUES,
            "reason": VALUES,
        },
    ),
)
MESSAGES = st.one_of(
    VALUES,
    st.fixed_dictionaries(
        {"jsonrpc": st.just("2.0")},
        optional={
            "id": IDS,
            "method": METHODS | VALUES,
            "type": METHODS | VALUES,
            "params": PARAMS,
            "result": VALUES,
            "error": VALUES | st.fixed_dictionaries({"code": VALUES, "message": VALUES, "data": VALUES}),
        },
    ),
)


def as_line(message: object) -> bytes:
    return json.dumps(message).encode("utf-8", "surrogatepass")


LINES = MESSAGES.map(as_line) | st.binary(max_size=40).map(lambda data: data.replace(b"\n", b""))


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["agent", "server", "tick", "lost", "attach", "refused"]), LINES)))
def test_no_sequence_of_lines_ends_the_core(steps: Sequence[tuple[str, bytes]]) -> None:
    talk = Conversation(api_key="oub_x")
    now = 0.0
    for what, line in steps:
        if what == "agent":
            talk.client.agent.line(line)
        elif what == "tick":
            now += 3
            talk.client.tick(now)
        elif what == "lost":
            talk.client.lost()
        else:
            feed(talk, what, line)
        talk.read()
    talk.client.finish("end")
    talk.read()
    for frame in talk.sent:
        if "error" not in json.loads(frame):  # a question that the server must not ask is refused
            judge(frame)


def feed(talk: Conversation, what: str, line: bytes) -> None:
    try:
        message = decode(line)
    except (ValueError, RecursionError):
        return
    if type(message) is dict:
        {"server": talk.client.received, "attach": talk.client.attached, "refused": talk.client.refused}[what](message)


async def test_random_lines_on_both_ends_leave_the_process_working(box: Box) -> None:
    lines: list[bytes] = []

    @settings(max_examples=400, database=None, derandomize=True, deadline=None)
    @given(LINES)
    def gather(line: bytes) -> None:
        lines.append(line)

    gather()
    async with RelayServer(box.folder, tools=[tool("echo")]) as relay, box.talk(relay) as host:
        for line in lines:
            host.write_raw(line + b"\n")
            relay.connection.write(line + b"\n")
        async with asyncio.timeout(SLOW_S):
            assert await host.begin_as("alive?", "ping") == {}
        assert host.process.returncode is None
        relay.problems.clear()  # it may have asked, as told, for things that this relay does not know
        await relay.stop()
        await relay.listen()
        after = {"name": "session_message", "arguments": {"message": "after all"}}
        pending = host.begin_as("and well?", "tools/call", after)
        call = await relay.take(SessionMessage, lambda params: params.message == "after all")
        call.reply("alive")
        assert (await pending)["content"][0]["text"] == "alive"
