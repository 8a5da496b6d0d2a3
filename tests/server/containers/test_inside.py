"""The packed program."""

import zipfile
from pathlib import Path

from oubliette.server.containers import inside


def test_the_same_sources_make_the_same_bytes_and_name(tmp_path: Path) -> None:
    first, second = inside.pack(tmp_path / "one"), inside.pack(tmp_path / "two")
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()
    assert first.stat().st_mode & 0o777 == 0o444


def test_packing_again_changes_nothing_and_repairs_what_was_changed(tmp_path: Path) -> None:
    path = inside.pack(tmp_path)
    before = path.stat().st_ino
    assert inside.pack(tmp_path).stat().st_ino == before
    path.chmod(0o644)
    path.write_bytes(b"something else")
    assert zipfile.is_zipfile(inside.pack(tmp_path))
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


def test_it_holds_the_three_programs_and_nothing_of_the_server(tmp_path: Path) -> None:
    with zipfile.ZipFile(inside.pack(tmp_path)) as archive:
        names = set(archive.namelist())
        assert archive.read("oubliette/__init__.py") == b""
    assert {"__main__.py", "oubliette/inside/keeper.py", "oubliette/inside/droid.py"} <= names
    assert all(name == "__main__.py" or name.startswith(("oubliette/inside/", "oubliette/__init__")) for name in names)
