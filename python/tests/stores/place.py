"""A bucket or a container, seen from the side: what is done here passes no proxy."""

from __future__ import annotations

from stores import servers
from stores.client import Answer, Client, Refused


class Place:
    """What buckets and containers have in common.

    Attributes:
        name: its name.
        url: as a test gives it to ringstow.
        server: the `servers.Server` that has it.
    """

    scheme: str
    client: type[Client]
    """Signs the requests of this kind of server."""
    below = ""
    """Where the server has its places, as a path."""

    def __init__(self, server: servers.Server, name: str, **how: object):
        self.server, self.name, self.url = server, name, f"{self.scheme}://{name}"
        self._client = self.client(server.url)
        self.request("PUT", **how)

    def request(
        self,
        method: str,
        key: str = "",
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        **query: object,
    ) -> Answer:
        """Make a request of the place, or of an object in it: see `Client.request`."""
        path = f"{self.below}/{self.name}" + (f"/{key}" if key else "")
        return self._client.request(method, path, body, headers, **query)

    def put(self, key: str, body: bytes, **headers: str) -> None:
        """Store an object."""
        self.request("PUT", key, body, headers)

    def get(self, key: str) -> bytes:
        """Return an object's bytes."""
        return self.request("GET", key).body

    def delete(self, key: str) -> None:
        """Remove an object."""
        self.request("DELETE", key)

    def has(self, key: str) -> bool:
        """Return whether there is such an object."""
        try:
            self.request("HEAD", key)
        except Refused as error:
            if error.status != 404:
                raise
            return False
        return True

    def has_unfinished(self) -> bool:
        """Return whether anything was begun to be uploaded, and is no object."""
        raise NotImplementedError

    def flip(self, key: str, offset: int) -> None:
        """Flip a bit of a stored byte."""
        changed = bytearray(self.get(key))
        changed[offset] ^= 0x10
        self.put(key, bytes(changed))
