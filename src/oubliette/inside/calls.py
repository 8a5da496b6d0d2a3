"""Calls that are open: each is a frame that the server has, or will have when the link is back.

A call keeps its frame and its call key until it ended, so that a link that comes back can repeat it: the server joins
the repeated key to the call that runs, or gives the stored outcome. The server owns the deadline; ours is longer and
only says that the server itself is lost.
"""

from __future__ import annotations

import os

from oubliette.inside.link import FIRST_ID, FRAME_BYTES_MAX, INVALID_PARAMS, encode
from oubliette.inside.results import failure
from oubliette.inside.toolbox import OWN, RELAYED

TYPE_CHECKING = False  # see link.py
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Optional, Set, Tuple, Union

    from oubliette.inside.mcp import Mcp, Request
    from oubliette.inside.toolbox import Route

    Json = Dict[str, Any]
    Id = Union[int, str]
    Token = Union[int, str, None]
    # id and name as the agent knows them, frame, call key, start, progress token, era, kind of route
    Call = Tuple[Id, str, bytes, str, float, Token, bool, int]

PROGRESS_EVERY_S = 10.0
# A heartbeat must be a larger number than the last one, and stay out of the way of numbers that the caller sends.
PROGRESS_STEP = 0.001
# Until the server has told its own: the specified 60 s and the margin.
PATIENCE_S = 75.0
CALLS_MAX = 1024
HELD_BYTES_MAX = 32 * 1024 * 1024  # half of what the server lets a box have open
REASON_MAX = 500

SERVER_ERROR = -32000


def error(kind: str, message: str, retryable: bool = False, code: int = SERVER_ERROR) -> Json:
    return {"code": code, "message": message, "data": {"kind": kind, "retryable": retryable}}


def _finite(value: Any) -> Optional[float]:
    """The value if it is a number that JSON can carry on."""
    return value if type(value) in (int, float) and value - value == 0 else None


class Calls:
    """The open calls of one agent."""

    def __init__(self, to_server: Callable[[bytes], None], agent: Mcp) -> None:
        self.patience_s = PATIENCE_S
        self.wait_patience_s = PATIENCE_S  # with what may be asked to wait: the platform's tools, not a caller's
        self.frame_bytes_max = FRAME_BYTES_MAX
        self.wake_at: Optional[float] = None
        self.is_linked = False
        self.next_id = FIRST_ID
        self._to_server = to_server
        self._agent = agent
        self._open: Dict[int, Call] = {}
        self._by_id: Dict[Id, int] = {}  # the agent's id of a call: ours
        self._unsent: Set[int] = set()
        # By call: cancels that the server may not have heard, and the first request that went behind each.
        self._cancels: Dict[int, Tuple[bytes, int]] = {}
        self._heard: Dict[int, float] = {}  # the last number that went to the agent as progress
        self._beaten: Dict[int, float] = {}  # when
        self._held_bytes = 0

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    def __len__(self) -> int:
        return len(self._open)

    def start(self, request: Request, name: str, route: Route, arguments: Json, now: float) -> Optional[Json]:
        """Open a call and write its frame; an error if it cannot be."""
        number = self.next_id
        key = os.urandom(16).hex()
        try:
            if route.kind == OWN:
                parameters = dict(arguments, call_key=key)
                text = '{"jsonrpc":"2.0","id":%d%s%s}\n' % (number, route.before, encode(parameters))
            else:
                text = '{"jsonrpc":"2.0","id":%d%s%s,"call_key":"%s"}}\n' % (
                    number,
                    route.before,
                    encode(arguments),
                    key,
                )
            frame = text.encode()
        except (ValueError, RecursionError):  # infinities, halves of surrogate pairs, a thousand levels
            return error("invalid_arguments", name + ": the arguments cannot be written as JSON", code=INVALID_PARAMS)
        size = len(frame)
        if size > self.frame_bytes_max:
            return error(
                "too_large",
                "%s: the arguments make a frame of %d bytes; at most %d are possible"
                % (name, size, self.frame_bytes_max),
            )
        if len(self._open) >= CALLS_MAX or self._held_bytes + size > HELD_BYTES_MAX:
            return error("too_many", "%s: too many calls are open (%d)" % (name, len(self._open)), True)
        self.next_id = number + 1
        token = request.progress_token
        self._open[number] = (request.id, name, frame, key, now, token, request.modern, route.kind)
        self._by_id[request.id] = number
        self._held_bytes += size
        patience_s = self._patience(route.kind)
        due = now + (patience_s if token is None else min(patience_s, PROGRESS_EVERY_S))
        if self.wake_at is None or due < self.wake_at:
            self.wake_at = due
        if self.is_linked:
            self._to_server(frame)
        else:
            self._unsent.add(number)
        return None

    def be_patient(self, seconds: float, wait_seconds: float) -> None:
        """Wait this long for the server from now on, also for what is open already."""
        self.patience_s, self.wait_patience_s = seconds, wait_seconds
        self.wake_at = 0.0 if self._open else None

    def end(self, number: int) -> Optional[Call]:
        """Take a call out of the open ones."""
        call = self._open.pop(number, None)
        if call is None:
            return None
        self._by_id.pop(call[0], None)
        self._held_bytes -= len(call[2])
        if self._heard:
            self._heard.pop(number, None)
            self._beaten.pop(number, None)
        if self._unsent:
            self._unsent.discard(number)
        return call

    def answered(self, number: int) -> None:
        """The server answered this request: it has heard every cancel that went before it, and that of its own call."""
        if self._cancels:
            heard = [call for call, (_, behind) in self._cancels.items() if behind <= number or call == number]
            for call in heard:
                del self._cancels[call]

    def cancel(self, request_id: Id, reason: object) -> None:
        """The agent wants no answer any more; ids that are not open are none of our business."""
        number = self._by_id.get(request_id)
        if number is not None:
            self._withdraw(number, reason if isinstance(reason, str) else "cancelled by the agent")

    def cancel_all(self, reason: str) -> None:
        for number in list(self._open):
            self._withdraw(number, reason)

    def linked(self) -> None:
        """The link is (again) attached: say what the server missed, then every open call under its old key."""
        self.is_linked = True
        for number, (frame, _) in self._cancels.items():
            self._to_server(frame)
            self._cancels[number] = (frame, FIRST_ID)  # whatever is asked on this link goes behind it
        self._unsent.clear()
        for call in self._open.values():
            self._to_server(call[2])

    def unlinked(self) -> None:
        self.is_linked = False

    def fail(self, number: int, reason: Json) -> None:
        call = self.end(number)
        if call is not None:
            self._agent.reply_to(call[0], failure(reason, call[6]))

    def fail_all(self, reason: Json) -> None:
        for number in list(self._open):
            self.fail(number, reason)

    def progressed(self, parameters: Json) -> None:
        """Pass on what the caller says about a call under way."""
        number = self._number_of(parameters.get("call_key"))
        if number is None or self._open[number][5] is None:
            return
        said = _finite(parameters.get("progress"))
        total = _finite(parameters.get("total")) if said is not None else None
        message: Any = parameters.get("message")
        self._beat(number, said, total, message if isinstance(message, str) else None)

    def sweep(self, now: float) -> None:
        """Fail what the server did not answer in time, and keep waiting agents awake."""
        if self.wake_at is None or now < self.wake_at:
            return
        wake_at: Optional[float] = None
        for number, call in list(self._open.items()):
            due = call[4] + self._patience(call[7])
            if now >= due:
                self._expire(number, call)
                continue
            if call[5] is not None:
                beat_at = self._beaten.get(number, call[4]) + PROGRESS_EVERY_S
                if now >= beat_at:
                    self._beat(number, None, None, "waiting for %s: %d s" % (call[1], now - call[4]))
                    self._beaten[number] = now
                    beat_at = now + PROGRESS_EVERY_S
                due = min(due, beat_at)
            wake_at = due if wake_at is None else min(wake_at, due)
        self.wake_at = wake_at

    def _patience(self, kind: int) -> float:
        return self.patience_s if kind == RELAYED else self.wait_patience_s

    def _number_of(self, key: object) -> Optional[int]:
        return next((number for number, call in self._open.items() if call[3] == key), None)

    def _beat(self, number: int, said: Optional[float], total: Optional[float], message: Optional[str]) -> None:
        least = self._heard.get(number, 0.0) + PROGRESS_STEP
        value = said if said is not None and said > least else least
        self._heard[number] = value
        parameters: Json = {"progressToken": self._open[number][5], "progress": value}
        if total is not None:
            parameters["total"] = total
        if message is not None:
            parameters["message"] = message
        self._agent.notify("notifications/progress", encode(parameters))

    def _expire(self, number: int, call: Call) -> None:
        waited = "%s: no answer within %g s" % (call[1], self._patience(call[7]))
        if number in self._unsent:
            reason = error("unavailable", waited + ": the server could not be reached; nothing was done", True)
            self.fail(number, reason)
            return
        if self.is_linked:
            reason = error("timeout", waited + " from the server")
        else:
            reason = error(
                "outcome_unknown",
                waited + ": the server was lost while this ran; whether it took effect is not known",
            )
        self._tell_cancel(number, call, "no answer in time")
        self.fail(number, reason)

    def _withdraw(self, number: int, reason: str) -> None:
        was_sent = number not in self._unsent
        call = self.end(number)
        if call is not None and was_sent:
            self._tell_cancel(number, call, reason)

    def _tell_cancel(self, number: int, call: Call, reason: str) -> None:
        """Cancel a call that the server has; said again on every link until the server has shown that it heard."""
        parameters = {"call_key": call[3], "reason": reason[:REASON_MAX]}
        text = '{"jsonrpc":"2.0","method":"cancel","params":%s}\n' % encode(parameters)
        frame = text.encode("utf-8", "replace")
        self._cancels[number] = (frame, self.next_id)
        if len(self._cancels) > CALLS_MAX:
            del self._cancels[next(iter(self._cancels))]
        if self.is_linked:
            self._to_server(frame)
