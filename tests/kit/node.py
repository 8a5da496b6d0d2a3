"""Programs of the JavaScript world that tests run against: the conformance suite and the official clients.

Node and npm come with the development environment. Each program has the folder of its own that its lock under
`tests/peers/node` describes, so that what one depends on is never what another finds.
"""

import hashlib
import os
import shutil
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.kit.peer_environments import KEPT, PEERS, environment, python_peer, run

TOOLS = Path(sys.executable).parent
NODE = TOOLS / "node"


@dataclass(frozen=True)
class NodePeer:
    folder: Path

    @property
    def env(self) -> dict[str, str]:
        """An environment for node that depends on nothing of this machine's user."""
        return {"PATH": f"{TOOLS}:/usr/bin:/bin", "HOME": str(self.folder)}

    def module(self, path: str) -> Path:
        """A file of a package that was installed."""
        return self.folder / "node_modules" / path

    def script(self, name: str) -> Path:
        """A script of `tests/peers/node` where it finds its modules: imports are looked up from where a file lies."""
        source = PEERS / "node" / name
        digest = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
        place = self.folder / f"{source.stem}-{digest}{source.suffix}"
        if not place.exists():
            unfinished = place.with_name(f".{place.name}.{os.getpid()}")
            shutil.copy(source, unfinished)
            unfinished.rename(place)
        return place


@cache
def node_peer(name: str) -> NodePeer:
    """What `tests/peers/node/<name>` asks for, as its lock has it."""
    wanted = [PEERS / "node" / name / file for file in ("package.json", "package-lock.json")]

    def make(place: Path) -> None:
        place.mkdir()
        for file in wanted:
            shutil.copy(file, place)
        cache_folder = str(KEPT / "npm")
        run([str(TOOLS / "npm"), "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--cache", cache_folder], place)

    return NodePeer(environment(f"node-{name}", wanted, make))


def every_peer() -> None:
    """Make each environment that is not there yet, so that no test pays for it with its own time."""
    for lock in sorted((PEERS / "python").glob("*.lock")):
        python_peer(lock.stem)
    for folder in sorted(path for path in (PEERS / "node").iterdir() if path.is_dir()):
        node_peer(folder.name)
