"""The box of a session: made, found again after a restart, and ended.

A box's keys are in memory and in the box; stored are their hashes. The relay key is made anew whenever a server
opens the box's door (the file beside the socket is read at each connect); the keeper's own key lives in the
keeper's memory and is checked against its hash.
"""

import asyncio
import hashlib
import hmac
import json
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal

from oubliette.server import ids
from oubliette.server.clock import Clock
from oubliette.server.containers.runtime import Box, BoxSpec, Places, Runtime
from oubliette.server.droids.driver import KeeperLink
from oubliette.server.errors import BoxFailed
from oubliette.server.sessions.insistence import insist
from oubliette.server.storage.database import Database, Row, Tx
from oubliette.server.tasks import Tasks

logger = logging.getLogger(__name__)

KEEPER_WAIT_S = 20.0
LOOK_EVERY_S = 0.5
ADOPT_WAIT_S = 10.0


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


@dataclass(slots=True)
class OpenBox:
    """A running box whose door this server keeps."""

    box: Box
    runtime: Runtime
    relay_key_hash: bytes
    keeper_key_hash: bytes
    lost: Callable[[str], None]
    link: KeeperLink | None = None
    attached: asyncio.Event = field(default_factory=asyncio.Event)
    watch: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self.box.box_id

    @property
    def places(self) -> Places:
        """Where things are in there; known once the box was made."""
        return self.runtime.places(self.id)


class Boxes:
    def __init__(
        self,
        *,
        database: Database,
        clock: Clock,
        runtime: Runtime,
        installation: str,
        tasks: Tasks,
        abandoned_after_s: float,
        accept: Callable[[str], Callable[[], asyncio.Protocol]],
    ) -> None:
        self._database = database
        self._clock = clock
        self._runtime = runtime
        self._installation = installation
        self._tasks = tasks
        self._abandoned_after_s = abandoned_after_s
        self._accept = accept
        self._open: dict[str, OpenBox] = {}

    @property
    def runtime(self) -> Runtime:
        return self._runtime

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something beside, owned by the app."""
        self._tasks.create_task(work)

    def find(self, box_id: str) -> OpenBox | None:
        return self._open.get(box_id)

    def session_of(self, box_id: str, key: str, role: Literal["client", "keeper"]) -> str | None:
        """The session of this box, if the key is the one for this role."""
        one = self._open.get(box_id)
        if one is None:
            return None
        wanted = one.relay_key_hash if role == "client" else one.keeper_key_hash
        return one.box.session_id if hmac.compare_digest(wanted, _hash(key)) else None

    async def make(
        self, session_id: str, project_id: str, workspace_id: str, *, lost: Callable[[str], None]
    ) -> OpenBox:
        """Start a box and wait until its keeper is there. Raises `BoxFailed`; then nothing of it is left."""
        spec = BoxSpec(
            box_id=ids.new_box_id(),
            installation=self._installation,
            project_id=project_id,
            session_id=session_id,
            workspace_id=workspace_id,
            relay_key=ids.new_key(),
            keeper_key=ids.new_key(),
            abandoned_after_s=self._abandoned_after_s,
        )
        provisional = Box(box_id=spec.box_id, session_id=session_id, handle={})
        one = self._open[spec.box_id] = OpenBox(
            provisional,
            self._runtime,
            _hash(spec.relay_key),
            _hash(spec.keeper_key),
            lost,
        )
        try:
            await self._runtime.open_door(spec.box_id, spec.relay_key, self._accept(spec.box_id))
            one.box = await self._runtime.create(spec)
            await self._record(one)
            async with asyncio.timeout(KEEPER_WAIT_S):
                await one.attached.wait()
        except BaseException as error:
            await self.end(one)
            if isinstance(error, TimeoutError):
                raise BoxFailed(f"the box's keeper did not report within {KEEPER_WAIT_S:g} seconds") from None
            raise
        return one

    async def _record(self, one: OpenBox) -> None:
        now = self._clock.now()

        async def write(tx: Tx) -> None:
            await tx.run(
                "INSERT INTO boxes (id, session_id, runtime, handle, relay_key_hash, keeper_key_hash, state,"
                " created_at) VALUES (?, ?, ?, ?, ?, ?, 'running', ?)",
                one.id,
                one.box.session_id,
                self._runtime.name,
                json.dumps(dict(one.box.handle)),
                one.relay_key_hash,
                one.keeper_key_hash,
                now,
            )

        await self._database.write(write)

    async def adopt(self, session_id: str, *, lost: Callable[[str], None]) -> OpenBox | None:
        """Find a session's running box again after a restart; None where it is gone."""

        async def read(tx: Tx) -> Row | None:
            return await tx.one(
                "SELECT id, handle, keeper_key_hash FROM boxes WHERE session_id = ? AND state = 'running'"
                " AND runtime = ? ORDER BY created_at DESC LIMIT 1",
                session_id,
                self._runtime.name,
            )

        row = await self._database.read(read)
        if row is None:
            return None
        box = Box(box_id=row[0], session_id=session_id, handle=json.loads(row[1]))
        key = ids.new_key()
        one = OpenBox(box, self._runtime, _hash(key), row[2], lost)
        if not await self._runtime.is_alive(box):
            await self.end(one)
            return None
        self._open[box.box_id] = one

        async def write(tx: Tx) -> None:
            await tx.run("UPDATE boxes SET relay_key_hash = ? WHERE id = ?", one.relay_key_hash, box.box_id)

        await self._database.write(write)
        await self._runtime.open_door(box.box_id, key, self._accept(box.box_id))
        try:
            async with asyncio.timeout(ADOPT_WAIT_S):
                await one.attached.wait()
        except TimeoutError:
            await self.end(one)
            return None
        return one

    async def end(self, one: OpenBox) -> None:
        """Stop a box and forget it; twice is no error."""
        self._open.pop(one.id, None)
        if one.watch is not None:
            one.watch.cancel()
        await self._runtime.stop(one.box)
        now = self._clock.now()

        async def write(tx: Tx) -> None:
            await tx.run(
                "UPDATE boxes SET state = 'ended', ended_at = ? WHERE id = ? AND state = 'running'", now, one.id
            )
            await tx.run(
                "UPDATE processes SET state = 'ended', ended_at = ? WHERE box_id = ? AND ended_at IS NULL", now, one.id
            )

        await self._database.write(write)

    async def end_of(self, session_id: str) -> None:
        """End what a session still has, by the rows: a box whose taking up was cut off is in nobody else's hands."""

        async def read(tx: Tx) -> list[Row]:
            return await tx.all(
                "SELECT id, handle, keeper_key_hash FROM boxes WHERE session_id = ? AND state = 'running'"
                " AND runtime = ?",
                session_id,
                self._runtime.name,
            )

        for box_id, handle, keeper_key_hash in await self._database.read(read):
            one = self._open.get(box_id)
            if one is None:
                box = Box(box_id=box_id, session_id=session_id, handle=json.loads(handle))
                one = OpenBox(box, self._runtime, b"", keeper_key_hash, lambda reason: None)
            await self.end(one)

    async def reap(self) -> int:
        """End every box of this installation that no live session keeps; how many those were."""

        async def read(tx: Tx) -> list[Row]:
            return await tx.all(
                "SELECT boxes.id FROM boxes JOIN sessions ON sessions.id = session_id"
                " WHERE boxes.state = 'running' AND sessions.ended_at IS NULL"
            )

        kept = {row[0] for row in await self._database.read(read)} | set(self._open)
        orphans = [box for box in await self._runtime.list(self._installation) if box.box_id not in kept]
        for box in orphans:
            if box.box_id not in self._open:
                logger.warning("an orphaned box is ended", extra={"box_id": box.box_id, "session_id": box.session_id})
                await self._runtime.stop(box)
        return len(orphans)

    # -- the keeper's connection --------------------------------------------------------------------------------

    def keeper_attached(self, box_id: str, link: KeeperLink) -> None:
        one = self._open[box_id]
        one.link = link
        one.attached.set()
        if one.watch is not None:
            one.watch.cancel()
            one.watch = None

    def keeper_left(self, box_id: str, link: KeeperLink) -> None:
        """The keeper's connection closed: it returns, or the box is dead; which, is watched."""
        one = self._open.get(box_id)
        if one is None or one.link is not link:
            return
        one.link = None
        one.attached.clear()
        one.watch = self._tasks.create_task(self._watch(one))

    async def _watch(self, one: OpenBox) -> None:
        while self._open.get(one.id) is one and not one.attached.is_set():
            if not await self._runtime.is_alive(one.box):
                logger.warning("a box was lost", extra={"box_id": one.id, "session_id": one.box.session_id})
                one.watch = None
                await insist(one.box.session_id, lambda: self.end(one))
                one.lost("the box ended: its first process is gone")
                return
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    await one.attached.wait()
            except TimeoutError:
                pass
