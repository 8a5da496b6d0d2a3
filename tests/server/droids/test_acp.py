"""The driver with the real built-in droid: a real process, a real database, numbered streams."""

import asyncio
import json
from pathlib import Path
from typing import Any

from tests.kit.droid_world import serving, world


def plan(*steps: Any) -> str:
    return f"<<plan {json.dumps(steps)}>>"


async def test_a_turn_becomes_events_of_the_log(tmp_path: Path) -> None:
    async with asyncio.timeout(20), world(tmp_path) as made:
        async with serving(made) as server:
            droid = await server.start()
            step = {"tool": "ant_echo", "args": {"message": "hi"}}
            outcome = await server.turn(droid, plan({"say": "one"}, step, {"say": "two: $last"}))
            assert (outcome.stop_reason, outcome.error) == ("end_turn", None)
            assert outcome.text == 'one\n\ntwo: ant_echo: {"message": "hi"}'
        log = await made.log()
        kinds = [event["type"] for event in log if event["type"] not in ("plan", "delta")]
        assert kinds == ["message", "tool_call", "tool_result", "message", "completion"]
