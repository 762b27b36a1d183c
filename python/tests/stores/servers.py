"""The servers that tests run against: ``s3s-fs`` over a folder and ``moto`` in memory speak S3,
``azurite`` speaks Azure.

Each is a process on a free port that ends when its starter does, even by a kill.
"""

from __future__ import annotations

import collections
import importlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parents[3]

# Ends the server when standard input closes, and leaves its output to the server alone.
RUN = '"$@" & exec >/dev/null 2>&1; read -r _; kill $!; wait'

ADDRESS = re.compile(r"(?:running (?:at|on)|listens on) (http://[\d.:]+)", re.IGNORECASE)

# Its versions of the interface are older than the client's. Without a flag it sends telemetry.
AZURITE_FLAGS = ("--skipApiVersionCheck", "--disableTelemetry", "--silent")


class NoServer(Exception):
    """This machine cannot run the server; the text says why."""


class Server:
    """A running server. Use it as a context.

    Attributes:
        name: ``s3s``, ``moto`` or ``azurite``.
        url: where it answers.
        folder: where ``s3s`` keeps its files, each object as ``folder/bucket/key``; else None.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | os.PathLike[str]],
        folder: pathlib.Path | None = None,
        environment: dict[str, str] | None = None,
    ):
        self.name, self.folder = name, folder
        self._last_lines: collections.deque[str] = collections.deque(maxlen=100)
        self._process = subprocess.Popen(
            ["sh", "-c", RUN, "sh", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self.url = self._address()
        threading.Thread(target=self._drain, daemon=True).start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(60)

    def _address(self) -> str:
        assert self._process.stdout
        for line in self._process.stdout:
            self._last_lines.append(line)
            if found := ADDRESS.search(line):
                return found[1]
        self.stop()
        raise RuntimeError(f"{self.name} ended at once: {''.join(self._last_lines)}")

    def _drain(self) -> None:
        assert self._process.stdout
        self._last_lines.extend(self._process.stdout)


def s3s(folder: pathlib.Path, access_key: str, secret_key: str) -> Server:
    """Start ``s3s-fs``, which keeps each object as a file.

    Raises:
        NoServer: it is not installed.
    """
    program = ROOT / "target" / "stores" / "bin" / "s3s-fs"
    found = program if program.exists() else shutil.which("s3s-fs")
    if found is None:
        raise NoServer("s3s-fs is not installed: make stores")
    keys = ["--access-key", access_key, "--secret-key", secret_key]
    command = [found, "--host", "127.0.0.1", "--port", "0", *keys, folder]
    # Its address is a message of level info.
    return Server("s3s", command, folder, {"RUST_LOG": "error,s3s_fs=info"})


def moto() -> Server:
    """Start moto, which keeps objects in memory and checks no signature.

    Raises:
        NoServer: it is not installed.
    """
    try:
        importlib.import_module("moto.server")
    except ImportError as error:
        raise NoServer(f"moto is not installed ({error}): pip install './python[test]'") from error
    return Server("moto", [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"])


def azurite() -> Server:
    """Start azurite, which keeps blobs in memory.

    Raises:
        NoServer: it is not installed.
    """
    program = ROOT / "target/stores/azurite/node_modules/azurite/dist/src/blob/main.js"
    node = shutil.which("node")
    if node is None or not program.exists():
        raise NoServer("azurite is not installed, or Node.js is not: make stores")
    where = ["--blobHost", "127.0.0.1", "--blobPort", "0", "--inMemoryPersistence"]
    return Server("azurite", [node, program, *where, *AZURITE_FLAGS])
