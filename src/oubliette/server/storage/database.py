"""The contract of every database that oubliette can stand on.

A room writes its own SQL, in the subset that SQLite and PostgreSQL share, with `?` for parameters, and runs it in a
*unit*: an async function of one transaction. A unit takes values and returns values; it must touch nothing that
other tasks see, because where it runs (on the loop, in a thread, far away) and how often it is tried is the
database's business. What a unit wrote is durable as the settings promise when `write` returns, and not before:
nobody is told of a change from inside its unit.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Row = tuple[Any, ...]


class Tx(Protocol):
    async def one(self, sql: str, *values: Any) -> Row | None:
        """The first row, or None."""
        ...

    async def all(self, sql: str, *values: Any) -> list[Row]: ...

    async def run(self, sql: str, *values: Any) -> int:
        """Execute, and tell how many rows changed."""
        ...

    async def add(self, sql: str, *values: Any) -> None:
        """Insert a row that no unit of this moment looks at again: it may be gathered with others until the commit."""
        ...


Unit = Callable[[Tx], Awaitable[T]]


class Database(Protocol):
    async def read(self, unit: Unit[T]) -> T:
        """Run a unit that only reads, on one consistent state."""
        ...

    async def write(self, unit: Unit[T]) -> T:
        """Run a unit and return after its commit. What it raises rolls it back and is raised here.

        Raises `StorageFailed` where the database did not take the commit; then nothing of the unit happened.
        """
        ...

    async def close(self) -> None: ...
