"""Server-sent events, cut out of a byte stream however the network chunked it."""

from __future__ import annotations


class EventSplitter:
    """Turns chunks of a ``text/event-stream`` body into the data of its events.

    Lines may end in LF or CRLF. Comments and fields other than ``data`` are ignored. An event that
    the stream's end cuts off is not reported, as the standard says.
    """

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the data of every event that this chunk completes."""
        lines = (self._tail + chunk).split(b"\n")
        self._tail = lines.pop()
        events: list[bytes] = []
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return events
