"""The protocol's revisions, and the two eras they fall into.

*Legacy* revisions begin with `initialize` and live in a session; the *modern* one is stateless: every request says
for itself which revision it speaks and what its client can do. Both are served on one path.
"""

from enum import Enum
from typing import Final


class Era(Enum):
    LEGACY = "legacy"
    MODERN = "modern"


MODERN: Final = "2026-07-28"
LEGACY: Final = ("2025-11-25", "2025-06-18", "2025-03-26")
NEWEST_LEGACY: Final = LEGACY[0]
# Newest first: a client takes the first that it knows.
SUPPORTED: Final = (MODERN, *LEGACY)


def negotiated(requested: str) -> str:
    """The revision that answers an `initialize`: the one asked for, or our newest."""
    return requested if requested in LEGACY else NEWEST_LEGACY


def is_dated(version: str) -> bool:
    """Whether this looks like a revision of the legacy era, known to us or not."""
    return len(version) == 10 and version < MODERN and version[4] == version[7] == "-"
