"""Boxes as processes of this host: found again, ended whole, and nothing left of them."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from oubliette.server import ids
from oubliette.server.containers import boxes, host, proof
from oubliette.server.containers.bubblewrap import BubblewrapRuntime
from oubliette.server.containers.folders import Folders
from oubliette.server.containers.process import ProcessRuntime
from oubliette.server.containers.runtime import Runtime
from oubliette.server.errors import BoxFailed, NotConfigured
from tests.kit.keeper_server import KeeperServer
from tests.kit.runtime_claims import Stage, opened

RUNTIMES: dict[str, Callable[[Path], Runtime]] = {"bubblewrap": BubblewrapRuntime, "process": ProcessRuntime}


@pytest.fixture(params=list(RUNTIMES))
async def stage(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Stage]:
    stage = Stage(lambda: RUNTIMES[request.param](tmp_path / "home"))
    yield stage
    await stage.clear()


def traces(home: Path, installation: str) -> list[str]:
    """What is left: folders, processes of the installation, links, mounts."""
    left = [str(path) for path in (home / "boxes").glob("*")]
    left += [f"process {pid}" for pid in host.pids() if installation in host.arguments(pid)]
    left += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(home) in line]
    return left


def entries(folder: str) -> int:
    return sum(1 for _ in Path(folder).iterdir())


async def test_fifty_boxes_leave_nothing(stage: Stage, tmp_path: Path) -> None:
    runtime = stage.runtime()
    box, server = await opened(runtime, stage.spec())
    await runtime.stop(box)
    server.cut()
    files, threads = entries("/proc/self/fd"), entries("/proc/self/task")
    began = time.monotonic()
    for _ in range(50):
        box, server = await opened(runtime, stage.spec())
        await server.start("d", "/bin/sh", "-c", "sleep 600 & exec cat")
        await runtime.stop(box)
    assert time.monotonic() - began < 30
    assert traces(tmp_path / "home", stage.installation) == []
    assert entries("/proc/self/fd") <= files + 1  # a connection that is just being closed
    assert entries("/proc/self/task") <= threads + 16
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


async def test_a_box_attaches_within_a_fraction_of_a_second(stage: Stage) -> None:
    runtime = stage.runtime()
    await runtime.check()
    took: list[float] = []
    for _ in range(5):
        spec = stage.spec()
        began = time.perf_counter()
        box, _ = await opened(runtime, spec)
        took.append(time.perf_counter() - began)
        await runtime.stop(box)
    print(f"{runtime.name}: from nothing to an attached keeper in {min(took) * 1000:.0f} ms")
    assert min(took) < 0.4


SERVER = """
import asyncio, json, sys
from pathlib import Path
from oubliette.server.containers.bubblewrap import BubblewrapRuntime
from oubliette.server.containers.process import ProcessRuntime
from oubliette.server.containers.runtime import BoxSpec
from tests.kit.keeper_server import KeeperServer

async def main():
    told = json.loads(sys.argv[1])
    kinds = {"bubblewrap": BubblewrapRuntime, "process": ProcessRuntime}
    runtime = kinds[told["kind"]](Path(told["home"]))
    spec = BoxSpec(**told["spec"])
    server = KeeperServer(key=spec.keeper_key, acknowledges=False)
    await runtime.open_door(spec.box_id, spec.relay_key, server.accept)
    box = await runtime.create(spec)
    await server.attached()
    await server.start("d", "/bin/cat", cwd=runtime.places(spec.box_id).workspace)
    await server.stdin("d", 0, b"before")
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_killed_server_is_followed_by_one_that_finds_its_boxes(stage: Stage, tmp_path: Path) -> None:
    later, spec = stage.runtime(), stage.spec()
    fields = {name: getattr(spec, name) for name in spec.__dataclass_fields__}
    told = {"kind": later.name, "home": str(tmp_path / "home"), "spec": fields}
    first = subprocess.Popen(
        [sys.executable, "-c", SERVER, json.dumps(told)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(("src", ".", *sys.path))},
    )
    with first:
        assert first.stdout is not None
        assert await asyncio.to_thread(first.stdout.readline) == b"ready\n"
        first.send_signal(signal.SIGKILL)
        first.wait()
    [box] = await later.list(stage.installation)
    assert (box.box_id, box.session_id) == (spec.box_id, spec.session_id)
    assert await later.is_alive(box)
    server = KeeperServer(key=spec.keeper_key)
    await later.open_door(spec.box_id, spec.relay_key, server.accept)
    await server.attached()
    await server.stdin("d", 6, b" after", eof=True)
    await server.exited("d")
    assert bytes(server.output["d"]) == b"before after"
    await later.stop(box)
    assert traces(tmp_path / "home", stage.installation) == []


async def test_a_box_whose_server_died_before_it_wrote_the_handle_is_found(stage: Stage, tmp_path: Path) -> None:
    runtime, spec = stage.runtime(), stage.spec()
    box, _ = await opened(runtime, spec)
    folder = Folders(tmp_path / "home").of(spec.box_id)
    note = folder.read()
    assert note is not None
    folder.write(msgspec.structs.replace(note, handle={}))
    [found] = await stage.runtime().list(stage.installation)
    assert (found.box_id, found.session_id) == (spec.box_id, spec.session_id)
    assert found.handle["pid"] == box.handle["pid"]
    await stage.runtime().stop(replace(found, handle={}))
    assert traces(tmp_path / "home", stage.installation) == []


async def test_a_box_whose_folder_is_gone_is_found_and_ended(stage: Stage, tmp_path: Path) -> None:
    runtime, spec = stage.runtime(), stage.spec()
    await opened(runtime, spec)
    await runtime.close()
    await asyncio.to_thread(shutil.rmtree, tmp_path / "home" / "boxes")
    [found] = await stage.runtime().list(stage.installation)
    assert (found.box_id, found.session_id) == (spec.box_id, spec.session_id)
    await stage.runtime().stop(found)
    assert traces(tmp_path / "home", stage.installation) == []


async def test_a_folder_without_a_box_is_listed_until_it_is_stopped(stage: Stage, tmp_path: Path) -> None:
    box_id = ids.new_box_id()
    (tmp_path / "home" / "boxes" / box_id.removeprefix("box_") / "mcp").mkdir(parents=True)
    runtime = stage.runtime()
    [found] = await runtime.list(stage.installation)
    assert found.box_id == box_id
    assert not await runtime.is_alive(found)
    await runtime.stop(found)
    assert await runtime.list(stage.installation) == []


async def test_a_droid_that_poses_as_another_box_harms_only_itself(stage: Stage) -> None:
    runtime, mine, other = stage.runtime(), stage.spec(), stage.spec()
    box, _ = await opened(runtime, mine)
    liar, server = await opened(runtime, other)
    words = ["keeper", "--box", mine.box_id, "--session", "x", "--installation", stage.installation]
    await server.start(
        "d", runtime.places(other.box_id).python, "-I", "-S", "-c", "import time; time.sleep(600)", *words
    )
    assert sorted(found.handle["pid"] for found in await stage.runtime().list(stage.installation)) == sorted(
        one.handle["pid"] for one in (box, liar)
    )
    await runtime.stop(liar)
    assert await runtime.is_alive(box)
    await runtime.stop(box)


async def test_a_pid_that_is_used_again_is_nobody_of_ours(stage: Stage) -> None:
    runtime = stage.runtime()
    box, _ = await opened(runtime, stage.spec())
    sleeper = subprocess.Popen(["/bin/sleep", "600"])
    with sleeper:
        stale = {**box.handle, "pid": str(sleeper.pid), "launcher_pid": str(sleeper.pid)}
        assert not await runtime.is_alive(replace(box, handle=stale))
        await runtime.stop(replace(box, handle=stale))
        assert sleeper.poll() is None
        sleeper.kill()
    await runtime.stop(box)


async def test_a_box_of_an_earlier_boot_is_dead(stage: Stage) -> None:
    runtime = stage.runtime()
    box, _ = await opened(runtime, stage.spec())
    earlier = {**box.handle, "started": box.handle["started"].partition("@")[0] + "@00000000"}
    assert not await runtime.is_alive(replace(box, handle=earlier))
    await runtime.stop(box)


async def test_a_box_that_is_cancelled_while_it_starts_leaves_nothing(stage: Stage, tmp_path: Path) -> None:
    runtime = stage.runtime()
    await runtime.check()
    for delay in (0, 0.001, 0.005, 0.01, 0.02, 0.04):
        spec = stage.spec()
        await runtime.open_door(spec.box_id, spec.relay_key, KeeperServer().accept)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await runtime.stop(await runtime.create(spec))
                continue
    for box in await runtime.list(stage.installation):
        await runtime.stop(box)  # cut off while it was being stopped
    async with asyncio.timeout(10):
        while traces(tmp_path / "home", stage.installation):
            await asyncio.sleep(0.02)


async def test_a_home_with_a_long_path_has_doors_too(stage: Stage, tmp_path: Path) -> None:
    kind = RUNTIMES[stage.runtime().name]
    home = tmp_path / ("a-long-name-" * 8)[:90] / ("another-one-" * 8)[:90]
    assert len(os.fsencode(home)) > 150
    runtime = kind(home)
    spec = stage.spec()
    box, server = await opened(runtime, spec)
    place = runtime.places(spec.box_id).socket
    assert len(os.fsencode(place)) <= 107
    connect = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({place!r}); print('in')"
    await server.start("d", runtime.places(spec.box_id).python, "-I", "-S", "-c", connect)
    assert (await server.exited("d")).exit_code == 0, bytes(server.errors["d"])
    await runtime.close()
    server.cut()
    later = kind(home)
    assert later.places(spec.box_id).socket == place
    await later.open_door(spec.box_id, spec.relay_key, server.accept)
    await server.attached(2)
    await later.stop(box)
    assert traces(home, stage.installation) == []
    assert not os.path.lexists(Path(place).parent)


async def test_the_door_and_its_key_are_for_the_owner_alone(stage: Stage, tmp_path: Path) -> None:
    runtime, spec = stage.runtime(), stage.spec()
    box, _ = await opened(runtime, spec)
    folder = Folders(tmp_path / "home").of(spec.box_id)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (folder.path, folder.door, *folder.door.iterdir())}
    assert modes == {folder.path.name: "0o700", "mcp": "0o700", "relay.sock": "0o600", "key": "0o600"}
    assert (folder.door / "key").read_text() == spec.relay_key
    await runtime.open_door(spec.box_id, "a-new-key", KeeperServer(key=spec.keeper_key).accept)
    assert (folder.door / "key").read_text() == "a-new-key"
    assert sorted(path.name for path in folder.door.iterdir()) == ["key", "relay.sock"]
    for path in (tmp_path / "home").rglob("*"):
        if path.is_file() and path.parent != folder.door:
            assert spec.keeper_key.encode() not in path.read_bytes()
            assert spec.relay_key.encode() not in path.read_bytes()
    await runtime.stop(box)


async def test_no_key_is_in_a_list_of_processes(stage: Stage) -> None:
    runtime, spec = stage.runtime(), stage.spec()
    box, _ = await opened(runtime, spec)
    for pid in (int(box.handle["pid"]), int(box.handle["launcher_pid"])):
        seen = Path(f"/proc/{pid}/cmdline").read_bytes()
        with contextlib.suppress(OSError):
            seen += Path(f"/proc/{pid}/environ").read_bytes()
        assert spec.keeper_key.encode() not in seen
        assert spec.relay_key.encode() not in seen
    await runtime.stop(box)


def test_boxes_work_on_uvloop(tmp_path: Path) -> None:
    async def scenario() -> None:
        for kind in RUNTIMES.values():
            stage = Stage(lambda kind=kind: kind(tmp_path / "home"))
            runtime = stage.runtime()
            box, server = await opened(runtime, stage.spec())
            await server.start("d", "/bin/cat")
            await runtime.close()
            server.cut()
            later = stage.runtime()
            await later.open_door(box.box_id, "key", server.accept)
            await server.attached(2)
            await later.stop(box)
            await stage.clear()
            assert traces(tmp_path / "home", stage.installation) == []

    uvloop.run(scenario())


# --- bubblewrap's own ---


def a_bwrap(folder: Path, script: str) -> str:
    """A program that stands in for bubblewrap on a machine that is not this one."""
    path = folder / "bwrap"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


async def test_a_missing_bubblewrap_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotConfigured, match="Debian package bubblewrap"):
        await BubblewrapRuntime(tmp_path, bwrap="no-such-bwrap").check()


@pytest.mark.parametrize(
    ("said", "advised"),
    [
        ("bwrap: Unknown option --disable-userns", "too old.*Debian package bubblewrap"),
        ("bwrap: execvp /usr/bin/python3: No such file or directory", "Debian package python3"),
        ("bwrap: No permissions to create new namespace", "cannot make a box here: .*No permissions"),
    ],
)
async def test_a_bubblewrap_that_fails_is_explained(tmp_path: Path, said: str, advised: str) -> None:
    bwrap = a_bwrap(tmp_path, f"echo '{said}' >&2; exit 1")
    with pytest.raises(NotConfigured, match=advised):
        await BubblewrapRuntime(tmp_path / "home", bwrap=bwrap).check()
    assert list((tmp_path / "home" / "boxes").iterdir()) == []


async def test_a_session_is_refused_where_no_box_can_be_made(tmp_path: Path) -> None:
    stage = Stage(lambda: BubblewrapRuntime(tmp_path / "home", bwrap=a_bwrap(tmp_path, "exit 1")))
    runtime, spec = stage.runtime(), stage.spec()
    await runtime.open_door(spec.box_id, spec.relay_key, KeeperServer().accept)
    with pytest.raises(NotConfigured):
        await runtime.create(spec)
    assert await runtime.list(stage.installation) == []
    await stage.clear()


async def test_a_box_that_does_not_hold_is_never_handed_over(tmp_path: Path) -> None:
    # As if this bubblewrap forgot the network: the keeper sees it, and the server does not take the box.
    real = shutil.which("bwrap")
    bwrap = a_bwrap(
        tmp_path,
        f"tr '\\0' '\\n' <&3 | sed -e '/^--unshare-net$/d' | tr '\\n' '\\0' > {tmp_path}/words\n"
        f'exec {real} "$@" 3< {tmp_path}/words',
    )
    runtime = BubblewrapRuntime(tmp_path / "home", bwrap=bwrap)
    with pytest.raises(NotConfigured, match="it shares a namespace with the host"):
        await runtime.check()
    assert list((tmp_path / "home" / "boxes").iterdir()) == []


async def test_a_home_that_boxes_would_see_is_refused() -> None:
    with pytest.raises(NotConfigured, match="every box could read it"):
        await BubblewrapRuntime(Path("/usr/local/share/oubliette-home")).check()


async def test_a_box_that_never_speaks_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boxes, "START_WAIT_S", 0.2)
    with pytest.raises(NotConfigured, match="did not start within"):
        await BubblewrapRuntime(tmp_path / "home", bwrap=a_bwrap(tmp_path, "exec sleep 600")).check()
    assert list((tmp_path / "home" / "boxes").iterdir()) == []


GOOD: dict[str, Any] = {
    "pid": 1,
    "uid": 1000,
    "hostname": "box",
    "interfaces": ["lo"],
    "namespaces": {name: f"{name}:[1]" for name in ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")},
    "status": {
        **dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapAmb"), "0" * 16),
        "NoNewPrivs": "1",
        "Seccomp": "2",
    },
    "processes": [1],
    "environment": ["HOME", "PATH"],
    "folders": {"/": ["usr"], "/home": ["box"], "/opt": ["oubliette"], "/opt/oubliette": ["oubliette.pyz"], "/mcp": []},
    "writable": [],
    "workspace_is_writable": True,
    "is_dumpable": False,
}


def test_a_box_that_holds_has_no_leaks() -> None:
    assert proof.leaks(GOOD) == []


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("pid", 2),
        ("hostname", "vm"),
        ("interfaces", ["lo", "eth0"]),
        ("namespaces", {**GOOD["namespaces"], "net": str(Path("/proc/self/ns/net").readlink())}),
        ("namespaces", {**GOOD["namespaces"], "user": ""}),
        ("status", {**GOOD["status"], "NoNewPrivs": "0"}),
        ("status", {**GOOD["status"], "CapEff": "000001ffffffffff"}),
        ("status", {**GOOD["status"], "Seccomp": "0"}),
        ("processes", [1, 2]),
        ("environment", ["HOME", "AWS_SECRET_ACCESS_KEY"]),
        ("folders", {**GOOD["folders"], "/": ["root", "usr"]}),
        ("folders", {**GOOD["folders"], "/home": ["alice", "box"]}),
        ("folders", {**GOOD["folders"], "/opt": ["oubliette", "secrets"]}),
        ("writable", ["/mcp"]),
        ("writable", None),
        ("workspace_is_writable", False),
        ("is_dumpable", True),
    ],
)
def test_every_leak_is_seen(fact: str, value: object) -> None:
    assert len(proof.leaks({**GOOD, fact: value})) >= 1


@pytest.mark.parametrize("fact", [name for name in GOOD if name != "uid"])
def test_what_is_not_told_is_not_proven(fact: str) -> None:
    assert proof.leaks({name: value for name, value in GOOD.items() if name != fact})


# --- the process runtime's own ---


async def test_what_fled_from_a_plain_box_is_ended_even_after_its_keeper(tmp_path: Path) -> None:
    stage = Stage(lambda: ProcessRuntime(tmp_path / "home"))
    runtime = stage.runtime()
    box, server = await opened(runtime, stage.spec())
    flee = "(setsid sleep 600 & echo $!; setsid sleep 600 & echo $!) ; exec sleep 600"
    await server.start("d", "/bin/sh", "-c", flee)
    await server.until(lambda: bytes(server.output["d"]).count(b"\n") == 2)
    os.kill(int(box.handle["pid"]), signal.SIGKILL)
    async with asyncio.timeout(10):
        while await runtime.is_alive(box):
            await asyncio.sleep(0.01)
    await runtime.stop(box)
    assert host.marked(f"{boxes.MARK}={box.box_id}".encode()) == []
    assert traces(tmp_path / "home", stage.installation) == []


async def test_a_link_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "tmp"
    (shared / f"oubliette-{os.geteuid()}").mkdir(parents=True, mode=0o777)
    (shared / f"oubliette-{os.geteuid()}").chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    home = tmp_path / ("a-long-name-" * 8)[:90]
    stage = Stage(lambda: ProcessRuntime(home))
    spec = stage.spec()
    with pytest.raises(NotConfigured, match="is not a folder of this user alone"):
        await stage.runtime().open_door(spec.box_id, spec.relay_key, KeeperServer().accept)
    await stage.clear()


async def test_a_keeper_that_does_not_start_tells_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", a_bwrap(tmp_path, "echo 'this python is broken' >&2; exit 1"))
    stage = Stage(lambda: ProcessRuntime(tmp_path / "home"))
    with pytest.raises(BoxFailed, match="this python is broken"):
        await stage.runtime().create(stage.spec())
    assert list((tmp_path / "home" / "boxes").iterdir()) == []
    await stage.clear()


async def test_what_goes_on_starting_others_is_ended_with_all_of_them() -> None:
    mark = ids.new_key()
    breed = """
import os, sys, time
print("breeding", flush=True)
for _ in range(400):
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
    time.sleep(0.0005)
time.sleep(600)
"""
    environment = {**os.environ, "MARK_OF_THE_TEST": mark}
    parent = subprocess.Popen([sys.executable, "-c", breed], stdout=subprocess.PIPE, env=environment)
    with parent:
        assert parent.stdout is not None
        await asyncio.to_thread(parent.stdout.readline)
        proc = host.find(parent.pid)
        assert proc is not None
        await boxes.end([proc])
    left = [host.find(pid) for pid in host.marked(f"MARK_OF_THE_TEST={mark}".encode())]
    try:
        assert [one for one in left if one is not None] == []
    finally:
        for one in left:
            if one is not None:
                one.send(signal.SIGKILL)
