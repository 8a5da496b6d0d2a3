"""The door: where a request may come from, whose it is, and how much it may bring."""

import asyncio
from collections.abc import MutableMapping
from typing import Any, Final, cast

from oubliette.server.endpoints.mcp.contract import INVALID_REQUEST, PARSE_ERROR, SERVER_ERROR, Served
from oubliette.server.endpoints.mcp.exchange import Receive
from oubliette.server.endpoints.mcp.headers import Doors, Headers, bearer, is_json
from oubliette.server.endpoints.mcp.posted import Refused
from oubliette.server.errors import Forbidden, Unauthenticated
from oubliette.server.tokens.token import Actor

BODY_WAIT_S: Final = 30.0
_CHALLENGE: Final = (b"www-authenticate", b"Bearer")
_CLOSE: Final = (b"connection", b"close")


class Door:
    def __init__(self, served: Served, doors: Doors, body_bytes: int) -> None:
        self._served = served
        self._doors = doors
        self._body_bytes = body_bytes
        self.admits_origin = doors.admits_origin

    def check(self, headers: Headers) -> None:
        """Whether anybody who says this may come in at all. Raises `Refused`."""
        if headers.repeated is not None:
            raise Refused(400, INVALID_REQUEST, f"{headers.repeated} appears more than once")
        if not self._doors.admits_host(headers.host):
            raise Refused(421, INVALID_REQUEST, "this Host is not served here: see the setting `allowed_hosts`")
        if not self.admits_origin(headers.origin):
            raise Refused(403, INVALID_REQUEST, "this Origin may not call: see the setting `allowed_origins`")

    async def actor(self, headers: Headers) -> Actor:
        """Whose key this is. Raises `Refused` with 401, or 403 where the key is for other doors."""
        try:
            return await self._served.authenticate(bearer(headers.authorization))
        except Unauthenticated as error:
            # No `resource_metadata`: it would send clients to an authorization server, and there is none.
            raise Refused(401, SERVER_ERROR, error.message, headers=(_CHALLENGE,)) from None
        except Forbidden as error:
            challenge = (_CHALLENGE[0], b'Bearer error="insufficient_scope"')
            raise Refused(403, SERVER_ERROR, error.message, headers=(challenge,)) from None

    async def body(self, headers: Headers, receive: Receive) -> bytes:
        """The whole body. Raises `Refused` where it is too large, too slow, or cut off."""
        if not is_json(headers.content_type):
            raise Refused(415, INVALID_REQUEST, "the content type is not application/json in UTF-8")
        if headers.content_encoding not in (None, b"identity"):
            raise Refused(415, INVALID_REQUEST, "encoded bodies are not read")
        declared = headers.content_length
        if declared is not None and (not declared.isdigit() or int(declared) > self._body_bytes):
            raise self._too_large()
        message = await receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            body = cast("bytes", message.get("body", b""))
            if len(body) > self._body_bytes:
                raise self._too_large()
            return body
        try:
            async with asyncio.timeout(BODY_WAIT_S):
                return await self._rest(message, receive)
        except TimeoutError:
            told = f"the body took longer than {BODY_WAIT_S:.0f} s"
            raise Refused(408, INVALID_REQUEST, told, headers=(_CLOSE,)) from None

    async def _rest(self, message: MutableMapping[str, Any], receive: Receive) -> bytes:
        body = bytearray()
        while True:
            if message["type"] != "http.request":
                raise Refused(400, PARSE_ERROR, "the body was cut off")
            body += message.get("body", b"")
            if len(body) > self._body_bytes:
                raise self._too_large()
            if not message.get("more_body"):
                return bytes(body)
            message = await receive()

    def _too_large(self) -> Refused:
        return Refused(413, INVALID_REQUEST, f"the body is over {self._body_bytes} bytes")
