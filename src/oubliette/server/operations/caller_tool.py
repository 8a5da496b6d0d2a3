"""Operations of a caller on the calls that its droids make."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from oubliette.server.errors import NotFound
from oubliette.server.limits import KNOWN_REQUESTS, WAIT_S_MAX
from oubliette.server.operations.operation import Asked, Operation, Rooms, Target
from oubliette.server.operations.space import Space
from oubliette.server.tokens.token import Scope
from oubliette.wire.events import CallerToolProgress

SessionId = Annotated[str, Meta(description="The session whose droid called.")]


class CallerToolResponse(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    session_id: SessionId
    request_id: Annotated[str, Meta(description="The request_id of the caller_tool_request event.")]
    result: Annotated[
        msgspec.Raw,
        Meta(description="Any JSON. An object whose `content` is a list of MCP content blocks is passed as such."),
    ] = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))
    error: Annotated[str | None, Meta(description="Why the tool failed, for the droid to read.")] = None


class ResponseTaken(msgspec.Struct, kw_only=True, omit_defaults=True):
    accepted: bool
    reason: Annotated[str, Meta(description="unknown, answered, expired or not_owner, where it was not accepted.")] = ""
    repeated: Annotated[bool, Meta(description="The same answer had been given already.")] = False
    state: Annotated[str, Meta(description="How the call ended.")] = ""


class CallerToolPoll(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    session_id: SessionId
    known: Annotated[
        list[str],
        Meta(max_length=KNOWN_REQUESTS, description="Ids of requests that you work on already, of any session."),
    ] = []
    wait_seconds: Annotated[float, Meta(ge=0, le=WAIT_S_MAX)] = 30.0


class CallerToolPending(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    session_id: SessionId
    request_id: Annotated[
        str | None, Meta(description="Only this request, with its whole arguments; none where it has ended.")
    ] = None


class Requests(msgspec.Struct, kw_only=True):
    requests: Annotated[list[Any], Meta(description="caller_tool_request events, oldest first.")]


class CallerToolProgressed(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    session_id: SessionId
    request_id: str
    progress: float | None = None
    total: float | None = None
    message: Annotated[str, Meta(max_length=2000)] | None = None
    extend_seconds: (
        Annotated[float, Meta(gt=0, description="Move the deadline to so many seconds from now, up to its maximum.")]
        | None
    ) = None


class ProgressTaken(msgspec.Struct, kw_only=True):
    accepted: bool
    deadline_at: float


async def respond(rooms: Rooms, asked: Asked, params: CallerToolResponse) -> ResponseTaken:
    answered = await rooms.exchange.answer(
        asked.actor,
        params.session_id,
        params.request_id,
        result=bytes(params.result),
        error=params.error,
        door=asked.door,
    )
    return ResponseTaken(
        accepted=answered.accepted, reason=answered.reason, repeated=answered.repeated, state=answered.state
    )


async def poll(rooms: Rooms, asked: Asked, params: CallerToolPoll) -> Requests:
    if asked.followed is not None:
        # A poll whose asker has gone would take requests from those who have not.
        asked.followed.ends_with_asker()
    found = await rooms.exchange.poll(
        params.session_id,
        frozenset(params.known),
        params.wait_seconds,
        stream_id=asked.stream_id,
        takes=Space().takes,
    )
    return Requests(requests=found)


async def pending(rooms: Rooms, asked: Asked, params: CallerToolPending) -> Requests:
    del asked
    return Requests(requests=rooms.exchange.listed(params.session_id, params.request_id))


async def progress(rooms: Rooms, asked: Asked, params: CallerToolProgressed) -> ProgressTaken:
    told = CallerToolProgress(
        request_id=params.request_id, progress=params.progress, total=params.total, message=params.message
    )
    taken = await rooms.exchange.progress(
        asked.actor, params.session_id, params.request_id, told, extend_s=params.extend_seconds, door=asked.door
    )
    if taken is None:
        raise NotFound(f"no pending request {params.request_id} of yours in session {params.session_id}")
    return ProgressTaken(accepted=True, deadline_at=taken)


def _refused(taken: ResponseTaken) -> bool:
    return not taken.accepted


OPERATIONS = (
    Operation(
        name="caller_tool_response",
        title="Answer a caller tool request",
        scope=Scope.WRITE,
        # Not OWNED_SESSION: a foreign answer is told `not_owner`, by the ledger, and leaves its own audit row.
        target=Target.NOTHING,
        params=CallerToolResponse,
        result=ResponseTaken,
        summary="Respond to a caller_tool_request event with the tool execution result, or with its error. Only the"
        " token that started the session may; the first valid answer wins.",
        run=respond,
        writes=True,
        refused=_refused,
        inside=False,
    ),
    Operation(
        name="caller_tool_poll",
        title="Wait for caller tool requests",
        scope=Scope.WRITE,
        target=Target.OWNED_SESSION,
        params=CallerToolPoll,
        result=Requests,
        summary="Wait for calls of your tools in a session and its children, for callers that hold no stream. Returns"
        " as soon as there is one that you do not know; poll again within 30 seconds or you count as gone.",
        run=poll,
        writes=False,
        inside=False,
    ),
    Operation(
        name="caller_tool_pending",
        title="List pending caller tool requests",
        scope=Scope.WRITE,
        target=Target.OWNED_SESSION,
        params=CallerToolPending,
        result=Requests,
        summary="List every call of your tools that waits for an answer. Of arguments that are large, or beyond 1 MiB"
        " together with those before them, arguments_bytes tells the size: ask again with the request_id to get them.",
        run=pending,
        writes=False,
        inside=False,
    ),
    Operation(
        name="caller_tool_progress",
        title="Report progress of a caller tool",
        scope=Scope.WRITE,
        target=Target.OWNED_SESSION,
        params=CallerToolProgressed,
        result=ProgressTaken,
        summary="Tell the droid how far its call is, and move the call's deadline if you need longer.",
        run=progress,
        writes=True,
        inside=False,
    ),
)
