"""Names of tools inside the box.

Real agents put a prefix of up to 17 characters before a tool's name and cut, hash or rewrite what is then longer
than 64 or holds anything but letters, digits and underscores. So a name that reaches the box is short and plain:
a declared name that already is stays as it is, another is mapped once, here, with a hash in the middle where it is
too long (the head says whose it is, the tail what it does). Events to the caller always carry the declared name.
"""

import hashlib
import re
from collections.abc import Sequence

BOX_NAME_MAX = 47
CALLER_ID = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}\Z")
TOOL_NAME = re.compile(r"[A-Za-z0-9_.\-/]{1,128}\Z")
PLAIN = re.compile(r"[A-Za-z0-9_]{1,47}\Z")

# First words of names that mean something else in the box.
RESERVED_CALLERS = frozenset(
    {"oubliette", "tools", "session", "calendar", "email", "mission", "document", "research", "question", "approval"}
)
PLATFORM_PREFIX = "oubliette_"
BASE_TOOLS = ("session_message", "session_events")
SEARCH_TOOLS = ("tools_search", "tools_call")


def plain(name: str) -> str:
    """The name with everything but letters, digits and underscores as underscores, and at most 47 long."""
    flat = re.sub(r"[^A-Za-z0-9_]", "_", name)
    if len(flat) <= BOX_NAME_MAX:
        return flat
    digest = hashlib.sha256(name.encode()).hexdigest()[:6]
    head = (BOX_NAME_MAX - len(digest) - 2) // 2
    tail = BOX_NAME_MAX - len(digest) - 2 - head
    return f"{flat[:head]}_{digest}_{flat[-tail:]}"


def box_name(caller_id: str, tool: str) -> str:
    """What the droid calls a caller's tool: `ant` and `send_response` give `ant_send_response`."""
    return plain(f"{caller_id}_{tool}")


def platform_name(operation: str) -> str:
    """What the droid calls an operation of the platform: `project_list` gives `oubliette_project_list`."""
    return PLATFORM_PREFIX + operation


def caller_problem(caller_id: str) -> str | None:
    """Why this caller id cannot be used, or None."""
    if not CALLER_ID.match(caller_id):
        return "a caller id is a letter followed by at most 31 letters, digits, underscores or hyphens"
    first = re.split(r"[_-]", caller_id, maxsplit=1)[0].lower()
    if first in RESERVED_CALLERS:
        return f"caller ids that begin with {first!r} are reserved"
    return None


def tool_problems(caller_id: str, names: Sequence[str]) -> dict[int, str]:
    """Why tools of a declaration cannot be registered, by their position in it."""
    problems: dict[int, str] = {}
    taken: dict[str, str] = {}
    for position, name in enumerate(names):
        if not TOOL_NAME.match(name):
            problems[position] = "a tool's name is 1 to 128 letters, digits, '_', '-', '.' or '/'"
            continue
        inside = box_name(caller_id, name)
        if inside in BASE_TOOLS or inside in SEARCH_TOOLS or inside.startswith(PLATFORM_PREFIX):
            problems[position] = f"{inside!r} is a name of the platform's own"
        elif inside in taken:
            other = taken[inside]
            problems[position] = (
                "declared twice"
                if other == name
                else f"the droid could not tell it from {other!r}: both are {inside!r}"
            )
        else:
            taken[inside] = name
    return problems
