"""The folders that ids of projects and workspaces name, where an id is given up and may be given again.

A workspace's folder is found by the ids alone. So its files are out of the way before anybody hears that it was
deleted, and nobody makes a workspace of a chosen id in between: the next of that id begins empty.
"""

import asyncio
from collections.abc import Awaitable, Callable

from oubliette.server.storage.database import Database, Unit
from oubliette.server.tasks import Tasks

# Takes the files of a workspace, or of a project with all of them, from the place where they would be found.
Vacate = Callable[[str, str | None], Awaitable[None]]


class Premises:
    def __init__(self, database: Database, tasks: Tasks, vacate: Vacate) -> None:
        self._database = database
        self._tasks = tasks
        self._vacate = vacate
        self.naming = asyncio.Lock()  # held by who makes a workspace of a chosen id, and by who deletes one

    async def delete(self, unit: Unit[bool], project_id: str, workspace_id: str | None = None) -> bool:
        """Commit a deletion and take the files out of the way; whoever asked may leave in between.

        The unit tells whether there was anything to delete. Without a workspace, it is the whole project.
        """

        async def done() -> bool:
            async with self.naming:
                was_there = await self._database.write(unit)
                if was_there:
                    await self._vacate(project_id, workspace_id)
                return was_there

        return await self._tasks.to_the_end(done())
