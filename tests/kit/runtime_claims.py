"""What every runtime promises, each promise one function, run against every implementation and the fake alike.

A stage gives runtimes over one and the same host: asking for another is a restart of the server.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import pytest

from oubliette.server import ids
from oubliette.server.containers.runtime import Box, BoxSpec, Runtime
from oubliette.server.errors import BoxFailed
from tests.kit.keeper_server import KeeperServer, hang_up

INSTALLATION = "installation-of-the-claims"


@dataclass
class Stage:
    """One host, and ever new runtimes on it."""

    make: Callable[[], Runtime]
    runtimes: list[Runtime] = field(default_factory=list[Runtime])
    installation: str = field(default_factory=lambda: f"{INSTALLATION}-{ids.new_key()[:8]}")

    def runtime(self) -> Runtime:
        self.runtimes.append(self.make())
        return self.runtimes[-1]

    def spec(self) -> BoxSpec:
        return BoxSpec(
            box_id=ids.new_box_id(),
            installation=self.installation,
            project_id=ids.new_uuid(),
            session_id=ids.new_session_id(1_800_000_000),
            workspace_id=ids.new_uuid(),
            relay_key=ids.new_key(),
            keeper_key=ids.new_key(),
            abandoned_after_s=30,
        )

    async def clear(self) -> None:
        """End what a failed claim left, on its own installation only."""
        last = self.runtime()
        for box in await last.list(self.installation):
            await last.stop(box)
        for runtime in self.runtimes:
            await runtime.close()
        await hang_up()


async def opened(runtime: Runtime, spec: BoxSpec, server: KeeperServer | None = None) -> tuple[Box, KeeperServer]:
    """A box whose keeper has attached."""
    server = server or KeeperServer(key=spec.keeper_key)
    await runtime.open_door(spec.box_id, spec.relay_key, server.accept)
    box = await runtime.create(spec)
    await server.attached()
    return box, server


async def a_box_is_alive_once_created_and_its_keeper_attaches_with_its_own_key(stage: Stage) -> None:
    runtime, spec = stage.runtime(), stage.spec()
    await runtime.check()
    box, server = await opened(runtime, spec)
    assert (box.box_id, box.session_id) == (spec.box_id, spec.session_id)
    assert server.attaches[0].key == spec.keeper_key
    assert await runtime.is_alive(box)
    await runtime.stop(box)
    assert not await runtime.is_alive(box)


async def a_process_in_a_box_hears_and_is_heard(stage: Stage) -> None:
    runtime = stage.runtime()
    box, server = await opened(runtime, stage.spec())
    await server.start("d", "/bin/cat", cwd=runtime.places(box.box_id).workspace)
    await server.stdin("d", 0, b"hello", eof=True)
    assert (await server.exited("d")).exit_code == 0
    assert server.output["d"] == b"hello"
    await runtime.stop(box)


async def a_box_and_its_processes_outlive_the_server(stage: Stage) -> None:
    first, spec = stage.runtime(), stage.spec()
    box, server = await opened(first, spec)
    await server.start("d", "/bin/cat", cwd=first.places(box.box_id).workspace)
    await server.stdin("d", 0, b"before")
    await server.until(lambda: bytes(server.output["d"]) == b"before")
    await first.close()
    server.cut()

    second = stage.runtime()
    assert await second.is_alive(box)
    assert second.places(box.box_id) == first.places(box.box_id)
    await second.open_door(spec.box_id, spec.relay_key, server.accept)
    await server.attached(2)
    assert server.attaches[1].instance == server.attaches[0].instance
    await server.stdin("d", 6, b" after", eof=True)
    await server.exited("d")
    assert server.output["d"] == b"before after"
    assert server.problems == []
    await second.stop(box)
    assert not await second.is_alive(box)


async def a_stopped_box_is_nowhere_and_stopping_again_is_no_error(stage: Stage) -> None:
    runtime = stage.runtime()
    box, server = await opened(runtime, stage.spec())
    await server.start("d", "/bin/cat")
    await runtime.stop(box)
    assert await runtime.list(stage.installation) == []
    await runtime.stop(box)
    await stage.runtime().stop(box)


async def boxes_are_found_by_their_installation_after_a_restart(stage: Stage) -> None:
    runtime = stage.runtime()
    mine, _ = await opened(runtime, stage.spec())
    other = replace(stage.spec(), installation=stage.installation + "-other")
    foreign, _ = await opened(runtime, other)
    await runtime.close()

    later = stage.runtime()
    assert await later.list(stage.installation) == [mine]
    assert await later.list(other.installation) == [foreign]
    assert await later.list("nobody") == []
    await later.stop(mine)
    assert await later.is_alive(foreign)
    await later.stop(foreign)


async def a_box_that_nobody_serves_ends_itself_and_is_still_listed(stage: Stage) -> None:
    runtime, spec = stage.runtime(), replace(stage.spec(), abandoned_after_s=0.2)
    server = KeeperServer(key=spec.keeper_key, abandoned_after_s=0.2)
    box, _ = await opened(runtime, spec, server)
    await runtime.close()
    server.cut()
    later = stage.runtime()
    for _ in range(200):
        if not await later.is_alive(box):
            break
        await pause()
    assert not await later.is_alive(box)
    assert await later.list(stage.installation) == [box]
    await later.stop(box)
    assert await later.list(stage.installation) == []


async def boxes_do_not_mix(stage: Stage) -> None:
    runtime = stage.runtime()
    pairs = [await opened(runtime, stage.spec()) for _ in range(3)]
    for number, (_, server) in enumerate(pairs):
        await server.start("d", "/bin/cat")
        await server.stdin("d", 0, b"for %d" % number, eof=True)
    for number, (box, server) in enumerate(pairs):
        await server.exited("d")
        assert server.output["d"] == b"for %d" % number
        assert len(server.attaches) == 1
        await runtime.stop(box)


async def a_box_that_cannot_be_made_leaves_nothing(stage: Stage) -> None:
    runtime = stage.runtime()
    spec = replace(stage.spec(), workspace_id="../../elsewhere")
    server = KeeperServer(key=spec.keeper_key)
    await runtime.open_door(spec.box_id, spec.relay_key, server.accept)
    with pytest.raises(BoxFailed):
        await runtime.create(spec)
    assert await runtime.list(stage.installation) == []
    assert server.attaches == []


async def a_door_that_is_opened_again_leads_to_the_new_side(stage: Stage) -> None:
    runtime, spec = stage.runtime(), stage.spec()
    box, old = await opened(runtime, spec)
    new = KeeperServer(key=spec.keeper_key)
    await runtime.open_door(spec.box_id, ids.new_key(), new.accept)
    old.cut()
    await new.attached()
    assert len(old.attaches) == 1
    await runtime.stop(box)


async def no_key_is_shown(stage: Stage) -> None:
    runtime, spec = stage.runtime(), stage.spec()
    box, _ = await opened(runtime, spec)
    shown = repr(spec) + repr(box) + repr(runtime) + repr(await runtime.list(stage.installation))
    assert spec.keeper_key not in shown
    assert spec.relay_key not in shown
    await runtime.stop(box)


async def pause() -> None:
    """Let 20 ms pass: for ends that nothing on this side announces."""
    import asyncio

    await asyncio.sleep(0.02)


CLAIMS: tuple[Callable[[Stage], Awaitable[None]], ...] = (
    a_box_is_alive_once_created_and_its_keeper_attaches_with_its_own_key,
    a_process_in_a_box_hears_and_is_heard,
    a_box_and_its_processes_outlive_the_server,
    a_stopped_box_is_nowhere_and_stopping_again_is_no_error,
    boxes_are_found_by_their_installation_after_a_restart,
    a_box_that_nobody_serves_ends_itself_and_is_still_listed,
    boxes_do_not_mix,
    a_box_that_cannot_be_made_leaves_nothing,
    a_door_that_is_opened_again_leads_to_the_new_side,
    no_key_is_shown,
)
