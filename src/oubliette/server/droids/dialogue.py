"""What the agent's lines and the session's wishes mean: decided in memory, collected in a draft, with no I/O.

A `Dialogue` reads a line or a wish, and puts into a `Draft` what has to be stored and sent because of it. Deadlines
and failures are left for the driver to look at.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec

from oubliette.server.clock import Clock
from oubliette.server.droids import peer, permissions, redaction, translation
from oubliette.server.droids.assembly import Line
from oubliette.server.droids.conversation import Conversation, Waiting
from oubliette.server.droids.driver import LaunchProfile, Outcome, Session
from oubliette.server.droids.peer import Answer, Noise, Notification, Request
from oubliette.server.droids.processes import Input
from oubliette.server.droids.speech import Pieces, Speech
from oubliette.wire import jsonrpc
from oubliette.wire.events import Event, PermissionDecided, Usage, Warn

ACP_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long what is waited for."""

    opening_s: float = 30.0
    cancel_s: float = 5.0
    silence_s: float = 300.0
    turn_max_s: float = 14_400.0
    stop_s: float = 2.0  # for each of: the end of stdin, TERM
    kill_s: float = 5.0


class Places(Protocol):
    """Where things are from inside the box."""

    @property
    def python(self) -> str: ...
    @property
    def program(self) -> str: ...
    @property
    def socket(self) -> str: ...
    @property
    def workspace(self) -> str: ...
    @property
    def home(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    turn: int
    outcome: Outcome


@dataclass(slots=True)
class Draft:
    """What was understood and is not stored yet."""

    conversation: Conversation
    upto: int
    events: list[Event] = field(default_factory=list[Event])
    inputs: list[Input] = field(default_factory=list[Input])
    pieces: Pieces = field(default_factory=Pieces)
    told: list[asyncio.Future[None]] = field(default_factory=list["asyncio.Future[None]"])
    ended: Ended | None = None
    gathering_since: float | None = None
    must: bool = False  # more than gathered chunks: store it at once

    def put(self, **changes: Any) -> None:
        self.conversation = msgspec.structs.replace(self.conversation, **changes)

    def warn(self, kind: str, message: str) -> None:
        self.events.append(Warn(kind=kind, message=message))


class Clocks:
    """Deadlines by name."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}

    def set(self, name: str, seconds: float) -> None:
        self._due[name] = now() + seconds

    def clear(self, *names: str) -> None:
        for name in names:
            self._due.pop(name, None)

    def only(self, name: str, seconds: float) -> None:
        """Nothing else is waited for any more."""
        self._due = {name: now() + seconds}

    def is_set(self, name: str) -> bool:
        return name in self._due

    @property
    def next(self) -> float | None:
        return min(self._due.values(), default=None)

    def rung(self) -> list[str]:
        """Those that have passed; each is told once."""
        passed = [name for name, due in self._due.items() if due <= now()]
        for name in passed:
            del self._due[name]
        return passed


class Dialogue:
    """One agent's conversation with us, from whatever was stored of it."""

    def __init__(
        self,
        session: Session,
        profile: LaunchProfile,
        places: Places,
        speech: Speech,
        patience: Patience,
        clock: Clock,
        api_key: str | None,
    ) -> None:
        self.speech = speech
        self.clocks = Clocks()
        self.failure: tuple[str, str] | None = None  # (kind, message): why it cannot go on
        self._session = session
        self._profile = profile
        self._places = places
        self._patience = patience
        self._clock = clock
        self._api_key = api_key
        self._secret = api_key.encode() if api_key else None

    def fail(self, kind: str, message: str) -> None:
        """The agent has to be killed; the first reason counts."""
        if self.failure is None:
            self.failure = (kind, message)

    def redacted(self, data: bytes) -> bytes:
        """What an agent says without the keys in it."""
        return redaction.redacted(data, self._secret)

    # -- what the session wants ---------------------------------------------------------------------------------

    def _ask(self, draft: Draft, purpose: str, method: str, params: object, *, secret: bool = False) -> None:
        requests, line = draft.conversation.requests.ask(purpose, method, params)
        draft.put(requests=requests)
        draft.inputs.append(Input(data=line, secret=secret))

    def open(self, draft: Draft) -> None:
        """With no file system and no terminal of ours: what the agent needs is in its box."""
        capabilities = {"fs": {"readTextFile": False, "writeTextFile": False}, "terminal": False}
        info = {"name": "oubliette", "version": "1"}
        self._ask(
            draft,
            "initialize",
            "initialize",
            {"protocolVersion": ACP_VERSION, "clientCapabilities": capabilities, "clientInfo": info},
        )
        self.clocks.set("opening", self._patience.opening_s)

    def begin(self, draft: Draft, turn: int, text: str) -> None:
        if draft.conversation.stage != "ready" or self._opens_again(draft):
            draft.put(waiting=Waiting(turn, text), last_turn=turn)
            return
        draft.events += self.speech.finish_message(None, draft.pieces)
        self.speech.begin_turn(draft.pieces)
        began_at = self._clock.now()
        draft.put(turn=turn, last_turn=turn, waiting=None, began_at=began_at, cancelled=None, worked=False, calls={})
        prompt = [{"type": "text", "text": text}]
        self._ask(draft, "prompt", "session/prompt", {"sessionId": draft.conversation.agent_session, "prompt": prompt})
        self.watch(draft.conversation)

    def watch(self, conversation: Conversation) -> None:
        """Set the clocks of the open turn, whether it begins now or began under another server."""
        if conversation.cancelled is not None:
            self.clocks.set("cancel", self._patience.cancel_s)
        elif conversation.turn is not None:
            self.clocks.set("silence", self._patience.silence_s)
            most = self._patience.turn_max_s
            spent = self._clock.now() - conversation.began_at if conversation.began_at is not None else 0.0
            self.clocks.set("turn", min(max(most - spent, 0.0), most))

    def cancel(self, draft: Draft, why: str) -> None:
        waiting = draft.conversation.waiting
        if waiting is not None:
            draft.put(waiting=None)
            draft.ended = Ended(turn=waiting.turn, outcome=Outcome(stop_reason="cancelled", text=""))
        elif draft.conversation.turn is not None and draft.conversation.cancelled is None:
            draft.put(cancelled=why)
            told = {"sessionId": draft.conversation.agent_session}
            draft.inputs.append(Input(data=jsonrpc.notification("session/cancel", told)))
            self.clocks.clear("silence", "turn")
            self.clocks.set("cancel", self._patience.cancel_s)

    # -- what the agent says ------------------------------------------------------------------------------------

    def take(self, draft: Draft, line: Line) -> None:
        """Understand one line."""
        draft.upto = line.end
        if line.data is None:
            draft.warn("line_too_long", "the agent sent a line over 8 MiB, which was passed over")
            return
        data = self.redacted(line.data)
        if not data.strip():
            return
        match peer.receive(data):
            case Noise(shown=shown):
                draft.warn("noise", f"the agent wrote a line that is no message: {shown}")
            case Notification(method="session/update", params=params):
                self._updated(draft, params.get("update"))
            case Notification():
                pass  # the agent's own; JSON-RPC lets them be
            case Request() as request:
                self._asked(draft, request)
            case Answer() as answer:
                self._answered(draft, answer)

    def _updated(self, draft: Draft, update: object) -> None:
        conversation = draft.conversation
        if conversation.is_replaying:
            return
        turn = conversation.turn
        meaning = translation.translate(update, turn, conversation.calls)
        if meaning.chunk is not None:
            if draft.gathering_since is None:
                draft.gathering_since = now()
            draft.events += self.speech.hear(meaning.chunk, turn, draft.pieces)
            if turn is None:
                draft.events += self.speech.finish_message(None, draft.pieces)
        if meaning.begins_call:
            draft.events += self.speech.finish_message(turn, draft.pieces)
        elif meaning.events:
            draft.events += self.speech.flush(turn, draft.pieces)
        draft.events += meaning.events
        if turn is not None:
            if meaning.calls is not None:
                draft.put(calls=meaning.calls)
            if not conversation.worked and (meaning.chunk is not None or meaning.calls is not None):
                draft.put(worked=True)

    def _asked(self, draft: Draft, request: Request) -> None:
        if request.method != "session/request_permission":
            failure = jsonrpc.ErrorObject(jsonrpc.METHOD_NOT_FOUND, f"not offered here: {request.method[:80]}")
            draft.inputs.append(Input(data=jsonrpc.error(request.id, failure)))
            return
        call = peer.as_object(request.params.get("toolCall")) or {}
        options = [option for option in map(peer.as_object, peer.as_list(request.params.get("options"))) if option]
        if draft.conversation.cancelled is not None:
            decision = permissions.CANCELLED
        else:
            decision = permissions.decide(self._session.autonomy, call.get("kind"), options)
        draft.inputs.append(Input(data=jsonrpc.result(request.id, decision.outcome)))
        call_id, title = call.get("toolCallId"), call.get("title")
        draft.events += self.speech.flush(draft.conversation.turn, draft.pieces)
        draft.events.append(
            PermissionDecided(
                tool_call_id=call_id if isinstance(call_id, str) else None,
                tool_name=title if isinstance(title, str) else None,
                decision=decision.word,
            )
        )

    def _answered(self, draft: Draft, answer: Answer) -> None:
        requests, purpose = draft.conversation.requests.answered(answer.id)
        if purpose is None:
            draft.warn("unknown_answer", "the agent answered a request that was not open")
            return
        draft.put(requests=requests)
        result = peer.as_object(answer.result) or {}
        match purpose:
            case "prompt":
                self._turn_answered(draft, answer, result)
            case "initialize":
                self._initialized(draft, answer, result)
            case "session":
                self._session_opened(draft, answer, result)
            case _:
                if answer.failure is not None:
                    message = f"the agent refused its mode {self._profile.mode}: {answer.failure}"
                    self.fail("droid_failed", message)
                else:
                    self._ready(draft)

    # -- opening ------------------------------------------------------------------------------------------------

    def _initialized(self, draft: Draft, answer: Answer, result: Mapping[str, Any]) -> None:
        if answer.failure is not None:
            self.fail("droid_failed", f"the agent refused to start: {answer.failure}")
            return
        version = result.get("protocolVersion")
        if version != ACP_VERSION:
            self.fail("droid_failed", f"the agent speaks ACP {version!r}, not {ACP_VERSION}")
            return
        again = None
        capabilities = peer.as_object(result.get("agentCapabilities")) or {}
        more = peer.as_object(capabilities.get("sessionCapabilities")) or {}
        if self._profile.resume == "resume" and more.get("resume") is not None:
            again = "session/resume"
        elif self._profile.resume is not None and capabilities.get("loadSession") is True:
            again = "session/load"
        draft.put(again=again)
        has_had_one = draft.conversation.continues is not None
        self._open_session(draft, again if again is not None and has_had_one else "session/new")

    def _opens_again(self, draft: Draft) -> bool:
        """Begin to open the session anew where the agent would not see that the tools changed; whether that is so."""
        conversation = draft.conversation
        if self._profile.list_changed != "none" or conversation.again is None:
            return False
        if conversation.tools == self._session.tools:
            return False
        if conversation.needs_key and self._api_key is None:
            message = "the agent is not shown the tools as they are now: that takes its key, and keys are never stored"
            draft.warn("tools_not_shown", message)
            draft.put(tools=self._session.tools)
            return False
        draft.put(continues=conversation.agent_session)
        self._open_session(draft, conversation.again)
        return True

    def _open_session(self, draft: Draft, method: str) -> None:
        if draft.conversation.needs_key and self._api_key is None:
            message = "the server stopped while the droid was starting, and keys are never stored: give it again"
            self.fail("needs_key", message)
            return
        server = _mcp_server(self._places, self._api_key)
        params: dict[str, Any] = {"cwd": self._places.workspace, "mcpServers": [server]}
        if method != "session/new":
            params["sessionId"] = draft.conversation.continues
        draft.put(stage="session", method=method, tools=self._session.tools)
        self._ask(draft, "session", method, params, secret=draft.conversation.needs_key)
        self.clocks.set("opening", self._patience.opening_s)

    def _session_opened(self, draft: Draft, answer: Answer, result: Mapping[str, Any]) -> None:
        method = draft.conversation.method
        if answer.failure is not None:
            if method == "session/new":
                self.fail("droid_failed", f"the agent did not open a session: {answer.failure}")
                return
            draft.warn(
                "conversation_lost", f"the agent could not go on where it was ({answer.failure}): it starts anew"
            )
            self._open_session(draft, "session/new")
            return
        agent_session = result.get("sessionId") if method == "session/new" else draft.conversation.continues
        if not isinstance(agent_session, str):
            self.fail("droid_failed", f"the agent answered {method} without a session id")
            return
        draft.put(agent_session=agent_session)
        if self._profile.mode is None:
            self._ready(draft)
            return
        draft.put(stage="mode")
        self._ask(draft, "mode", "session/set_mode", {"sessionId": agent_session, "modeId": self._profile.mode})
        self.clocks.set("opening", self._patience.opening_s)

    def _ready(self, draft: Draft) -> None:
        self.clocks.clear("opening")
        draft.put(stage="ready")
        waiting = draft.conversation.waiting
        if waiting is not None:
            self.begin(draft, waiting.turn, waiting.text)

    # -- the end of a turn --------------------------------------------------------------------------------------

    def _turn_answered(self, draft: Draft, answer: Answer, result: Mapping[str, Any]) -> None:
        conversation = draft.conversation
        turn = conversation.turn
        assert turn is not None
        self.clocks.clear("silence", "turn", "cancel")
        draft.events += self.speech.finish_message(turn, draft.pieces)
        outcome = Outcome(stop_reason="error", text=self.speech.text)
        if answer.failure is not None:
            outcome = replace(outcome, error=str(answer.failure), error_kind="agent_error")
        else:
            stop_reason = result.get("stopReason")
            used = translation.usage(result.get("usage"), turn)
            outcome = replace(
                outcome,
                stop_reason=stop_reason if isinstance(stop_reason, str) else "unknown",
                usage=_counts(used) if used is not None else None,
            )
            if used is not None:
                draft.events.append(used)
            if stop_reason == "end_turn" and not conversation.worked:
                draft.warn("empty_turn", "the agent ended its turn without a word or a tool call")
        if conversation.cancelled is not None:
            outcome = self._cancelled(conversation.cancelled, outcome)
        self.speech.begin_turn(draft.pieces)
        draft.put(turn=None, began_at=None, cancelled=None, calls={})
        draft.ended = Ended(turn=turn, outcome=outcome)

    def _cancelled(self, why: str, outcome: Outcome) -> Outcome:
        """Agents word it in many ways; one that had finished when it was asked to stop has finished."""
        passed = limit_passed(why, self._patience)
        if passed is not None:
            kind, message = passed
            return replace(outcome, stop_reason="cancelled", error=f"{message}: it was cancelled", error_kind=kind)
        if outcome.error is not None:
            return replace(outcome, stop_reason="cancelled", error=None, error_kind=None)
        return outcome


def limit_passed(why: str | None, patience: Patience) -> tuple[str, str] | None:
    """The limit of a turn for which it was cancelled, as a kind and in words; None where it was asked for."""
    match why:
        case "silence":
            return "turn_silent", f"the droid gave no sign of life for {patience.silence_s:g} s of its turn"
        case "too_long":
            return "turn_too_long", f"the turn took longer than {patience.turn_max_s:g} s"
        case _:
            return None


def _mcp_server(places: Places, api_key: str | None) -> dict[str, Any]:
    """The client in the box, as the agent is to start it."""
    env = [{"name": "OUBLIETTE_SOCKET", "value": places.socket}]
    if api_key is not None:
        env.append({"name": "OUBLIETTE_API_KEY", "value": api_key})
    args = ["-I", "-S", places.program, "client"]
    return {"name": "oubliette", "command": places.python, "args": args, "env": env}


def _counts(used: Usage) -> dict[str, int]:
    counts = {"input_tokens": used.input_tokens, "output_tokens": used.output_tokens, "total_tokens": used.total_tokens}
    return {name: count for name, count in counts.items() if count is not None}


def now() -> float:
    return asyncio.get_running_loop().time()
