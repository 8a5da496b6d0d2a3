"""Everything that can go wrong on purpose.

    OublietteError
    ├── Unauthenticated         the key is wrong, expired or revoked
    ├── Forbidden               the key is right and its scope is not enough
    ├── NotFound                no such thing, or not yours
    ├── InvalidParams           a parameter is missing, of the wrong type or out of range
    │   └── InvalidArguments    a caller tool's arguments do not fit its schema
    ├── UnknownTool             no such tool
    ├── MethodUnknown           no such method on this door
    ├── Conflict                the thing is not in a state that allows this
    │   └── CallKeyReused       the same call key for another call
    ├── TooMany                 a bound on a number is reached
    ├── TooLarge                a bound on a size is passed
    ├── Purged                  events before an index are gone
    ├── CallFailed              how a relayed call ends when it does not succeed
    │   ├── CallTimeout  CallerGone  CallerError  CallCancelled  ClientGone  OutcomeUnknown
    ├── UpgradeRequired         the other side speaks a protocol version that we do not
    ├── NotConfigured           what this needs is not set up, and what to do about it
    ├── BoxFailed               a box did not start, or was lost
    ├── DroidFailed             the agent broke its protocol, died, or refused
    └── StorageFailed           the database did not take a write

The text is for people: what happened, what to do next. It never carries a secret.
`kind` is the machine word; the wire forms of each stand in one table, `endpoints/failures.py`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar


class OublietteError(Exception):
    kind: ClassVar[str] = "internal"
    retryable: bool = False

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details: Mapping[str, Any] = details


class Unauthenticated(OublietteError):
    kind = "unauthenticated"

    def __init__(self, message: str = "invalid or expired API key") -> None:
        super().__init__(message)


class Forbidden(OublietteError):
    kind = "forbidden"


class NotFound(OublietteError):
    kind = "not_found"


class InvalidParams(OublietteError):
    kind = "invalid_params"


class InvalidArguments(InvalidParams):
    kind = "invalid_arguments"


class MethodUnknown(OublietteError):
    kind = "unknown_method"


class UnknownTool(OublietteError):
    kind = "unknown_tool"


class Conflict(OublietteError):
    kind = "conflict"


class CallKeyReused(Conflict):
    kind = "call_key_reused"


class TooMany(OublietteError):
    kind = "too_many"
    retryable = True


class TooLarge(OublietteError):
    kind = "too_large"


class Purged(OublietteError):
    kind = "purged"


class CallFailed(OublietteError):
    """A relayed call that ended without a result."""


class CallTimeout(CallFailed):
    kind = "timeout"


class CallerGone(CallFailed):
    kind = "disconnected"


class CallerError(CallFailed):
    kind = "caller_error"


class CallCancelled(CallFailed):
    kind = "cancelled"


class ClientGone(CallFailed):
    kind = "client_gone"


class OutcomeUnknown(CallFailed):
    kind = "outcome_unknown"


class UpgradeRequired(OublietteError):
    kind = "upgrade_required"


class NotConfigured(OublietteError):
    kind = "not_configured"


class BoxFailed(OublietteError):
    kind = "box_failed"


class DroidFailed(OublietteError):
    """Or its keeper refused something; what exactly is the detail `reason`, and it may be worth another try."""

    kind = "droid_failed"

    def __init__(self, message: str, *, retryable: bool = False, **details: Any) -> None:
        super().__init__(message, **details)
        self.retryable = retryable


class StorageFailed(OublietteError):
    kind = "unavailable"
    retryable = True
