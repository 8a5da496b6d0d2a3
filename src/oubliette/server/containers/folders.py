"""What a box leaves on this host's disk: one folder, and in it a note of who it is.

HOME/boxes/<number>/box.json     the note: whose box, and its processes
                    mcp/         the door; the box sees it as /mcp, read-only
                    home/        the box's private home
                    keeper.log   what the keeper said before it died, as a rule nothing
HOME/projects/<project>/workspaces/<workspace>/   outlives its boxes
HOME/projects/.gone/<number>/                     what was deleted and is not removed yet
"""

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec

from oubliette.server import ids
from oubliette.server.errors import BoxFailed

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")


class Note(msgspec.Struct, frozen=True, kw_only=True):
    box_id: str
    installation: str
    session_id: str
    project_id: str
    workspace_id: str
    handle: dict[str, str] = {}


class Folder:
    """The folder of one box."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.door = path / "mcp"
        self.home = path / "home"
        self.log = path / "keeper.log"
        self._note = path / "box.json"

    def make(self) -> None:
        for path in (self.path.parent, self.path, self.door, self.home):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, note: Note) -> None:
        beside = self._note.with_suffix(".new")
        beside.write_bytes(msgspec.json.encode(note))
        beside.rename(self._note)

    def read(self) -> Note | None:
        try:
            return msgspec.json.decode(self._note.read_bytes(), type=Note)
        except (OSError, msgspec.DecodeError):
            return None

    def last_words(self) -> str:
        """The end of what was said on the keeper's standard error."""
        try:
            return self.log.read_bytes()[-2000:].decode("utf-8", "replace").strip()
        except OSError:
            return ""

    def remove(self) -> None:
        remove(self.path)


def remove(path: Path) -> None:
    """Remove a folder whole, whatever a droid made of it: closed folders, or a tree too deep to walk by calls."""
    if not path.exists():
        return
    try:
        shutil.rmtree(path)
    except (OSError, RecursionError):
        for tool in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):  # both leave alone what links lead to
            subprocess.run([*tool, "--", path], env={"PATH": os.defpath}, capture_output=True, check=False)


class Folders:
    """All boxes' folders and workspaces below one home."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._boxes = home / "boxes"
        self._gone = home / "projects" / ".gone"  # beside what it takes in, and no id

    def of(self, box_id: str) -> Folder:
        return Folder(self._boxes / _plain(box_id.removeprefix("box_")))

    def workspace(self, project_id: str, workspace_id: str) -> Path:
        return self.home / "projects" / _plain(project_id) / "workspaces" / _plain(workspace_id)

    def workspaces(self) -> list[tuple[str, str]]:
        """Each workspace that has a folder: its project and its own id."""
        found = (self.home / "projects").glob("*/workspaces/*")
        named = ((path.parts[-3], path.name) for path in found)
        return sorted(where for where in named if all(map(_NAME.match, where)))

    def set_aside(self, project_id: str, workspace_id: str | None) -> None:
        """Take the files of a workspace, or of a project with all of them, to where `clear` removes them."""
        projects = self.home / "projects"
        path = self.workspace(project_id, workspace_id) if workspace_id is not None else projects / _plain(project_id)
        if not path.exists():
            return
        try:
            self._gone.mkdir(mode=0o700, exist_ok=True)
            path.chmod(0o700)  # a droid may have closed it, and what is closed cannot be moved
            path.rename(self._gone / ids.new_key())
        except OSError:
            remove(path)  # a file system of its own: slower, and out of the way all the same

    def clear(self) -> None:
        """Remove what was set aside, by this server or by one before it."""
        with contextlib.suppress(FileNotFoundError):
            for path in self._gone.iterdir():
                remove(path)

    def all(self) -> Iterator[tuple[str, Folder]]:
        """Each folder there is, by the box it is of."""
        with contextlib.suppress(FileNotFoundError):
            for entry in sorted(self._boxes.iterdir()):
                if _NAME.match(entry.name) and entry.is_dir():
                    yield f"box_{entry.name}", Folder(entry)


def _plain(name: str) -> str:
    """A name that becomes part of a path."""
    if not _NAME.match(name):
        raise BoxFailed("an id that cannot be the name of a folder")
    return name
