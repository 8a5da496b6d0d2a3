"""The relay socket: methods, parameters and results.

One JSON-RPC 2.0 object per line, both ways. The first line in is `attach`. Three parties speak here: the *client*
(the droid's MCP server), the *keeper* (the box's first process) and the *server*.

| method | from | kind | what |
| --- | --- | --- | --- |
| `attach` | client, keeper | request | identify; a wrong key is -32001 and the connection closes |
| `caller_tool` | client | request | `{tool, arguments, call_key}` → the caller's result, or a typed error |
| `oubliette_tools`, `oubliette_call_tool` | client | request | the platform's tools: -32001 bad key, -32002 scope |
| `session_message`, `session_events` | client | request | a droid starts and follows a child session |
| `listed` | client | notification | the agent asked for its tools and was answered |
| `cancel` | client | notification | `{call_key, reason}`: the answer is not wanted any more; see below |
| `progress` | server | notification | what the caller says of a call under way, by its call key |
| `caller_tools_config` | server | notification | the caller's tools, whole, whenever they change |
| `tools_changed` | server | notification | the platform's tools may have changed: ask again |
| `start`, `stdin`, `signal` | server | request | a droid's process |
| `ack` | server | notification | output up to here is stored: the keeper may forget it |
| `stdout`, `exited` | keeper | notification | numbered bytes of a process; its end |

A cancelled request is answered by an error of kind `cancelled`, on every connection that joined it: a call of a
caller's tool ends, and so does a read, or the wait behind a write. What a write has done stays done. The server cancels
nothing at a client: a call that it ends is answered.
"""

from typing import Annotated, Any, Literal

import msgspec

PROTOCOL = 1
PROTOCOLS = (1,)  # the server speaks n and n-1; there is no 0

FRAME_BYTES_MAX = 8 * 1024 * 1024
ATTACH_BYTES_MAX = 4096
ATTACH_WAIT_S = 5.0
CONNECTIONS_MAX = 8
CALL_KEY_MAX = 128
# What the client waits beyond the server's own deadline before it calls the server lost.
MARGIN_S = 15.0
# How long the open calls of a client that vanished wait for the same instance to come back.
INSTANCE_GRACE_S = 15.0
# The first tools/list is held for this long at most: current codex starts its turn without tools after about 1 s.
HOLD_S = 0.7
PROGRESS_EVERY_S = 10.0
# Output of a droid that the server has not acknowledged yet; then the droid blocks.
KEEPER_HELD_BYTES_MAX = 1024 * 1024


class _Params(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    pass


# A place in a stream of bytes: what a peer says it is must fit into a database.
Offset = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class ProcessState(_Params, frozen=True):
    """What a keeper says of a process it keeps, at attach and in answer to `start`."""

    process: str
    stdin_offset: Offset  # bytes of input accepted so far
    stdout_from: Offset  # the oldest byte of output still held
    stdout_to: Offset  # the end of output so far
    exit_code: int | None = None
    exit_signal: int | None = None


class Attach(_Params, frozen=True):
    key: str
    role: Literal["client", "keeper"]
    instance: str
    protocol: int = PROTOCOL
    processes: list[ProcessState] = []


class Limits(_Params, frozen=True):
    frame_bytes: int = FRAME_BYTES_MAX
    pending_calls: int = 64


class Attached(_Params, frozen=True, omit_defaults=False):
    """The answer to `attach`."""

    session_id: str
    depth: int
    protocol: int
    limits: Limits
    call_timeout_s: float
    call_timeout_max_s: float
    margin_s: float = MARGIN_S
    wait_max_s: float = 0.0  # the longest wait that a tool of the platform offers
    caller_tools: bool = False  # whether any are declared: without, the first tools/list does not wait
    tools_search: bool = False  # the agent never refreshes its list: offer tools_search and tools_call
    abandoned_after_s: float = 900.0  # a keeper without a server ends its box after this
    acks: dict[str, int] = {}  # for a keeper: output of each process stored so far


class ConfigTool(_Params, frozen=True):
    """One of the caller's tools; `box_name` is its final name in the box."""

    name: str
    box_name: str
    description: str = ""
    inputSchema: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "object"})
    annotations: dict[str, Any] | None = None
    title: str | None = None
    timeout_s: float | None = None


class CallerToolsConfig(_Params, frozen=True):
    caller_id: str
    tools: list[ConfigTool]


class CallerTool(_Params, frozen=True):
    tool: str  # the declared name or the name in the box
    arguments: dict[str, Any] = {}
    call_key: str | None = None


class OublietteTools(_Params, frozen=True):
    api_key: str


class OublietteCallTool(_Params, frozen=True):
    api_key: str
    tool: str
    arguments: dict[str, Any] = {}
    call_key: str | None = None


class SessionMessage(_Params, frozen=True):
    message: str
    session_id: str | None = None
    workspace_id: str | None = None
    create_workspace: bool = False
    wait_seconds: float = 0
    call_key: str | None = None


class SessionEvents(_Params, frozen=True):
    session_id: str
    since_index: int = -1
    max_events: int = 100
    wait_seconds: float = 0
    call_key: str | None = None  # for `cancel` alone: a read that comes again is a fresh one


class Cancel(_Params, frozen=True):
    call_key: str
    reason: str = ""


class Progress(_Params, frozen=True):
    call_key: str
    progress: float | None = None
    total: float | None = None
    message: str | None = None


class Start(_Params, frozen=True):
    """Start this process unless it runs already; the answer is its `ProcessState`."""

    process: str
    argv: list[str]
    env: dict[str, str]
    cwd: str


class Stdin(_Params, frozen=True):
    """Input from `offset` on, base64; bytes the keeper already accepted are dropped, a gap is refused."""

    process: str
    offset: Offset
    data: str
    eof: bool = False


class Accepted(_Params, frozen=True):
    stdin_offset: Offset


class Signal(_Params, frozen=True):
    process: str
    signal: Literal["TERM", "KILL", "INT"]


class Stdout(_Params, frozen=True):
    process: str
    stream: Literal["out", "err"]
    offset: Offset  # of stream "out"; "err" is not numbered and may be dropped
    data: str


class Ack(_Params, frozen=True):
    process: str
    offset: Offset


class Exited(_Params, frozen=True):
    process: str
    exit_code: int | None = None
    exit_signal: int | None = None


class ErrorData(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What every error on this socket carries beside its code and message."""

    kind: str
    retryable: bool = False
    details: dict[str, Any] | None = None


# The machine words of ErrorData.kind and what they mean to a droid.
KINDS = {
    "timeout": "the caller did not answer inside the deadline",
    "disconnected": "the caller is gone",
    "caller_error": "the caller's tool failed; the message is the caller's",
    "cancelled": "the call was cancelled",
    "client_gone": "the droid's MCP server went away and did not return",
    "unknown_tool": "no such tool is declared",
    "invalid_arguments": "the arguments do not fit the tool's schema",
    "invalid_params": "a parameter is missing or has the wrong type",
    "invalid_request": "not a JSON-RPC request",
    "unknown_method": "no such method",
    "too_many": "too many calls are open",
    "too_large": "over a size bound",
    "unauthenticated": "the key is wrong, expired or revoked",
    "forbidden": "the key's scope does not allow this",
    "not_found": "no such thing, or not yours",
    "conflict": "the thing is not in a state that allows this",
    "call_key_reused": "this call key was used for another call",
    "outcome_unknown": "the server stopped while this ran; whether it took effect is not known",
    "upgrade_required": "the server does not speak this protocol version",
    "purged": "the log no longer reaches back to that index",
    "box_failed": "the session's box did not start, or was lost",
    "droid_failed": "the agent died, refused, or broke its protocol",
    "not_configured": "what this needs is not set up",
    "unavailable": "the server cannot do this now",
    "internal": "a bug on the server's side",
}
