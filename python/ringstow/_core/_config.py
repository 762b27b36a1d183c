"""The settings: the same names, defaults and meaning as in the Rust side's ``Config``."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from ringstow import _native
from ringstow._core._arguments import StrPath, absolute, object_url
from ringstow._core._errors import InvalidStateError

Switch = Literal["auto", "on", "off"]
Engine = Literal["auto", "uring", "portable", "tokio-uring"]
IoPriority = Literal["normal", "low", "idle"]
ShareReads = Literal["auto", "off", "host", "group"]

_U32_MAX = 2**32 - 1
_U64_MAX = 2**64 - 1


class _Default:
    """Marks a field that is not given. `help` shows its default."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)


def _default(value: object) -> Any:
    """Return the mark of a field's default; the native side holds the actual default."""
    return _Default(value)


def _listed(words: tuple[str, ...]) -> str:
    """Return ``'a', 'b' or 'c'``."""
    quoted = [repr(word) for word in words]
    return f"{', '.join(quoted[:-1])} or {quoted[-1]}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How to save and load. The defaults are right for most machines.

    A field that is not given takes its value from its environment variable, such as
    ``RINGSTOW_POOL_BYTES=1G``; otherwise from the file that ``RINGSTOW_CONFIG`` names, or from
    ``./ringstow.toml``, where ``stripe``, ``tiers`` and ``trace`` are ignored; otherwise the
    default. Sizes are numbers of bytes or text: ``"64M"`` and ``"64MiB"`` are 64 * 2^20, ``"64MB"``
    is 64 * 10^6; they are kept as numbers. Everything is checked at once.

    Raises:
        InvalidStateError: a field or variable has an invalid value, or two contradict each other.
            The message lists the allowed values.
        UnsupportedError: this build lacks the ``engine``.
        FormatError: the file is invalid; the message has the line.
        TypeError: a field has a value of the wrong type.
        OSError: the file can't be read.
    """

    pool_bytes: int | Literal["auto"] = _default("auto")
    """Maximum bytes of staging memory, allocated as needed. Each process has a pool of its own: the
    ranks of a node take ranks * ``pool_bytes`` together. A save of any size streams through it.

    ``"auto"``, the default, means 256 MiB, but for background saves as much as
    the state needs, so that training waits for memory and not for the disk, as long as the
    background saves of all processes of the machine take no more than half of the memory that the
    machine and their control groups have available. docs/background.md has the details."""

    block_bytes: int = _default("4M")
    """Bytes of one staging buffer and of one transfer; a multiple of 4096. A checksum covers 1 MiB,
    or ``block_bytes`` if that is not a multiple of 1 MiB. Default 4 MiB."""

    queue_depth: int = _default(8)
    """Transfers in flight at once. Default 8."""

    fillers: int = _default(0)
    """Threads that copy and checksum; 0, the default, means one per core, at most eight."""

    nice: int = _default(0)
    """How much ringstow's threads yield to the program's own if cores are short: added to the
    niceness of the process, as ``nice`` does. From 0, the default, to 19."""

    io_priority: IoPriority = _default("normal")
    """How much ringstow's disk I/O yields to others. Works only with disk schedulers that support
    priorities: bfq and mq-deadline. Default normal."""

    write_rate: int = _default(0)
    """Maximum bytes per second that a save writes, so that others get their share of a disk or
    network. Copying tensors does not slow down until the pool is full: give a background save a
    pool as large as the state. 0, the default, is no limit."""

    engine: Engine = _default("auto")
    """Which engine moves the bytes. Only "auto" falls back to another one. The wheel has no
    "tokio-uring"; it needs a Rust build with that feature. Default auto."""

    direct: Switch = _default("auto")
    """O_DIRECT: bypass the page cache. With "auto", the default, a load still copies from there
    what it holds."""

    fixed: Switch = _default("auto")
    """Register staging memory with io_uring once, instead of pinning it at every transfer. "on"
    allocates and registers all of it at once; if that fails, so does the save or load. Default
    auto."""

    shard_bytes: int = _default(0)
    """Maximum bytes of a shard file, unless one tensor is larger; 0, the default, is no limit."""

    files: int = _default(1)
    """Shard files that a save writes at the same time in each directory, of about equal size. A
    tensor is never split: one larger than its fair share makes its file larger. From 1, the
    default, to 64."""

    stripe: Sequence[StrPath] = _default(())
    """Directories on other disks, over which checkpoints are striped. A save to ``parent/name``
    also writes ``files`` files into ``stripe/name`` in each of them. They must exist, and loads
    need the same setting. Kept as a tuple of absolute paths. Default none."""

    recycle: bool = _default(False)
    """Whether to keep the files of a replaced checkpoint for the next save to overwrite; also the
    default of ``recycle`` in `remove` and `retain`. Takes the disk space of one more checkpoint.
    Default False."""

    tiers: Sequence[StrPath] = _default(())
    """Where checkpoints are copied once they are saved, nearest first: directories on other disks
    and object stores, such as ``["/shared/run", "s3://bucket/run"]``. ``parent/name`` is copied to
    ``tier/name``, in the background. A `CheckpointManager` without ``tiers`` uses these. A load of
    ``parent/name`` reads missing or damaged parts from ``tier/name``. Kept as a tuple of absolute
    paths and URLs. docs/tiers.md is the guide. Default none."""

    promotion_rate: int = _default(0)
    """Maximum bytes per second of a copy to a tier. 0, the default, is no limit."""

    share_reads: ShareReads = _default("auto")
    """Which ranks share what they read in a load by several ranks. "off": none; each reads what it
    needs. "host": those of each host, through its page cache. "group": all; one rank reads what
    several need and sends it to them. "auto", the default, takes what pays by what the ranks
    measure. docs/distributed.md has the details."""

    trace: StrPath | None = _default(None)
    """File for a trace of each block of a save or load, in the trace format of Chrome and Perfetto.
    Replaces an existing file. If it can't be written, a warning is logged. Kept as an absolute
    path. Default none."""

    if TYPE_CHECKING:
        # The constructor accepts more types than a field keeps.
        def __init__(
            self,
            *,
            pool_bytes: int | str = ...,
            block_bytes: int | str = ...,
            queue_depth: int = ...,
            fillers: int = ...,
            nice: int = ...,
            io_priority: IoPriority = ...,
            write_rate: int | str = ...,
            engine: Engine = ...,
            direct: Switch = ...,
            fixed: Switch = ...,
            shard_bytes: int | str = ...,
            files: int = ...,
            stripe: Sequence[StrPath] = ...,
            recycle: bool = ...,
            tiers: Sequence[StrPath] = ...,
            promotion_rate: int | str = ...,
            share_reads: ShareReads = ...,
            trace: StrPath | None = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        """Fill in missing fields, and check all fields; the native side checks numbers.

        Paths become absolute: a later chdir must not move a background save.
        """
        names = [f.name for f in dataclasses.fields(self)]
        unset = [name for name in names if isinstance(getattr(self, name), _Default)]
        if unset:
            found = json.loads(_native.found_config())
            for name in unset:
                object.__setattr__(self, name, found[name])
        self._check_size("pool_bytes", _native.parse_pool_size)
        if self.pool_bytes == 0:
            object.__setattr__(self, "pool_bytes", "auto")
        for name in ("block_bytes", "write_rate", "shard_bytes", "promotion_rate"):
            self._check_size(name)
        for name in ("queue_depth", "fillers", "nice", "files"):
            self._check_kind(name, type(getattr(self, name)) is int, "an int")
            self._check(name, 0 <= getattr(self, name) <= _U32_MAX, "a number from 0 to 4294967295")
        chosen = {"io_priority": IoPriority, "engine": Engine, "direct": Switch, "fixed": Switch}
        chosen["share_reads"] = ShareReads
        for name, words in chosen.items():
            one_of = _listed(get_args(words))
            self._check_kind(name, isinstance(getattr(self, name), str), one_of)
            self._check(name, getattr(self, name) in get_args(words), one_of)
        self._check_kind("recycle", type(self.recycle) is bool, "True or False")
        for name in ("stripe", "tiers"):
            self._check_paths(name)
        if self.trace:
            object.__setattr__(self, "trace", absolute(self.trace))
        _native.check_config(json.dumps(dataclasses.asdict(self)))

    def _check_paths(self, name: str) -> None:
        paths = getattr(self, name)
        is_list = isinstance(paths, Iterable) and not isinstance(paths, str | os.PathLike)
        paths = tuple(paths) if is_list else ()
        are_paths = is_list and all(isinstance(path, str | os.PathLike) for path in paths)
        self._check_kind(name, are_paths, "a collection of paths ([path] for one)")
        kept = tuple(_kept(path, may_be_url=name == "tiers") for path in paths)
        object.__setattr__(self, name, kept)

    def _check_size(self, name: str, parse: Callable[[str], int] = _native.parse_size) -> None:
        size = getattr(self, name)
        is_right = type(size) is int or isinstance(size, str)
        self._check_kind(name, is_right, "an int, or a size as text ('256M')")
        try:
            object.__setattr__(self, name, in_bytes(size, parse))
        except InvalidStateError as why:
            raise InvalidStateError(f"Config.{name} = {why}") from None
        self._check(name, 0 <= getattr(self, name) <= _U64_MAX, "0 or more bytes")

    def _check(self, name: str, is_right: bool, what: str) -> None:
        if not is_right:
            raise InvalidStateError(f"Config.{name} = {getattr(self, name)!r}: must be {what}")

    def _check_kind(self, name: str, is_right: bool, what: str) -> None:
        if not is_right:
            raise TypeError(f"Config.{name} must be {what}, not {getattr(self, name)!r}")

    def to_json(self, *, background: bool = False) -> str:
        """Return the fields as JSON for the native side, without the tiers, which Python handles.

        A save is a background save only if training continues during it and waits for its copies:
        only then may it take more memory than any save needs.
        """
        fields = {**dataclasses.asdict(self), "tiers": (), "promotion_rate": 0}
        if not background:
            fields["pool_bytes"] = self.staging_bytes
        return json.dumps(fields)

    @functools.cached_property
    def staging_bytes(self) -> int:
        """Bytes of staging memory that any save or load may take."""
        return _native.staging_bytes(json.dumps(dataclasses.asdict(self)))


def _kept(path: StrPath, *, may_be_url: bool) -> str:
    """Return an absolute path, or a URL. The native side refuses an empty path."""
    url = object_url(path) if may_be_url else None
    if url is not None:
        return url
    text = os.fspath(path)
    return text and absolute(text, may_be_store=may_be_url)


def given(config: Config | None) -> Config:
    """Return the configuration of an argument; None means the defaults."""
    if config is None:
        config = Config()
    if not isinstance(config, Config):
        raise TypeError(f"config must be a ringstow.Config, not a {type(config).__name__}")
    return config


def native_json(config: Config | None) -> str:
    """Return the configuration as JSON for the native side; None means the defaults."""
    return given(config).to_json()


def without_tiers(config: Config) -> Config:
    """Return the configuration for saves whose copies other code makes."""
    return with_tiers(config, ())


def with_tiers(config: Config | None, tiers: Sequence[str]) -> Config:
    """Return the configuration for a load of a checkpoint that has copies on these tiers."""
    return dataclasses.replace(given(config), tiers=tuple(tiers), promotion_rate=0)


def in_bytes(size: int | str, parse: Callable[[str], int] = _native.parse_size) -> int:
    """Return a size in bytes: ``"4M"`` and ``"4MiB"`` are 4 * 2^20, ``"4MB"`` is 4 * 10^6.

    Raises:
        InvalidStateError: the text is not a size.
    """
    if isinstance(size, int):
        return size
    try:
        return parse(size)
    except ValueError as why:
        raise InvalidStateError(f"{size!r}: {why}") from None


def parse_size(size: int | str) -> int:
    """Return a size in bytes: ``"5GB"`` is 5 * 10^9; ``"5GiB"`` and ``"5G"`` are 5 * 2^30.

    Raises:
        InvalidStateError: the value is not a size, or not positive.
    """
    size = in_bytes(size)
    if size <= 0:
        raise InvalidStateError(
            f"a file of at most {size} bytes holds nothing; give a size such as 5GB"
        )
    return size
