"""The stored conversation."""

from oubliette.server.droids.conversation import Conversation, Waiting, restored, stored
from oubliette.server.droids.peer import OpenRequests
from oubliette.server.droids.translation import Call


def test_a_conversation_is_stored_and_restored_whole_under_a_new_epoch() -> None:
    requests, _ = OpenRequests(1).ask("prompt", "session/prompt", {})
    before = Conversation(
        requests=requests,
        stage="ready",
        agent_session="s",
        turn=4,
        last_turn=4,
        waiting=Waiting(5, "later"),
        cancelled="asked",
        worked=True,
        calls={"t": Call(name="echo", arguments="00")},
    )
    after = restored(stored(before), 2)
    assert after.requests == OpenRequests(2, requests.last, requests.purposes)
    assert restored(stored(after), 1) == before


def test_only_a_load_replays() -> None:
    waiting = Conversation(requests=OpenRequests(1), stage="session")
    assert not waiting.is_replaying
    assert Conversation(requests=OpenRequests(1), stage="session", method="session/load").is_replaying
    assert not Conversation(requests=OpenRequests(1), stage="ready", method="session/load").is_replaying
