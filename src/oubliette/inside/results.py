"""How the end of a call becomes an MCP tool result.

A failure is a result with `isError` and its exact message as text; its code and machine word are in `_meta`. A value
that is a tool result already goes through as it is. Any other value, an object with a key named `error` included, is
shown as text and as `structuredContent`.
"""

from __future__ import annotations

import re

from oubliette.inside.link import encode, error_kind, is_list, is_object

TYPE_CHECKING = False  # see link.py
if TYPE_CHECKING:
    from typing import Any, Callable, Dict

    Json = Dict[str, Any]

VERSION = "0.1.0"
SERVER_INFO: Json = {"name": "oubliette", "title": "oubliette", "version": VERSION}
ERROR_META = "dev.oubliette/error"

_SERVER_META: Json = {"io.modelcontextprotocol/serverInfo": SERVER_INFO}
# The end of every result of the stateless revision; `initialize` has said the same once in the older ones.
_MODERN_END = ',"resultType":"complete","_meta":%s}' % encode(_SERVER_META)
# White space may stand anywhere; each character can match in one place only, or a long text would take for ever.
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]*(?:=\s*){0,2}\Z")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_base64(value: Any) -> bool:
    return isinstance(value, str) and _BASE64.match(value) is not None


def _is_contents(value: Any) -> bool:
    return (
        is_object(value)
        and isinstance(value.get("uri"), str)
        and (isinstance(value.get("text"), str) or _is_base64(value.get("blob")))
    )


# What each kind of content block must have; clients drop a whole answer for one block without it.
BLOCKS: Dict[str, Dict[str, Callable[[Any], bool]]] = {
    "text": {"text": _is_text},
    "image": {"data": _is_base64, "mimeType": _is_text},
    "audio": {"data": _is_base64, "mimeType": _is_text},
    "resource": {"resource": _is_contents},
    "resource_link": {"uri": _is_text, "name": _is_text},
}


def is_block(value: Any) -> bool:
    if not is_object(value):
        return False
    kind = value.get("type")
    fields = BLOCKS.get(kind) if type(kind) is str else None
    return fields is not None and all(check(value.get(field)) for field, check in fields.items())


def is_tool_result(value: Any, may_be_empty: bool) -> bool:
    """Whether this value is an MCP tool result already."""
    if not is_object(value):
        return False
    content = value.get("content")
    return (
        is_list(content)
        and (may_be_empty or bool(content))
        and type(value.get("isError", False)) is bool
        and all(map(is_block, content))
    )


def outcome(value: Any, modern: bool, may_be_empty: bool = False) -> str:
    """A value that a call brought back, as the JSON of a tool result."""
    if is_object(value) and "content" in value and is_tool_result(value, may_be_empty):
        return _passed_on(value, modern)
    body = encode(value)
    text = body if type(value) is str else encode(body)
    if not modern and not is_object(value):
        body = '{"result":%s}' % body  # older revisions know objects only
    return '{"content":[{"type":"text","text":%s}],"structuredContent":%s,"isError":false%s' % (
        text,
        body,
        _MODERN_END if modern else "}",
    )


def _passed_on(value: Json, modern: bool) -> str:
    result: Json = {"content": value["content"]}
    if "structuredContent" in value:
        structured = value["structuredContent"]
        result["structuredContent"] = structured if modern or is_object(structured) else {"result": structured}
    result["isError"] = value.get("isError", False)
    meta: Any = value.get("_meta")
    return _closed(result, meta if is_object(meta) else {}, modern)


def failure(error: Json, modern: bool) -> str:
    """A JSON-RPC error as the JSON of a tool result; the code and the machine word are for programs."""
    message, code, data = error.get("message"), error.get("code"), error.get("data")
    kind = error_kind(error)
    retryable = data.get("retryable", False) if is_object(data) else False
    result: Json = {"content": [{"type": "text", "text": message if isinstance(message, str) else kind}]}
    result["isError"] = True
    return _closed(result, {ERROR_META: {"code": code, "kind": kind, "retryable": retryable is True}}, modern)


def _closed(result: Json, meta: Json, modern: bool) -> str:
    if modern:
        result["resultType"] = "complete"
        meta = dict(meta, **_SERVER_META)
    if meta:
        result["_meta"] = meta
    return encode(result)
