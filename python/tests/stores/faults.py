"""What the proxy can do to one request and its answer.

A fault sees the request's body, the moment of the server's answer and the answer's body, in this
order. It knows nothing of sockets.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator

Body = Iterator[bytes]


class Cut(Exception):
    """Close the client's connection and the server's now."""


class Fault:
    """Pass everything on unchanged."""

    def admit(self) -> bytes | None:
        """Return an answer that keeps the request from the server, or None."""
        return None

    def upload(self, body: Body) -> Body:
        """Return the request's body as the server gets it."""
        return body

    def answered(self) -> None:
        """Run when the server has answered, before the client gets a byte of it."""

    def download(self, body: Body) -> Body:
        """Return the answer's body as the client gets it."""
        return body

    def stop(self) -> None:
        """Let a waiting request go on: the proxy stops."""


@dataclasses.dataclass
class Refuse(Fault):
    """Answer with an error of S3; the server never sees the request."""

    status: int
    code: str

    def admit(self) -> bytes:
        xml = (
            '<?xml version="1.0" encoding="UTF-8"?>\n'
            f"<Error><Code>{self.code}</Code><Message>a test wants this</Message></Error>"
        )
        return (
            f"HTTP/1.1 {self.status} {self.code}\r\nContent-Type: application/xml\r\n"
            f"Content-Length: {len(xml)}\r\n\r\n{xml}"
        ).encode()


@dataclasses.dataclass
class SlowDown(Refuse):
    """Answer as S3 does when requests come too fast."""

    status: int = 503
    code: str = "SlowDown"


@dataclasses.dataclass
class CutRequest(Fault):
    """Give the server this many bytes of the body, then close both connections."""

    after: int

    def upload(self, body: Body) -> Body:
        yield from _first(body, self.after)
        raise Cut


@dataclasses.dataclass
class CutResponse(Fault):
    """Give the client the head and this many bytes of the body, then close both connections."""

    after: int

    def download(self, body: Body) -> Body:
        yield from _first(body, self.after)
        raise Cut


class LoseAnswer(Fault):
    """Let the server do all of it, then close both connections: the client hears nothing."""

    def answered(self) -> None:
        raise Cut


@dataclasses.dataclass
class Corrupt(Fault):
    """Flip a bit in one byte of a body: the answer's, or with ``request`` the request's."""

    offset: int
    request: bool = False

    def upload(self, body: Body) -> Body:
        return _flipped(body, self.offset) if self.request else body

    def download(self, body: Body) -> Body:
        return body if self.request else _flipped(body, self.offset)


@dataclasses.dataclass
class Delay(Fault):
    """Wait before the server gets the request."""

    seconds: float

    def admit(self) -> None:
        time.sleep(self.seconds)


@dataclasses.dataclass
class Throttle(Fault):
    """Pass both bodies on at this rate. Each request has the rate for itself."""

    bytes_per_second: int

    def upload(self, body: Body) -> Body:
        return self._slow(body)

    def download(self, body: Body) -> Body:
        return self._slow(body)

    def _slow(self, body: Body) -> Body:
        size = max(1, self.bytes_per_second // 20)
        for piece in body:
            for start in range(0, len(piece), size):
                part = piece[start : start + size]
                time.sleep(len(part) / self.bytes_per_second)
                yield part


class Hold(Fault):
    """Hold a request until ``release``, without it for ever: before the server sees the request,
    or with ``answer`` after the server has answered.

    ``wait`` returns once a request is held, so a test needs no sleep.
    """

    def __init__(self, *, answer: bool = False):
        self._answer, self._cut = answer, False
        self._held, self._released = threading.Event(), threading.Event()

    def wait(self, timeout_s: float = 300) -> None:
        """Wait until a request is held."""
        if not self._held.wait(timeout_s):
            raise TimeoutError(f"no request to hold came within {timeout_s} s")

    def release(self, *, cut: bool = False) -> None:
        """Let what is held go on, and all that comes later; or cut it, at both ends."""
        self._cut = cut
        self._released.set()

    def stop(self) -> None:
        if not self._released.is_set():
            self.release()

    def admit(self) -> None:
        if not self._answer:
            self._hold()

    def answered(self) -> None:
        if self._answer:
            self._hold()

    def _hold(self) -> None:
        self._held.set()
        self._released.wait()
        if self._cut:
            raise Cut


def _first(body: Body, count: int) -> Body:
    for piece in body:
        yield piece[:count]
        count -= len(piece)
        if count <= 0:
            return


def _flipped(body: Body, offset: int) -> Body:
    for piece in body:
        if 0 <= offset < len(piece):
            changed = bytearray(piece)
            changed[offset] ^= 0x10
            piece = bytes(changed)
        yield piece
        offset -= len(piece)
