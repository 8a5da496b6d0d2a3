"""The keeper, over real processes and a real socket."""

import ast
import asyncio
import json
import signal
import sys
from collections.abc import Awaitable
from pathlib import Path

import pytest

import oubliette.inside
from oubliette.server.containers import host
from oubliette.wire import jsonrpc, relay
from tests.kit.keeper_server import KeeperServer, Refusal
from tests.kit.kept_box import kept_box

PYTHON = sys.executable
HELD = relay.KEEPER_HELD_BYTES_MAX

# Says its pid and its child's, and stays; the child has a session of its own where asked for.
FAMILY = """
import os, sys, time
ready, tell = os.pipe()
child = os.fork()
if child == 0:
    if "away" in sys.argv: os.setsid()
    os.write(tell, b"x")
    time.sleep(600)
os.read(ready, 1)
print(os.getpid(), child, flush=True)
if "leave" in sys.argv: sys.exit(7)
time.sleep(600)
"""


async def line(server: KeeperServer, process: str) -> str:
    await server.until(lambda: b"\n" in server.output[process])
    return bytes(server.output[process]).split(b"\n")[0].decode()


def lines(server: KeeperServer, process: str) -> list[str]:
    return server.output[process].decode().splitlines()


async def gone(pid: int) -> bool:
    proc = host.find(pid)
    return proc is None or await proc.ended(10)


@pytest.fixture
def server() -> KeeperServer:
    return KeeperServer()


async def test_a_process_gets_exactly_the_environment_and_folder_that_it_was_given(
    tmp_path: Path, server: KeeperServer
) -> None:
    async with kept_box(tmp_path, server):
        await server.start("bare", "/bin/sh", "-c", "exec /usr/bin/env", cwd=str(tmp_path))
        await server.start("told", "/usr/bin/env", PATH="/bin", LANG="C", WORD="x y")
        await server.start("where", "/bin/sh", "-c", "pwd -P; ps -o sid= -p $$; echo $$", cwd=str(tmp_path))
        for process in ("bare", "told", "where"):
            await server.exited(process)
        shells = {f"PWD={tmp_path}"}  # what the shell adds by itself
        assert set(lines(server, "bare")) - shells == {"PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C.UTF-8"}
        assert set(lines(server, "told")) == {"PATH=/bin", "LANG=C", "WORD=x y"}
        folder, session, pid = lines(server, "where")
        assert (folder, session.strip()) == (str(tmp_path), pid)


async def test_starting_twice_starts_once(tmp_path: Path, server: KeeperServer) -> None:
    async with kept_box(tmp_path, server):
        await server.start("d", "/bin/sh", "-c", "echo $$; exec cat")
        await line(server, "d")
        again = await server.start("d", "/bin/sh", "-c", "echo $$; exec cat")
        assert again.stdout_to == len(server.output["d"])
        with pytest.raises(Refusal) as refused:
            await server.start("d", "/bin/cat")
        assert refused.value.kind == "conflict"


@pytest.mark.parametrize(
    ("argv", "cwd", "words"),
    [
        (["/nowhere/program"], "/", "'/nowhere/program': No such file"),
        (["/bin/cat"], "/nowhere", "folder '/nowhere': No such file"),
        (["/etc/passwd"], "/", "'/etc/passwd': Permission denied"),
    ],
)
async def test_what_cannot_be_started_is_named(
    tmp_path: Path, server: KeeperServer, argv: list[str], cwd: str, words: str
) -> None:
    async with kept_box(tmp_path, server):
        with pytest.raises(Refusal, match=words):
            await server.start("d", *argv, cwd=cwd)
        await server.start("d", "/bin/true")  # the id is free
        assert (await server.exited("d")).exit_code == 0


async def test_input_that_was_taken_is_dropped_and_a_gap_is_refused(tmp_path: Path, server: KeeperServer) -> None:
    async with kept_box(tmp_path, server):
        await server.start("d", "/bin/cat")
        assert await server.stdin("d", 0, b"hello ") == 6
        assert await server.stdin("d", 0, b"hello ") == 6
        assert await server.stdin("d", 3, b"lo world") == 11
        with pytest.raises(Refusal) as refused:
            await server.stdin("d", 12, b"too far")
        assert refused.value.kind == "conflict"
        assert await server.stdin("d", 11, b"", eof=True) == 11
        assert await server.stdin("d", 0, b"hello world", eof=True) == 11
        with pytest.raises(Refusal, match="takes no more input"):
            await server.stdin("d", 11, b"after the end")
        assert (await server.exited("d")).exit_code == 0
        assert server.output["d"] == b"hello world"


async def test_output_that_nobody_acknowledges_blocks_the_process_and_loses_nothing(tmp_path: Path) -> None:
    server = KeeperServer(acknowledges=False)
    total = 3 * HELD + 17
    program = f"import os; data = bytes(range(251)) * {total // 251 + 1}; data = data[:{total}]\n" + (
        "while data: data = data[os.write(1, data):]"
    )
    async with kept_box(tmp_path, server) as box:
        await server.start("d", PYTHON, "-I", "-S", "-c", program)
        await server.until(lambda: len(server.output["d"]) == HELD)
        server.cut()
        await server.attached(2)
        [state] = server.attaches[1].processes
        assert (state.stdout_from, state.stdout_to, state.exit_code) == (0, HELD, None)
        server.acknowledges = True
        server.ack("d", HELD)
        assert (await server.exited("d")).exit_code == 0
        assert bytes(server.output["d"]) == (bytes(range(251)) * (total // 251 + 1))[:total]
        assert box.process.returncode is None
    assert server.problems == []


async def test_what_is_acknowledged_is_forgotten_and_the_rest_comes_again(tmp_path: Path) -> None:
    server = KeeperServer(acknowledges=False)
    async with kept_box(tmp_path, server):
        await server.start("d", "/bin/sh", "-c", "printf 0123456789; exec cat")
        await server.until(lambda: len(server.output["d"]) == 10)
        server.ack("d", 4)
        server.output["d"].clear()
        server.output["d"] += b"0123"  # what a server has stored that was killed now
        server.cut()
        await server.until(lambda: len(server.output["d"]) == 10)
        assert server.output["d"] == b"0123456789"
        assert server.attaches[1].processes[0].stdout_from == 4
    assert server.problems == []


async def test_the_end_of_standard_error_outlives_an_absent_server(tmp_path: Path, server: KeeperServer) -> None:
    program = "import sys; sys.stderr.write('x' * 200_000 + 'the end'); sys.stderr.flush(); print('done', flush=True)"
    async with kept_box(tmp_path, server) as box:
        await server.start("wait", "/bin/cat")
        await server.start("d", "/bin/sh", "-c", f'read go; exec {PYTHON} -I -S -c "{program}"')
        await server.stdin("d", 0, b"go\n")
        box.close_door()
        server.cut()
        server.errors.clear()
        await box.open_door(server)
        await server.exited("d")
        assert server.errors["d"].endswith(b"the end")
        assert server.output["d"] == b"done\n"


@pytest.mark.parametrize("name", ["TERM", "KILL", "INT"])
async def test_a_signal_reaches_the_whole_group(tmp_path: Path, server: KeeperServer, name: str) -> None:
    async with kept_box(tmp_path, server):
        await server.start("d", PYTHON, "-I", "-S", "-c", FAMILY)
        leader, child = (int(word) for word in (await line(server, "d")).split())
        await server.signal("d", name)
        exited = await server.exited("d")
        number = getattr(signal, f"SIG{name}")
        assert exited.exit_signal == number or (name == "INT" and exited.exit_code is not None)
        assert await gone(leader)
        assert await gone(child)
        await server.signal("d", name)  # again is no error


async def test_the_group_dies_with_its_leader(tmp_path: Path, server: KeeperServer) -> None:
    async with kept_box(tmp_path, server):
        await server.start("d", PYTHON, "-I", "-S", "-c", FAMILY, "leave")
        _, child = (int(word) for word in (await line(server, "d")).split())
        assert (await server.exited("d")).exit_code == 7
        assert await gone(child)


async def test_a_stranger_that_holds_the_output_open_does_not_hide_the_end(
    tmp_path: Path, server: KeeperServer
) -> None:
    async with kept_box(tmp_path, server):
        await server.start("d", PYTHON, "-I", "-S", "-c", FAMILY, "leave", "away")
        assert (await server.exited("d")).exit_code == 7


async def test_an_end_is_told_at_every_attach(tmp_path: Path, server: KeeperServer) -> None:
    async with kept_box(tmp_path, server):
        await server.start("d", "/bin/sh", "-c", "kill -KILL $$")
        assert (await server.exited("d")).exit_signal == signal.SIGKILL
        server.exits.clear()
        server.cut()
        assert (await server.exited("d")).exit_signal == signal.SIGKILL
        [state] = server.attaches[1].processes
        assert (state.exit_signal, state.exit_code) == (signal.SIGKILL, None)


async def test_a_keeper_serves_the_server_that_comes_back(tmp_path: Path, server: KeeperServer) -> None:
    async with kept_box(tmp_path, server) as box:
        await server.start("d", "/bin/cat")
        box.close_door()
        server.cut()
        later = KeeperServer()
        later.output, later.acks = server.output, server.acks
        await box.open_door(later)
        await later.stdin("d", 0, b"still here", eof=True)
        assert (await later.exited("d")).exit_code == 0
        assert later.output["d"] == b"still here"
        assert server.attaches[0].instance == later.attaches[0].instance


async def test_a_wrong_key_is_tried_again_until_it_is_right(tmp_path: Path) -> None:
    server = KeeperServer(key="another")
    async with kept_box(tmp_path, server, key="mine"):
        await server.until(lambda: server.refused >= 2)
        server.key = "mine"
        await server.attached()


async def test_a_box_whose_server_never_comes_ends_itself(tmp_path: Path, server: KeeperServer) -> None:
    async with kept_box(tmp_path, server, abandoned_after_s=0.3, is_open=False) as box:
        assert await box.ended() == 0


async def test_a_box_whose_server_never_returns_ends_itself_and_all_that_it_started(tmp_path: Path) -> None:
    server = KeeperServer(abandoned_after_s=0.4)
    async with kept_box(tmp_path, server) as box:
        await server.start("d", PYTHON, "-I", "-S", "-c", FAMILY, "away")
        pids = [int(word) for word in (await line(server, "d")).split()]
        box.close_door()
        server.cut()
        assert await box.ended() == 0
        for pid in pids:
            assert await gone(pid)


async def test_a_server_that_is_there_keeps_its_box(tmp_path: Path) -> None:
    server = KeeperServer(abandoned_after_s=0.2)
    async with kept_box(tmp_path, server) as box:
        await server.start("d", "/bin/sh", "-c", "sleep 0.6; echo over")
        await server.exited("d")
        assert box.process.returncode is None


async def test_told_to_end_it_asks_first_and_then_kills(tmp_path: Path, server: KeeperServer) -> None:
    deaf = "trap '' TERM; echo $$; while :; do sleep 600; done"
    polite = "trap 'echo bye; exit 0' TERM; echo $$; while :; do sleep 0.05; done"
    async with kept_box(tmp_path, server) as box:
        await server.start("deaf", "/bin/sh", "-c", deaf)
        await server.start("polite", "/bin/sh", "-c", polite)
        pids = [int(await line(server, name)) for name in ("deaf", "polite")]
        box.process.terminate()
        assert (await server.exited("polite")).exit_code == 0
        assert server.output["polite"].endswith(b"bye\n")
        with pytest.raises(Refusal) as refused:
            await server.start("late", "/bin/cat")
        assert refused.value.kind == "conflict"
        assert await box.ended() == 0
        for pid in pids:
            assert await gone(pid)


async def test_orphans_that_left_their_group_die_with_the_box(tmp_path: Path, server: KeeperServer) -> None:
    async with kept_box(tmp_path, server) as box:
        await server.start("d", PYTHON, "-I", "-S", "-c", FAMILY, "leave", "away")
        _, orphan = (int(word) for word in (await line(server, "d")).split())
        await server.exited("d")
        assert host.find(orphan) is not None
        box.process.terminate()
        assert await box.ended() == 0
        assert await gone(orphan)


GARBAGE = [
    b"\xff\xfe\x00 not text",
    b"{",
    b'"a string"',
    b"[1, 2]",
    b"[" * 100_000,
    b'{"jsonrpc": "2.0", "id": 7}',
    b'{"jsonrpc": "2.0", "id": 7, "result": {}}',
    b'{"jsonrpc": "2.0", "method": {"a": 1}, "params": {}}',
    b'{"jsonrpc": "2.0", "method": "caller_tools_config", "params": {}}',
    b'{"jsonrpc": "2.0", "method": "ack", "params": {"process": "nobody", "offset": 1}}',
    b'{"jsonrpc": "2.0", "method": "ack", "params": {"process": "d", "offset": "x"}}',
    b'{"jsonrpc": "2.0", "method": "ack", "params": {"process": "d", "offset": 1e99}}',
    b'{"jsonrpc": "2.0", "method": "ack"}',
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
async def test_garbage_hurts_nothing(tmp_path: Path, server: KeeperServer, garbage: bytes) -> None:
    async with kept_box(tmp_path, server):
        await server.start("d", "/bin/cat")
        (await server.attached()).write(garbage + b"\n\n")
        await server.stdin("d", 0, b"unhurt", eof=True)
        await server.exited("d")
        assert server.output["d"] == b"unhurt"
        assert len(server.attaches) == 1


@pytest.mark.parametrize(
    ("method", "params", "code"),
    [
        ("fly", {}, jsonrpc.METHOD_NOT_FOUND),
        ("start", {}, jsonrpc.INVALID_PARAMS),
        ("start", [], jsonrpc.INVALID_PARAMS),
        ("start", None, jsonrpc.INVALID_PARAMS),
        ("start", {"process": "a b", "argv": ["/bin/cat"], "env": {}, "cwd": "/"}, jsonrpc.INVALID_PARAMS),
        ("start", {"process": "x" * 65, "argv": ["/bin/cat"], "env": {}, "cwd": "/"}, jsonrpc.INVALID_PARAMS),
        ("start", {"process": "p", "argv": [], "env": {}, "cwd": "/"}, jsonrpc.INVALID_PARAMS),
        ("start", {"process": "p", "argv": [""], "env": {}, "cwd": "/"}, jsonrpc.INVALID_PARAMS),
        ("start", {"process": "p", "argv": ["a", 1], "env": {}, "cwd": "/"}, jsonrpc.INVALID_PARAMS),
        ("start", {"process": "p", "argv": ["a\0b"], "env": {}, "cwd": "/"}, jsonrpc.INVALID_PARAMS),
        ("start", {"process": "p", "argv": ["/bin/cat"], "env": {"A=B": "x"}, "cwd": "/"}, jsonrpc.INVALID_PARAMS),
        ("start", {"process": "p", "argv": ["/bin/cat"], "env": {"": "x"}, "cwd": "/"}, jsonrpc.INVALID_PARAMS),
        ("start", {"process": "p", "argv": ["/bin/cat"], "env": {"A": 1}, "cwd": "/"}, jsonrpc.INVALID_PARAMS),
        ("start", {"process": "p", "argv": ["/bin/cat"], "env": {}, "cwd": "here"}, jsonrpc.INVALID_PARAMS),
        ("stdin", {"process": "d", "offset": -1, "data": ""}, jsonrpc.INVALID_PARAMS),
        ("stdin", {"process": "d", "offset": True, "data": ""}, jsonrpc.INVALID_PARAMS),
        ("stdin", {"process": "d", "offset": 0, "data": "a"}, jsonrpc.INVALID_PARAMS),
        ("stdin", {"process": "d", "offset": 0, "data": 5}, jsonrpc.INVALID_PARAMS),
        ("stdin", {"process": "d", "offset": 0, "data": "", "eof": 1}, jsonrpc.INVALID_PARAMS),
        ("stdin", {"process": "nobody", "offset": 0, "data": ""}, jsonrpc.SERVER_ERROR),
        ("signal", {"process": "d", "signal": "STOP"}, jsonrpc.INVALID_PARAMS),
        ("signal", {"process": "d", "signal": 9}, jsonrpc.INVALID_PARAMS),
    ],
)
async def test_a_wrong_request_is_refused_by_name(
    tmp_path: Path, server: KeeperServer, method: str, params: object, code: int
) -> None:
    async with kept_box(tmp_path, server):
        await server.start("d", "/bin/cat")
        with pytest.raises(Refusal) as refused:
            await server.request(method, params)
        assert refused.value.code == code
        assert refused.value.kind in relay.KINDS
        await server.stdin("d", 0, b"unhurt", eof=True)
        assert (await server.exited("d")).exit_code == 0


async def test_a_line_over_the_bound_is_refused_and_the_next_one_is_heard(tmp_path: Path, server: KeeperServer) -> None:
    async with kept_box(tmp_path, server):
        attached = await server.attached()
        attached.write(b'{"x":"' + b"x" * relay.FRAME_BYTES_MAX + b'"}\n')
        await server.start("d", "/bin/true")
        assert [error.code for error in server.raw_errors] == [jsonrpc.INVALID_REQUEST]
        assert (server.raw_errors[0].data or {})["kind"] == "too_large"


async def test_random_answers_to_attach_are_survived(tmp_path: Path, server: KeeperServer) -> None:
    async with kept_box(tmp_path, server):
        for answer in (b"null\n", b"[]\n", b'{"id":1}\n', b'{"id":1,"result":5}\n', b'{"id":1,"error":5}\n'):
            server.first_frame = answer
            server.cut()
        server.first_frame = b'{"id":1,"result":{"acks":{"d":"x"},"abandoned_after_s":"soon"}}\n'
        server.cut()
        server.first_frame = None
        server.cut()
        await server.until(lambda: bool(server.attaches))
        await server.start("d", "/bin/true")
        assert (await server.exited("d")).exit_code == 0


async def test_a_process_that_does_not_read_delays_the_answer_and_then_refuses(
    tmp_path: Path, server: KeeperServer
) -> None:
    chunk = b"y" * (5 * 1024 * 1024)
    async with kept_box(tmp_path, server):
        await server.start("d", "/bin/sh", "-c", "exec sleep 600")
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(server.stdin("d", 0, chunk))
            second = tasks.create_task(_refused(server.stdin("d", len(chunk), chunk)))
            assert await second == "too_many"
            assert not first.done()
            await server.start("other", "/bin/true")  # nobody else waits for it
            await server.signal("d", "KILL")
            assert await first == len(chunk)


async def _refused(request: Awaitable[object]) -> str | None:
    with pytest.raises(Refusal) as refused:
        await request
    return refused.value.kind


async def test_a_box_keeps_so_many_processes_and_forgets_those_that_ended(tmp_path: Path, server: KeeperServer) -> None:
    async with kept_box(tmp_path, server):
        await server.start("p0", "/bin/true")
        await server.exited("p0")
        for number in range(1, 17):
            await server.start(f"p{number}", "/bin/cat")
        with pytest.raises(Refusal) as refused:
            await server.start("p17", "/bin/cat")
        assert refused.value.kind == "too_many"
        server.cut()
        await server.attached(2)
        assert {state.process for state in server.attaches[1].processes} == {f"p{number}" for number in range(1, 17)}
    assert server.problems == []


async def test_a_keeper_without_a_key_does_not_run(tmp_path: Path, server: KeeperServer) -> None:
    async with kept_box(tmp_path, server, key="") as box:
        assert await box.ended() == 2
        assert box.facts == b""


async def test_the_key_is_in_no_argument_environment_or_readable_memory(tmp_path: Path) -> None:
    key = "0123456789abcdef" * 4
    server = KeeperServer(key=key)
    async with kept_box(tmp_path, server) as box:
        look = f"""
for name in ("cmdline", "environ", "mem", "maps", "stack", "syscall"):
    try:
        text = open("/proc/{box.process.pid}/" + name, "rb").read(65536) if name != "mem" else b""
        print(name, {key!r}.encode() in text)
    except OSError as problem:
        print(name, problem.strerror)
"""
        await server.start("d", PYTHON, "-I", "-S", "-c", look)
        await server.exited("d")
        assert b"True" not in server.output["d"]
        assert key not in box.facts.decode()
        assert json.loads(box.facts)["is_dumpable"] is False


async def test_the_dead_are_buried(tmp_path: Path, server: KeeperServer) -> None:
    async with kept_box(tmp_path, server) as box:
        await server.start("d", "/bin/sh", "-c", "(sleep 0 & sleep 0 & :) ; sleep 0.1; echo over")
        await server.exited("d")
        await server.start("e", "/bin/true")
        await server.exited("e")
        children = Path(f"/proc/{box.process.pid}/task/{box.process.pid}/children").read_text()
        assert children.split() == []


@pytest.mark.parametrize("path", sorted(Path(next(iter(oubliette.inside.__path__))).glob("*.py")), ids=lambda p: p.name)
def test_what_runs_in_a_box_is_written_for_python_3_9(path: Path) -> None:
    ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))


def test_the_bounds_are_those_of_the_wire() -> None:
    from oubliette.inside import keeper, kept

    assert keeper.FRAME_BYTES_MAX == relay.FRAME_BYTES_MAX
    assert kept.HELD_BYTES_MAX == relay.KEEPER_HELD_BYTES_MAX
    assert keeper.PROTOCOL == relay.PROTOCOL
