"""Reads tensors of a checkpoint by name, a small one together with those behind it in the file.

A verified read covers complete checksum chunks: reading small tensors one by one would read the
same chunk for each.
"""

from __future__ import annotations

import threading
from typing import Any

from ringstow import _native

# In bytes: read at once, and held for later calls. Larger tensors are read alone.
WINDOW_BYTES = 4 << 20
HELD_BYTES_MAX = 4 * WINDOW_BYTES


class ReadAhead:
    """The tensors of a checkpoint. Several threads may use it at once."""

    def __init__(self, checkpoint: _native.Checkpoint, *, verify: bool, config: str) -> None:
        self._checkpoint = checkpoint
        self._verify = verify
        self._config = config
        # In the order of a shard: see `natural_alignment` in src/format/header.rs.
        tensors = sorted(checkpoint.tensors, key=lambda tensor: -_alignment(tensor[3]))
        self._names = [name for name, *_ in tensors]
        self._nbytes = [nbytes for *_, nbytes in tensors]
        self._number = {name: number for number, name in enumerate(self._names)}
        self._held: dict[str, Any] = {}
        self._lock = threading.Lock()

    def take(self, name: str) -> Any:
        """Return a tensor's bytes, in memory that only the caller has.

        Raises:
            CorruptCheckpointError: the bytes are not those that were written.
        """
        with self._lock:
            block = self._held.pop(name, None)
            if block is not None:
                return block
            names = self._window(self._number[name])
            block, *others = self._checkpoint.load(names, self._verify, self._config)[0]
            self._held.update(zip(names[1:], others, strict=True))
            while sum(other.nbytes for other in self._held.values()) > HELD_BYTES_MAX:
                del self._held[next(iter(self._held))]
            return block

    def _window(self, number: int) -> list[str]:
        """Return a name and those of the small tensors behind it that are not held yet."""
        names, room = [self._names[number]], WINDOW_BYTES - self._nbytes[number]
        for behind in range(number + 1, len(self._names)):
            room -= self._nbytes[behind]
            if room < 0 or self._names[behind] in self._held:
                break
            names.append(self._names[behind])
        return names


def _alignment(nbytes: int) -> int:
    return min(nbytes & -nbytes, 4096) if nbytes else 4096
