"""A live session between its turns: what was meant for one of them never reaches the next."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from oubliette.server.droids.acp import AcpDroid
from oubliette.server.tokens.token import Actor
from tests.kit.app import World, world
from tests.kit.held_database import HeldDatabase

ECHO: dict[str, Any] = {"caller_id": "ant", "caller_tools": [{"name": "echo"}]}
ASKING = '<<plan [{"tool": "ant_echo", "args": {}}, {"say": "told: $last"}]>>'


class Talk:
    """A session whose turns each wait for one call of its caller's tool."""

    def __init__(self, here: World, ant: Actor, session_id: str) -> None:
        self.here = here
        self.id = session_id
        self._ant = ant

    async def say(self, **params: Any) -> Any:
        return await self.here.ask("session_message", actor=self._ant, session_id=self.id, message=ASKING, **params)

    async def asked(self) -> str:
        """The call that the open turn waits for."""
        told = await self.here.ask("caller_tool_poll", actor=self._ant, session_id=self.id, wait_seconds=10)
        return told["requests"][0]["request_id"]

    async def answer(self, request_id: str) -> bool:
        answer = {"session_id": self.id, "request_id": request_id, "result": "hello"}
        return (await self.here.ask("caller_tool_response", actor=self._ant, **answer))["accepted"]

    async def turn(self, number: int) -> dict[str, Any]:
        """The end of this turn."""
        async with asyncio.timeout(20):
            while True:
                shown = await self.here.ask("session_get", session_id=self.id, turns=5)
                turn = shown["turns"][number - 1]
                if turn["status"] == "ended":
                    return turn
                await self.here.ask("session_watch", session_id=self.id, wait_seconds=1)

    async def second_turn_is_left_alone(self, first: str, release: Callable[[], None]) -> None:
        """End the first turn, let go of what was held, and answer the second turn's call as if nothing had been."""
        assert await self.answer(first)
        await self.turn(1)
        second = await self.asked()
        release()
        # Longer than anybody who cancels waits for a droid to let go.
        await self.here.ask("session_watch", session_id=self.id, wait_seconds=1.5)
        assert await self.answer(second)
        turn = await self.turn(2)
        assert (turn["stop_reason"], turn["text"]) == ("end_turn", "told: hello")


@asynccontextmanager
async def talking(home: Path) -> AsyncGenerator[Talk]:
    async with world(home) as here:
        project, ant = await here.project(), await here.caller("ant")
        told = await here.ask("session_message", actor=ant, project_id=project, message=ASKING, context=ECHO)
        yield Talk(here, ant, told["session_id"])


def held(here: World, room: Any) -> HeldDatabase:
    """Let this room alone wait for what it wrote."""
    database = HeldDatabase(here.database)
    room._rooms = dataclasses.replace(room._rooms, database=database)
    return database


class Gate:
    """Somebody who came to a point waits there until they are let on."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self._open = asyncio.Event()

    def open(self) -> None:
        self._open.set()

    def before(self, method: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        async def passing(*args: Any) -> None:
            await self._pass()
            await method(*args)

        return passing

    def instead(self) -> Callable[..., Awaitable[None]]:
        async def passing(*_: Any) -> None:
            await self._pass()

        return passing

    async def _pass(self) -> None:
        self.reached.set()
        await self._open.wait()


async def test_a_cancel_that_comes_to_its_turn_too_late_leaves_the_next_one_alone(tmp_path: Path):
    async with talking(tmp_path / "h") as talk, asyncio.TaskGroup() as tasks:
        first = await talk.asked()
        await talk.say()
        audit = held(talk.here, talk.here.app.sessions)
        cancelling = tasks.create_task(talk.here.ask("session_cancel", session_id=talk.id))
        await audit.committed.wait()
        await talk.second_turn_is_left_alone(first, audit.release)
        assert (await cancelling)["cancelled"] is False, "that turn ended by itself"


async def test_a_cancel_whose_turn_ends_while_the_droid_is_told_leaves_the_next_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with talking(tmp_path / "h") as talk, asyncio.TaskGroup() as tasks:
        first = await talk.asked()
        await talk.say()
        gate = Gate()
        # The droid took it for the turn that it had; its commit is long in coming.
        monkeypatch.setattr(AcpDroid, "cancel", gate.instead())
        cancelling = tasks.create_task(talk.here.ask("session_cancel", session_id=talk.id))
        await gate.reached.wait()
        await talk.second_turn_is_left_alone(first, gate.open)
        assert (await cancelling)["cancelled"]


async def test_an_interrupting_message_whose_turn_has_come_does_not_cancel_itself(tmp_path: Path):
    async with talking(tmp_path / "h") as talk, asyncio.TaskGroup() as tasks:
        first = await talk.asked()
        commit = held(talk.here, talk.here.app.gate._rooms.messages)
        interrupting = tasks.create_task(talk.say(interrupt=True))
        await commit.committed.wait()
        await talk.second_turn_is_left_alone(first, commit.release)
        assert (await interrupting)["turn"] == 2


async def test_an_interrupt_ends_the_turn_that_was_open_and_leaves_what_was_queued(tmp_path: Path):
    async with talking(tmp_path / "h") as talk:
        await talk.asked()
        await talk.say()
        await talk.say(interrupt=True)
        assert (await talk.turn(1))["stop_reason"] == "cancelled"
        for number in (2, 3):
            assert await talk.answer(await talk.asked())
            assert (await talk.turn(number))["stop_reason"] == "end_turn"


async def test_a_cancel_that_comes_while_the_droid_is_given_its_prompt_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gate = Gate()
    monkeypatch.setattr(AcpDroid, "prompt", gate.before(AcpDroid.prompt))
    async with world(tmp_path / "h") as here, asyncio.timeout(30):
        plan = '<<plan [{"sleep": 3}, {"say": "not reached"}]>>'
        told = await here.ask("session_message", project_id=await here.project(), message=plan)
        await gate.reached.wait()
        assert (await here.ask("session_cancel", session_id=told["session_id"]))["cancelled"]
        gate.open()
        await here.ask("session_watch", session_id=told["session_id"], wait_seconds=20)
        (turn,) = (await here.ask("session_get", session_id=told["session_id"]))["turns"]
        assert turn["stop_reason"] == "cancelled"
