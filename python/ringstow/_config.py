"""The knobs: the same names, defaults and meaning as the Rust side's ``Config``."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import field
from functools import partial
from typing import Any, Literal, get_args

from ringstow import _native
from ringstow._paths import StrPath

Switch = Literal["auto", "on", "off"]


def _found(name: str) -> Any:
    """Return what the environment, ``ringstow.toml`` or else ringstow says of a field."""
    return json.loads(_native.found_config())[name]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How to save and load. The defaults are right for most machines.

    A field that is not given is what the environment says (``RINGSTOW_POOL_BYTES=1G``, one
    variable a field), else the file that ``RINGSTOW_CONFIG`` names or ``ringstow.toml`` in the
    current directory, else the default. The numbers are checked against each other when a save or
    load begins; a bad one is an `InvalidStateError` that says what the field may be.

    Raises:
        InvalidStateError: a variable of the environment that can't be; names it.
        FormatError: the file says what can't be; names the line.
        TypeError: a field is given something of another kind.
        OSError: the file can't be read.
    """

    pool_bytes: int = field(default_factory=partial(_found, "pool_bytes"))
    """Bytes of staging memory: the only memory a save needs, however large the checkpoint.
    As large as the checkpoint makes a save a snapshot; smaller streams. Default 256 MiB."""

    block_bytes: int = field(default_factory=partial(_found, "block_bytes"))
    """Bytes of one staging buffer, which is also one transfer; a multiple of 4096. A checksum
    covers 1 MiB of them, or all where they are no multiple of that. Default 4 MiB."""

    queue_depth: int = field(default_factory=partial(_found, "queue_depth"))
    """Transfers in flight at once. Default 8."""

    fillers: int = field(default_factory=partial(_found, "fillers"))
    """Threads that copy and checksum; 0, the default, means one a core, at most four."""

    engine: Literal["auto", "uring", "portable", "tokio-uring"] = field(
        default_factory=partial(_found, "engine")
    )
    """What moves the bytes. One asked for by name is never silently replaced. "tokio-uring" is part
    of Rust builds that ask for it, not of the wheel. Default auto."""

    direct: Switch = field(default_factory=partial(_found, "direct"))
    """O_DIRECT: past the page cache. Default auto."""

    fixed: Switch = field(default_factory=partial(_found, "fixed"))
    """Staging memory registered with io_uring once, not pinned at every transfer. Default auto."""

    shard_bytes: int = field(default_factory=partial(_found, "shard_bytes"))
    """Largest shard file in bytes, as far as whole tensors allow; 0, the default, is no limit."""

    files: int = field(default_factory=partial(_found, "files"))
    """Shard files that a save writes at the same time in each directory, of about as many bytes
    each; of whole tensors, so that one larger than its fair share makes its file larger. From 1,
    the default, to 64."""

    stripe: Sequence[StrPath] = field(default_factory=partial(_found, "stripe"))
    """Directories on other disks, over which checkpoints are striped: ``parent/name`` has a
    companion directory ``stripe/name`` in each, and a save writes ``files`` files into each and
    into its own. They must exist, and loads need them too. Kept as a tuple of paths from the root.
    Default none."""

    recycle: bool = field(default_factory=partial(_found, "recycle"))
    """Whether the files of a checkpoint that is replaced are kept for the next save to write over,
    as `retire` keeps those of one that is removed. Takes the room of one more checkpoint. Default
    False."""

    trace: StrPath | None = field(default_factory=partial(_found, "trace"))
    """A file to write what each block of a save or load went through, and when, in the trace format
    of Chrome and Perfetto. Default none. One that is there is replaced; where it can't be written,
    that is logged. Kept as a path from the root."""

    def __post_init__(self) -> None:
        """Check the kind of each field; what it may be beyond that, the native side checks.

        Paths are kept as they are now: a later chdir must not move a save in the background.
        """
        for name in ("pool_bytes", "block_bytes", "queue_depth", "fillers", "shard_bytes", "files"):
            self._check(name, type(getattr(self, name)) is int, "an int")
            self._check(name, getattr(self, name) >= 0, "0 or more")
        for name in ("direct", "fixed"):
            self._check(name, getattr(self, name) in get_args(Switch), "'auto', 'on' or 'off'")
        self._check("engine", isinstance(self.engine, str), "the name of an engine")
        self._check("recycle", type(self.recycle) is bool, "True or False")
        is_one = isinstance(self.stripe, str | os.PathLike)
        self._check("stripe", not is_one, "a collection of paths ([path] for one)")
        # An empty one is left for the native side to refuse.
        paths = [os.fspath(path) for path in self.stripe]
        stripe = tuple(path and os.path.abspath(path) for path in paths)
        object.__setattr__(self, "stripe", stripe)
        if self.trace:
            object.__setattr__(self, "trace", os.path.abspath(os.fspath(self.trace)))

    def _check(self, name: str, is_right: bool, what: str) -> None:
        if not is_right:
            raise TypeError(f"Config.{name} must be {what}, not {getattr(self, name)!r}")

    def to_json(self) -> str:
        """Return the fields as a JSON object, as the native side takes them."""
        return json.dumps(dataclasses.asdict(self))


def native_json(config: Config | None) -> str:
    """Return the configuration as the native side takes it; None means the defaults."""
    if config is None:
        config = Config()
    if not isinstance(config, Config):
        raise TypeError(f"config is a ringstow.Config, not a {type(config).__name__}")
    return config.to_json()
