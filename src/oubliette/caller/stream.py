"""The server's stream on a connection of our own: bytes go from the socket to their reader in one step."""

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import cast

from oubliette.caller.http1 import BadResponse, Head, Streamed
from oubliette.caller.lane import Address

CONNECT_S = 10.0
HEAD_S = 15.0
# The server pings an idle stream every 30 s.
SILENCE_S = 75.0


class StreamLost(Exception):
    """The stream ended, fell silent, or never was one."""


class Stream(asyncio.Protocol):
    """One GET whose answer does not end. `received` is called with each piece of its body."""

    def __init__(self, received: Callable[[bytes], None]) -> None:
        self._received = received
        self._response = Streamed()
        self._transport: asyncio.Transport | None = None
        self._has_head = asyncio.Event()
        self._lost = asyncio.Event()
        self._pieces = 0
        self._is_followed = False
        self._early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._pieces += 1
        try:
            body = self._response.feed(data)
            if self._response.head is not None and not self._has_head.is_set():
                self._has_head.set()
            if body and self._is_followed:
                self._received(body)
            elif body:
                self._early.append(body)
        except (BadResponse, ValueError):
            self.close()
        if self._response.has_ended:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost.set()
        self._has_head.set()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def open(self, address: Address, tls: ssl.SSLContext | None, headers: Mapping[str, str]) -> Head:
        """Connect and ask; the head of the answer. Raises `OSError`, `TimeoutError`, `StreamLost`."""
        loop = asyncio.get_running_loop()
        context = (tls or ssl.create_default_context()) if address.tls else None
        async with asyncio.timeout(CONNECT_S):
            await loop.create_connection(lambda: self, address.host, address.port, ssl=context)
        assert self._transport is not None
        lines = [f"GET {address.path} HTTP/1.1", f"Host: {address.authority}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._transport.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        async with asyncio.timeout(HEAD_S):
            await self._has_head.wait()
        if self._response.head is None:
            raise StreamLost("the connection closed before an answer")
        return self._response.head

    async def follow(self) -> None:
        """Hand on what comes until the stream ends or is silent for too long."""
        self._is_followed = True
        for body in self._early:
            self._received(body)
        self._early.clear()
        seen = -1
        while not self._lost.is_set():
            if seen == self._pieces:
                return
            seen = self._pieces
            try:
                async with asyncio.timeout(SILENCE_S):
                    await self._lost.wait()
            except TimeoutError:
                continue
