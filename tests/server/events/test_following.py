"""Being woken: early enough, by the right log, and by nobody's fault otherwise."""

import asyncio

import pytest

from oubliette.server.events.following import Following


def test_each_follower_of_a_log_is_woken_until_it_leaves() -> None:
    following, heard = Following(), list[tuple[str, str, int]]()
    ends = [following.subscribe("s", lambda sid, last, name=name: heard.append((name, sid, last))) for name in "ab"]
    following.subscribe("other", lambda sid, last: heard.append(("other", sid, last)))
    following.wake("s", 3)
    assert sorted(heard) == [("a", "s", 3), ("b", "s", 3)]
    ends[0]()
    ends[0]()  # twice is no error
    following.wake("s", 4)
    assert heard[2:] == [("b", "s", 4)]
    ends[1]()
    following.wake("s", 5)
    assert len(heard) == 3
    assert set(following._wakes) == {"other"}


def test_a_follower_that_fails_fails_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    following, heard = Following(), list[int]()

    def fails(session_id: str, last_index: int) -> None:
        raise RuntimeError("a bug in a follower")

    for wake in (fails, lambda sid, last: heard.append(last), fails):
        following.subscribe("s", wake)
    following.wake("s", 1)
    assert heard == [1]
    assert "a follower failed" in caplog.text


def test_a_follower_may_leave_while_it_is_woken() -> None:
    following, heard = Following(), list[int]()
    end = following.subscribe("s", lambda sid, last: (heard.append(last), end())[0])
    following.wake("s", 1)
    following.wake("s", 2)
    assert heard == [1]


async def test_who_waits_is_woken_by_growth_beyond_what_it_has_and_by_nothing_less() -> None:
    following = Following()
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(following.grown("s", 5, 30))
        await asyncio.sleep(0)
        for last_index in (5, 4, 5):
            following.wake("s", last_index)
        following.wake("other", 9)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        following.wake("s", 6)
        async with asyncio.timeout(5):
            await waiting
    assert following._wakes == {}


async def test_who_waits_looks_again_when_no_wake_comes() -> None:
    following = Following()
    async with asyncio.timeout(5):
        await following.grown("s", 0, 0.01)
    assert following._wakes == {}
