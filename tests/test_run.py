"""The script `run`, over a uv that only takes notes: when it makes an environment, when not, and what it hands over."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis.configuration import storage_directory

from tests.run import CACHES

ROOT = Path(__file__).parent.parent
FILES = ("run", "pyproject.toml", "requirements.lock", "requirements-dev.lock")

UV = """#!/bin/sh
echo "$*" >>"$NOTES"
case "$1 $2" in
"venv -q") shift 4 && mkdir -p "$1/bin" && ln -s "$(command -v python3)" "$1/bin/python" ;;
"pip sync") [ ! -e "$NOTES.broken" ] || exit 9 ;;
"pip install")
    printf '#!/bin/sh\\nprintf "%%s|" "$@"\\nenv | grep -c "^PYTHONPATH="\\nexit 0\\n' >"${5%/python}/oubliette"
    chmod +x "${5%/python}/oubliette" ;;
esac
"""


@dataclass
class Checkout:
    path: Path
    notes: Path
    env: dict[str, str] = field(default_factory=dict[str, str])

    def start(self, *words: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.path / "run", *words],
            cwd="/",
            env=self.env | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, **env: str) -> tuple[int, str, str]:
        process = self.start(*words, **env)
        out, err = process.communicate(timeout=30)
        return process.returncode, out, err

    def asked(self) -> list[str]:
        """What uv was asked to do since the last look, its version aside."""
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        self.notes.write_text("")
        return [" ".join(line.split()[:2]) for line in lines if line != "--version"]


MADE = ["venv -q", "pip sync", "pip install"]


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    path = tmp_path / "a clone"
    path.mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, path / name)
    notes = tmp_path / "notes"
    write_program(tmp_path / "bin" / "uv", UV)
    tmp_path.joinpath("bin", "python3").symlink_to(sys.executable)
    return Checkout(path, notes, {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "HOME": str(tmp_path), "NOTES": str(notes)})


def test_a_fresh_clone_makes_its_environment_once_and_hands_the_words_over(checkout: Checkout):
    code, out, err = checkout.run("token", "create", "two words")
    assert (code, out) == (0, "token|create|two words|0\n"), err
    assert checkout.asked() == MADE
    assert checkout.run("up")[1] == "up|0\n"
    assert checkout.asked() == []


@pytest.mark.parametrize("name", ["requirements.lock", "pyproject.toml"])
def test_a_changed_lock_or_project_makes_it_again(checkout: Checkout, name: str):
    checkout.run("up")
    with checkout.path.joinpath(name).open("a") as file:
        file.write("\n")
    checkout.asked()
    assert checkout.run("up")[0] == 0
    assert checkout.asked() == MADE[1:]


def test_a_clone_that_was_moved_makes_it_again(checkout: Checkout):
    checkout.run("up")
    checkout.path = checkout.path.rename(checkout.path.with_name("elsewhere"))
    checkout.asked()
    assert checkout.run("up")[0] == 0
    assert checkout.asked() == MADE[1:]


def test_the_environment_of_the_tests_is_enough_for_the_program_and_not_the_other_way_round(checkout: Checkout):
    checkout.run("up")
    assert "requirements.lock" in checkout.notes.read_text()
    checkout.asked()
    checkout.run("test")
    assert "requirements-dev.lock" in checkout.notes.read_text()
    assert checkout.asked() == MADE[1:]
    checkout.run("up")
    assert checkout.asked() == []


def test_who_has_the_environment_of_the_tests_keeps_it(checkout: Checkout):
    checkout.run("test")
    with checkout.path.joinpath("pyproject.toml").open("a") as file:
        file.write("\n")
    checkout.notes.write_text("")
    checkout.run("up")
    assert "requirements-dev.lock" in checkout.notes.read_text()


def test_going_back_to_an_older_lock_after_a_failure_is_a_change_too(checkout: Checkout):
    lock = checkout.path / "requirements.lock"
    before = lock.read_text()
    checkout.run("up")
    lock.write_text(before + "\n")
    broken = checkout.notes.with_name("notes.broken")
    broken.touch()
    assert checkout.run("up")[0] == 9
    broken.unlink()
    lock.write_text(before)
    checkout.asked()
    assert checkout.run("up")[0] == 0
    assert checkout.asked() == MADE[1:]


def test_an_environment_that_failed_is_tried_again(checkout: Checkout):
    broken = checkout.notes.with_name("notes.broken")
    broken.touch()
    assert checkout.run("up")[0] == 9
    broken.unlink()
    assert checkout.run("up")[0] == 0


def test_many_at_once_make_it_once(checkout: Checkout):
    started = [checkout.start("up") for _ in range(4)]
    assert [(one.communicate(timeout=30)[0], one.returncode) for one in started] == [("up|0\n", 0)] * 4
    assert checkout.asked() == MADE


def test_another_environment_that_is_active_stays_outside(checkout: Checkout):
    code, out, _ = checkout.run("up", PYTHONPATH="/nowhere", VIRTUAL_ENV="/nowhere", UV_SYSTEM_PYTHON="1")
    assert (code, out) == (0, "up|0\n")


def test_no_home_is_no_hindrance(checkout: Checkout):
    del checkout.env["HOME"]
    assert checkout.run("up")[0] == 0
    assert checkout.run("up", HOME="/nonexistent")[0] == 0


def test_python_is_the_environments_own(checkout: Checkout):
    assert checkout.run("python", "-c", "print('here')")[1] == "here\n"


def test_a_measurement_has_a_name(checkout: Checkout):
    write_program(checkout.path / "bench" / "relay.py", "print('measured')")
    code, _, err = checkout.run("bench")
    assert (code, err.splitlines()[-1]) == (1, "run: name a measurement: relay ")
    assert checkout.run("bench", "relay")[1] == "measured\n"


def without(tmp_path: Path, modules: Sequence[str], *, root: bool = False) -> dict[str, str]:
    """A PATH of a machine without uv, whose Python lacks these modules."""
    lacking = " ".join(modules)
    python = (
        f'#!/bin/sh\nfor no in {lacking}; do case "$*" in *"$no"*) exit 1;; esac; done\nexec {sys.executable} "$@"\n'
    )
    write_program(tmp_path / "poor" / "python3", python)
    write_program(tmp_path / "poor" / "id", f"#!/bin/sh\necho {0 if root else 1000}\n")
    for program in ("sh", "dirname", "cat", "sha256sum", "flock", "mkdir", "rm", "env", "grep"):
        found = shutil.which(program)
        assert found is not None, program
        tmp_path.joinpath("poor", program).symlink_to(found)
    return {"PATH": str(tmp_path / "poor")}


def test_without_uv_and_any_way_to_get_it_the_package_is_named(checkout: Checkout, tmp_path: Path):
    code, _, err = checkout.run("up", **without(tmp_path, ["ensurepip", "pip"]))
    assert code == 1
    assert err == (
        "run: Python has neither venv nor pip: install Debian's package python3-venv (apt-get install python3-venv)\n"
    )


def test_as_root_the_package_is_installed(checkout: Checkout, tmp_path: Path):
    env = without(tmp_path, ["ensurepip", "pip"], root=True)
    asked = tmp_path / "asked"
    write_program(tmp_path / "poor" / "apt-get", f'#!/bin/sh\necho "$*" >>{asked}\nexit 1\n')
    code, _, err = checkout.run("up", **env)
    assert code == 1
    assert "apt-get could not install python3-venv" in err
    assert asked.read_text().splitlines() == [
        "install -qq -y --no-install-recommends python3-venv",
        "update -qq",
    ]


def test_a_python_that_is_too_old_is_not_taken(checkout: Checkout, tmp_path: Path):
    code, _, err = checkout.run("up", **without(tmp_path, ["version_info"]))
    assert code == 1
    assert "there is no Python 3.11 or newer: install Debian's package python3-venv" in err


def needs(path: Path, *, uid: int) -> subprocess.CompletedProcess[str]:
    program = f"import os; os.geteuid = lambda: {uid}; from tests import run; run.install_missing()"
    env = {"PATH": str(path)}
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True, timeout=30
    )


def test_what_the_tests_need_is_named_where_we_are_not_root(tmp_path: Path):
    for program in ("git", "ps"):
        write_program(tmp_path / program, "#!/bin/sh\n")
    asked = needs(tmp_path, uid=1000)
    assert asked.returncode == 1
    assert asked.stderr == "test: the tests need Debian's bubblewrap: apt-get install bubblewrap\n"


def test_what_the_tests_need_is_installed_where_we_are_root(tmp_path: Path):
    for program in ("git", "ps"):
        write_program(tmp_path / program, "#!/bin/sh\n")
    write_program(tmp_path / "apt-get", f'#!/bin/sh\necho "$DEBIAN_FRONTEND $*" >>{tmp_path}/asked\n')
    assert needs(tmp_path, uid=0).returncode == 0
    assert tmp_path.joinpath("asked").read_text() == (
        "noninteractive install -qq -y --no-install-recommends bubblewrap\n"
    )


def test_the_script_is_plain_sh():
    subprocess.run(["sh", "-n", ROOT / "run"], check=True, env={"PATH": os.defpath})


@pytest.mark.parametrize("page", ["run", "CONTRIBUTING.md"])
def test_every_word_that_the_script_knows_is_told(page: str):
    told = (ROOT / page).read_text(encoding="utf-8")
    for word in ("test", "bench", "mutants", "python"):
        assert f"./run {word} " in told or f"./run {word}`" in told or f"./run {word}\n" in told, word


def test_the_caches_of_the_checks_are_beside_the_environment(request: pytest.FixtureRequest):
    ruff = subprocess.run(
        ["ruff", "check", "--show-settings", "pyproject.toml"], cwd=ROOT, capture_output=True, text=True
    )
    (shown,) = (line for line in ruff.stdout.splitlines() if line.startswith("cache_dir"))
    found = {
        "pytest": Path(str(request.config.getini("cache_dir"))),
        "ruff": Path(shown.partition('"')[2].rstrip('"')),
        "hypothesis": Path(str(storage_directory().path)),
    }
    assert {name: ROOT / path for name, path in found.items()} == {name: CACHES / name for name in found}
