"""The Pythons of this machine: what a box's own may be."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

OLDEST = (3, 9)
ASK_S = 20


@cache
def pythons() -> list[str]:
    """One interpreter per version from the oldest that is promised on: by its usual name, or where pyenv keeps it."""
    kept = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    names = [sys.executable, "/usr/bin/python3", *(f"python3.{minor}" for minor in range(OLDEST[1], 20))]
    found: dict[str, str] = {}
    for name in [*names, *sorted(map(str, kept.glob("*/bin/python3")))]:
        code = "import sys; print(sys.executable, *sys.version_info[:2])"
        try:
            done = subprocess.run([name, "-c", code], capture_output=True, text=True, timeout=ASK_S, check=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        executable, *version = done.stdout.split()
        if tuple(map(int, version)) >= OLDEST:
            found.setdefault(".".join(version), executable)
    return list(found.values())
