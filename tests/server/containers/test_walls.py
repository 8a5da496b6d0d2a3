"""The walls of a bubblewrap box, tried from inside."""

import contextlib
import json
import os
import socket
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import pytest

from oubliette.server.containers.bubblewrap import BubblewrapRuntime, own_python
from oubliette.server.containers.runtime import Box
from tests.kit.runtime_claims import Stage, opened

PROBE = Path(__file__).with_name("probe.py")
READ_ONLY = ["/", "/etc", "/usr", "/usr/bin", "/opt", "/opt/oubliette", "/mcp", "/dev", "/home", "/var", "/proc"]


@contextlib.contextmanager
def listeners() -> Generator[tuple[int, str]]:
    """What the host offers to its own processes: a TCP port on every address, and an abstract socket."""
    name = f"oubliette-test-{os.getpid()}"
    with socket.create_server(("0.0.0.0", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0" + name)
        abstract.listen()
        yield tcp.getsockname()[1], name


def an_address() -> str:
    """An address of this host that is not loopback, where it has one."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect(("192.0.2.1", 9))
        return one.getsockname()[0]
    return "192.0.2.1"


@pytest.fixture(params=["the system's Python", "the server's own Python"])
async def stage(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Stage]:
    home = tmp_path / "home"
    pythons = None if request.param == "the system's Python" else [own_python()]
    stage = Stage(lambda: BubblewrapRuntime(home, pythons=pythons))
    yield stage
    await stage.clear()


async def probe(stage: Stage, home: Path) -> dict[str, Any]:
    runtime = stage.runtime()
    other, _ = await opened(runtime, stage.spec())
    spec = stage.spec()
    box, server = await opened(runtime, spec)
    workspace = home / "projects" / spec.project_id / "workspaces" / spec.workspace_id
    (workspace / "probe.py").write_bytes(PROBE.read_bytes())
    with listeners() as (port, abstract):
        told = {
            "port": port,
            "address": an_address(),
            "abstract": abstract,
            "hidden": [
                *("/root", "/run", "/var/run", "/sys", "/boot", "/mnt", "/media", "/srv", "/var/lib", "/var/log"),
                *("/etc/shadow", "/etc/ssh", "/etc/ssl/private", "/etc/resolv.conf", "/etc/machine-id"),
                *("/proc/1/root/root", str(Path.home()), str(home), os.fspath(Path(__file__).parents[3])),
                *("/dev/vda", "/dev/kmsg", "/dev/mem", "/dev/fuse", "/dev/kvm"),
            ],
            "read_only": READ_ONLY,
            "host_pid": os.getpid(),
        }
        argv = [runtime.places(box.box_id).python, "-I", "-S", "/workspace/probe.py", json.dumps(told)]
        await server.start("probe", *argv, cwd="/workspace", HOME="/home/box")
        exited = await server.exited("probe")
    assert exited.exit_code == 0, bytes(server.errors["probe"]).decode()
    for one in (box, other):
        await runtime.stop(one)
    return json.loads(server.output["probe"])


async def test_nothing_leads_out_of_a_box(stage: Stage, tmp_path: Path) -> None:
    found = await probe(stage, tmp_path / "home")

    for way in (
        *("tcp", "tcp to an address of the host", "udp", "ipv6", "dns", "an abstract socket of the host"),
        *("raw socket", "packet socket", "replace the socket", "the keeper's memory", "the keeper's environment"),
        *("the keeper's files", "the keeper's root", "trace the keeper", "new user namespace", "new mount namespace"),
        *("mount", "unmount a cover", "become root", "chroot", "set the host's name", "device", "terminal"),
        *("signal beyond the box", "kernel keys", "keyring", "io_uring", "a call of another convention"),
    ):
        assert "failed" in found[way], (way, found[way])
    assert found["interfaces"] == ["lo"]
    assert [path for path, is_there in found["hidden"].items() if is_there] == []
    assert {path: one for path, one in found["read-only"].items() if "did" in one} == {}
    assert {path: one for path, one in found["writable"].items() if "did" not in one} == {}
    assert found["kernel settings"] == []
    assert len(found["processes"]) == 2  # the keeper and the probe
    assert found["processes"][0] == 1


async def test_a_box_shows_nothing_of_its_host(stage: Stage, tmp_path: Path) -> None:
    found = await probe(stage, tmp_path / "home")
    assert found["hostname"] == "box"
    assert found["user"][:2] == [1000, 1000]
    assert set(found["capabilities"]) == {"0" * 16}
    assert found["no new privileges"] == "1"
    assert {name for name in found["environment"] if name not in ("LD_LIBRARY_PATH", "PWD", "LC_CTYPE")} == {
        *("PATH", "LANG", "HOME"),
    }
    assert [line.split(":")[0] for line in found["passwd"].splitlines()] == ["box", "nobody"]
    assert socket.gethostname() not in found["hosts"]
    assert found["seen"]["/mcp"] == ["key", "relay.sock"]
    assert found["seen"]["/home"] == ["box"]
    assert found["seen"]["/var"] == ["tmp"]
    assert set(found["open files"]) <= {"0", "1", "2", "3"}  # the last is the listing's own


async def test_what_a_droid_writes_in_its_workspace_outlives_the_box(stage: Stage, tmp_path: Path) -> None:
    runtime, spec = stage.runtime(), stage.spec()
    box, server = await opened(runtime, spec)
    await server.start(
        "d", "/bin/sh", "-c", "echo kept > kept; mkdir -m 0 sealed; echo lost > ~/lost", cwd="/workspace"
    )
    await server.exited("d")
    await runtime.stop(box)
    workspace = tmp_path / "home" / "projects" / spec.project_id / "workspaces" / spec.workspace_id
    assert (workspace / "kept").read_text() == "kept\n"
    assert list((tmp_path / "home" / "boxes").iterdir()) == []


async def test_a_home_that_is_too_deep_to_walk_is_removed(stage: Stage, tmp_path: Path) -> None:
    runtime = stage.runtime()
    box, server = await opened(runtime, stage.spec())
    dig = "import os\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')"
    await server.start("d", runtime.places(box.box_id).python, "-I", "-S", "-c", dig, cwd="/home/box")
    assert (await server.exited("d")).exit_code == 0
    await runtime.stop(box)
    assert list((tmp_path / "home" / "boxes").iterdir()) == []


async def test_a_home_that_the_droid_locked_is_removed(stage: Stage, tmp_path: Path) -> None:
    runtime = stage.runtime()
    box, server = await opened(runtime, stage.spec())
    lock = "mkdir -p ~/a/b && echo x > ~/a/b/c && ln -s / ~/a/up && chmod 0 ~/a/b ~/a ~"
    await server.start("d", "/bin/sh", "-c", lock, cwd="/workspace", HOME="/home/box")
    assert (await server.exited("d")).exit_code == 0
    await runtime.stop(box)
    assert list((tmp_path / "home" / "boxes").iterdir()) == []


async def test_everything_in_a_box_dies_with_it(stage: Stage) -> None:
    runtime = stage.runtime()
    box, server = await opened(runtime, stage.spec())
    hide = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve("/bin/sleep", ["sleep", "600"], {})
        os._exit(0)
print("hidden", flush=True)
time.sleep(600)
"""
    await server.start("d", runtime.places(box.box_id).python, "-I", "-S", "-c", hide)
    await server.until(lambda: bytes(server.output["d"]) == b"hidden\n")
    before = members(box)
    assert len(before) >= 5
    await runtime.stop(box)
    assert [pid for pid in before if Path(f"/proc/{pid}").exists()] == []


def members(box: Box) -> list[int]:
    """Every process of the box's own namespace, as the host numbers them."""
    mine = Path(f"/proc/{box.handle['pid']}/ns/pid").readlink()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (entry / "ns" / "pid").readlink() == mine:
                    found.append(int(entry.name))
    return found
