"""The knobs: the same names, defaults and meaning as the Rust side's ``Config``."""

from __future__ import annotations

import dataclasses
import json
from typing import Literal

Switch = Literal["auto", "on", "off"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How to save and load. The defaults are right for most machines.

    The numbers are checked against each other when a save or load begins; a bad one is an
    `InvalidStateError` that says what the field may be.
    """

    pool_bytes: int = 256 << 20
    """Bytes of staging memory: the only memory a save needs, however large the checkpoint.
    As large as the checkpoint makes a save a snapshot; smaller streams."""

    block_bytes: int = 4 << 20
    """Bytes of one staging buffer, which is also one transfer; a multiple of 4096. A checksum
    covers 1 MiB of them, or all where they are no multiple of that."""

    queue_depth: int = 8
    """Transfers in flight at once."""

    fillers: int = 0
    """Threads that copy and checksum; 0 means one a core, at most four."""

    engine: Literal["auto", "uring", "portable", "tokio-uring"] = "auto"
    """What moves the bytes. One asked for by name is never silently replaced. "tokio-uring" is part
    of Rust builds that ask for it, not of the wheel."""

    direct: Switch = "auto"
    """O_DIRECT: past the page cache."""

    fixed: Switch = "auto"
    """Staging memory registered with io_uring once, not pinned at every transfer."""

    shard_bytes: int = 0
    """Largest shard file in bytes, as far as whole tensors allow; 0 means no limit."""

    def to_json(self) -> str:
        """Return the fields as a JSON object, as the native side takes them."""
        return json.dumps(dataclasses.asdict(self))
