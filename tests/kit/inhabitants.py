"""The processes of a box, found by the namespace that they share: what is not there is not left behind."""

from pathlib import Path

from oubliette.server.containers.folders import Folder


def namespace(folder: Path) -> str:
    """The box's own process namespace, as its first process shows it on this host."""
    note = Folder(folder).read()
    assert note is not None
    return str((Path("/proc") / note.handle["pid"] / "ns" / "pid").readlink())


def inhabitants(of: str) -> list[int]:
    """Every process of this machine that lives in this namespace."""
    found: list[int] = []
    for place in Path("/proc").iterdir():
        try:
            if place.name.isdigit() and str((place / "ns" / "pid").readlink()) == of:
                found.append(int(place.name))
        except OSError:
            continue
    return found
