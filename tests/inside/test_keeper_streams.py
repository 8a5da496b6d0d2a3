"""Not a byte lost, not a byte twice: the keeper's streams with the server gone at any point."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oubliette.wire import relay
from tests.kit.keeper_server import ConnectionCut, KeeperServer
from tests.kit.kept_box import kept_box

CUTS = st.lists(
    st.one_of(st.integers(1, 2_000), st.integers(1, 400_000), st.sampled_from([350, 65_700, 65_701])), max_size=4
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cuts=CUTS, sizes=st.lists(st.integers(1, 150_000), min_size=1, max_size=5), acknowledges=st.booleans())
def test_every_byte_passes_once_wherever_the_server_is_cut(
    cuts: list[int], sizes: list[int], acknowledges: bool
) -> None:
    asyncio.run(_echo(cuts, sizes, acknowledges))


async def _echo(cuts: list[int], sizes: list[int], acknowledges: bool) -> None:
    """Send input that comes back as output, with a server that is cut off after so many bytes each time."""
    sent = b"".join(bytes((number + index) % 256 for index in range(size)) for number, size in enumerate(sizes))
    server = KeeperServer(acknowledges=acknowledges)
    server.cuts = list(cuts)
    with tempfile.TemporaryDirectory() as folder:
        async with kept_box(Path(folder), server):
            await _insist(lambda: server.start("d", "/bin/cat"))
            taken = 0
            for size in sizes:
                taken = await _send(server, sent[: taken + size], taken)
            await _insist(lambda: server.stdin("d", len(sent), b"", eof=True))
            exited = await server.exited("d")
            await server.until(lambda: len(server.output["d"]) >= len(sent))
    assert exited.exit_code == 0
    assert bytes(server.output["d"]) == sent
    assert server.problems == []


async def _send(server: KeeperServer, sent: bytes, offset: int) -> int:
    """Send from `offset` on; after a cut from where the keeper says that it stands."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await server.stdin("d", offset, sent[offset:])
            except ConnectionCut:
                attaches = len(server.attaches)
                await server.attached(attaches)
                offset = min(state.stdin_offset for state in server.attaches[-1].processes)


async def _insist(request: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                await request()
                return
            except ConnectionCut:
                continue  # a request waits for the next attach by itself


def test_the_frame_of_a_full_chunk_is_far_below_the_bound() -> None:
    from oubliette.inside import kept

    assert kept.CHUNK_BYTES * 4 / 3 + 1024 < relay.FRAME_BYTES_MAX / 8
