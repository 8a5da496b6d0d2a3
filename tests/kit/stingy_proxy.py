"""A reverse proxy that holds no streams: what some networks put between a caller and its server."""

import asyncio
from types import TracebackType
from typing import Self

import aiohttp
from aiohttp import web


class StingyProxy:
    """Passes POSTs on to a server and refuses GETs."""

    def __init__(self, server_url: str) -> None:
        self._server_url = server_url
        self.refused = 0

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False)
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/mcp", self._pass)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        listening = await asyncio.get_running_loop().create_server(self._runner.server, "127.0.0.1", 0)  # type: ignore[arg-type]
        self._listening = listening
        self.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/mcp"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listening.close()
        await self._runner.cleanup()
        await self._http.close()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            self.refused += 1
            return web.Response(status=405)
        hop = ("host", "connection", "content-length", "transfer-encoding")
        headers = {name: value for name, value in request.headers.items() if name.lower() not in hop}
        body = await request.read()
        async with self._http.request(request.method, self._server_url, data=body, headers=headers) as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in hop}
            return web.Response(status=answer.status, headers=kept, body=await answer.read())
