"""Boxes that are processes of this host, whatever their walls are made of: start, find again, end, leave nothing."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from oubliette.server.containers import host, launch
from oubliette.server.containers.doors import Doors
from oubliette.server.containers.folders import Folder, Folders, Note
from oubliette.server.containers.host import Proc
from oubliette.server.containers.launch import Launch, Launched
from oubliette.server.containers.runtime import Box, BoxSpec
from oubliette.server.errors import BoxFailed

START_WAIT_S = 15.0
# The keeper gives its processes 3 s between TERM and KILL.
STOP_WAIT_S = 4.0
KILL_WAIT_S = 5.0
MARK = "OUBLIETTE_BOX"
_KILL_ROUNDS = 100

Judge = Callable[[Mapping[str, Any]], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Started:
    """A keeper that runs: itself, and what started it where that is somebody else."""

    keeper: Proc
    launcher: Proc

    def procs(self) -> list[Proc]:
        return [self.keeper] if self.keeper == self.launcher else [self.keeper, self.launcher]

    def handle(self) -> dict[str, str]:
        return {
            "pid": str(self.keeper.pid),
            "started": self.keeper.started,
            "launcher_pid": str(self.launcher.pid),
            "launcher_started": self.launcher.started,
        }


def keeper_arguments(spec: BoxSpec) -> list[str]:
    """What follows `keeper` on its command line, which anybody on this host may read: names, no secrets."""
    return [
        *("--box", spec.box_id),
        *("--session", spec.session_id),
        *("--installation", spec.installation),
        *("--abandoned-after", str(spec.abandoned_after_s)),
    ]


class LocalBoxes:
    def __init__(self, home: Path) -> None:
        self.folders = Folders(home)
        self._doors = Doors()
        self._watched: dict[int, int] = {}  # children of ours and the descriptors that tell of their end

    async def open_door(self, box_id: str, relay_key: str, accept: Callable[[], asyncio.Protocol]) -> None:
        folder = self.folders.of(box_id)
        await asyncio.to_thread(folder.make)
        await self._doors.open(box_id, folder.door, relay_key, accept)

    async def start(self, spec: BoxSpec, plan: Callable[[], Launch], judge: Judge, extra: Mapping[str, str]) -> Box:
        """Start the keeper and hear what it says of its walls; a box that fails, or leaks, leaves nothing behind.

        `extra` is what the runtime wants to find again in the handle.
        """
        folder = self.folders.of(spec.box_id)
        note = Note(
            box_id=spec.box_id,
            installation=spec.installation,
            session_id=spec.session_id,
            project_id=spec.project_id,
            workspace_id=spec.workspace_id,
        )

        def prepare() -> Launch:
            folder.make()
            folder.write(note)
            workspace = self.folders.workspace(spec.project_id, spec.workspace_id)
            workspace.mkdir(mode=0o700, parents=True, exist_ok=True)
            return plan()

        try:
            started = await self.launch(await asyncio.to_thread(prepare), spec.keeper_key, folder, judge)
            handle = {**started.handle(), **extra}
            try:
                await asyncio.to_thread(folder.write, msgspec.structs.replace(note, handle=handle))
            except BaseException:
                _kill_tree(started.launcher)
                raise
        except BaseException:
            await self.discard(spec.box_id)
            raise
        return Box(box_id=spec.box_id, session_id=spec.session_id, handle=handle)

    async def discard(self, box_id: str) -> None:
        """Take away the door and folder of a box that did not come to be."""
        self._doors.close(box_id)
        await asyncio.to_thread(self.folders.of(box_id).remove)

    async def launch(self, plan: Launch, key: str, folder: Folder, judge: Judge) -> Started:
        starting = asyncio.get_running_loop().run_in_executor(None, launch.start, plan, key, folder.log)
        try:
            launched = await asyncio.shield(starting)
        except OSError as problem:
            raise BoxFailed(f"cannot start a box: {problem.strerror}") from problem
        except asyncio.CancelledError:
            starting.add_done_callback(_undo)
            raise
        launcher = host.find(launched.pid)  # not buried before this returns to the loop: the pid is still its own
        self._watch(launched.pid)
        try:
            started, facts = await self._hear(launched, launcher, folder)
            leaks = judge(facts)
            if leaks:
                raise BoxFailed("the box does not hold: " + "; ".join(leaks), leaks=list(leaks))
            return started
        except BaseException:
            if launcher is not None:
                _kill_tree(launcher)
            raise
        finally:
            launched.close()

    async def _hear(self, launched: Launched, launcher: Proc | None, folder: Folder) -> tuple[Started, dict[str, Any]]:
        try:
            async with asyncio.timeout(START_WAIT_S):
                facts = await launch.read_line(launched.facts)
                news = await launch.read_line(launched.news) if facts and launched.news is not None else None
        except TimeoutError:
            raise BoxFailed(f"the box did not start within {START_WAIT_S:.0f} s") from None
        keeper = host.find(int(news["child-pid"])) if news else launcher
        if facts is None or keeper is None or launcher is None:
            raise BoxFailed("the box did not start: " + (folder.last_words() or "it said nothing"))
        return Started(keeper, launcher), facts

    async def is_alive(self, box: Box) -> bool:
        started = _started(box.handle)
        return started is not None and started.keeper.is_alive()

    async def stop(self, box: Box) -> None:
        self._doors.close(box.box_id)
        await end(await asyncio.to_thread(self._procs, box))
        await self._end_marked(box.box_id)
        await asyncio.to_thread(self.folders.of(box.box_id).remove)

    def _procs(self, box: Box) -> list[Proc]:
        """The box's own processes, the keeper first: by its handle, else by their command lines."""
        started = _started(box.handle)
        if started is not None:
            return started.procs()
        return [proc for found, proc in _keepers() if found.box_id == box.box_id]

    async def _end_marked(self, box_id: str) -> None:
        """What the droid of a box without walls started, and then cut off from the keeper."""
        mark = f"{MARK}={box_id}".encode()
        for _ in range(20):
            left = [proc for pid in await asyncio.to_thread(host.marked, mark) if (proc := host.find(pid))]
            if not left:
                return
            for proc in left:
                proc.send(signal.SIGKILL)
            for proc in left:
                await proc.ended(KILL_WAIT_S)

    async def all(self, installation: str) -> list[Box]:
        return await asyncio.to_thread(self._all, installation)

    def _all(self, installation: str) -> list[Box]:
        found: dict[str, Box] = {}
        procs: dict[str, list[Proc]] = {}
        for label, proc in _keepers():
            if label.installation == installation:
                known = procs.setdefault(label.box_id, [])
                known.append(proc)
                handle = Started(known[0], known[-1]).handle()
                found[label.box_id] = Box(box_id=label.box_id, session_id=label.session_id, handle=handle)
        for box_id, folder in self.folders.all():
            note = folder.read()
            if note is None:
                found.setdefault(box_id, Box(box_id=box_id, session_id="", handle={}))
            elif note.installation == installation and note.handle:
                found[note.box_id] = Box(box_id=note.box_id, session_id=note.session_id, handle=note.handle)
            elif note.installation == installation:
                found.setdefault(note.box_id, Box(box_id=note.box_id, session_id=note.session_id, handle={}))
        return list(found.values())

    async def close(self) -> None:
        self._doors.close_all()
        for pid in list(self._watched):
            self._unwatch(pid)

    def _watch(self, pid: int) -> None:
        """Bury a child of ours when it ends."""
        fd = self._watched[pid] = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(fd, self._ended, pid)

    def _ended(self, pid: int) -> None:
        self._unwatch(pid)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)

    def _unwatch(self, pid: int) -> None:
        fd = self._watched.pop(pid)
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)


async def end(procs: Sequence[Proc]) -> None:
    """Ask the keeper, which comes first, and then kill what is left.

    Asked is only who listens: the first process of a box ignores what it does not catch, and a launcher that is still
    at work would leave half a box behind. A launcher that has done its work ends with its keeper, and buries it before.
    """
    for position, proc in enumerate(procs):
        patience_s = STOP_WAIT_S if position > 0 or _ask(proc) else 0.0
        if not await proc.ended(patience_s):
            await asyncio.to_thread(_kill_tree, proc)
            if not await proc.ended(KILL_WAIT_S):
                raise BoxFailed("a process of the box cannot be killed")


def _ask(proc: Proc) -> bool:
    if not host.catches(proc.pid, signal.SIGTERM):
        return False
    proc.send(signal.SIGTERM)
    return True


def _undo(starting: asyncio.Future[Launched]) -> None:
    """End what started although nobody waits for it any more."""
    if starting.exception() is None:
        launched = starting.result()
        launched.close()
        launcher = host.find(launched.pid)
        if launcher is not None:
            _kill_tree(launcher)
        os.waitpid(launched.pid, 0)


def _kill_tree(root: Proc) -> None:
    """Kill it and everything below it.

    It is stopped first, so that it starts nothing between the look and the kill, and killed last: what is cut off from
    it can no longer be found.
    """
    root.stop()
    for _ in range(_KILL_ROUNDS):
        below = [proc for pid in host.descendants(root.pid) if (proc := host.find(pid))] if root.is_alive() else []
        if not below:
            break
        for proc in below:
            proc.send(signal.SIGKILL)
    root.send(signal.SIGKILL)


def _started(handle: Mapping[str, str]) -> Started | None:
    """What the handle names; nothing of it for a box whose server was killed before it could write that down."""
    if "pid" not in handle:
        return None
    keeper = Proc(int(handle["pid"]), handle["started"])
    return Started(keeper, Proc(int(handle["launcher_pid"]), handle["launcher_started"]))


@dataclass(frozen=True, slots=True)
class _Label:
    box_id: str
    session_id: str
    installation: str


def _keepers() -> list[tuple[_Label, Proc]]:
    """The keepers on this host by their command lines; of a box with walls only its first process.

    A droid can give its own processes such a command line. Where a box has a note, the note is believed instead; and
    what a droid makes here is a process of its own, that is ended.
    """
    found: list[tuple[bool, _Label, Proc]] = []
    for pid in host.pids():
        label = _label(host.arguments(pid))
        proc = host.find(pid) if label else None
        if label and proc:
            found.append((host.is_first_of_namespace(pid), label, proc))
    found.sort(key=lambda entry: not entry[0])
    return [(label, proc) for _, label, proc in found]


def _label(arguments: Sequence[str]) -> _Label | None:
    if "keeper" not in arguments:
        return None
    rest = arguments[list(arguments).index("keeper") + 1 :]
    options = dict(zip(rest[::2], rest[1::2], strict=False))
    if not {"--box", "--session", "--installation"} <= options.keys():
        return None
    return _Label(options["--box"], options["--session"], options["--installation"])
