"""Events on the wire: known by their tag, flat, and the same after a journey."""

from typing import Any

import msgspec
import pytest

from oubliette.wire import events
from oubliette.wire.events import AnyEvent, Event, Known

decode = msgspec.json.Decoder(AnyEvent).decode

# One of each, as it stands in a log and in front of clients: to change a line here is to change the wire.
GOLDEN: list[tuple[Event, str]] = [
    (events.Status(status="running"), '{"type":"status","status":"running"}'),
    (events.UserMessage(text="hi", turn=1), '{"type":"user_message","text":"hi","turn":1}'),
    (events.TurnStarted(turn=1), '{"type":"turn_started","turn":1}'),
    (events.Message(text="yes", turn=1), '{"type":"message","text":"yes","turn":1}'),
    (events.Delta(text="y", role="thought"), '{"type":"delta","text":"y","role":"thought"}'),
    (
        events.ToolCall(tool_call_id="c", tool_name="t", kind="execute", arguments={"a": None}),
        '{"type":"tool_call","tool_call_id":"c","tool_name":"t","kind":"execute","arguments":{"a":null}}',
    ),
    (
        events.ToolResult(tool_call_id="c", is_error=True, content=[1]),
        '{"type":"tool_result","tool_call_id":"c","is_error":true,"content":[1]}',
    ),
    (events.Plan(entries=[{"x": 1}]), '{"type":"plan","entries":[{"x":1}]}'),
    (events.Usage(input_tokens=3, cost_usd=0.5), '{"type":"usage","input_tokens":3,"cost_usd":0.5}'),
    (
        events.Completion(turn=2, stop_reason="end_turn", text="done", duration_ms=7),
        '{"type":"completion","turn":2,"stop_reason":"end_turn","text":"done","duration_ms":7}',
    ),
    (events.Error(kind="droid_failed", message="m"), '{"type":"error","kind":"droid_failed","message":"m"}'),
    (events.Warn(kind="k", message="m"), '{"type":"warning","kind":"k","message":"m"}'),
    (
        events.PermissionDecided(tool_call_id=None, tool_name="t", decision="allow"),
        '{"type":"permission","tool_call_id":null,"tool_name":"t","decision":"allow"}',
    ),
    (
        events.CallerToolsDeclared(caller_id="ant", tools=["a.b"], names={"a.b": "ant_a_b"}),
        '{"type":"caller_tools_declared","caller_id":"ant","tools":["a.b"],"names":{"a.b":"ant_a_b"}}',
    ),
    (
        events.CallerToolRequest(request_id="r", tool="t", arguments=msgspec.Raw(b'{"n":1}'), deadline_at=9.5),
        '{"type":"caller_tool_request","request_id":"r","tool":"t","arguments":{"n":1},"deadline_at":9.5}',
    ),
    (
        events.CallerToolRequest(request_id="r", tool="t", arguments_bytes=300_000, deadline_at=9.5, redelivery=1),
        '{"type":"caller_tool_request","request_id":"r","tool":"t","arguments_bytes":300000,"deadline_at":9.5,'
        '"redelivery":1}',
    ),
    (
        events.CallerToolProgress(request_id="r", progress=1.0, total=4.0, message="m", deadline_at=9.5),
        '{"type":"caller_tool_progress","request_id":"r","progress":1.0,"total":4.0,"message":"m","deadline_at":9.5}',
    ),
    (
        events.CallerToolCancelled(request_id="r", tool="t", reason="timeout"),
        '{"type":"caller_tool_cancelled","request_id":"r","tool":"t","reason":"timeout"}',
    ),
    (
        events.CallerToolResolved(request_id="r", tool="t", outcome="failed", error="no", duration_ms=12),
        '{"type":"caller_tool_resolved","request_id":"r","tool":"t","outcome":"failed","error":"no","duration_ms":12}',
    ),
    (events.ChildStarted(child_session_id="s"), '{"type":"child_started","child_session_id":"s"}'),
]


@pytest.mark.parametrize("event, golden", GOLDEN)
def test_an_event_is_written_as_it_always_was_and_read_again(event: Event, golden: str) -> None:
    assert msgspec.json.encode(event).decode() == golden
    assert msgspec.json.encode(decode(golden)).decode() == golden


def test_every_event_has_a_golden_line() -> None:
    assert {type(event) for event, _ in GOLDEN} == set(Known.BY_TAG.values())


def test_no_event_has_a_field_that_every_reader_gets_anyway() -> None:
    for kind in Known.BY_TAG.values():
        assert not {"type", "session_id", "index", "at"} & set(kind.__struct_fields__)


@pytest.mark.parametrize(
    "line",
    [
        '{"type":"nothing"}',
        '{"status":"running"}',
        '{"type":"status"}',
        '{"type":"status","status":1}',
        '{"type":"message","text":"a","role":"system"}',
        '{"type":"caller_tool_request","request_id":"r","tool":"t","deadline_at":"soon"}',
        "[]",
    ],
)
def test_what_is_no_event_is_not_read_as_one(line: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(line)


def test_a_reader_of_today_reads_the_events_of_a_newer_server() -> None:
    newer: dict[str, Any] = {"type": "status", "status": "running", "added_later": {"a": 1}}
    assert decode(msgspec.json.encode(newer)) == events.Status(status="running")
