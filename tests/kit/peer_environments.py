"""Environments for programs of other people: made once from a lock with hashes, kept between runs.

Each lies in `.oubliette-dev/peers/` under a name that carries the digest of its lock, so that another lock is another
environment and an old checkout keeps working. It is made beside its place and moved there when it is whole, under a
file lock, so that several test processes may ask at once.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "tests" / "peers"
KEPT = ROOT / ".oubliette-dev" / "peers"
MAKE_S = 600


@cache
def python_peer(name: str) -> Path:
    """The interpreter of the environment that `tests/peers/python/<name>.lock` describes."""
    lock = PEERS / "python" / f"{name}.lock"

    def make(place: Path) -> None:
        uv = os.environ.get("UV") or shutil.which("uv")
        if uv is None:
            raise RuntimeError("uv is not on PATH: run the tests by ./run test")
        run([uv, "venv", "-q", "--relocatable", "--python", sys.executable, str(place)])
        interpreter = str(place / "bin" / "python")
        run([uv, "pip", "sync", "-q", "--python", interpreter, "--require-hashes", str(lock)])

    return environment(name, [lock], make) / "bin" / "python"


def environment(name: str, files: list[Path], make: Callable[[Path], None]) -> Path:
    """The folder that `make` fills, once for these contents of `files`."""
    digest = hashlib.sha256(b"\0".join([sys.version.encode(), *(file.read_bytes() for file in files)]))
    place = KEPT / f"{name}-{digest.hexdigest()[:16]}"
    if not place.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        with _alone(KEPT / f"{name}.lock"):
            if not place.exists():
                unfinished = place.with_name(f".{place.name}")
                shutil.rmtree(unfinished, ignore_errors=True)
                make(unfinished)
                unfinished.rename(place)
    return place


@contextmanager
def _alone(path: Path) -> Generator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(command: list[str], cwd: Path | None = None) -> None:
    """Run what makes an environment, with the tools of ours."""
    environ = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environ.get("PATH", os.defpath)])
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=MAKE_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
