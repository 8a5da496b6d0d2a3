"""Programs of the JavaScript world that tests run against: the conformance suite and the official clients.

Node comes with the development environment; the packages are installed once per lock file, into a folder outside
the tree of the repository, by whichever test process comes first.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WANTED = ROOT / "tests" / "peers" / "node"
CACHE = ROOT / ".oubliette-dev" / "peers" / "node"
INSTALL_WITHIN_S = 300


@dataclass(frozen=True)
class NodePeers:
    node: Path
    folder: Path

    @property
    def modules(self) -> Path:
        return self.folder / "node_modules"

    @property
    def conformance(self) -> Path:
        """The conformance suite's program, for `node`."""
        return self.modules / "@modelcontextprotocol" / "conformance" / "dist" / "index.js"

    @property
    def env(self) -> dict[str, str]:
        """An environment for node that depends on nothing of this machine's user."""
        return {"PATH": f"{self.node.parent}:/usr/bin:/bin", "HOME": str(self.folder), "NODE_PATH": str(self.modules)}


def node_peers() -> NodePeers:
    """Install what the lock file names, unless that was done; a changed lock file gets a folder of its own."""
    tools = Path(sys.executable).parent
    lock = (WANTED / "package-lock.json").read_bytes()
    folder = CACHE / hashlib.sha256(lock).hexdigest()[:16]
    peers = NodePeers(tools / "node", folder)
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if not folder.exists():
            _install(tools / "npm", folder)
    return peers


def _install(npm: Path, folder: Path) -> None:
    half = folder.with_suffix(".half")
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir()
    for name in ("package.json", "package-lock.json"):
        shutil.copy(WANTED / name, half / name)
    done = subprocess.run(
        [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--cache", CACHE / "npm"],
        cwd=half,
        env={**os.environ, "PATH": f"{npm.parent}:{os.environ.get('PATH', '')}"},
        capture_output=True,
        text=True,
        timeout=INSTALL_WITHIN_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"npm could not install the peers:\n{done.stdout}\n{done.stderr}")
    half.rename(folder)
