"""Where a secret turned up: in files, in what processes were started with, in rows."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path


def in_files(secrets: Mapping[str, str], folders: Iterable[Path], *, except_for: Iterable[Path] = ()) -> list[str]:
    """`name: place` for every file below that holds a secret; whole files, whatever their kind."""
    found: list[str] = []
    passed = set(except_for)
    for path in _files(folders):
        if path not in passed:
            content = path.read_bytes()
            found += [f"{name}: {path}" for name, secret in secrets.items() if secret.encode() in content]
    return found


def of_the_form(form: re.Pattern[bytes], folders: Iterable[Path]) -> list[str]:
    """Every file below in which anything has this form."""
    return [str(path) for path in _files(folders) if form.search(path.read_bytes())]


def _files(folders: Iterable[Path]) -> list[Path]:
    found = (Path(at) / name for folder in folders for at, _, names in os.walk(folder) for name in names)
    return [path for path in found if path.is_file()]


def in_processes(secrets: Mapping[str, str], what: str) -> list[str]:
    """`name: command` for every process of this machine that shows a secret in /proc/*/WHAT."""
    found: list[str] = []
    for place in Path("/proc").iterdir():
        if not place.name.isdigit():
            continue
        try:
            shown = (place / what).read_bytes()
            command = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        found += [f"{name}: {command[:200]}" for name, secret in secrets.items() if secret.encode() in shown]
    return found
