"""A process's beginning, where the machine has no room for one."""

import errno
import os
import resource
from pathlib import Path

import pytest

from oubliette.inside import kept
from oubliette.inside.parameters import Refused


def descriptors() -> list[str]:
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


def no_more_processes() -> int:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def test_a_fork_that_fails_is_worth_another_try_and_leaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", no_more_processes)
    before = descriptors()
    for _ in range(3):
        with pytest.raises(Refused, match="Resource temporarily unavailable") as refusal:
            kept.spawn(["true"], {}, "/")
        assert refusal.value.error["data"] == {"kind": "unavailable", "retryable": True}
    assert descriptors() == before


def test_descriptors_that_run_out_halfway_are_given_back() -> None:
    before = descriptors()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, before)) + 4, hard))
    try:
        with pytest.raises(Refused, match="Too many open files"):
            kept.spawn(["true"], {}, "/")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert descriptors() == before
