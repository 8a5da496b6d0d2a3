"""What droids ask of their caller: each errand is run once, and its answer given as often as it is asked for."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from itertools import islice
from typing import Any

import msgspec

from oubliette.caller.crew import Crew
from oubliette.caller.errors import CallerError, InvalidArguments
from oubliette.caller.messages import Announced
from oubliette.caller.tool import Tool

ERRANDS_REMEMBERED = 10_000
OPEN_NAMED = 1024  # as many as the server lets a poll name
ANSWERS_KEPT_BYTES = 16 * 1024 * 1024
ERROR_CHARS_MAX = 4096
CANCELLED = "the tool was cancelled on its caller's side"

encode = msgspec.json.Encoder().encode


class Answer(msgspec.Struct, omit_defaults=True):
    """The arguments of `caller_tool_response`; neither result nor error means a null result."""

    session_id: str
    request_id: str
    result: msgspec.Raw | None = None
    error: str | None = None


class Errand:
    """One call of one tool by one droid."""

    __slots__ = ("answer", "asked", "over", "replaced", "task")

    def __init__(self, asked: Announced) -> None:
        self.asked = asked
        self.answer: bytes | None = None
        self.task: asyncio.Task[None] | None = None
        self.over = False  # the server took the answer, or wants none
        self.replaced = False  # the answer is an error in place of a result that the server did not take


# The errand that the running tool works on.
current: ContextVar[Errand | None] = ContextVar("oubliette_errand", default=None)


class Errands:
    def __init__(
        self,
        tools: Mapping[str, Tool],
        crew: Crew,
        parallel_max: int,
        give: Callable[[Errand, bytes], None],
        fetch_arguments: Callable[[Announced], Awaitable[msgspec.Raw]],
    ) -> None:
        self._tools = tools
        self._crew = crew
        self._parallel_max = parallel_max
        self._give = give
        self._fetch_arguments = fetch_arguments
        self._known: dict[str, Errand] = {}
        self._kept_bytes = 0
        self._running = 0
        self._queue: dict[str, tuple[Errand, Tool]] = {}
        self._has_lent = bool(tools)
        self._early: dict[str, Errand] = {}  # what was asked for before anything was lent
        self._closed = False

    def asked(self, asked: Announced) -> None:
        """A request came, perhaps for the second time."""
        if self._closed:
            return
        errand = self._known.get(asked.request_id)
        if errand is not None:
            self._ask_again(errand)
            return
        errand = self._known[asked.request_id] = Errand(asked)
        if len(self._known) > ERRANDS_REMEMBERED:
            self._forget_one()
        if self._has_lent or asked.tool in self._tools:
            self._begin(errand)
        else:
            self._early[asked.request_id] = errand

    def lent(self) -> None:
        """Something is lent from now on: begin what was asked for before."""
        self._has_lent = True
        early, self._early = self._early, {}
        for errand in early.values():
            self._begin(errand)

    def _begin(self, errand: Errand) -> None:
        asked = errand.asked
        tool = self._tools.get(asked.tool)
        if tool is None:
            self._finish(errand, error=f"this caller has no tool {asked.tool!r}")
        elif tool.is_async or tool.threaded or asked.arguments is msgspec.UNSET:
            if self._running < self._parallel_max:
                self._start(errand, tool)
            else:
                self._queue[asked.request_id] = (errand, tool)
        else:
            self._run_now(errand, tool, asked.arguments)

    def withdrawn(self, request_id: str) -> None:
        """Nobody waits for this answer any more."""
        errand = self._known.get(request_id)
        if errand is not None and not errand.over:
            errand.over = True
            self._early.pop(request_id, None)
            self._queue.pop(request_id, None)
            errand.asked.arguments = msgspec.UNSET
            if errand.task is not None:
                errand.task.cancel()

    def close(self) -> None:
        """Begin nothing any more, not even what waits for its turn."""
        self._closed = True
        self._queue.clear()
        self._early.clear()
        for errand in self._known.values():
            errand.over = True

    def open_requests(self) -> list[str]:
        """The requests that are being worked on, or whose answers are on their way."""
        found = (one for one in self._known.values() if not one.over)
        return [errand.asked.request_id for errand in islice(found, OPEN_NAMED)]

    def replaced(self, errand: Errand, error: str) -> None:
        """The server cannot take this answer as it is; say so to the droid instead."""
        self._finish(errand, error=error)

    def _ask_again(self, errand: Errand) -> None:
        if errand.answer is not None:
            errand.over = False
            self._give(errand, errand.answer)
        elif errand.over and errand.task is None:
            errand.over = False
            self._finish(errand, error="this call was already answered, and its result is no longer held")

    def _run_now(self, errand: Errand, tool: Tool, arguments: msgspec.Raw) -> None:
        token = current.set(errand)
        try:
            value = tool.function(**tool.decode(arguments))
        except asyncio.CancelledError:
            self._finish(errand, error=CANCELLED)
        except Exception as failure:
            self._finish(errand, error=_message(failure))
        else:
            self._finish_with(errand, value)
        finally:
            current.reset(token)

    def _start(self, errand: Errand, tool: Tool) -> None:
        self._running += 1
        errand.task = self._crew.start(self._run(errand, tool), f"tool {tool.name}")
        # Not by the task itself: one that is cancelled before its first step never ran.
        errand.task.add_done_callback(lambda _: self._ended(errand))

    async def _run(self, errand: Errand, tool: Tool) -> None:
        current.set(errand)
        try:
            raw = errand.asked.arguments
            arguments = tool.decode(await self._fetch_arguments(errand.asked) if raw is msgspec.UNSET else raw)
            if tool.is_async:
                value = await tool.function(**arguments)
            elif tool.threaded:
                value = await asyncio.to_thread(tool.function, **arguments)
            else:
                value = tool.function(**arguments)
        except asyncio.CancelledError:
            if not errand.over:
                self._finish(errand, error=CANCELLED)
            raise
        except Exception as failure:
            self._finish(errand, error=_message(failure))
        else:
            self._finish_with(errand, value)

    def _ended(self, errand: Errand) -> None:
        errand.task = None
        self._running -= 1
        if self._queue:
            self._start(*self._queue.pop(next(iter(self._queue))))

    def _finish_with(self, errand: Errand, value: Any) -> None:
        try:
            result = encode(value)
        except (TypeError, ValueError, RecursionError) as failure:
            self._finish(errand, error=f"the tool's result is not JSON: {_message(failure)}")
        else:
            self._finish(errand, result=msgspec.Raw(result))

    def _finish(self, errand: Errand, *, result: msgspec.Raw | None = None, error: str | None = None) -> None:
        asked = errand.asked
        self._kept_bytes -= len(errand.answer or b"")
        errand.answer = encode(Answer(asked.session_id, asked.request_id, result, error))
        # What was asked is not needed any more, and may be large.
        asked.arguments = msgspec.UNSET
        self._kept_bytes += len(errand.answer)
        if self._kept_bytes > ANSWERS_KEPT_BYTES:
            self._drop_answers()
        if not errand.over:
            self._give(errand, errand.answer)

    def _drop_answers(self) -> None:
        """Let the oldest answers go that the server has taken."""
        for errand in self._known.values():
            if self._kept_bytes <= ANSWERS_KEPT_BYTES:
                return
            if errand.over and errand.answer is not None:
                self._kept_bytes -= len(errand.answer)
                errand.answer = None

    def _forget_one(self) -> None:
        for request_id, errand in self._known.items():
            if errand.over and errand.task is None:
                self._kept_bytes -= len(errand.answer or b"")
                del self._known[request_id]
                return


def _message(failure: BaseException) -> str:
    """What a droid may read of a failure: its message, never a trace."""
    if isinstance(failure, InvalidArguments):
        return f"invalid arguments: {failure.message}"
    if isinstance(failure, CallerError):
        return failure.message
    return str(failure)[:ERROR_CHARS_MAX] or type(failure).__name__
