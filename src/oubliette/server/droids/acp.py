"""The driver for agents that speak ACP, over the numbered streams of a process that the keeper holds.

One task per droid takes what comes, in order: lines of the agent, commands of the session, deadlines. What a line
means is decided in memory, collected in a `Draft`, and stored in one unit with the offset that acknowledges it.
Chunks of text alone wait for 100 ms or 4 KiB; everything else is stored at once. A server that dies at any point
leaves either both the line and its meaning, or neither.

An agent that does not answer while it is being opened (30 s each for `initialize`, the session, its mode), does not
stop when its turn is cancelled (5 s), or gives no sign of life during a turn (a setting) has its process group
killed. `end_turn` is not taken for success, and an unknown stop reason ends the turn under that word.
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import msgspec

from oubliette.server.droids import conversation as conversations
from oubliette.server.droids import peer, permissions, translation
from oubliette.server.droids.conversation import Conversation, Waiting
from oubliette.server.droids.driver import LaunchProfile, Outcome, Session
from oubliette.server.droids.peer import Answer, Noise, Notification, OpenRequests, Request
from oubliette.server.droids.processes import Input, Line, Process, Processes, TakenOver
from oubliette.server.droids.speech import Pieces, Speech
from oubliette.server.errors import Conflict, DroidFailed, StorageFailed
from oubliette.server.storage.database import Row, Tx
from oubliette.wire import jsonrpc
from oubliette.wire.events import Event, PermissionDecided, Usage, Warn

logger = logging.getLogger(__name__)

ACP_VERSION = 1
GATHER_S = 0.1
STORAGE_TRIES = 30
STORAGE_RETRY_S = 1.0
LOOK_EVERY_S = 1.0
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
REDACTED = b"[redacted]"

Append = Callable[[Tx, str, Sequence[Event], float], Awaitable[int]]
After = Callable[[str, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long what is waited for."""

    opening_s: float = 30.0
    cancel_s: float = 5.0
    silence_s: float = 300.0
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


class DroidBox(Protocol):
    """What a driver needs of the box that its agent runs in."""

    @property
    def id(self) -> str: ...
    @property
    def places(self) -> Places: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    turn: int
    outcome: Outcome


@dataclass(slots=True)
class _Draft:
    """What was understood and is not stored yet."""

    conversation: Conversation
    upto: int
    events: list[Event] = field(default_factory=list[Event])
    inputs: list[Input] = field(default_factory=list[Input])
    pieces: Pieces = field(default_factory=Pieces)
    told: list[asyncio.Future[None]] = field(default_factory=list["asyncio.Future[None]"])
    ended: _Ended | None = None
    gathering_since: float | None = None
    must: bool = False  # more than gathered chunks: store it at once

    def put(self, **changes: Any) -> None:
        self.conversation = msgspec.structs.replace(self.conversation, **changes)

    def warn(self, kind: str, message: str) -> None:
        self.events.append(Warn(kind=kind, message=message))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Command:
    name: Literal["open", "prompt", "cancel", "stop"]
    done: asyncio.Future[None]
    turn: int = 0
    text: str = ""


class AcpDroids:
    """Starts droids and finds them again; one for all sessions."""

    def __init__(
        self,
        processes: Processes,
        *,
        append: Append,
        after: After,
        epoch: int,
        profile: Callable[[str], LaunchProfile],
        patience: Patience | None = None,
        waits: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """`profile` is asked with a session's autonomy, `waits` whether its droid waits for an answer of ours."""
        self.processes = processes
        self.append = append
        self.after = after
        self.epoch = epoch
        self.profile = profile
        self.patience = patience or Patience()
        self.waits = waits

    async def start(self, session: Session, box: DroidBox, *, api_key: str | None = None) -> "AcpDroid":
        """Start the agent in this box and open its conversation. Raises `BoxFailed` or `DroidFailed`."""
        profile = self.profile(session.autonomy)
        begun = Conversation(
            requests=OpenRequests(self.epoch),
            needs_key=api_key is not None,
            continues=await self._earlier(session.id, box.id) if profile.resume is not None else None,
        )
        process = await self.processes.create(
            f"prc_{secrets.token_hex(8)}",
            box_id=box.id,
            session_id=session.id,
            conversation=conversations.stored(begun),
        )
        places = box.places
        known = {name: getattr(places, name) for name in ("python", "program", "workspace", "home")}
        try:
            await process.start(
                [_filled(word, known) for word in profile.argv],
                {"HOME": places.home, "PATH": PATH, "LANG": "C.UTF-8", **profile.env},
                places.workspace,
            )
        except BaseException:
            await process.finish()
            raise
        droid = AcpDroid(self, process, session, profile, places, begun, Speech(), api_key)
        await droid.open()
        return droid

    async def resume(self, session: Session, box: DroidBox) -> "AcpDroid | None":
        """Go on with the droid that runs in this box since before a restart; None where there is none."""
        process = await self.processes.running(box.id, session.id)
        if process is None:
            return None
        conversation = conversations.restored(process.conversation, self.epoch)
        if process.lost is not None and conversation.turn is None and conversation.waiting is None:
            logger.warning("a droid could not go on", extra={"process_id": process.id, "kind": process.lost_kind})
            await process.signal("KILL")
            await process.finish()
            return None
        speech = await self.processes.database.read(lambda tx: Speech.restored(tx, process.id))
        profile = self.profile(session.autonomy)
        droid = AcpDroid(self, process, session, profile, box.places, conversation, speech, None)
        droid.go_on()
        return droid

    async def _earlier(self, session_id: str, box_id: str) -> str | None:
        """The agent's own name of the conversation that an earlier process of this box had."""

        async def read(tx: Tx) -> Row | None:
            return await tx.one(
                "SELECT conversation FROM processes WHERE session_id = ? AND box_id = ?"
                " ORDER BY created_at DESC LIMIT 1",
                session_id,
                box_id,
            )

        row = await self.processes.database.read(read)
        if row is None or not row[0]:
            return None
        return conversations.restored(row[0], self.epoch).agent_session


class AcpDroid:
    """One agent. Implements the contract `Droid`."""

    def __init__(
        self,
        droids: AcpDroids,
        process: Process,
        session: Session,
        profile: LaunchProfile,
        places: Places,
        conversation: Conversation,
        speech: Speech,
        api_key: str | None,
    ) -> None:
        self._droids = droids
        self._process = process
        self._session = session
        self._profile = profile
        self._places = places
        self._stored = conversation
        self._speech = speech
        self._api_key = api_key
        self._secret = api_key.encode() if api_key else None
        self._patience = droids.patience
        self._commands: deque[_Command] = deque()
        self._clocks: dict[str, float] = {}
        self._draft: _Draft | None = None
        self._failure: tuple[str, str] | None = None  # (kind, message): why it is being killed
        self._stopping = False
        self._starting = False  # somebody waits for `open`, and is told of a failure there
        self._over = asyncio.Event()
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    # -- the contract -------------------------------------------------------------------------------------------

    def has_turn(self, turn: int) -> bool:
        return self._stored.last_turn >= turn

    async def prompt(self, turn: int, text: str) -> None:
        """Begin a turn; one that was begun already is left alone. Raises `DroidFailed` or `Conflict`."""
        if not self.has_turn(turn):
            await self._command("prompt", turn=turn, text=text)

    async def cancel(self) -> None:
        """Ask the agent to stop its turn; what does not stop in time is killed."""
        await self._command("cancel")

    async def stop(self) -> None:
        """Close stdin, wait, TERM the group, KILL the group; return when it is over."""
        if not self._over.is_set():
            await self._command("stop")
            await self._over.wait()

    async def open(self) -> None:
        """Open the conversation. Raises `DroidFailed`; then the process is gone."""
        self._starting = True
        self._task = self._droids.processes.spawn(self._run())
        await self._command("open")
        await self._opened
        self._starting = False

    def go_on(self) -> None:
        """Take up a conversation where another server left it."""
        if self._stored.stage == "ready":
            self._opened.set_result(None)
        else:
            self._set_clock("opening", self._patience.opening_s)
            if self._stored.stage == "initialize" and not self._stored.requests.is_open("initialize"):
                self._commands.append(_Command(name="open", done=asyncio.get_running_loop().create_future()))
        if self._stored.cancelled is not None:
            self._set_clock("cancel", self._patience.cancel_s)
        elif self._stored.turn is not None:
            self._set_clock("silence", self._patience.silence_s)
        self._task = self._droids.processes.spawn(self._run())

    async def _command(
        self, name: Literal["open", "prompt", "cancel", "stop"], *, turn: int = 0, text: str = ""
    ) -> None:
        if self._over.is_set():
            if name in ("cancel", "stop"):
                return
            raise DroidFailed("the droid's process has ended")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._commands.append(_Command(name=name, done=done, turn=turn, text=text))
        self._process.changed.set()
        try:
            await done
        except DroidFailed:
            if name not in ("cancel", "stop"):  # it ended first: that is what was asked for
                raise

    # -- the task -----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while not self._over.is_set():
                await self._round()
        except TakenOver as failure:
            self._let_go(str(failure))
        except Exception:
            logger.exception("a droid is given up", extra={"process_id": self._process.id})
            await self._give_up("a fault in the server ended this droid; the server's log has the details")
        finally:
            self._let_go("the server is stopping")

    async def _give_up(self, message: str) -> None:
        """After a fault of our own: the session is told even if nothing can be stored any more."""
        await self._process.signal("KILL")
        try:
            await self._finish("internal", message)
        except Exception:
            logger.exception("the end of a droid was not stored", extra={"process_id": self._process.id})
            self._session.droid_ended(message)

    async def _round(self) -> None:
        """Take everything that is there, store what is due, and wait for more."""
        process = self._process
        process.changed.clear()
        draft = self._draft
        if draft is None:
            draft = self._draft = _Draft(conversation=self._stored, upto=process.output.start)
        draft.upto = max(draft.upto, process.output.start)  # a piece of a long line may have been stored
        lines = process.output.lines(draft.upto)
        for line in lines:
            self._take(draft, line)
            if draft.ended is not None:
                break
        while self._commands and draft.ended is None:
            self._obey(draft, self._commands.popleft())
        self._look_at_clocks(draft)
        if self._is_due(draft):
            await self._commit(draft)
        elif lines:
            return
        elif await process.store_piece():
            draft.upto = process.output.start
        elif process.lost is not None or process.exit is not None:
            await self._end()
        else:
            await self._wait()

    def _is_due(self, draft: _Draft) -> bool:
        if draft.must or draft.events or draft.inputs or draft.ended is not None or draft.told:
            return True
        since = draft.gathering_since
        if since is not None:
            return _now() >= since + GATHER_S or self._process.exit is not None
        return draft.upto > self._process.output.start

    async def _wait(self) -> None:
        """Until something changed, or the next deadline."""
        deadlines = list(self._clocks.values())
        if self._draft is not None and self._draft.gathering_since is not None:
            deadlines.append(self._draft.gathering_since + GATHER_S)
        if self._process.link is None:
            deadlines.append(_now() + LOOK_EVERY_S)
        try:
            async with asyncio.timeout_at(min(deadlines, default=None)):
                await self._process.changed.wait()
        except TimeoutError:
            if self._process.link is None and await self._process.was_ended():
                self._let_go("the droid's box has ended")

    async def _commit(self, draft: _Draft) -> None:
        """Store a draft; a database that does not take it is asked again."""
        draft.events += self._speech.flush(draft.conversation.turn, draft.pieces)
        changed = draft.conversation is not self._stored
        told = conversations.stored(draft.conversation) if changed else None
        last: int | None = None
        for attempt in range(STORAGE_TRIES):
            try:
                last = await self._process.commit(
                    upto=draft.upto, inputs=draft.inputs, conversation=told, also=lambda tx: self._write(tx, draft)
                )
                break
            except StorageFailed:
                if attempt == STORAGE_TRIES - 1:
                    raise
                await asyncio.sleep(STORAGE_RETRY_S)
        self._draft = None
        self._stored = draft.conversation
        self._told(draft, last)

    async def _write(self, tx: Tx, draft: _Draft) -> int | None:
        """Inside the transaction."""
        events = list(draft.events)
        if draft.ended is not None:
            events += await self._session.turn_ended(tx, draft.ended.turn, draft.ended.outcome)
        await draft.pieces.apply(tx, self._process.id)
        if not events:
            return None
        return await self._droids.append(tx, self._session.id, events, self._droids.processes.clock.now())

    def _told(self, draft: _Draft, last: int | None) -> None:
        """After the commit: wake whoever waits for it."""
        if last is not None:
            self._droids.after(self._session.id, last)
        for done in draft.told:
            if not done.done():
                done.set_result(None)
        if draft.ended is not None:
            self._session.turn_is_over(draft.ended.turn, draft.ended.outcome)
        if self._stored.stage == "ready" and not self._opened.done():
            self._opened.set_result(None)

    # -- commands -----------------------------------------------------------------------------------------------

    def _obey(self, draft: _Draft, command: _Command) -> None:
        if command.done.done():
            return  # whoever asked has gone
        if command.name == "prompt" and draft.conversation.turn is not None:
            command.done.set_exception(Conflict("a turn is open already"))
            return
        draft.told.append(command.done)
        match command.name:
            case "open":
                self._ask_initialize(draft)
            case "prompt":
                self._begin(draft, command.turn, command.text)
            case "cancel":
                self._cancel(draft, "asked")
            case "stop":
                if not self._stopping:
                    self._stopping = True
                    self._process.close_input()
                    self._set_clock("term", self._patience.stop_s)
                    if self._process.link is None:
                        self._process.lose("the droid was stopped while its keeper was away")

    def _ask(self, draft: _Draft, purpose: str, method: str, params: object, *, secret: bool = False) -> None:
        requests, line = draft.conversation.requests.ask(purpose, method, params)
        draft.put(requests=requests)
        draft.inputs.append(Input(data=line, secret=secret))

    def _ask_initialize(self, draft: _Draft) -> None:
        """With no file system and no terminal of ours: what the agent needs is in its box."""
        capabilities = {"fs": {"readTextFile": False, "writeTextFile": False}, "terminal": False}
        info = {"name": "oubliette", "version": "1"}
        self._ask(
            draft,
            "initialize",
            "initialize",
            {"protocolVersion": ACP_VERSION, "clientCapabilities": capabilities, "clientInfo": info},
        )
        self._set_clock("opening", self._patience.opening_s)

    def _begin(self, draft: _Draft, turn: int, text: str) -> None:
        if draft.conversation.stage != "ready":
            draft.put(waiting=Waiting(turn, text), last_turn=turn)
            return
        draft.events += self._speech.finish_message(None, draft.pieces)
        self._speech.begin_turn(draft.pieces)
        draft.put(turn=turn, last_turn=turn, waiting=None, cancelled=None, worked=False, calls={})
        prompt = [{"type": "text", "text": text}]
        self._ask(draft, "prompt", "session/prompt", {"sessionId": draft.conversation.agent_session, "prompt": prompt})
        self._set_clock("silence", self._patience.silence_s)

    def _cancel(self, draft: _Draft, why: str) -> None:
        waiting = draft.conversation.waiting
        if waiting is not None:
            draft.put(waiting=None)
            draft.ended = _Ended(turn=waiting.turn, outcome=Outcome(stop_reason="cancelled", text=""))
        elif draft.conversation.turn is not None and draft.conversation.cancelled is None:
            draft.put(cancelled=why)
            told = {"sessionId": draft.conversation.agent_session}
            draft.inputs.append(Input(data=jsonrpc.notification("session/cancel", told)))
            self._clocks.pop("silence", None)
            self._set_clock("cancel", self._patience.cancel_s)

    # -- deadlines ----------------------------------------------------------------------------------------------

    def _set_clock(self, name: str, seconds: float) -> None:
        self._clocks[name] = _now() + seconds

    def _look_at_clocks(self, draft: _Draft) -> None:
        now = _now()
        for name in [name for name, due in self._clocks.items() if due <= now]:
            del self._clocks[name]
            self._ring(draft, name)

    def _ring(self, draft: _Draft, name: str) -> None:
        """A deadline has passed."""
        match name:
            case "silence" if self._droids.waits(self._session.id):
                self._set_clock("silence", self._patience.silence_s)
            case "silence":
                self._cancel(draft, "silence")
            case "cancel":
                self._kill("turn_stuck", f"the droid did not stop its turn within {self._patience.cancel_s:g} s")
            case "opening":
                waited = {"session": draft.conversation.method, "mode": "session/set_mode"}
                method = waited.get(draft.conversation.stage, "initialize")
                self._kill("droid_failed", f"the droid did not answer {method} within {self._patience.opening_s:g} s")
            case "term":
                self._droids.processes.spawn(self._process.signal("TERM"))
                self._set_clock("end", self._patience.stop_s)
            case "end":
                self._kill("stopped", "the droid was stopped")
            case _:
                self._process.lose("the droid's process could not be killed")

    def _kill(self, kind: str, message: str) -> None:
        """Kill the process group; what it did not say by then is not waited for."""
        if self._failure is None:
            self._failure = (kind, message)
        self._clocks = {"killed": _now() + self._patience.kill_s}
        self._droids.processes.spawn(self._process.signal("KILL"))

    # -- what the agent says ------------------------------------------------------------------------------------

    def _take(self, draft: _Draft, line: Line) -> None:
        """Understand one line."""
        draft.upto = line.end
        if "silence" in self._clocks:
            self._set_clock("silence", self._patience.silence_s)
        if line.data is None:
            draft.warn("line_too_long", "the agent sent a line over 8 MiB, which was passed over")
            return
        data = line.data
        if self._secret is not None and self._secret in data:
            data = data.replace(self._secret, REDACTED)
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

    def _updated(self, draft: _Draft, update: object) -> None:
        conversation = draft.conversation
        if conversation.is_replaying:
            return
        turn = conversation.turn
        meaning = translation.translate(update, turn, conversation.calls)
        if meaning.chunk is not None:
            if draft.gathering_since is None:
                draft.gathering_since = _now()
            draft.events += self._speech.hear(meaning.chunk, turn, draft.pieces)
            if turn is None:
                draft.events += self._speech.finish_message(None, draft.pieces)
        if meaning.begins_call:
            draft.events += self._speech.finish_message(turn, draft.pieces)
        elif meaning.events:
            draft.events += self._speech.flush(turn, draft.pieces)
        draft.events += meaning.events
        if turn is not None:
            if meaning.calls is not None:
                draft.put(calls=meaning.calls)
            if not conversation.worked and (meaning.chunk is not None or meaning.calls is not None):
                draft.put(worked=True)

    def _asked(self, draft: _Draft, request: Request) -> None:
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
        draft.events += self._speech.flush(draft.conversation.turn, draft.pieces)
        draft.events.append(
            PermissionDecided(
                tool_call_id=call_id if isinstance(call_id, str) else None,
                tool_name=title if isinstance(title, str) else None,
                decision=decision.word,
            )
        )

    def _answered(self, draft: _Draft, answer: Answer) -> None:
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
                    self._kill("droid_failed", message)
                else:
                    self._ready(draft)

    # -- opening ------------------------------------------------------------------------------------------------

    def _initialized(self, draft: _Draft, answer: Answer, result: Mapping[str, Any]) -> None:
        if answer.failure is not None:
            self._kill("droid_failed", f"the agent refused to start: {answer.failure}")
            return
        version = result.get("protocolVersion")
        if version != ACP_VERSION:
            self._kill("droid_failed", f"the agent speaks ACP {version!r}, not {ACP_VERSION}")
            return
        method = "session/new"
        if draft.conversation.continues is not None:
            capabilities = peer.as_object(result.get("agentCapabilities")) or {}
            more = peer.as_object(capabilities.get("sessionCapabilities")) or {}
            if self._profile.resume == "resume" and more.get("resume") is not None:
                method = "session/resume"
            elif capabilities.get("loadSession") is True:
                method = "session/load"
        self._open_session(draft, method)

    def _open_session(self, draft: _Draft, method: str) -> None:
        places = self._places
        env = [{"name": "OUBLIETTE_SOCKET", "value": places.socket}]
        if draft.conversation.needs_key:
            if self._api_key is None:
                message = "the server stopped while the droid was starting, and keys are never stored: give it again"
                self._kill("needs_key", message)
                return
            env.append({"name": "OUBLIETTE_API_KEY", "value": self._api_key})
        server = {
            "name": "oubliette",
            "command": places.python,
            "args": ["-I", "-S", places.program, "client"],
            "env": env,
        }
        params: dict[str, Any] = {"cwd": places.workspace, "mcpServers": [server]}
        if method != "session/new":
            params["sessionId"] = draft.conversation.continues
        draft.put(stage="session", method=method)
        self._ask(draft, "session", method, params, secret=draft.conversation.needs_key)
        self._set_clock("opening", self._patience.opening_s)

    def _session_opened(self, draft: _Draft, answer: Answer, result: Mapping[str, Any]) -> None:
        method = draft.conversation.method
        if answer.failure is not None:
            if method == "session/new":
                self._kill("droid_failed", f"the agent did not open a session: {answer.failure}")
                return
            draft.warn(
                "conversation_lost", f"the agent could not go on where it was ({answer.failure}): it starts anew"
            )
            self._open_session(draft, "session/new")
            return
        agent_session = result.get("sessionId") if method == "session/new" else draft.conversation.continues
        if not isinstance(agent_session, str):
            self._kill("droid_failed", f"the agent answered {method} without a session id")
            return
        draft.put(agent_session=agent_session)
        if self._profile.mode is None:
            self._ready(draft)
            return
        draft.put(stage="mode")
        self._ask(draft, "mode", "session/set_mode", {"sessionId": agent_session, "modeId": self._profile.mode})
        self._set_clock("opening", self._patience.opening_s)

    def _ready(self, draft: _Draft) -> None:
        self._clocks.pop("opening", None)
        draft.put(stage="ready")
        waiting = draft.conversation.waiting
        if waiting is not None:
            self._begin(draft, waiting.turn, waiting.text)

    # -- the end of a turn, and of it all -----------------------------------------------------------------------

    def _turn_answered(self, draft: _Draft, answer: Answer, result: Mapping[str, Any]) -> None:
        conversation = draft.conversation
        turn = conversation.turn
        assert turn is not None
        self._clocks.pop("silence", None)
        self._clocks.pop("cancel", None)
        draft.events += self._speech.finish_message(turn, draft.pieces)
        outcome = Outcome(stop_reason="error", text=self._speech.text)
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
        self._speech.begin_turn(draft.pieces)
        draft.put(turn=None, cancelled=None, calls={})
        draft.ended = _Ended(turn=turn, outcome=outcome)

    def _cancelled(self, why: str, outcome: Outcome) -> Outcome:
        """Agents word it in many ways; one that had finished when it was asked to stop has finished."""
        if why == "silence":
            message = f"the droid gave no sign of life for {self._patience.silence_s:g} s: its turn was cancelled"
            return replace(outcome, stop_reason="cancelled", error=message, error_kind="turn_silent")
        if outcome.error is not None:
            return replace(outcome, stop_reason="cancelled", error=None, error_kind=None)
        return outcome

    async def _end(self) -> None:
        """The process is gone, or nothing more is to be had from it."""
        process = self._process
        if self._failure is not None:
            kind, message = self._failure
        elif self._stopping:
            kind, message = "stopped", "the droid was stopped"
        elif process.lost is not None:
            kind, message = process.lost_kind, process.lost
        else:
            kind, message = "droid_failed", f"the droid's process ended by itself ({process.exit}){self._last_words()}"
        if process.exit is None:
            self._droids.processes.spawn(process.signal("KILL"))
        await self._finish(kind, message)

    def _last_words(self) -> str:
        words = bytes(self._process.last_words)
        if self._secret is not None:
            words = words.replace(self._secret, REDACTED)
        shown = words.decode("utf-8", "replace").strip()
        return f"; its last words: {shown[-1000:]}" if shown else ""

    async def _finish(self, kind: str, message: str) -> None:
        """Store the end, then tell everybody."""
        draft = self._draft or _Draft(conversation=self._stored, upto=self._process.output.start)
        conversation = draft.conversation
        turn = conversation.turn
        if turn is None and conversation.waiting is not None:
            turn = conversation.waiting.turn
        if draft.ended is None:
            draft.events += self._speech.finish_message(conversation.turn, draft.pieces)
            if turn is not None:
                draft.ended = _Ended(turn=turn, outcome=self._last_outcome(conversation, kind, message))
        last = await self._process.finish(lambda tx: self._write(tx, draft))
        if last is not None:
            self._droids.after(self._session.id, last)
        if draft.ended is not None:
            self._session.turn_is_over(draft.ended.turn, draft.ended.outcome)
        if not self._starting and not self._stopping:
            self._session.droid_ended(message)
        self._let_go(message, kind)

    def _last_outcome(self, conversation: Conversation, kind: str, message: str) -> Outcome:
        stop_reason = "cancelled" if kind == "stopped" or conversation.cancelled is not None else "error"
        outcome = Outcome(stop_reason=stop_reason, text=self._speech.text)
        if kind == "stopped":
            return outcome
        if conversation.cancelled == "silence":
            message = f"the droid gave no sign of life for {self._patience.silence_s:g} s, and {message}"
        return replace(outcome, error=message, error_kind=kind)

    def _let_go(self, message: str, kind: str = "droid_failed") -> None:
        """Nobody waits for this droid any more. Twice is no harm."""
        if self._over.is_set():
            return
        self._over.set()
        draft, self._draft = self._draft, None
        waiting = [command.done for command in self._commands] + (draft.told if draft is not None else [])
        self._commands.clear()
        failure = _failed(kind, message)
        for done in waiting:
            if not done.done():
                done.set_exception(failure)
        if not self._opened.done():
            self._opened.set_exception(failure)
            self._opened.exception()  # it may be that nobody waits for it


def _filled(word: str, known: Mapping[str, str]) -> str:
    for name, value in known.items():
        word = word.replace("{" + name + "}", value)
    return word


def _failed(kind: str, message: str) -> DroidFailed:
    """The word for programs is `droid_failed`; the finer one is a detail of it."""
    return DroidFailed(message, reason=kind)


def _counts(used: Usage) -> dict[str, int]:
    counts = {"input_tokens": used.input_tokens, "output_tokens": used.output_tokens, "total_tokens": used.total_tokens}
    return {name: count for name, count in counts.items() if count is not None}


def _now() -> float:
    return asyncio.get_running_loop().time()
