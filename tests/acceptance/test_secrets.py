"""Keys are in no file, no log, no event, no row, no process list; only where they must be."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.kit import leaks
from tests.kit.inhabitants import inhabitants, namespace
from tests.kit.scene import lent, scene
from tests.kit.server import ServerProcess

KEY = re.compile(rb"oub_[0-9a-f]{64}")


@pytest.mark.seed("OTD-SECURITY.1")
async def test_no_secret_is_anywhere_after_a_whole_day_of_a_server(tmp_path: Path) -> None:
    """Everything that takes a key is done with it, rightly and wrongly, by a server that logs all that it can."""
    folder = tmp_path / "server"
    folder.mkdir()
    async with ServerProcess(folder / "home", log_level="debug") as server:
        secrets = {"the first admin token": server.token}
        async with scene(server) as here, here.caller() as caller:
            for scope in ("admin", "write", "read"):
                secrets[f"a token that may {scope}"] = (await here.token(scope))["token"]
            brought = secrets["a token that may write"]
            plan: list[dict[str, Any]] = [
                {"tool": "ant_send_response", "args": {"message": "x"}, "expect": {"is_error": False}},
                {"tool": "oubliette_project_create", "args": {"name": "made"}, "expect": {"is_error": False}},
                {"sh": "cat /proc/*/environ; ps ax; env", "s": 5},
                {"say": "all I know: $last"},
                {"tool": "ant_any"},
            ]
            session_id = await here.start(caller, plan, context=lent(), oubliette_api_key=brought)
            for _ in range(2):
                request = await caller.request()
                await caller.answer(request, request["arguments"])
            box = namespace(here.folder(session_id))
            shown = leaks.in_processes({"brought": brought}, "cmdline")
            assert shown == []
            holders = leaks.in_processes({"brought": brought}, "environ")
            assert holders, "the droid's own client has it in its environment"
            assert len(holders) <= len(inhabitants(box)), "and nobody outside the box"
            (await here.turn(session_id)).worked()

            derived = await here.start(caller, [{"sh": "cat /proc/*/environ"}], oubliette_scope="read")
            (await here.turn(derived)).worked()
            key = here.folder(session_id) / "mcp" / "key"
            secrets["a session's key"] = key.read_text()
            async with here.box(session_id) as inside:
                for name, secret in tuple(secrets.items()):
                    await inside.ask("oubliette_tools", api_key=secret)
                    await inside.ask("oubliette_call_tool", api_key=secret, tool="token_create", arguments={})
                    await inside.ask("oubliette_call_tool", api_key=secret, tool="project_get", arguments={"x": name})
                    await inside.ask("format_disk", api_key=secret)
                    await inside.ask("caller_tool", tool=7, api_key=secret)
                    await inside.write(b'{"jsonrpc":"2.0","id":1,"api_key":"' + secret.encode() + b"\n")
            async with here.door(session_id) as wrong:
                secrets["a wrong session key"] = "0f" * 32
                await wrong.attach(key="0f" * 32)
            async with here.client(session_id, OUBLIETTE_API_KEY=brought) as agent:
                await agent.open()
                await agent.tool_names()
                assert brought.encode() not in agent.log
            for name, secret in tuple(secrets.items()):
                async with here.caller(secret, era="modern") as other:
                    await other.post(other.message("tools/list"))
                    await other.post(b'{"jsonrpc": "2.0", "method": "x", "params": "' + name.encode())
            unknown = secrets["a token that nobody made"] = "oub_" + "ab" * 32
            async with here.caller(unknown, era="modern") as other:
                assert (await other.post(other.message("tools/list"))).status == 401

            # While everything runs: the session's key is in its one file, closed to others, and nowhere else.
            found = leaks.in_files(secrets, [folder], except_for=[key])
            assert found == []
            assert key.stat().st_mode & 0o077 == 0
            events = str([await here.events(one) for one in (session_id, derived)])
            assert [name for name, secret in secrets.items() if secret in events] == []
            await server.kill()
            await server.restart()
        for name in ("cmdline", "environ"):
            assert leaks.in_processes(secrets, name) == []
    found = leaks.in_files(secrets, [folder])
    assert found == []


async def test_a_token_that_a_droid_made_is_known_to_nobody_but_the_droid(tmp_path: Path) -> None:
    """Whatever has the form of a key is looked for, since who made it alone knows it; also after a restart."""
    folder = tmp_path / "server"
    folder.mkdir()
    made = {"tool": "oubliette_token_create", "args": {"name": "mine", "scope": "read"}, "expect": {"is_error": False}}
    told = {"say": "it is $last"}
    async with ServerProcess(folder / "home", log_level="debug") as server, scene(server) as here:
        brought = (await here.token("admin"))["token"]
        async with here.caller() as caller:
            session_id = await here.start(caller, [made, told], oubliette_api_key=brought)
            first = (await here.turn(session_id)).worked()
            assert '"token":"[redacted]"' in first.text
            await server.kill()
            await server.restart()
        async with here.caller() as caller:
            await here.more(caller, session_id, [{**made, "args": {"name": "more", "scope": "read"}}, told])
            assert '"token":"[redacted]"' in (await here.turn(session_id, 2)).worked().text
        names = [token["name"] for token in (await server.ask("token_list"))["tokens"]]
        assert {"mine", "more"} <= set(names)
        assert leaks.of_the_form(KEY, [folder]) == []
    assert leaks.of_the_form(KEY, [folder]) == []
