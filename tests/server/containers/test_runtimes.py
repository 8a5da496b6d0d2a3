"""Every runtime, and the fake, against the same claims."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import pytest

from oubliette.server.containers.bubblewrap import BubblewrapRuntime, own_python
from oubliette.server.containers.process import ProcessRuntime
from oubliette.server.containers.runtime import Runtime
from tests.kit.fake_runtime import FakeHost, FakeRuntime
from tests.kit.runtime_claims import CLAIMS, Stage

KINDS: dict[str, Callable[[Path, FakeHost], Runtime]] = {
    "bubblewrap": lambda home, _: BubblewrapRuntime(home),
    "bubblewrap, the server's own Python": lambda home, _: BubblewrapRuntime(home, pythons=[own_python()]),
    "process": lambda home, _: ProcessRuntime(home),
    "fake": lambda _, host: FakeRuntime(host),
}


@pytest.fixture(params=list(KINDS))
async def stage(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Stage]:
    host = FakeHost()
    stage = Stage(lambda: KINDS[request.param](tmp_path / "home", host))
    yield stage
    await stage.clear()
    host.close()


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__)
async def test_the_claim_holds(stage: Stage, claim: Callable[[Stage], Awaitable[None]]) -> None:
    await claim(stage)
