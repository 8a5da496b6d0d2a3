import subprocess
import sys
from importlib.metadata import version

import pytest


def oubliette(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    program = "from oubliette.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        timeout=30,
        stdin=subprocess.DEVNULL,
        env={"HOME": "/nonexistent", "PATH": ""} | env,
    )


@pytest.mark.parametrize("words", [[], ["--help"], ["token", "--help"], ["token", "create", "--help"]])
def test_help_goes_to_stdout_and_is_no_error(words: list[str]):
    asked = oubliette(*words)
    assert (asked.returncode, asked.stderr) == (0, "")
    assert "Usage: oubliette" in asked.stdout


def test_the_version_is_the_packages():
    assert oubliette("--version").stdout.strip() == version("oubliette")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tokn"], 'Unknown command "tokn"'),
        (["token", "create"], "requires an argument"),
        (["token", "create", "x", "--scope", "owner"], "'owner'"),
        (["token", "create", "x", "--prot", "1"], "--prot"),
    ],
)
def test_asking_wrongly_ends_with_2_and_says_what_was_wrong(words: list[str], message: str):
    asked = oubliette(*words)
    assert (asked.returncode, asked.stdout) == (2, "")
    assert asked.stderr.startswith("oubliette: ")
    assert message in asked.stderr
    assert "Traceback" not in asked.stderr


def test_a_wrong_setting_ends_with_2_and_names_it():
    asked = oubliette("token", "list", OUBLIETTE_PROT="1")
    assert (asked.returncode, asked.stdout) == (2, "")
    assert asked.stderr == "oubliette: OUBLIETTE_PROT: there is no setting `prot`; did you mean `port`?\n"


def test_a_home_that_cannot_be_made_ends_with_2_and_says_why():
    asked = oubliette("token", "list", "--home", "/dev/null/x")
    assert (asked.returncode, asked.stdout) == (2, "")
    assert asked.stderr == "oubliette: /dev/null/x: cannot be made a home: Not a directory\n"
