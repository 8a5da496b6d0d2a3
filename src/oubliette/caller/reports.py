"""What a running tool tells of itself: sent once, and until it is taken where it moves the call's deadline."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from oubliette.caller import messages
from oubliette.caller.crew import Crew
from oubliette.caller.errands import Errand
from oubliette.caller.http1 import Response
from oubliette.caller.lane import Lanes
from oubliette.caller.patience import Patience

logger = logging.getLogger(__name__)

# So many that tell of progress alone are on their way at once; more are dropped, for the next tells more.
REPORTS_OPEN = 1024
# What a later try may change; 404 is an MCP session that is being renewed.
_AGAIN = frozenset({404, 429, 500, 502, 503, 504})


class Reports:
    def __init__(self, lanes: Lanes, crew: Crew, next_id: Callable[[], int]) -> None:
        self._lanes = lanes
        self._crew = crew
        self._next_id = next_id
        self._open = 0
        self._moving: dict[str, bytes] = {}  # by request: the newest of what moves its deadline

    def send(self, errand: Errand, told: dict[str, Any]) -> None:
        """Tell the droid of an errand how far it is, and the server how long it may still take."""
        if errand.over:
            return
        arguments: dict[str, Any] = {name: value for name, value in told.items() if value is not None}
        arguments["session_id"] = errand.asked.session_id
        request_id = arguments["request_id"] = errand.asked.request_id
        try:
            body = self._body(arguments)
        except (TypeError, ValueError, OverflowError) as failure:
            logger.warning("what a tool told of itself is not JSON, and was not sent: %s", failure)
            return
        if "extend_seconds" in arguments:
            is_told = request_id in self._moving
            self._moving[request_id] = body
            if not is_told:
                self._crew.start(self._insist(errand), "extend")
        elif self._open < REPORTS_OPEN:
            self._open += 1
            self._lanes.post(body, self._heard)

    def _heard(self, response: Response | None) -> None:
        """Progress alone is worth one try: the next tells more."""
        self._open -= 1

    async def _insist(self, errand: Errand) -> None:
        request_id, patience = errand.asked.request_id, Patience()
        while not errand.over:
            body = self._moving[request_id]
            answered: asyncio.Future[Response | None] = asyncio.get_running_loop().create_future()

            def heard(response: Response | None, answered: asyncio.Future[Response | None] = answered) -> None:
                if not answered.done():
                    answered.set_result(response)

            self._lanes.post(body, heard)
            if not _is_final(await answered):
                await asyncio.sleep(patience.next_s())
            elif self._moving[request_id] is body:
                break
        del self._moving[request_id]

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
