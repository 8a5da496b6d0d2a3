"""The built-in droid as a process, driven by the public ACP library's host."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from acp import RequestError
from acp.schema import EnvVariable, McpServerStdio

from oubliette.inside import droid
from oubliette.server import limits
from oubliette.server.config import Settings
from oubliette.wire.relay import MARGIN_S
from tests.kit import tools_server
from tests.kit.acp_host import HostedAgent, hosted

DROID = droid.__file__
TOOLS_SERVER = tools_server.__file__


def argv(*more: str) -> list[str]:
    return [sys.executable, "-I", "-S", DROID, *more]


def environment(home: Path) -> dict[str, str]:
    return {"HOME": str(home), "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "MODEL_KEY": "not for others"}


def tools(*more: str, name: str = "oubliette", **env: str) -> McpServerStdio:
    variables = [EnvVariable(name=key, value=value) for key, value in env.items()]
    return McpServerStdio(name=name, command=sys.executable, args=["-I", "-S", TOOLS_SERVER, *more], env=variables)


def plan(*steps: Any) -> str:
    return f"please run <<plan {json.dumps(steps)}>> thank you"


async def run(agent: HostedAgent, cwd: Path, *steps: Any, servers: tuple[Any, ...] | None = None) -> str:
    """One session, one turn."""
    session = await agent.open(cwd, (tools(),) if servers is None else servers)
    return await agent.prompt(session, plan(*steps))


async def test_a_plan_calls_a_tool_and_says_what_came_back(tmp_path: Path) -> None:
    async with asyncio.timeout(20), hosted(argv(), environment(tmp_path)) as agent:
        step = {"tool": "ant_echo", "args": {"message": "hi"}, "expect": {"is_error": False, "contains": "hi"}}
        stop = await run(agent, tmp_path, step, {"say": "final: $last"})

        assert stop == "end_turn"
        assert agent.host.text == 'final: ant_echo: {"message": "hi"}'
        (call,) = agent.host.of("tool_call")
        assert (call["title"], call["status"], call["rawInput"]) == ("ant_echo", "pending", {"message": "hi"})
        running, done = agent.host.of("tool_call_update")
        assert (running["status"], done["status"]) == ("in_progress", "completed")
        assert done["rawOutput"]["content"][0]["text"] == 'ant_echo: {"message": "hi"}'
        shown = [[entry["status"] for entry in update["entries"]] for update in agent.host.of("plan")]
        assert shown == [["in_progress", "pending"], ["completed", "in_progress"], ["completed", "completed"]]


async def test_a_prompt_without_a_plan_is_answered_with_the_syntax(tmp_path: Path) -> None:
    async with asyncio.timeout(20), hosted(argv(), environment(tmp_path)) as agent:
        session = await agent.open(tmp_path)
        assert await agent.prompt(session, "write me a poem") == "end_turn"
        assert "only run plans" in agent.host.text


@pytest.mark.parametrize(
    "steps, message",
    [
        ([{"fail": "enough"}], "enough"),
        (
            [{"tool": "ant_echo", "expect": {"is_error": True}}],
            "step 1 (tool ant_echo): expected an error, got a success",
        ),
        ([{"tool": "ant_fails", "expect": {"is_error": False}}], "expected a success, got an error: the tool failed"),
        ([{"tool": "ant_echo", "expect": {"contains": "nope"}}], "expected 'nope' in the result"),
        ([{"tool": "ant_echo", "expect": {"lacks": "echo"}}], "expected no 'echo' in the result"),
        ([{"tool": "ant_structured", "args": {"a": 1}, "expect": {"equals": {"a": True}}}], 'expected {"a": true}'),
        ([{"tool": "ant_missing"}], "no tool ant_missing is offered; offered: ant_blob, ant_declare"),
        ([{"parallel": [{"say": "a"}, {"fail": "inside"}]}], "inside"),
        ([{"wait_tool": "ant_later", "s": 0.05}], "no such tool within 0.05 s"),
        ([{"say": "$last.a"}], "$last.a is not in the last result"),
        ([{"say": "a", "sleep": 1}], "step 1 needs exactly one of say, tool"),
        ([{"say": "a", "loud": 1}], "say knows no 'loud'"),
        ([{"sleep": -1}], "sleep has a value that it cannot have"),
        ([{"repeat": 2}], "repeat needs a step"),
        ([{"repeat": 2, "step": {"tool": "x", "expect": {"contain": ""}}}], "step 1.1: expect knows no 'contain'"),
    ],
)
async def test_a_plan_that_fails_answers_with_an_error_that_says_where(
    tmp_path: Path, steps: list[Any], message: str
) -> None:
    async with asyncio.timeout(20), hosted(argv(), environment(tmp_path)) as agent:
        with pytest.raises(RequestError) as failure:
            await run(agent, tmp_path, *steps)
        assert message in str(failure.value)
        assert await agent.prompt(next(iter(await sessions(tmp_path))), plan({"say": "still here"})) == "end_turn"


async def sessions(home: Path) -> list[str]:
    return [file.stem for file in (home / ".oubliette-droid" / "sessions").iterdir()]


@pytest.mark.parametrize("text", ["<<plan [>>", "<<plan {}>>", '<<plan [{"say": "a"}] >', "<<plan"])
async def test_a_broken_plan_is_refused(tmp_path: Path, text: str) -> None:
    async with asyncio.timeout(20), hosted(argv(), environment(tmp_path)) as agent:
        session = await agent.open(tmp_path)
        with pytest.raises(RequestError, match="the plan cannot be run"):
            await agent.prompt(session, text)


async def test_an_error_of_a_tool_is_a_result_like_any_other(tmp_path: Path) -> None:
    async with asyncio.timeout(20), hosted(argv(), environment(tmp_path)) as agent:
        stop = await run(
            agent,
            tmp_path,
            {"tool": "fails", "expect": {"is_error": True, "equals": "the tool failed"}},
            {"tool": "refuses", "expect": {"is_error": True}},
            {"say": "$last"},
        )
        assert stop == "end_turn"
        assert agent.host.text == "these arguments are no good"
        assert [update["status"] for update in agent.host.of("tool_call_update")] == ["in_progress", "failed"] * 2


async def test_parallel_calls_are_in_flight_at_once(tmp_path: Path) -> None:
    async with asyncio.timeout(20), hosted(argv(), environment(tmp_path)) as agent:
        call = {"tool": "ant_meet", "args": {"n": 3}}
        stop = await run(agent, tmp_path, {"parallel": [call, call, call]}, {"say": "$last"})
        assert stop == "end_turn"
        assert agent.host.text == "met 2\nmet 1\nmet 0"


async def test_what_came_back_is_filled_into_arguments_but_not_into_plans_for_others(tmp_path: Path) -> None:
    async with asyncio.timeout(20), hosted(argv(), environment(tmp_path)) as agent:
        inner = plan({"say": "$last"})
        stop = await run(
            agent,
            tmp_path,
            {"tool": "structured", "args": {"id": "p1", "list": [{"deep": 7}]}},
            {"tool": "structured", "args": {"project": "$last.id", "n": "$last.list.0.deep", "message": inner}},
            {"tool": "structured", "args": {"all": "$last"}},
        )
        assert stop == "end_turn"
        _, second, third = (call["rawInput"] for call in agent.host.of("tool_call"))
        assert second == {"project": "p1", "n": "7", "message": inner}
        assert json.loads(third["all"]) == second


async def test_repeat_repeats_and_say_speaks_in_lines(tmp_path: Path) -> None:
    async with asyncio.timeout(20), hosted(argv(), environment(tmp_path)) as agent:
        assert await run(agent, tmp_path, {"repeat": 3, "step": {"say": "knock"}}, servers=()) == "end_turn"
        assert agent.host.text == "knock\nknock\nknock"


async def test_a_tool_declared_during_a_turn_can_be_called_in_it(tmp_path: Path) -> None:
    async with asyncio.timeout(20), hosted(argv(), environment(tmp_path)) as agent:
        stop = await run(
            agent,
            tmp_path,
            {"parallel": [{"wait_tool": "ant_new", "s": 10}, {"tool": "declare", "args": {"name": "ant_new"}}]},
            {"tool": "ant_new", "expect": {"contains": "ant_new"}},
            {"list": True, "expect": {"contains": "ant_new"}},
        )
        assert stop == "end_turn"
        assert agent.host.text.startswith("ant_blob, ant_declare, ant_echo")


async def test_cancelling_a_turn_tells_the_mcp_server_and_leaves_the_session_usable(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with asyncio.timeout(20), hosted(argv(), environment(tmp_path)) as agent:
        session = await agent.open(tmp_path, (tools("--log", str(log)),))
        async with asyncio.TaskGroup() as tasks:
            turn = tasks.create_task(agent.prompt(session, plan({"tool": "ant_never"}, {"say": "not reached"})))
            await agent.host.until(lambda update: update.get("status") == "in_progress")
            await agent.connection.cancel(session_id=session)
        assert turn.result() == "cancelled"
        assert agent.host.of("tool_call_update")[-1]["status"] == "failed"
        assert await agent.prompt(session, plan({"tool": "ant_echo"}, {"say": "again"})) == "end_turn"
        assert agent.host.text == "again"

    messages = [json.loads(line) for line in log.read_text().splitlines()]
    call, cancelled = (
        next(message for message in messages if message["method"] == method)
        for method in ("tools/call", "notifications/cancelled")
    )
    assert cancelled["params"]["requestId"] == call["id"]
    assert call["params"]["_meta"]["progressToken"]


@pytest.mark.parametrize("nested", [False, True])
async def test_a_cancel_that_comes_at_any_moment_of_a_busy_plan_ends_it(tmp_path: Path, nested: bool) -> None:
    """It tends to come in the tick in which a call has just been answered."""
    busy: dict[str, Any] = {"repeat": 100_000, "step": {"tool": "ant_echo"}}
    steps = plan({"parallel": [busy, busy]} if nested else busy)
    async with asyncio.timeout(60), hosted(argv(), environment(tmp_path)) as agent:
        session = await agent.open(tmp_path, (tools(),))
        for number in range(100):
            async with asyncio.TaskGroup() as tasks:
                agent.host.updates.clear()
                turn = tasks.create_task(agent.prompt(session, steps))
                await agent.host.until(lambda _, least=3 + number % 7: len(agent.host.updates) >= least)
                await agent.connection.cancel(session_id=session)
                async with asyncio.timeout(5):
                    assert await turn == "cancelled"


async def test_a_cancel_that_comes_with_its_prompt_is_not_lost(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *argv(), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environment(tmp_path)
    )
    assert process.stdin
    assert process.stdout

    def send(*frames: dict[str, Any]) -> None:
        assert process.stdin
        process.stdin.write(b"".join(json.dumps({"jsonrpc": "2.0", **frame}).encode() + b"\n" for frame in frames))

    async with asyncio.timeout(20):
        send({"id": 1, "method": "session/new", "params": {"cwd": str(tmp_path), "mcpServers": []}})
        told = {"sessionId": json.loads(await process.stdout.readline())["result"]["sessionId"]}
        prompt = {**told, "prompt": [{"type": "text", "text": plan({"sleep": 3600})}]}
        send({"id": 2, "method": "session/prompt", "params": prompt}, {"method": "session/cancel", "params": told})
        answer = json.loads(await process.stdout.readline())
        assert (answer["id"], answer["result"]) == (2, {"stopReason": "cancelled"})
        process.stdin.close()
        await process.wait()


async def test_progress_of_a_tool_extends_its_time(tmp_path: Path) -> None:
    async with asyncio.timeout(20), hosted(argv(), environment(tmp_path)) as agent:
        slow = {"tool": "ant_progresses", "args": {"n": 6, "every_s": 0.3}, "s": 1.2}
        assert await run(agent, tmp_path, {**slow, "expect": {"equals": "done"}}) == "end_turn"


def test_the_droid_is_more_patient_than_what_its_tools_offer() -> None:
    assert max(limits.WATCH_S_MAX, Settings(home=Path()).caller_tool_timeout_max_s) + MARGIN_S < droid.TOOL_CALL_S


async def test_a_tool_without_progress_is_given_up(tmp_path: Path) -> None:
    async with asyncio.timeout(20), hosted(argv(), environment(tmp_path)) as agent:
        given_up = {"is_error": True, "contains": "no answer and no progress within 0.2 s"}
        assert await run(agent, tmp_path, {"tool": "ant_never", "s": 0.2, "expect": given_up}) == "end_turn"


async def test_progress_of_a_tool_is_passed_on_as_a_sign_of_life(tmp_path: Path) -> None:
    async with asyncio.timeout(20), hosted(argv(), environment(tmp_path)) as agent:
        assert await run(agent, tmp_path, {"tool": "ant_progresses", "expect": {"equals": "done"}}) == "end_turn"
        statuses = [update["status"] for update in agent.host.of("tool_call_update")]
        assert statuses == ["in_progress", "in_progress", "completed"]  # the second for all three


async def test_a_second_prompt_during_a_turn_is_refused(tmp_path: Path) -> None:
    async with asyncio.timeout(20), hosted(argv(), environment(tmp_path)) as agent:
        session = await agent.open(tmp_path, (tools(),))
        async with asyncio.TaskGroup() as tasks:
            turn = tasks.create_task(agent.prompt(session, plan({"tool": "ant_never"})))
            await agent.host.until(lambda update: update.get("status") == "in_progress")
            with pytest.raises(RequestError, match="a turn is running already"):
                await agent.prompt(session, plan({"say": "me too"}))
            await agent.connection.cancel(session_id=session)
        assert turn.result() == "cancelled"


async def test_an_mcp_server_that_does_not_come_up_fails_the_session(tmp_path: Path) -> None:
    ways = {
        "dies": "the MCP server oubliette ended before it listed its tools",
        "never-answers": "the MCP server oubliette did not answer within 10 s",
        "never-lists": "the MCP server oubliette did not answer within 10 s",
    }

    async def refused(way: str, message: str) -> None:
        async with hosted(argv(), environment(tmp_path)) as agent:
            with pytest.raises(RequestError, match=message):
                await agent.open(tmp_path, (tools("--way", way), tools(name="healthy")))

    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        for way, message in ways.items():
            tasks.create_task(refused(way, message))


async def test_an_mcp_server_that_cannot_be_started_fails_the_session(tmp_path: Path) -> None:
    async with asyncio.timeout(20), hosted(argv(), environment(tmp_path)) as agent:
        missing = McpServerStdio(name="oubliette", command=str(tmp_path / "missing"), args=[], env=[])
        with pytest.raises(RequestError, match="the MCP server oubliette did not start"):
            await agent.open(tmp_path, (missing,))


async def test_an_mcp_server_that_dies_fails_the_call_and_then_every_turn(tmp_path: Path) -> None:
    async with asyncio.timeout(20), hosted(argv(), environment(tmp_path)) as agent:
        session = await agent.open(tmp_path, (tools("--way", "dies-on-call"),))
        step = {"tool": "ant_echo", "expect": {"is_error": True, "contains": "the MCP server oubliette ended"}}
        assert await agent.prompt(session, plan(step)) == "end_turn"
        with pytest.raises(RequestError, match="the MCP server oubliette ended"):
            await agent.prompt(session, plan({"say": "as if nothing had happened"}))


async def test_noise_of_an_mcp_server_is_passed_over(tmp_path: Path) -> None:
    async with asyncio.timeout(20), hosted(argv(), environment(tmp_path)) as agent:
        assert await run(agent, tmp_path, {"tool": "ant_echo"}, servers=(tools("--way", "noisy"),)) == "end_turn"


async def test_programs_see_the_environment_that_they_were_given_and_nothing_else(tmp_path: Path) -> None:
    given = {**environment(tmp_path), droid.MARK: "box_1"}
    async with asyncio.timeout(20), hosted(argv(), given) as agent:
        session = await agent.open(tmp_path, (tools(OUBLIETTE_SOCKET="/mcp/relay.sock"),))
        steps = [{"tool": "ant_environment"}, {"sh": "env | cut -d= -f1 | sort | tr '\\n' ' '"}, {"say": "$last"}]
        assert await agent.prompt(session, plan(*steps)) == "end_turn"
        seen = json.loads(agent.host.of("tool_call_update")[1]["rawOutput"]["content"][0]["text"])
        seen.pop("LC_CTYPE", None)  # set by Python itself
        assert seen == {
            "HOME": str(tmp_path),
            "PATH": "/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "OUBLIETTE_SOCKET": "/mcp/relay.sock",
            "OUBLIETTE_BOX": "box_1",
        }
        shown = set(agent.host.text.split())
        assert "OUBLIETTE_BOX" in shown
        assert shown <= {"HOME", "PATH", "LANG", "PWD", "SHLVL", "OLDPWD", "_", "OUBLIETTE_BOX"}


async def test_a_command_is_bounded_in_output_and_time(tmp_path: Path) -> None:
    async with asyncio.timeout(20), hosted(argv(), environment(tmp_path)) as agent:
        stop = await run(
            agent,
            tmp_path,
            {"sh": "echo $((6*7))", "expect": {"is_error": False, "equals": "42\n"}},
            {"sh": "echo gone; exit 3", "expect": {"is_error": True, "contains": "[exit code 3]"}},
            {"sh": "head -c 1000000 /dev/zero", "expect": {"contains": f"[{1000000 - 262144} more bytes]"}},
            {"sh": "sleep 61 & sleep 62", "s": 0.2, "expect": {"is_error": True, "contains": "[killed after 0.2 s]"}},
            {"sh": "cat /proc/[0-9]*/cmdline | tr '\\0' ' '", "expect": {"lacks": "sleep 62"}},
            servers=(),
        )
        assert stop == "end_turn"


async def test_commands_are_refused_where_nothing_isolates_them(tmp_path: Path) -> None:
    async with asyncio.timeout(20), hosted(argv("--no-commands"), environment(tmp_path)) as agent:
        with pytest.raises(RequestError, match="commands are refused"):
            await run(agent, tmp_path, {"sh": "touch here"}, servers=())
        assert not (tmp_path / "here").exists()


@pytest.mark.parametrize("permits, stop_text", [("allow_once", "ant_echo"), ("reject_once", "permission denied")])
async def test_in_mode_ask_every_call_asks(tmp_path: Path, permits: str, stop_text: str) -> None:
    async with asyncio.timeout(20), hosted(argv(), environment(tmp_path)) as agent:
        session = await agent.open(tmp_path, (tools(),))
        await agent.connection.set_session_mode(session_id=session, mode_id="ask")
        agent.host.permits = permits
        await agent.prompt(session, plan({"tool": "ant_echo"}, {"say": "$last"}, {"tool": "ant_echo"}))
        assert stop_text in agent.host.text
        assert [asked["title"] for asked in agent.host.asked] == ["ant_echo", "ant_echo"]


async def test_a_permission_for_always_is_not_asked_for_again(tmp_path: Path) -> None:
    async with asyncio.timeout(20), hosted(argv(), environment(tmp_path)) as agent:
        session = await agent.open(tmp_path, (tools(),))
        await agent.connection.set_session_mode(session_id=session, mode_id="ask")
        agent.host.permits = "allow_always"
        await agent.prompt(session, plan({"repeat": 3, "step": {"tool": "ant_echo"}}))
        assert len(agent.host.asked) == 1


async def test_a_loaded_session_is_replayed_and_has_the_tools_of_the_load(tmp_path: Path) -> None:
    async with asyncio.timeout(20):
        async with hosted(argv(), environment(tmp_path)) as agent:
            session = await agent.open(tmp_path, ())
            await agent.prompt(session, plan({"say": "the first life"}))
        async with hosted(argv(), environment(tmp_path)) as agent:
            await agent.initialize()
            await agent.connection.load_session(cwd=str(tmp_path), session_id=session, mcp_servers=[tools()])
            assert agent.host.text == "the first life"
            assert agent.host.of("user_message_chunk")[0]["content"]["text"] == plan({"say": "the first life"})
            assert await agent.prompt(session, plan({"tool": "ant_echo"})) == "end_turn"
        async with hosted(argv(), environment(tmp_path)) as agent:
            await agent.initialize()
            await agent.connection.resume_session(cwd=str(tmp_path), session_id=session, mcp_servers=[tools()])
            assert agent.host.updates == []
            assert await agent.prompt(session, plan({"tool": "ant_echo"})) == "end_turn"
            ids = [call["toolCallId"] for call in agent.host.of("tool_call")]
            assert ids == ["call_2"]
            await agent.connection.close_session(session_id=session)
            with pytest.raises(RequestError, match="no such session"):
                await agent.prompt(session, plan({"say": "too late"}))


async def test_a_session_that_is_not_stored_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("{}")
    async with asyncio.timeout(20), hosted(argv(), environment(tmp_path)) as agent:
        await agent.initialize()
        for session in ("droid_" + "0" * 32, "../../secret"):
            with pytest.raises(RequestError, match="is stored here"):
                await agent.connection.load_session(cwd=str(tmp_path), session_id=session, mcp_servers=[])


async def test_two_servers_with_the_same_tool_are_told_apart(tmp_path: Path) -> None:
    async with asyncio.timeout(20), hosted(argv(), environment(tmp_path)) as agent:
        stop = await run(
            agent,
            tmp_path,
            {"tool": "left__ant_echo"},
            {"tool": "right__ant_echo"},
            servers=(tools(name="left"), tools(name="right")),
        )
        assert stop == "end_turn"


async def test_a_large_result_passes(tmp_path: Path) -> None:
    async with asyncio.timeout(20), hosted(argv(), environment(tmp_path)) as agent:
        size = 3_000_000
        assert await run(agent, tmp_path, {"tool": "ant_blob", "args": {"n": size}}) == "end_turn"
        done = agent.host.of("tool_call_update")[-1]
        assert len(done["rawOutput"]["content"][0]["text"]) == size


async def test_lines_that_are_not_json_are_answered_and_do_no_harm(tmp_path: Path) -> None:
    async with asyncio.timeout(20), hosted(argv(), environment(tmp_path)) as agent:
        assert agent.process.stdin
        agent.process.stdin.write(b"garbage\n[]\n\n" + b"9" * (9 << 20) + b'\n{"jsonrpc":"2.0","id":"never asked"}\n')
        assert await run(agent, tmp_path, {"say": "fine"}, servers=()) == "end_turn"
        with pytest.raises(RequestError):
            await agent.connection.list_sessions()


async def test_the_end_of_stdin_ends_the_droid_and_its_servers(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with asyncio.timeout(20), hosted(argv(), environment(tmp_path)) as agent:
        session = await agent.open(tmp_path, (tools("--log", str(log)),))
        async with asyncio.TaskGroup() as tasks:
            turn = tasks.create_task(agent.prompt(session, plan({"tool": "ant_never"})))
            await agent.host.until(lambda update: update.get("status") == "in_progress")
            assert agent.process.stdin
            agent.process.stdin.close()
            assert await agent.process.wait() == 0
        assert turn.result() == "cancelled"
    methods = [json.loads(line)["method"] for line in log.read_text().splitlines()]
    assert "notifications/cancelled" in methods


async def test_unknown_words_on_the_command_line_are_refused() -> None:
    process = await asyncio.create_subprocess_exec(*argv("--fast"), stderr=asyncio.subprocess.PIPE)
    async with asyncio.timeout(10):
        _, errors = await process.communicate()
    assert process.returncode == 2
    assert b"usage: droid [--no-commands]" in errors
