"""How soon a session works."""

import statistics
import time
from pathlib import Path

from tests.kit.scene import lent, scene
from tests.kit.server import ServerProcess


async def test_a_session_in_a_box_has_asked_for_its_tools_within_a_second(tmp_path: Path) -> None:
    """From the caller's message to the call of a tool, which the droid makes after its first `tools/list`."""
    took: list[float] = []
    async with ServerProcess(tmp_path / "home") as server, scene(server) as here, here.caller() as caller:
        for _ in range(5):
            began = time.perf_counter()
            session_id = await here.start(caller, [{"tool": "ant_any"}], context=lent())
            request = await caller.request()
            took.append(time.perf_counter() - began)
            await caller.answer(request)
            (await here.turn(session_id)).worked()
            await server.ask("session_end", session_id=session_id)
    print(f"median {statistics.median(took):.3f} s of {[round(seconds, 3) for seconds in took]}")
    assert statistics.median(took) < 1
