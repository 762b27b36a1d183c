"""A small client of S3, with which tests prepare a store and look at it.

It signs requests (Signature Version 4) but not their bodies, and does not try again.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import hmac
import http.client
import re
import urllib.parse

ACCESS_KEY, SECRET_KEY, REGION = "ringstow-test", "ringstow-secret", "us-east-1"


class Refused(Exception):
    """The server answered with an error.

    Attributes:
        status: the HTTP status.
        code: S3's error code, or an empty string.
    """

    def __init__(self, status: int, body: bytes):
        found = re.search(rb"<Code>(\w+)</Code>", body)
        self.status, self.code = status, found[1].decode() if found else ""
        super().__init__(f"{status} {self.code}: {body[:500]!r}")


@dataclasses.dataclass
class Answer:
    """What the server answered. The headers' names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def all(self, element: str) -> list[str]:
        """Return the texts of all XML elements of this name."""
        pattern = f"<{element}>(?:&quot;)?([^<]*?)(?:&quot;)?</{element}>"
        return re.findall(pattern, self.body.decode())


class Client:
    """Requests to one server; each has a connection of its own."""

    def __init__(self, url: str, timeout_s: float = 300):
        self.host = urllib.parse.urlsplit(url).netloc
        self._timeout_s = timeout_s

    def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        **query: object,
    ) -> Answer:
        """Make one request; return its answer.

        Args:
            path: ``/bucket`` or ``/bucket/key``.
            query: as in ``partNumber=1``; ``uploads=""`` for a name alone.

        Raises:
            Refused: the status is 300 or more.
            OSError, http.client.HTTPException: the connection broke.
        """
        quoted = urllib.parse.quote(path)
        pairs = sorted((name, str(value)) for name, value in query.items())
        text = urllib.parse.urlencode(pairs, quote_via=urllib.parse.quote)
        signed = self._signed(method, quoted, pairs, body, headers or {})
        connection = http.client.HTTPConnection(self.host, timeout=self._timeout_s)
        try:
            target = f"{quoted}?{text}" if text else quoted
            connection.request(method, target, body, {**(headers or {}), **signed})
            response = connection.getresponse()
            fields = {name.lower(): value for name, value in response.getheaders()}
            answer = Answer(response.status, fields, response.read())
        finally:
            connection.close()
        if answer.status >= 300:
            raise Refused(answer.status, answer.body)
        return answer

    def _signed(
        self,
        method: str,
        path: str,
        pairs: list[tuple[str, str]],
        body: bytes,
        headers: dict[str, str],
    ) -> dict[str, str]:
        """Return the headers that sign a request."""
        query = urllib.parse.urlencode(pairs, quote_via=urllib.parse.quote)
        return _signed(method, self.host, path, query)


def _signed(method: str, host: str, path: str, query: str) -> dict[str, str]:
    """Return the headers that sign a request, whatever its body is."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    fields = {"host": host, "x-amz-content-sha256": "UNSIGNED-PAYLOAD", "x-amz-date": now}
    names = ";".join(fields)
    lines = "".join(f"{name}:{value}\n" for name, value in fields.items())
    canonical = f"{method}\n{path}\n{query}\n{lines}\n{names}\nUNSIGNED-PAYLOAD"
    scope = f"{now[:8]}/{REGION}/s3/aws4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    key = f"AWS4{SECRET_KEY}".encode()
    for word in scope.split("/"):
        key = hmac.digest(key, word.encode(), "sha256")
    text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{digest}"
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    credential = f"Credential={ACCESS_KEY}/{scope}, SignedHeaders={names}, Signature={signature}"
    return {**fields, "authorization": f"AWS4-HMAC-SHA256 {credential}"}
