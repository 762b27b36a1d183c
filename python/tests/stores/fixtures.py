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


@pytest.fixture(scope="session")
def google() -> Iterator[GoogleServer]:
    """Return a running double of Google's server."""
    with GoogleServer() as server:
        yield server


_KINDS: dict[str, Any] = {"azurite": Container, "google": GoogleBucket}


def _on(server: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a fresh place on a server, to which the environment leads."""
    kind = _KINDS.get(server, Bucket)
    made = kind(request.getfixturevalue(server), f"ringstow-{next(_numbers)}")
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a fresh bucket of ``s3s-fs``."""
    return _on("s3s", request, monkeypatch)


@pytest.fixture
def container(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a fresh container of ``azurite``."""
    return _on("azurite", request, monkeypatch)


@pytest.fixture
def google_bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a fresh bucket of the double of Google's server."""
    return _on("google", request, monkeypatch)


@pytest.fixture(params=["s3s", "moto"])
def each_bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a fresh bucket of each server in turn."""
    return _on(request.param, request, monkeypatch)


@pytest.fixture(params=["s3s", "azurite", "google"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a fresh bucket of ``s3s-fs``, a container of ``azurite``, a bucket of Google's."""
    return _on(request.param, request, monkeypatch)


@pytest.fixture(params=["s3s", "moto", "azurite", "google"])
def each_place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a fresh bucket or container of each server in turn."""
    return _on(request.param, request, monkeypatch)


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
