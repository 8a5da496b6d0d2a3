"""The public face of oubliette."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oubliette.caller.caller import Caller

__all__ = ["Caller"]


def __getattr__(name: str) -> object:
    # Lazily: the server and the box import this package and need no HTTP client.
    if name == "Caller":
        from oubliette.caller.caller import Caller

        return Caller
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
