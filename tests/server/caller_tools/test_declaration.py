"""What is taken of a declaration, and why the rest is not: as a whole, and before anything runs."""

import contextlib
import select
import socket
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oubliette.server.caller_tools.declaration import OfferedTool, declare
from oubliette.server.caller_tools.schemas import checked
from oubliette.server.errors import InvalidArguments, InvalidParams, TooLarge
from oubliette.server.limits import (
    ARGUMENTS_BYTES,
    DECLARATION_BYTES,
    DESCRIPTION_BYTES,
    SCHEMA_BYTES,
    SCHEMA_PATTERNS,
    TOOLS_PER_CALLER,
)

ELSEWHERE = "http://127.0.0.1:9/schema"


def lend(*offered: OfferedTool, caller_id: str = "ant", **more: Any) -> Any:
    return declare(caller_id, offered, timeout_max_s=600, **more)


def with_schema(**members: Any) -> OfferedTool:
    return OfferedTool(name="tool", inputSchema={"type": "object", **members})


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def bomb(reference: Any = lambda number: f"#/$defs/n{number}", **members: Any) -> OfferedTool:
    """Twenty schemas, each of which refers to the next one twice."""
    defs: dict[str, Any] = {
        f"n{number}": {"$anchor": f"n{number}", "allOf": [{"$ref": reference(number + 1)}] * 2} for number in range(20)
    }
    defs["n20"] = {"$anchor": "n20"}
    return with_schema(**{"$defs": defs, "$ref": reference(0)}, **members)


def test_a_declaration_keeps_what_was_lent_and_shows_its_names() -> None:
    schema = {"type": "object", "properties": {"message": {"type": "string"}}, "required": ["message"]}
    lent = lend(
        OfferedTool(name="send_response", description="Send", inputSchema=schema, timeoutSeconds=5),
        OfferedTool(name="get.memory"),
        timeout_s=30,
    )
    assert lent.names() == {"send_response": "ant_send_response", "get.memory": "ant_get_memory"}
    assert (lent.tools[0].input_schema, lent.tools[0].timeout_s, lent.timeout_s) == (schema, 5, 30)
    assert lent.tools[1].input_schema == {"type": "object"}
    assert msgspec.json.decode(msgspec.json.encode(lent), type=type(lent)) == lent


def test_a_schema_without_a_type_gets_the_one_that_it_must_have() -> None:
    assert lend(OfferedTool(name="t", inputSchema={"properties": {}})).tools[0].input_schema["type"] == "object"


@pytest.mark.parametrize(
    "offered, reason",
    [
        (with_schema(properties={"a": {"$ref": ELSEWHERE}}), "only point into itself"),
        (with_schema(properties={"a": {"$ref": "file:///etc/passwd"}}), "only point into itself"),
        (with_schema(properties={"a": {"$ref": "other.json#/a"}}), "only point into itself"),
        (with_schema(properties={"a": {"$ref": "http://json-schema.org/draft-07/schema#"}}), "only point into itself"),
        (with_schema(anyOf=[{"$dynamicRef": ELSEWHERE}]), "only point into itself"),
        (with_schema(**{"$recursiveRef": ELSEWHERE}), "only point into itself"),
        (with_schema(**{"$schema": ELSEWHERE}), "not a JSON Schema"),
        (with_schema(properties={"a": {"$id": ELSEWHERE, "$ref": "#/b"}}), "below its root"),
        (with_schema(properties={"a": {"$ref": "#/nowhere"}}), "not a JSON Schema"),
        (with_schema(properties=[1]), "not a JSON Schema"),
        (with_schema(properties={"a": {"type": "strng"}}), "not a JSON Schema"),
        (with_schema(properties={"a": {"pattern": "("}}), "not a JSON Schema"),
        (with_schema(properties={"a": {"pattern": "((a{1000}){1000}){100}"}}), "not a JSON Schema"),
        (OfferedTool(name="tool", inputSchema={"type": "array"}), 'must have "type": "object"'),
        (OfferedTool(name="tool", inputSchema={"type": ["object"]}), 'must have "type": "object"'),
        (with_schema(description="x" * SCHEMA_BYTES), "bytes"),
        (with_schema(properties=nested(201)), "nested too deep"),
        (with_schema(properties={"a": {"enum": [nested(200)]}}), "nested too deep"),
        (with_schema(properties=nested(5000)), "nested too deep"),
        (bomb(), "nodes"),
        (bomb(lambda number: f"#n{number}"), "nodes"),
        (bomb(lambda number: f"#/%24defs/n{number}"), "nodes"),
        (with_schema(patternProperties={f"a{number}": {} for number in range(SCHEMA_PATTERNS + 1)}), "expressions"),
        (with_schema(allOf=[{"pattern": f"{number}"} for number in range(SCHEMA_PATTERNS + 1)]), "expressions"),
        (OfferedTool(name="tool", description="x" * (DESCRIPTION_BYTES + 1)), "description"),
        (OfferedTool(name="tool", timeoutSeconds=601), "at most 600"),
        (OfferedTool(name="tool", timeoutSeconds=0), "above 0"),
        (OfferedTool(name="tool", timeoutSeconds=-1), "above 0"),
        (OfferedTool(name=""), "1 to 128"),
        (OfferedTool(name="white space"), "1 to 128"),
        (OfferedTool(name="x" * 129), "1 to 128"),
    ],
)
def test_a_tool_that_cannot_be_lent_is_refused_with_its_reason_at_once(offered: OfferedTool, reason: str) -> None:
    begun = time.thread_time()
    with pytest.raises(InvalidParams, match="none was registered") as refused:
        lend(OfferedTool(name="fine"), offered)
    assert time.thread_time() - begun < 0.5
    assert reason in refused.value.message
    (place,) = refused.value.details["tools"]
    assert place.startswith("1:")


def test_nothing_is_fetched_though_a_reference_were_overlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oubliette.server.caller_tools.schemas._Survey.nodes", lambda survey: 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}/schema"
        with pytest.raises(InvalidParams, match="is not fetched"):
            checked({"type": "object", "properties": {"a": {"$ref": address}}})
        assert select.select([server], [], [], 0) == ([], [], [])


def test_every_reason_is_told_at_once_by_tool() -> None:
    with pytest.raises(InvalidParams) as refused:
        lend(OfferedTool(name="a b"), OfferedTool(name="fine"), OfferedTool(name="t", timeoutSeconds=0))
    assert sorted(refused.value.details["tools"]) == ["0:a b", "2:t"]


@pytest.mark.parametrize(
    "members",
    [
        {"properties": {"$ref": {"type": "string"}, "$id": {"type": "string"}, "pattern": {"type": "string"}}},
        {"properties": {"a": {"const": {"$ref": ELSEWHERE, "$id": "x"}}}},
        {"properties": {"a": {"enum": [{"$ref": ELSEWHERE}], "default": {"$ref": ELSEWHERE}}}},
        {"properties": {"a": {"examples": [{"$id": ELSEWHERE}]}, "default": {"type": "string"}}},
        {
            "$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}}},
            "properties": {"n": {"$ref": "#/$defs/node"}},
        },
        {"properties": {"self": {"$ref": "#"}}},
        {"$defs": {"a": {"$anchor": "here", "type": "string"}}, "properties": {"a": {"$ref": "#here"}}},
        {"$defs": {"a b": {"type": "string"}}, "properties": {"a": {"$ref": "#/$defs/a%20b"}}},
        {"$id": "https://example.com/tool", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {}}},
        {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"a": {}}, "properties": {"a": False}},
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "properties": {"a": {"format": "email"}}},
        {"properties": {"a": {"pattern": r"^(?=.*\d)[a-z\d]{8,64}$"}}, "additionalProperties": False},
    ],
)
def test_a_schema_that_refers_only_to_itself_is_taken(members: dict[str, Any]) -> None:
    assert lend(with_schema(**members)).names() == {"tool": "ant_tool"}


def test_a_schema_that_refers_to_itself_without_end_is_checked_with_an_end() -> None:
    loop = checked({"type": "object", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}] * 2}}, "$ref": "#/$defs/a"})
    loop.check({"a": 1}, b'{"a":1}', "tool")


@pytest.mark.parametrize(
    "offered, reason",
    [
        ([OfferedTool(name="a"), OfferedTool(name="a")], "declared twice"),
        ([OfferedTool(name="a.b"), OfferedTool(name="a-b")], "could not tell it from 'a.b'"),
    ],
)
def test_tools_that_the_droid_could_not_tell_apart_are_refused(offered: list[OfferedTool], reason: str) -> None:
    with pytest.raises(InvalidParams, match="none was registered") as refused:
        lend(*offered)
    assert reason in refused.value.message


@pytest.mark.parametrize("caller_id", ["", "1a", "a b", "x" * 33, "oubliette", "Session", "tools_x", "calendar-x"])
def test_a_caller_id_that_means_something_else_is_refused(caller_id: str) -> None:
    with pytest.raises(InvalidParams, match="caller_id"):
        lend(OfferedTool(name="t"), caller_id=caller_id)


def test_a_declaration_has_bounds_as_a_whole() -> None:
    with pytest.raises(TooLarge, match="more than 128"):
        lend(*(OfferedTool(name=f"t{number}") for number in range(TOOLS_PER_CALLER + 1)))
    large = {"type": "object", "description": "x" * (SCHEMA_BYTES - 100)}
    with pytest.raises(TooLarge, match=f"{DECLARATION_BYTES} bytes together"):
        lend(*(OfferedTool(name=f"t{number}", inputSchema=large) for number in range(40)))
    with pytest.raises(InvalidParams, match="caller_tool_timeout_s"):
        lend(OfferedTool(name="t"), timeout_s=601)


def test_arguments_are_told_what_does_not_fit_and_where() -> None:
    schema = checked(
        {"type": "object", "properties": {"to": {"type": "array", "items": {"type": "string"}}}, "required": ["text"]}
    )
    schema.check({"text": "", "to": ["a"]}, b"{}", "ant_send")
    with pytest.raises(InvalidArguments) as refused:
        schema.check({"to": ["a", 1]}, b"{}", "ant_send")
    assert refused.value.message.startswith("ant_send was not called: ")
    assert "to/1: " in refused.value.message
    assert "text" in refused.value.message


def test_what_would_take_too_long_to_check_is_refused() -> None:
    schema = checked(
        {"type": "object", "properties": {"a": {"items": {"allOf": [{"minimum": number} for number in range(500)]}}}}
    )
    values = list(range(ARGUMENTS_BYTES // 8))
    begun = time.thread_time()
    with pytest.raises(TooLarge, match="too many for a schema"):
        schema.check({"a": values}, msgspec.json.encode({"a": values}), "tool")
    assert time.thread_time() - begun < 0.5
    schema.check({"a": values[500:2000]}, msgspec.json.encode({"a": values[500:2000]}), "tool")


@pytest.mark.parametrize("pattern", ["^(a+)+$", r"^(?=(a+)+$)(a|aa)+\1$", r"(\w{40}){10}x$", "^(a|a|ab)*c"])
def test_a_regular_expression_cannot_hold_up_the_server(pattern: str) -> None:
    schema = checked({"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}})
    text = "a" * (ARGUMENTS_BYTES - 100)
    begun = time.thread_time()
    with pytest.raises(InvalidArguments):
        schema.check({"a": text + "b"}, b"{}", "tool")
    assert time.thread_time() - begun < 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
keywords = st.sampled_from(
    ["type", "properties", "$ref", "$defs", "items", "anyOf", "const", "$id", "$anchor", "pattern", "enum", "$schema"]
)


@given(st.dictionaries(keywords | st.text(max_size=5), json_values, max_size=6))
def test_no_schema_is_a_bug_of_the_server(schema: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidParams, TooLarge):
        lend(OfferedTool(name="tool", inputSchema=schema))
