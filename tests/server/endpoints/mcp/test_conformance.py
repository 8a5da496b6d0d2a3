"""The official conformance suite against our transport, with fixtures that live in the test kit."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kit.node import NODE, NodePeer, node_peer
from tests.kit.peer_environments import ROOT

KNOWN = tomllib.loads(Path(__file__).with_name("conformance.toml").read_text())
OURS = frozenset(KNOWN.pop("ours"))
# The revisions that the suite has a frozen set of requirements for, and one that it only filters by.
SETS = {
    "2025-06-18": ["--suite", "all", "--spec-version", "2025-06-18"],
    "2025-11-25": ["--requirements", "2025-11-25"],
    "2026-07-28": ["--requirements", "2026-07-28"],
}
PROGRAM = "@modelcontextprotocol/conformance/dist/index.js"
RESULT = re.compile(r"^([✓✗]) ([a-z0-9-]+): \d+ passed, \d+ failed", re.MULTILINE)
UNSCORED = re.compile(r"^  [✓✗] ([a-z0-9-]+) \([a-z-]+\)", re.MULTILINE)


@contextmanager
def fixtures_served() -> Generator[str]:
    program = [sys.executable, "-m", "tests.kit.mcp_fixtures", "--uvloop"]
    with subprocess.Popen(
        program, cwd=ROOT, env={"PYTHONPATH": "src"}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.kill()


@pytest.fixture(scope="module")
def suite() -> NodePeer:
    return node_peer("conformance")


def results(suite: NodePeer, revision: str, folder: Path) -> tuple[dict[str, bool], set[str]]:
    """Whether each scenario of a set passed, and which of them the suite does not count."""
    with fixtures_served() as url:
        ran = subprocess.run(
            [NODE, suite.module(PROGRAM), "server", "--url", url, *SETS[revision], "-o", folder],
            env=suite.env,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    summary = ran.stdout.partition("=== SUMMARY ===")[2]
    found = {name: mark == "✓" for mark, name in RESULT.findall(summary)}
    assert found, ran.stdout + ran.stderr
    return found, set(UNSCORED.findall(summary))


def listed(suite: NodePeer, revision: str) -> set[str]:
    """The server's scenarios that the suite has for a revision, those that it does not score included."""
    wanted = next(option for option in ("--requirements", "--spec-version") if option in SETS[revision])
    shown = subprocess.run(
        [NODE, suite.module(PROGRAM), "list", wanted, revision],
        env=suite.env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    return set(re.findall(r"^\s+- ([a-z0-9-]+)(?: \[[a-z0-9,-]+\])?$", shown, re.MULTILINE))


@pytest.mark.parametrize("revision", SETS)
def test_the_suite_passes_but_for_what_the_baseline_names(
    revision: str, suite: NodePeer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, unscored = results(suite, revision, tmp_path)
    failed = {name for name, passed in found.items() if not passed}
    required = found.keys() - unscored
    with capsys.disabled():
        print(
            f"\nconformance {revision}: {len(required - failed)} of {len(required)} required scenarios pass,"
            f" {len(found) - len(failed)} of {len(found)} run"
        )
    assert failed == set(KNOWN[revision])
    row = f"| {revision} | {len(required - failed)} of {len(required)} |"
    assert row in (ROOT / "README.md").read_text(encoding="utf-8"), "the README states another count"
    # Also where the suite does not score it.
    assert found.keys() & OURS == listed(suite, revision) & OURS, "every one of ours that this revision has ran"


def test_what_is_ours_is_never_baselined() -> None:
    for revision in SETS:
        assert not OURS & KNOWN[revision].keys(), revision
        assert all(reason for reason in KNOWN[revision].values())


def test_all_that_is_ours_is_run(suite: NodePeer) -> None:
    assert set().union(*(listed(suite, revision) & OURS for revision in SETS)) == OURS
