"""The driver for agents that speak ACP, over the numbered streams of a process that the keeper holds.

One task per droid takes what comes, in order: lines of the agent, commands of the session, deadlines. What a line
means is decided in memory, collected in a `Draft`, and stored in one unit with the offset that acknowledges it.
Chunks of text alone wait for 100 ms or 4 KiB; everything else is stored at once. A server that dies at any point
leaves either both the line and its meaning, or neither.

An agent that does not answer while it is being opened (30 s each for `initialize`, the session, its mode), that does
not stop when its turn is cancelled (5 s), or that asks and does not read what it is answered, has its process group
killed. A turn is cancelled when it gives no sign of life for too long, and when it takes too long in all (two
settings). `end_turn` is not taken for success, and an unknown stop reason ends the turn under that word.
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from oubliette.server.droids import conversation as conversations
from oubliette.server.droids.conversation import Conversation
from oubliette.server.droids.dialogue import Dialogue, Draft, Ended, Patience, Places, limit_passed, now
from oubliette.server.droids.driver import LaunchProfile, Outcome, Session
from oubliette.server.droids.peer import OpenRequests
from oubliette.server.droids.processes import Process, Processes, TakenOver
from oubliette.server.droids.speech import Speech
from oubliette.server.errors import Conflict, DroidFailed, StorageFailed
from oubliette.server.storage.database import Row, Tx
from oubliette.wire.events import Event

logger = logging.getLogger(__name__)

GATHER_S = 0.1
STORAGE_TRIES = 30
STORAGE_RETRY_S = 1.0
LOOK_EVERY_S = 1.0
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

Append = Callable[[Tx, str, Sequence[Event], float], Awaitable[int]]
After = Callable[[str, int], None]


class DroidBox(Protocol):
    """What a driver needs of the box that its agent runs in."""

    @property
    def id(self) -> str: ...
    @property
    def places(self) -> Places: ...


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
    ) -> None:
        """`profile` is asked with a session's autonomy."""
        self.processes = processes
        self.append = append
        self.after = after
        self.epoch = epoch
        self.profile = profile
        self.patience = patience or Patience()

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
        # A key is never stored: an agent that was not given it yet can only be started anew, with one.
        is_keyless = conversation.needs_key and conversation.stage == "initialize"
        if (process.lost is not None or is_keyless) and conversation.turn is None and conversation.waiting is None:
            kind = process.lost_kind if process.lost is not None else "needs_key"
            logger.warning("a droid could not go on", extra={"process_id": process.id, "kind": kind})
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
        self._stored = conversation
        self._patience = droids.patience
        clock = droids.processes.clock
        self._dialogue = Dialogue(session, profile, places, speech, droids.patience, clock, api_key)
        self._clocks = self._dialogue.clocks
        self._commands: deque[_Command] = deque()
        self._draft: Draft | None = None
        self._killing = False
        self._heard_to = process.output.end
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

    def touch(self) -> None:
        """A sign of life that came by another way than the agent's output."""
        if self._clocks.is_set("silence"):
            self._clocks.set("silence", self._patience.silence_s)

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
            self._clocks.set("opening", self._patience.opening_s)
            if self._stored.stage == "initialize" and not self._stored.requests.is_open("initialize"):
                self._commands.append(_Command(name="open", done=asyncio.get_running_loop().create_future()))
        self._dialogue.watch(self._stored)
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
            draft = self._draft = Draft(conversation=self._stored, upto=process.output.start)
        draft.upto = max(draft.upto, process.output.start)  # a piece of a long line may have been stored
        if process.output.end > self._heard_to:
            # Any byte is a sign of life, the beginning of a long line too.
            self._heard_to = process.output.end
            self.touch()
        lines = process.output.lines(draft.upto)
        for line in lines:
            self._dialogue.take(draft, line)
            if draft.ended is not None:
                break
        while self._commands and draft.ended is None:
            self._obey(draft, self._commands.popleft())
        if not process.has_room(draft.inputs):
            self._dialogue.fail("input_unread", "the droid does not read: too much input waits for it")
        self._look_at_clocks(draft)
        if self._dialogue.failure is not None:
            draft.inputs.clear()  # nothing is said any more to one that is killed
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

    def _is_due(self, draft: Draft) -> bool:
        if draft.must or draft.events or draft.inputs or draft.ended is not None or draft.told:
            return True
        since = draft.gathering_since
        if since is not None:
            return now() >= since + GATHER_S or self._process.exit is not None
        return draft.upto > self._process.output.start

    async def _wait(self) -> None:
        """Until something changed, or the next deadline."""
        deadlines = [self._clocks.next]
        if self._draft is not None and self._draft.gathering_since is not None:
            deadlines.append(self._draft.gathering_since + GATHER_S)
        if self._process.link is None:
            deadlines.append(now() + LOOK_EVERY_S)
        try:
            async with asyncio.timeout_at(min((due for due in deadlines if due is not None), default=None)):
                await self._process.changed.wait()
        except TimeoutError:
            if self._process.link is None and await self._process.was_ended():
                self._let_go("the droid's box has ended")

    async def _commit(self, draft: Draft) -> None:
        """Store a draft; a database that does not take it is asked again."""
        draft.events += self._dialogue.speech.flush(draft.conversation.turn, draft.pieces)
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

    async def _write(self, tx: Tx, draft: Draft) -> int | None:
        """Inside the transaction."""
        events = list(draft.events)
        if draft.ended is not None:
            events += await self._session.turn_ended(tx, draft.ended.turn, draft.ended.outcome)
        await draft.pieces.apply(tx, self._process.id)
        if not events:
            return None
        return await self._droids.append(tx, self._session.id, events, self._droids.processes.clock.now())

    def _told(self, draft: Draft, last: int | None) -> None:
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

    def _obey(self, draft: Draft, command: _Command) -> None:
        if command.done.done():
            return  # whoever asked has gone
        if command.name == "prompt" and draft.conversation.turn is not None:
            command.done.set_exception(Conflict("a turn is open already"))
            return
        draft.told.append(command.done)
        match command.name:
            case "open":
                self._dialogue.open(draft)
            case "prompt":
                self._dialogue.begin(draft, command.turn, command.text)
            case "cancel":
                self._dialogue.cancel(draft, "asked")
            case "stop":
                if not self._stopping:
                    self._stopping = True
                    self._process.close_input()
                    self._clocks.set("term", self._patience.stop_s)
                    if self._process.link is None:
                        self._process.lose("the droid was stopped while its keeper was away")

    # -- deadlines ----------------------------------------------------------------------------------------------

    def _look_at_clocks(self, draft: Draft) -> None:
        for name in self._clocks.rung():
            self._ring(draft, name)
        if self._dialogue.failure is not None and not self._killing:
            self._kill()

    def _ring(self, draft: Draft, name: str) -> None:
        """A deadline has passed."""
        match name:
            case "silence":
                self._dialogue.cancel(draft, "silence")
            case "turn":
                self._dialogue.cancel(draft, "too_long")
            case "cancel":
                self._dialogue.fail(
                    "turn_stuck", f"the droid did not stop its turn within {self._patience.cancel_s:g} s"
                )
            case "opening":
                waited = {"session": draft.conversation.method, "mode": "session/set_mode"}
                method = waited.get(draft.conversation.stage, "initialize")
                self._dialogue.fail(
                    "droid_failed", f"the droid did not answer {method} within {self._patience.opening_s:g} s"
                )
            case "term":
                self._droids.processes.spawn(self._process.signal("TERM"))
                self._clocks.set("end", self._patience.stop_s)
            case "end":
                self._dialogue.fail("stopped", "the droid was stopped")
            case _:
                self._process.lose("the droid's process could not be killed")

    def _kill(self) -> None:
        """Kill the process group; what it did not say by then is not waited for."""
        self._killing = True
        self._clocks.only("killed", self._patience.kill_s)
        self._droids.processes.spawn(self._process.signal("KILL"))

    # -- the end of it all --------------------------------------------------------------------------------------

    async def _end(self) -> None:
        """The process is gone, or nothing more is to be had from it."""
        process = self._process
        if self._dialogue.failure is not None:
            kind, message = self._dialogue.failure
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
        shown = self._dialogue.redacted(bytes(self._process.last_words)).decode("utf-8", "replace").strip()
        return f"; its last words: {shown[-1000:]}" if shown else ""

    async def _finish(self, kind: str, message: str) -> None:
        """Store the end, then tell everybody."""
        draft = self._draft or Draft(conversation=self._stored, upto=self._process.output.start)
        conversation = draft.conversation
        turn = conversation.turn
        if turn is None and conversation.waiting is not None:
            turn = conversation.waiting.turn
        if draft.ended is None:
            draft.events += self._dialogue.speech.finish_message(conversation.turn, draft.pieces)
            if turn is not None:
                draft.ended = Ended(turn=turn, outcome=self._last_outcome(conversation, kind, message))
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
        outcome = Outcome(stop_reason=stop_reason, text=self._dialogue.speech.text)
        if kind == "stopped":
            return outcome
        passed = limit_passed(conversation.cancelled, self._patience)
        if passed is not None:
            message = f"{passed[1]}, and {message}"
        return replace(outcome, error=message, error_kind=kind)

    def _let_go(self, message: str, kind: str = "droid_failed") -> None:
        """Nobody waits for this droid any more. Twice is no harm."""
        if self._over.is_set():
            return
        self._over.set()
        self._process.abandon()
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
