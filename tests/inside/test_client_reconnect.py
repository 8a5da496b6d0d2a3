"""The client when the server goes, comes back, refuses, lies or is not there."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from oubliette.wire import relay as wire
from oubliette.wire.relay import Attach, CallerTool, Cancel, OublietteTools, SessionEvents
from tests.kit.boxed import Box
from tests.kit.relay_server import Listed, RelayServer, failure, tool

ECHO = tool("echo")


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


def text(result: dict[str, Any]) -> str:
    (block,) = result["content"]
    return block["text"]


def kind(result: dict[str, Any]) -> str:
    assert result["isError"] is True
    return result["_meta"]["dev.oubliette/error"]["kind"]


def patience(relay: RelayServer, longest: float, margin: float) -> None:
    relay.attached = msgspec.structs.replace(relay.attached, call_timeout_max_s=longest, margin_s=margin)


async def test_the_first_frame_is_attach_with_the_key_beside_the_socket(box: Box) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay) as host:
        first = relay.frames[0]
        assert (first.method, first.id) == ("attach", 1)
        assert first.params == Attach(
            key=relay.key, role="client", instance=first.params.instance, protocol=wire.PROTOCOL
        )
        assert len(relay.text.split(b"\n")[0]) < wire.ATTACH_BYTES_MAX
        host.call("ant_echo")
        assert (await relay.take(CallerTool)).id > 1


async def test_a_call_in_flight_survives_a_server_that_dies_and_returns(box: Box) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay) as host:
        pending = [host.call("ant_echo", {"n": n}) for n in range(3)]
        before = await relay.take_many(3, CallerTool)
        before[1].reply("first life")
        assert text(await pending[1]) == "first life"
        await relay.stop()
        waiting = host.call("ant_echo", {"n": "while away"})
        await host.ask("ping")
        await relay.listen()
        again = await relay.take_many(3, CallerTool)
        assert [each.params for each in again[:2]] == [before[0].params, before[2].params]  # the call keys too
        assert again[2].params.arguments == {"n": "while away"}
        for each in again:
            each.reply(each.params.arguments["n"])
        assert [text(await pending[0]), text(await pending[2]), text(await waiting)] == ["0", "2", "while away"]
        instances = {each.params.instance for each in relay.of(Attach)}
        assert len(instances) == 1
        assert len(relay.of(Attach)) == 2


async def test_a_read_in_flight_is_asked_again_of_the_next_server(box: Box) -> None:
    async with RelayServer(box.folder) as relay, box.talk(relay) as host:
        pending = host.call("session_events", {"session_id": "s", "wait_seconds": 30})
        before = await relay.take(SessionEvents)
        await relay.stop()
        await relay.listen()
        again = await relay.take(SessionEvents)
        assert again.params == before.params
        again.reply({"events": []})
        assert (await pending)["structuredContent"] == {"events": []}


async def test_many_restarts_lose_no_call(box: Box) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay) as host:
        pending = host.call("ant_echo")
        call = await relay.take(CallerTool)
        keys = {call.params.call_key}
        for _ in range(5):
            await relay.stop()
            await relay.listen()
            call = await relay.take(CallerTool)
            keys.add(call.params.call_key)
        assert len(keys) == 1
        call.reply("at last")
        assert text(await pending) == "at last"


async def test_the_server_is_found_when_it_comes_after_the_client(box: Box) -> None:
    async with box.client() as host:
        await host.open()
        assert "ant_echo" not in await host.tool_names()  # nobody there yet
        async with RelayServer(box.folder, tools=[ECHO]) as relay:
            await host.notification("notifications/tools/list_changed")
            assert relay.of(Listed) == []  # the agent has not seen this list yet
            assert "ant_echo" in await host.tool_names()
            await relay.take(Listed)


async def test_a_new_server_is_asked_and_told_everything_again(box: Box) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay, OUBLIETTE_API_KEY="oub_x") as host:
        await relay.take(OublietteTools)
        await relay.stop()
        await relay.listen()
        await relay.take(OublietteTools)
        await relay.take(Listed)  # the same list, which the agent has seen
        await relay.stop()
        relay.tools = [tool("other")]
        await relay.listen()
        await host.notification("notifications/tools/list_changed")
        assert len(relay.of(Listed)) == 2
        assert await host.tool_names() == ["ant_other", "session_message", "session_events"]
        await relay.take(Listed)


async def test_a_cancel_while_the_server_is_away_is_told_when_it_is_back(box: Box) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay) as host:
        sent = host.call("ant_echo")
        call = await relay.take(CallerTool)
        await relay.stop()
        await host.logged(b"link down")
        unsent = host.call("ant_echo", {"n": 2})
        host.cancel(unsent)
        host.cancel(sent)
        await host.ask("ping")
        await relay.listen()
        cancel = await relay.take(Cancel)
        assert cancel.params.call_key == call.params.call_key
        last = host.call("ant_echo", {"n": 3})
        (await relay.take(CallerTool)).reply("ok")
        await last
        assert len(relay.of(Cancel)) == 1  # of the other one the server never knew
        assert len(relay.of(CallerTool)) == 2


async def test_a_cancel_that_a_dying_server_did_not_hear_is_told_to_the_next(box: Box) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay) as host:
        heard, unheard = host.call("ant_echo", {"n": 1}), host.call("ant_echo", {"n": 2})
        first, second = await relay.take_many(2, CallerTool)
        host.cancel(heard)
        await relay.take(Cancel)
        first.fail(failure(-32000, "cancelled", "cancelled"))
        pending = host.call("ant_echo", {"n": 3})
        (await relay.take(CallerTool)).reply("in order")
        await pending
        host.cancel(unheard)
        await relay.take(Cancel)
        await relay.stop()
        await relay.listen()
        assert (await relay.take(Cancel)).params.call_key == second.params.call_key
        assert len(relay.of(CallerTool)) == 3


async def test_a_cancel_is_told_to_every_server_until_one_has_shown_that_it_heard(box: Box) -> None:
    """It has when it answers what was sent behind the cancel; before that, it may have died first."""
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay) as host:
        before = host.call("ant_echo", {"n": 1})
        open_then = await relay.take(CallerTool)
        cancelled = host.call("ant_echo", {"n": 2})
        key = (await relay.take(CallerTool)).params.call_key
        host.cancel(cancelled)
        await relay.take(Cancel)
        open_then.reply("of before")
        await before
        for _ in range(2):
            await relay.stop()
            await relay.listen()
            assert (await relay.take(Cancel)).params.call_key == key
        last = host.call("ant_echo", {"n": 3})
        (await relay.take(CallerTool)).reply("heard")
        await last
        await relay.stop()
        await relay.listen()
        pending = host.call("ant_echo", {"n": 4})
        (await relay.take(CallerTool)).reply("ok")
        await pending
        assert len(relay.of(Cancel)) == 3


async def test_a_server_that_answers_what_is_asked_again_has_heard_the_cancels_before_it(box: Box) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay) as host:
        kept, cancelled = host.call("ant_echo", {"n": 1}), host.call("ant_echo", {"n": 2})
        await relay.take_many(2, CallerTool)
        host.cancel(cancelled)
        await relay.take(Cancel)
        await relay.stop()
        await relay.listen()
        await relay.take(Cancel)
        (await relay.take(CallerTool)).reply("once more")
        await kept
        await relay.stop()
        await relay.listen()
        last = host.call("ant_echo", {"n": 3})
        (await relay.take(CallerTool)).reply("ok")
        await last
        assert len(relay.of(Cancel)) == 2


async def test_calls_to_a_lost_server_fail_by_name_at_the_deadline_that_it_told(box: Box) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay:
        patience(relay, 0.4, 0.2)
        async with box.talk(relay) as host:
            sent = host.call("ant_echo")
            await relay.take(CallerTool)
            await relay.stop()
            await host.logged(b"link down")
            await host.ask("ping")
            started = asyncio.get_running_loop().time()
            unsent = host.call("ant_echo")
            lost, unreached = await sent, await unsent
            assert 0.5 < asyncio.get_running_loop().time() - started < 1.5
            assert kind(lost) == "outcome_unknown"
            assert kind(unreached) == "unavailable"
            assert unreached["_meta"]["dev.oubliette/error"]["retryable"] is True
            assert "ant_echo" in text(lost)
            assert "0.6 s" in text(unreached)
            await relay.listen()
            await relay.take(Cancel)  # nobody waits for the first any more
            assert len(relay.of(CallerTool)) == 1


async def test_a_late_answer_inside_the_servers_deadline_is_taken_and_none_after_it(box: Box) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay:
        patience(relay, 0.8, 0.4)
        async with box.talk(relay) as host:
            late, never = host.call("ant_echo", {"n": 1}), host.call("ant_echo", {"n": 2})
            first, second = await relay.take_many(2, CallerTool)
            await asyncio.wait_for(asyncio.shield(_passes(0.9)), 2)
            first.reply("late")
            assert text(await late) == "late"
            result = await never
            assert kind(result) == "timeout"
            assert "within 1.2 s" in text(result)
            assert (await relay.take(Cancel)).params.call_key == second.params.call_key


async def _passes(seconds: float) -> None:
    """Real time: the client's clock is another process's."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    loop.call_later(seconds, done.set_result, None)
    await done


async def test_a_deadline_beyond_any_clock_is_no_trouble(box: Box) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay:
        patience(relay, 1.7e308, 1.7e308)
        async with box.talk(relay) as host:
            pending = host.call("ant_echo")
            (await relay.take(CallerTool)).reply("ok")
            assert text(await pending) == "ok"


async def test_a_wrong_key_fails_calls_clearly_and_a_rotated_one_is_read_anew(box: Box) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay:
        relay.write_key("an old key")
        async with box.client() as host:
            await host.open()
            refused = host.call("session_message", {"message": "x"})
            result = await refused
            assert kind(result) == "unauthenticated"
            assert text(result) == "wrong session key"
            result = await host.call("session_message", {"message": "x"})  # and not only the first
            assert kind(result) == "unauthenticated"
            relay.write_key(relay.key)
            await host.notification("notifications/tools/list_changed")
            pending = host.call("ant_echo")
            (await relay.take(CallerTool)).reply("in")
            assert text(await pending) == "in"
            assert {each.params.key for each in relay.of(Attach)} == {"an old key", relay.key}
            assert b"old key" not in host.log


async def test_a_key_rotated_between_two_looks_fails_nobody(box: Box) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay) as host:
        pending = host.call("ant_echo")
        await relay.take(CallerTool)
        relay.key = "rotated"
        await relay.stop()
        await relay.listen()
        await relay.take(Attach, lambda attach: len(relay.of(Attach)) == 2)
        relay.write_key("rotated")
        (await relay.take(CallerTool)).reply("joined")
        assert text(await pending) == "joined"


async def test_a_server_of_another_version_fails_calls_clearly(box: Box) -> None:
    async with RelayServer(box.folder) as relay:
        relay.refusal = failure(-32000, "this server speaks relay protocol 7", "upgrade_required")
        async with box.client() as host:
            await host.open()
            assert await host.tool_names() == ["session_message", "session_events"]
            result = await host.call("session_events", {"session_id": "x"})
            assert (kind(result), text(result)) == ("upgrade_required", "this server speaks relay protocol 7")
            assert host.log.count(b"attach refused") == 1


async def test_a_refusal_that_passes_is_waited_out(box: Box) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay:
        relay.refusal = failure(-32000, "8 connections are open", "too_many", retryable=True)
        async with box.client() as host:
            await host.open()
            pending = host.call("session_message", {"message": "x"})
            await relay.take(Attach)
            await relay.take(Attach)
            assert not pending.done()
            relay.refusal = None
            (await relay.take(wire.SessionMessage)).reply({"ok": True})
            assert (await pending)["structuredContent"] == {"ok": True}


async def test_a_server_that_never_answers_attach_is_dropped(box: Box) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay:
        relay.answers_attach = False
        async with box.client() as host:
            await host.open()
            await relay.take(Attach)
            started = asyncio.get_running_loop().time()
            relay.answers_attach = True
            await relay.take(Attach)
            assert wire.ATTACH_WAIT_S - 0.5 < asyncio.get_running_loop().time() - started < wire.ATTACH_WAIT_S + 2
            await host.notification("notifications/tools/list_changed")


@pytest.mark.parametrize(
    "raw",
    [
        b"garbage\n",
        b"\xff\xfe\n",
        b"[]\n",
        b"5\n",
        b"{}\n",
        b'{"jsonrpc":"2.0"}\n',
        b'{"jsonrpc":"2.0","id":"text","result":1}\n',
        b'{"jsonrpc":"2.0","id":[1],"result":1}\n',
        b'{"jsonrpc":"2.0","id":99999,"result":1}\n',
        b'{"jsonrpc":"2.0","method":"nothing we know","params":{}}\n',
        b'{"jsonrpc":"2.0","method":"progress"}\n',
        b'{"jsonrpc":"2.0","method":"progress","params":{"call_key":[],"progress":"x"}}\n',
        b'{"jsonrpc":"2.0","method":"cancel","params":{"call_key":{}}}\n',
        b'{"jsonrpc":"2.0","method":"caller_tools_config","params":[]}\n',
        b'{"jsonrpc":"2.0","method":["x"],"params":[]}\n',
        b'{"jsonrpc":"2.0","type":7}\n',
        b"[" * 50_000 + b"\n",
    ],
)
async def test_garbage_from_the_server_changes_nothing(box: Box, raw: bytes) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay) as host:
        pending = host.call("ant_echo")
        call = await relay.take(CallerTool)
        call.connection.write(raw)
        call.reply("fine")
        assert text(await pending) == "fine"
        assert len(relay.connections) == 1


async def test_a_question_from_the_server_is_refused_politely(box: Box) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay):
        relay.connection.write(b'{"jsonrpc":"2.0","id":"q","method":"start","params":{}}\n')
        await relay.connection.closed.wait()  # the relay of these tests takes no answers
        (problem,) = relay.problems
        assert '"code":-32601' in problem
        relay.problems.clear()


@pytest.mark.parametrize("has_end", [True, False])
async def test_an_oversized_frame_fails_its_call_and_closes_the_link(box: Box, has_end: bool) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay) as host:
        large, other = host.call("ant_echo", {"n": 1}), host.call("ant_echo", {"n": 2})
        call, _ = await relay.take_many(2, CallerTool)
        call.connection.write(b'{"jsonrpc":"2.0","id":%d,"result":"' % call.id)
        call.connection.write(b"x" * (wire.FRAME_BYTES_MAX + 1) + (b'"}\n' if has_end else b""))
        result = await large
        assert kind(result) == "too_large"
        again = await relay.take(CallerTool)  # on the next link, and only the one that is still open
        assert again.params.arguments == {"n": 2}
        again.reply("small")
        assert text(await other) == "small"
        assert b"ERROR: the server sent a frame over 8388608 bytes: closing the link" in host.log
        assert len(relay.connections) == 2


async def test_two_processes_with_one_key_are_equal(box: Box) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay) as first, box.talk(relay) as second:
        calls = {}
        for name, host in (("first", first), ("second", second)):
            calls[name] = host.call("ant_echo", {"who": name})
        for _ in range(2):
            call = await relay.take(CallerTool)
            call.reply(call.params.arguments["who"])
        assert text(await calls["first"]) == "first"
        assert text(await calls["second"]) == "second"
        assert len({each.params.instance for each in relay.of(Attach)}) == 2
        await first.leave()
        pending = second.call("ant_echo")
        (await relay.take(CallerTool)).reply("still here")
        assert text(await pending) == "still here"


async def test_an_agent_that_does_not_read_stops_nobody_and_gets_everything_later(box: Box) -> None:
    async with RelayServer(box.folder, tools=[ECHO]) as relay, box.talk(relay) as host:
        reading = host.process.stdout._transport  # type: ignore[union-attr]
        reading.pause_reading()
        pending = [host.call("ant_echo", {"n": n}) for n in range(80)]
        for call in await relay.take_many(80, CallerTool):
            call.reply({"n": call.params.arguments["n"], "text": "x" * 500_000})
        await _passes(1.0)  # by now it holds as much as it will
        last = host.call("ant_echo", {"n": "last"})
        (await relay.take(CallerTool)).reply("last")
        status = Path(f"/proc/{host.process.pid}/status").read_text()
        assert int(status.split("VmRSS:")[1].split()[0]) < 60 * 1024
        reading.resume_reading()
        for n, each in enumerate(pending):
            assert (await each)["structuredContent"]["n"] == n
        assert text(await last) == "last"


@pytest.mark.seed("OTD-SECURITY.1")
async def test_logs_carry_neither_keys_nor_arguments_and_one_line_each(box: Box) -> None:
    async with RelayServer(box.folder, tools=[ECHO], key="relay-key-secret") as relay:
        relay.platform = failure(-32000, "two\nlines", "internal")
        async with box.talk(relay, OUBLIETTE_API_KEY="oub_secret", OUBLIETTE_LOG_LEVEL="debug") as host:
            pending = host.call("ant_echo", {"password": "hunter2"})
            await relay.take(CallerTool)
            relay.connection.write(b"hunter2\n")
            relay.connection.write(b'{"jsonrpc":"2.0","method":"progress","params":"hunter2"}\n')
            await relay.stop()
            await relay.listen()
            (await relay.take(CallerTool)).reply({"password": "hunter2"})
            await pending
            await host.leave()
        for secret in (b"hunter2", b"oub_secret", b"relay-key-secret"):
            assert secret not in host.log
        lines = host.log.decode().splitlines()
        assert len(lines) >= 4
        assert all(line.startswith("oubliette-client: ") for line in lines)
        assert "oubliette-client: WARNING: failed to get oubliette tools: two lines" in lines


async def test_one_trouble_is_one_line_however_often_it_is_met(box: Box) -> None:
    async with box.client() as host:
        await host.logged(b"link down")
        await _passes(1.0)  # five attempts and more
        await host.leave()
    assert host.log.count(b"\n") == 1


async def test_a_quiet_level_is_quiet(box: Box) -> None:
    async with box.client(OUBLIETTE_LOG_LEVEL="none", OUBLIETTE_API_KEY="oub_x") as host:
        await host.open()
        await host.leave()
    assert host.log == b""
