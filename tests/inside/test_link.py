"""The link's pieces that need no server: lines, JSON and the words of errors."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oubliette.inside import link
from oubliette.inside.link import Lines, decode, encode, error_kind
from oubliette.wire import jsonrpc
from oubliette.wire import relay as wire

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(json_values)
def test_what_is_encoded_is_one_line_that_decodes_to_the_same(value: Any) -> None:
    text = encode(value)
    assert "\n" not in text
    assert decode(text.encode()) == value
    assert json.loads(text) == value


@given(st.text())
def test_what_the_usual_parser_takes_is_taken_and_nothing_else(text: str) -> None:
    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    try:
        expected = json.loads(text, parse_constant=refuse)
    except ValueError:
        with pytest.raises(ValueError, match=r"JSON|Expecting|value|decode|Invalid|Unterminated|Extra|digits"):
            decode(text.encode("utf-8", "surrogatepass"))
    else:
        assert decode(text.encode()) == expected


@pytest.mark.parametrize(
    "line", [b"", b" ", b"{", b"{} {}", b"NaN", b"-Infinity", b'{"a":NaN}', b"\xff", b"1 x", b"1\xc2\xa0"]
)
def test_what_is_not_one_json_value_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"JSON|Expecting|value|decode"):
        decode(line)


def test_infinities_and_depth_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode({"a": math.inf})
    with pytest.raises(RecursionError):
        decode(b"[" * 200_000)


def test_without_the_accelerator_json_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json.encoder, "c_make_encoder", None)
    plain = link._make_encode()
    assert plain({"ä": [1, None, "€\n"]}) == encode({"ä": [1, None, "€\n"]})


@given(st.lists(st.binary().map(lambda part: part.replace(b"\n", b""))), st.lists(st.integers(1, 9)))
def test_lines_come_out_whole_however_they_are_cut(lines: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(line + b"\n" for line in lines) + b"rest"
    splitter, found, sizes = Lines(), list[bytes](), iter(cuts)
    while stream:
        size = next(sizes, len(stream))
        found += splitter.feed(stream[:size])
        stream = stream[size:]
    assert found == lines
    assert bytes(splitter.rest) == b"rest"


def test_a_line_without_end_is_noticed_at_the_bound() -> None:
    splitter = Lines(10)
    assert splitter.feed(b"x" * 10) == []
    assert not splitter.too_long()
    splitter.feed(b"x")
    assert splitter.too_long()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"code": -32000, "message": "x", "data": {"kind": "timeout"}}, "timeout"),
        ({"code": -32001, "message": "x"}, "unauthenticated"),
        ({"code": -32002, "message": "x", "data": {}}, "forbidden"),
        ({"code": -32602, "message": "x", "data": "kind"}, "invalid_params"),
        ({"code": [1], "data": {"kind": 5}}, "internal"),
        ({}, "internal"),
    ],
)
def test_every_error_has_a_kind(error: dict[str, Any], kind: str) -> None:
    assert error_kind(error) == kind
    assert kind in wire.KINDS


def test_the_links_numbers_are_the_wires() -> None:
    assert link.PROTOCOL == wire.PROTOCOL
    assert link.FRAME_BYTES_MAX == wire.FRAME_BYTES_MAX
    assert link.ATTACH_WAIT_S == wire.ATTACH_WAIT_S
    assert (link.METHOD_NOT_FOUND, link.INVALID_PARAMS) == (jsonrpc.METHOD_NOT_FOUND, jsonrpc.INVALID_PARAMS)
    assert (link.UNAUTHENTICATED, link.FORBIDDEN) == (jsonrpc.UNAUTHENTICATED, jsonrpc.FORBIDDEN)
    assert set(link.LASTING) <= set(wire.KINDS)
