"""A real server in a process of its own, to be called, killed and started again."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[2]


class ServerProcess:
    """One installation: its home stays over restarts. Enter it to start it; leaving it ends server and boxes."""

    def __init__(self, home: Path, *, mark: str = "", **flags: Any) -> None:
        self.home = home
        self.flags: dict[str, Any] = {"home": str(home), "port": 0, "restart_grace_s": 10, **flags}
        self.mark = mark
        self.url = ""
        self.token = ""
        self.log = home.parent / f"{home.name}.log"
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.end_sessions()
        await self.stop()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start it and wait until it is ready; on the port that it had before, if it had one."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("OUBLIETTE_")}
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tests.kit.marked_server",
                json.dumps(self.flags),
                self.mark,
                cwd=ROOT,
                env={**environment, "PYTHONPATH": str(ROOT / "src")},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
            )
        assert self._process.stdout is not None
        async with asyncio.timeout(30):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-4000:]}")
        told = json.loads(line)
        self.url = told["url"]
        self.token = told["first_token"] or self.token
        # A restart comes back at the same address, as a real one would.
        self.flags["port"] = int(self.url.split(":")[2].split("/")[0])

    async def stop(self) -> int:
        """Ask it to end, as a supervisor does; its exit status."""
        return await self._end(signal.SIGTERM)

    async def kill(self) -> None:
        """End it as a power cut would."""
        await self._end(signal.SIGKILL)

    async def died(self) -> int:
        """Wait until it is gone by itself."""
        assert self._process is not None
        async with asyncio.timeout(30):
            return await self._process.wait()

    async def held(self) -> str:
        """Wait until it stands still at its mark (one that ends with `=`); the name of it."""
        assert self._process is not None
        assert self._process.stdout is not None
        async with asyncio.timeout(30):
            return json.loads(await self._process.stdout.readline())["at"]

    def go_on(self) -> None:
        """Let it go on from where it stands."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")

    async def restart(self, *, mark: str = "") -> None:
        """Start it again on the same home, after it ended however it did."""
        self.mark = mark
        await self.start()

    async def _end(self, how: signal.Signals) -> int:
        if self._process is None:
            return 0
        if self._process.returncode is None:
            self._process.send_signal(how)
        async with asyncio.timeout(30):
            return await self._process.wait()

    async def ask(self, operation: str, **params: Any) -> Any:
        """An operation by the local door; raises what the server refused it with."""
        reader, writer = await asyncio.open_unix_connection(self.home / "admin.sock", limit=1 << 24)
        try:
            request = {"jsonrpc": "2.0", "id": 1, "method": operation, "params": params}
            writer.write(json.dumps(request).encode() + b"\n")
            async with asyncio.timeout(60):
                told = json.loads(await reader.readline())
        finally:
            writer.close()
        if "error" in told:
            raise AssertionError(told["error"])
        return told["result"]

    async def end_sessions(self) -> None:
        """End every live session, so that no box outlives its test."""
        if self._process is None:
            return
        if self._process.returncode is not None:
            await self.restart()
        live = ["starting", "idle", "running"]
        for project in (await self.ask("project_list", limit=200))["projects"]:
            for session in (await self.ask("session_list", project_id=project["id"], status=live))["sessions"]:
                await self.ask("session_end", session_id=session["session_id"])
