"""A proxy in front of a store's server that misbehaves by rules and writes down every request.

It speaks HTTP/1.1 without TLS, keeps the ``Host`` header (it is signed) and never sends a request
twice. It does not answer ``Expect: 100-continue``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import socket
import socketserver
import sys
import threading
import urllib.parse
from typing import Any, ClassVar, TypeVar

from stores.faults import Cut, Fault
from stores.http1 import Head

F = TypeVar("F", bound=Fault)


@dataclasses.dataclass
class Exchange:
    """A request and its answer, as far as they have come.

    ``up`` counts the bytes of the body that were sent to the server, ``down`` those sent to the
    client. ``status`` is that of the server, or None if it was not asked or has not answered.
    """

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    up: int = 0
    down: int = 0
    status: int | None = None
    fault: Fault | None = None

    @classmethod
    def of(cls, head: Head) -> Exchange:
        """Start from a request's head."""
        where = urllib.parse.urlsplit(head.words[1])
        query = dict(urllib.parse.parse_qsl(where.query, keep_blank_values=True))
        return cls(head.words[0], urllib.parse.unquote(where.path), query, head.fields)

    @property
    def target(self) -> str:
        """The path and query, decoded: ``/bucket/key?partNumber=1&uploadId=u``."""
        query = "&".join(f"{name}={value}" if value else name for name, value in self.query.items())
        return f"{self.path}?{query}" if query else self.path

    @property
    def range(self) -> range | None:
        """The bytes that a read asks for. A suffix of ``n`` bytes is ``range(-n, 0)``."""
        found = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("range", ""))
        if found is None:
            return None
        first, last = found.groups()
        if not first:
            return range(-int(last), 0)
        return range(int(first), int(last) + 1 if last else sys.maxsize)


@dataclasses.dataclass
class _Rule:
    fault: Fault
    method: str
    target: str
    skip: int
    times: int | None

    def takes(self, exchange: Exchange) -> bool:
        if self.times == 0 or not _matches(exchange, self.method, self.target):
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.times is not None:
            self.times -= 1
        return True


class Proxy:
    """A proxy on a port of its own. Use it as a context."""

    def __init__(self, upstream: str):
        """Start it in front of a server's URL."""
        where = urllib.parse.urlsplit(upstream)
        self._upstream = (where.hostname, where.port)
        self._rules: list[_Rule] = []
        self._log: list[Exchange] = []
        self._clients: set[socket.socket] = set()
        self._newest: object = None
        self._changed = threading.Condition()
        handler = type("Handler", (_Connection,), {"proxy": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self._server.proxy = self
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def on(
        self, fault: F, method: str = "", target: str = "", *, skip: int = 0, times: int | None = 1
    ) -> F:
        """Do this to the next requests that match; return the fault.

        The oldest rule that matches and is not used up decides about a request, alone.

        Args:
            method: such as ``PUT``; empty: any.
            target: a regular expression that is searched in ``Exchange.target``.
            skip: how many matching requests pass first.
            times: how many then get the fault; None: all.
        """
        with self._changed:
            self._rules.append(_Rule(fault, method, target, skip, times))
        return fault

    def clear(self) -> None:
        """Forget all rules and the log, and let held requests go on."""
        with self._changed:
            rules, self._rules = self._rules, []
            self._log.clear()
        for rule in rules:
            rule.fault.stop()

    def requests(self, method: str = "", target: str = "") -> list[Exchange]:
        """Return the requests so far that match, the oldest first."""
        with self._changed:
            return [exchange for exchange in self._log if _matches(exchange, method, target)]

    def wait(
        self, count: int = 1, method: str = "", target: str = "", timeout_s: float = 300
    ) -> list[Exchange]:
        """Wait until so many matching requests have begun; return them."""
        with self._changed:
            came = self._changed.wait_for(
                lambda: len(self.requests(method, target)) >= count, timeout_s
            )
        if not came:
            raise TimeoutError(f"fewer than {count} requests {method} {target} in {timeout_s} s")
        return self.requests(method, target)

    def settle(self, timeout_s: float = 300) -> None:
        """Wait until all clients so far have gone, and what they have sent has reached the server.

        They must be dead, or close their connections.
        """
        with socket.create_connection(self._server.server_address[:2]) as last:
            # It waits behind them to be accepted.
            address = last.getsockname()
            with self._changed:
                came = self._changed.wait_for(lambda: self._newest == address, timeout_s)
        with self._changed:
            gone = self._changed.wait_for(lambda: not self._clients, timeout_s)
        if not (came and gone):
            raise TimeoutError(f"clients have not gone within {timeout_s} s")

    def stop(self) -> None:
        """Close every connection and the port."""
        self._server.shutdown()
        self._server.server_close()
        self.clear()
        with self._changed:
            clients = list(self._clients)
        for client in clients:
            _close(client)

    def _begin(self, exchange: Exchange) -> Fault:
        with self._changed:
            rule = next((rule for rule in self._rules if rule.takes(exchange)), None)
            exchange.fault = rule.fault if rule else None
            self._log.append(exchange)
            self._changed.notify_all()
        return exchange.fault or Fault()

    def _came(self, client: socket.socket, address: object) -> None:
        with self._changed:
            self._clients.add(client)
            self._newest = address
            self._changed.notify_all()

    def _went(self, client: socket.socket) -> None:
        with self._changed:
            self._clients.discard(client)
            self._changed.notify_all()

    def _connect(self) -> socket.socket:
        server = socket.create_connection(self._upstream)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        return server


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    proxy: Proxy

    def process_request(self, request: Any, client_address: Any) -> None:
        self.proxy._came(request, client_address)
        super().process_request(request, client_address)


class _Connection(socketserver.StreamRequestHandler):
    """A client's connection: one request after the other, each on a new one to the server."""

    proxy: ClassVar[Proxy]
    rfile: io.BufferedReader
    # Head and body are sent apart: without this each answer takes 40 ms more.
    disable_nagle_algorithm = True

    def finish(self) -> None:
        self.proxy._went(self.connection)
        _close(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def handle(self) -> None:
        with contextlib.suppress(Cut, OSError):
            while self._serve_one():
                pass

    def _serve_one(self) -> bool:
        """Return whether the connection stays open."""
        head = Head.read(self.rfile)
        exchange = Exchange.of(head)
        fault = self.proxy._begin(exchange)
        answer = fault.admit()
        if answer is not None:
            for _ in head.body(self.rfile):
                pass
            self.connection.sendall(answer)
            return True
        with self.proxy._connect() as server, server.makefile("rb") as answers:
            self._upload(head, fault, exchange, server)
            return self._download(exchange, fault, answers)

    def _upload(self, head: Head, fault: Fault, exchange: Exchange, server: socket.socket) -> None:
        def send(data: bytes, payload: int) -> None:
            exchange.up += payload
            # The server may answer before it has read all, and close.
            with contextlib.suppress(ConnectionError):
                server.sendall(data)

        send(head.raw, 0)
        head.deliver(fault.upload(head.body(self.rfile)), send)

    def _download(self, exchange: Exchange, fault: Fault, answers: io.BufferedReader) -> bool:
        def send(data: bytes, payload: int) -> None:
            exchange.down += payload
            self.connection.sendall(data)

        head = Head.read(answers)
        while head.status == 100:
            head = Head.read(answers)
        exchange.status = head.status
        head.bodiless |= exchange.method == "HEAD"
        fault.answered()
        send(head.raw, 0)
        head.deliver(fault.download(head.body(answers)), send)
        return head.keeps_open


def _matches(exchange: Exchange, method: str, target: str) -> bool:
    return method in ("", exchange.method) and re.search(target, exchange.target) is not None


def _close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
