"""What is refused, and how, on a raw socket: every rule on methods, headers and bodies."""

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from oubliette.server.endpoints.mcp import door
from oubliette.server.endpoints.mcp.headers import Doors
from tests.kit.mcp_rig import MODERN, Rig, call, envelope, initialize, legacy, modern, request, serving
from tests.kit.raw_http import connected

ANY = "application/json, text/event-stream"


# One server for all: what one test sends must hurt none of the others.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Rig]:
    async with serving(tmp_path_factory.mktemp("rules"), body_bytes=64 * 1024) as rig:
        yield rig


def code(body: Any) -> int:
    return body["error"]["code"]


# What a legacy client may get wrong: the body, then the status and the error's code.
BODIES = {
    "nothing": (b"", 400, -32700),
    "no JSON": (b"{", 400, -32700),
    "cut off": (b'{"jsonrpc":"2.0","id":1,"method":"pi', 400, -32700),
    "invalid UTF-8": (b'{"jsonrpc":"2.0","id":1,"method":"\xff"}', 400, -32700),
    "half a surrogate": (b'{"jsonrpc":"2.0","id":1,"method":"\\ud800"}', 400, -32700),
    "two messages": (b'{"jsonrpc":"2.0","id":1,"method":"ping"}{}', 400, -32700),
    "endlessly nested": (b"[" * 60_000, 400, -32700),
    "a batch": (b'[{"jsonrpc":"2.0","id":1,"method":"ping"}]', 400, -32600),
    "a string": (b'"ping"', 400, -32600),
    "null": (b"null", 400, -32600),
    "an empty object": (b"{}", 400, -32600),
    "no version": (b'{"id":1,"method":"ping"}', 400, -32600),
    "another version": (b'{"jsonrpc":"1.0","id":1,"method":"ping"}', 400, -32600),
    "a version that is no string": (b'{"jsonrpc":2.0,"id":1,"method":"ping"}', 400, -32600),
    "a method that is no string": (b'{"jsonrpc":"2.0","id":1,"method":7}', 400, -32600),
    "an id that is null": (b'{"jsonrpc":"2.0","id":null,"method":"ping"}', 400, -32600),
    "an id that is a fraction": (b'{"jsonrpc":"2.0","id":1.5,"method":"ping"}', 400, -32600),
    "an id that is true": (b'{"jsonrpc":"2.0","id":true,"method":"ping"}', 400, -32600),
    "an id that is an object": (b'{"jsonrpc":"2.0","id":{},"method":"ping"}', 400, -32600),
    "a response with result and error": (b'{"jsonrpc":"2.0","id":1,"result":1,"error":{}}', 400, -32600),
    "params in a list": (b'{"jsonrpc":"2.0","id":1,"method":"ping","params":[1]}', 400, -32602),
    "params in a string": (b'{"jsonrpc":"2.0","id":1,"method":"ping","params":"x"}', 400, -32602),
    "meta in a list": (b'{"jsonrpc":"2.0","id":1,"method":"ping","params":{"_meta":[]}}', 400, -32602),
    "an unknown method": (b'{"jsonrpc":"2.0","id":1,"method":"tools/eat"}', 200, -32601),
    "a method of the other era": (b'{"jsonrpc":"2.0","id":1,"method":"server/discover"}', 200, -32601),
    "a call of nothing": (b'{"jsonrpc":"2.0","id":1,"method":"tools/call"}', 200, -32602),
    "a call by number": (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":7}}', 200, -32602),
    "a call of the unknown": (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"x"}}', 200, -32602),
    "arguments in a list": (
        b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"try_echo","arguments":[]}}',
        200,
        -32602,
    ),
    "arguments in a string": (
        b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"try_echo","arguments":"{}"}}',
        200,
        -32602,
    ),
    "a cursor from elsewhere": (
        b'{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{"cursor":"7"}}',
        200,
        -32602,
    ),
    "a level that is none": (
        b'{"jsonrpc":"2.0","id":1,"method":"logging/setLevel","params":{"level":"loud"}}',
        200,
        -32602,
    ),
    "a level that cannot be one": (
        b'{"jsonrpc":"2.0","id":1,"method":"logging/setLevel","params":{"level":[]}}',
        200,
        -32602,
    ),
    "a resource that is not there": (
        b'{"jsonrpc":"2.0","id":1,"method":"resources/read","params":{"uri":"test://no"}}',
        200,
        -32002,
    ),
    "a resource without a name": (b'{"jsonrpc":"2.0","id":1,"method":"resources/read"}', 200, -32602),
    "a subscription to nothing": (
        b'{"jsonrpc":"2.0","id":1,"method":"resources/subscribe","params":{"uri":"test://no"}}',
        200,
        -32002,
    ),
}


@pytest.mark.parametrize("kind", BODIES)
async def test_a_bad_body_is_answered_with_its_error_and_hurts_nobody(kind: str, rig: Rig) -> None:
    body, status, expected = BODIES[kind]
    session = await rig.session()
    async with connected(rig.address) as connection:
        await rig.post(connection, body, legacy(session))
        reply = await connection.reply()
        assert (reply.status, code(reply.json)) == (status, expected)
        assert reply.json["jsonrpc"] == "2.0"
        # The same connection goes on.
        await rig.post(connection, request("ping"), legacy(session))
        assert (await connection.reply()).json["result"] == {}


@pytest.mark.parametrize("arguments", [{}, {"arguments": None}, {"arguments": {}}])
async def test_missing_arguments_are_no_arguments(arguments: dict[str, Any], rig: Rig) -> None:
    reply = await rig.ask(request("tools/call", {"name": "try_echo", **arguments}), legacy(await rig.session()))
    assert reply.json["result"]["structuredContent"] == {}


async def test_an_id_comes_back_as_it_was(rig: Rig) -> None:
    session = await rig.session()
    for given in (0, -7, 2**53, "", "x", "7"):
        reply = await rig.ask(request("ping", id=given), legacy(session))
        assert reply.json["id"] == given
        assert type(reply.json["id"]) is type(given)


async def test_null_params_are_no_params(rig: Rig) -> None:
    reply = await rig.ask({"jsonrpc": "2.0", "id": 1, "method": "ping", "params": None}, legacy(await rig.session()))
    assert reply.json["result"] == {}


# What may be wrong with headers: those to send beside the body, the status, and a part of what is said.
HEADERS = {
    "no host": ([("Accept", ANY), ("Content-Type", "application/json")], 421, "Host"),
    "a foreign host": ([("Host", "evil.example"), ("Accept", ANY), ("Content-Type", "application/json")], 421, "Host"),
    "a host that ends like ours": (
        [("Host", "127.0.0.1.evil.example:80"), ("Accept", ANY), ("Content-Type", "application/json")],
        421,
        "Host",
    ),
    "two hosts": (
        [("Host", "localhost"), ("Host", "evil"), ("Accept", ANY), ("Content-Type", "application/json")],
        400,
        "host",
    ),
    "a foreign origin": (
        [("Host", "localhost"), ("Origin", "https://evil.example"), ("Content-Type", "application/json")],
        403,
        "Origin",
    ),
    "an opaque origin": (
        [("Host", "localhost"), ("Origin", "null"), ("Content-Type", "application/json")],
        403,
        "Origin",
    ),
    "an origin that begins like ours": (
        [("Host", "localhost"), ("Origin", "http://localhost.evil.example"), ("Content-Type", "application/json")],
        403,
        "Origin",
    ),
    "no key": ([("Host", "localhost"), ("Accept", ANY), ("Content-Type", "application/json")], 401, "key"),
    "a wrong key": (
        [("Host", "localhost"), ("Authorization", "Bearer no"), ("Content-Type", "application/json")],
        401,
        "key",
    ),
    "another scheme": (
        [("Host", "localhost"), ("Authorization", "Basic key-a"), ("Content-Type", "application/json")],
        401,
        "key",
    ),
    "two keys": (
        [("Host", "localhost"), ("Authorization", "Bearer key-a"), ("Authorization", "Bearer key-b")],
        400,
        "authorization",
    ),
    "a key that may not come here": ([("Host", "localhost"), ("Authorization", "Bearer key-box")], 403, "box"),
}
GOOD = [("Host", "localhost"), ("Authorization", "Bearer key-a")]
AUTHENTICATED = {
    "JSON not accepted": ([("Accept", "text/event-stream"), ("Content-Type", "application/json")], 406, "accept"),
    "events not accepted": ([("Accept", "application/json"), ("Content-Type", "application/json")], 406, "accept"),
    "JSON excluded": (
        [("Accept", "text/event-stream, application/json;q=0"), ("Content-Type", "application/json")],
        406,
        "accept",
    ),
    "no content type": ([("Accept", ANY)], 415, "content type"),
    "a form": ([("Accept", ANY), ("Content-Type", "application/x-www-form-urlencoded")], 415, "content type"),
    "text": ([("Accept", ANY), ("Content-Type", "text/plain")], 415, "content type"),
    "JSON in Latin-1": ([("Accept", ANY), ("Content-Type", "application/json; charset=latin-1")], 415, "content type"),
    "a compressed body": (
        [("Accept", ANY), ("Content-Type", "application/json"), ("Content-Encoding", "gzip")],
        415,
        "encoded",
    ),
    "no session": ([("Accept", ANY), ("Content-Type", "application/json")], 400, "mcp-session-id"),
    "an unknown session": (
        [("Accept", ANY), ("Content-Type", "application/json"), ("Mcp-Session-Id", "0" * 64)],
        404,
        "session",
    ),
    "two sessions": (
        [("Accept", ANY), ("Content-Type", "application/json"), ("Mcp-Session-Id", "a"), ("Mcp-Session-Id", "b")],
        400,
        "mcp-session-id",
    ),
    "a version of long ago": (
        [("Accept", ANY), ("Content-Type", "application/json"), ("MCP-Protocol-Version", "2024-11-05")],
        400,
        "version",
    ),
}
ALL_HEADERS = HEADERS | {kind: ([*GOOD, *lines], status, said) for kind, (lines, status, said) in AUTHENTICATED.items()}


@pytest.mark.parametrize("kind", ALL_HEADERS)
async def test_bad_headers_are_refused(kind: str, rig: Rig) -> None:
    lines, status, said = ALL_HEADERS[kind]
    body = json.dumps(request("tools/list")).encode()
    async with connected(rig.address) as connection:
        await connection.send("POST", "/mcp", [*lines, ("Content-Length", str(len(body)))], body)
        reply = await connection.reply()
    assert reply.status == status
    assert said in reply.json["error"]["message"]


async def test_a_missing_key_is_challenged_without_pointing_anywhere(rig: Rig) -> None:
    reply = await rig.ask(initialize(), key=None)
    assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
    reply = await rig.ask(initialize(), key="key-box")
    assert (reply.status, reply.headers["www-authenticate"]) == (403, 'Bearer error="insufficient_scope"')


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8080", "[::1]:9"])
@pytest.mark.parametrize("origin", [None, "http://localhost:3000", "https://127.0.0.1", "http://[::1]:1"])
async def test_this_machines_own_names_come_in(host: str, origin: str | None, rig: Rig) -> None:
    body = json.dumps(initialize()).encode()
    lines = [line for line in rig.headers(length=len(body)) if line[0] != "Host"]
    lines += [("Host", host)] + ([("Origin", origin)] if origin else [])
    async with connected(rig.address) as connection:
        await connection.send("POST", "/mcp", lines, body)
        assert (await connection.reply()).status == 200


async def test_names_that_are_set_come_in(tmp_path: Path) -> None:
    async with serving(tmp_path, doors=Doors(["box.example"], ["https://app.example"])) as rig:
        body = json.dumps(initialize()).encode()
        for host, origin, status in (
            ("box.example:8080", "https://app.example", 200),
            ("Box.Example", "https://APP.example", 200),
            ("box.example", "http://app.example", 403),
            ("other.example", "https://app.example", 421),
        ):
            lines = [line for line in rig.headers(length=len(body)) if line[0] != "Host"]
            async with connected(rig.address) as connection:
                await connection.send("POST", "/mcp", [*lines, ("Host", host), ("Origin", origin)], body)
                assert (await connection.reply()).status == status, (host, origin)


async def test_a_web_page_that_may_call_is_told_so(tmp_path: Path) -> None:
    origin = ("Origin", "https://app.example")
    async with serving(tmp_path, doors=Doors(origins=["https://app.example"])) as rig:
        async with connected(rig.address) as connection:
            asked = [("Host", rig.host), origin, ("Access-Control-Request-Method", "POST")]
            await connection.send("OPTIONS", "/mcp", asked)
            reply = await connection.head()
            assert (reply.status, reply.headers["access-control-allow-origin"]) == (204, "https://app.example")
            assert "Authorization" in reply.headers["access-control-allow-headers"]
            # The answers themselves are shown to it, refusals included.
            await rig.post(connection, initialize(), origin)
            shown = await connection.reply()
            assert shown.headers["access-control-allow-origin"] == "https://app.example"
            assert "Mcp-Session-Id" in shown.headers["access-control-expose-headers"]
            await rig.post(connection, initialize(), origin, key=None)
            refused = await connection.reply()
            assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, "https://app.example")
        async with connected(rig.address) as connection:
            await connection.send("OPTIONS", "/mcp", [("Host", rig.host), ("Origin", "https://evil.example")])
            reply = await connection.reply()
            assert reply.status == 403
            assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize("method", ["PUT", "PATCH", "OPTIONS"])
async def test_other_methods_are_named_in_the_refusal(method: str, rig: Rig) -> None:
    async with connected(rig.address) as connection:
        await connection.send(method, "/mcp", [*rig.headers(), ("Content-Length", "0")])
        reply = await connection.reply()
    assert (reply.status, reply.headers["allow"]) == (405, "GET, POST, DELETE")


async def test_the_stateless_era_knows_only_post(rig: Rig) -> None:
    for method in ("GET", "DELETE"):
        async with connected(rig.address) as connection:
            await connection.send(method, "/mcp", [*rig.headers(), ("MCP-Protocol-Version", MODERN)])
            reply = await connection.reply()
        assert (reply.status, reply.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize("version", ["2099-01-01", "banana", "2024-11-05", ""])
@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
async def test_a_claim_of_another_version_is_refused_on_every_method(method: str, version: str, rig: Rig) -> None:
    session = await rig.session()
    body = json.dumps(request("tools/list")).encode() if method == "POST" else b""
    claim = (legacy(session), ("MCP-Protocol-Version", version))
    async with connected(rig.address) as connection:
        await connection.send(method, "/mcp", rig.headers(*claim, length=len(body)), body)
        reply = await connection.reply()
    assert (reply.status, code(reply.json)) == (400, -32022)
    supported = [MODERN, "2025-11-25", "2025-06-18", "2025-03-26"]
    assert reply.json["error"]["data"] == {"supported": supported, "requested": version}
    assert (await rig.ask(request("tools/list"), legacy(session))).status == 200, "the session is as it was"


# Sizes.


async def test_a_body_over_the_bound_is_refused_before_it_is_read(rig: Rig) -> None:
    async with connected(rig.address) as connection:
        await connection.send("POST", "/mcp", rig.headers(length=64 * 1024 + 1))
        reply = await connection.reply()
    assert (reply.status, code(reply.json)) == (413, -32600)


async def test_a_body_of_unknown_length_is_bounded_as_well(rig: Rig) -> None:
    async with connected(rig.address) as connection:
        await connection.send("POST", "/mcp", [*rig.headers(), ("Transfer-Encoding", "chunked")])
        for _ in range(5):
            connection.writer.write(b"4000\r\n" + b" " * 0x4000 + b"\r\n")
        await connection.writer.drain()
        reply = await connection.reply()
    assert (reply.status, code(reply.json)) == (413, -32600)


async def test_a_body_of_the_bound_passes(rig: Rig) -> None:
    message = json.dumps(request("ping")).encode()
    body = message + b" " * (64 * 1024 - len(message))
    reply = await rig.ask(body, legacy(await rig.session()))
    assert reply.json["result"] == {}


async def test_a_body_in_pieces_is_one_body(rig: Rig) -> None:
    session = await rig.session()
    body = json.dumps(request("ping")).encode()
    async with connected(rig.address) as connection:
        await connection.send("POST", "/mcp", [*rig.headers(legacy(session)), ("Transfer-Encoding", "chunked")])
        for byte in body:
            connection.writer.write(b"1\r\n%b\r\n" % bytes([byte]))
            await connection.writer.drain()
        connection.writer.write(b"0\r\n\r\n")
        assert (await connection.reply()).json["result"] == {}


async def test_a_body_that_does_not_come_is_not_waited_for(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "BODY_WAIT_S", 0.1)
    async with connected(rig.address) as connection:
        await connection.send("POST", "/mcp", rig.headers(length=100), b"{")
        reply = await connection.reply()
        assert (reply.status, reply.headers["connection"]) == (408, "close")
        assert await connection.reader.read() == b""


@pytest.mark.parametrize("length", ["-1", "x", "1e3"])
async def test_a_length_that_is_none_is_refused(length: str, rig: Rig) -> None:
    async with connected(rig.address) as connection:
        await connection.send("POST", "/mcp", [*rig.headers(), ("Content-Length", length)])
        assert (await connection.head()).status in (400, 413)


# The stateless era.


LIST, LIST_HEADERS = modern(request("tools/list"))
CALL, CALL_HEADERS = modern(call("try_echo"))
READ, READ_HEADERS = modern(request("resources/read", {"uri": "test://static-text"}))
VERSION, METHOD = LIST_HEADERS
WITHOUT_META = request("tools/list")
MODERN_RULES: dict[str, tuple[dict[str, Any], list[tuple[str, str]], int, int]] = {
    "no meta": (WITHOUT_META, LIST_HEADERS, 400, -32602),
    "meta without a version": (
        request("tools/list", {"_meta": {"io.modelcontextprotocol/clientCapabilities": {}}}),
        LIST_HEADERS,
        400,
        -32602,
    ),
    "meta without capabilities": (
        request("tools/list", {"_meta": {"io.modelcontextprotocol/protocolVersion": MODERN}}),
        LIST_HEADERS,
        400,
        -32602,
    ),
    "capabilities that are a list": (
        request("tools/list", {"_meta": envelope(clientCapabilities=[])}),
        LIST_HEADERS,
        400,
        -32602,
    ),
    "a log level that is none": (
        request("tools/list", {"_meta": envelope(logLevel="loud")}),
        LIST_HEADERS,
        400,
        -32602,
    ),
    "no version header": (LIST, [METHOD], 400, -32020),
    "a legacy version header": (LIST, [("MCP-Protocol-Version", "2025-11-25"), METHOD], 400, -32020),
    "a version in the body that is a number": (
        request("tools/list", {"_meta": envelope(protocolVersion=7)}),
        LIST_HEADERS,
        400,
        -32020,
    ),
    "no method header": (LIST, [VERSION], 400, -32020),
    "another method header": (LIST, [VERSION, ("Mcp-Method", "tools/call")], 400, -32020),
    "a method header in capitals": (LIST, [VERSION, ("Mcp-Method", "TOOLS/LIST")], 400, -32020),
    "two method headers": (LIST, [*LIST_HEADERS, METHOD], 400, -32020),
    "two version headers": (LIST, [*LIST_HEADERS, VERSION], 400, -32020),
    "two name headers": (CALL, [*CALL_HEADERS, ("Mcp-Name", "try_echo")], 400, -32020),
    "no name header": (CALL, CALL_HEADERS[:2], 400, -32020),
    "another name header": (CALL, [*CALL_HEADERS[:2], ("Mcp-Name", "try_push")], 400, -32020),
    "another name header on a read": (READ, [*READ_HEADERS[:2], ("Mcp-Name", "test://other")], 400, -32020),
    "a name header of broken base64": (CALL, [*CALL_HEADERS[:2], ("Mcp-Name", "=?base64?dHJ5X2VjaG8?=")], 400, -32020),
    "a version of the future": (
        request("tools/list", {"_meta": envelope(protocolVersion="2099-01-01")}),
        [("MCP-Protocol-Version", "2099-01-01"), METHOD],
        400,
        -32022,
    ),
    "a version of the future without meta": (
        WITHOUT_META,
        [("MCP-Protocol-Version", "2099-01-01"), METHOD],
        400,
        -32022,
    ),
    "an unknown method": (*modern(request("tools/eat")), 404, -32601),
    "initialize": (*modern(request("initialize", {"protocolVersion": MODERN})), 404, -32601),
    "ping": (*modern(request("ping")), 404, -32601),
    "setLevel": (*modern(request("logging/setLevel", {"level": "info"})), 404, -32601),
    "subscribe": (*modern(request("resources/subscribe", {"uri": "test://static-text"})), 404, -32601),
    "an unknown tool": (*modern(call("no_such_tool")), 400, -32602),
    "a resource that is not there": (*modern(request("resources/read", {"uri": "test://no"})), 400, -32602),
    "a capability that is missing": (*modern(call("test_missing_capability")), 400, -32021),
    "a listener without wishes": (*modern(request("subscriptions/listen")), 400, -32602),
    "a listener with wishes of another kind": (
        *modern(request("subscriptions/listen", {"notifications": {"resourceSubscriptions": "all"}})),
        400,
        -32602,
    ),
}


@pytest.mark.parametrize("kind", MODERN_RULES)
async def test_the_stateless_eras_rules(kind: str, rig: Rig) -> None:
    message, lines, status, expected = MODERN_RULES[kind]
    reply = await rig.ask(message, *lines)
    assert (reply.status, code(reply.json)) == (status, expected)
    assert reply.json["id"] == message["id"]
    assert "mcp-session-id" not in reply.headers


async def test_an_unsupported_version_is_told_what_is_supported(rig: Rig) -> None:
    message, lines, _, _ = MODERN_RULES["a version of the future"]
    data = (await rig.ask(message, *lines)).json["error"]["data"]
    assert data == {"supported": [MODERN, "2025-11-25", "2025-06-18", "2025-03-26"], "requested": "2099-01-01"}
    discovered, lines = modern(request("server/discover"))
    result = (await rig.ask(discovered, *lines)).json["result"]
    assert result["supportedVersions"] == data["supported"]


async def test_a_missing_capability_is_named_as_an_object(rig: Rig) -> None:
    message, lines = modern(call("test_missing_capability"))
    assert (await rig.ask(message, *lines)).json["error"]["data"] == {"requiredCapabilities": {"sampling": {}}}
    message, lines = modern(call("test_missing_capability"), clientCapabilities={"sampling": {}})
    assert "result" in (await rig.ask(message, *lines)).json


@pytest.mark.parametrize("name", ["try_echo", "  try_echo\t", "=?base64?dHJ5X2VjaG8=?="])
async def test_a_name_header_may_be_padded_or_wrapped(name: str, rig: Rig) -> None:
    reply = await rig.ask(CALL, *CALL_HEADERS[:2], ("Mcp-Name", name))
    assert reply.status == 200


async def test_results_are_dressed_for_the_era(rig: Rig) -> None:
    message, lines = modern(request("tools/list"))
    result = (await rig.ask(message, *lines)).json["result"]
    assert result["resultType"] == "complete"
    assert result["_meta"] == {"io.modelcontextprotocol/serverInfo": {"name": "fixtures", "version": "1"}}
    assert (result["ttlMs"], result["cacheScope"]) == (60_000, "private")
    message, lines = modern(call("try_echo", a=1))
    result = (await rig.ask(message, *lines)).json["result"]
    assert result["resultType"] == "complete"
    assert "ttlMs" not in result
    plain = (await rig.ask(call("try_echo", a=1), legacy(await rig.session()))).json["result"]
    assert plain.keys() == {"content", "structuredContent", "isError"}


async def test_a_stateless_notification_is_taken_and_dropped(rig: Rig) -> None:
    lines = [("MCP-Protocol-Version", MODERN), ("Mcp-Method", "notifications/cancelled")]
    reply = await rig.ask({"jsonrpc": "2.0", "method": "notifications/cancelled"}, *lines)
    assert (reply.status, reply.body) == (202, b"")


MIRRORS: dict[str, tuple[dict[str, Any], list[tuple[str, str]], bool]] = {
    "the same": ({"region": "eu"}, [("Mcp-Param-Region", "eu")], True),
    "wrapped": ({"region": "zürich"}, [("Mcp-Param-Region", "=?base64?esO8cmljaA==?=")], True),
    "another": ({"region": "eu"}, [("Mcp-Param-Region", "us")], False),
    "missing": ({"region": "eu"}, [], False),
    "without its argument": ({"query": "x"}, [("Mcp-Param-Region", "eu")], False),
    "broken": ({"region": "eu"}, [("Mcp-Param-Region", "=?base64?ZXU?=")], False),
    "in a sloppy spelling of the same bytes": ({"region": "eu"}, [("Mcp-Param-Region", "=?base64?ZXV=?=")], False),
    "twice": ({"region": "eu"}, [("Mcp-Param-Region", "eu"), ("Mcp-Param-Region", "eu")], False),
    "neither": ({"query": "x"}, [], True),
    "one that nobody asked for": ({"region": "eu"}, [("Mcp-Param-Region", "eu"), ("Mcp-Param-X", "y")], True),
}


@pytest.mark.parametrize("kind", MIRRORS)
async def test_a_mirrored_argument_must_agree_with_its_header(kind: str, rig: Rig) -> None:
    arguments, extra, agrees = MIRRORS[kind]
    message, lines = modern(call("test_x_mcp_header", **arguments))
    reply = await rig.ask(message, *lines, *extra)
    if agrees:
        assert reply.json["result"]["structuredContent"] == arguments
    else:
        assert (reply.status, code(reply.json)) == (400, -32020)


# The rest of the door.


async def test_what_nobody_expected_is_told_without_a_word_of_it(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    reply = await rig.call(await rig.session(), "try_crash")
    assert reply.json["error"] == {"code": -32603, "message": "internal error"}
    assert "the method tools/call failed" in caplog.text


async def test_health_and_readiness(rig: Rig) -> None:
    for path, status, body in (("/health", 200, {"status": "ok"}), ("/ready", 200, {"status": "ready"})):
        async with connected(rig.address) as connection:
            await connection.send("GET", path, [("Host", "anything")])
            reply = await connection.reply()
        assert (reply.status, reply.json) == (status, body)
    async with connected(rig.address) as connection:
        await connection.send("POST", "/health", [("Host", "x"), ("Content-Length", "0")])
        assert (await connection.reply()).status == 405
    async with connected(rig.address) as connection:
        await connection.send("GET", "/elsewhere", [("Host", "x")])
        assert (await connection.reply()).status == 404


@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        ("2025-03-26", "2025-03-26"),
        ("2025-06-18", "2025-06-18"),
        ("2025-11-25", "2025-11-25"),
        ("2024-11-05", "2025-11-25"),
        ("2026-07-28", "2025-11-25"),
        ("whatever", "2025-11-25"),
    ],
)
async def test_initialize_negotiates(asked: str, answered: str, rig: Rig) -> None:
    reply = await rig.ask(initialize(asked))
    assert reply.json["result"]["protocolVersion"] == answered
    assert len(reply.headers["mcp-session-id"]) == 64


async def test_an_older_client_that_heads_its_initialize_is_offered_another_version(rig: Rig) -> None:
    reply = await rig.ask(initialize("2024-11-05"), ("MCP-Protocol-Version", "2024-11-05"))
    assert reply.json["result"]["protocolVersion"] == "2025-11-25"


@pytest.mark.parametrize("params", [{}, {"protocolVersion": 7}, {"protocolVersion": "2025-11-25", "capabilities": []}])
async def test_initialize_needs_its_parameters(params: dict[str, Any], rig: Rig) -> None:
    reply = await rig.ask(request("initialize", params))
    assert (reply.status, code(reply.json)) == (400, -32602)
