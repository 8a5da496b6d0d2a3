"""What is remembered of errands is bounded, and never so that one is run twice."""

from typing import Any

import pytest
from msgspec import UNSET, Raw

from oubliette.caller.crew import Crew
from oubliette.caller.errands import Errand, Errands
from oubliette.caller.messages import Announced
from oubliette.caller.tool import Tool, tool_of


class World:
    """Errands of one tool, or of none yet, whose answers are taken as soon as they are given."""

    def __init__(self, *, lent: bool = True, parallel_max: int = 1) -> None:
        self.ran = 0
        self.given: list[bytes] = []
        self.tools: dict[str, Tool] = {}

        def work(size: int) -> str:
            self.ran += 1
            return "x" * size

        async def fetch(asked: Announced) -> Raw:
            raise NotImplementedError

        if lent:
            self.tools = {"work": tool_of(work), "threaded": tool_of(work, name="threaded", threaded=True)}
        self.errands = Errands(self.tools, Crew(), parallel_max, self.take, fetch)

    def take(self, errand: Errand, answer: bytes) -> None:
        self.given.append(answer)
        errand.over = True

    def ask(self, request_id: str, size: int, tool: str = "work") -> None:
        arguments = Raw(b'{"size":%d}' % size)
        asked = Announced("caller_tool_request", "gogol_1", request_id, tool, arguments)
        self.errands.asked(asked)


def test_an_answer_that_is_no_longer_held_is_not_worked_out_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("oubliette.caller.errands.ANSWERS_KEPT_BYTES", 1000)
    world = World()
    world.ask("r1", 800)
    world.ask("r1", 800)
    assert world.given[0] == world.given[1]
    world.ask("r2", 800)
    world.ask("r1", 800)
    assert world.ran == 2
    assert b"no longer held" in world.given[-1]
    world.ask("r2", 800)
    assert world.given[-1] == world.given[2]


def test_only_so_many_errands_are_remembered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("oubliette.caller.errands.ERRANDS_REMEMBERED", 3)
    world = World()
    for n in range(10):
        world.ask(f"r{n}", 1)
    assert len(world.errands._known) == 3
    world.ask("r9", 1)
    assert world.ran == 10


@pytest.mark.parametrize("manner", [{"lent": False}, {"parallel_max": 0}], ids=["nothing is lent", "all are busy"])
def test_nothing_is_kept_of_what_is_withdrawn_while_it_waits(manner: dict[str, Any]):
    world = World(**manner)
    for n in range(100):
        world.ask(f"r{n}", 1, tool="threaded")
        asked = world.errands._known[f"r{n}"].asked
        assert asked.arguments is not UNSET
        world.errands.withdrawn(f"r{n}")
        assert asked.arguments is UNSET
    assert (len(world.errands._early), len(world.errands._queue)) == (0, 0)
