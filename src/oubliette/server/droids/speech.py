"""The words of an open turn: chunks gathered into deltas, deltas joined into messages, messages into the turn's text.

What is gathered and not yet a delta is not acknowledged either. What is a delta is stored as a piece beside the
process, so that a server which starts in mid-sentence knows how it began. A key that was said in parts ends here.
"""

from dataclasses import dataclass, field

from oubliette.server.droids import redaction
from oubliette.server.droids.translation import Chunk
from oubliette.server.storage.database import Tx
from oubliette.wire.events import Delta, Event, Message

DELTA_CHARS = 4096
MESSAGE_CHARS_MAX = 1024 * 1024  # a longer message is logged in parts
TURN_CHARS_MAX = 1024 * 1024  # a turn's text beyond this is in the log alone
CUT = "\n[the rest is in the session's events]"

_ROLES = ("assistant", "thought")
_SAID = "said"


@dataclass(slots=True)
class Pieces:
    """Changes of the stored pieces, collected for one transaction."""

    dropped: set[str] = field(default_factory=set[str])
    added: list[tuple[str, int, str]] = field(default_factory=list[tuple[str, int, str]])

    def drop(self, *kinds: str) -> None:
        self.dropped.update(kinds)
        self.added = [piece for piece in self.added if piece[0] not in kinds]

    async def apply(self, tx: Tx, process_id: str) -> None:
        for kind in sorted(self.dropped):
            await tx.run("DELETE FROM process_pieces WHERE process_id = ? AND kind = ?", process_id, kind)
        for kind, start, text in self.added:
            await tx.run(
                "INSERT INTO process_pieces (process_id, kind, start, data) VALUES (?, ?, ?, ?)",
                process_id,
                kind,
                start,
                text.encode("utf-8", "replace"),
            )


class Speech:
    def __init__(self) -> None:
        self._gathered: list[str] = []
        self._gathered_chars = 0
        self._role: str | None = None
        self._message_id: str | None = None
        self._open: list[str] = []
        self._open_chars = 0
        self._said: list[str] = []
        self._said_chars = 0

    @classmethod
    async def restored(cls, tx: Tx, process_id: str) -> "Speech":
        speech = cls()
        rows = await tx.all(
            "SELECT kind, data FROM process_pieces WHERE process_id = ? AND kind IN ('said', 'assistant', 'thought')"
            " ORDER BY start",
            process_id,
        )
        for kind, data in rows:
            text = bytes(data).decode()
            if kind == _SAID:
                speech._said.append(text)
                speech._said_chars += len(text)
            else:
                speech._role = kind
                speech._open.append(text)
                speech._open_chars += len(text)
        return speech

    @property
    def gathered_chars(self) -> int:
        return self._gathered_chars

    @property
    def text(self) -> str:
        """The assistant's words in this turn so far."""
        return "\n\n".join(self._said)

    def hear(self, chunk: Chunk, turn: int | None, pieces: Pieces) -> list[Event]:
        """A chunk came; what became whole by it."""
        events: list[Event] = []
        is_new = chunk.message_id is not None and self._message_id is not None and chunk.message_id != self._message_id
        if chunk.role != self._role or is_new or self._open_chars >= MESSAGE_CHARS_MAX:
            events += self.finish_message(turn, pieces)
        self._role = chunk.role
        self._message_id = chunk.message_id or self._message_id
        self._gathered.append(chunk.text)
        self._gathered_chars += len(chunk.text)
        if self._gathered_chars >= DELTA_CHARS:
            events += self.flush(turn, pieces)
        return events

    def flush(self, turn: int | None, pieces: Pieces) -> list[Event]:
        """What was gathered becomes a delta."""
        seen = redaction.SEEN_CHARS
        before = "".join(piece[-seen:] for piece in self._open[-seen:])
        text = redaction.spoken(before, "".join(self._gathered))
        self._gathered, self._gathered_chars = [], 0
        if not text or self._role is None:
            return []
        self._open.append(text)
        self._open_chars += len(text)
        pieces.added.append((self._role, len(self._open), text))
        return [Delta(text=text, role="thought" if self._role == "thought" else "assistant", turn=turn)]

    def finish_message(self, turn: int | None, pieces: Pieces) -> list[Event]:
        """The message that is open is complete."""
        events = self.flush(turn, pieces)
        text, role = "".join(self._open), self._role
        self._open, self._open_chars, self._role, self._message_id = [], 0, None, None
        if not text or role is None:
            return events
        pieces.drop(*_ROLES)
        events.append(Message(text=text, role="thought" if role == "thought" else "assistant", turn=turn))
        if role == "assistant" and self._said_chars < TURN_CHARS_MAX:
            room = TURN_CHARS_MAX - self._said_chars
            kept = text if len(text) <= room else text[:room] + CUT
            self._said.append(kept)
            self._said_chars += len(text)
            pieces.added.append((_SAID, len(self._said), kept))
        return events

    def begin_turn(self, pieces: Pieces) -> None:
        """Nothing was said yet; an open message must have been finished."""
        self._said, self._said_chars = [], 0
        pieces.drop(_SAID, *_ROLES)
