"""Lend a function to a droid and watch it being called: ./run python examples/lend_a_tool.py"""

import asyncio
import os

from oubliette import Caller

# The built-in droid runs a plan instead of thinking; a real agent would be asked in plain words.
PLAN = 'Say hello. <<plan [{"tool": "ant_send_response", "args": {"message": "hello"}}, {"say": "Told: $last"}]>>'


async def main() -> None:
    async with Caller(os.environ["OUBLIETTE_URL"], os.environ["OUBLIETTE_TOKEN"], "ant") as caller:

        @caller.tool
        def send_response(message: str) -> str:
            """Send a message to the person who asked."""
            print(f"the droid says: {message}")
            return "sent"

        project = await caller.call("project_create", name="first steps")
        session = await caller.start(project["id"], PLAN)
        print((await session.result(timeout_s=30)).text)
        await session.end()


asyncio.run(main())
