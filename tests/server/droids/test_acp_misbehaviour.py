"""The driver with agents that break every rule: each costs a clear error at most, never a hang or a lost word."""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from oubliette.server.droids import processes
from oubliette.server.droids.acp import AcpDroid
from oubliette.server.droids.dialogue import Patience
from oubliette.server.droids.driver import LaunchProfile, Outcome
from oubliette.server.droids.processes import UNSENT_BYTES_MAX, UNSENT_MAX
from oubliette.server.errors import BoxFailed, DroidFailed
from tests.kit import acp_agent, leaks
from tests.kit.droid_world import Server, World, serving, world

QUICK = Patience(opening_s=0.5, cancel_s=0.3, silence_s=0.5, stop_s=0.3, kill_s=5)
DONE = {"act": "answer", "result": {"stopReason": "end_turn"}}


def agent(way: str = "", *, mode: str | None = None, resume: str | None = None, **env: str) -> LaunchProfile:
    return LaunchProfile(
        name="bad",
        argv=(sys.executable, "-I", "-S", acp_agent.__file__, way),
        env=env,
        mode=mode,
        resume=resume,
    )


@asynccontextmanager
async def started(
    folder: Path, way: str = "", patience: Patience = QUICK
) -> AsyncGenerator[tuple[World, Server, AcpDroid]]:
    async with asyncio.timeout(40), world(folder, agent(way), patience) as made, serving(made) as server:
        yield made, server, await server.start()


async def turn(server: Server, droid: AcpDroid, *items: Any, number: int = 1) -> Outcome:
    return await server.turn(droid, json.dumps(items), number)


async def warnings(made: World) -> list[tuple[str, str]]:
    return [(event["kind"], event["message"]) for event in await made.log() if event["type"] == "warning"]


@pytest.mark.parametrize(
    "way, message",
    [
        ("dies-at-start", r"ended by itself \(exit code 7\); its last words: no licence found"),
        ("silent-at initialize", "did not answer initialize within 0.5 s"),
        ("silent-at session/new", "did not answer session/new within 0.5 s"),
        ("silent-at session/set_mode", "did not answer session/set_mode within 0.5 s"),
        ("refuses initialize", "refused to start: Authentication required: log in"),
        ("refuses session/new", "did not open a session: Authentication required: log in"),
        ("refuses session/set_mode", "refused its mode full: Authentication required: log in"),
        ("from-the-future", "speaks ACP 2, not 1"),
        ("nameless", "answered session/new without a session id"),
    ],
)
async def test_an_agent_that_does_not_open_is_an_error_and_leaves_no_process(
    tmp_path: Path, way: str, message: str
) -> None:
    async with asyncio.timeout(20), world(tmp_path, agent(way, mode="full"), QUICK) as made, serving(made) as server:
        with pytest.raises(DroidFailed, match=message):
            await server.start()
        assert made.keeper.running == []
        assert server.session.losses == []
        assert await made.rows("SELECT state FROM processes") == [("ended",)]
        assert await made.rows("SELECT * FROM process_input") == []


async def test_a_program_that_cannot_be_started_is_an_error(tmp_path: Path) -> None:
    missing = LaunchProfile(name="missing", argv=("/nowhere/agent",))
    async with asyncio.timeout(20), world(tmp_path, missing, QUICK) as made, serving(made) as server:
        with pytest.raises(BoxFailed, match="/nowhere/agent"):
            await server.start()
        assert await made.rows("SELECT state FROM processes") == [("ended",)]


async def test_a_key_does_not_leak_through_what_a_dying_agent_prints(tmp_path: Path) -> None:
    key = "oub_" + "cd" * 32
    dying = agent("dies-at-start", KEY=key)
    async with asyncio.timeout(20), world(tmp_path, dying, QUICK) as made, serving(made) as server:
        with pytest.raises(DroidFailed) as failure:
            await server.start(api_key=key)
    assert key not in str(failure.value)
    assert "[redacted]" in str(failure.value)


async def test_a_key_is_in_no_file_while_its_line_is_put_together(tmp_path: Path) -> None:
    key = "oub_" + "cd" * 32
    telling = agent(KEY=key)
    async with asyncio.timeout(20), world(tmp_path, telling, Patience(silence_s=20)) as made, serving(made) as server:
        droid = await server.start()
        await server.begin(1, "")
        await droid.prompt(1, json.dumps([{"act": "long-key", "n": 300_000}]))
        while sum(len(data) for (data,) in await made.rows("SELECT data FROM process_pieces")) < 350_000:
            await asyncio.sleep(0.01)
        (mask,) = await made.rows(
            "SELECT count(*) FROM process_pieces WHERE instr(data, CAST('[redacted]' AS BLOB)) > 0"
        )
        assert mask == (1,)
        assert leaks.in_files({"key": key}, [tmp_path]) == []


async def test_noise_is_shown_and_hurts_nothing(tmp_path: Path) -> None:
    async with started(tmp_path) as (made, server, droid):
        outcome = await turn(
            server, droid, "npm WARN old", "[1]", '"text"', "", "{}", {"act": "say", "text": "ok"}, DONE
        )
        assert (outcome.stop_reason, outcome.text) == ("end_turn", "ok")
        shown = await warnings(made)
        assert [kind for kind, _ in shown] == ["noise"] * 4
        assert "npm WARN old" in shown[0][1]


async def test_a_line_of_three_megabytes_passes_whole(tmp_path: Path) -> None:
    async with started(tmp_path) as (made, server, droid):
        outcome = await turn(server, droid, {"act": "long-say", "n": 3_000_000}, DONE)
        assert outcome.stop_reason == "end_turn"
        (message,) = (event for event in await made.log() if event["type"] == "message")
        assert message["text"] == "y" * 3_000_000
        assert outcome.text.startswith("y" * 1000)
        assert len(outcome.text) < 1_100_000


async def test_a_line_over_the_bound_is_passed_over_and_told(tmp_path: Path) -> None:
    async with started(tmp_path) as (made, server, droid):
        outcome = await turn(server, droid, {"act": "long", "n": 20_000_000}, {"act": "say", "text": "after"}, DONE)
        assert (outcome.stop_reason, outcome.text) == ("end_turn", "after")
        assert [kind for kind, _ in await warnings(made)] == ["line_too_long"]


async def test_a_flood_of_updates_is_stored_in_order(tmp_path: Path) -> None:
    async with started(tmp_path) as (made, server, droid):
        outcome = await turn(server, droid, {"act": "flood", "n": 30_000}, DONE)
        assert outcome.text == "".join(f"{number} " for number in range(30_000))
        assert made.keeper.running
        assert sum(event["type"] == "delta" for event in await made.log()) < 400


async def test_an_agent_that_dies_in_mid_turn_ends_the_turn_with_its_last_words(tmp_path: Path) -> None:
    async with started(tmp_path) as (made, server, droid):
        outcome = await turn(
            server, droid, {"act": "say", "text": "I was about to"}, {"act": "half-a-line"}, {"act": "die"}
        )
        assert (outcome.stop_reason, outcome.error_kind, outcome.text) == ("error", "droid_failed", "I was about to")
        assert outcome.error == "the droid's process ended by itself (exit code 9); its last words: Segmentation fault"
        await server.session.until(lambda session: bool(session.losses))
        assert [event["type"] for event in await made.log()][-3:] == ["message", "error", "completion"]
        assert await made.rows("SELECT * FROM process_pieces") == []


async def test_a_second_answer_is_told_and_changes_nothing(tmp_path: Path) -> None:
    async with started(tmp_path) as (made, server, droid):
        other = {"act": "answer", "result": {"stopReason": "refusal"}}
        assert (await turn(server, droid, {"act": "say", "text": "x"}, DONE, other)).stop_reason == "end_turn"
        assert (await turn(server, droid, {"act": "say", "text": "y"}, DONE, number=2)).text == "y"
        assert [kind for kind, _ in await warnings(made)] == ["unknown_answer"]
        assert len(server.session.outcomes) == 2


async def test_an_answer_to_nobody_is_told(tmp_path: Path) -> None:
    async with started(tmp_path) as (made, server, droid):
        strays = [{"id": "1-99", "result": {}}, {"id": 7, "result": {}}, {"id": None, "error": {"code": 1}}]
        await turn(server, droid, *strays, {"act": "say", "text": "x"}, DONE)
        assert [kind for kind, _ in await warnings(made)] == ["unknown_answer"] * 3


async def test_an_unknown_stop_reason_ends_the_turn_under_that_word(tmp_path: Path) -> None:
    async with started(tmp_path) as (_, server, droid):
        bored = {"act": "answer", "result": {"stopReason": "boredom"}}
        assert (await turn(server, droid, bored)).stop_reason == "boredom"
        assert (await turn(server, droid, {"act": "answer", "result": 5}, number=2)).stop_reason == "unknown"


async def test_an_end_without_a_word_is_told(tmp_path: Path) -> None:
    async with started(tmp_path) as (made, server, droid):
        assert (await turn(server, droid, DONE)).stop_reason == "end_turn"
        assert [kind for kind, _ in await warnings(made)] == ["empty_turn"]


async def test_updates_that_nobody_knows_are_kept_as_warnings(tmp_path: Path) -> None:
    async with started(tmp_path) as (made, server, droid):
        await turn(
            server,
            droid,
            {"sessionUpdate": "mood_update", "mood": "fine"},
            {"sessionUpdate": "tool_call", "title": "no id"},
            {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": "x"}},
            {"method": "_vendor/status", "params": {}},
            DONE,
        )
        first, second = await warnings(made)
        assert first[0] == "unknown_update"
        assert '"mood":"fine"' in first[1]
        assert second[0] == "malformed_update"


async def test_a_request_that_is_not_offered_is_refused(tmp_path: Path) -> None:
    async with started(tmp_path) as (_, server, droid):
        outcome = await turn(
            server, droid, {"id": "r1", "method": "fs/read_text_file", "params": {"path": "/etc/passwd"}}
        )
        assert json.loads(outcome.text) == {"code": -32601, "message": "not offered here: fs/read_text_file"}


@pytest.mark.parametrize("n, size", [(UNSENT_MAX + 1, 4), (40, UNSENT_BYTES_MAX // 32)], ids=["many", "large"])
async def test_an_agent_that_asks_and_does_not_read_is_ended(tmp_path: Path, n: int, size: int) -> None:
    async with started(tmp_path, patience=Patience()) as (made, server, droid):
        await server.begin(1, "")
        made.keeper.takes_at_most = 1  # the prompt
        await droid.prompt(1, json.dumps([{"act": "ask", "n": n, "size": size}]))
        outcome = await server.session.over()
        assert (outcome.stop_reason, outcome.error_kind) == ("error", "input_unread")
        assert outcome.error is not None
        assert outcome.error.startswith("the droid does not read: ")
        await server.session.until(lambda session: bool(session.losses))
        assert made.keeper.running == []
        assert await made.rows("SELECT * FROM process_input") == []


async def test_an_agent_that_asks_much_and_reads_is_answered(tmp_path: Path) -> None:
    async with started(tmp_path, patience=Patience()) as (_, server, droid):
        asked = {"act": "ask", "n": UNSENT_MAX // 2, "size": 4}
        assert (await turn(server, droid, asked)).stop_reason == "end_turn"


async def test_a_turn_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    async with started(tmp_path, "ignores-cancel", Patience(cancel_s=0.2)) as (made, server, droid):
        await server.begin(1, "")
        await droid.prompt(1, json.dumps([{"act": "say", "text": "working"}]))
        await droid.cancel()
        outcome = await server.session.over()
        assert (outcome.stop_reason, outcome.error_kind) == ("cancelled", "turn_stuck")
        assert outcome.error == "the droid did not stop its turn within 0.2 s"
        await server.session.until(lambda session: bool(session.losses))
        assert made.keeper.running == []


async def test_a_line_that_comes_slowly_is_no_silence(tmp_path: Path) -> None:
    async with started(tmp_path) as (_, server, droid):
        trickle = {"act": "trickle", "n": 10, "s": 0.1}
        assert (await turn(server, droid, trickle, {"act": "say", "text": "x"}, DONE)).stop_reason == "end_turn"


async def test_a_silent_turn_is_cancelled_and_says_why(tmp_path: Path) -> None:
    async with started(tmp_path) as (_, server, droid):
        outcome = await turn(server, droid, {"act": "say", "text": "hm"})
        assert (outcome.stop_reason, outcome.error_kind) == ("cancelled", "turn_silent")
        assert outcome.error == "the droid gave no sign of life for 0.5 s of its turn: it was cancelled"
        assert server.session.losses == []
        assert (await turn(server, droid, {"act": "say", "text": "x"}, DONE, number=2)).stop_reason == "end_turn"


async def test_a_busy_turn_has_an_end_and_says_why(tmp_path: Path) -> None:
    async with started(tmp_path, patience=Patience(turn_max_s=0.6)) as (made, server, droid):
        busy = {"act": "trickle", "n": 1000, "s": 0.002}
        outcome = await turn(server, droid, {"act": "say", "text": "hm"}, busy)
        assert (outcome.stop_reason, outcome.error_kind) == ("cancelled", "turn_too_long")
        assert outcome.error == "the turn took longer than 0.6 s: it was cancelled"
        (error,) = (event for event in await made.log() if event["type"] == "error")
        assert (error["kind"], error["message"], error["turn"]) == ("turn_too_long", outcome.error, 1)
        assert (await turn(server, droid, {"act": "say", "text": "x"}, DONE, number=2)).stop_reason == "end_turn"


async def test_a_droid_that_is_known_to_wait_is_not_taken_for_a_silent_one(tmp_path: Path) -> None:
    async with started(tmp_path) as (_, server, droid):
        droid.touch()  # between turns there is no clock to set
        await server.begin(1, "")
        await droid.prompt(1, json.dumps([{"act": "say", "text": "hm"}]))
        for _ in range(10):
            await asyncio.sleep(0.1)
            droid.touch()
        assert server.session.outcomes == []
        assert (await server.session.over()).error_kind == "turn_silent"


async def test_a_droid_whose_keeper_is_away_is_stopped_without_waiting_for_it(tmp_path: Path) -> None:
    async with started(tmp_path, patience=Patience()) as (made, server, droid):
        await server.begin(1, "")
        await droid.prompt(1, "[]")
        made.keeper.disconnect()
        async with asyncio.timeout(1):
            await droid.stop()
        assert (await server.session.over()).stop_reason == "cancelled"
        made.keeper.connect(server.processes)
        while made.keeper.running:  # what came back without a row is killed
            await asyncio.sleep(0.01)


async def test_a_silent_turn_that_cannot_be_cancelled_is_killed(tmp_path: Path) -> None:
    async with started(tmp_path, "ignores-cancel") as (made, server, droid):
        outcome = await turn(server, droid)
        assert (outcome.stop_reason, outcome.error_kind) == ("cancelled", "turn_stuck")
        assert outcome.error == (
            "the droid gave no sign of life for 0.5 s of its turn, and the droid did not stop its turn within 0.3 s"
        )
        assert made.keeper.running == []


async def test_stopping_an_agent_that_ignores_everything_kills_its_group(tmp_path: Path) -> None:
    async with started(tmp_path, "ignores-everything") as (made, _, droid):
        await droid.stop()
        assert made.keeper.running == []
        assert [params["signal"] for method, params in made.keeper.requests if method == "signal"] == ["TERM", "KILL"]


async def test_a_permission_request_after_a_cancel_is_answered_as_cancelled(tmp_path: Path) -> None:
    async with started(tmp_path, "ignores-cancel", Patience(cancel_s=10)) as (made, server, droid):
        await server.begin(1, "")
        asked = {"id": "p1", "method": "session/request_permission", "params": {"toolCall": {"toolCallId": "t"}}}
        made.keeper.takes_input = False
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(droid.prompt(1, json.dumps([asked])))
            tasks.create_task(droid.cancel())
        made.keeper.takes_input = True
        outcome = await server.session.over()
        assert json.loads(outcome.text) == {"outcome": {"outcome": "cancelled"}}


async def test_words_outside_a_turn_are_not_lost(tmp_path: Path) -> None:
    async with started(tmp_path) as (made, server, droid):
        late = {"act": "say", "text": "one more thing"}
        await turn(server, droid, {"act": "say", "text": "x"}, DONE, late)
        while not any(event.get("text") == late["text"] for event in await made.log()):
            await asyncio.sleep(0.01)
        await turn(server, droid, {"act": "say", "text": "y"}, DONE, number=2)
        said = [(event["text"], event.get("turn")) for event in await made.log() if event["type"] == "message"]
        assert said == [("x", 1), ("one more thing", None), ("y", 2)]
        assert [outcome.text for _, outcome in server.session.outcomes] == ["x", "y"]


async def test_the_keeper_of_another_box_cannot_speak_for_this_one(tmp_path: Path) -> None:
    async with started(tmp_path) as (made, server, droid):
        (kept,) = made.keeper.running
        lie = json.dumps({"process": kept.name, "stream": "out", "offset": 1 << 40, "data": "AAAA"}).encode()
        server.processes.told("box_2", "stdout", lie)
        server.processes.told("box_2", "exited", json.dumps({"process": kept.name, "exit_code": 0}).encode())
        assert (await turn(server, droid, {"act": "say", "text": "x"}, DONE)).text == "x"
        assert server.session.losses == []


async def test_input_that_a_keeper_cannot_take_now_is_offered_again(tmp_path: Path) -> None:
    async with started(tmp_path, patience=Patience(silence_s=20)) as (made, server, droid):
        busy = DroidFailed("the keeper refused: the process does not read its input", retryable=True)
        made.keeper.refusals = [busy, busy]
        patient = {"act": "say", "text": "at last"}
        assert (await turn(server, droid, patient, DONE)).text == "at last"
        assert made.keeper.refusals == []
        made.keeper.refusals = [DroidFailed("the keeper refused: the process takes no more input")]
        outcome = await turn(server, droid, patient, DONE, number=2)
        assert outcome.error == "its input was refused: the keeper refused: the process takes no more input"


async def test_a_keeper_that_does_not_answer_is_asked_again_and_its_droid_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "KEEPER_ANSWER_S", 0.1)
    async with started(tmp_path, patience=Patience(silence_s=20)) as (made, server, droid):
        await server.begin(1, "")
        made.keeper.takes_input = False
        before = len(made.keeper.requests)
        await droid.prompt(1, json.dumps([{"act": "say", "text": "at last"}, DONE]))
        while len(made.keeper.requests) < before + 2:
            await asyncio.sleep(0.01)
        made.keeper.takes_input = True
        assert (await server.session.over()).text == "at last"


async def test_a_lying_keeper_costs_the_droid_and_nothing_else(tmp_path: Path) -> None:
    async with started(tmp_path) as (made, server, droid):
        (kept,) = made.keeper.running
        await server.begin(1, "")
        await droid.prompt(1, json.dumps([{"act": "say", "text": "x"}]))
        made.keeper.tell("stdout", process="prc_unknown", stream="out", offset=0, data="AAAA")
        made.keeper.tell("stdout", process=kept.name, stream="out", offset=1 << 40, data="AAAA")
        outcome = await server.session.over()
        assert outcome.error is not None
        assert outcome.error.startswith("the keeper skipped output: expected byte")
        await server.session.until(lambda session: bool(session.losses))
