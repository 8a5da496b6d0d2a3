"""The embedded database: one file, write-ahead log, units grouped into one transaction per tick of the loop.

Two grades of durability. `process` (the default): a commit survives a killed process; units run on the loop, where
a point query costs less than a thread hop would. `power`: a commit survives a power cut; the same units run in one
writer thread that syncs the log, many to a sync. In both a unit has a savepoint of its own, so one that fails takes
nobody with it.
"""

import asyncio
import sqlite3
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from oubliette.server.errors import StorageFailed
from oubliette.server.storage.database import Row, Tx, Unit
from oubliette.server.storage.migrations import MIGRATIONS

T = TypeVar("T")
Durability = Literal["process", "power"]

CHECKPOINT_FROM_BYTES = 4 * 1024 * 1024
RESTART_FROM_BYTES = 64 * 1024 * 1024
COMMITS_BETWEEN_LOOKS = 256


class _Transaction:
    """Statements of one connection as a `Tx`; its coroutines never suspend."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._execute = connection.execute

    async def one(self, sql: str, *values: Any) -> Row | None:
        return cast("Row | None", self._execute(sql, values).fetchone())

    async def all(self, sql: str, *values: Any) -> list[Row]:
        return self._execute(sql, values).fetchall()

    async def run(self, sql: str, *values: Any) -> int:
        return self._execute(sql, values).rowcount


def _finish(unit: Unit[T], tx: Tx) -> T:
    """Run a unit to its end here and now."""
    coroutine = unit(tx).__await__()
    try:
        next(coroutine)
    except StopIteration as end:
        return cast("T", end.value)
    raise RuntimeError("a unit waited for something other than its transaction")


class _Waiting:
    __slots__ = ("error", "future", "unit", "value")

    def __init__(self, unit: Unit[Any], future: asyncio.Future[Any]) -> None:
        self.unit = unit
        self.future = future
        self.value: Any = None
        self.error: BaseException | None = None

    def tell(self) -> None:
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.value)


class SqliteDatabase:
    def __init__(self, path: Path, *, durability: Durability = "process") -> None:
        self._path = path
        self._durability: Durability = durability
        # In `power` the writer lives in its thread; reads always happen on the loop, on their own connection.
        self._connection = self._connect()
        self._tx = _Transaction(self._connection)
        self._reader = self._connection if durability == "process" else self._connect()
        self._read_tx = _Transaction(self._reader)
        self._queue: list[_Waiting] = []
        self._scheduled = False
        self._commits = 0
        self._threads = ThreadPoolExecutor(1, "database")
        self._checkpoints = ThreadPoolExecutor(1, "checkpoint")
        self._checkpointing = threading.Lock()
        self._closed = False
        migrate(self._connection)

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, isolation_level=None, check_same_thread=False, cached_statements=512, timeout=10
        )
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={'NORMAL' if self._durability == 'process' else 'FULL'}")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA wal_autocheckpoint=0")
        connection.execute("PRAGMA cache_size=-16000")
        return connection

    async def read(self, unit: Unit[T]) -> T:
        return _finish(unit, self._read_tx)

    async def write(self, unit: Unit[T]) -> T:
        if self._closed:
            raise StorageFailed("the database is closed: the server is stopping")
        loop = asyncio.get_running_loop()
        waiting = _Waiting(unit, loop.create_future())
        self._queue.append(waiting)
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._flush, loop)
        return cast("T", await waiting.future)

    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        self._scheduled = False
        batch, self._queue = self._queue, []
        if self._durability == "process":
            self._commit(batch)
            for waiting in batch:
                waiting.tell()
        else:
            self._threads.submit(self._commit_in_thread, batch, loop)

    def _commit_in_thread(self, batch: Sequence[_Waiting], loop: asyncio.AbstractEventLoop) -> None:
        self._commit(batch)

        def tell() -> None:
            for waiting in batch:
                waiting.tell()

        loop.call_soon_threadsafe(tell)

    def _commit(self, batch: Sequence[_Waiting]) -> None:
        """Run the units of a batch in one transaction; afterwards each holds its value or its error."""
        execute = self._connection.execute
        try:
            execute("BEGIN IMMEDIATE")
            for waiting in batch:
                execute("SAVEPOINT unit")
                try:
                    waiting.value = _finish(waiting.unit, self._tx)
                except sqlite3.OperationalError:
                    raise  # the disk or the file, not the unit: nothing of this batch can be trusted
                except Exception as error:
                    waiting.error = error
                    execute("ROLLBACK TO unit")
                execute("RELEASE unit")
            execute("COMMIT")
        except sqlite3.Error as error:
            if self._connection.in_transaction:
                execute("ROLLBACK")
            for waiting in batch:
                waiting.error = StorageFailed(f"the database did not take the write ({error}); nothing was changed")
        self._commits += 1
        if self._commits % COMMITS_BETWEEN_LOOKS == 0:
            self._look_at_log()

    def _look_at_log(self) -> None:
        """Keep the write-ahead log short: by a thread while it is small, by the writer itself when that fell behind."""
        size = self._log_bytes()
        if size > RESTART_FROM_BYTES:
            self._connection.execute("PRAGMA wal_checkpoint(RESTART)")
        elif size > CHECKPOINT_FROM_BYTES and self._checkpointing.acquire(blocking=False):
            self._checkpoints.submit(self._checkpoint)

    def _log_bytes(self) -> int:
        try:
            return self._path.with_name(self._path.name + "-wal").stat().st_size
        except FileNotFoundError:
            return 0

    def _checkpoint(self) -> None:
        try:
            connection = self._connect()
            try:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
            finally:
                connection.close()
        finally:
            self._checkpointing.release()

    async def close(self) -> None:
        if self._closed:
            return
        while self._queue or self._scheduled:  # noqa: ASYNC110 - the next tick is what is waited for
            await asyncio.sleep(0)
        self._closed = True
        self._threads.shutdown(wait=True)
        self._checkpoints.shutdown(wait=True)
        if self._reader is not self._connection:
            self._reader.close()
        self._connection.close()


def migrate(connection: sqlite3.Connection) -> None:
    """Bring the file's schema forward to the newest; an older program refuses a newer file."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise StorageFailed(
            f"the database was written by a newer oubliette (schema {version}, this one knows {len(MIGRATIONS)}):"
            " use that version, or restore a backup"
        )
    for number, statements in enumerate(MIGRATIONS[version:], start=version + 1):
        connection.execute("BEGIN IMMEDIATE")
        for statement in statements:
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version={number}")
        connection.execute("COMMIT")
