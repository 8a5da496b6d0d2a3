"""The processes of a box, found by the namespace that they share: what is not there is not left behind."""

from dataclasses import dataclass
from pathlib import Path

from oubliette.server.containers.folders import Folder

PROC = Path("/proc")


@dataclass(frozen=True)
class Namespace:
    """A box's own process namespace. Its name is given to another soon after it ended; its first process tells."""

    name: str
    first: int
    began: str


def namespace(folder: Path) -> Namespace:
    """The namespace of the box with this folder."""
    note = Folder(folder).read()
    assert note is not None
    first = int(note.handle["pid"])
    return Namespace(_name(first), first, _began(first))


def inhabitants(of: Namespace) -> list[int]:
    """Every process of this machine that lives in this namespace: none once its first has ended, by the kernel."""
    try:
        if _began(of.first) != of.began:
            return []
    except OSError:
        return []
    found: list[int] = []
    for place in PROC.iterdir():
        try:
            if place.name.isdigit() and _name(int(place.name)) == of.name:
                found.append(int(place.name))
        except OSError:
            continue
    return found


def _name(pid: int) -> str:
    return str((PROC / str(pid) / "ns" / "pid").readlink())


def _began(pid: int) -> str:
    """When a process began, in the kernel's ticks."""
    return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[19]
