"""What can go wrong for a caller. `kind` is the machine word that the server's own errors carry."""

from typing import Any, ClassVar


class CallerError(Exception):
    """Base of all; an error of a kind without a class of its own is exactly this."""

    KIND: ClassVar[str] = "internal"

    def __init__(self, message: str, kind: str | None = None, details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind or self.KIND
        self.details = details or {}


class Unauthenticated(CallerError):
    """The token is wrong, expired or revoked."""

    KIND = "unauthenticated"


class Forbidden(CallerError):
    """The token is right and its scope is not enough."""

    KIND = "forbidden"


class NotFound(CallerError):
    """No such thing, or not yours."""

    KIND = "not_found"


class InvalidParams(CallerError):
    """A parameter is missing, of the wrong type or out of range."""

    KIND = "invalid_params"


class InvalidArguments(CallerError):
    """The arguments of a lent tool do not fit its signature."""

    KIND = "invalid_arguments"


class Conflict(CallerError):
    """The thing is not in a state that allows this."""

    KIND = "conflict"


class TooMany(CallerError):
    """A bound on a number is reached."""

    KIND = "too_many"


class TooLarge(CallerError):
    """A bound on a size is passed."""

    KIND = "too_large"


class Purged(CallerError):
    """The events asked for are gone; the details name the oldest that are left."""

    KIND = "purged"


class NotConfigured(CallerError):
    """What this needs is not set up on the server's side; the message says what to do."""

    KIND = "not_configured"


class Unreachable(CallerError):
    """The server did not answer. Nothing is known to have happened unless `kind` is `outcome_unknown`."""

    KIND = "unreachable"


class SessionFailed(CallerError):
    """The session ended before the turn did."""

    KIND = "session_failed"


BY_KIND: dict[str, type[CallerError]] = {
    kind.KIND: kind
    for kind in (
        Unauthenticated,
        Forbidden,
        NotFound,
        InvalidParams,
        InvalidArguments,
        Conflict,
        TooMany,
        TooLarge,
        Purged,
        NotConfigured,
        Unreachable,
    )
}


def refusal(kind: str, message: str, details: dict[str, Any] | None = None) -> CallerError:
    """The exception of a kind."""
    return BY_KIND.get(kind, CallerError)(message, kind, details)
