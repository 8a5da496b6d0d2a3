import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from oubliette.server.endpoints import local
from oubliette.server.endpoints.local import CONNECTIONS_MAX, LINE_BYTES_MAX, local_door, may_ask
from oubliette.server.errors import Conflict
from oubliette.server.home import address


async def echo(operation: str, params: bytes) -> object:
    if operation == "clash":
        raise Conflict("there is one already")
    if operation == "bug":
        raise ZeroDivisionError
    return {"operation": operation, "params": json.loads(params)}


async def asked(path: Path | str, *lines: bytes) -> list[Any]:
    async with asyncio.timeout(5):
        reader, writer = await asyncio.open_unix_connection(path)
        answers = []
        for line in lines:
            writer.write(line + b"\n")
            answer = await reader.readline()
            answers.append(json.loads(answer) if answer else None)
        writer.close()
        return answers


async def test_an_operation_is_asked_and_answered_again_and_again(tmp_path: Path):
    path = tmp_path / "admin.sock"
    async with local_door(path, echo):
        one, two = await asked(
            path,
            b'{"jsonrpc":"2.0","id":1,"method":"token_list"}',
            b'{"jsonrpc":"2.0","id":"b","method":"token_create","params":{"name":"x"}}',
        )
    assert one == {"jsonrpc": "2.0", "id": 1, "result": {"operation": "token_list", "params": {}}}
    assert two == {"jsonrpc": "2.0", "id": "b", "result": {"operation": "token_create", "params": {"name": "x"}}}


async def test_a_refusal_and_a_bug_are_answers_and_the_door_stays_open(tmp_path: Path):
    path = tmp_path / "admin.sock"
    async with local_door(path, echo):
        clash, bug, garbage, no_method, fine = await asked(
            path,
            b'{"jsonrpc":"2.0","id":1,"method":"clash"}',
            b'{"jsonrpc":"2.0","id":2,"method":"bug"}',
            b"garbage",
            b'{"jsonrpc":"2.0","id":3}',
            b'{"jsonrpc":"2.0","id":4,"method":"token_list"}',
        )
    assert clash["error"] == {
        "code": -32000,
        "message": "there is one already",
        "data": {"kind": "conflict", "retryable": False},
    }
    assert (bug["error"]["code"], bug["error"]["data"]["kind"]) == (-32603, "internal")
    assert (garbage["error"]["code"], no_method["error"]["code"]) == (-32700, -32600)
    assert fine["result"]["operation"] == "token_list"


async def test_a_line_too_long_ends_its_connection_only(tmp_path: Path):
    path = tmp_path / "admin.sock"
    async with local_door(path, echo):
        with pytest.raises(ConnectionError):
            await asked(path, b"x" * (LINE_BYTES_MAX * 3))
        assert (await asked(path, b'{"jsonrpc":"2.0","id":1,"method":"a"}'))[0]["result"]


async def test_connections_above_the_bound_are_closed(tmp_path: Path):
    path = tmp_path / "admin.sock"
    line = b'{"jsonrpc":"2.0","id":1,"method":"a"}'
    async with local_door(path, echo), asyncio.timeout(5):
        open_ones = [await asyncio.open_unix_connection(path) for _ in range(CONNECTIONS_MAX)]
        for reader, writer in open_ones:
            writer.write(line + b"\n")
            await reader.readline()
        reader, writer = await asyncio.open_unix_connection(path)
        assert await reader.read() == b""
        for _, one in [*open_ones, (reader, writer)]:
            one.close()


async def test_only_the_servers_user_and_root_may_ask():
    assert may_ask(1000, 1000)
    assert may_ask(0, 1000)
    assert not may_ask(1001, 1000)
    assert not may_ask(1000, 0)


async def test_a_door_in_a_folder_deeper_than_a_sockets_address_opens(tmp_path: Path):
    deep = tmp_path.joinpath(*["a folder with a long name"] * 6)
    deep.mkdir(parents=True)
    async with local_door(deep / "admin.sock", echo):
        with address(deep / "admin.sock") as near:
            assert (await asked(near, b'{"jsonrpc":"2.0","id":1,"method":"a"}'))[0]["result"]


async def test_the_socket_is_closed_to_others_and_replaces_a_dead_servers(tmp_path: Path):
    path = tmp_path / "admin.sock"
    path.touch()
    async with local_door(path, echo):
        assert path.stat().st_mode & 0o777 == 0o600
        assert (await asked(path, b'{"jsonrpc":"2.0","id":1,"method":"a"}'))[0]["result"]
    assert not path.exists()


async def test_a_door_that_closes_lets_what_is_asked_be_answered_and_sends_the_idle_away(tmp_path: Path):
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def slow(operation: str, params: bytes) -> object:
        begun.set()
        await may_end.wait()
        return operation

    async with asyncio.timeout(5), asyncio.TaskGroup() as asking:
        async with local_door(tmp_path / "admin.sock", slow):
            idle, idle_writer = await asyncio.open_unix_connection(tmp_path / "admin.sock")
            busy = asking.create_task(asked(tmp_path / "admin.sock", b'{"id":1,"method":"m"}'))
            await begun.wait()
            asyncio.get_running_loop().call_later(0.05, may_end.set)
        assert (await busy)[0]["result"] == "m"
        assert await idle.read() == b""
        idle_writer.close()


async def test_what_is_asked_ends_with_its_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local, "END_WITHIN_S", 0.05)
    begun, ended = asyncio.Event(), asyncio.Event()

    async def endless(operation: str, params: bytes) -> object:
        begun.set()
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    async with asyncio.timeout(5), asyncio.TaskGroup() as asking:
        async with local_door(tmp_path / "admin.sock", endless):
            busy = asking.create_task(asked(tmp_path / "admin.sock", b'{"id":1,"method":"m"}'))
            await begun.wait()
        assert ended.is_set()
        assert await busy == [None]
