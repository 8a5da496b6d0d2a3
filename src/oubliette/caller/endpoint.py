"""The server's MCP endpoint as a caller sees it: one MCP session, calls of operations, and the stream.

Every call is tried again while nothing of it can have reached the server; a call that may have reached it is
repeated only when repeating changes nothing.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import aiohttp
import msgspec

from oubliette.caller import messages
from oubliette.caller.errors import CallerError, Forbidden, TooLarge, Unauthenticated, Unreachable, refusal
from oubliette.caller.lane import Address
from oubliette.caller.patience import Patience
from oubliette.caller.sse import Frames
from oubliette.caller.stream import Stream

T = TypeVar("T")

# Repeating these changes nothing: they read, or the server knows the repetition by its id.
REPEATABLE = frozenset(
    {
        "caller_tool_pending",
        "caller_tool_poll",
        "caller_tool_response",
        "config_limits",
        "project_get",
        "project_list",
        "session_cancel",
        "session_end",
        "session_events",
        "session_get",
        "session_list",
        "token_list",
        "workspace_list",
    }
)
ANSWER_S = 30.0
UNAVAILABLE = "unavailable"  # the kind of what a server cannot do at this moment
_NOT_PROCESSED = frozenset({429, 503})
_MAYBE_PROCESSED = frozenset({500, 502, 504})


class NoStream(Exception):
    """The endpoint, or something before it, does not hold a stream open."""


class _Again(Exception):
    """This try failed; the next may not."""

    def __init__(self, why: str, *, reached: bool, wait_s: float = 0.0, refusal: CallerError | None = None) -> None:
        super().__init__(why)
        self.reached = reached
        self.wait_s = wait_s
        self.refusal = refusal  # what the server itself said, and what is raised where no try is left


class _Forgotten(_Again):
    """The server does not know the MCP session of the request."""

    def __init__(self) -> None:
        super().__init__("the server no longer knew our MCP session", reached=False)


class Endpoint:
    def __init__(
        self, http: aiohttp.ClientSession, url: str, token: str, patience_s: float, tls: ssl.SSLContext | None
    ) -> None:
        self._http = http
        self.url = url
        self.address = Address.of(url)
        self._tls = tls
        self._token = token
        self._patience_s = patience_s
        self._id = 0
        self._renewing = asyncio.Lock()
        self.session_id: str | None = None
        self.version = messages.PROTOCOL_VERSION
        self.is_parallel = False  # whether the server works on the requests of one connection together
        self.on_renewed: Callable[[], Awaitable[None]] | None = None
        self.on_pushed: Callable[[bytes], None] | None = None

    def headers(self) -> dict[str, str]:
        return self._headers(self.session_id, self.version)

    def lane_headers(self) -> dict[str, str]:
        """Those of requests that may be worked on together."""
        return self.headers() | ({"Oubliette-Pipeline": "parallel"} if self.is_parallel else {})

    def next_id(self) -> int:
        self._id += 1
        return self._id

    async def open(self) -> None:
        """Begin an MCP session. Raises `Unauthenticated`, `Unreachable`."""
        async with self._renewing:
            await self._initialize()

    async def renew(self, stale: str | None) -> None:
        """Begin another MCP session in place of one that the server no longer knows."""
        async with self._renewing:
            if self.session_id != stale:
                return  # somebody else noticed first
            await self._initialize()
        if self.on_renewed is not None:
            await self.on_renewed()

    async def call(self, operation: str, arguments: dict[str, Any], *, wait_s: float = 0.0) -> dict[str, Any]:
        """Call an operation and return its structured result. Raises `CallerError` by its kind."""
        answer_s = ANSWER_S + wait_s

        async def once() -> messages.ToolResult:
            raw = await self._post(messages.tool_call(self.next_id(), operation, arguments), answer_s)
            result = messages.decode_tool_result(raw)
            if (failure := messages.failure_in(result)) is None:
                return result
            if failure.kind == UNAVAILABLE:
                raise _Again(failure.message, reached=False, refusal=failure)
            raise failure

        result = await self._patiently(once, repeatable=operation in REPEATABLE)
        if result.structuredContent is msgspec.UNSET:
            return {}
        return msgspec.json.decode(result.structuredContent, type=dict[str, Any])

    async def stream(self, received: Callable[[bytes], None]) -> None:
        """Hold the server's stream until it ends.

        Raises `NoStream`, `Unauthenticated`, and for a stream that may be had a moment later `StreamLost`,
        `OSError`, `TimeoutError`.
        """
        stale = self.session_id
        stream = Stream(received)
        try:
            head = await stream.open(self.address, self._tls, self.headers() | {"Accept": "text/event-stream"})
            if head.status == 200 and head.content_type.startswith(b"text/event-stream"):
                await stream.follow()
            elif head.status == 404:
                await self.renew(stale)
            elif head.status == 401:
                raise Unauthenticated("the server does not take this caller's token")
            elif head.status not in _NOT_PROCESSED | _MAYBE_PROCESSED:
                raise NoStream(f"GET answered {head.status}")
        finally:
            stream.close()

    async def close(self) -> None:
        """End the MCP session, so that the server need not wait to see us gone."""
        if self.session_id is None:
            return
        timeout = aiohttp.ClientTimeout(total=2)
        try:
            async with self._http.delete(self.url, headers=self.headers(), timeout=timeout):
                pass
        except (aiohttp.ClientError, OSError, TimeoutError):
            pass

    async def _initialize(self) -> None:
        """Begin an MCP session. Until it is there the one before is ours: its refusal is what begins the next."""
        params = {
            "protocolVersion": messages.PROTOCOL_VERSION,
            "capabilities": {},
            "clientInfo": {"name": "oubliette-caller", "version": "1"},
        }
        hello = messages.request(self.next_id(), "initialize", params)

        async def once() -> tuple[str | None, dict[str, Any]]:
            given, reply = await self._send(hello, self._headers(None, ""), ANSWER_S)
            return given, msgspec.json.decode(_result(reply))

        given, result = await self._patiently(once, repeatable=True)
        version = str(result.get("protocolVersion", messages.PROTOCOL_VERSION))
        capabilities: dict[str, Any] = result.get("capabilities", {})
        headers = self._headers(given, version)
        await self._tell(msgspec.json.encode({"jsonrpc": "2.0", "method": "notifications/initialized"}), headers)
        if "logging" in capabilities:
            # Events are read from the log by cursor; requests of droids are pushed whatever the level.
            quiet = messages.request(self.next_id(), "logging/setLevel", {"level": "emergency"})
            await self._tell(quiet, headers)
        self.session_id, self.version = given, version
        self.is_parallel = messages.PIPELINE in capabilities.get("experimental", {})

    def _headers(self, session_id: str | None, version: str) -> dict[str, str]:
        headers = {
            "Authorization": f"Bearer {self._token}",
            "Accept": "application/json, text/event-stream",
            "Content-Type": "application/json",
        }
        if session_id is not None:
            headers["Mcp-Session-Id"] = session_id
            headers["MCP-Protocol-Version"] = version
        return headers

    async def _patiently(self, once: Callable[[], Awaitable[T]], *, repeatable: bool) -> T:
        patience = Patience()
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._patience_s
        while True:
            try:
                return await once()
            except _Again as failure:
                if failure.refusal is not None and not repeatable:
                    raise failure.refusal from None
                if failure.reached and not repeatable:
                    raise Unreachable(
                        f"{failure}; whether the call took effect is not known", "outcome_unknown"
                    ) from failure
                left = give_up_at - loop.time()
                if left <= 0:
                    where = self.address.authority  # not the whole URL: some have a key in their query
                    raise failure.refusal or Unreachable(f"{where} does not answer: {failure}") from failure
                # However long the server asks us to wait: the last try is at the end of our patience.
                await asyncio.sleep(min(patience.next_s(failure.wait_s), left))

    async def _tell(self, body: bytes, headers: dict[str, str]) -> None:
        """Say what belongs to the beginning of an MCP session."""
        await self._patiently(lambda: self._send(body, headers, ANSWER_S), repeatable=True)

    async def _post(self, body: bytes, answer_s: float) -> msgspec.Raw:
        stale = self.session_id
        try:
            _, reply = await self._send(body, self.headers(), answer_s)
        except _Forgotten:
            await self.renew(stale)
            _, reply = await self._send(body, self.headers(), answer_s)
        return _result(reply)

    async def _send(
        self, body: bytes, headers: dict[str, str], answer_s: float
    ) -> tuple[str | None, messages.Reply | None]:
        timeout = aiohttp.ClientTimeout(total=answer_s, sock_connect=10)
        try:
            async with self._http.post(self.url, data=body, headers=headers, timeout=timeout) as response:
                reply = await self._reply(response)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as failure:
            raise _Again(str(failure), reached=False) from failure
        except (aiohttp.ClientError, OSError, TimeoutError) as failure:
            raise _Again(str(failure) or type(failure).__name__, reached=True) from failure
        if response.status == 404 and "Mcp-Session-Id" in headers:
            raise _Forgotten
        if response.status not in (200, 202):
            _refuse(response, reply)
        return response.headers.get("Mcp-Session-Id"), reply

    async def _reply(self, response: aiohttp.ClientResponse) -> messages.Reply | None:
        """The reply in a response. What the server pushes before it is handed on as it comes: a droid may wait."""
        if response.content_type != "text/event-stream":
            return messages.reply_in(response.content_type.encode(), await response.read())
        frames, reply = Frames(), None
        async for chunk in response.content.iter_any():
            try:
                events = frames.feed(chunk)
            except ValueError:
                return None  # one grows without end
            for data in events:
                if (found := messages.reply_of(data)) is not None:
                    reply = found
                elif self.on_pushed is not None:
                    self.on_pushed(data)
        return reply


def _result(reply: messages.Reply | None) -> msgspec.Raw:
    if reply is None:
        raise _Again("the server's answer ended before it was whole", reached=True)
    failure = messages.failure_of(reply)
    if failure is not None and failure.kind == UNAVAILABLE:
        # It had begun: how far it came is not known.
        raise _Again(failure.message, reached=True)
    if failure is not None:
        raise failure
    return reply.result if reply.result is not msgspec.UNSET else msgspec.Raw(b"{}")


def _refuse(response: aiohttp.ClientResponse, reply: messages.Reply | None) -> NoReturn:
    status, text = response.status, f"HTTP {response.status}"
    if status in _NOT_PROCESSED:
        after = response.headers.get("Retry-After", "")
        raise _Again(text, reached=False, wait_s=float(after) if after.isdigit() else 0.0)
    if status in _MAYBE_PROCESSED:
        raise _Again(text, reached=True)
    if reply is not None and reply.error is not None and reply.error.message:
        text = reply.error.message
    if status == 401:
        raise Unauthenticated(text)
    if status == 403:
        raise Forbidden(text)
    if status == 413:
        raise TooLarge(text)
    raise (messages.failure_of(reply) if reply is not None else None) or refusal("invalid_request", text)
