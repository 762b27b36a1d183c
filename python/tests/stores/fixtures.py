"""What tests of object stores ask for. ``conftest.py`` imports it, so every test can.

``bucket`` is a fresh bucket on a real server, ``each_bucket`` one on each server in turn,
``container`` one of Azure, ``google_bucket`` one of a double of Google's. ``proxy`` is in front of
the test's bucket. Each sets the variables ``AWS_*``, ``AZURE_*`` or ``GOOGLE_*``, so that its URL
leads to it.
"""

from __future__ import annotations

import base64
import itertools
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stores import servers
from stores.azure import Container
from stores.client import ACCESS_KEY, REGION, SECRET_KEY, Client
from stores.google import GoogleBucket, GoogleServer
from stores.place import Place
from stores.proxy import Proxy

_numbers = itertools.count()


class Bucket(Place):
    """A bucket of S3."""

    scheme = "s3"
    client = Client

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys of all objects, sorted."""
        query: dict[str, Any] = {"list-type": 2, "prefix": prefix}
        found: list[str] = []
        while True:
            answer = self.request("GET", **query)
            found += answer.all("Key")
            if answer.all("IsTruncated") != ["true"]:
                return sorted(found)
            query["continuation-token"] = answer.all("NextContinuationToken")[0]

    def uploads(self) -> dict[str, str]:
        """Return the unfinished multipart uploads: their ids with the keys."""
        if self.server.folder is None:
            answer = self.request("GET", uploads="")
            return dict(zip(answer.all("UploadId"), answer.all("Key"), strict=True))
        return _uploads_in(self.server.folder, self.name)

    def has_unfinished(self) -> bool:
        return bool(self.uploads())

    def environment(self, endpoint: str = "") -> dict[str, str]:
        """Return what a program needs in its environment; ``endpoint`` is a proxy's URL."""
        return s3_environment(endpoint or self.server.url)


def s3_environment(endpoint: str) -> dict[str, str]:
    """Return the variables that lead to an S3 server."""
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": REGION,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "NO_PROXY": "127.0.0.1",
    }


def _uploads_in(folder: pathlib.Path, bucket: str) -> dict[str, str]:
    """Return what s3s-fs knows of uploads: it cannot be asked for them (501)."""
    names = r"\.bucket-([\w-]+)\.object-([\w-]+)\.upload-([\w-]+)\.metadata\.json"
    found = (re.fullmatch(names, path.name) for path in folder.iterdir())
    rows = [match.groups() for match in found if match]
    return {
        upload: _decoded(key)
        for where, key, upload in rows
        if _decoded(where) == bucket and (folder / f".upload-{upload}.json").exists()
    }


def _decoded(text: str) -> str:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()


def _running(start: Callable[..., servers.Server], *args: object) -> servers.Server:
    try:
        return start(*args)
    except servers.NoServer as error:
        from support import missing

        missing(str(error))  # type: ignore[no-untyped-call]
        raise


@pytest.fixture(scope="session")
def s3s(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """Return a running ``s3s-fs``, or skip."""
    folder = tmp_path_factory.mktemp("s3s")
    with _running(servers.s3s, folder, ACCESS_KEY, SECRET_KEY) as server:
        yield server
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def moto() -> Iterator[servers.Server]:
    """Return a running moto, or skip."""
    with _running(servers.moto) as server:
        yield server


@pytest.fixture(scope="session")
def azurite() -> Iterator[servers.Server]:
    """Return a running azurite, or skip."""
    with _running(servers.azurite) as server:
        yield server


def _bucket(server: servers.Server, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    bucket = Bucket(server, f"ringstow-{next(_numbers)}")
    _lead_to(bucket, monkeypatch)
    return bucket


def _lead_to(bucket: Bucket | Container | GoogleBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ("AWS_", "AZURE_", "GOOGLE_")
    for name in [name for name in os.environ if name.startswith(kinds)]:
        monkeypatch.delenv(name)
    for name, value in bucket.environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def bucket(s3s: servers.Server, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Return a fresh bucket of ``s3s-fs``."""
    return _bucket(s3s, monkeypatch)


@pytest.fixture(params=["s3s", "moto"])
def each_bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Return a fresh bucket of each server in turn."""
    return _bucket(request.getfixturevalue(request.param), monkeypatch)


@pytest.fixture
def container(azurite: servers.Server, monkeypatch: pytest.MonkeyPatch) -> Container:
    """Return a fresh container of ``azurite``."""
    return _container(azurite, monkeypatch)


def _container(azurite: servers.Server, monkeypatch: pytest.MonkeyPatch) -> Container:
    made = Container(azurite, f"ringstow-{next(_numbers)}")
    _lead_to(made, monkeypatch)
    return made


@pytest.fixture(scope="session")
def google() -> Iterator[GoogleServer]:
    """Return a running double of Google's server."""
    with GoogleServer() as server:
        yield server


@pytest.fixture
def google_bucket(google: GoogleServer, monkeypatch: pytest.MonkeyPatch) -> GoogleBucket:
    """Return a fresh bucket of the double of Google's server."""
    return _google_bucket(google, monkeypatch)


def _google_bucket(google: GoogleServer, monkeypatch: pytest.MonkeyPatch) -> GoogleBucket:
    made = GoogleBucket(google, f"ringstow-{next(_numbers)}")  # type: ignore[arg-type]
    _lead_to(made, monkeypatch)
    return made


_MAKERS: dict[str, Callable[..., Place]] = {"azurite": _container, "google": _google_bucket}


def _place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    make = _MAKERS.get(request.param, _bucket)
    return make(request.getfixturevalue(request.param), monkeypatch)


@pytest.fixture(params=["s3s", "azurite", "google"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Return a fresh bucket of ``s3s-fs``, a container of ``azurite``, a bucket of Google's."""
    return _place(request, monkeypatch)


@pytest.fixture(params=["s3s", "moto", "azurite", "google"])
def each_place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Return a fresh bucket or container of each server in turn."""
    return _place(request, monkeypatch)


@pytest.fixture
def proxy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Return a proxy in front of the test's place."""
    names = ("place", "container", "google_bucket", "each_bucket", "each_place", "bucket")
    name = next((name for name in names if name in request.fixturenames), "bucket")
    behind = request.getfixturevalue(name)
    with Proxy(behind.server.url) as started:
        for variable, value in behind.environment(started.url).items():
            monkeypatch.setenv(variable, value)
        yield started
