"""Our side of a JSON-RPC conversation over lines, without I/O.

What is open is part of the stored conversation, so an answer finds its question after a restart. An id carries the
server's epoch: no two lives of the server ever ask under the same id, and an answer that comes twice, or to nobody,
is told apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from oubliette.wire import jsonrpc

NOISE_SHOWN = 200


def as_object(value: object) -> Mapping[str, Any] | None:
    """The value if it is a JSON object."""
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else None


def as_list(value: object) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


class OpenRequests(msgspec.Struct, frozen=True):
    """What we asked and were not answered yet: id → what for."""

    epoch: int
    last: int = 0
    purposes: dict[str, str] = {}

    def ask(self, purpose: str, method: str, params: object) -> "tuple[OpenRequests, bytes]":
        """The line to send, and what is open then."""
        request_id = f"{self.epoch}-{self.last + 1}"
        after = OpenRequests(self.epoch, self.last + 1, {**self.purposes, request_id: purpose})
        return after, jsonrpc.request(request_id, method, params)

    def answered(self, request_id: object) -> "tuple[OpenRequests, str | None]":
        """What the question was for; None where nothing is open under this id."""
        if not isinstance(request_id, str) or request_id not in self.purposes:
            return self, None
        left = {known: purpose for known, purpose in self.purposes.items() if known != request_id}
        return OpenRequests(self.epoch, self.last, left), self.purposes[request_id]

    def is_open(self, purpose: str) -> bool:
        return purpose in self.purposes.values()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    id: jsonrpc.Id
    method: str
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    method: str
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    code: int
    message: str
    data: Any = None

    def __str__(self) -> str:
        """The message, and what the agent added to it where that is text."""
        more = self.data
        words = as_object(more)
        if words is not None:
            more = next((words[name] for name in ("message", "details", "error") if name in words), None)
        return f"{self.message}: {more}" if isinstance(more, str) and more not in self.message else self.message


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    id: object
    result: Any = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """A line that is no JSON-RPC message."""

    shown: str


Incoming = Request | Notification | Answer | Noise


def receive(line: bytes) -> Incoming:
    """What a line says."""
    try:
        message = as_object(msgspec.json.decode(line))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        message = None
    if message is None:
        return _noise(line)
    method, request_id = message.get("method"), message.get("id")
    if isinstance(method, str):
        known = as_object(message.get("params")) or {}
        if isinstance(request_id, int | str):
            return Request(id=request_id, method=method, params=known)
        return Notification(method=method, params=known)
    if "result" in message or "error" in message:
        return Answer(id=request_id, result=message.get("result"), failure=_failure(message.get("error")))
    return _noise(line)


def _noise(line: bytes) -> Noise:
    return Noise(shown=line[:NOISE_SHOWN].decode("utf-8", "replace"))


def _failure(error: object) -> Failure | None:
    if error is None:
        return None
    told = as_object(error)
    if told is None:
        return Failure(code=jsonrpc.INTERNAL_ERROR, message=str(error))
    code = told.get("code")
    return Failure(
        code=code if isinstance(code, int) else jsonrpc.INTERNAL_ERROR,
        message=str(told.get("message") or "no reason given"),
        data=told.get("data"),
    )
