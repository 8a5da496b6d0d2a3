import asyncio
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from oubliette.cli.local import reached
from oubliette.cli.token import _state
from oubliette.server.endpoints.local import local_door
from oubliette.server.errors import Conflict, InvalidParams, NotFound
from oubliette.server.home import Home, HomeLock

TOKEN = {
    "id": "tok_0011223344556677",
    "name": "ant",
    "scope": "write",
    "hint": "beef",
    "created_at": 1e9,
    "expires_at": None,
    "revoked_at": None,
    "last_used_at": None,
}


class Door:
    """A server of which only the local door exists: it notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, object]] = []

    async def __call__(self, operation: str, params: bytes) -> object:
        self.asked.append((operation, msgspec.json.decode(params)))
        if operation == "token_create":
            return {"id": TOKEN["id"], "token": "oub_" + "0" * 64, "name": "ant", "scope": "write", "expires_at": None}
        if operation == "token_list":
            return {"tokens": [TOKEN]}
        raise NotFound("no such token: beetle")


async def oubliette(home: Path, *words: str) -> tuple[int | None, str, str]:
    program = "from oubliette.cli.main import main; main()"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program,
        *words,
        env={"OUBLIETTE_HOME": str(home), "PATH": os.defpath},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(30):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path / ("a home with a path that is longer than the address of a socket may be " * 2))
    made.make()
    return made


async def test_a_running_server_is_asked_and_the_secret_stands_alone_on_stdout(home: Home):
    door = Door()
    with HomeLock(home):
        async with local_door(home.admin_socket, door):
            code, out, err = await oubliette(home.path, "token", "create", "ant", "--days", "2")
    assert (code, out) == (0, f"oub_{'0' * 64}\n"), err
    assert "it is not shown again" in err
    assert door.asked == [("token_create", {"name": "ant", "scope": "write", "expires_in_s": 172_800.0})]


@pytest.mark.parametrize("days", ["nan", "inf", "-inf", "1e308"])
async def test_days_that_are_no_number_make_no_token(home: Home, days: str):
    door = Door()
    with HomeLock(home):
        async with local_door(home.admin_socket, door):
            code, out, err = await oubliette(home.path, "token", "create", "ant", f"--days={days}")
    assert (code, out, door.asked) == (2, "", [])
    assert "--days" in err


async def test_a_life_beyond_a_century_is_refused(home: Home):
    code, out, err = await oubliette(home.path, "token", "create", "ant", "--days", "40000")
    assert (code, out) == (2, "")
    assert "expires_in_s" in err


async def test_lists_are_for_people_and_with_json_for_programs(home: Home):
    with HomeLock(home):
        async with local_door(home.admin_socket, Door()):
            _, table, _ = await oubliette(home.path, "token", "list")
            _, text, _ = await oubliette(home.path, "token", "list", "--json")
    assert table.splitlines()[1].split() == [TOKEN["id"], "ant", "write", "…beef", "live", "2001-09-09", "never"]
    assert json.loads(text) == {"tokens": [TOKEN]}


async def test_a_list_is_shown_whole_however_many_pages_it_has(home: Home):
    async def door(operation: str, params: bytes) -> object:
        asked = msgspec.json.decode(params)
        return {"tokens": [TOKEN] * min(asked["limit"], 201 - asked["offset"])}

    with HomeLock(home):
        async with local_door(home.admin_socket, door):
            _, table, err = await oubliette(home.path, "token", "list")
    assert len(table.splitlines()) == 1 + 201, err


async def test_a_refusal_ends_with_1_and_the_servers_words(home: Home):
    with HomeLock(home):
        async with local_door(home.admin_socket, Door()):
            code, out, err = await oubliette(home.path, "token", "revoke", "beetle")
    assert (code, out, err) == (1, "", "oubliette: no such token: beetle\n")


async def test_asking_wrongly_ends_with_2_whoever_says_so(home: Home):
    async def door(operation: str, params: bytes) -> object:
        raise InvalidParams("name: too short")

    alone = await oubliette(home.path, "token", "create", "")
    assert (alone[0], alone[1]) == (2, "")
    with HomeLock(home):
        async with local_door(home.admin_socket, door):
            assert await oubliette(home.path, "token", "create", "") == (2, "", "oubliette: name: too short\n")


async def test_a_server_that_just_took_the_lock_is_waited_for(home: Home):
    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        with ExitStack() as held, HomeLock(home):
            reaching = tasks.create_task(reached(home, held))
            await asyncio.sleep(0)  # its first try found no socket
            async with local_door(home.admin_socket, Door()):
                door = await reaching
                assert door is not None
                door[1].close()


async def test_a_command_that_has_the_lock_is_waited_for(home: Home):
    with ExitStack() as held:
        async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
            with HomeLock(home):
                reaching = tasks.create_task(reached(home, held))
                await asyncio.sleep(0)  # its first try found it held, and no socket
        assert await reaching is None
        with pytest.raises(Conflict), HomeLock(home):
            pass


async def test_commands_at_once_on_a_home_without_a_server_all_succeed(tmp_path: Path):
    made = await asyncio.gather(*(oubliette(tmp_path / "home", "token", "create", f"t{n}") for n in range(3)))
    assert [code for code, _, _ in made] == [0, 0, 0], made
    _, table, _ = await oubliette(tmp_path / "home", "token", "list")
    assert {line.split()[1] for line in table.splitlines()[1:]} == {"t0", "t1", "t2"}


async def test_without_a_server_the_home_itself_is_used(home: Home):
    code, out, err = await oubliette(home.path, "token", "create", "ant", "--scope", "read", "--json")
    assert code == 0, err
    made = json.loads(out)
    assert (made["name"], made["scope"]) == ("ant", "read")
    code, out, _ = await oubliette(home.path, "token", "revoke", "ant")
    assert (code, out) == (0, f"revoked {made['id']} (ant)\n")
    _, out, _ = await oubliette(home.path, "token", "list")
    assert [line.split()[4] for line in out.splitlines() if line.startswith(made["id"])] == ["revoked"]
    assert made["token"] not in out


@pytest.mark.parametrize(
    ("expires_at", "revoked_at", "state"),
    [(None, None, "live"), (99.0, None, "expired"), (101.0, None, "live"), (99.0, 50.0, "revoked")],
)
def test_a_tokens_state_in_a_word(expires_at: float | None, revoked_at: float | None, state: str):
    assert _state({"expires_at": expires_at, "revoked_at": revoked_at}, 100.0) == state
