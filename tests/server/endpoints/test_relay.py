"""The server's side of the relay socket: what a keeper answers to what it was asked."""

import asyncio
from typing import Any, cast

import pytest

from oubliette.server.endpoints.relay import Connection, Door, Relay
from oubliette.server.errors import DroidFailed


class Wire(asyncio.Transport):
    """Takes every line; nothing comes back by itself."""

    def get_write_buffer_size(self) -> int:
        return 0

    def writelines(self, list_of_data: Any) -> None:
        pass


async def refused(error: Any) -> DroidFailed:
    """What is raised for a request to a keeper that answers with this error."""
    connection = Connection(Door("box_1"), cast(Relay, None))
    connection.connection_made(Wire())
    connection.session_id = "s"
    asking = asyncio.get_running_loop().create_task(connection.request("stdin", {}))
    await asyncio.sleep(0)
    connection.data_received(b'{"jsonrpc":"2.0","id":1,"error":' + error + b"}\n")
    with pytest.raises(DroidFailed) as failure:
        await asking
    return failure.value


async def test_a_keepers_refusal_says_whether_to_try_again() -> None:
    busy = b'{"code":-32000,"message":"it does not read","data":{"kind":"too_many","retryable":true}}'
    failure = await refused(busy)
    assert failure.message == "the keeper refused: it does not read"
    assert (failure.retryable, failure.details) == (True, {"reason": "too_many"})
    failure = await refused(b'{"code":-32000,"message":"a gap","data":{"kind":"conflict","retryable":false}}')
    assert (failure.retryable, failure.details) == (False, {"reason": "conflict"})


@pytest.mark.parametrize("error", [b"7", b"{}", b'{"message":1}', b'{"message":"x","data":{"kind":{}}}', b"[]"])
async def test_a_refusal_of_the_wrong_shape_is_one_all_the_same(error: bytes) -> None:
    failure = await refused(error)
    assert (failure.message, failure.retryable) == ("the keeper refused, and its reason was not understood", False)
