"""A bug in one task is logged and ends no other; leaving ends them all."""

import asyncio
import inspect
import logging

import pytest

from oubliette.caller.crew import Crew


async def test_a_bug_of_one_task_ends_no_other(caplog: pytest.LogCaptureFixture):
    crew, gone = Crew(), asyncio.Event()

    async def bug() -> None:
        raise ZeroDivisionError

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()

    crew.start(work(), "work")
    with caplog.at_level(logging.ERROR):
        await asyncio.wait([crew.start(bug(), "bug")])
    assert "a task of the caller failed" in caplog.text
    assert not gone.is_set()
    await crew.dismiss()
    assert gone.is_set()


async def test_work_that_is_cancelled_before_its_first_step_is_closed():
    crew = Crew()

    async def work() -> None:
        raise NotImplementedError

    never_begun = work()
    task = crew.start(never_begun, "work")
    task.cancel()
    await asyncio.wait([task])
    assert inspect.getcoroutinestate(never_begun) == inspect.CORO_CLOSED


async def test_what_is_asked_of_those_who_left_is_dropped():
    crew, ran = Crew(), asyncio.Event()
    await crew.dismiss()

    async def work() -> None:
        ran.set()

    await asyncio.wait([crew.start(work(), "work")])
    assert not ran.is_set()
