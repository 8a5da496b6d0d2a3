"""Server-sent events, cut out of the bytes as they come. No I/O."""


class Frames:
    """Collects chunks and gives the data of each event that is complete.

    Only `data` is of interest: events of the server carry one JSON message each, and our cursor is in the message,
    not in the stream's ids.
    """

    def __init__(self, event_bytes_max: int = 16 * 1024 * 1024) -> None:
        self._rest = b""
        self._max = event_bytes_max

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of every event that this chunk completes. Raises `ValueError` when one grows without end."""
        text = self._rest + chunk if self._rest else chunk
        if b"\r" in text:
            # A bare CR at the very end may be half of a CRLF: it waits for the next chunk.
            held = text.endswith(b"\r")
            text = text[: -1 if held else None].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            *events, rest = text.split(b"\n\n")
            self._rest = rest + (b"\r" if held else b"")
        else:
            *events, self._rest = text.split(b"\n\n")
        if len(self._rest) > self._max:
            raise ValueError("an event of the stream is over the bound")
        return [data for event in events if (data := _data(event))]


def _data(event: bytes) -> bytes:
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines: list[bytes] = []
    for line in event.split(b"\n"):
        name, _, value = line.partition(b":")
        if name == b"data":
            lines.append(value.removeprefix(b" "))
    return b"\n".join(lines)
