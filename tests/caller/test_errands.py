"""What is remembered of errands is bounded, and never so that one is run twice."""

import pytest
from msgspec import Raw

from oubliette.caller.crew import Crew
from oubliette.caller.errands import Errand, Errands
from oubliette.caller.messages import Announced
from oubliette.caller.tool import tool_of


class World:
    """Errands of one tool, whose answers are taken as soon as they are given."""

    def __init__(self) -> None:
        self.ran = 0
        self.given: list[bytes] = []

        def work(size: int) -> str:
            self.ran += 1
            return "x" * size

        async def fetch(asked: Announced) -> Raw:
            raise NotImplementedError

        self.errands = Errands({"work": tool_of(work)}, Crew(), 1, self.take, fetch)

    def take(self, errand: Errand, answer: bytes) -> None:
        self.given.append(answer)
        errand.over = True

    def ask(self, request_id: str, size: int) -> None:
        arguments = Raw(b'{"size":%d}' % size)
        asked = Announced("caller_tool_request", "gogol_1", request_id, "work", arguments)
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
