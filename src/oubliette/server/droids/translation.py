"""What an agent's updates mean, as events of the log. Pure: an update and what is known of its call in, events out.

| `sessionUpdate` | becomes |
| --- | --- |
| `agent_message_chunk`, `agent_thought_chunk` | a `Chunk`: the driver gathers chunks into `delta` and `message` |
| `tool_call`, `tool_call_update` | `tool_call` at first sight and when more is known, `tool_result` at its end |
| `plan` | `plan` |
| `usage_update` | `usage` |
| `user_message_chunk` and what only a user interface needs | nothing |
| anything else, and what has the wrong shape | `warning`, with what the agent sent |

A call is told apart by its id alone: some agents never announce one and update it at once, others give its arguments
later, or end it twice.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec

from oubliette.server.droids.peer import as_object
from oubliette.wire.events import Event, Plan, ToolCall, ToolResult, Usage, Warn

SHOWN_CHARS = 2000
# Of a turn's calls these are remembered, and so much of each: it is stored anew with everything that the agent says.
OPEN_CALLS_KEPT = 128
FINISHED_CALLS_KEPT = 32
REMEMBERED_CHARS = 300

# Known, and of no use to a log: they describe the agent's own menus.
IGNORED = frozenset(
    {
        "user_message_chunk",
        "available_commands_update",
        "current_mode_update",
        "config_option_update",
        "session_info_update",
    }
)
_ENDS = {"completed": False, "failed": True}
_encode = msgspec.json.Encoder(order="deterministic").encode


class Call(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of a tool call of the open turn."""

    name: str | None = None
    kind: str | None = None
    arguments: str | None = None  # a digest
    result: str | None = None  # a digest, once it ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some text of a message that is still being written."""

    role: Literal["assistant", "thought"]
    text: str
    message_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    chunk: Chunk | None = None
    events: Sequence[Event] = ()
    calls: Mapping[str, Call] | None = None  # what is known of the turn's calls now, where that changed
    begins_call: bool = False  # the message before it is complete


NOTHING = Meaning()


def translate(update: object, turn: int | None, calls: Mapping[str, Call]) -> Meaning:
    """Read one `session/update`."""
    told = as_object(update)
    if told is None:
        return _warning("malformed_update", "the agent sent an update that is no object", update)
    kind = told.get("sessionUpdate")
    if kind in IGNORED:
        return NOTHING
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        return _warning("unknown_update", f"the agent sent an update of a kind that is not known here: {kind!r}", told)
    meaning = read(told, turn, calls)
    return meaning or _warning("malformed_update", f"the agent sent a {kind} that could not be read", told)


def _warning(kind: str, message: str, update: object) -> Meaning:
    shown = _encode(update).decode()
    if len(shown) > SHOWN_CHARS:
        shown = shown[:SHOWN_CHARS] + "…"
    return Meaning(events=(Warn(kind=kind, message=f"{message}: {shown}"),))


def _digest(value: object) -> str:
    return hashlib.blake2b(_encode(value), digest_size=8).hexdigest()


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _message(update: Mapping[str, Any], turn: int | None, calls: Mapping[str, Call]) -> Meaning | None:
    block = as_object(update.get("content"))
    if block is None:
        return None
    text = _shown_block(block)
    if text is None:
        kind, size = block.get("type"), len(_encode(block))
        return Meaning(
            events=(Warn(kind="unsupported_content", message=f"the agent sent {kind} of {size} bytes, not kept"),)
        )
    role = "thought" if update["sessionUpdate"] == "agent_thought_chunk" else "assistant"
    return Meaning(chunk=Chunk(role=role, text=text, message_id=_text_or_none(update.get("messageId"))))


def _shown_block(block: Mapping[str, Any]) -> str | None:
    """A content block as text; None for what cannot be text."""
    match block:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "resource_link", "uri": str(uri)}:
            return f"[{block.get('name') or uri}]({uri})"
        case {"type": "resource", "resource": {"text": str(text)}}:
            return text
        case _:
            return None


def _tool(update: Mapping[str, Any], turn: int | None, calls: Mapping[str, Call]) -> Meaning | None:
    call_id = update.get("toolCallId")
    if not isinstance(call_id, str):
        return None
    key = _remembered_as(call_id)
    before = calls.get(key)
    known = before or Call()
    raw_input = update.get("rawInput")
    title, kind = _text_or_none(update.get("title")), _text_or_none(update.get("kind"))
    now = Call(
        name=_shortened(title) or known.name,
        kind=_shortened(kind) or known.kind,
        arguments=_digest(raw_input) if raw_input is not None else known.arguments,
        result=known.result,
    )
    name = title or now.name
    events: list[Event] = []
    if before is None or now != before:
        arguments = raw_input if now.arguments != known.arguments else None
        events.append(
            ToolCall(tool_call_id=call_id, tool_name=name, kind=kind or now.kind, arguments=arguments, turn=turn)
        )
    status = update.get("status")
    content = update.get("rawOutput") if update.get("rawOutput") is not None else update.get("content")
    if status in _ENDS or (known.result is not None and content is not None):
        is_error = _ENDS.get(str(status), False)
        result = _digest([is_error, content])
        if result != known.result:
            events.append(
                ToolResult(tool_call_id=call_id, tool_name=name, is_error=is_error, content=content, turn=turn)
            )
        now = msgspec.structs.replace(now, result=result)
    return Meaning(events=events, calls=_with(calls, key, now), begins_call=before is None)


def _shortened(text: str | None) -> str | None:
    return text if text is None or len(text) <= REMEMBERED_CHARS else text[:REMEMBERED_CHARS] + "…"


def _remembered_as(call_id: str) -> str:
    return call_id if len(call_id) <= REMEMBERED_CHARS else _digest(call_id)


def _with(calls: Mapping[str, Call], key: str, call: Call) -> dict[str, Call]:
    """The calls with this one; only the newest are remembered, of those that are open and of those that ended."""
    after = {known: one for known, one in calls.items() if known != key}
    after[key] = call
    opened = [known for known, one in after.items() if one.result is None]
    ended = [known for known, one in after.items() if one.result is not None]
    for known in (*opened[:-OPEN_CALLS_KEPT], *ended[:-FINISHED_CALLS_KEPT]):
        del after[known]
    return after


def _plan(update: Mapping[str, Any], turn: int | None, calls: Mapping[str, Call]) -> Meaning | None:
    entries = update.get("entries")
    if not isinstance(entries, list):
        return None
    return Meaning(events=(Plan(entries=cast("list[Any]", entries), turn=turn),))


def _usage(update: Mapping[str, Any], turn: int | None, calls: Mapping[str, Call]) -> Meaning | None:
    used = update.get("used")
    if not isinstance(used, int):
        return None
    cost = as_object(update.get("cost")) or {}
    amount = cost.get("amount") if cost.get("currency") == "USD" else None
    return Meaning(
        events=(
            Usage(total_tokens=used, cost_usd=float(amount) if isinstance(amount, int | float) else None, turn=turn),
        )
    )


_Reader = Callable[[Mapping[str, Any], int | None, Mapping[str, Call]], Meaning | None]
_READERS: Mapping[str, _Reader] = {
    "agent_message_chunk": _message,
    "agent_thought_chunk": _message,
    "tool_call": _tool,
    "tool_call_update": _tool,
    "plan": _plan,
    "usage_update": _usage,
}


def usage(told: object, turn: int) -> Usage | None:
    """The `usage` of a prompt's answer; None where it has none that can be read."""
    counts = as_object(told) or {}
    read = {
        ours: counts[theirs]
        for ours, theirs in (
            ("input_tokens", "inputTokens"),
            ("output_tokens", "outputTokens"),
            ("total_tokens", "totalTokens"),
        )
        if isinstance(counts.get(theirs), int)
    }
    return Usage(turn=turn, **read) if read else None
