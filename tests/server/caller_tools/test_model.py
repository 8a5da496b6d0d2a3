"""The exchange against a naive model: whatever happens in whatever order, and a restart after every step."""

import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oubliette.server.errors import CallFailed, CallKeyReused
from tests.kit.exchange_rig import SESSION, Heard, Rig, actor, rig, tools

# Fractions keep the model's instants apart: no deadline falls on the end of a grace.
GRACE_S = 4.25
RESTART_GRACE_S = 30.125
TIMEOUT_S = 20.0
TIMEOUT_MAX_S = 50.0
KEYS = ["a", "b", "c", "d", "e"]

Step = tuple[Any, ...]
half = st.integers(1, 60).map(lambda number: number / 2)
keys = st.sampled_from(KEYS)
calls = st.tuples(st.just("call"), keys, st.sampled_from(["x", "x", "x", "y"]))
answers = st.tuples(st.just("answer"), keys, st.sampled_from([1, 1, 2]))
attaches = st.tuples(st.just("attach"))
steps = st.one_of(
    calls,
    calls,
    calls,
    answers,
    attaches,
    attaches,
    st.tuples(st.just("fail"), keys, st.sampled_from(["no", ""])),
    st.tuples(st.just("foreign"), keys),
    st.tuples(st.just("cancel"), keys),
    st.tuples(st.just("extend"), keys, half),
    st.tuples(st.just("gone"), st.sampled_from(["one", "two"])),
    st.tuples(st.just("pass"), half),
    st.tuples(st.just("jump"), st.integers(-100, 100)),
    st.tuples(st.just("detach")),
    st.tuples(st.just("restart"), half),
)
# Everybody there and something open: what follows has something to bite on.
opening: list[Step] = [("attach",), ("call", "a", "x"), ("call", "b", "x")]


@dataclass
class ModelCall:
    argument: str
    created: float
    deadline: float  # wall, as in the row
    due: float  # monotonic
    instance: str
    state: str = "pending"
    said: Any = None
    waiters: list[asyncio.Task[bytes]] = field(default_factory=list[asyncio.Task[bytes]])


class Model:
    """What should be so, in the simplest words."""

    def __init__(self) -> None:
        self.wall = 0.0
        self.mono = 0.0
        self.calls: dict[str, ModelCall] = {}
        self.attached = False
        self.absent_at = 0.0  # monotonic: from when on an owner without a carrier counts as gone
        self.all_until = 0.0

    def pending(self) -> list[ModelCall]:
        return [call for call in self.calls.values() if call.state == "pending"]

    def end(self, call: ModelCall, state: str, said: Any = None) -> None:
        call.state, call.said = state, said

    def pass_time(self, seconds: float) -> None:
        until = self.mono + seconds
        while True:
            gone = max(self.absent_at, self.all_until, self.mono) if not self.attached and self.pending() else None
            due = min((call.due for call in self.pending()), default=None)
            at = min((instant for instant in (gone, due) if instant is not None), default=None)
            if at is None or at > until:
                break
            self._to(max(at, self.mono))
            if at == gone:
                for call in self.pending():
                    self.end(call, "disconnected")
            else:
                for call in self.pending():
                    if call.due <= self.mono:
                        self.end(call, "expired")
        self._to(until)

    def _to(self, mono: float) -> None:
        self.wall += mono - self.mono
        self.mono = mono


class Trial:
    def __init__(self, world: Rig) -> None:
        self.world = world
        self.model = Model()
        self.model.wall, self.model.mono = world.clock.now(), world.clock.monotonic()
        self.carrier: Heard | None = None
        self.request_ids: dict[str, str] = {}
        self.owed: list[tuple[asyncio.Task[bytes], ModelCall]] = []

    async def step(self, step: Step) -> None:
        name, *values = step
        await getattr(self, f"do_{name}")(*values)
        await self.world.settle()
        await self.world.pass_time(0)  # absence at once is an alarm that is due
        self.model.pass_time(0)
        await self.check()

    async def do_call(self, key: str, argument: str) -> None:
        model, instance = self.model, "one" if key == "a" else "two"
        task = self.world.call(key, text=argument, instance=instance)
        await self.world.settle()
        call = model.calls.get(key)
        if call is None:
            deadline = model.wall + TIMEOUT_S
            call = model.calls[key] = ModelCall(argument, model.wall, deadline, model.mono + TIMEOUT_S, instance)
        elif call.argument != argument:
            with pytest.raises(CallKeyReused):
                await task
            return
        self.owed.append((task, call))
        self.request_ids = {row[1]: row[0] for row in await self.world.rows()}

    async def do_answer(self, key: str, value: int) -> None:
        await self._answer(key, "answered", value, result=value)

    async def do_fail(self, key: str, text: str) -> None:
        await self._answer(key, "failed", text or "echo failed at the caller", error=text)

    async def _answer(self, key: str, state: str, said: Any, **given: Any) -> None:
        told = await self.world.answer(self.request_ids.get(key, "nothing"), **given)
        call = self.model.calls.get(key)
        if call is None:
            assert (told.accepted, told.reason) == (False, "unknown")
        elif call.state == "pending":
            assert (told.accepted, told.repeated, told.state) == (True, False, state)
            self.model.end(call, state, said)
        elif (call.state, call.said) == (state, said):
            assert (told.accepted, told.repeated, told.state) == (True, True, state)
        else:
            reason = "answered" if call.state in ("answered", "failed") else "expired"
            assert (told.accepted, told.reason, told.state) == (False, reason, call.state)

    async def do_foreign(self, key: str) -> None:
        told = await self.world.answer(self.request_ids.get(key, "nothing"), 9, by=actor("prn_else"))
        assert (told.accepted, told.reason) == (False, "not_owner" if key in self.model.calls else "unknown")

    async def do_cancel(self, key: str) -> None:
        call = self.model.calls.get(key)
        done = await self.world.exchange.cancel(SESSION, key, "enough")
        assert done == (call is not None and call.state == "pending")
        if call is not None and call.state == "pending":
            self.model.end(call, "cancelled", "enough")

    async def do_extend(self, key: str, seconds: float) -> None:
        deadline = await self.world.extend(self.request_ids.get(key, "nothing"), seconds)
        call = self.model.calls.get(key)
        if call is None or call.state != "pending":
            assert deadline is None
            return
        counted = call.deadline - (call.due - self.model.mono)
        wanted = min(call.created + TIMEOUT_MAX_S, max(call.deadline, counted + seconds))
        call.due += wanted - call.deadline
        call.deadline = wanted
        assert deadline == wanted

    async def do_gone(self, instance: str) -> None:
        await self.world.exchange.client_gone(SESSION, instance)
        for call in self.model.pending():
            if call.instance == instance:
                self.model.end(call, "cancelled")

    async def do_pass(self, seconds: float) -> None:
        await self.world.pass_time(seconds)
        self.model.pass_time(seconds)

    async def do_jump(self, seconds: int) -> None:
        self.world.clock.jump(seconds)
        self.model.wall += seconds

    async def do_attach(self) -> None:
        if self.carrier is None:
            self.carrier = Heard()
            self.carrier.leave = self.world.exchange.attach(SESSION, self.carrier)
            self.model.attached = True
            on_it = {self.request_ids[key] for key, call in self.model.calls.items() if call.state == "pending"}
            assert set(self.carrier.requests()) == on_it

    async def do_detach(self) -> None:
        if self.carrier is not None:
            self.carrier.leave()
            self.carrier = None
            self.model.attached = False
            self.model.absent_at = self.model.mono + GRACE_S

    async def do_restart(self, seconds: float) -> None:
        await self.world.kill()
        self.world.clock.pass_time(seconds)
        model = self.model
        model._to(model.mono + seconds)
        self.owed = [(task, call) for task, call in self.owed if not task.cancelled()]
        await self.world.start(restart_grace_s=RESTART_GRACE_S)
        self.carrier, model.attached, model.absent_at = None, False, 0.0
        model.all_until = model.mono + RESTART_GRACE_S
        for call in model.pending():
            call.due = model.mono + min(max(0.0, call.deadline - model.wall), call.deadline - call.created)

    async def check(self) -> None:
        """Rows, events, audit and everybody who waits agree with the model."""
        rows = {row[1]: row[2] for row in await self.world.rows()}
        assert rows == {key: call.state for key, call in self.model.calls.items()}
        log = await self.world.log()
        assert [event["index"] for event in log] == list(range(len(log)))
        for key, call in self.model.calls.items():
            mine = [event for event in log if event["request_id"] == self.request_ids[key]]
            kinds = [event["type"] for event in mine if event["type"] != "caller_tool_progress"]
            ends = {
                "pending": [],
                "answered": ["caller_tool_resolved"],
                "failed": ["caller_tool_resolved"],
            }.get(call.state, ["caller_tool_cancelled", "caller_tool_resolved"])
            assert kinds == ["caller_tool_request", *ends]
            if ends:
                assert mine[-1]["outcome"] == call.state
        asked = [
            target or ""
            for what, outcome, target in await self.world.audit()
            if (what, outcome) == ("caller_tool", "asked")
        ]
        assert sorted(asked) == sorted(self.request_ids.values())
        for task, call in self.owed:
            assert task.done() == (call.state != "pending")
            if task.done():
                await self._received(task, call)
        self.owed = [(task, call) for task, call in self.owed if not task.done()]

    @staticmethod
    async def _received(task: asyncio.Task[bytes], call: ModelCall) -> None:
        if call.state == "answered":
            assert await task == str(call.said).encode()
            return
        with pytest.raises(CallFailed) as raised:
            await task
        if call.said is not None:
            assert raised.value.message == call.said


async def play(script: list[Step]) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        async with rig(Path(folder), grace_s=GRACE_S, timeout_s=TIMEOUT_S, timeout_max_s=TIMEOUT_MAX_S) as world:
            await world.session(declaration=tools("echo"))
            trial = Trial(world)
            for step in script:
                await trial.step(step)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(steps, min_size=8, max_size=30))
def test_rows_log_and_both_sides_agree_with_the_model(script: list[Step]) -> None:
    asyncio.run(play([*opening, *script]))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(steps, min_size=3, max_size=10))
def test_they_agree_with_a_restart_after_every_step(script: list[Step]) -> None:
    asyncio.run(play([one for step in (*opening, *script) for one in (step, ("restart", 0.5))]))
