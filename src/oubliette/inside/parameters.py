"""What the server may ask of the keeper: its parameters, read and checked, and how a request is refused."""

from __future__ import annotations

import binascii
from typing import Any, Dict, List, NamedTuple, cast

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
SERVER_ERROR = -32000

PROCESS_ID_CHARS = 64
PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.:")

Params = Dict[str, Any]


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, code: int, kind: str, message: str, retryable: bool = False) -> None:
        super().__init__(message)
        self.error: Params = {"code": code, "message": message, "data": {"kind": kind, "retryable": retryable}}


def invalid(message: str) -> Refused:
    return Refused(INVALID_PARAMS, "invalid_params", message)


class Program(NamedTuple):
    """What a process runs."""

    argv: List[str]
    env: Dict[str, str]
    cwd: str


def program(params: Params) -> Program:
    argv, env, cwd = cast("List[Any]", params.get("argv")), params.get("env"), params.get("cwd")
    if not isinstance(argv, list) or not all(is_plain(item) for item in argv) or not any(argv[:1]):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise invalid("argv is a list of strings, the program first")
    if not isinstance(env, dict) or not all(
        is_plain(value) and name and "=" not in name and "\0" not in name
        for name, value in cast("Dict[str, Any]", env).items()
    ):
        raise invalid("env maps names to strings")
    if not isinstance(cwd, str) or not cwd.startswith("/") or "\0" in cwd:
        raise invalid("cwd is an absolute path")
    return Program(cast("List[str]", argv), cast("Dict[str, str]", env), cwd)


def process_id(params: Params) -> str:
    value = params.get("process")
    if not isinstance(value, str) or not 0 < len(value) <= PROCESS_ID_CHARS or set(value) - PLAIN:
        raise invalid("process is a name of at most %d plain characters" % PROCESS_ID_CHARS)
    return value


def count(params: Params, name: str) -> int:
    value = params.get(name)
    if not is_count(value):
        raise invalid(name + " is a count")
    return cast("int", value)


def flag(params: Params, name: str) -> bool:
    value = params.get(name, False)
    if not isinstance(value, bool):
        raise invalid(name + " is true or false")
    return value


def data(params: Params, name: str) -> bytes:
    value = params.get(name, "")
    if isinstance(value, str):
        try:
            return binascii.a2b_base64(value)
        except ValueError:
            pass
    raise invalid(name + " is base64")


def encoded(value: bytes) -> str:
    return binascii.b2a_base64(value, newline=False).decode("ascii")


def is_plain(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
