"""Every event a session can emit.

An event is a row of the session's log: `index` is dense and starts at 0, `at` is wall time in seconds. What a
reader sees is one flat JSON object: the fields below beside `session_id`, `index`, `at` and `type`. Where an event is
pushed and is over 256 kB, its largest fields are left out and named in `left_out`; a page has it whole.
"""

from typing import Any, ClassVar, Literal

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Base of all events."""


class Status(Event, frozen=True, tag="status"):
    """The session moved to another state."""

    status: str
    reason: str | None = None


class UserMessage(Event, frozen=True, tag="user_message"):
    """A message entered the session's queue."""

    text: str
    turn: int | None = None
    source: str | None = None


class TurnStarted(Event, frozen=True, tag="turn_started"):
    turn: int


class Message(Event, frozen=True, tag="message"):
    """A whole message of the droid."""

    text: str
    role: Literal["assistant", "thought", "user"] = "assistant"
    turn: int | None = None


class Delta(Event, frozen=True, tag="delta"):
    """Tokens as they came, gathered: one row per 100 ms or 4 KiB. Pushed only on request."""

    text: str
    role: Literal["assistant", "thought"] = "assistant"
    turn: int | None = None


class ToolCall(Event, frozen=True, tag="tool_call"):
    """The droid began a tool call, or said more about it: the same `tool_call_id` updates."""

    tool_call_id: str
    tool_name: str | None = None
    kind: str | None = None
    arguments: Any = None
    turn: int | None = None


class ToolResult(Event, frozen=True, tag="tool_result"):
    tool_call_id: str
    tool_name: str | None = None
    is_error: bool = False
    content: Any = None
    turn: int | None = None


class Plan(Event, frozen=True, tag="plan"):
    entries: list[Any]
    turn: int | None = None


class Usage(Event, frozen=True, tag="usage"):
    input_tokens: int | None = None
    output_tokens: int | None = None
    total_tokens: int | None = None
    cost_usd: float | None = None
    turn: int | None = None


SESSION_ENDED = "session_ended"  # the stop reason of a turn whose session was ended before it was over


class Completion(Event, frozen=True, tag="completion"):
    """The turn is over. `stop_reason` is the agent's own word; `end_turn` is not success."""

    turn: int
    stop_reason: str
    text: str
    duration_ms: int


class Error(Event, frozen=True, tag="error"):
    """Something failed; `kind` is a machine word, `message` is for people."""

    kind: str
    message: str
    turn: int | None = None


class Warn(Event, frozen=True, tag="warning"):
    kind: str
    message: str


class PermissionDecided(Event, frozen=True, tag="permission"):
    """The agent asked for permission and the session's autonomy answered."""

    tool_call_id: str | None
    tool_name: str | None
    decision: str


class CallerToolsDeclared(Event, frozen=True, tag="caller_tools_declared"):
    caller_id: str
    tools: list[str]
    names: dict[str, str]


class CallerToolRequest(Event, frozen=True, tag="caller_tool_request", kw_only=True):
    """A droid calls one of its caller's tools; answer by `caller_tool_response`.

    Arguments over 256 kB travel by reference: `arguments` is then absent, `arguments_bytes` tells their size and
    `caller_tool_pending` gives them by the `request_id`.
    """

    request_id: str
    tool: str
    arguments: Any = msgspec.UNSET
    arguments_bytes: int | None = None
    deadline_at: float
    redelivery: int = 0


class CallerToolProgress(Event, frozen=True, tag="caller_tool_progress"):
    request_id: str
    progress: float | None = None
    total: float | None = None
    message: str | None = None
    deadline_at: float | None = None


class CallerToolCancelled(Event, frozen=True, tag="caller_tool_cancelled"):
    """Nobody waits for this answer any more: the caller may stop working on it."""

    request_id: str
    tool: str
    reason: str


class CallerToolResolved(Event, frozen=True, tag="caller_tool_resolved", kw_only=True):
    """A caller-tool call ended: answered, failed, expired, cancelled or disconnected."""

    request_id: str
    tool: str
    outcome: str
    error: str | None = None
    duration_ms: int


class ChildStarted(Event, frozen=True, tag="child_started"):
    child_session_id: str


AnyEvent = (
    Status
    | UserMessage
    | TurnStarted
    | Message
    | Delta
    | ToolCall
    | ToolResult
    | Plan
    | Usage
    | Completion
    | Error
    | Warn
    | PermissionDecided
    | CallerToolsDeclared
    | CallerToolRequest
    | CallerToolProgress
    | CallerToolCancelled
    | CallerToolResolved
    | ChildStarted
)


class Known:
    """The types by their name on the wire, for docs and tests."""

    BY_TAG: ClassVar[dict[str, type[Event]]] = {str(kind.__struct_config__.tag): kind for kind in AnyEvent.__args__}


# The logger of MCP push, as the specification writes it; clients match on `data.type`.
LOGGER = "oubliette.session"
