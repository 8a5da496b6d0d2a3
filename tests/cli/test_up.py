import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PROGRAM = [sys.executable, "-c", "from oubliette.cli.main import main; main()"]


@contextlib.contextmanager
def up(home: Path, *words: str, ends: signal.Signals = signal.SIGINT) -> Generator[dict[str, str | None]]:
    """`oubliette up --json` on a free port, and the line that it printed."""
    with subprocess.Popen(
        [*PROGRAM, "up", "--json", "--home", str(home), "--port", "0", *words],
        env={"PATH": os.defpath, "HOME": "/nonexistent"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            assert line, server.communicate(timeout=20)[1]
            yield json.loads(line)
        finally:
            server.send_signal(ends)
            assert server.wait(20) == 0


def oubliette(*words: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.defpath, "HOME": "/nonexistent"}
    return subprocess.run([*PROGRAM, *words], env=env, capture_output=True, text=True, timeout=30)


def status_of(url: str, token: str) -> int:
    body = b'{"jsonrpc":"2.0","id":1,"method":"ping"}'
    headers = {
        "Authorization": f"Bearer {token}",
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
    }
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as refused:
        return refused.code


def test_up_needs_nothing_before_and_its_first_token_opens_the_door(tmp_path: Path):
    with up(tmp_path / "new" / "home") as said:
        url, token = said["url"], said["first_token"]
        assert url is not None
        assert token is not None
        assert said["mcpServers"] == {
            "oubliette": {"type": "http", "url": url, "headers": {"Authorization": f"Bearer {token}"}}
        }
        assert status_of(url, token) not in (401, 403)
        assert status_of(url, "oub_" + "0" * 64) == 401
    assert (tmp_path / "new" / "home").stat().st_mode & 0o777 == 0o700


def test_the_first_token_is_told_once(tmp_path: Path):
    with up(tmp_path, ends=signal.SIGTERM) as first:
        assert first["first_token"] is not None
    with up(tmp_path) as second:
        assert second["first_token"] is None


def test_a_token_made_before_the_first_start_is_the_first(tmp_path: Path):
    made = oubliette("token", "create", "mine", "--scope", "admin", "--home", str(tmp_path))
    assert made.returncode == 0, made.stderr
    with up(tmp_path) as said:
        assert said["first_token"] is None
        assert said["url"] is not None
        assert status_of(said["url"], made.stdout.strip()) not in (401, 403)


def test_the_address_it_listens_on_may_be_called_by_its_name(tmp_path: Path):
    with up(tmp_path, "--host", "127.0.0.2") as said:
        assert said["url"] is not None
        assert said["first_token"] is not None
        assert "127.0.0.2" in said["url"]
        assert status_of(said["url"], said["first_token"]) not in (401, 403, 421)


def test_a_home_is_served_once(tmp_path: Path):
    with up(tmp_path):
        again = oubliette("up", "--home", str(tmp_path), "--port", "0")
    assert (again.returncode, again.stdout) == (1, "")
    assert f"{tmp_path}: another oubliette (process " in again.stderr


def test_a_server_and_commands_may_begin_at_once(tmp_path: Path):
    with ThreadPoolExecutor(2) as threads:
        names = [("token", "create", f"t{n}", "--home", str(tmp_path)) for n in range(2)]
        making = [threads.submit(oubliette, *words) for words in names]
        with up(tmp_path):
            made = [one.result() for one in making]
    assert [one.returncode for one in made] == [0, 0], made


def test_a_port_that_is_taken_is_named(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused = oubliette("up", "--home", str(tmp_path), "--port", port)
    assert refused.returncode == 2
    assert f"oubliette: cannot listen on 127.0.0.1:{port}" in refused.stderr
    assert "Traceback" not in refused.stderr
    with up(tmp_path) as said:  # the start that failed has not spent the one showing of the first token
        assert said["first_token"] is not None


def test_tokens_are_made_listed_and_revoked_while_it_runs(tmp_path: Path):
    home = ("--home", str(tmp_path))
    with up(tmp_path) as said:
        assert said["url"] is not None
        token = oubliette("token", "create", "ant", *home).stdout.strip()
        assert status_of(said["url"], token) not in (401, 403)
        assert oubliette("token", "revoke", "ant", *home).returncode == 0
        assert status_of(said["url"], token) == 401
        listed = oubliette("token", "list", "--json", *home).stdout
    states = {one["name"]: one["revoked_at"] is not None for one in json.loads(listed)["tokens"]}
    assert states == {"first-admin": False, "ant": True}


def test_any_setting_is_a_flag_and_what_is_none_is_refused(tmp_path: Path):
    with up(tmp_path, "--durability", "power", "--allowed-hosts", "a.example,b.example", "--idle-after-s=9"):
        pass
    for words, message in (
        (["--durabilty", "power"], "--durabilty: there is no setting `durabilty`; did you mean `durability`?"),
        (["--durability", "none"], "--durability: Invalid enum value 'none'"),
        (["--max-depth", "deep"], "--max-depth: Expected `int`, got `str`"),
    ):
        refused = oubliette("up", "--home", str(tmp_path), *words)
        assert (refused.returncode, refused.stderr) == (2, f"oubliette: {message}\n")


def test_the_text_for_people_holds_the_address_the_token_and_the_snippet(tmp_path: Path):
    with subprocess.Popen(
        [*PROGRAM, "up", "--home", str(tmp_path), "--port", "0"],
        env={"PATH": os.defpath, "HOME": "/nonexistent"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdout is not None
        lines: list[str] = []
        while not lines or not lines[-1].startswith("Ctrl-C"):
            lines.append(server.stdout.readline())
            assert lines[-1], lines
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0
    text = "".join(lines)
    url = lines[0].removeprefix("oubliette listens on ").strip()
    snippet = json.loads(text[text.index("{") : text.rindex("}") + 1])
    assert snippet["mcpServers"]["oubliette"]["url"] == url
    token = snippet["mcpServers"]["oubliette"]["headers"]["Authorization"].removeprefix("Bearer ")
    assert f"  {token}\n" in lines
