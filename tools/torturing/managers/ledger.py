"""What a program is about to do and what has returned, one line of JSON each, outside of the run.

The parent learns of each line by a byte in a pipe, so that it can kill at a line.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Line = dict[str, Any]
# The byte in the pipe for a line before a call.
BEGUN = b"("


class Ledger:
    """Appends lines, durably, in the process that is killed."""

    def __init__(self, path: Path, pipe: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._pipe = pipe

    def write(self, what: str, when: str, **about: Any) -> None:
        """Append a line; ``when`` is "begin", "end" or "failed"."""
        line = json.dumps({"what": what, "when": when, **about}) + "\n"
        os.write(self._file, line.encode())
        os.fsync(self._file)
        os.write(self._pipe, BEGUN if when == "begin" else b")")


class Silence(Ledger):
    """Notes nothing, for a rank that is not the first."""

    def __init__(self) -> None:
        pass

    def write(self, what: str, when: str, **about: Any) -> None:
        pass


class Lines:
    """Reads a ledger, in the parent."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def new(self) -> list[Line]:
        """Return the lines since the last call, while a writer may be in the middle of one."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def all_new(self) -> list[Line]:
        """Return them once the writer is gone; remove the part of a line that its kill has left."""
        lines = self.new()
        if self._path.exists():
            os.truncate(self._path, self._read)
        return lines

    def last(self, count: int) -> list[str]:
        """Return the last lines, as text."""
        return self._path.read_text().splitlines()[-count:] if self._path.exists() else []
