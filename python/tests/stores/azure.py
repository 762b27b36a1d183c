"""A container of Azure, seen from the side, and the client that signs its requests (Shared Key)."""

from __future__ import annotations

import base64
import datetime
import email.utils
import hashlib
import hmac

from stores import servers
from stores.client import Answer, Client, Refused
from stores.place import Place

# Azurite's own, which its documentation has.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

VERSION = "2021-12-02"
# Headers that are signed as they are, in this order.
SIGNED = (
    "content-encoding",
    "content-language",
    "content-length",
    "content-md5",
    "content-type",
    "date",
    "if-modified-since",
    "if-match",
    "if-none-match",
    "if-unmodified-since",
    "range",
)


class AzureClient(Client):
    """Requests to Azure; see `Client`."""

    def _signed(
        self,
        method: str,
        path: str,
        pairs: list[tuple[str, str]],
        body: bytes,
        headers: dict[str, str],
    ) -> dict[str, str]:
        now = email.utils.format_datetime(datetime.datetime.now(datetime.UTC), usegmt=True)
        added = {"x-ms-date": now, "x-ms-version": VERSION}
        fields = {name.lower(): value for name, value in {**headers, **added}.items()}
        fields["content-length"] = str(len(body) or "")
        lines = [method, *(fields.get(name, "") for name in SIGNED)]
        lines += [f"{name}:{fields[name]}" for name in sorted(fields) if name.startswith("x-ms-")]
        lines.append(f"/{ACCOUNT}{path}")
        lines += [f"{name}:{value}" for name, value in pairs]
        digest = hmac.digest(base64.b64decode(KEY), "\n".join(lines).encode(), hashlib.sha256)
        signature = base64.b64encode(digest).decode()
        return {**added, "authorization": f"SharedKey {ACCOUNT}:{signature}"}


class Container(Place):
    """A container of Azure."""

    scheme = "az"
    client = AzureClient
    below = f"/{ACCOUNT}"

    def __init__(self, server: servers.Server, name: str):
        super().__init__(server, name, restype="container")

    def put(self, key: str, body: bytes, **headers: str) -> None:
        """Store a blob. What was uploaded of it in blocks is dropped."""
        super().put(key, body, **{"x-ms-blob-type": "BlockBlob"}, **headers)

    def has(self, key: str) -> bool:
        """Return whether there is such a blob."""
        return key in self.keys(key)

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys of all blobs, sorted."""
        return sorted(self._listed(prefix).all("Name"))

    def blocks(self, key: str) -> int:
        """Return how many blocks were uploaded of a blob and not made part of it."""
        try:
            answer = self.request("GET", key, comp="blocklist", blocklisttype="uncommitted")
        except Refused as error:
            if error.status != 404:
                raise
            return 0
        return len(answer.all("Size"))

    def begun(self) -> list[str]:
        """Return the keys of blobs of which nothing but blocks was uploaded."""
        every = self._listed("", include="uncommittedblobs").all("Name")
        return sorted({*every} - {*self.keys()})

    def has_unfinished(self) -> bool:
        return bool(self.begun())

    def _listed(self, prefix: str, **query: object) -> Answer:
        return self.request("GET", restype="container", comp="list", prefix=prefix, **query)

    def environment(self, endpoint: str = "") -> dict[str, str]:
        """Return what a program needs in its environment; ``endpoint`` is a proxy's URL."""
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": f"{endpoint or self.server.url}/{ACCOUNT}",
            "AZURE_ALLOW_HTTP": "true",
            "NO_PROXY": "127.0.0.1",
        }
