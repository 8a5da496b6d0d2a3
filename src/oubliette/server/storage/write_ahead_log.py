"""Keeping the write-ahead log short: by a thread while it is small, by the writer itself when that fell behind.

A log that was copied into the database whole is begun anew, and its file cut back (`journal_size_limit`). What
cannot be copied now (a reader holds an older state, the disk is full) is tried again later: the log is as durable as
the database.
"""

import logging
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

logger = logging.getLogger(__name__)

CHECKPOINT_FROM_BYTES = 4 * 1024 * 1024
RESTART_FROM_BYTES = 64 * 1024 * 1024
COMMITS_BETWEEN_LOOKS = 64


class WriteAheadLog:
    def __init__(
        self,
        database: Path,
        connect: Callable[[], sqlite3.Connection],
        *,
        checkpoint_from: int = CHECKPOINT_FROM_BYTES,
        restart_from: int = RESTART_FROM_BYTES,
    ) -> None:
        self._path = database.with_name(database.name + "-wal")
        self._connect = connect
        self._checkpoint_from = checkpoint_from
        self._restart_from = restart_from
        self._commits = 0
        self._copied = 0  # how long the log was when it was last copied
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._busy = threading.Lock()

    def committed(self, writer: sqlite3.Connection) -> None:
        """A transaction of the writer was committed: look at the log now and then. Never raises."""
        self._commits += 1
        if self._commits % COMMITS_BETWEEN_LOOKS:
            return
        written = self._written()
        if written < self._copied:
            self._copied = 0  # begun anew
        if written > self._restart_from:
            self._checkpoint(writer, "RESTART")
            self._copied = 0
        elif written > self._checkpoint_from + self._copied and self._busy.acquire(blocking=False):
            # Under load the log has always grown by the time that it is copied, and is not begun anew: copy what is
            # new when that is worth a sync again.
            self._copied = written
            self._thread.submit(self._checkpoint_aside)

    def _written(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def _checkpoint_aside(self) -> None:
        try:
            connection = self._connect()
            try:
                self._checkpoint(connection, "PASSIVE")
            finally:
                connection.close()
        except sqlite3.Error as error:
            logger.warning("the write-ahead log was not looked after", extra={"reason": str(error)})
        finally:
            self._busy.release()

    @staticmethod
    def _checkpoint(connection: sqlite3.Connection, how: str) -> None:
        try:
            connection.execute(f"PRAGMA wal_checkpoint({how})")
        except sqlite3.Error as error:
            logger.warning("the write-ahead log was not copied", extra={"reason": str(error)})

    def close(self) -> None:
        self._thread.shutdown()
