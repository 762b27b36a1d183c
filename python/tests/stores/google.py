"""A double of Google Cloud Storage, of which no server is available here: its XML API, in memory.

It does what Google's reference of the API says, and no more: it takes parts of 5 MiB and more,
except the last, in order and with their ETags; counts generations; compares
``x-goog-if-generation-match``; lists 1000 names a page. It checks no token.
"""

from __future__ import annotations

import hashlib
import http.server
import itertools
import json
import re
import threading
import urllib.parse
from typing import NamedTuple
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from stores.client import Client
from stores.place import Place

LEAST_PART = 5 << 20
PAGE = 1000


class Stored(NamedTuple):
    """An object: its bytes and its number, which no other object ever had."""

    body: bytes
    generation: int

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.body).hexdigest()}"'


class Failure(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, code: str):
        super().__init__(code)
        self.status, self.code = status, code


class GoogleServer:
    """A running server. Use it as a context."""

    name, folder = "google", None

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.numbers = itertools.count(1_700_000_000_000_001)
        self.buckets: dict[str, dict[str, Stored]] = {}
        self.uploads: dict[str, tuple[str, str, dict[int, bytes]]] = {}
        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._http.store = self  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def __enter__(self) -> GoogleServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def _serve(self) -> None:
        self.store: GoogleServer = self.server.store  # type: ignore[attr-defined]
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        url = urllib.parse.urlsplit(self.path)
        _, bucket, *rest = urllib.parse.unquote(url.path).split("/", 2)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        try:
            with self.store.lock:
                status, headers, answer = self._answer(bucket, "".join(rest), query, body)
        except Failure as failure:
            status, headers = failure.status, {}
            answer = f"<Error><Code>{failure.code}</Code></Error>".encode()
        self.send_response(status)
        for name, value in {"content-length": str(len(answer)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def _answer(
        self, bucket: str, key: str, query: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        if not key and self.command == "PUT":
            self.store.buckets[bucket] = {}
            return 200, {}, b""
        objects = self.store.buckets.get(bucket)
        if objects is None:
            raise Failure(404, "NoSuchBucket")
        match self.command, sorted(query):
            case "GET", _ if not key:
                return 200, {}, self._listed(objects, query)
            case "POST", ["uploads"]:
                number = f"ABPnz-{next(self.store.numbers)}"
                self.store.uploads[number] = (bucket, key, {})
                return 200, {}, _xml("InitiateMultipartUploadResult", UploadId=number)
            case "PUT", ["partNumber", "uploadId"]:
                self._parts(bucket, key, query)[int(query["partNumber"])] = body
                return 200, {"etag": Stored(body, 0).etag}, b""
            case "POST", ["uploadId"]:
                stored = self._joined(self._parts(bucket, key, query), body.decode())
                self._check(objects.get(key))
                objects[key] = stored
                del self.store.uploads[query["uploadId"]]
                answer = _xml("CompleteMultipartUploadResult", ETag=stored.etag)
                return 200, self._fields(stored), answer
            case "DELETE", ["uploadId"]:
                self._parts(bucket, key, query)
                del self.store.uploads[query["uploadId"]]
                return 204, {}, b""
            case "PUT", []:
                self._check(objects.get(key))
                objects[key] = stored = Stored(body, next(self.store.numbers))
                return 200, self._fields(stored), b""
            case "GET" | "HEAD" | "DELETE", []:
                if key not in objects:
                    raise Failure(404, "NoSuchKey")
                self._check(objects[key])
                if self.command == "DELETE":
                    del objects[key]
                    return 204, {}, b""
                return self._read(objects[key])
        raise Failure(400, "InvalidArgument")

    def _check(self, known: Stored | None) -> None:
        wanted = self.headers.get("x-goog-if-generation-match")
        if wanted is not None and int(wanted) != (0 if known is None else known.generation):
            raise Failure(412, "PreconditionFailed")

    def _fields(self, stored: Stored) -> dict[str, str]:
        return {"etag": stored.etag, "x-goog-generation": str(stored.generation)}

    def _read(self, stored: Stored) -> tuple[int, dict[str, str], bytes]:
        size = len(stored.body)
        fields = {**self._fields(stored), "last-modified": "Fri, 27 Nov 2026 12:00:00 GMT"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range") or "")
        if self.command == "HEAD":
            return 200, {**fields, "content-length": str(size)}, b""
        if asked is None:
            return 200, fields, stored.body
        begin, end = int(asked[1]), min(int(asked[2] or size), size - 1)
        if begin >= size:
            raise Failure(416, "InvalidRange")
        fields["content-range"] = f"bytes {begin}-{end}/{size}"
        return 206, fields, stored.body[begin : end + 1]

    def _parts(self, bucket: str, key: str, query: dict[str, str]) -> dict[int, bytes]:
        where, name, parts = self.store.uploads.get(query["uploadId"], ("", "", {}))
        if (where, name) != (bucket, key):
            raise Failure(404, "NoSuchUpload")
        return parts

    def _joined(self, parts: dict[int, bytes], text: str) -> Stored:
        told = [
            (int(part.findtext("PartNumber") or 0), part.findtext("ETag"))
            for part in ElementTree.fromstring(text).iter("Part")
        ]
        numbers = [number for number, _ in told]
        if not told or numbers != sorted(set(numbers)) or not 1 <= numbers[-1] <= 10_000:
            raise Failure(400, "InvalidPartOrder")
        for number, etag in told:
            if number not in parts or Stored(parts[number], 0).etag != etag:
                raise Failure(400, "InvalidPart")
        if any(len(parts[number]) < LEAST_PART for number in numbers[:-1]):
            raise Failure(400, "EntityTooSmall")
        return Stored(b"".join(parts[number] for number in numbers), next(self.store.numbers))

    def _listed(self, objects: dict[str, Stored], query: dict[str, str]) -> bytes:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after") or ""
        rows: dict[str, str] = {}
        for key in sorted(objects):
            if not key.startswith(prefix):
                continue
            head, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if cut:
                name = prefix + head + cut
                rows[name] = f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            else:
                one = objects[key]
                rows[key] = (
                    f"<Contents><Key>{escape(key)}</Key><Generation>{one.generation}</Generation>"
                    "<LastModified>2026-11-27T12:00:00.000Z</LastModified>"
                    f"<ETag>{escape(one.etag)}</ETag><Size>{len(one.body)}</Size></Contents>"
                )
        names = [name for name in rows if name > after]
        text = "".join(rows[name] for name in names[:PAGE])
        if len(names) > PAGE:
            text += f"<NextContinuationToken>{escape(names[PAGE - 1])}</NextContinuationToken>"
        return f"<ListBucketResult>{text}</ListBucketResult>".encode()


def _xml(name: str, **texts: str) -> bytes:
    inner = "".join(f"<{one}>{escape(text)}</{one}>" for one, text in texts.items())
    return f"<{name}>{inner}</{name}>".encode()


class GoogleClient(Client):
    """Requests without a token."""

    def _signed(self, *_: object) -> dict[str, str]:
        return {}


class GoogleBucket(Place):
    """A bucket of the double."""

    scheme = "gs"
    client = GoogleClient
    server: GoogleServer  # type: ignore[assignment]

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys of all objects, sorted."""
        return sorted(key for key in self.server.buckets[self.name] if key.startswith(prefix))

    def has_unfinished(self) -> bool:
        return any(bucket == self.name for bucket, _, _ in self.server.uploads.values())

    def environment(self, endpoint: str = "") -> dict[str, str]:
        """Return what a program needs in its environment; ``endpoint`` is a proxy's URL."""
        account = {"gcs_base_url": endpoint or self.server.url, "disable_oauth": True}
        account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        return {
            "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account),
            "GOOGLE_ALLOW_HTTP": "true",
            "NO_PROXY": "127.0.0.1",
        }
