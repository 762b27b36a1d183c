"""Messages of HTTP/1.1: the head as it came, the body's payload in pieces, and back."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

from stores.faults import Body, Cut

PIECE = 1 << 16


class Head:
    """The first lines of a message, and how its body is framed."""

    def __init__(self, raw: bytes):
        self.raw = raw
        first, *lines = raw.decode("latin-1").rstrip("\r\n").split("\r\n")
        self.words = first.split(" ", 2)
        pairs = (line.split(":", 1) for line in lines)
        self.fields = {name.strip().lower(): value.strip() for name, value in pairs}
        self.is_answer = first.startswith("HTTP/")
        self.status = int(self.words[1]) if self.is_answer else 0
        self.bodiless = self.status in (204, 304)
        self.chunked = self.fields.get("transfer-encoding", "").lower() == "chunked"

    @classmethod
    def read(cls, stream: io.BufferedReader) -> Head:
        raw = b""
        while not raw.endswith(b"\r\n\r\n"):
            line = stream.readline(PIECE)
            if not line:
                raise Cut
            raw += line
        return cls(raw)

    @property
    def keeps_open(self) -> bool:
        framed = self.bodiless or self.chunked or "content-length" in self.fields
        return framed and self.fields.get("connection", "").lower() != "close"

    def body(self, stream: io.BufferedReader) -> Body:
        """Return the payload in pieces; `Cut` if the sender leaves before its end."""
        if self.chunked:
            return _chunks(stream)
        if self.bodiless:
            return iter(())
        length = self.fields.get("content-length")
        if length is None and self.is_answer:
            return iter(lambda: stream.read1(PIECE), b"")
        return _pieces(stream, int(length or 0))

    def deliver(self, body: Body, send: Callable[[bytes, int], None]) -> None:
        """Send the payload in this message's framing."""
        for piece in filter(None, body):
            framed = b"%x\r\n%b\r\n" % (len(piece), piece) if self.chunked else piece
            send(framed, len(piece))
        if self.chunked:
            send(b"0\r\n\r\n", 0)


def _pieces(stream: io.BufferedReader, length: int) -> Iterator[bytes]:
    while length:
        piece = stream.read1(min(length, PIECE))
        if not piece:
            raise Cut
        length -= len(piece)
        yield piece


def _chunks(stream: io.BufferedReader) -> Iterator[bytes]:
    while size := int(stream.readline(PIECE).partition(b";")[0] or b"x", 16):
        yield from _pieces(stream, size)
        stream.readline(PIECE)
    # Trailers are dropped: S3's own are in the payload.
    while stream.readline(PIECE).strip():
        pass
