"""The one file that boxes run: client, keeper and droid, packed.

Its name tells its content, so that a box started before an upgrade keeps the program that it began with, and its
bytes depend on nothing but the sources and this Python: no times, no order of files.

Beside each source lies its compiled form: reading the sources is more than half of what a client needs to start. A
box whose Python is of another version passes over it and reads the source.
"""

import hashlib
import importlib.util
import io
import marshal
import os
import zipfile
from importlib import resources
from pathlib import Path

_EPOCH = (1980, 1, 1, 0, 0, 0)
_PACKAGE = "oubliette.inside"


def pack(folder: Path) -> Path:
    """The packed program in this folder, made if it is not there yet; read-only."""
    content = _archive(_sources())
    path = folder / f"oubliette-{hashlib.sha256(content).hexdigest()[:16]}.pyz"
    if path.exists() and path.read_bytes() == content:
        return path
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = folder / f".{path.name}.{os.getpid()}"
    beside.unlink(missing_ok=True)
    beside.write_bytes(content)
    beside.chmod(0o444)
    beside.rename(path)
    return path


def _sources() -> dict[str, bytes]:
    files = {"oubliette/__init__.py": b""}
    for source in resources.files(_PACKAGE).iterdir():
        if source.name.endswith(".py"):
            files[f"oubliette/inside/{source.name}"] = source.read_bytes()
    files |= {f"{name}c": _compiled(name, content) for name, content in files.items()}
    files["__main__.py"] = files["oubliette/inside/__main__.py"]
    return files


def _compiled(name: str, source: bytes) -> bytes:
    """What Python keeps of a module, marked as never to be checked against its source: the archive is one thing."""
    # Version 2 of the format writes no back references: those tell what else this process has in memory.
    code = marshal.dumps(compile(source, name, "exec", dont_inherit=True, optimize=0), 2)
    return importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + importlib.util.source_hash(source) + code


def _archive(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in sorted(files.items()):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.external_attr = 0o100444 << 16
            entry.create_system = 3
            archive.writestr(entry, content)
    return buffer.getvalue()
