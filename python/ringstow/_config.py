"""The knobs: the same names, defaults and meaning as the Rust side's ``Config``."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from ringstow import _native
from ringstow._arguments import StrPath, absolute
from ringstow._errors import InvalidStateError

Switch = Literal["auto", "on", "off"]
Engine = Literal["auto", "uring", "portable", "tokio-uring"]

_UNSET: Any = object()
"""Stands for a field that is not given."""
_U32_MAX = 2**32 - 1
_U64_MAX = 2**64 - 1


def _listed(words: tuple[str, ...]) -> str:
    """Return ``'a', 'b' or 'c'``."""
    quoted = [repr(word) for word in words]
    return f"{', '.join(quoted[:-1])} or {quoted[-1]}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How to save and load. The defaults are right for most machines.

    A field that is not given is what the environment says (``RINGSTOW_POOL_BYTES=1G``, one
    variable a field), else the file that ``RINGSTOW_CONFIG`` names or ``ringstow.toml`` in the
    current directory, else the default. In ``./ringstow.toml``, ``stripe`` and ``trace``
    are ignored. Sizes are numbers of bytes or text: ``"64M"`` and ``"64MiB"`` are 64 * 2^20,
    ``"64MB"`` is 64 * 10^6; they are kept as numbers. Everything is checked here and now.

    Raises:
        InvalidStateError: a field, or a variable of the environment, says what can't be, alone or
            beside another; names it, what it says and what it may say.
        UnsupportedError: it asks by name for an engine that this build lacks.
        FormatError: the file says what can't be; names the line.
        TypeError: a field is given something of another kind.
        OSError: the file can't be read.
    """

    pool_bytes: int = _UNSET
    """Bytes of staging memory at most: the only memory a save needs, however large the checkpoint.
    It is taken as it is needed. As large as the checkpoint makes a save a snapshot; smaller
    streams. Default 256 MiB."""

    block_bytes: int = _UNSET
    """Bytes of one staging buffer, which is also one transfer; a multiple of 4096. A checksum
    covers 1 MiB of them, or all where they are no multiple of that. Default 4 MiB."""

    queue_depth: int = _UNSET
    """Transfers in flight at once. Default 8."""

    fillers: int = _UNSET
    """Threads that copy and checksum; 0, the default, means one a core, at most four."""

    engine: Engine = _UNSET
    """What moves the bytes. One asked for by name is never silently replaced. "tokio-uring" is part
    of Rust builds that ask for it, not of the wheel. Default auto."""

    direct: Switch = _UNSET
    """O_DIRECT: past the page cache. Default auto."""

    fixed: Switch = _UNSET
    """Staging memory registered with io_uring once, not pinned at every transfer. "on": all of it
    is taken and registered at once, and loads go through it too, or fail. Default auto."""

    shard_bytes: int = _UNSET
    """Largest shard file in bytes, as far as whole tensors allow; 0, the default, is no limit."""

    files: int = _UNSET
    """Shard files that a save writes at the same time in each directory, of about as many bytes
    each; of whole tensors, so that one larger than its fair share makes its file larger. From 1,
    the default, to 64."""

    stripe: Sequence[StrPath] = _UNSET
    """Directories on other disks, over which checkpoints are striped: ``parent/name`` has a
    stripe directory ``stripe/name`` in each, and a save writes ``files`` files into each and
    into its own. They must exist, and loads need them too. Kept as a tuple of paths from the root.
    Default none."""

    recycle: bool = _UNSET
    """Whether the files of a checkpoint that is replaced are kept for the next save to write over,
    as `remove` keeps those of one that is removed. Takes the room of one more checkpoint. Default
    False."""

    trace: StrPath | None = _UNSET
    """A file to write what each block of a save or load went through, and when, in the trace format
    of Chrome and Perfetto. Default none. One that is there is replaced; if it can't be written,
    the reason is logged. Kept as a path from the root."""

    if TYPE_CHECKING:
        # What a field is given may be more than what it keeps.
        def __init__(
            self,
            *,
            pool_bytes: int | str = ...,
            block_bytes: int | str = ...,
            queue_depth: int = ...,
            fillers: int = ...,
            engine: Engine = ...,
            direct: Switch = ...,
            fixed: Switch = ...,
            shard_bytes: int | str = ...,
            files: int = ...,
            stripe: Sequence[StrPath] = ...,
            recycle: bool = ...,
            trace: StrPath | None = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        """Fill in the fields that are not given, and check all; the native side checks numbers.

        Paths are kept as they are now: a later chdir must not move a save in the background.
        """
        unset = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) is _UNSET]
        if unset:
            found = json.loads(_native.found_config())
            for name in unset:
                object.__setattr__(self, name, found[name])
        for name in ("pool_bytes", "block_bytes", "shard_bytes"):
            self._check_size(name)
        for name in ("queue_depth", "fillers", "files"):
            self._check_kind(name, type(getattr(self, name)) is int, "an int")
            self._check(name, 0 <= getattr(self, name) <= _U32_MAX, "a number from 0 to 4294967295")
        for name, words in (("engine", Engine), ("direct", Switch), ("fixed", Switch)):
            one_of = _listed(get_args(words))
            self._check_kind(name, isinstance(getattr(self, name), str), one_of)
            self._check(name, getattr(self, name) in get_args(words), one_of)
        self._check_kind("recycle", type(self.recycle) is bool, "True or False")
        is_one = isinstance(self.stripe, str | os.PathLike)
        self._check_kind("stripe", not is_one, "a collection of paths ([path] for one)")
        # An empty one is left for the native side to refuse.
        paths = [os.fspath(path) for path in self.stripe]
        object.__setattr__(self, "stripe", tuple(path and absolute(path) for path in paths))
        if self.trace:
            object.__setattr__(self, "trace", absolute(self.trace))
        _native.check_config(self.to_json())

    def _check_size(self, name: str) -> None:
        size = getattr(self, name)
        is_right = type(size) is int or isinstance(size, str)
        self._check_kind(name, is_right, "an int, or a size as text ('256M')")
        try:
            object.__setattr__(self, name, in_bytes(size))
        except InvalidStateError as why:
            raise InvalidStateError(f"Config.{name} = {why}") from None
        self._check(name, 0 <= getattr(self, name) <= _U64_MAX, "0 or more bytes")

    def _check(self, name: str, is_right: bool, what: str) -> None:
        if not is_right:
            raise InvalidStateError(f"Config.{name} = {getattr(self, name)!r}: must be {what}")

    def _check_kind(self, name: str, is_right: bool, what: str) -> None:
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


def in_bytes(size: int | str) -> int:
    """Return a size in bytes: ``"4M"`` and ``"4MiB"`` are 4 * 2^20, ``"4MB"`` is 4 * 10^6.

    Raises:
        InvalidStateError: the text is no size.
    """
    if isinstance(size, int):
        return size
    try:
        return _native.parse_size(size)
    except ValueError as why:
        raise InvalidStateError(f"{size!r}: {why}") from None
