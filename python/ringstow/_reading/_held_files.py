"""`HeldFiles`: a checkpoint's open files, to be compared also after the checkpoint is removed."""

from __future__ import annotations

import contextlib
import json
import os
import weakref
from collections.abc import Iterable
from typing import BinaryIO

from ringstow import _native
from ringstow._core import _files
from ringstow._core._errors import CorruptCheckpointError

# Bytes that are read at once.
_PIECE_BYTES = 16 << 20


class HeldFiles:
    """Holds files open, and compares what they contain with the checkpoint's checksums."""

    def __init__(self, checkpoint: _native.Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files = [path for _, path, *_ in _native.files_of(checkpoint)]
        self._open: dict[int, BinaryIO] = {}
        block_bytes: int = json.loads(checkpoint.info)["block_bytes"]
        self._piece_bytes = max(_PIECE_BYTES // block_bytes, 1) * block_bytes
        self.close = weakref.finalize(self, _close, self._open)
        """Close the files."""

    def hold(self, names: list[str]) -> None:
        """Open the files of tensors. One that does not open is compared under its path alone."""
        for number in {file for file, _, _ in _native.needed(self._checkpoint, names, [])}:
            if number not in self._open:
                with contextlib.suppress(OSError):
                    self._open[number] = _files.reading(self._files[number], links=False)

    def have(self, names: list[str]) -> bool:
        """Return whether all files of tensors are open."""
        ranges = _native.needed(self._checkpoint, names, [])
        return all(file in self._open for file, _, _ in ranges)

    def compare(self, names: list[str]) -> None:
        """Compare the checksums of tensors.

        Raises:
            CorruptCheckpointError: bytes are damaged.
            OSError: the system refused: a failing disk.
        """
        for file, begin, end in _native.needed(self._checkpoint, names, []):
            for at in range(begin, end, self._piece_bytes):
                content = self._read(file, at, min(end, at + self._piece_bytes))
                problem = "it was cut"
                if content is not None:
                    problem = _native.differing(self._checkpoint, file, at, content) or ""
                if problem:
                    raise CorruptCheckpointError(
                        f"{self._files[file]}, which was removed and is still mapped, is damaged: "
                        f"{problem}; load another checkpoint",
                        file=str(self._files[file]),
                        offset=at,
                        tensors=self._tensors_in(names, file, at),
                    )

    def _read(self, file: int, begin: int, end: int) -> bytearray | None:
        """Return bytes of a file; None if it ends before."""
        content = bytearray(end - begin)
        done = 0
        while done < len(content):
            descriptor = self._open[file].fileno()
            count = os.preadv(descriptor, [memoryview(content)[done:]], begin + done)
            if not count:
                return None
            done += count
        return content

    def _tensors_in(self, names: Iterable[str], file: int, at: int) -> list[str]:
        """Return the tensors in a piece of a file."""
        piece = at, at + self._piece_bytes
        return [
            name
            for name in names
            for of, begin, end in _native.needed(self._checkpoint, [name], [])
            if of == file and begin < piece[1] and end > piece[0]
        ]


def _close(files: dict[int, BinaryIO]) -> None:
    while files:
        files.popitem()[1].close()
