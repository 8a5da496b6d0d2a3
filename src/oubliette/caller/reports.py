"""What a running tool tells of itself: sent once, and until it is taken where it moves the call's deadline."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from oubliette.caller import messages
from oubliette.caller.crew import Crew
from oubliette.caller.errands import Errand
from oubliette.caller.http1 import Response
from oubliette.caller.lane import Lanes
from oubliette.caller.patience import Patience

# What a later try may change; 404 is an MCP session that is being renewed.
_AGAIN = frozenset({404, 429, 500, 502, 503, 504})


class Reports:
    def __init__(self, lanes: Lanes, crew: Crew, next_id: Callable[[], int]) -> None:
        self._lanes = lanes
        self._crew = crew
        self._next_id = next_id

    def send(self, errand: Errand, told: dict[str, Any]) -> None:
        """Tell the droid of an errand how far it is, and the server how long it may still take."""
        if errand.over:
            return
        arguments: dict[str, Any] = {name: value for name, value in told.items() if value is not None}
        arguments["session_id"] = errand.asked.session_id
        arguments["request_id"] = errand.asked.request_id
        if "extend_seconds" in arguments:
            self._crew.start(self._insist(errand, arguments), "extend")
        else:
            self._lanes.post(self._body(arguments), _not_looked_at)

    async def _insist(self, errand: Errand, arguments: dict[str, Any]) -> None:
        patience = Patience()
        while not errand.over:
            answered: asyncio.Future[Response | None] = asyncio.get_running_loop().create_future()

            def heard(response: Response | None, answered: asyncio.Future[Response | None] = answered) -> None:
                if not answered.done():
                    answered.set_result(response)

            self._lanes.post(self._body(arguments), heard)
            if _is_final(await answered):
                return
            await asyncio.sleep(patience.next_s())

    def _body(self, arguments: dict[str, Any]) -> bytes:
        return messages.tool_call(self._next_id(), "caller_tool_progress", arguments)


def _is_final(response: Response | None) -> bool:
    """Whether the server took this, or refuses it whenever it comes."""
    if response is None or response.status in _AGAIN:
        return False
    if response.status != 200:
        return True
    try:
        reply = messages.reply_in(response.content_type, response.body)
        if reply is None:
            return False
        failure = messages.failure_of(reply)
        if failure is None and reply.result is not msgspec.UNSET:
            failure = messages.failure_in(messages.decode_tool_result(reply.result))
    except msgspec.DecodeError:
        return False  # cut short, or not of our server
    return failure is None or failure.details.get("retryable") is not True


def _not_looked_at(response: Response | None) -> None:
    """Progress alone is worth one try: the next tells more."""
