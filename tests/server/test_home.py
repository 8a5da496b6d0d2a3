import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from oubliette.server import home as home_module
from oubliette.server.errors import Conflict, NotConfigured
from oubliette.server.home import Home, HomeLock, locked


def test_a_home_is_closed_to_others_whatever_the_umask(tmp_path: Path):
    before = os.umask(0)
    try:
        Home(tmp_path / "deep" / "home").make()
    finally:
        os.umask(before)
    assert (tmp_path / "deep" / "home").stat().st_mode & 0o777 == 0o700


def test_making_a_home_again_is_no_error(tmp_path: Path):
    Home(tmp_path / "home").make()
    Home(tmp_path / "home").make()


def test_a_folder_open_to_others_is_no_home(tmp_path: Path):
    tmp_path.joinpath("open").mkdir(mode=0o755)
    with pytest.raises(NotConfigured, match="chmod 700"):
        Home(tmp_path / "open").make()


def test_a_file_is_no_home(tmp_path: Path):
    tmp_path.joinpath("file").touch()
    with pytest.raises(NotConfigured, match="cannot be made a home: File exists"):
        Home(tmp_path / "file").make()


def test_a_home_has_one_user_at_a_time(tmp_path: Path):
    home = Home(tmp_path)
    with HomeLock(home):
        with pytest.raises(Conflict, match=rf"another oubliette \(process {os.getpid()}\)"), HomeLock(home):
            pass
        assert home.lock.exists()
    with HomeLock(home):
        pass


async def test_a_server_waits_for_who_has_the_lock_and_serves_nothing(tmp_path: Path):
    home = Home(tmp_path)
    entered = asyncio.Event()

    async def served() -> None:
        async with locked(home):
            entered.set()

    async with asyncio.timeout(3), asyncio.TaskGroup() as tasks:
        with HomeLock(home):
            tasks.create_task(served())
            await asyncio.sleep(0)  # its first try found it held
            assert not entered.is_set()
        await entered.wait()
    with HomeLock(home):
        pass


async def test_a_server_does_not_wait_for_another(tmp_path: Path):
    home = Home(tmp_path)
    with HomeLock(home), socket.socket(socket.AF_UNIX) as door:
        door.bind(str(home.admin_socket))
        door.listen()
        async with asyncio.timeout(1):
            with pytest.raises(Conflict, match="another oubliette"):
                async with locked(home):
                    pass


async def test_who_serves_nothing_and_keeps_the_lock_is_waited_for_only_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(home_module, "LOCK_WITHIN_S", 0.1)
    home = Home(tmp_path)
    with HomeLock(home):
        async with asyncio.timeout(3):
            with pytest.raises(Conflict, match="another oubliette"):
                async with locked(home):
                    pass


def test_a_home_whose_lock_cannot_be_opened_is_refused_by_name(tmp_path: Path):
    home = Home(tmp_path)
    home.lock.mkdir()
    with pytest.raises(NotConfigured, match=r"lock: cannot be locked \(Is a directory\)"), HomeLock(home):
        pass


def test_a_killed_process_leaves_no_lock(tmp_path: Path):
    program = (
        "import sys; from pathlib import Path; from oubliette.server.home import Home, HomeLock\n"
        "HomeLock(Home(Path(sys.argv[1]))).__enter__(); print('held', flush=True); sys.stdin.read()"
    )
    source = str(Path(__file__).parents[2] / "src")
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": source},
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(Conflict, match=f"process {holder.pid}"), HomeLock(Home(tmp_path)):
            pass
        holder.kill()
        holder.wait(10)
        with HomeLock(Home(tmp_path)):
            pass
