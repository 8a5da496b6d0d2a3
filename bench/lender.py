"""Our own caller, in a process of its own: lends one tool that gives back what it was given.

python -m bench.lender URL PROJECT MESSAGE < TOKEN      prints the session's id, lives until its stdin ends
"""

import asyncio
import sys
from typing import Any

import uvloop

from oubliette import Caller


async def main(url: str, project: str, message: str) -> None:
    token = sys.stdin.readline().strip()
    async with Caller(url, token, caller_id="ant") as caller:

        @caller.tool
        def send_response(message: str, recipients: list[str]) -> dict[str, Any]:
            """Send a message to people."""
            return {"message": message, "recipients": recipients}

        session = await caller.start(project, message)
        print(session.id, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
