"""Keys are taken out of what an agent says: one that it was given, and whatever has the form that every key has.

The form alone is enough: a server that was restarted does not know the key of a droid that goes on, and none ever
knows the token that a droid made for itself.
"""

import re

from oubliette.server.tokens.tokens import PREFIX

REDACTED = "[redacted]"
BROKEN_OFF = "[redacted…]"  # a key of which only the beginning was said so far

_DIGITS = 64
_KEY = re.compile(rf"{PREFIX}[0-9a-f]{{{_DIGITS}}}".encode())
_KEY_BYTES = len(PREFIX) + _DIGITS
_HEAD = re.compile(rb"(?:o(?:u(?:b(?:_[0-9a-f]{0,63})?)?)?)\Z")
_MASK = REDACTED.encode().ljust(_KEY_BYTES, b"-")

_SPOKEN = re.compile(rf"{PREFIX}[0-9a-f]{{{_DIGITS}}}")
_BEGUN = re.compile(rf"{PREFIX}[0-9a-f]+\Z")
_REST = re.compile(rf"\A[0-9a-f]{{1,{_DIGITS}}}")
SEEN_CHARS = len(BROKEN_OFF)  # of what was said before


def redacted(data: bytes, given: bytes | None = None) -> bytes:
    """Without the key that was given, and without any other."""
    if given is not None:
        data = data.replace(given, REDACTED.encode())
    return _KEY.sub(REDACTED.encode(), data)


def masked(data: bytes) -> bytes:
    """The same in as many bytes, for what is counted."""
    return _KEY.sub(_MASK, data)


def cut_key(data: bytes | bytearray) -> int:
    """How many bytes at the end may be the beginning of a key whose rest is still to come."""
    head = _HEAD.search(data, max(0, len(data) - _KEY_BYTES + 1))
    return len(head.group()) if head is not None else 0


def spoken(before: str, text: str) -> str:
    """`text`, said after `before`, without a key of which either may hold a part: its rest is dropped when it comes."""
    if before.endswith(BROKEN_OFF):
        text = _REST.sub("", text)
    begun = next((PREFIX[:size] for size in range(len(PREFIX), 0, -1) if before.endswith(PREFIX[:size])), "")
    whole = _BEGUN.sub(BROKEN_OFF, _SPOKEN.sub(REDACTED, begun + text))
    return whole.removeprefix(begun)
