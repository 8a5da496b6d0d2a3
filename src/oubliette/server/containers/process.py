"""Boxes without walls: the keeper as a plain process of this user, for the built-in droid and for machines that do not
matter. What a box starts is found and ended, nothing is kept from it."""

import asyncio
import functools
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from oubliette.server.containers.boxes import LocalBoxes, keeper_arguments
from oubliette.server.containers.doors import SOCKET
from oubliette.server.containers.inside import pack
from oubliette.server.containers.launch import Launch
from oubliette.server.containers.runtime import Box, BoxSpec, Places
from oubliette.server.errors import BoxFailed, NotConfigured

# What the kernel takes as the address of a unix socket, without its closing zero.
_ADDRESS_BYTES_MAX = 107


class ProcessRuntime:
    def __init__(self, home: Path) -> None:
        self._boxes = LocalBoxes(home)
        self._home = home
        self._program: Path | None = None

    @property
    def name(self) -> str:
        return "process"

    @property
    def isolated(self) -> bool:
        return False

    async def check(self) -> None:
        if not sys.platform.startswith("linux"):
            raise NotConfigured("boxes are processes of Linux: this is another system")

    def places(self, box_id: str) -> Places:
        folder = self._boxes.folders.of(box_id)
        note = folder.read()
        if note is None:
            raise BoxFailed("no such box")
        return Places(
            python=getattr(sys, "_base_executable", None) or sys.executable,
            program=str(self._pack()),
            socket=str(self._short(box_id) / SOCKET),
            workspace=str(self._boxes.folders.workspace(note.project_id, note.workspace_id)),
            home=str(folder.home),
        )

    async def open_door(self, box_id: str, relay_key: str, accept: Callable[[], asyncio.Protocol]) -> None:
        await self._boxes.open_door(box_id, relay_key, accept)
        await asyncio.to_thread(self._shorten, box_id)

    async def create(self, spec: BoxSpec) -> Box:
        try:
            return await self._boxes.start(spec, functools.partial(self._plan, spec), _nothing_to_prove, {})
        except BaseException:
            self._unshorten(spec.box_id)
            raise

    async def is_alive(self, box: Box) -> bool:
        return await self._boxes.is_alive(box)

    async def stop(self, box: Box) -> None:
        await self._boxes.stop(box)
        self._unshorten(box.box_id)

    async def list(self, installation: str) -> list[Box]:
        return await self._boxes.all(installation)

    async def close(self) -> None:
        await self._boxes.close()

    def _pack(self) -> Path:
        if self._program is None:
            self._program = pack(self._home / "programs")
        return self._program

    def _plan(self, spec: BoxSpec) -> Launch:
        return Launch(
            argv=[
                *(sys.executable, "-I", "-S", str(self._pack()), "keeper", *keeper_arguments(spec)),
                *("--mark", spec.box_id),
            ],
            env={
                "PATH": os.environ.get("PATH", os.defpath),
                "LANG": "C.UTF-8",
                "OUBLIETTE_SOCKET": str(self._short(spec.box_id) / SOCKET),
            },
        )

    # Sockets' addresses are short, homes need not be: where the door lies too deep, a link leads to it.

    def _short(self, box_id: str) -> Path:
        door = self._boxes.folders.of(box_id).door
        if len(os.fsencode(door / SOCKET)) <= _ADDRESS_BYTES_MAX:
            return door
        return self._links() / hashlib.sha256(os.fsencode(door)).hexdigest()[:16]

    def _links(self) -> Path:
        return Path(tempfile.gettempdir()) / f"oubliette-{os.geteuid()}"

    def _shorten(self, box_id: str) -> None:
        door, short = self._boxes.folders.of(box_id).door, self._short(box_id)
        if short == door:
            return
        links = self._links()
        links.mkdir(mode=0o700, exist_ok=True)
        found = links.lstat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o077 or links.is_symlink():
            raise NotConfigured(f"{links}: is not a folder of this user alone; remove it, or choose a shorter home")
        short.unlink(missing_ok=True)
        short.symlink_to(door)

    def _unshorten(self, box_id: str) -> None:
        if self._short(box_id) != self._boxes.folders.of(box_id).door:
            self._short(box_id).unlink(missing_ok=True)


def _nothing_to_prove(_facts: Mapping[str, Any]) -> list[str]:
    return []
