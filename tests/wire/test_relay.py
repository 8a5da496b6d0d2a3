"""The relay socket's shapes: written as they always were, and strict about types."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oubliette.server import errors
from oubliette.wire import jsonrpc, relay

# To change a line here is to change the wire: the client in a box of yesterday speaks it.
GOLDEN: list[tuple[msgspec.Struct, str]] = [
    (relay.Attach(key="k", role="client", instance="i"), '{"key":"k","role":"client","instance":"i"}'),
    (
        relay.Attach(
            key="k",
            role="keeper",
            instance="i",
            processes=[relay.ProcessState(process="p", stdin_offset=1, stdout_from=2, stdout_to=3, exit_code=0)],
        ),
        '{"key":"k","role":"keeper","instance":"i","processes":[{"process":"p","stdin_offset":1,"stdout_from":2,'
        '"stdout_to":3,"exit_code":0}]}',
    ),
    (
        relay.Attached(
            session_id="s", depth=0, protocol=1, limits=relay.Limits(), call_timeout_s=60.0, call_timeout_max_s=600.0
        ),
        '{"session_id":"s","depth":0,"protocol":1,"limits":{},"call_timeout_s":60.0,"call_timeout_max_s":600.0,'
        '"margin_s":15.0,"wait_max_s":0.0,"caller_tools":false,"tools_search":false,"abandoned_after_s":900.0,"acks":{}}',
    ),
    (
        relay.CallerToolsConfig(caller_id="ant", tools=[relay.ConfigTool(name="a.b", box_name="ant_a_b")]),
        '{"caller_id":"ant","tools":[{"name":"a.b","box_name":"ant_a_b","inputSchema":{"type":"object"}}]}',
    ),
    (
        relay.CallerTool(tool="send", arguments={"a": [1, None]}, call_key="k"),
        '{"tool":"send","arguments":{"a":[1,null]},"call_key":"k"}',
    ),
    (relay.OublietteTools(api_key="k"), '{"api_key":"k"}'),
    (
        relay.OublietteCallTool(api_key="k", tool="project_list", call_key="c"),
        '{"api_key":"k","tool":"project_list","call_key":"c"}',
    ),
    (relay.SessionMessage(message="m", wait_seconds=1.5), '{"message":"m","wait_seconds":1.5}'),
    (relay.SessionEvents(session_id="s", since_index=4), '{"session_id":"s","since_index":4}'),
    (relay.Cancel(call_key="c", reason="r"), '{"call_key":"c","reason":"r"}'),
    (relay.Progress(call_key="c", progress=0.5, message="m"), '{"call_key":"c","progress":0.5,"message":"m"}'),
    (
        relay.Start(process="p", argv=["a"], env={"B": "c"}, cwd="/"),
        '{"process":"p","argv":["a"],"env":{"B":"c"},"cwd":"/"}',
    ),
    (
        relay.Stdin(process="p", offset=0, data="aGk=", eof=True),
        '{"process":"p","offset":0,"data":"aGk=","eof":true}',
    ),
    (relay.Accepted(stdin_offset=2), '{"stdin_offset":2}'),
    (relay.Signal(process="p", signal="TERM"), '{"process":"p","signal":"TERM"}'),
    (
        relay.Stdout(process="p", stream="out", offset=5, data="aGk="),
        '{"process":"p","stream":"out","offset":5,"data":"aGk="}',
    ),
    (relay.Ack(process="p", offset=5), '{"process":"p","offset":5}'),
    (relay.Exited(process="p", exit_signal=9), '{"process":"p","exit_signal":9}'),
    (
        relay.ErrorData(kind="too_many", retryable=True, details={"n": 1}),
        '{"kind":"too_many","retryable":true,"details":{"n":1}}',
    ),
]


@pytest.mark.parametrize("frame, golden", GOLDEN)
def test_a_frame_is_written_as_it_always_was_and_read_again(frame: msgspec.Struct, golden: str) -> None:
    assert msgspec.json.encode(frame).decode() == golden
    assert msgspec.json.decode(golden, type=type(frame)) == frame


@pytest.mark.parametrize(
    "kind, params",
    [
        (relay.Attach, '{"key":1,"role":"client","instance":"i"}'),
        (relay.Attach, '{"key":"k","role":"server","instance":"i"}'),
        (relay.Attach, '{"key":"k","role":"client"}'),
        (relay.Attach, '{"key":"k","role":"client","instance":"i","protocol":"1"}'),
        (relay.CallerTool, "{}"),
        (relay.CallerTool, '{"tool":["a"]}'),
        (relay.CallerTool, '{"tool":"a","arguments":[]}'),
        (relay.CallerTool, '{"tool":"a","arguments":null}'),
        (relay.CallerTool, '{"tool":"a","arguments":"{}"}'),
        (relay.CallerTool, '{"tool":"a","call_key":7}'),
        (relay.OublietteCallTool, '{"api_key":null,"tool":"a"}'),
        (relay.SessionEvents, '{"session_id":"s","since_index":1.5}'),
        (relay.SessionMessage, '{"message":"m","wait_seconds":"1"}'),
        (relay.Cancel, '{"call_key":["a"]}'),
        (relay.Progress, '{"call_key":"a","progress":"half"}'),
        (relay.Stdin, '{"process":"p","offset":true,"data":""}'),
        (relay.Stdin, '{"process":"p","offset":18446744073709551616000,"data":""}'),
        (relay.Ack, '{"process":"p","offset":-1}'),
        (relay.Signal, '{"process":"p","signal":"STOP"}'),
        (relay.Stdout, '{"process":"p","stream":"in","offset":0,"data":""}'),
        (relay.Ack, "[]"),
    ],
)
def test_wrong_types_are_refused(kind: type[msgspec.Struct], params: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(params, type=kind)


def test_the_defaults_of_one_frame_are_not_those_of_the_next() -> None:
    first = msgspec.json.decode(b'{"tool":"a"}', type=relay.CallerTool)
    first.arguments["left"] = 1
    assert msgspec.json.decode(b'{"tool":"a"}', type=relay.CallerTool).arguments == {}


def test_every_error_of_ours_has_a_word_that_droids_are_told() -> None:
    def below(kind: type[errors.OublietteError]) -> list[type[errors.OublietteError]]:
        return [kind, *(one for child in kind.__subclasses__() for one in below(child))]

    assert {kind.kind for kind in below(errors.OublietteError)} <= relay.KINDS.keys()


# -- JSON-RPC -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, golden",
    [
        (jsonrpc.request(1, "attach", {"a": 1}), '{"jsonrpc":"2.0","id":1,"method":"attach","params":{"a":1}}'),
        (jsonrpc.notification("ack", {}), '{"jsonrpc":"2.0","method":"ack","params":{}}'),
        (jsonrpc.result("x", None), '{"jsonrpc":"2.0","id":"x","result":null}'),
        (jsonrpc.result(2, msgspec.Raw(b"[1, 2]")), '{"jsonrpc":"2.0","id":2,"result":[1, 2]}'),
        (
            jsonrpc.error(None, jsonrpc.ErrorObject(-32700, "no")),
            '{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"no"}}',
        ),
        (
            jsonrpc.error(3, jsonrpc.ErrorObject(-32000, "no", {"kind": "k"})),
            '{"jsonrpc":"2.0","id":3,"error":{"code":-32000,"message":"no","data":{"kind":"k"}}}',
        ),
    ],
)
def test_a_message_is_one_line(line: bytes, golden: str) -> None:
    assert line == golden.encode() + b"\n"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=15,
)


@given(json_values)
def test_whatever_is_passed_through_stays_one_line_and_itself(value: Any) -> None:
    line = jsonrpc.result(1, value)
    assert line.count(b"\n") == 1
    frame = jsonrpc.decode_frame(line)
    assert isinstance(frame.result, msgspec.Raw)
    assert msgspec.json.decode(frame.result) == value
    assert jsonrpc.result(1, frame.result) == line


@given(st.dictionaries(st.sampled_from(["jsonrpc", "id", "method", "type", "params", "result", "error"]), json_values))
def test_any_object_is_a_frame_whose_parts_can_be_looked_at(members: dict[str, Any]) -> None:
    frame = jsonrpc.decode_frame(msgspec.json.encode(members))
    for name in ("jsonrpc", "id", "method", "type", "params", "result", "error"):
        assert (getattr(frame, name) is msgspec.UNSET) == (name not in members)


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b"1", b'"a"', b"null", b"{} {}", b'{"id":}', b"\xff"])
def test_what_is_no_object_is_no_frame(line: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        jsonrpc.decode_frame(line)
