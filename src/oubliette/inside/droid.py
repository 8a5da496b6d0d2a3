"""The built-in droid: an agent that runs a scripted plan, offline, and speaks ACP over stdio like any other.

It thinks nothing: the prompt carries the plan, `<<plan [step, …]>>`, and every step is one JSON object:

    {"say": "text"}                          a message; $last and $tools are filled in, $last.a.b digs in JSON
    {"tool": "name", "args": {…}}            call an MCP tool by its name or its end; "s": seconds without progress
    {"parallel": [step, …]}                  really at once
    {"sh": "command"}                        run a command; output and time ("s") are bounded
    {"sleep": 1.5}                           wait
    {"fail": "message"}                      end the turn with an error
    {"list": true}                           ask the MCP servers for their tools again, and say their names
    {"wait_tool": "name", "s": 5}            wait until a tool appears
    {"repeat": 3, "step": {…}}               the same step again and again

A step that has a result (tool, sh, list) may carry "expect": {"is_error": false, "contains": "…", "lacks": "…",
"equals": …}; a result that differs ends the turn with an error that names the step. What a tool answers, errors
included, is otherwise just the next $last. One file, standard library only, any Python from 3.9.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import uuid
from typing import (
    Any,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Dict,
    List,
    NamedTuple,
    Optional,
    Set,
    Tuple,
    Union,
    cast,
)

Json = Dict[str, Any]
Step = Dict[str, Any]

ACP_VERSION = 1
MCP_VERSION = "2025-11-25"
MCP_VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
LINE_BYTES_MAX = 8 * 1024 * 1024
RAW_OUTPUT_BYTES_MAX = 7 * 1024 * 1024
PREVIEW_CHARS = 16 * 1024
MCP_START_S = 10.0
MCP_STOP_S = 2.0
TOOL_CALL_S = 7200.0  # the server ends every call and every wait before
SIGN_OF_LIFE_S = 5.0
COMMAND_S = 60.0
COMMAND_OUTPUT_BYTES = 256 * 1024
WAIT_TOOL_S = 5.0
PLAN_STEPS_MAX = 1000
PLAN_DEPTH_MAX = 8
REPEAT_MAX = 100_000
SECONDS_MAX = 3600.0
SHOWN_STEPS = 20
HISTORY_BYTES_MAX = 1024 * 1024
# What a box without walls is found by, when something in it is cut off from its keeper. No secret.
MARK = "OUBLIETTE_BOX"

PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS, INTERNAL_ERROR = -32700, -32600, -32601, -32602, -32603
PLAN_FAILED = -32000
MCP_FAILED = -32000

SYNTAX = (
    "I am the built-in droid and only run plans. Put one into your message, for example:\n"
    '<<plan [{"tool": "ant_send_response", "args": {"message": "hi"}, "expect": {"is_error": false}},'
    ' {"say": "The answer was: $last"}]>>\n'
    "Steps: say, tool, parallel, sh, sleep, fail, list, wait_tool, repeat."
)
MODES = [
    {"id": "auto", "name": "Auto", "description": "Calls tools without asking."},
    {"id": "ask", "name": "Ask", "description": "Asks for permission before every tool call and command."},
]
PERMISSIONS = [
    {"optionId": "once", "name": "Allow", "kind": "allow_once"},
    {"optionId": "always", "name": "Always allow", "kind": "allow_always"},
    {"optionId": "no", "name": "Reject", "kind": "reject_once"},
]


def log(message: str) -> None:
    print("droid: " + message, file=sys.stderr, flush=True)


def as_object(value: Any) -> Json:
    """The value if it is a JSON object, else an empty one."""
    return cast(Json, value) if isinstance(value, dict) else {}


def as_list(value: Any) -> List[Any]:
    return cast("List[Any]", value) if isinstance(value, list) else []


def dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


# ---------------------------------------------------------------------------------------------- JSON-RPC over lines


class RpcError(Exception):
    """An error as JSON-RPC carries it: ours to send, or the other side's answer."""

    def __init__(self, code: int, message: str, data: Optional[Json] = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data

    def as_json(self) -> Json:
        error: Json = {"code": self.code, "message": self.message}
        if self.data is not None:
            error["data"] = self.data
        return error


class Gone(Exception):
    """The other side closed its end."""


async def read_lines(reader: asyncio.StreamReader) -> AsyncIterator[Optional[bytes]]:
    """Every line without its end; None stands for a line over the bound, which is dropped."""
    parts: List[bytes] = []
    size = 0
    while True:
        chunk = await reader.read(256 * 1024)
        if not chunk:
            return
        *whole, rest = chunk.split(b"\n")
        for end in whole:
            size += len(end)
            parts.append(end)
            yield b"".join(parts) if size <= LINE_BYTES_MAX else None
            parts, size = [], 0
        if rest:
            size += len(rest)
            if size <= LINE_BYTES_MAX:
                parts.append(rest)
            else:
                parts = []


Answer = Callable[[str, Json], Awaitable[Any]]
Hear = Callable[[str, Json], None]


class Connection:
    """One JSON-RPC peer. Requests that come in run each in a task of their own; notifications run in order."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answer: Answer,
        hear: Hear,
        answers_noise: bool,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._answer = answer
        self._hear = hear
        self._answers_noise = answers_noise
        self._open: Dict[int, asyncio.Future[Any]] = {}
        self._tasks: Set[asyncio.Task[None]] = set()
        self._last_id = 0
        self._draining = asyncio.Lock()
        self.is_gone = False

    async def run(self) -> None:
        """Read until the other side closes; then everybody who waits for it is told."""
        try:
            async for line in read_lines(self._reader):
                self._receive(line)
        except (ConnectionError, OSError):
            pass
        self.is_gone = True
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(Gone())

    def _receive(self, line: Optional[bytes]) -> None:
        if line is not None and not line.strip():
            return
        try:
            frame = as_object(json.loads(line)) if line is not None else {}
        except (ValueError, RecursionError):
            frame = {}
        if not frame:
            self._noise("not a JSON object, or longer than 8 MiB")
            return
        method, request_id = frame.get("method"), frame.get("id")
        if isinstance(method, str):
            params = as_object(frame.get("params"))
            if "id" in frame:
                self.own(self._reply(request_id, method, params))
            else:
                self._hear(method, params)
        elif isinstance(request_id, int) and request_id in self._open:
            waiting = self._open[request_id]
            if waiting.done():
                return
            error = as_object(frame.get("error"))
            if error:
                code = error.get("code")
                waiting.set_exception(
                    RpcError(
                        code if isinstance(code, int) else INTERNAL_ERROR,
                        str(error.get("message")),
                        as_object(error.get("data")) or None,
                    )
                )
            else:
                waiting.set_result(frame.get("result"))
        elif "id" not in frame:
            self._noise("neither a request nor an answer")

    def _noise(self, what: str) -> None:
        if self._answers_noise:
            self._write({"jsonrpc": "2.0", "id": None, "error": {"code": PARSE_ERROR, "message": what}})
        else:
            log("a line of an MCP server was passed over: " + what)

    async def _reply(self, request_id: Any, method: str, params: Json) -> None:
        try:
            frame: Json = {"result": await self._answer(method, params)}
        except RpcError as error:
            frame = {"error": error.as_json()}
        except Exception as error:
            log("a bug: " + repr(error))
            frame = {"error": {"code": INTERNAL_ERROR, "message": "internal error: " + type(error).__name__}}
        self._write({"jsonrpc": "2.0", "id": request_id, **frame})
        await self.flush()

    def own(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work in a task that lives no longer than this connection."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _write(self, frame: Json) -> None:
        if not self._writer.is_closing():
            self._writer.write(dumps(frame) + b"\n")

    async def flush(self) -> None:
        # Old Pythons take two tasks in drain() at once for an error.
        async with self._draining:
            try:
                await self._writer.drain()
            except (ConnectionError, OSError):
                pass  # the reader sees the end too, and tells everybody

    def notify(self, method: str, params: Json) -> None:
        self._write({"jsonrpc": "2.0", "method": method, "params": params})

    async def request(self, method: str, params: Json, on_id: Optional[Callable[[int], None]] = None) -> Any:
        """Ask and wait. Raises `RpcError` or `Gone`."""
        if self.is_gone:
            raise Gone()
        self._last_id += 1
        request_id = self._last_id
        waiting: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open[request_id] = waiting
        if on_id is not None:
            on_id(request_id)
        try:
            self._write({"jsonrpc": "2.0", "id": request_id, "method": method, "params": params})
            await self.flush()
            return await waiting
        finally:
            del self._open[request_id]

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._writer.close()


# ------------------------------------------------------------------------------------------------------ MCP servers


def own_environment() -> Dict[str, str]:
    """What every program that the droid starts is told of the droid's own environment, and no more."""
    defaults = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/", "LANG": "C.UTF-8"}
    environment = {name: os.environ.get(name, default) for name, default in defaults.items()}
    if MARK in os.environ:
        environment[MARK] = os.environ[MARK]
    return environment


class Result(NamedTuple):
    """What a step came to: its text, its JSON where it has some, and whether it went wrong."""

    text: str
    value: Any
    is_error: bool


def tool_result(raw: Any) -> Result:
    """Read an MCP tools/call result."""
    if not isinstance(raw, dict):
        return Result("not a tool result: " + repr(raw)[:200], None, True)
    raw = as_object(raw)
    texts: List[str] = []
    for block in map(as_object, as_list(raw.get("content"))):
        if isinstance(block.get("text"), str):
            texts.append(block["text"])
        else:
            texts.append("[{} {}]".format(block.get("type"), block.get("mimeType", "")).replace(" ]", "]"))
    text = "\n".join(texts)
    value = raw.get("structuredContent")
    if value is None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
    return Result(text, value, raw.get("isError") is True)


class McpServer:
    """A stdio MCP server of one session. What goes wrong with it stays in `failure` until somebody is told."""

    def __init__(self, declared: Json, cwd: str, on_change: Callable[[], None]) -> None:
        self.name = str(declared.get("name"))
        self.tools: Dict[str, Json] = {}
        self.failure: Optional[str] = None
        self._hearing: Dict[int, Callable[[], None]] = {}  # whom a progress token belongs to
        self._declared = declared
        self._cwd = cwd
        self._on_change = on_change
        self._progress_token = 0
        self._listing = asyncio.Lock()
        self._process: Optional[asyncio.subprocess.Process] = None
        self._connection: Optional[Connection] = None
        self._reading: Optional[asyncio.Task[None]] = None

    async def start(self) -> None:
        """Raises `RpcError` unless it started, agreed on a version and listed its tools in time."""
        try:
            await asyncio.wait_for(self._start(), MCP_START_S)
        except asyncio.TimeoutError:
            raise self._failed("did not answer within {:g} s".format(MCP_START_S)) from None
        except OSError as error:
            raise self._failed("did not start: " + str(error)) from None
        except Gone:
            raise self._failed("ended before it listed its tools") from None
        except RpcError as error:
            raise self._failed("refused: " + error.message) from None

    def _failed(self, what: str) -> RpcError:
        message = "the MCP server {} {}".format(self.name, what)
        return RpcError(MCP_FAILED, message, {"kind": "mcp_failed", "server": self.name})

    async def _start(self) -> None:
        environment = own_environment()
        for variable in map(as_object, as_list(self._declared.get("env"))):
            environment[str(variable.get("name"))] = str(variable.get("value"))
        arguments = [str(argument) for argument in as_list(self._declared.get("args"))]
        self._process = await asyncio.create_subprocess_exec(
            str(self._declared.get("command")),
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            cwd=self._cwd,
        )
        assert self._process.stdin
        assert self._process.stdout
        self._connection = Connection(self._process.stdout, self._process.stdin, self._answer, self._hear, False)
        self._reading = asyncio.get_running_loop().create_task(self._read(self._connection))
        hello = await self._connection.request(
            "initialize",
            {
                "protocolVersion": MCP_VERSION,
                "capabilities": {},
                "clientInfo": {"name": "oubliette-droid", "version": "1"},
            },
        )
        version = as_object(hello).get("protocolVersion")
        if version not in MCP_VERSIONS:
            raise RpcError(INVALID_REQUEST, "it speaks MCP {!r}, which is unknown here".format(version))
        self._connection.notify("notifications/initialized", {})
        await self.list()

    async def _read(self, connection: Connection) -> None:
        await connection.run()
        self.failure = "the MCP server {} ended".format(self.name)
        self._on_change()

    async def list(self) -> None:
        """Ask for all tools, page by page; one listing at a time, so that the last answer is the newest."""
        assert self._connection
        async with self._listing:
            tools: Dict[str, Json] = {}
            cursor: Any = None
            while True:
                page = as_object(await self._connection.request("tools/list", {"cursor": cursor} if cursor else {}))
                if not isinstance(page.get("tools"), list):
                    raise RpcError(INVALID_REQUEST, "its tools/list is not a list of tools")
                for tool in map(as_object, as_list(page["tools"])):
                    tools[str(tool.get("name"))] = tool
                cursor = page.get("nextCursor")
                if not cursor or len(tools) > 10_000:
                    break
            self.tools = tools
        self._on_change()

    async def _answer(self, method: str, params: Json) -> Any:
        if method == "ping":
            return {}
        raise RpcError(METHOD_NOT_FOUND, "no such method: " + method)

    def _hear(self, method: str, params: Json) -> None:
        if method == "notifications/tools/list_changed" and self._connection:
            self._connection.own(self._relist())
        elif method == "notifications/progress":
            token = params.get("progressToken")
            heard = self._hearing.get(token) if isinstance(token, int) else None
            if heard is not None:
                heard()

    async def _relist(self) -> None:
        try:
            await asyncio.wait_for(self.list(), MCP_START_S)
        except (asyncio.TimeoutError, Gone, RpcError) as error:
            why = str(error) or "no answer"
            self.failure = "the MCP server {} did not list its tools again: {}".format(self.name, why)
            self._on_change()

    async def call(self, tool: str, arguments: Json, limit_s: float, on_progress: Callable[[], None]) -> Any:
        """The raw result of a tool call, which may take `limit_s` from its last progress on.

        Whoever stops waiting tells the server so. Raises `RpcError`, `Gone` or `TimeoutError`.
        """
        assert self._connection
        connection = self._connection
        self._progress_token += 1
        token = self._progress_token
        loop = asyncio.get_running_loop()
        heard_at = loop.time()

        def heard() -> None:
            nonlocal heard_at
            heard_at = loop.time()
            on_progress()

        self._hearing[token] = heard
        ids: List[int] = []
        params = {"name": tool, "arguments": arguments, "_meta": {"progressToken": token}}
        asking = loop.create_task(connection.request("tools/call", params, ids.append))
        try:
            while not asking.done():
                left_s = heard_at + limit_s - loop.time()
                if left_s <= 0:
                    raise asyncio.TimeoutError
                await asyncio.wait({asking}, timeout=left_s)
            return asking.result()
        except (asyncio.TimeoutError, asyncio.CancelledError) as stopped:
            reason = "time limit" if isinstance(stopped, asyncio.TimeoutError) else "the turn was cancelled"
            for request_id in ids:
                connection.notify("notifications/cancelled", {"requestId": request_id, "reason": reason})
            raise
        finally:
            asking.cancel()
            del self._hearing[token]

    async def close(self) -> None:
        """Close its stdin, give it a moment, kill it."""
        if self._process is None:
            return
        if self._connection is not None:
            self._connection.close()
        try:
            await asyncio.wait_for(self._process.wait(), MCP_STOP_S)
        except asyncio.TimeoutError:
            self._process.kill()
            await self._process.wait()
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=MCP_STOP_S)


KEY = re.compile(rb"oub_[0-9a-f]{64}")


class Toolbox:
    """All tools of all MCP servers of a session, under the names that the droid uses for them."""

    def __init__(self, declared: List[Json], cwd: str) -> None:
        self._changed = asyncio.Event()
        self.servers = [McpServer(one, cwd, self._changed.set) for one in declared]
        variables = [as_object(variable) for one in declared for variable in as_list(one.get("env"))]
        keys = [str(variable.get("value")) for variable in variables if "KEY" in str(variable.get("name"))]
        self._secrets = [key.encode() for key in keys if len(key) >= 16]

    async def start(self) -> None:
        outcomes = await asyncio.gather(*(server.start() for server in self.servers), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                await self.close()
                raise outcome

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self.servers))

    def redacted(self, text: bytes) -> bytes:
        """Without the keys that the servers were given or made, wherever a command may have found and printed them."""
        for secret in self._secrets:
            text = text.replace(secret, b"[redacted]")
        return KEY.sub(b"[redacted]", text)

    def check(self) -> None:
        """Raises `RpcError` when a server has died or no longer lists."""
        for server in self.servers:
            if server.failure is not None:
                raise RpcError(MCP_FAILED, server.failure, {"kind": "mcp_failed", "server": server.name})

    def named(self) -> Dict[str, Tuple[McpServer, str]]:
        """A tool's own name, or `{server}__{tool}` where two servers offer the same."""
        names = [name for server in self.servers for name in server.tools]
        found: Dict[str, Tuple[McpServer, str]] = {}
        for server in self.servers:
            for name in server.tools:
                found[name if names.count(name) == 1 else server.name + "__" + name] = (server, name)
        return found

    def find(self, wanted: str) -> Optional[str]:
        """The full name of the tool with this name, or of the only one whose name ends with it."""
        named = self.named()
        if wanted in named:
            return wanted
        ends = [name for name in named if name.endswith("_" + wanted)]
        return ends[0] if len(ends) == 1 else None

    async def relist(self) -> None:
        for server in self.servers:
            try:
                await asyncio.wait_for(server.list(), MCP_START_S)
            except (asyncio.TimeoutError, Gone, RpcError) as error:
                raise PlanFailed("the MCP server {} did not list its tools: {}".format(server.name, error)) from None

    async def wait_for(self, wanted: str, limit_s: float) -> bool:
        """Whether the tool appeared in time."""
        loop = asyncio.get_running_loop()
        end = loop.time() + limit_s
        while self.find(wanted) is None:
            self.check()
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), end - loop.time())
            except asyncio.TimeoutError:
                return False
        return True


# ------------------------------------------------------------------------------------------------------------ plans


class PlanFailed(Exception):
    """The plan says that the turn ends here, with this message."""


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= SECONDS_MAX


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= REPEAT_MAX


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_object(value: Any) -> bool:
    return isinstance(value, dict)


def is_true(value: Any) -> bool:
    return value is True


def is_steps(value: Any) -> bool:
    return isinstance(value, list)


# Each verb: what its value must be, and what may stand beside it.
VERBS: Dict[str, Tuple[Callable[[Any], bool], Dict[str, Callable[[Any], bool]]]] = {
    "say": (is_text, {}),
    "tool": (is_text, {"args": is_object, "expect": is_object, "s": is_number}),
    "parallel": (is_steps, {}),
    "sh": (is_text, {"expect": is_object, "s": is_number}),
    "sleep": (is_number, {}),
    "fail": (is_text, {}),
    "list": (is_true, {"expect": is_object}),
    "wait_tool": (is_text, {"s": is_number}),
    "repeat": (is_count, {"step": is_object}),
}
EXPECTATIONS = ("is_error", "contains", "lacks", "equals")


def find_plan(prompt: str) -> Optional[List[Step]]:
    """The steps of every plan in a prompt, in order; None without any. Raises `RpcError` for a broken one."""
    steps: List[Step] = []
    found = False
    position = prompt.find("<<plan")
    while position >= 0:
        found = True
        start = position + len("<<plan")
        start += len(prompt[start:]) - len(prompt[start:].lstrip())
        try:
            plan, end = json.JSONDecoder().raw_decode(prompt, start)
        except (ValueError, RecursionError) as error:
            raise bad_plan("its JSON does not parse: " + str(error)) from None
        if not prompt[end:].lstrip().startswith(">>"):
            raise bad_plan("`>>` is missing after its JSON")
        if not isinstance(plan, list):
            raise bad_plan("it is not a list of steps")
        steps += plan
        position = prompt.find("<<plan", end)
    if not found:
        return None
    check_steps(steps, "", 0)
    return steps


def bad_plan(what: str) -> RpcError:
    return RpcError(INVALID_PARAMS, "the plan cannot be run: " + what, {"kind": "bad_plan"})


def check_steps(steps: List[Any], where: str, depth: int) -> None:
    if len(steps) > PLAN_STEPS_MAX:
        raise bad_plan("more than {} steps".format(PLAN_STEPS_MAX))
    if depth > PLAN_DEPTH_MAX:
        raise bad_plan("steps are nested more than {} deep".format(PLAN_DEPTH_MAX))
    for number, step in enumerate(steps, start=1):
        check_step(step, "{}{}".format(where, number), depth)


def check_step(step: Any, where: str, depth: int) -> None:
    if not isinstance(step, dict):
        raise bad_plan("step {} is not an object".format(where))
    step = as_object(step)
    verbs = [verb for verb in VERBS if verb in step]
    if len(verbs) != 1:
        raise bad_plan("step {} needs exactly one of {}".format(where, ", ".join(VERBS)))
    verb = verbs[0]
    fits, beside = VERBS[verb]
    if not fits(step[verb]):
        raise bad_plan("step {}: {} has a value that it cannot have".format(where, verb))
    for name, value in step.items():
        if name == verb:
            continue
        if name not in beside:
            raise bad_plan("step {}: {} knows no {!r}".format(where, verb, name))
        if not beside[name](value):
            raise bad_plan("step {}: {} has a value that it cannot have".format(where, name))
    for name in as_object(step.get("expect")):
        if name not in EXPECTATIONS:
            raise bad_plan("step {}: expect knows no {!r}".format(where, name))
    if verb == "parallel":
        check_steps(step["parallel"], where + ".", depth + 1)
    elif verb == "repeat":
        if "step" not in step:
            raise bad_plan("step {}: repeat needs a step".format(where))
        check_steps([step["step"]], where + ".", depth + 1)


def title_of(step: Step) -> str:
    """One line for people."""
    for verb in VERBS:
        if verb in step:
            if verb == "parallel":
                return "at once: " + "; ".join(title_of(one) for one in step["parallel"])[:200]
            if verb == "repeat":
                return "{} times: {}".format(step["repeat"], title_of(step["step"]))
            return "{} {}".format(verb, step[verb] if verb != "list" else "tools")[:200]
    return ""


HOLE = re.compile(r"\$(last|tools)((?:\.[A-Za-z0-9_]+)*)")


def fill(text: str, last: Result, tools: str) -> str:
    """Put $last and $tools into a text. Raises `PlanFailed` where $last.a.b leads nowhere."""

    def value(hole: re.Match[str]) -> str:
        if hole.group(1) == "tools":
            return tools + hole.group(2)
        if not hole.group(2):
            return last.text
        here = last.value
        for name in hole.group(2)[1:].split("."):
            if name in as_object(here):
                here = as_object(here)[name]
            elif name.isdigit() and int(name) < len(as_list(here)):
                here = as_list(here)[int(name)]
            else:
                raise PlanFailed("{} is not in the last result: {}".format(hole.group(0), last.text[:500]))
        return here if isinstance(here, str) else json.dumps(here, ensure_ascii=False)

    return HOLE.sub(value, text)


def fill_all(value: Any, last: Result, tools: str) -> Any:
    """The same for every string inside a JSON value, except plans for other droids, which are theirs to fill."""
    if isinstance(value, str):
        return value if "<<plan" in value else fill(value, last, tools)
    if isinstance(value, list):
        return [fill_all(one, last, tools) for one in as_list(value)]
    if isinstance(value, dict):
        return {name: fill_all(one, last, tools) for name, one in as_object(value).items()}
    return value


def missed(expected: Json, got: Result) -> Optional[str]:
    """In what a result differs from what was expected; None where it does not."""
    shown = got.text if len(got.text) <= 500 else got.text[:500] + "…"
    if "is_error" in expected and expected["is_error"] != got.is_error:
        words = ("an error", "a success") if got.is_error else ("a success", "an error")
        return "expected {1}, got {0}: {2}".format(*words, shown)
    if "contains" in expected and str(expected["contains"]) not in got.text:
        return "expected {!r} in the result, got: {}".format(expected["contains"], shown)
    if "lacks" in expected and str(expected["lacks"]) in got.text:
        return "expected no {!r} in the result, got: {}".format(expected["lacks"], shown)
    if "equals" in expected and not (same(expected["equals"], got.value) or expected["equals"] == got.text):
        return "expected {}, got: {}".format(json.dumps(expected["equals"]), shown)
    return None


def same(one: Any, other: Any) -> bool:
    """Equal as JSON, where 1 is not true."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


# ------------------------------------------------------------------------------------------------------- one turn


class Turn:
    """One plan under way."""

    def __init__(self, session: Session, steps: List[Step]) -> None:
        self._session = session
        self._steps = steps
        self._spoke = False  # the last update was a message chunk: the next begins a line of its own
        self._is_cancelled = False
        self.task = asyncio.get_running_loop().create_task(self._run_all())

    def cancel(self) -> None:
        # Up to Python 3.11 `asyncio.wait_for` swallows a cancel that comes in the moment of its end.
        self._is_cancelled = True
        self.task.cancel()

    async def _run_all(self) -> None:
        """Raises `PlanFailed` where the plan says so, or the world is not as it expects."""
        last = Result("", None, False)
        for index, step in enumerate(self._steps):
            await self._show(index)
            last = await self._run(step, last, str(index + 1))
        await self._show(len(self._steps))

    async def _show(self, current: int) -> None:
        """The plan as ACP shows plans: every step while it is short, else only at its start and end."""
        steps = self._steps
        if len(steps) < 2 or (len(steps) > SHOWN_STEPS and 0 < current < len(steps)):
            return
        entries: List[Json] = []
        for index, step in enumerate(steps):
            status = "completed" if index < current else "in_progress" if index == current else "pending"
            entries.append({"content": title_of(step), "priority": "medium", "status": status})
        await self._session.update({"sessionUpdate": "plan", "entries": entries})

    async def _run(self, step: Step, last: Result, where: str) -> Result:
        """Run one step; the result that the next one sees as $last."""
        if self._is_cancelled:
            raise asyncio.CancelledError
        if "say" in step:
            await self._say(fill(step["say"], last, self._tools()))
        elif "tool" in step:
            last = await self._tool(step, last, where)
        elif "sh" in step:
            last = await self._sh(step, last, where)
        elif "parallel" in step:
            last = await self._parallel(step["parallel"], last, where)
        elif "sleep" in step:
            await asyncio.sleep(step["sleep"])
        elif "fail" in step:
            raise PlanFailed(fill(step["fail"], last, self._tools()))
        elif "list" in step:
            await self._session.toolbox.relist()
            last = Result(self._tools(), sorted(self._session.toolbox.named()), False)
            await self._say(last.text or "no tools")
        elif "wait_tool" in step:
            limit_s = float(step.get("s", WAIT_TOOL_S))
            if not await self._session.toolbox.wait_for(step["wait_tool"], limit_s):
                raise PlanFailed(
                    "step {} (wait_tool {}): no such tool within {:g} s; offered: {}".format(
                        where, step["wait_tool"], limit_s, self._tools()
                    )
                )
        else:
            for _ in range(step["repeat"]):
                last = await self._run(step["step"], last, where)
                await asyncio.sleep(0)
        problem = missed(step.get("expect") or {}, last)
        if problem is not None:
            raise PlanFailed("step {} ({}): {}".format(where, title_of(step), problem))
        return last

    async def _parallel(self, steps: List[Step], last: Result, where: str) -> Result:
        """All at once; when one fails the others still finish, so that nothing is left running behind the turn."""
        running = [self._run(step, last, "{}.{}".format(where, n)) for n, step in enumerate(steps, start=1)]
        outcomes: List[Union[Result, BaseException]] = await asyncio.gather(*running, return_exceptions=True)
        results: List[Result] = []
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            results.append(outcome)
        texts = [result.text for result in results]
        return Result("\n".join(texts), texts, any(result.is_error for result in results))

    def _tools(self) -> str:
        return ", ".join(sorted(self._session.toolbox.named()))

    async def _say(self, text: str) -> None:
        chunk = "\n" + text if self._spoke else text
        self._spoke = True
        await self._session.update({"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": chunk}})

    async def _tool(self, step: Step, last: Result, where: str) -> Result:
        toolbox = self._session.toolbox
        toolbox.check()
        name = toolbox.find(step["tool"])
        if name is None:
            raise PlanFailed(
                "step {}: no tool {} is offered; offered: {}".format(where, step["tool"], self._tools() or "none")
            )
        server, own_name = toolbox.named()[name]
        arguments = fill_all(step.get("args") or {}, last, self._tools())
        limit_s = float(step.get("s", TOOL_CALL_S))

        async def call(alive: Callable[[], None]) -> Tuple[Result, Any]:
            try:
                raw = await server.call(own_name, arguments, limit_s, alive)
            except RpcError as error:
                return Result(error.message, error.data, True), None
            except Gone:
                return Result("the MCP server {} ended".format(server.name), None, True), None
            except asyncio.TimeoutError:
                return Result("no answer and no progress within {:g} s".format(limit_s), None, True), None
            return tool_result(raw), raw

        return await self._watched(name, "other", arguments, call)

    async def _sh(self, step: Step, last: Result, where: str) -> Result:
        if not self._session.agent.allow_commands:
            raise PlanFailed(
                "step {}: commands are refused: this box does not isolate them from the host".format(where)
            )
        command = fill(step["sh"], last, self._tools())
        limit_s = float(step.get("s", COMMAND_S))

        async def call(_: Callable[[], None]) -> Tuple[Result, Any]:
            result = await run_command(command, self._session.cwd, limit_s)
            return result, {"output": result.text, **as_object(result.value)}

        return await self._watched("sh", "execute", {"command": command}, call)

    def _sign_of_life(self, update: Json) -> Callable[[], None]:
        """Pass a tool's progress on, now and then: a host may take a long silence for death."""
        loop = asyncio.get_running_loop()
        last = loop.time() - SIGN_OF_LIFE_S

        def alive() -> None:
            nonlocal last
            if loop.time() - last >= SIGN_OF_LIFE_S:
                last = loop.time()
                self._session.update_nowait(update)

        return alive

    async def _watched(
        self,
        title: str,
        kind: str,
        arguments: Json,
        call: Callable[[Callable[[], None]], Awaitable[Tuple[Result, Any]]],
    ) -> Result:
        """Run a call between the updates that announce it and tell how it ended."""
        self._spoke = False
        session = self._session
        call_id = session.next_call_id()
        await session.update(
            {
                "sessionUpdate": "tool_call",
                "toolCallId": call_id,
                "title": title,
                "kind": kind,
                "status": "pending",
                "rawInput": arguments,
            }
        )
        update: Json = {"sessionUpdate": "tool_call_update", "toolCallId": call_id}
        try:
            if not await session.permits(call_id, title, kind, arguments):
                result, raw = Result("permission denied", None, True), None
            else:
                await session.update({**update, "status": "in_progress"})
                result, raw = await call(self._sign_of_life({**update, "status": "in_progress"}))
        except asyncio.CancelledError:
            session.update_nowait({**update, "status": "failed", "content": shown("cancelled")})
            raise
        update["status"] = "failed" if result.is_error else "completed"
        update["content"] = shown(result.text)
        if raw is not None:
            fits = len(dumps(raw)) <= RAW_OUTPUT_BYTES_MAX
            update["rawOutput"] = raw if fits else {"isError": result.is_error, "omitted": "over 7 MiB"}
        await session.update(update)
        return result


def shown(text: str) -> List[Json]:
    preview = text if len(text) <= PREVIEW_CHARS else text[:PREVIEW_CHARS] + "…"
    return [{"type": "content", "content": {"type": "text", "text": preview}}]


# ---------------------------------------------------------------------------------------------------------- commands


async def run_command(command: str, cwd: str, limit_s: float) -> Result:
    """Run a shell command to its end, its time limit or the turn's cancellation, in the droid's process group."""
    process = await asyncio.create_subprocess_shell(
        command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=own_environment(),
        cwd=cwd,
    )
    assert process.stdout
    kept = bytearray()
    try:
        size = await asyncio.wait_for(collect(process.stdout, kept), limit_s)
        code: Optional[int] = await process.wait()
    except (asyncio.TimeoutError, asyncio.CancelledError) as stopped:
        kill_tree(process.pid)
        await process.wait()
        if isinstance(stopped, asyncio.CancelledError):
            raise
        size, code = len(kept), None
    text = kept.decode("utf-8", "replace")
    if size > len(kept):
        text += "\n[{} more bytes]".format(size - len(kept))
    if code is None:
        return Result(text + "\n[killed after {:g} s]".format(limit_s), {"exit_code": None}, True)
    if code != 0:
        text += "\n[exit code {}]".format(code)
    return Result(text, {"exit_code": code}, code != 0)


async def collect(stream: asyncio.StreamReader, kept: bytearray) -> int:
    """Read to the end, keep the first part; how much there was."""
    size = 0
    while True:
        chunk = await stream.read(65536)
        if not chunk:
            return size
        size += len(chunk)
        kept += chunk[: max(0, COMMAND_OUTPUT_BYTES - len(kept))]


def kill_tree(root: int) -> None:
    """Kill a process and all that descends from it; they share our group, so the group cannot be the handle."""
    parents: Dict[int, List[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open("/proc/{}/stat".format(entry), "rb") as stat:
                    parent = int(stat.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue
            parents.setdefault(parent, []).append(int(entry))
    doomed = [root]
    for pid in doomed:
        doomed += parents.get(pid, [])
    for pid in doomed:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass


# --------------------------------------------------------------------------------------------------------- sessions

SESSION_ID = re.compile(r"droid_[0-9a-f]{32}\Z")


def check_folder(path: str) -> None:
    if not os.path.isdir(path):
        raise RpcError(INVALID_PARAMS, "cwd is not a folder: {!r}".format(path))


def history_path(session_id: str) -> str:
    home = os.environ.get("HOME") or "/"
    return os.path.join(home, ".oubliette-droid", "sessions", session_id + ".json")


class Session:
    """One conversation: its tools, its mode, the turn that runs, and what is replayed when it is loaded again."""

    def __init__(self, agent: Agent, session_id: str, cwd: str, mcp_servers: List[Json]) -> None:
        self.agent = agent
        self.id = session_id
        self.cwd = cwd
        self.mode = "auto"
        self.toolbox = Toolbox(mcp_servers, cwd)
        self.turn: Optional[Turn] = None
        self.history: List[Json] = []
        self._calls = 0
        self._always: Set[str] = set()

    def next_call_id(self) -> str:
        self._calls += 1
        return "call_{}".format(self._calls)

    def update_nowait(self, update: Json) -> None:
        self.remember(update)
        self.agent.connection.notify("session/update", {"sessionId": self.id, "update": update})

    async def update(self, update: Json) -> None:
        self.update_nowait(update)
        await self.agent.connection.flush()

    async def permits(self, call_id: str, title: str, kind: str, arguments: Json) -> bool:
        """Whether this call may run: by the mode, or by asking."""
        if self.mode == "auto" or title in self._always:
            return True
        call = {"toolCallId": call_id, "title": title, "kind": kind, "status": "pending", "rawInput": arguments}
        try:
            answer = await self.agent.connection.request(
                "session/request_permission", {"sessionId": self.id, "toolCall": call, "options": PERMISSIONS}
            )
        except (RpcError, Gone):
            return False
        chosen = as_object(as_object(answer).get("outcome")).get("optionId")
        if chosen == "always":
            self._always.add(title)
        return chosen in ("once", "always")

    def remember(self, update: Json) -> None:
        """Keep what a reader would want to see again: words, and calls as they ended."""
        kind = update["sessionUpdate"]
        kept = {name: value for name, value in update.items() if name != "rawOutput"}
        if kind in ("user_message_chunk", "agent_message_chunk", "tool_call"):
            self.history.append(kept)
        elif kind == "tool_call_update":
            for entry in reversed(self.history):
                if entry.get("toolCallId") == update["toolCallId"]:
                    entry.update({**kept, "sessionUpdate": "tool_call"})
                    break

    def save(self) -> None:
        """One file, replaced whole; the oldest entries go when it grows over its bound."""
        entries = [self.toolbox.redacted(dumps(entry)) for entry in self.history]
        size = sum(map(len, entries))
        while size > HISTORY_BYTES_MAX and len(entries) > 1:
            size -= len(entries.pop(0))
        self.history = self.history[len(self.history) - len(entries) :]
        path = history_path(self.id)
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        head = dumps({"id": self.id, "mode": self.mode, "calls": self._calls})
        with open(path + ".new", "wb") as file:
            file.write(head[:-1] + b',"updates":[' + b",".join(entries) + b"]}\n")
        os.replace(path + ".new", path)

    def restore(self) -> None:
        """Raises `RpcError` when nothing is stored under this id."""
        try:
            with open(history_path(self.id), "rb") as file:
                stored = json.load(file)
        except (OSError, ValueError):
            raise RpcError(INVALID_PARAMS, "no session {} is stored here".format(self.id)) from None
        self.mode = stored["mode"]
        self.history = stored["updates"]
        self._calls = stored["calls"]

    async def close(self) -> None:
        if self.turn is not None:
            self.turn.cancel()
            await asyncio.wait({self.turn.task}, timeout=MCP_STOP_S)
        await self.toolbox.close()


# ------------------------------------------------------------------------------------------------------------- ACP


class Agent:
    """The ACP side: its methods, by name."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, allow_commands: bool) -> None:
        self.allow_commands = allow_commands
        self.sessions: Dict[str, Session] = {}
        self.connection = Connection(reader, writer, self._answer, self._hear, True)
        self._methods: Dict[str, Callable[[Json], Awaitable[Any]]] = {
            "initialize": self._initialize,
            "session/new": self._new,
            "session/load": self._load,
            "session/resume": self._resume,
            "session/close": self._close,
            "session/set_mode": self._set_mode,
            "session/prompt": self._prompt,
        }

    async def run(self) -> None:
        await self.connection.run()
        # Turns end first: they tell their MCP servers so.
        await asyncio.gather(*(session.close() for session in self.sessions.values()))
        self.connection.close()

    async def _answer(self, method: str, params: Json) -> Any:
        if method not in self._methods:
            raise RpcError(METHOD_NOT_FOUND, "no such method: " + method)
        return await self._methods[method](params)

    def _hear(self, method: str, params: Json) -> None:
        if method == "session/cancel":
            # After what came before it: the prompt that it means may not have begun its turn yet.
            asyncio.get_running_loop().call_soon(self._cancel, str(params.get("sessionId")))

    def _cancel(self, session_id: str) -> None:
        session = self.sessions.get(session_id)
        if session is not None and session.turn is not None:
            session.turn.cancel()

    async def _initialize(self, params: Json) -> Json:
        return {
            "protocolVersion": ACP_VERSION,
            "agentInfo": {"name": "oubliette-droid", "title": "The built-in droid", "version": "1"},
            "agentCapabilities": {
                "loadSession": True,
                "promptCapabilities": {"image": False, "audio": False, "embeddedContext": False},
                "mcpCapabilities": {"http": False, "sse": False},
                "sessionCapabilities": {"resume": {}, "close": {}},
            },
            "authMethods": [],
        }

    def _session(self, params: Json) -> Session:
        session = self.sessions.get(str(params.get("sessionId")))
        if session is None:
            raise RpcError(INVALID_PARAMS, "no such session: {}".format(params.get("sessionId")))
        return session

    async def _open(self, session_id: str, params: Json, stored: bool) -> Session:
        cwd = str(params.get("cwd"))
        check_folder(cwd)
        servers = [as_object(server) for server in as_list(params.get("mcpServers"))]
        for server in servers:
            if not isinstance(server.get("command"), str):
                name = server.get("name")
                raise RpcError(INVALID_PARAMS, "only stdio MCP servers can be used here, not {!r}".format(name))
        session = Session(self, session_id, cwd, servers)
        if stored:
            session.restore()
        before = self.sessions.pop(session_id, None)
        if before is not None:
            await before.close()
        await session.toolbox.start()
        self.sessions[session_id] = session
        session.save()
        return session

    async def _new(self, params: Json) -> Json:
        session = await self._open("droid_" + uuid.uuid4().hex, params, stored=False)
        return {"sessionId": session.id, "modes": {"currentModeId": session.mode, "availableModes": MODES}}

    async def _again(self, params: Json) -> Session:
        session_id = str(params.get("sessionId"))
        if not SESSION_ID.match(session_id):
            raise RpcError(INVALID_PARAMS, "no session {!r} is stored here".format(session_id))
        return await self._open(session_id, params, stored=True)

    async def _load(self, params: Json) -> Json:
        session = await self._again(params)
        for update in session.history:
            self.connection.notify("session/update", {"sessionId": session.id, "update": update})
            await self.connection.flush()
        return {"modes": {"currentModeId": session.mode, "availableModes": MODES}}

    async def _resume(self, params: Json) -> Json:
        session = await self._again(params)
        return {"modes": {"currentModeId": session.mode, "availableModes": MODES}}

    async def _close(self, params: Json) -> Json:
        session = self._session(params)
        del self.sessions[session.id]
        await session.close()
        return {}

    async def _set_mode(self, params: Json) -> Json:
        session = self._session(params)
        mode = params.get("modeId")
        if mode not in [known["id"] for known in MODES]:
            raise RpcError(INVALID_PARAMS, "no such mode: {!r}".format(mode))
        session.mode = str(mode)
        session.save()
        return {}

    async def _prompt(self, params: Json) -> Json:
        session = self._session(params)
        if session.turn is not None:
            raise RpcError(INVALID_REQUEST, "a turn is running already")
        blocks = map(as_object, as_list(params.get("prompt")))
        prompt = "\n".join(str(block.get("text", "")) for block in blocks)
        steps = find_plan(prompt)
        session.remember({"sessionUpdate": "user_message_chunk", "content": {"type": "text", "text": prompt}})
        session.toolbox.check()
        turn = session.turn = Turn(session, [{"say": SYNTAX}] if steps is None else steps)
        try:
            await asyncio.wait({turn.task})
            if turn.task.cancelled():
                return {"stopReason": "cancelled"}
            error = turn.task.exception()
            if isinstance(error, PlanFailed):
                raise RpcError(PLAN_FAILED, str(error), {"kind": "plan_failed"})
            if error is not None:
                raise error
            return {"stopReason": "end_turn"}
        finally:
            turn.cancel()
            session.turn = None
            session.save()


# ----------------------------------------------------------------------------------------------------------- start


async def serve(allow_commands: bool) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    # Whatever prints by accident must not break the protocol on stdout.
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    transport, protocol = await loop.connect_write_pipe(lambda: asyncio.streams.FlowControlMixin(loop=loop), out)
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    await Agent(reader, writer, allow_commands).run()


def main(arguments: List[str]) -> int:
    if [argument for argument in arguments if argument != "--no-commands"]:
        print("usage: droid [--no-commands]    an ACP agent on stdin and stdout", file=sys.stderr)
        return 2
    asyncio.run(serve("--no-commands" not in arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
