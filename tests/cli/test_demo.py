"""The demo does what it says, says what is missing, and leaves nothing behind."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = [sys.executable, "-c", "from oubliette.cli.main import main; main()", "demo"]


def demo(tmp_path: Path, path: str = os.defpath) -> subprocess.CompletedProcess[str]:
    env = {"PATH": path, "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    return subprocess.run(PROGRAM, env=env, capture_output=True, text=True, timeout=60, check=False)


def processes_with(mark: str) -> list[str]:
    found = []
    for place in Path("/proc").iterdir():
        try:
            if place.name.isdigit() and mark.encode() in (place / "cmdline").read_bytes():
                found.append(place.name)
        except OSError:
            continue
    return found


def test_the_demo_shows_every_step_and_cleans_up(tmp_path: Path):
    done = demo(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for claim in (
        "send_response ran once, here in process",
        "the project 'made by a droid' exists",
        "the droid saw the failed call as an error, and went on",
        "exist here and not in the box",
        "in the box nothing does",
        "the droid's key is in no file",
        "no process is left of it",
    ):
        assert claim in done.stdout
    assert "caller_tool_request" in done.stdout
    assert "Everything worked" in done.stdout
    assert list(tmp_path.iterdir()) == []
    assert processes_with(str(tmp_path)) == []


def test_without_bubblewrap_the_demo_names_the_package_and_fails(tmp_path: Path):
    nothing = tmp_path / "bin"
    nothing.mkdir()
    done = demo(tmp_path, path=str(nothing))
    assert done.returncode == 1
    assert "bubblewrap" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [nothing]
    assert processes_with(str(tmp_path)) == []


def test_a_step_that_does_not_hold_fails_the_demo(tmp_path: Path):
    lie = "import oubliette.cli.demo as demo; demo.MADE = 'x' * 300; raise SystemExit(demo.demo())"
    env = {"PATH": os.defpath, "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", lie], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "The demo failed: this does not hold: the turn ended by itself" in done.stderr
    assert "Everything worked" not in done.stdout
    assert list(tmp_path.iterdir()) == []
    assert processes_with(str(tmp_path)) == []
