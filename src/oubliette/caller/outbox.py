"""Answers on their way to the server: sent until each is taken or refused for good."""

import asyncio
from collections.abc import Callable

import msgspec

from oubliette.caller import messages
from oubliette.caller.errands import Errand
from oubliette.caller.errors import CallerError, Unauthenticated
from oubliette.caller.http1 import Response
from oubliette.caller.lane import Lanes
from oubliette.caller.patience import Patience

_HEAD = b'{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":{"name":"caller_tool_response","arguments":%b}}'
_AGAIN = frozenset({429, 500, 502, 503, 504})
# Refusals that are about the answer itself: an error of the same call is taken in its place.
_UNFIT = frozenset({"too_large", "invalid_params"})


class _Taken(msgspec.Struct):
    accepted: bool = False
    reason: str | None = None


class _Result(msgspec.Struct):
    isError: bool = False
    structuredContent: _Taken = msgspec.field(default_factory=_Taken)


class _Reply(msgspec.Struct):
    result: _Result


_decode_reply = msgspec.json.Decoder(_Reply).decode


class Outbox:
    def __init__(
        self,
        lanes: Lanes,
        next_id: Callable[[], int],
        forgotten: Callable[[], None],
        failed: Callable[[CallerError], None],
    ) -> None:
        self._lanes = lanes
        self._next_id = next_id
        self._forgotten = forgotten
        self._failed = failed
        self._open: dict[str, Errand] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._patience = Patience()
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self.replaced: Callable[[Errand, str], None] | None = None

    def give(self, errand: Errand, answer: bytes) -> None:
        """Send an answer until the server took it or refused it; once at a time per errand."""
        if self._closed or errand.asked.request_id in self._open:
            return
        self._open[errand.asked.request_id] = errand
        self._empty.clear()
        self._send(errand)

    async def close(self, drain_s: float) -> None:
        """Wait until every answer is taken, or give up on the rest."""
        try:
            async with asyncio.timeout(drain_s):
                await self._empty.wait()
        except TimeoutError:
            pass
        self.shut()

    def shut(self) -> None:
        """Give up on what is not taken yet."""
        self._closed = True
        self._empty.set()

    def _send(self, errand: Errand) -> None:
        answer = errand.answer
        if self._closed:
            return
        if answer is None:
            self._settle(errand)  # withdrawn while it waited, and then let go
        else:
            self._lanes.post(_HEAD % (self._next_id(), answer), lambda response: self._heard(errand, response))

    def _send_later(self, errand: Errand, at_least_s: float = 0.0) -> None:
        self._loop.call_later(self._patience.next_s(at_least_s), self._send, errand)

    def _heard(self, errand: Errand, response: Response | None) -> None:
        if self._closed:
            return
        if response is None:
            self._send(errand)  # the lane itself waits before it connects again
        elif response.status == 200:
            self._patience.reset()
            self._replied(errand, response)
        elif response.status in _AGAIN:
            after = response.retry_after
            self._send_later(errand, float(after) if after.isdigit() else 0.0)
        elif response.status == 404:
            self._forgotten()
            self._send_later(errand)
        elif response.status == 401:
            self._settle(errand)
            self._failed(Unauthenticated("the server no longer takes this caller's token"))
        elif response.status == 413:
            self._replace(errand, "the result is larger than the server takes")
        else:
            self._settle(errand)

    def _replied(self, errand: Errand, response: Response) -> None:
        try:
            result = _decode_reply(response.body).result
        except msgspec.DecodeError:
            self._replied_otherwise(errand, response)
            return
        if result.isError and result.structuredContent.reason is None:
            self._replied_otherwise(errand, response)
        else:
            self._settle(errand)

    def _replied_otherwise(self, errand: Errand, response: Response) -> None:
        """An event stream, or a failure with its machine word."""
        try:
            failure = _failure(response)
        except msgspec.DecodeError:
            self._send_later(errand)  # cut short, or not of our server
            return
        if failure is None or "accepted" in failure.details:
            self._settle(errand)
        elif failure.details.get("retryable") is True:
            self._send_later(errand)
        elif failure.kind in _UNFIT:
            self._replace(errand, f"the server does not take the result: {failure.message}")
        else:
            self._settle(errand)

    def _replace(self, errand: Errand, error: str) -> None:
        self._open.pop(errand.asked.request_id, None)
        if errand.replaced or errand.over or self.replaced is None:
            self._settle(errand)
        else:
            errand.replaced = True
            self.replaced(errand, error)

    def _settle(self, errand: Errand) -> None:
        errand.over = True
        self._open.pop(errand.asked.request_id, None)
        if not self._open:
            self._empty.set()


def _failure(response: Response) -> CallerError | None:
    """Why an answer was not taken, if it was not. Raises `DecodeError` for what is no reply."""
    reply = messages.reply_in(response.content_type, response.body)
    if reply is None:
        raise msgspec.DecodeError("not a reply")
    if reply.result is msgspec.UNSET:
        return messages.failure_of(reply)
    return messages.failure_in(messages.decode_tool_result(reply.result))
