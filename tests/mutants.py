"""`./run mutants [--only ID …]`: break one named place of the product per manifest entry, and watch a test turn red.

A test that stays green while what it proves is broken proves nothing. Each mutant names an entry, a file below
`src/oubliette`, a text that stands in it exactly once, what takes its place, and the test that notices. They run on
copies of this checkout, two at a time; first of all, every test that is named has to pass on a copy that is whole.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parent.parent
COPIED = ("src", "tests", "examples", "pyproject.toml")
AT_ONCE = 2
LIMIT_S = 120.0


@dataclass(frozen=True)
class Mutant:
    id: str
    file: str
    old: str
    new: str
    test: str

    @property
    def path(self) -> Path:
        return Path("src", "oubliette", self.file)

    @property
    def node(self) -> str:
        return f"tests/acceptance/{self.test}"


RELAY = "test_relay.py::test_a_droid_calls_a_tool_of_its_caller_and_gets_the_result[legacy]"
SHAPE = "test_relay.py::test_the_request_is_pushed_as_a_log_notification_with_the_shape_of_the_seed"
VALUES = "test_relay.py::test_a_result_of_any_json_type_and_size_reaches_the_socket_unchanged"
WORDS = "test_relay.py::test_an_error_reaches_the_droid_as_an_error_with_the_exact_text[legacy]"
LATE = "test_relay.py::test_a_caller_that_does_not_answer_in_half_a_second_is_a_timeout[session]"
LATE_ON_SOCKET = "test_relay.py::test_a_timeout_on_the_socket_is_told_as_one_when_the_time_is_up"
BLOCKS = "test_relay.py::test_a_call_on_the_socket_blocks_itself_and_nothing_else"
UNFIT = "test_relay.py::test_arguments_that_do_not_fit_disturb_nobody"
AS_IN_SEED = "test_relay.py::test_the_seeds_own_request_without_a_call_key_is_served"
GONE = "test_presence.py::test_with_no_grace_a_caller_that_disconnects_is_an_error_at_once"
DESIGNED = "test_declaration.py::test_the_designs_declaration_becomes_the_designs_notification"
KEPT = "test_declaration.py::test_a_declaration_outlives_its_server"
LISTED = "test_declaration.py::test_the_real_client_lists_the_declared_tools_with_their_schemas[legacy]"
AGAIN = "test_declaration.py::test_redeclaring_on_a_live_session_adds_and_removes_tools_and_tells_the_agent"
NO_SCHEMA = "test_declaration.py::test_a_tool_without_schema_takes_any_object"
ORDINARY = "test_declaration.py::test_the_answer_is_an_ordinary_mcp_tool_and_no_method_of_our_own"
OPTIONAL = "test_declaration.py::test_result_and_error_may_be_left_out_and_not_both_be_given"
FOREIGN = "test_answers.py::test_another_token_may_not_answer_and_the_request_stays_pending[write]"
TWICE = "test_answers.py::test_a_second_answer_does_nothing_and_the_same_again_is_only_a_repeat"
ELSEWHERE = "test_answers.py::test_an_answer_under_another_session_is_unknown"
UNKNOWN = "test_answers.py::test_an_invalid_request_id_is_a_warning_in_the_log_and_changes_nothing"
PLATFORM = "test_platform_tools.py::"
SHOWN = PLATFORM + "test_a_key_is_shown_the_tools_of_its_scope_and_no_other"
REGISTERED = PLATFORM + "test_a_client_with_a_key_registers_what_the_server_gave_with_the_prefix"
INVALID = PLATFORM + "test_an_invalid_key_finds_nothing_and_the_client_goes_on[unknown]"
NO_KEY = PLATFORM + "test_without_a_key_nothing_is_asked_and_nothing_is_there"
CALLED = PLATFORM + "test_a_droid_calls_project_list_with_the_key_it_began_with"
CREATED = PLATFORM + "test_a_droid_creates_a_project_with_its_callers_own_write_key"
TOOL_ERROR = PLATFORM + "test_what_the_tool_itself_refuses_is_a_result_and_an_error_at_the_droid"
BEYOND = PLATFORM + "test_beyond_the_scope_is_an_error_whatever_was_listed"
DIED = PLATFORM + "test_a_key_that_died_since_the_start_is_an_authentication_error"
DERIVED = "test_scopes.py::test_a_derived_key_opens_nothing_over_http_or_elsewhere_and_dies_with_its_session"
SECRETS = "test_secrets.py::test_no_secret_is_anywhere_after_a_whole_day_of_a_server"

ASKING, ANSWERING = "server/caller_tools/asking.py", "server/caller_tools/answering.py"
LEDGER, DESK = "server/caller_tools/ledger.py", "server/caller_tools/desk.py"
DECLARATION, BOXED = "server/caller_tools/declaration.py", "server/endpoints/boxed.py"
SOCKET, GATE, TOKENS = "server/endpoints/relay.py", "server/operations/gate.py", "server/tokens/tokens.py"
FAILURES, CLIENT, TOOLBOX = "server/endpoints/failures.py", "inside/client.py", "inside/toolbox.py"
RESPONSE, TOKEN = "server/operations/caller_tool.py", "server/operations/token.py"

MUTANTS = (
    # The caller-tool relay.
    Mutant(
        "REQ-CTR-001",
        ASKING,
        "            self._carriers.put(one.desk.tree.root_id, one.call.request_id, redelivery=redelivery)\n",
        "",
        RELAY,
    ),
    Mutant("REQ-CTR-001.1", "wire/naming.py", '{caller_id}_{tool}")', '{tool}_{caller_id}")', RELAY),
    Mutant("REQ-CTR-001.2", "server/caller_tools/ends.py", "Stimulus.EXPIRE))", "Stimulus.CANCEL))", LATE),
    Mutant(
        "REQ-CTR-001.3", LEDGER, "Stimulus.DISCONNECT: State.DISCONNECTED", "Stimulus.DISCONNECT: State.CANCELLED", GONE
    ),
    Mutant("REQ-CTR-002", "server/sessions/sessions.py", "                    self.declared(session.id)\n", "", AGAIN),
    Mutant("REQ-CTR-002.1", CLIENT, 'self.toolbox.declare(message["params"].get("tools"))', "False", RELAY),
    Mutant("REQ-CTR-002.2", ASKING, "    schema.check(asked.arguments, encoded, tool.box_name)\n", "", UNFIT),
    Mutant("REQ-CTR-003", DESK, '"type": "caller_tool_request"', '"type": "caller_tool_asked"', SHAPE),
    Mutant("REQ-CTR-003.1", DESK, '"tool": call.tool,', '"tool": self.names[1],', SHAPE),
    Mutant(
        "REQ-CTR-004", ANSWERING, "return Stimulus.ANSWER, _passable(result)", "return Stimulus.ANSWER, _NULL", RELAY
    ),
    Mutant("REQ-CTR-004.1", LEDGER, "        return call.outcome\n", '        return b"1"\n', VALUES),
    Mutant("REQ-CTR-004.2", ANSWERING, "return Stimulus.FAIL, error", 'return Stimulus.FAIL, "it failed"', WORDS),
    Mutant("REQ-CTR-005", SOCKET, 'if method == "caller_tool":', 'if method == "call_tool":', VALUES),
    Mutant(
        "REQ-CTR-005.1", SOCKET, "line = jsonrpc.result(request_id, await", "line = jsonrpc.result(0, await", AS_IN_SEED
    ),
    Mutant("CTR-SDK.1", "wire/events.py", 'LOGGER = "oubliette.session"', 'LOGGER = "oubliette"', SHAPE),
    Mutant(
        "CTR-SDK.2",
        TOOLBOX,
        "self._caller.append((shown(box_name, tool)",
        "self._caller.append((shown(name, tool)",
        LISTED,
    ),
    Mutant("CTR-SDK.3", DECLARATION, "inputSchema=tool.input_schema,", 'inputSchema={"type": "object"},', DESIGNED),
    Mutant("CTR-SDK.4", RESPONSE, 'name="caller_tool_response"', 'name="caller_tool_answer"', ORDINARY),
    Mutant(
        "CTR-FLOW.1",
        "server/limits.py",
        "PENDING_CALLS_PER_SESSION = 64",
        "PENDING_CALLS_PER_SESSION = 1",
        BLOCKS,
    ),
    Mutant(
        "CTR-FLOW.2",
        DESK,
        "return desk.open.get(request_id) if desk is not None else None",
        "return next(iter(desk.open.values()), None) if desk is not None else None",
        BLOCKS,
    ),
    Mutant(
        "CTR-DATA.1",
        "server/operations/session.py",
        "tools = context.caller_tools if context.caller_tools is not None else params.caller_tools",
        "tools = params.caller_tools",
        DESIGNED,
    ),
    Mutant(
        "CTR-DATA.2",
        "server/sessions/sessions.py",
        "        exchange.open_desk(session.id, session.root_id, session.owner, session.declaration)\n",
        "        exchange.open_desk(session.id, session.root_id, session.owner, None)\n",
        KEPT,
    ),
    Mutant(
        "CTR-DATA.3",
        DECLARATION,
        'return {"type": "object"}\n',
        'return {"type": "object", "maxProperties": 0}\n',
        NO_SCHEMA,
    ),
    Mutant("CTR-CONFIG.1", SOCKET, '"type": "caller_tools_config", ', "", DESIGNED),
    Mutant(
        "CTR-CONFIG.2",
        TOOLBOX,
        "            self._caller.append((shown(box_name",
        "            self._caller = [entry for entry in self._caller if False]\n"
        "            self._caller.append((shown(box_name",
        LISTED,
    ),
    Mutant("CTR-EVENT.1", "server/ids.py", "-4{digest[13:16]}", "-1{digest[13:16]}", SHAPE),
    Mutant("CTR-RESPONSE.1", RESPONSE, "error=params.error,", "error=None,", OPTIONAL),
    Mutant(
        "CTR-RESPONSE.2",
        RESPONSE,
        '] = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))',
        "]",
        ORDINARY,
    ),
    Mutant("CTR-SOCKET.1", ASKING, "encoded = _encode_sorted(asked.arguments)", "encoded = _encode_sorted({})", BLOCKS),
    Mutant(
        "CTR-SOCKET.2",
        SOCKET,
        "return msgspec.Raw(await self._boxed.caller_tool(session_id, asked, connection.instance, hear))",
        "return [msgspec.Raw(await self._boxed.caller_tool(session_id, asked, connection.instance, hear))]",
        VALUES,
    ),
    Mutant(
        "CTR-TIMEOUT.1",
        ASKING,
        "timeout_s = tool.timeout_s or desk.declaration.timeout_s or self._timeout_s",
        "timeout_s = self._timeout_s",
        LATE,
    ),
    Mutant(
        "CTR-TIMEOUT.1",
        "server/app.py",
        "timeout_s=settings.caller_tool_timeout_s,\n            timeout_max_s",
        "timeout_s=60.0,\n            timeout_max_s",
        "test_relay.py::test_a_servers_own_time_ends_a_call_where_session_and_tool_say_nothing",
    ),
    Mutant(
        "CTR-TIMEOUT.2",
        LEDGER,
        "Stimulus.EXPIRE: errors.CallTimeout.kind",
        "Stimulus.EXPIRE: errors.CallCancelled.kind",
        LATE_ON_SOCKET,
    ),
    Mutant("CTR-TIMEOUT.3", LEDGER, 'else "expired"', 'else "answered"', LATE),
    Mutant(
        "CTR-SECURITY.1",
        ANSWERING,
        "(call.owner != actor.principal or actor.derived):\n            return await",
        "actor.derived:\n            return await",
        FOREIGN,
    ),
    Mutant("CTR-SECURITY.2", LEDGER, "    if again == call.outcome:\n", "    if again:\n", TWICE),
    Mutant(
        "CTR-SECURITY.3",
        DESK,
        "return desk.open.get(request_id) if desk is not None else None",
        "return next((one.open[request_id] for one in self._desks.values() if request_id in one.open), None)",
        ELSEWHERE,
    ),
    Mutant(
        "CTR-ERROR.1", "server/caller_tools/carriers.py", "reach.gone_at + self._grace_s", "reach.gone_at + 4", GONE
    ),
    Mutant(
        "CTR-ERROR.2",
        "server/caller_tools/ends.py",
        "max(0.0, one.due - self._clock.monotonic())",
        "max(4.0, one.due - self._clock.monotonic())",
        LATE_ON_SOCKET,
    ),
    Mutant("CTR-ERROR.3", "inside/results.py", 'result["isError"] = True', 'result["isError"] = False', WORDS),
    Mutant("CTR-ERROR.4", ANSWERING, "logger.warning(\n", "logger.debug(\n", UNKNOWN),
    # The platform's tools in the box.
    Mutant(
        "OT-DISCOVERY",
        CLIENT,
        'api_key = os.environ.get("OUBLIETTE_API_KEY", "")',
        'api_key = ""',
        f"{REGISTERED}[read]",
    ),
    Mutant(
        "OT-DISCOVERY.1",
        GATE,
        "if allowed(one, actor)]",
        "if allowed(one, actor) and not one.everywhere]",
        f"{REGISTERED}[admin]",
    ),
    Mutant("OT-DISCOVERY.2", GATE, "if allowed(one, actor)]", "if one.inside]", f"{REGISTERED}[read]"),
    Mutant(
        "OT-DISCOVERY.3",
        BOXED,
        'actor = await self._actor(session_id, asked.api_key, "oubliette_tools")',
        'actor = Actor(principal="x", scope=Scope.READ)',
        INVALID,
    ),
    Mutant("OT-EXECUTION", SOCKET, 'if method == "oubliette_call_tool":', 'if method == "call_tool":', CALLED),
    Mutant("OT-EXECUTION.1", TOOLBOX, "key = encode(self._api_key)", 'key = encode("")', CALLED),
    Mutant(
        "OT-EXECUTION.2", "server/operations/project.py", "description=project.description,", 'description="",', CREATED
    ),
    Mutant(
        "OT-EXECUTION.3",
        TOKEN,
        'title="Create a token",\n        scope=Scope.ADMIN,',
        'title="Create a token",\n        scope=Scope.WRITE,',
        BEYOND,
    ),
    Mutant(
        "OT-EXECUTION.4",
        TOKENS,
        "expires_at is not None and expires_at <= now)",
        "expires_at is not None and expires_at <= 0)",
        f"{DIED}[expired]",
    ),
    Mutant(
        "OT-NAMING", TOOLBOX, 'PLATFORM_PREFIX = "oubliette_"', 'PLATFORM_PREFIX = "platform_"', f"{REGISTERED}[read]"
    ),
    Mutant(
        "OT-NAMING.1",
        TOOLBOX,
        "shown(PLATFORM_PREFIX + name, tool)",
        "shown(PLATFORM_PREFIX + name[:8], tool)",
        f"{REGISTERED}[write]",
    ),
    Mutant(
        "OT-NOKEY",
        "server/sessions/keys.py",
        "            if wanted is None:\n                return None, ()\n",
        '            wanted = wanted or "read"\n',
        NO_KEY,
    ),
    Mutant("OT-NOKEY.1", CLIENT, "if not self._api_key or not self.calls", "if not self.calls", NO_KEY),
    Mutant("OTD-TOOLS.1", BOXED, '"inputSchema": schema(operation.params),', '"inputSchema": {},', f"{SHOWN}[read]"),
    Mutant(
        "OTD-TOOLS.2",
        FAILURES,
        "errors.Unauthenticated: Codes(jsonrpc.UNAUTHENTICATED",
        "errors.Unauthenticated: Codes(jsonrpc.SERVER_ERROR",
        INVALID,
    ),
    Mutant("OTD-CALL.1", BOXED, '[{"type": "text", "text": encoded.decode()}]', "[]", CALLED),
    Mutant("OTD-CALL.2", BOXED, '"isError": is_error,', '"isError": True,', CALLED),
    Mutant("OTD-CALL.3", BOXED, '"isError": True, "_meta": meta', '"isError": False, "_meta": meta', TOOL_ERROR),
    Mutant("OTD-CALL.4", TOKENS, "if revoked_at is not None or (", "if (", f"{DIED}[revoked]"),
    Mutant(
        "OTD-CALL.5",
        FAILURES,
        "errors.Forbidden: Codes(jsonrpc.FORBIDDEN",
        "errors.Forbidden: Codes(jsonrpc.SERVER_ERROR",
        BEYOND,
    ),
    Mutant(
        "OTD-SCOPE.1",
        "server/operations/limits.py",
        'name="config_limits",',
        'name="config_bounds",',
        f"{SHOWN}[admin]",
    ),
    Mutant(
        "OTD-SCOPE.2",
        "server/operations/project.py",
        'title="Create a project",\n        scope=Scope.WRITE,',
        'title="Create a project",\n        scope=Scope.ADMIN,',
        f"{SHOWN}[write]",
    ),
    Mutant(
        "OTD-SCOPE.3",
        "server/operations/session.py",
        'title="Read events",\n        scope=Scope.READ,',
        'title="Read events",\n        scope=Scope.WRITE,',
        f"{SHOWN}[read]",
    ),
    Mutant(
        "OTD-SCOPE.4",
        TOKEN,
        'title="List tokens",\n        scope=Scope.ADMIN,',
        'title="List tokens",\n        scope=Scope.READ,',
        f"{SHOWN}[read]",
    ),
    Mutant("OTD-START.1", CLIENT, "OUBLIETTE_API_KEY detected, requesting tools", "hello", f"{REGISTERED}[read]"),
    Mutant("OTD-START.2", CLIENT, "failed to get oubliette tools: %s", "no tools: %s", INVALID),
    Mutant("OTD-START.3", TOOLBOX, "key = encode(self._api_key)", "key = encode(self._api_key[:-1])", CALLED),
    Mutant("OTD-START.4", TOOLBOX, 'SHOWN = ("title", "description", ', 'SHOWN = ("title", ', f"{REGISTERED}[read]"),
    Mutant("OTD-START.5", "inside/results.py", 'value.get("isError", False)\n    meta', "False\n    meta", TOOL_ERROR),
    Mutant(
        "OTD-SECURITY.1",
        "server/droids/dialogue.py",
        "return redaction.redacted(data, self._secret)",
        "return data",
        SECRETS,
    ),
    Mutant("OTD-SECURITY.2", TOKENS, "if revoked_at is not None or (", "if False and (", f"{DIED}[revoked]"),
    Mutant("OTD-SECURITY.3", GATE, "if not allowed(operation, asked.actor):", "if False:", BEYOND),
    Mutant("OTD-SECURITY.4", GATE, "if actor.derived and not operation.derived:", "if False:", DERIVED),
    Mutant(
        "OTD-SECURITY.5",
        "server/operations/project.py",
        '        await audit.write(tx, now, asked.entry("project_create", project.id))\n',
        "",
        CREATED,
    ),
    Mutant("OTD-TESTING.1", GATE, "if allowed(one, actor)]", "if one.name < 'q']", f"{SHOWN}[write]"),
    Mutant("OTD-TESTING.2", SOCKET, 'if method == "oubliette_tools":', 'if method == "tools":', f"{SHOWN}[read]"),
    Mutant("OTD-TESTING.3", "server/errors.py", "invalid or expired API key", "no", INVALID),
    Mutant("OTD-TESTING.4", BOXED, "        encoded = _encode(result)\n", '        encoded = b"{}"\n', CALLED),
    Mutant(
        "OTD-TESTING.5",
        "server/tokens/token.py",
        "return _RANKS[self] >= _RANKS[needed]",
        "return True",
        BEYOND,
    ),
    Mutant("OTD-TESTING.6", TOKENS, "if revoked_at is not None or (", "if None is not None or (", f"{DIED}[revoked]"),
    Mutant(
        "OTD-TESTING.7",
        "server/operations/project.py",
        "            name=params.name,\n",
        '            name="a",\n',
        CREATED,
    ),
)


@contextmanager
def copy() -> Generator[Path]:
    """A checkout to break: what tests run from, without caches."""
    with tempfile.TemporaryDirectory(prefix="oub-mutant-") as folder:
        root = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
            else:
                shutil.copy2(source, root / name)
        yield root


def run(root: Path, nodes: Sequence[str], *options: str) -> tuple[int, str]:
    """Pytest on a copy: its exit code and what it said. 124 where it took too long."""
    # A place of its own for what tests leave: runs beside it clear away each other's.
    place = f"--basetemp={root / '.left'}"
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", place, *options, *nodes]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=LIMIT_S * max(1, len(nodes) / 8)
        )
    except subprocess.TimeoutExpired:
        return 124, "it took too long"
    return done.returncode, done.stdout + done.stderr


def problem(root: Path, mutant: Mutant) -> str:
    """Break the copy, run the test, mend the copy. Empty where the test noticed, as a test does."""
    path = root / mutant.path
    whole = path.read_text()
    if whole.count(mutant.old) != 1:
        return f"its text stands {whole.count(mutant.old)} times in {mutant.path}"
    try:
        path.write_text(whole.replace(mutant.old, mutant.new))
        code, said = run(root, [mutant.node])
    finally:
        path.write_text(whole)
    if code == 0:
        return f"{mutant.test} stays green"
    if code != 1 or not re.search(r"^\d+ failed", said, re.MULTILINE) or re.search(r"\d+ error", said):
        return f"{mutant.test} did not fail as a test fails:\n{said[-2000:]}"
    return ""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="./run mutants", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--only", metavar="ID", nargs="+", help="entries of the manifest; all of them without this")
    only = parser.parse_args(arguments).only
    chosen = [mutant for mutant in MUTANTS if only is None or mutant.id in only]
    if only is not None and {mutant.id for mutant in chosen} != set(only):
        parser.error(f"there is no mutant for {', '.join(sorted(set(only) - {mutant.id for mutant in chosen}))}")
    began = time.monotonic()
    with copy() as one, copy() as two:
        nodes = sorted({mutant.node for mutant in chosen})
        print(f"mutants: {len(nodes)} tests on a whole copy", flush=True)
        code, said = run(one, nodes, *(("-n", str(AT_ONCE)) if len(nodes) > 1 else ()))
        if code != 0:
            print(f"mutants: not all pass before anything is broken:\n{said[-4000:]}")
            return 2
        failed = hunt(chosen, (one, two))
    print(f"mutants: {len(chosen) - failed} of {len(chosen)} were noticed, in {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


def hunt(chosen: Sequence[Mutant], copies: Sequence[Path]) -> int:
    """Try every mutant, as many at a time as there are copies; how many nobody noticed."""
    free: SimpleQueue[Path] = SimpleQueue()
    for root in copies:
        free.put(root)

    def attempt(mutant: Mutant) -> bool:
        root = free.get()
        try:
            found = problem(root, mutant)
        finally:
            free.put(root)
        print(
            f"mutants: {mutant.id:16} {'NOT NOTICED: ' + found if found else 'noticed by ' + mutant.test}", flush=True
        )
        return not found

    with ThreadPoolExecutor(len(copies)) as pool:
        return list(pool.map(attempt, chosen)).count(False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
