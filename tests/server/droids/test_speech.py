"""Chunks into deltas, messages and a turn's text."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from oubliette.server.droids import speech
from oubliette.server.droids.speech import Pieces, Speech
from oubliette.server.droids.translation import Chunk
from oubliette.server.storage.sqlite import SqliteDatabase
from oubliette.wire.events import Delta, Event, Message


def texts(events: list[Event], kind: type[Delta] | type[Message]) -> list[tuple[str, str]]:
    return [(event.role, event.text) for event in events if isinstance(event, kind)]  # type: ignore[attr-defined]


@given(st.lists(st.tuples(st.sampled_from(["assistant", "thought"]), st.text(max_size=6000)), max_size=12))
def test_nothing_of_what_was_said_is_lost_or_moved(chunks: list[tuple[str, str]]) -> None:
    one = Speech()
    pieces = Pieces()
    events: list[Event] = []
    for role, text in chunks:
        events += one.hear(Chunk(role="thought" if role == "thought" else "assistant", text=text), 1, pieces)
    events += one.finish_message(1, pieces)
    said = "".join(text for _, text in chunks)
    assert "".join(text for _, text in texts(events, Delta)) == said
    assert "".join(text for _, text in texts(events, Message)) == said
    spoken = "".join(text for role, text in chunks if role == "assistant")
    assert one.text.replace("\n\n", "") == spoken.replace("\n\n", "")


def test_a_new_message_id_begins_a_new_message() -> None:
    one = Speech()
    pieces = Pieces()
    events = [
        event
        for message, text in (("a", "one "), ("a", "more"), ("b", "two"))
        for event in one.hear(Chunk(role="assistant", text=text, message_id=message), 1, pieces)
    ]
    events += one.finish_message(1, pieces)
    assert texts(events, Message) == [("assistant", "one more"), ("assistant", "two")]
    assert one.text == "one more\n\ntwo"


def test_a_key_that_comes_chunk_by_chunk_is_in_no_event_and_no_piece() -> None:
    key = "oub_" + "ab" * 32
    one = Speech()
    pieces = Pieces()
    events: list[Event] = []
    for part in ("the key is o", "ub_ab", key[6:40], key[40:], "!"):
        events += one.hear(Chunk(role="assistant", text=part), 1, pieces)
        events += one.flush(1, pieces)
    events += one.finish_message(1, pieces)
    assert "".join(text for _, text in texts(events, Delta)) == "the key is o[redacted…]!"
    assert one.text == "the key is o[redacted…]!"
    assert "ab" not in str(pieces.added)


def test_a_very_long_turn_is_cut_in_its_text_and_whole_in_the_log() -> None:
    one = Speech()
    pieces = Pieces()
    events: list[Event] = []
    for _ in range(40):
        events += one.hear(Chunk(role="assistant", text="x" * 100_000), 1, pieces)
    events += one.finish_message(1, pieces)
    assert sum(len(text) for _, text in texts(events, Message)) == 4_000_000
    assert one.text.endswith(speech.CUT)
    assert len(one.text) < 1_200_000


async def test_a_speech_goes_on_where_another_server_left_it(tmp_path: Path) -> None:
    database = SqliteDatabase(tmp_path / "database")
    one = Speech()
    for chunk in (
        Chunk(role="assistant", text="first"),
        Chunk(role="thought", text="hm, "),
        Chunk(role="thought", text="yes"),
        Chunk(role="assistant", text="sec"),
        Chunk(role="assistant", text="ond"),
    ):
        pieces = Pieces()
        one.hear(chunk, 1, pieces)
        one.flush(1, pieces)
        await database.write(lambda tx, now=pieces: now.apply(tx, "p"))
        one = await database.read(lambda tx: Speech.restored(tx, "p"))
    pieces = Pieces()
    assert texts(one.finish_message(1, pieces), Message) == [("assistant", "second")]
    assert one.text == "first\n\nsecond"
    one.begin_turn(pieces)
    await database.write(lambda tx: pieces.apply(tx, "p"))
    assert await database.read(lambda tx: tx.all("SELECT * FROM process_pieces")) == []
    assert one.text == ""
    await database.close()
