"""A runtime without processes: boxes are objects, their keepers are protocols in this very loop.

A `FakeHost` is what outlives a server: boxes go on in it while a `FakeRuntime` comes and goes. The keepers know one
program, `cat`. Faults can be asked for: a box that does not start, one that ends by itself.
"""

import asyncio
import base64
import contextlib
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec

from oubliette.server.containers.doors import SOCKET, Doors
from oubliette.server.containers.runtime import Box, BoxSpec, Places
from oubliette.server.errors import BoxFailed
from oubliette.server.ids import new_key
from oubliette.wire import jsonrpc, relay


class FakeHost:
    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fake-host-"))
        self.boxes: dict[str, FakeBox] = {}
        self.refuses_to_start: str | None = None  # the reason

    def door(self, box_id: str) -> Path:
        return self.folder / box_id

    def close(self) -> None:
        for box in self.boxes.values():
            box.keeper.end()
        shutil.rmtree(self.folder)


@dataclass
class FakeBox:
    spec: BoxSpec
    keeper: "FakeKeeper"


class FakeRuntime:
    def __init__(self, host: FakeHost) -> None:
        self._host = host
        self._doors = Doors()

    @property
    def name(self) -> str:
        return "fake"

    @property
    def isolated(self) -> bool:
        return True

    async def check(self) -> None:
        pass

    def places(self, box_id: str) -> Places:
        return Places(
            python="/usr/bin/python3",
            program="/opt/oubliette/oubliette.pyz",
            socket=str(self._host.door(box_id) / SOCKET),
            workspace="/workspace",
            home="/home/box",
        )

    async def open_door(self, box_id: str, relay_key: str, accept: Callable[[], asyncio.Protocol]) -> None:
        await self._doors.open(box_id, self._host.door(box_id), relay_key, accept)

    async def create(self, spec: BoxSpec) -> Box:
        if self._host.refuses_to_start is not None or "/" in spec.workspace_id:
            self._doors.close(spec.box_id)
            shutil.rmtree(self._host.door(spec.box_id), ignore_errors=True)
            raise BoxFailed(self._host.refuses_to_start or "an id that cannot be the name of a folder")
        keeper = FakeKeeper(self._host.door(spec.box_id) / SOCKET, spec.keeper_key, spec.abandoned_after_s)
        self._host.boxes[spec.box_id] = FakeBox(spec, keeper)
        keeper.connect()
        return _box(spec)

    async def is_alive(self, box: Box) -> bool:
        found = self._host.boxes.get(box.box_id)
        return found is not None and not found.keeper.has_ended

    async def stop(self, box: Box) -> None:
        self._doors.close(box.box_id)
        found = self._host.boxes.pop(box.box_id, None)
        if found is not None:
            found.keeper.end()
        shutil.rmtree(self._host.door(box.box_id), ignore_errors=True)

    async def list(self, installation: str) -> list[Box]:
        return [_box(box.spec) for box in self._host.boxes.values() if box.spec.installation == installation]

    async def close(self) -> None:
        self._doors.close_all()


def _box(spec: BoxSpec) -> Box:
    return Box(box_id=spec.box_id, session_id=spec.session_id, handle={"fake": spec.box_id})


@dataclass
class _Cat:
    argv: list[str]
    output: bytearray = field(default_factory=bytearray)
    acknowledged: int = 0
    exited: dict[str, int] = field(default_factory=dict[str, int])

    def state(self, process: str) -> dict[str, Any]:
        length = len(self.output)
        return {
            "process": process,
            "stdin_offset": length,
            "stdout_from": self.acknowledged,
            "stdout_to": length,
            **self.exited,
        }


class FakeKeeper(asyncio.Protocol):
    """Attaches again and again by the loop's own timers, and keeps processes that say what they are told."""

    def __init__(self, path: Path, key: str, abandoned_after_s: float) -> None:
        self.has_ended = False
        self._path = path
        self._key = key
        self._instance = new_key()
        self._abandoned_after_s = abandoned_after_s
        self._cats: dict[str, _Cat] = {}
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._is_attached = False
        self._connecting: asyncio.Task[Any] | None = None
        self._buffer = b""
        self._abandoned = self._loop.call_later(abandoned_after_s, self.end)

    def connect(self) -> None:
        if not self.has_ended:
            connection = self._loop.create_unix_connection(lambda: self, str(self._path))
            self._connecting = self._loop.create_task(connection)
            self._connecting.add_done_callback(self._tried)

    def _tried(self, connecting: asyncio.Task[Any]) -> None:
        if not connecting.cancelled() and connecting.exception() is not None:
            self._loop.call_later(0.02, self.connect)

    def end(self) -> None:
        self.has_ended = True
        self._abandoned.cancel()
        if self._transport is not None:
            self._transport.abort()
        if self._connecting is not None:
            self._connecting.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._buffer = cast("asyncio.Transport", transport), b""
        states = [cat.state(process) for process, cat in self._cats.items()]
        attach = {"key": self._key, "role": "keeper", "instance": self._instance, "protocol": 1, "processes": states}
        self._transport.write(jsonrpc.request(1, "attach", attach))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport, self._is_attached = None, False
        if not self.has_ended:
            self._abandoned.cancel()
            self._abandoned = self._loop.call_later(self._abandoned_after_s, self.end)
            self._loop.call_later(0.02, self.connect)

    def data_received(self, data: bytes) -> None:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            frame = msgspec.json.decode(line)
            if "method" in frame:
                self._serve(frame)
            elif "result" in frame and not self._is_attached:
                self._attached(frame["result"])

    def _attached(self, attached: dict[str, Any]) -> None:
        self._is_attached = True
        self._abandoned.cancel()
        self._abandoned_after_s = attached["abandoned_after_s"]
        for process, cat in self._cats.items():
            cat.acknowledged = attached["acks"].get(process, cat.acknowledged)
            self._report(process, cat, cat.acknowledged)

    def _serve(self, frame: dict[str, Any]) -> None:
        params, request = frame["params"], frame.get("id")
        process = params["process"]
        cat = self._cats.get(process)
        if frame["method"] == "start":
            if params["argv"][0].rpartition("/")[2] != "cat":
                self._refuse(request, "not_found", "no such program in a fake box")
                return
            cat = self._cats.setdefault(process, _Cat(params["argv"]))
            self._answer(request, cat.state(process))
        elif cat is None:
            self._refuse(request, "not_found", "no such process")
        elif frame["method"] == "ack":
            cat.acknowledged = max(cat.acknowledged, params["offset"])
        elif frame["method"] == "signal":
            cat.exited = cat.exited or {"exit_signal": {"TERM": 15, "KILL": 9, "INT": 2}[params["signal"]]}
            self._answer(request, {})
            self._report(process, cat, len(cat.output))
        elif frame["method"] == "stdin":
            before = len(cat.output)
            cat.output += base64.b64decode(params["data"])[max(0, before - params["offset"]) :]
            if params.get("eof"):
                cat.exited = cat.exited or {"exit_code": 0}
            self._answer(request, {"stdin_offset": len(cat.output)})
            self._report(process, cat, before)

    def _report(self, process: str, cat: _Cat, offset: int) -> None:
        data = bytes(cat.output[offset:])
        if data:
            encoded = base64.b64encode(data).decode()
            self._write(
                jsonrpc.notification("stdout", relay.Stdout(process=process, stream="out", offset=offset, data=encoded))
            )
        if cat.exited:
            self._write(jsonrpc.notification("exited", {"process": process, **cat.exited}))

    def _answer(self, request: int | None, result: object) -> None:
        if request is not None:
            self._write(jsonrpc.result(request, result))

    def _refuse(self, request: int | None, kind: str, message: str) -> None:
        if request is not None:
            self._write(jsonrpc.error(request, jsonrpc.ErrorObject(code=-32000, message=message, data={"kind": kind})))

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            with contextlib.suppress(RuntimeError):
                self._transport.write(data)
