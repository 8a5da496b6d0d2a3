"""The proof that a box holds: its keeper tells what it sees, and here that is judged before any droid starts."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from oubliette.server.containers import seccomp

Facts = Mapping[str, Any]

_TOP = frozenset(
    "bin dev etc home lib lib32 lib64 libx32 mcp opt proc sbin tmp usr var workspace".split()  # noqa: SIM905
)
_NAMESPACES = ("ipc", "mnt", "net", "pid", "user", "uts")
_NO_CAPABILITIES = "0000000000000000"
_ENVIRONMENT = {
    "HOME",
    "LANG",
    "LD_LIBRARY_PATH",
    "LC_CTYPE",
    "OUBLIETTE_SOCKET",
    "PATH",
    "PWD",
    "OLDPWD",
    "SHLVL",
    "_",
}


def leaks(facts: Facts) -> list[str]:
    """What is wrong with the box, in words; nothing if it holds."""
    found = [what for what, holds in _CLAIMS.items() if not _try(holds, facts)]
    writable: list[str] = facts.get("writable") or []
    return [*found, *(f"it can write to {path}" for path in writable)]


def _try(holds: Callable[[Facts], bool], facts: Facts) -> bool:
    try:
        return holds(facts)
    except (KeyError, TypeError, ValueError, AttributeError):
        return False  # what is not told is not proven


def _ours(namespace: str) -> str:
    return str(Path("/proc/self/ns", namespace).readlink())


_CLAIMS: Mapping[str, Callable[[Facts], bool]] = {
    "it has a network": lambda facts: facts["interfaces"] == ["lo"],
    "it shares a namespace with the host": lambda facts: (
        not any(facts["namespaces"][name] in ("", _ours(name)) for name in _NAMESPACES)
    ),
    "its keeper is not its first process": lambda facts: facts["pid"] == 1,
    "it sees foreign processes": lambda facts: facts["processes"] == [1],
    "it sees foreign files": lambda facts: (
        set(facts["folders"]["/"]) <= _TOP
        and facts["folders"]["/home"] == ["box"]
        and set(facts["folders"]["/opt"]) <= {"oubliette", "python"}
        and len(facts["folders"]["/opt/oubliette"]) == 1
    ),
    "it can gain privileges": lambda facts: (
        facts["status"]["NoNewPrivs"] == "1"
        and all(facts["status"][name] == _NO_CAPABILITIES for name in ("CapPrm", "CapEff", "CapAmb"))
    ),
    "its system calls are not filtered": lambda facts: facts["status"]["Seccomp"] == "2" or seccomp.rules() is None,
    "its keeper can be read": lambda facts: facts["is_dumpable"] is False,
    "it knows the host's name": lambda facts: facts["hostname"] == "box",
    "it inherited an environment": lambda facts: set(facts["environment"]) <= _ENVIRONMENT,
    "its workspace cannot be written": lambda facts: facts["workspace_is_writable"] is True,
    "it does not say what it can write": lambda facts: isinstance(facts["writable"], list),
}
