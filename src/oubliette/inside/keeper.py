"""The keeper: the first process of every box.

It starts droids and keeps them, and what they wrote, while the server is away. A droid's input and output are two
streams of numbered bytes. Output is held until the server acknowledges it; when too much is held the keeper stops
reading, so that the droid blocks and not a byte is lost. Input that was already taken is dropped, so that the server
may send it again after any accident. The server is reached through the box's relay socket, for ever anew; a box whose
server never returns ends itself.

One thread, one selector, no waiting anywhere else. Standard library only, any Python from 3.9.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
from typing import Any, Callable, Dict, List, Optional, cast

from oubliette.inside import isolation, parameters
from oubliette.inside.kept import Kept
from oubliette.inside.parameters import Params, Refused, encoded

PROTOCOL = 1
FRAME_BYTES_MAX = 8 * 1024 * 1024
OUTGOING_BYTES = 256 * 1024  # no more output is framed while this much waits for the socket
SOCKET_BYTES = 256 * 1024
PROCESSES_MAX = 16  # what fits into one attach
ATTACH_WAIT_S = 5.0
BACKOFF_MIN_S = 0.05
BACKOFF_MAX_S = 1.0
TERM_WAIT_S = 3.0
TRACEBACKS_MAX = 20
KEY_BYTES_MAX = 256

SIGNALS = {"TERM": signal.SIGTERM, "KILL": signal.SIGKILL, "INT": signal.SIGINT}
DEFAULT_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}

Answer = Callable[[Params], None]


def main(arguments: List[str]) -> int:
    """Run as the first process of a box: `--name value` pairs, the socket in OUBLIETTE_SOCKET, the key on stdin."""
    isolation.harden()
    options = dict(zip(arguments[::2], arguments[1::2]))  # noqa: B905 - Python 3.9 knows no strict
    key = read_key()
    if not key:
        print("the keeper was given no key", file=sys.stderr)
        return 2
    keeper = Keeper(
        os.environ.get("OUBLIETTE_SOCKET", "/mcp/relay.sock"),
        key,
        float(options.get("--abandoned-after", "900")),
        options.get("--mark"),
    )
    sys.stdout.write(json.dumps(isolation.facts()) + "\n")
    sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    return keeper.run()


def read_key() -> str:
    """One line; the end of the input before it means that whoever started this box is gone."""
    text = b""
    while not text.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte or len(text) > KEY_BYTES_MAX:
            return ""
        text += byte
    return text.decode("ascii", "replace").strip()


class Line:
    """One connection to the relay socket: whole lines in, bytes out, never blocking."""

    def __init__(self, path: str, selector: selectors.BaseSelector, ready: Callable[[], None]) -> None:
        self.is_attached = False
        self.opened_at = time.monotonic()
        self.outgoing = bytearray()
        self._incoming = bytearray()
        self._skipping = False
        self._selector = selector
        self._ready = ready
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.setblocking(False)
            self._socket.connect(path)
            selector.register(self._socket, selectors.EVENT_READ, ready)
        except OSError:
            self._socket.close()
            raise
        self._wants = selectors.EVENT_READ

    def send(self, message: Params) -> None:
        self.outgoing += json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
        self.outgoing += b"\n"

    def refuse(self, request: object, refusal: Refused) -> None:
        self.send({"jsonrpc": "2.0", "id": request, "error": refusal.error})

    def flush(self) -> None:
        """Write what the socket takes. Raises OSError when the other side is gone."""
        if self.outgoing:
            try:
                written = self._socket.send(memoryview(self.outgoing)[:SOCKET_BYTES])
                del self.outgoing[:written]
            except BlockingIOError:
                pass
        wants = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.outgoing else 0)
        if wants != self._wants:
            self._selector.modify(self._socket, wants, self._ready)
            self._wants = wants

    def receive(self) -> List[Optional[bytes]]:
        """The lines that arrived; None for one that was too long. Raises OSError at the end."""
        try:
            data = self._socket.recv(SOCKET_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError
        lines: List[Optional[bytes]] = []
        *ends, rest = data.split(b"\n")
        for end in ends:
            self._incoming += end
            if self._skipping or len(self._incoming) > FRAME_BYTES_MAX:
                lines.append(None)
            elif self._incoming.strip():
                lines.append(bytes(self._incoming))
            self._incoming.clear()
            self._skipping = False
        self._incoming += rest
        if len(self._incoming) > FRAME_BYTES_MAX:
            self._incoming.clear()
            self._skipping = True
        return lines

    def close(self) -> None:
        try:
            self._selector.unregister(self._socket)
        except KeyError:
            pass
        self._socket.close()


# --- the keeper -------------------------------------------------------------------------------------------------------


class Keeper:
    def __init__(self, path: str, key: str, abandoned_after_s: float, mark: Optional[str] = None) -> None:
        self._path = path
        self._key = key
        self._mark = {} if mark is None else {"OUBLIETTE_BOX": mark}
        self._instance = os.urandom(16).hex()
        self._abandoned_after_s = abandoned_after_s
        self._selector = selectors.DefaultSelector()
        self._line: Optional[Line] = None
        self._kept: Dict[str, Kept] = {}
        self._backoff_s = BACKOFF_MIN_S
        self._next_try = 0.0
        self._served_at = time.monotonic()  # when a server was last there
        self._ending_by: Optional[float] = None
        self._told_to_end = False
        self._bugs = 0
        self._methods: Dict[str, Callable[[Params, Answer], None]] = {
            "start": self._start,
            "stdin": self._stdin,
            "signal": self._signal,
            "ack": self._ack,
        }

        self._listen_for_signals()

    def run(self) -> int:
        """Keep processes until told to end, or until the server has been away for too long."""
        while not self._is_done():
            for key, _ in self._selector.select(self._patience()):
                key.data()
            self._tick()
        self._sweep()
        return 0

    # time

    def _patience(self) -> float:
        """How long nothing can happen by itself."""
        now = time.monotonic()
        times = [now + 60.0]
        if self._line is None:
            times.append(self._next_try)
        elif not self._line.is_attached:
            times.append(self._line.opened_at + ATTACH_WAIT_S)
        if self._line is None or not self._line.is_attached:
            times.append(self._served_at + self._abandoned_after_s)
        if self._ending_by is not None:
            times.append(self._ending_by)
        times += [kept.settles_at for kept in self._kept.values() if kept.settles_at is not None]
        return max(0.0, min(times) - now)

    def _tick(self) -> None:
        now = time.monotonic()
        self._reap(now)
        for kept in self._kept.values():
            kept.settle(now)
        self._stay_connected(now)
        self._pump()
        attached = self._line is not None and self._line.is_attached
        if attached:
            self._served_at = now
        elif now >= self._served_at + self._abandoned_after_s:
            self._told_to_end = True
        if self._told_to_end and self._ending_by is None:
            self._ending_by = now + TERM_WAIT_S
            for kept in self._kept.values():
                kept.kill(signal.SIGTERM)

    def _is_done(self) -> bool:
        if self._ending_by is None:
            return False
        return time.monotonic() >= self._ending_by or not any(kept.is_running for kept in self._kept.values())

    def _sweep(self) -> None:
        """Kill whatever is left: orphans come to the keeper, so the last of them is found."""
        give_up = time.monotonic() + TERM_WAIT_S
        while time.monotonic() < give_up:
            for pid in isolation.children(os.getpid()):
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    pass
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(0.002)
            except ChildProcessError:
                return

    # signals and children

    def _listen_for_signals(self) -> None:
        receiver, sender = socket.socketpair()
        for end in (receiver, sender):
            end.setblocking(False)
        self._wakeup = sender

        def woken() -> None:
            try:
                numbers = receiver.recv(4096)
            except BlockingIOError:
                return
            if signal.SIGTERM in numbers:
                self._told_to_end = True

        def woken_by(_number: int, _frame: object) -> None:
            pass  # the wake-up socket tells

        self._selector.register(receiver, selectors.EVENT_READ, woken)
        signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, woken_by)
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)

    def _reap(self, now: float) -> None:
        """Bury the dead; where one was a kept process, its group dies with it, while its pid is still its own."""
        leaders = {kept.pid: kept for kept in self._kept.values() if kept.is_running}
        while True:
            try:
                dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if dead is None:
                return
            kept = leaders.get(dead.si_pid)
            if kept is not None:
                kept.kill(signal.SIGKILL)
            _, status = os.waitpid(dead.si_pid, 0)
            if kept is not None:
                kept.reaped(status, now)

    # the server

    def _stay_connected(self, now: float) -> None:
        line = self._line
        if line is not None and not line.is_attached and now >= line.opened_at + ATTACH_WAIT_S:
            self._lose()
        if self._line is not None or now < self._next_try:
            return
        try:
            self._line = Line(self._path, self._selector, self._talk)
        except OSError:
            self._lose()
            return
        self._line.send(
            {
                "jsonrpc": "2.0",
                "id": 1,
                "method": "attach",
                "params": {
                    "key": self._key,
                    "role": "keeper",
                    "instance": self._instance,
                    "protocol": PROTOCOL,
                    "processes": [kept.state() for kept in self._kept.values()],
                },
            }
        )

    def _lose(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None
        for kept in self._kept.values():
            kept.waiting.clear()
        self._next_try = time.monotonic() + self._backoff_s
        self._backoff_s = min(self._backoff_s * 2, BACKOFF_MAX_S)

    def _talk(self) -> None:
        line = self._line
        if line is None:
            return
        try:
            for text in line.receive():
                self._hear(line, text)
                if self._line is not line:
                    return
        except OSError:
            self._lose()

    def _pump(self) -> None:
        """Put what is new on the line, as far as the line takes it."""
        line = self._line
        if line is None:
            return
        if line.is_attached:
            for kept in self._kept.values():
                self._report(line, kept)
        try:
            line.flush()
        except OSError:
            self._lose()

    def _report(self, line: Line, kept: Kept) -> None:
        while len(line.outgoing) < OUTGOING_BYTES:
            output = kept.next_output()
            if output is None:
                break
            self._notify(line, "stdout", kept, stream="out", offset=output[0], data=encoded(output[1]))
        if kept.err and len(line.outgoing) < OUTGOING_BYTES:
            self._notify(line, "stdout", kept, stream="err", offset=0, data=encoded(bytes(kept.err)))
            kept.err.clear()
        if kept.is_over and not kept.announced and kept.sent_to == kept.held_to:
            kept.announced = True
            self._notify(line, "exited", kept, **kept.ending())

    def _notify(self, line: Line, method: str, kept: Kept, **params: Any) -> None:
        line.send({"jsonrpc": "2.0", "method": method, "params": {"process": kept.process, **params}})

    def _hear(self, line: Line, text: Optional[bytes]) -> None:
        if text is None:
            refusal = Refused(parameters.INVALID_REQUEST, "too_large", f"a line is at most {FRAME_BYTES_MAX} bytes")
            line.refuse(None, refusal)
            return
        try:
            frame = json.loads(text)
        except (ValueError, RecursionError):
            line.refuse(None, Refused(parameters.PARSE_ERROR, "invalid_request", "not JSON"))
            return
        if not isinstance(frame, dict):
            line.refuse(None, Refused(parameters.INVALID_REQUEST, "invalid_request", "not a JSON-RPC message"))
        elif not line.is_attached:
            self._attached(line, cast("Params", frame))
        elif "method" in frame:
            self._serve(line, cast("Params", frame))

    def _attached(self, line: Line, frame: Params) -> None:
        result = frame.get("result")
        if frame.get("id") != 1 or "method" in frame:
            return
        if not isinstance(result, dict):  # the wrong key, or a protocol that the server does not speak
            self._lose()
            return
        told = cast("Params", result)
        after, acks = told.get("abandoned_after_s"), told.get("acks")
        if isinstance(after, (int, float)) and after > 0:
            self._abandoned_after_s = float(after)
        acknowledged = cast("Params", acks) if isinstance(acks, dict) else {}
        line.is_attached = True
        self._backoff_s = BACKOFF_MIN_S
        for kept in self._kept.values():
            offset = acknowledged.get(kept.process)
            kept.connected(offset if isinstance(offset, int) else 0)

    def _serve(self, line: Line, frame: Params) -> None:
        """Run one request or notification; whatever is wrong with it is answered, and hurts nothing else."""
        is_request, request = "id" in frame, frame.get("id")

        def answer(result: Params) -> None:
            if is_request and self._line is line:
                line.send({"jsonrpc": "2.0", "id": request, "result": result})

        try:
            method = self._methods.get(str(frame["method"]))
            if method is None:
                raise Refused(parameters.METHOD_NOT_FOUND, "unknown_method", "no such method")
            if not isinstance(frame.get("params"), dict):
                raise parameters.invalid("params is an object")
            method(frame["params"], answer)
        except Refused as refusal:
            if is_request:
                line.refuse(request, refusal)
        except Exception:
            self._note_bug()
            if is_request:
                line.refuse(request, Refused(parameters.INTERNAL_ERROR, "internal", "internal error"))

    def _note_bug(self) -> None:
        self._bugs += 1
        if self._bugs <= TRACEBACKS_MAX:
            import traceback  # not needed, as a rule

            traceback.print_exc(chain=False)

    # methods

    def _find(self, params: Params) -> Kept:
        kept = self._kept.get(parameters.process_id(params))
        if kept is None:
            raise Refused(parameters.SERVER_ERROR, "not_found", "no such process")
        return kept

    def _start(self, params: Params, answer: Answer) -> None:
        process, program = parameters.process_id(params), parameters.program(params)
        kept = self._kept.get(process)
        if kept is None:
            if self._told_to_end:
                raise Refused(parameters.SERVER_ERROR, "conflict", "the box is ending")
            self._make_room()
            env = {**DEFAULT_ENVIRONMENT, **program.env, **self._mark}
            kept = self._kept[process] = Kept(process, program, env, self._selector)
        elif kept.program != program:
            raise Refused(parameters.SERVER_ERROR, "conflict", "this process id was used for another program")
        answer(kept.state())

    def _make_room(self) -> None:
        if len(self._kept) < PROCESSES_MAX:
            return
        for process, kept in self._kept.items():
            if kept.is_over and not kept.held:
                kept.forget()
                del self._kept[process]
                return
        message = f"a box keeps at most {PROCESSES_MAX} processes"
        raise Refused(parameters.SERVER_ERROR, "too_many", message, retryable=True)

    def _stdin(self, params: Params, answer: Answer) -> None:
        kept = self._find(params)
        kept.take(
            parameters.count(params, "offset"), parameters.data(params, "data"), parameters.flag(params, "eof"), answer
        )

    def _signal(self, params: Params, answer: Answer) -> None:
        kept = self._find(params)
        number = SIGNALS.get(str(params.get("signal")))
        if number is None:
            raise parameters.invalid("signal is one of " + ", ".join(SIGNALS))
        kept.kill(number)
        answer({})

    def _ack(self, params: Params, answer: Answer) -> None:
        self._find(params).acknowledge(parameters.count(params, "offset"))
        answer({})
