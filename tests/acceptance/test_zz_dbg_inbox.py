import asyncio, time, pytest
from tests.acceptance.test_relay import *


async def test_dbg(here):
    async with here.caller() as caller:
        plan = [{"tool": "ant_any", "expect": {"is_error": False, "contains": "at last"}}]
        session_id = await here.start(caller, plan, context=lent())
        request = await caller.request()
        await asyncio.sleep(request["at"] + 45 - time.time())
        a = await caller.answer(request, "at last")
        print(a)
        for e in (await here.turn(session_id)).events if hasattr(await here.turn(session_id), "events") else []:
            print(e)
