"""An S3 server that drops what it gets: it takes less of a machine than one that stores.

It answers what uploads ask: create, replace, uploads in parts, list, and read of small objects. It
checks no signature and no checksum, so it shows speeds and proves nothing else. As a program it
prints its URL and serves until it is killed.
"""

from __future__ import annotations

import re
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

_BUFFER_BYTES = 1 << 20
_KEPT_BYTES = 1 << 20
"""Larger objects are dropped, and cannot be read."""


class Object(NamedTuple):
    nbytes: int
    kept: bytes | None


class Sink(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"
    objects: ClassVar[dict[str, Object]] = {}
    uploads: ClassVar[dict[str, int]] = {}
    """Bytes that each upload in parts has got."""
    lock = threading.Lock()

    def do_PUT(self) -> None:
        nbytes, kept = self._body()
        key, asked = self._asked()
        if "uploadId" in asked:
            with self.lock:
                self.uploads[asked["uploadId"][0]] += nbytes
            return self._answer(200)
        with self.lock:
            if self.headers.get("If-None-Match") == "*" and key in self.objects:
                return self._answer(412, _error("PreconditionFailed"))
            self.objects[key] = Object(nbytes, kept)
        self._answer(200)

    def do_POST(self) -> None:
        _, body = self._body()
        key, asked = self._asked()
        bucket, _, name = key.partition("/")
        where = f"<Bucket>{escape(bucket)}</Bucket><Key>{escape(name)}</Key>"
        if "uploads" in asked:
            upload = uuid.uuid4().hex
            with self.lock:
                self.uploads[upload] = 0
            result = f"{where}<UploadId>{upload}</UploadId>"
            return self._answer(200, _xml("InitiateMultipartUploadResult", result))
        if "uploadId" in asked:
            with self.lock:
                self.objects[key] = Object(self.uploads.pop(asked["uploadId"][0]), None)
            result = f'{where}<ETag>"0"</ETag>'
            return self._answer(200, _xml("CompleteMultipartUploadResult", result))
        names = re.findall("<Key>(.*?)</Key>", (body or b"").decode())
        with self.lock:
            for name in names:
                self.objects.pop(f"{bucket}/{unescape(name)}", None)
        deleted = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
        self._answer(200, _xml("DeleteResult", deleted))

    def do_DELETE(self) -> None:
        key, asked = self._asked()
        with self.lock:
            if "uploadId" in asked:
                self.uploads.pop(asked["uploadId"][0], None)
            else:
                self.objects.pop(key, None)
        self._answer(204)

    def do_HEAD(self) -> None:
        key, _ = self._asked()
        found = self.objects.get(key)
        is_bucket = "/" not in key.rstrip("/")
        nbytes = found.nbytes if found else 0
        self._answer(200 if found or is_bucket else 404, nbytes=nbytes)

    def do_GET(self) -> None:
        key, asked = self._asked()
        if "/" not in key.rstrip("/"):
            return self._answer(200, self._listed(key.rstrip("/"), asked))
        found = self.objects.get(key)
        if found is None:
            return self._answer(404, _error("NoSuchKey"))
        if found.kept is None:
            return self._answer(501, _error("NotImplemented"))
        self._answer(200, found.kept)

    def _listed(self, bucket: str, asked: dict[str, list[str]]) -> bytes:
        prefix = f"{bucket}/{asked.get('prefix', [''])[0]}"
        with self.lock:
            found = [(k, o.nbytes) for k, o in self.objects.items() if k.startswith(prefix)]
        when = "2026-01-01T00:00:00.000Z"
        entries = (
            f"<Contents><Key>{escape(key.partition('/')[2])}</Key><Size>{nbytes}</Size>"
            f'<ETag>"0"</ETag><LastModified>{when}</LastModified></Contents>'
            for key, nbytes in sorted(found)
        )
        start = f"<Name>{bucket}</Name><IsTruncated>false</IsTruncated>"
        return _xml("ListBucketResult", start + "".join(entries))

    def _asked(self) -> tuple[str, dict[str, list[str]]]:
        """Return bucket and key, and the query."""
        url = urlsplit(self.path)
        return unquote(url.path).lstrip("/"), parse_qs(url.query, keep_blank_values=True)

    def _body(self) -> tuple[int, bytes | None]:
        """Read the body; return its length, and the bytes of a small one."""
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            return self._chunks(), None
        nbytes = int(self.headers.get("Content-Length") or 0)
        if nbytes <= _KEPT_BYTES:
            return nbytes, self.rfile.read(nbytes)
        self._drop(nbytes)
        return nbytes, None

    def _drop(self, nbytes: int) -> None:
        buffer = memoryview(bytearray(_BUFFER_BYTES))
        while nbytes:
            got = self.rfile.readinto(buffer[: min(nbytes, _BUFFER_BYTES)])
            if not got:
                raise ConnectionResetError("the client ended in a body")
            nbytes -= got

    def _chunks(self) -> int:
        total = 0
        while nbytes := int(self.rfile.readline().split(b";")[0], 16):
            self._drop(nbytes)
            self.rfile.readline()
            total += nbytes
        while self.rfile.readline().strip():
            pass
        return total

    def _answer(self, status: int, body: bytes = b"", nbytes: int | None = None) -> None:
        self.send_response(status)
        self.send_header("ETag", '"0"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        if status != 204:
            self.send_header("Content-Length", str(len(body) if nbytes is None else nbytes))
        self.end_headers()
        if body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def _xml(tag: str, inner: str) -> bytes:
    head = '<?xml version="1.0" encoding="UTF-8"?>'
    return f'{head}<{tag} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{inner}</{tag}>'.encode()


def _error(code: str) -> bytes:
    head = '<?xml version="1.0" encoding="UTF-8"?>'
    return f"{head}<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


if __name__ == "__main__":
    server = _Server(("127.0.0.1", 0), Sink)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()
