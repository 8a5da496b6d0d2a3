"""Rows of a home's database, read beside the server that writes them."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any


def records(home: Path, table: str, **where: Any) -> list[dict[str, Any]]:
    """Rows of a table, oldest first, with these values."""
    with closing(sqlite3.connect(f"file:{home / 'oubliette.db'}?mode=ro", uri=True)) as database:
        database.row_factory = sqlite3.Row
        condition = " AND ".join(f"{name} IS ?" for name in where) or "1"
        rows = database.execute(f"SELECT * FROM {table} WHERE {condition} ORDER BY rowid", tuple(where.values()))
        return [dict(row) for row in rows]
