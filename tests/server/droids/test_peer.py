"""Our side of JSON-RPC."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oubliette.server.droids.peer import Answer, Failure, Noise, Notification, OpenRequests, Request, receive


def test_an_answer_finds_its_question_once() -> None:
    requests, line = OpenRequests(3).ask("prompt", "session/prompt", {"a": 1})
    sent = json.loads(line)
    assert sent == {"jsonrpc": "2.0", "id": "3-1", "method": "session/prompt", "params": {"a": 1}}
    assert requests.is_open("prompt")
    after, purpose = requests.answered("3-1")
    assert purpose == "prompt"
    assert not after.is_open("prompt")
    assert after.answered("3-1") == (after, None)


@pytest.mark.parametrize("stranger", [None, 1, "3-2", "4-1", [], {}])
def test_an_answer_to_nothing_is_known_as_such(stranger: object) -> None:
    requests, _ = OpenRequests(3).ask("prompt", "session/prompt", {})
    assert requests.answered(stranger) == (requests, None)


def test_two_lives_never_ask_under_the_same_id() -> None:
    first, line = OpenRequests(1).ask("a", "a", {})
    _, other = OpenRequests(2, first.last, first.purposes).ask("b", "b", {})
    assert json.loads(line)["id"] != json.loads(other)["id"]


LINES: list[tuple[str, Any]] = [
    ('{"method":"m","params":{"a":1}}', Notification(method="m", params={"a": 1})),
    ('{"method":"m","params":[1]}', Notification(method="m", params={})),
    ('{"id":1,"method":"m"}', Request(id=1, method="m", params={})),
    ('{"id":"x","method":"m"}', Request(id="x", method="m", params={})),
    ('{"id":"x","result":null}', Answer(id="x")),
    ('{"id":"x","result":5}', Answer(id="x", result=5)),
    (
        '{"id":"x","error":{"code":-1,"message":"no","data":"why"}}',
        Answer(id="x", failure=Failure(code=-1, message="no", data="why")),
    ),
    ('{"id":"x","error":"no"}', Answer(id="x", failure=Failure(code=-32603, message="no"))),
    ('{"id":"x","error":{}}', Answer(id="x", failure=Failure(code=-32603, message="no reason given"))),
    ("{}", Noise(shown="{}")),
    ("[]", Noise(shown="[]")),
    ("npm WARN", Noise(shown="npm WARN")),
    ("[" * 5000, Noise(shown="[" * 200)),
]


@pytest.mark.parametrize("line, wanted", LINES)
def test_a_line_is_understood(line: str, wanted: object) -> None:
    assert receive(line.encode()) == wanted


NAMES = st.sampled_from(["id", "method", "params", "result", "error", "code"])
JSON = st.recursive(
    st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner)
)


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_no_line_is_an_error(line: bytes) -> None:
    assert receive(line) is not None


@pytest.mark.parametrize(
    "data, shown",
    [
        (None, "no"),
        ("why", "no: why"),
        ({"message": "why"}, "no: why"),
        ({"details": "why"}, "no: why"),
        ({"details": {"deep": 1}}, "no"),
        ("no", "no"),
        (["list"], "no"),
    ],
)
def test_a_failure_says_what_the_agent_said(data: object, shown: str) -> None:
    assert str(Failure(code=1, message="no", data=data)) == shown
