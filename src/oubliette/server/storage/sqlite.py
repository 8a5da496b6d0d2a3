"""The embedded database: one file, write-ahead log, units grouped into one transaction per tick of the loop.

Two grades of durability. `process` (the default): a commit survives a killed process; units run on the loop, where
a point query costs less than a thread hop would. `power`: a commit survives a power cut; the same units run in one
writer thread that syncs the log, and whatever is asked during a sync shares the next one. In both a unit that fails
takes nobody with it: a group in which something fails is undone, and each of its units is tried alone.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from oubliette.server.errors import StorageFailed
from oubliette.server.storage.database import Row, Tx, Unit
from oubliette.server.storage.migrations import MIGRATIONS
from oubliette.server.storage.write_ahead_log import CHECKPOINT_FROM_BYTES, WriteAheadLog

T = TypeVar("T")
Durability = Literal["process", "power"]

# Nobody else writes to the file of a running server; who does so by hand holds up everybody on the loop.
LOCKED_FOR_S = 2.0
PAGE_BYTES = 2048
# What the file or the disk did, in any unit; anything else that SQLite raises is the unit's own fault.
_STORAGE_CODES = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_INTERRUPT,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_NOTADB,
    }
)


class _Transaction:
    """Statements of one connection as a `Tx`; its coroutines never suspend."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._execute = connection.execute
        self._gathered: dict[str, list[tuple[Any, ...]]] = {}

    async def one(self, sql: str, *values: Any) -> Row | None:
        return cast("Row | None", self._execute(sql, values).fetchone())

    async def all(self, sql: str, *values: Any) -> list[Row]:
        return self._execute(sql, values).fetchall()

    async def run(self, sql: str, *values: Any) -> int:
        return self._execute(sql, values).rowcount

    async def add(self, sql: str, *values: Any) -> None:
        rows = self._gathered.get(sql)
        if rows is None:
            rows = self._gathered[sql] = []
        rows.append(values)

    def write_gathered(self) -> None:
        """Insert what was added, many rows to a statement."""
        for sql, rows in self._gathered.items():
            self._connection.executemany(sql, rows)
        self._gathered.clear()

    def drop_gathered(self) -> None:
        self._gathered.clear()


def _finish(unit: Unit[T], tx: Tx) -> T:
    """Run a unit to its end here and now."""
    coroutine = unit(tx).__await__()
    try:
        next(coroutine)
    except StopIteration as end:
        return cast("T", end.value)
    coroutine.close()
    raise RuntimeError("a unit waited for something other than its transaction")


def _is_storage(error: Exception) -> bool:
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return isinstance(error, sqlite3.Error) and code is not None and code & 0xFF in _STORAGE_CODES


def _failed(error: Exception) -> StorageFailed:
    return StorageFailed(f"the database did not take the write ({error}); nothing was changed")


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
        try:
            # In `power` the writer lives in its thread; reads always happen on the loop, on their own connection.
            self._connection = self._connect(migrate)
            self._reader = self._connection if durability == "process" else self._connect()
        except sqlite3.Error as error:
            raise StorageFailed(f"{path} cannot be used as the database ({error}): restore a backup") from None
        self._tx = _Transaction(self._connection)
        self._read_tx = _Transaction(self._reader)
        self._log = WriteAheadLog(path, self._connect)
        self._queue: list[_Waiting] = []
        self._is_reading = False
        self._scheduled = False
        self._writing = False
        self._writer = ThreadPoolExecutor(1, "database") if durability == "power" else None
        self._closed = False
        self._drained: asyncio.Future[None] | None = None

    def _connect(self, prepare: Callable[[sqlite3.Connection], None] | None = None) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path, isolation_level=None, check_same_thread=False, cached_statements=512, timeout=LOCKED_FOR_S
        )
        try:
            # Before the file is made: our rows are small and far apart, and the log takes whole pages.
            connection.execute(f"PRAGMA page_size={PAGE_BYTES}")
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute(f"PRAGMA synchronous={'NORMAL' if self._durability == 'process' else 'FULL'}")
            connection.execute("PRAGMA foreign_keys=ON")
            connection.execute("PRAGMA wal_autocheckpoint=0")
            connection.execute(f"PRAGMA journal_size_limit={CHECKPOINT_FROM_BYTES}")
            connection.execute("PRAGMA cache_size=-16000")
            if prepare is not None:
                prepare(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    async def read(self, unit: Unit[T]) -> T:
        self._check_open()
        try:
            self._begin_reading()
            return _finish(unit, self._read_tx)
        except sqlite3.Error as error:
            if not _is_storage(error):
                raise
            raise StorageFailed(f"the database could not be read ({error})") from error

    def _begin_reading(self) -> None:
        """Look at one state for the rest of this turn of the loop: half of what a point query costs is its lock."""
        if not self._is_reading:
            self._reader.execute("BEGIN")
            self._is_reading = True
            asyncio.get_running_loop().call_soon(self._end_reading)

    def _end_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            if self._reader.in_transaction:  # a disk that fails ends it by itself
                self._reader.execute("COMMIT")

    async def write(self, unit: Unit[T]) -> T:
        self._check_open()
        loop = asyncio.get_running_loop()
        waiting = _Waiting(unit, loop.create_future())
        self._queue.append(waiting)
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._flush, loop)
        return cast("T", await waiting.future)

    def _check_open(self) -> None:
        if self._closed:
            raise StorageFailed("the database is closed: the server is stopping")

    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        self._scheduled = False
        if self._writing or not self._queue:
            return  # what came during a sync goes with the next
        batch, self._queue = self._queue, []
        if self._writer is None:
            self._end_reading()
            try:
                self._commit(batch)
            finally:
                self._tell(batch)
        else:
            self._writing = True
            self._writer.submit(self._commit_in_thread, batch, loop)

    def _commit_in_thread(self, batch: Sequence[_Waiting], loop: asyncio.AbstractEventLoop) -> None:
        def written() -> None:
            self._writing = False
            self._tell(batch)
            self._flush(loop)

        try:
            self._commit(batch)
        finally:
            loop.call_soon_threadsafe(written)

    def _tell(self, batch: Sequence[_Waiting]) -> None:
        for waiting in batch:
            waiting.tell()
        if self._drained is not None and not self._queue and not self._drained.done():
            self._drained.set_result(None)

    def _commit(self, batch: Sequence[_Waiting]) -> None:
        """Run the units of a batch in one transaction; afterwards each holds its value or its error."""
        begun = False
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            begun = True
            for waiting in batch:
                waiting.value = _finish(waiting.unit, self._tx)
            self._tx.write_gathered()
            self._connection.execute("COMMIT")
        except BaseException as error:
            self._roll_back()
            if not isinstance(error, Exception):
                self._refuse(batch, RuntimeError("the server was interrupted"))
                raise
            if len(batch) > 1 and begun:
                # The usual batch pays for no savepoints; whose fault it was shows when each stands alone.
                for waiting in batch:
                    self._commit((waiting,))
            elif _is_storage(error):
                self._refuse(batch, error)
            else:
                batch[0].error = error
        else:
            self._log.committed(self._connection)

    def _roll_back(self) -> None:
        self._tx.drop_gathered()
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error:
            pass  # the transaction is gone all the same: SQLite ended it itself

    @staticmethod
    def _refuse(batch: Sequence[_Waiting], error: Exception) -> None:
        for waiting in batch:
            waiting.error = _failed(error)

    async def close(self) -> None:
        """Finish what was asked, refuse what is asked from now on, and let go of the file."""
        if self._closed:
            return
        self._closed = True
        if self._queue or self._writing:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained
        if self._writer is not None:
            await asyncio.to_thread(self._writer.shutdown)
        await asyncio.to_thread(self._log.close)
        self._end_reading()
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
