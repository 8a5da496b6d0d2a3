import os
import sys
from pathlib import Path

import pytest

from oubliette.server.containers.folders import Folders


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    made = Folders(tmp_path)
    for workspace in ("w1", "w2"):
        (made.workspace("p", workspace) / "in").mkdir(parents=True)
    return made


def test_what_is_set_aside_is_nobodys_workspace_and_is_gone_when_it_was_cleared(folders: Folders, tmp_path: Path):
    folders.workspace("p", "w1").chmod(0)
    folders.set_aside("p", "w1")
    assert folders.workspaces() == [("p", "w2")]
    folders.set_aside("p", None)
    assert folders.workspaces() == []
    aside = tmp_path / "projects" / ".gone"
    assert len(list(aside.iterdir())) == 2
    folders.clear()
    assert list(aside.iterdir()) == []


def test_what_is_not_there_is_set_aside_without_a_trace(folders: Folders, tmp_path: Path):
    folders.set_aside("p", "w3")
    folders.set_aside("q", None)
    folders.clear()
    assert [path.name for path in (tmp_path / "projects").iterdir()] == ["p"]


def test_what_cannot_be_moved_is_removed_in_its_place(folders: Folders, tmp_path: Path):
    (tmp_path / "projects" / ".gone").write_text("in the way")
    folders.set_aside("p", "w1")
    assert folders.workspaces() == [("p", "w2")]


def test_what_somebody_else_put_there_is_left_alone(folders: Folders, tmp_path: Path):
    for name in ("p copy", ".kept"):
        (tmp_path / "projects" / name / "workspaces" / "w1").mkdir(parents=True)
    assert folders.workspaces() == [("p", "w1"), ("p", "w2")]


def test_a_tree_too_deep_for_calls_is_removed_wherever_this_process_looks_for_programs(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
):
    within = os.open(folders.workspace("p", "w1"), os.O_RDONLY)
    for _ in range(sys.getrecursionlimit() + 100):
        os.mkdir("d", dir_fd=within)
        deeper = os.open("d", os.O_RDONLY, dir_fd=within)
        os.close(within)
        within = deeper
    os.close(within)
    monkeypatch.setenv("PATH", "/nowhere")
    folders.set_aside("p", "w1")
    folders.clear()
    assert list((folders.home / "projects" / ".gone").iterdir()) == []
