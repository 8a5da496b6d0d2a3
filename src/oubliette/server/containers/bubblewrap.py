"""Boxes by bubblewrap: namespaces and an allow-list of the system, where no container engine runs.

Nothing of the host is in a box but what is named here: the system's programs read-only, a few files of /etc (made up
where the host's would tell of the host), the workspace, a private home and /tmp, the box's own door, and no network.
"""

import asyncio
import functools
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from oubliette.server import ids
from oubliette.server.containers import proof, seccomp
from oubliette.server.containers.boxes import LocalBoxes, end, keeper_arguments
from oubliette.server.containers.folders import Folder
from oubliette.server.containers.inside import pack
from oubliette.server.containers.launch import Launch
from oubliette.server.containers.runtime import Box, BoxSpec, Places
from oubliette.server.errors import BoxFailed, NotConfigured

MCP = "/mcp"
SOCKET = f"{MCP}/relay.sock"
WORKSPACE = "/workspace"
HOME = "/home/box"
PROGRAM = "/opt/oubliette/oubliette.pyz"
SYSTEM_PYTHON = "/usr/bin/python3"
OWN_PYTHON = "/opt/python/python"

_ARGUMENTS, _NEWS, _RULES, _FIRST_FILE = 3, 4, 5, 6
# These are the box's own, private and gone with it.
_BOX_TMP, _BOX_VAR_TMP, _BOX_SHARED_MEMORY = "/tmp", "/var/tmp", "/dev/shm"  # noqa: S108
_TMP_BYTES = 1024 * 1024 * 1024
_SHARED_MEMORY_BYTES = 256 * 1024 * 1024
# The top of a system: links where /usr is merged, folders where it is not.
_TOP = tuple(Path("/", name) for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"))
# Of the host's /etc only what programs need to run, and nothing that says whose host it is.
_ETC = (
    *("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime"),
    *("ssl/certs", "ssl/openssl.cnf", "pki/tls/certs", "pki/ca-trust/extracted", "crypto-policies"),
)
_MADE_UP = {
    "/etc/passwd": "box:x:1000:1000::/home/box:/bin/sh\nnobody:x:65534:65534::/nonexistent:/bin/false\n",
    "/etc/group": "box:x:1000:\nnogroup:x:65534:\n",
    "/etc/hosts": "127.0.0.1 localhost box\n::1 localhost\n",
    "/etc/hostname": "box\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
# A box of a server that runs as root is root's to the kernel: settings of the whole host are files here.
_KERNEL_READ_ONLY = ("bus", "driver", "fs", "irq", "sys", "sysrq-trigger", "sysvipc", "tty")
_KERNEL_HIDDEN = (
    *("acpi", "asound", "buddyinfo", "diskstats", "iomem", "ioports", "kallsyms", "kcore", "keys", "key-users", "kmsg"),
    *("kpagecgroup", "kpagecount", "kpageflags", "latency_stats", "modules", "mtrr", "pagetypeinfo", "partitions"),
    *("sched_debug", "scsi", "slabinfo", "swaps", "timer_list", "timer_stats", "vmallocinfo", "zoneinfo"),
)
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": HOME, "OUBLIETTE_SOCKET": SOCKET}

Operation = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Python:
    """A Python for boxes: where it is inside, and what has to be mounted for it."""

    inside: str
    mounts: tuple[Operation, ...] = ()
    wrapper: str | None = None


class BubblewrapRuntime:
    def __init__(self, home: Path, *, bwrap: str = "bwrap", pythons: Sequence[Python] | None = None) -> None:
        self._boxes = LocalBoxes(home)
        self._home = home
        self._bwrap = bwrap
        self._pythons = pythons
        self._program: Path | None = None
        self._chosen: Python | None = None
        self._choosing = asyncio.Lock()

    @property
    def name(self) -> str:
        return "bubblewrap"

    @property
    def isolated(self) -> bool:
        return True

    async def check(self) -> None:
        await self._python()

    def places(self, box_id: str) -> Places:
        note = self._boxes.folders.of(box_id).read()
        python = note.handle.get("python") if note is not None else None
        return Places(
            python=python or (self._chosen or Python(SYSTEM_PYTHON)).inside,
            program=PROGRAM,
            socket=SOCKET,
            workspace=WORKSPACE,
            home=HOME,
        )

    async def open_door(self, box_id: str, relay_key: str, accept: Callable[[], asyncio.Protocol]) -> None:
        await self._boxes.open_door(box_id, relay_key, accept)

    async def create(self, spec: BoxSpec) -> Box:
        try:
            python = await self._python()
        except BaseException:
            await self._boxes.discard(spec.box_id)
            raise
        plan = functools.partial(self._plan, spec, python)
        return await self._boxes.start(spec, plan, proof.leaks, {"python": python.inside})

    async def is_alive(self, box: Box) -> bool:
        return await self._boxes.is_alive(box)

    async def stop(self, box: Box) -> None:
        await self._boxes.stop(box)

    async def list(self, installation: str) -> list[Box]:
        return await self._boxes.all(installation)

    async def close(self) -> None:
        await self._boxes.close()

    async def _python(self) -> Python:
        """The first Python that starts a box, tried once. Raises `NotConfigured`."""
        async with self._choosing:
            if self._chosen is None:
                problem = ""
                for python in await asyncio.to_thread(self._candidates):
                    try:
                        await self._try(python)
                        self._chosen = python
                        break
                    except BoxFailed as failure:
                        problem = problem or failure.message
                else:
                    raise NotConfigured(await asyncio.to_thread(advice, problem))
            return self._chosen

    async def _try(self, python: Python) -> None:
        spec = BoxSpec(
            box_id=ids.new_box_id(),
            installation="check",
            project_id="check",
            session_id="check",
            workspace_id="check",
            relay_key="",
            keeper_key=ids.new_key(),
            abandoned_after_s=5,
        )
        folder = self._boxes.folders.of(spec.box_id)
        workspace = folder.path / "workspace"
        try:
            await asyncio.to_thread(lambda: (folder.make(), workspace.mkdir(mode=0o700)))
            plan = await asyncio.to_thread(self._plan, spec, python, workspace)
            started = await self._boxes.launch(plan, spec.keeper_key, folder, proof.leaks)
            await end(started.procs())
        finally:
            await asyncio.to_thread(folder.remove)

    def _packed(self) -> Path:
        if self._program is None:
            self._program = pack(self._home / "programs")
        return self._program

    def _candidates(self) -> Sequence[Python]:
        self._refuse_exposed_home()
        return self._pythons if self._pythons is not None else (Python(SYSTEM_PYTHON), own_python())

    def _refuse_exposed_home(self) -> None:
        home = self._home.resolve()
        for shown in (Path("/usr"), *_TOP):
            if home.is_relative_to(shown.resolve()):
                raise NotConfigured(f"{home}: every box could read it, since boxes see {shown}; choose another home")

    def _plan(self, spec: BoxSpec, python: Python, workspace: Path | None = None) -> Launch:
        bwrap = shutil.which(self._bwrap)
        if bwrap is None:
            raise NotConfigured("bubblewrap is not installed: install the Debian package bubblewrap (0.8 or newer)")
        folder = self._boxes.folders.of(spec.box_id)
        workspace = workspace or self._boxes.folders.workspace(spec.project_id, spec.workspace_id)
        rules = seccomp.rules()
        made_up = {**_MADE_UP, **({OWN_PYTHON: python.wrapper} if python.wrapper else {})}
        numbers = {path: _FIRST_FILE + index for index, path in enumerate(made_up)}
        operations = [
            *_namespaces(),
            *([("--seccomp", str(_RULES))] if rules else []),
            *_system(),
            *_kernel(),
            *(_made_up(path, numbers[path]) for path in _MADE_UP),
            *python.mounts,
            *(("--perms", "0755", *_made_up(path, numbers[path])) for path in made_up if path not in _MADE_UP),
            *_places(folder, workspace, self._packed()),
        ]
        words = [word for operation in operations for word in operation]
        return Launch(
            argv=[
                *(bwrap, "--args", str(_ARGUMENTS), "--info-fd", str(_NEWS), "--"),
                *(python.inside, "-I", "-S", PROGRAM, "keeper", *keeper_arguments(spec)),
            ],
            env={"PATH": os.defpath},
            files={
                _ARGUMENTS: "".join(f"{word}\0" for word in words).encode(),
                **({_RULES: rules} if rules else {}),
                **{numbers[path]: content.encode() for path, content in made_up.items()},
            },
            news=_NEWS,
        )


def _namespaces() -> list[Operation]:
    return [
        *((f"--unshare-{name}",) for name in ("user", "ipc", "pid", "net", "uts", "cgroup-try")),
        ("--disable-userns",),
        ("--uid", "1000", "--gid", "1000", "--hostname", "box"),
        ("--cap-drop", "ALL"),
        # Not --die-with-parent: a box outlives the server.
        ("--new-session", "--as-pid-1"),
        ("--clearenv",),
        *(("--setenv", name, value) for name, value in _ENVIRONMENT.items()),
    ]


def _system() -> list[Operation]:
    return [
        ("--ro-bind", "/usr", "/usr"),
        *(
            ("--symlink", str(top.readlink()), str(top)) if top.is_symlink() else ("--ro-bind-try", str(top), str(top))
            for top in _TOP
        ),
        *(("--ro-bind-try", f"/etc/{name}", f"/etc/{name}") for name in _ETC),
    ]


def _kernel() -> list[Operation]:
    hidden = [path for name in _KERNEL_HIDDEN if (path := Path("/proc", name)).exists()]
    return [
        ("--proc", "/proc"),
        *(("--ro-bind-try", f"/proc/{name}", f"/proc/{name}") for name in _KERNEL_READ_ONLY),
        *(
            ("--tmpfs", str(path), "--remount-ro", str(path)) if path.is_dir() else ("--ro-bind", os.devnull, str(path))
            for path in hidden
        ),
        ("--dev", "/dev"),
        ("--perms", "1777", "--size", str(_SHARED_MEMORY_BYTES), "--tmpfs", _BOX_SHARED_MEMORY),
        ("--remount-ro", "/dev"),
    ]


def _made_up(path: str, number: int) -> Operation:
    return ("--ro-bind-data", str(number), path)


def _places(folder: Folder, workspace: Path, program: Path) -> list[Operation]:
    return [
        ("--perms", "1777", "--size", str(_TMP_BYTES), "--tmpfs", _BOX_TMP),
        ("--symlink", _BOX_TMP, _BOX_VAR_TMP),
        ("--bind", str(folder.home), HOME),
        ("--bind", str(workspace), WORKSPACE),
        ("--ro-bind", str(folder.door), MCP),
        ("--ro-bind", str(program), PROGRAM),
        ("--chdir", WORKSPACE),
        ("--remount-ro", "/"),
    ]


def own_python() -> Python:
    """The interpreter that runs the server, at a place that does not tell where it came from."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base = Path(sys.base_prefix)
    libraries = [*base.glob(f"lib/lib{version}*.so*"), *base.glob("lib/libpython3.so")]
    packages = base / "lib" / version / "site-packages"
    return Python(
        OWN_PYTHON,
        (
            ("--ro-bind", str((base / "bin" / version).resolve()), f"/opt/python/bin/{version}"),
            ("--ro-bind", str(base / "lib" / version), f"/opt/python/lib/{version}"),
            *(("--ro-bind", str(path.resolve()), f"/opt/python/lib/{path.name}") for path in libraries),
            *([("--tmpfs", f"/opt/python/lib/{version}/site-packages")] if packages.is_dir() else []),
        ),
        # A Python that was built to find its library by an absolute path does not find it here by itself.
        f'#!/bin/sh\nLD_LIBRARY_PATH=/opt/python/lib exec /opt/python/bin/{version} "$@"\n',
    )


# The kernel's switches that forbid a user to make a box, the value that does, and what to do about it.
_SWITCHES = (
    ("kernel/unprivileged_userns_clone", "0", "sysctl kernel.unprivileged_userns_clone=1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "sysctl kernel.apparmor_restrict_unprivileged_userns=0"),
    ("user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=15000"),
)


def advice(problem: str, read: Callable[[str], str | None] | None = None) -> str:
    """What to do about a box that cannot be made, from what was said and from the kernel's settings."""
    look = read or _setting
    for name, forbids, cure in _SWITCHES:
        if look(name) == forbids and os.geteuid() != 0:
            return f"this kernel forbids boxes to ordinary users; as root: {cure} ({problem})"
    if "Unknown option" in problem:
        return f"this bubblewrap is too old, 0.8 or newer is needed: Debian package bubblewrap ({problem})"
    if "execvp" in problem or "python" in problem.lower():
        return f"no Python 3.9 or newer for boxes: install the Debian package python3 ({problem})"
    return f"bubblewrap cannot make a box here: {problem}"


def _setting(name: str) -> str | None:
    try:
        return Path("/proc/sys", name).read_text(encoding="ascii").strip()
    except OSError:
        return None
