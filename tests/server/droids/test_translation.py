"""What updates mean, as tables."""

from typing import Any

import msgspec
import pytest

from oubliette.server.droids.translation import (
    FINISHED_CALLS_KEPT,
    IGNORED,
    OPEN_CALLS_KEPT,
    Call,
    Chunk,
    translate,
    usage,
)
from oubliette.wire.events import Event, Plan, ToolCall, ToolResult, Usage, Warn


def story(*updates: dict[str, Any]) -> list[Event]:
    """The events of some updates in one turn."""
    calls: dict[str, Call] = {}
    events: list[Event] = []
    for update in updates:
        meaning = translate(update, 1, calls)
        events += meaning.events
        calls = dict(meaning.calls) if meaning.calls is not None else calls
    return events


def call(**more: Any) -> dict[str, Any]:
    return {"sessionUpdate": "tool_call", "toolCallId": "t", "title": "echo", "kind": "other", **more}


def update(**more: Any) -> dict[str, Any]:
    return {"sessionUpdate": "tool_call_update", "toolCallId": "t", **more}


BEGUN = ToolCall(tool_call_id="t", tool_name="echo", kind="other", turn=1)
TEXT = [{"type": "content", "content": {"type": "text", "text": "done"}}]

STORIES: dict[str, tuple[list[dict[str, Any]], list[Event]]] = {
    "as the schema has it": (
        [
            call(status="pending", rawInput={"a": 1}),
            update(status="in_progress"),
            update(status="completed", rawOutput=7),
        ],
        [
            ToolCall(tool_call_id="t", tool_name="echo", kind="other", arguments={"a": 1}, turn=1),
            ToolResult(tool_call_id="t", tool_name="echo", content=7, turn=1),
        ],
    ),
    "an update without a start": (
        [update(title="echo", kind="other", status="completed", content=TEXT)],
        [BEGUN, ToolResult(tool_call_id="t", tool_name="echo", content=TEXT, turn=1)],
    ),
    "arguments in a later update": (
        [call(status="pending"), update(rawInput={"a": 1}), update(rawInput={"a": 1}), update(status="failed")],
        [
            BEGUN,
            ToolCall(tool_call_id="t", tool_name="echo", kind="other", arguments={"a": 1}, turn=1),
            ToolResult(tool_call_id="t", tool_name="echo", is_error=True, turn=1),
        ],
    ),
    "a name that becomes known": (
        [{"sessionUpdate": "tool_call", "toolCallId": "t"}, update(title="echo", kind="other")],
        [ToolCall(tool_call_id="t", turn=1), BEGUN],
    ),
    "raw output before content": (
        [call(), update(status="completed", rawOutput={"ok": True}, content=TEXT)],
        [BEGUN, ToolResult(tool_call_id="t", tool_name="echo", content={"ok": True}, turn=1)],
    ),
    "the same end twice": (
        [call(), update(status="completed", content=TEXT), update(status="completed", content=TEXT)],
        [BEGUN, ToolResult(tool_call_id="t", tool_name="echo", content=TEXT, turn=1)],
    ),
    "content after the end": (
        [call(), update(status="completed"), update(content=TEXT)],
        [
            BEGUN,
            ToolResult(tool_call_id="t", tool_name="echo", turn=1),
            ToolResult(tool_call_id="t", tool_name="echo", content=TEXT, turn=1),
        ],
    ),
    "an unknown status and kind": (
        [call(kind="dream", status="pondering")],
        [ToolCall(tool_call_id="t", tool_name="echo", kind="dream", turn=1)],
    ),
    "a plan": (
        [{"sessionUpdate": "plan", "entries": [{"content": "look", "status": "pending"}]}],
        [Plan(entries=[{"content": "look", "status": "pending"}], turn=1)],
    ),
    "usage in dollars": (
        [{"sessionUpdate": "usage_update", "used": 5, "size": 9, "cost": {"amount": 1, "currency": "USD"}}],
        [Usage(total_tokens=5, cost_usd=1.0, turn=1)],
    ),
    "usage in another currency": (
        [{"sessionUpdate": "usage_update", "used": 5, "size": 9, "cost": {"amount": 1, "currency": "EUR"}}],
        [Usage(total_tokens=5, turn=1)],
    ),
    "what only a user interface needs": ([{"sessionUpdate": kind} for kind in sorted(IGNORED)], []),
}


@pytest.mark.parametrize("name", STORIES)
def test_updates_become_events(name: str) -> None:
    updates, events = STORIES[name]
    assert story(*updates) == events


CHUNKS: list[tuple[dict[str, Any], Chunk]] = [
    (
        {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": "hi"}, "messageId": "m"},
        Chunk(role="assistant", text="hi", message_id="m"),
    ),
    (
        {"sessionUpdate": "agent_thought_chunk", "content": {"type": "text", "text": "hm"}},
        Chunk(role="thought", text="hm"),
    ),
    (
        {"sessionUpdate": "agent_message_chunk", "content": {"type": "resource_link", "uri": "file:///a", "name": "a"}},
        Chunk(role="assistant", text="[a](file:///a)"),
    ),
    (
        {"sessionUpdate": "agent_message_chunk", "content": {"type": "resource", "resource": {"text": "inside"}}},
        Chunk(role="assistant", text="inside"),
    ),
]


@pytest.mark.parametrize("told, chunk", CHUNKS)
def test_chunks_are_read(told: dict[str, Any], chunk: Chunk) -> None:
    assert translate(told, 1, {}).chunk == chunk


WARNINGS: list[tuple[Any, str]] = [
    ("text", "malformed_update"),
    ({}, "unknown_update"),
    ({"sessionUpdate": "mood"}, "unknown_update"),
    ({"sessionUpdate": 7}, "unknown_update"),
    ({"sessionUpdate": "plan_removed", "planId": "p"}, "unknown_update"),
    ({"sessionUpdate": "tool_call", "toolCallId": 7}, "malformed_update"),
    ({"sessionUpdate": "plan", "entries": "all"}, "malformed_update"),
    ({"sessionUpdate": "usage_update", "used": "much"}, "malformed_update"),
    ({"sessionUpdate": "agent_message_chunk", "content": "text"}, "malformed_update"),
    ({"sessionUpdate": "agent_message_chunk", "content": {"type": "image", "data": "AAAA"}}, "unsupported_content"),
]


@pytest.mark.parametrize("told, kind", WARNINGS)
def test_what_cannot_be_read_is_told(told: Any, kind: str) -> None:
    meaning = translate(told, 1, {})
    (warning,) = meaning.events
    assert isinstance(warning, Warn)
    assert warning.kind == kind
    assert meaning.chunk is None


def test_a_warning_shows_no_more_than_it_must() -> None:
    (warning,) = translate({"sessionUpdate": "mood", "data": "x" * 100_000}, 1, {}).events
    assert isinstance(warning, Warn)
    assert len(warning.message) < 2200


def test_only_the_newest_finished_calls_are_remembered() -> None:
    calls: dict[str, Call] = {}
    for number in range(100):
        meaning = translate(call(toolCallId=f"t{number}", status="completed"), 1, calls)
        calls = dict(meaning.calls or {})
    still = translate(call(toolCallId="open"), 1, calls)
    assert still.calls is not None
    assert len(still.calls) == FINISHED_CALLS_KEPT + 1
    assert "t99" in still.calls


def test_of_calls_that_never_end_the_oldest_are_forgotten() -> None:
    calls: dict[str, Call] = {}
    for number in range(OPEN_CALLS_KEPT + 5):
        calls = dict(translate(call(toolCallId=f"t{number}"), 1, calls).calls or {})
        calls = dict(translate(update(toolCallId="t0", status="in_progress"), 1, calls).calls or {})
    assert len(calls) == OPEN_CALLS_KEPT
    assert "t0" in calls, "of this one something was heard since"
    assert "t1" not in calls
    for number in range(FINISHED_CALLS_KEPT + 5):
        calls = dict(translate(call(toolCallId=f"e{number}", status="completed"), 1, calls).calls or {})
    assert len(calls) == OPEN_CALLS_KEPT + FINISHED_CALLS_KEPT


def test_of_a_call_no_more_is_remembered_than_tells_it_from_others() -> None:
    """What the agent says of it goes to the log whole, once; what is remembered is stored with every step."""
    long, other = "x" * 100_000 + "1", "x" * 100_000 + "2"
    begun = translate(call(toolCallId=long, title=long, kind=long), 1, {})
    assert begun.events == [ToolCall(tool_call_id=long, tool_name=long, kind=long, turn=1)]
    calls = begun.calls or {}
    assert len(msgspec.json.encode(calls)) < 2000
    assert translate(update(toolCallId=long, status="in_progress"), 1, calls).events == []
    (result,) = translate(update(toolCallId=long, status="completed"), 1, calls).events
    assert isinstance(result, ToolResult)
    assert result.tool_call_id == long
    assert result.tool_name is not None
    assert len(result.tool_name) < 1000
    assert translate(update(toolCallId=other), 1, calls).begins_call, "another call"


def test_every_event_of_a_translation_is_one_that_the_wire_knows() -> None:
    for updates, events in STORIES.values():
        for event in (*story(*updates), *events):
            assert msgspec.json.decode(msgspec.json.encode(event))["type"]


@pytest.mark.parametrize(
    "told, wanted",
    [
        (
            {"inputTokens": 1, "outputTokens": 2, "totalTokens": 3},
            Usage(input_tokens=1, output_tokens=2, total_tokens=3, turn=4),
        ),
        ({"inputTokens": "many"}, None),
        (None, None),
        ("text", None),
    ],
)
def test_the_usage_of_a_turn_is_read(told: Any, wanted: Usage | None) -> None:
    assert usage(told, 4) == wanted
