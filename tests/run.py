"""`./run test`: what the tests need, then every check, each with its duration; pytest's closing line comes last.

With arguments only pytest runs, with these.
"""

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
CACHES = ROOT / ".oubliette-dev" / "cache"  # pytest's and ruff's are named in pyproject.toml

# Programs that no Python package brings, and Debian's packages for them.
NEEDED = {"bwrap": "bubblewrap", "git": "git", "ps": "procps"}

# Found on PATH, where the environment's own programs come first.
CHECKS = (
    ("ruff check", ["ruff", "check"]),
    ("ruff format", ["ruff", "format", "--check"]),
    ("pyright", ["pyright", "--pythonpath", sys.executable]),
    ("pyright, in the box", ["pyright", "--pythonpath", sys.executable, "--project", "tests/pyright-inside.json"]),
    ("import contracts", ["lint-imports", "--no-logo", "--cache-dir", str(CACHES / "import-linter")]),
    ("dependencies", ["deptry", "src"]),
)
PEERS = [sys.executable, "-c", "from tests.kit.node import every_peer; every_peer()"]
PYTEST = [sys.executable, "-m", "pytest"]


def main(arguments: list[str]) -> int:
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    # A person's own settings are not the tests'.
    for name in [name for name in os.environ if name.startswith("OUBLIETTE_")]:
        del os.environ[name]
    os.environ.setdefault("PYRIGHT_PYTHON_IGNORE_WARNINGS", "1")
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(CACHES / "hypothesis")
    install_missing()
    if arguments:
        return subprocess.call([*PYTEST, *arguments], cwd=ROOT)
    failed = [name for name, command in (*CHECKS, ("programs to test against", PEERS)) if not passes(name, command)]
    if failed:
        say(f"failed: {', '.join(failed)}; pytest follows")
    # The processes of one run order sets alike, or they would collect different tests; the next run orders anew.
    seed = os.environ.setdefault("PYTHONHASHSEED", str(random.randrange(1, 2**32)))
    say(f"pytest, with PYTHONHASHSEED={seed}")
    # A place of its own: what other runs left there, trees too deep for a Python to remove even, is not ours to meet.
    place = tempfile.mkdtemp(prefix="oub-tests-")
    try:
        code = subprocess.call([*PYTEST, "-n", "2", f"--basetemp={place}/t"], cwd=ROOT)
    finally:
        subprocess.call(["rm", "-rf", place])
    return code or bool(failed)


def install_missing() -> None:
    """Install by apt-get where we are root, else name what is missing and stop."""
    missing = [package for program, package in NEEDED.items() if shutil.which(program) is None]
    if not missing:
        return
    names = " ".join(missing)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        sys.exit(f"test: the tests need Debian's {names}: apt-get install {names}")
    say(f"installing Debian's {names}")
    install = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", *missing]
    os.environ["DEBIAN_FRONTEND"] = "noninteractive"
    if subprocess.call(install, stdout=subprocess.DEVNULL) != 0:
        subprocess.check_call(["apt-get", "update", "-qq"])
        subprocess.check_call(install, stdout=subprocess.DEVNULL)


def passes(name: str, command: list[str]) -> bool:
    say(name)
    began = time.monotonic()
    code = subprocess.call(command, cwd=ROOT)
    say(f"{name}: {'passed' if code == 0 else 'FAILED'} in {time.monotonic() - began:.1f} s")
    return code == 0


def say(text: str) -> None:
    print(f"test: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
