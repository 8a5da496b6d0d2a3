"""What the box's first process can see of its own walls, and how it makes itself unreadable to the rest of the box.

The facts are told to the server before anything else runs in the box; the server judges them.
"""

from __future__ import annotations

import os
import socket
from typing import Any, Dict, List

PR_GET_DUMPABLE = 3
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
# Places that a box must not be able to write to, each a door to the host.
READ_ONLY = ("/", "/etc", "/usr", "/opt/oubliette", "/mcp", "/proc/sys/kernel", "/proc/irq")
KERNEL_SETTINGS = ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sysrq-trigger")
STATUS_FIELDS = ("NoNewPrivs", "CapInh", "CapPrm", "CapEff", "CapAmb", "Seccomp")


def harden() -> None:
    """Let nobody in the box read this process's memory, and let every orphan of the box come to it."""
    for fd in open_files():
        if fd > 2:
            try:
                os.close(fd)
            except OSError:
                pass
    prctl(PR_SET_DUMPABLE, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def prctl(option: int, value: int = 0) -> int:
    """The kernel's answer; -1 where it cannot be asked."""
    try:
        import ctypes

        return int(ctypes.CDLL(None).prctl(option, value, 0, 0, 0))
    except (ImportError, OSError, AttributeError):
        return -1


def open_files() -> List[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return list(range(3, 64))


def facts() -> Dict[str, Any]:
    return {
        "pid": os.getpid(),
        "uid": os.getuid(),
        "hostname": socket.gethostname(),
        "interfaces": [name for _, name in socket.if_nameindex()],
        "namespaces": {name: read_link("/proc/self/ns/" + name) for name in NAMESPACES},
        "status": status(),
        "processes": sorted(processes()),
        "environment": sorted(os.environ),
        "folders": {path: listing(path) for path in ("/", "/home", "/opt", "/opt/oubliette", "/mcp")},
        "writable": [path for path in READ_ONLY if is_writable_folder(path)]
        + [path for path in KERNEL_SETTINGS if is_writable_file(path)],
        "workspace_is_writable": is_writable_folder("/workspace"),
        "is_dumpable": prctl(PR_GET_DUMPABLE) != 0,
    }


def status() -> Dict[str, str]:
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line)
    return {name: fields.get(name, "").strip() for name in STATUS_FIELDS}


def processes() -> List[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def children(parent: int) -> List[int]:
    """The living and dead children of a process."""
    found: List[int] = []
    for pid in processes():
        try:
            with open("/proc/%d/stat" % pid, "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if len(fields) > 1 and int(fields[1]) == parent:
            found.append(pid)
    return found


def listing(path: str) -> List[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def read_link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def is_writable_folder(path: str) -> bool:
    """Try it: what the permission bits say is not what the mounts do."""
    # A name of its own: several boxes may try the same workspace at once, and one may die before it cleans up.
    probe = os.path.join(path, ".oubliette-probe-" + os.urandom(8).hex())
    try:
        fd = os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except OSError:
        return False
    os.close(fd)
    os.unlink(probe)
    return True


def is_writable_file(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_WRONLY))  # opening changes nothing yet
    except OSError:
        return False
    return True
