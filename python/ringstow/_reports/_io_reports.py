"""Reports of saves, loads and verifications, and how each report is built from JSON.

The fields equal those of the Rust structs of the same names (``src/pipeline/report.rs``).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import typing
from typing import Any, Literal, Self

from ringstow import _native
from ringstow._core import _formatting, _metrics
from ringstow._state.tree._damaged_tensors import DamagedTensor


class Report:
    """Base of reports from the native side's JSON. Subclasses are dataclasses of their fields."""

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Build a report from the native side's JSON text."""
        return cls._of(json.loads(text))

    @classmethod
    def _of(cls, values: dict[str, Any]) -> Self:
        kinds = _kinds(cls)  # type: ignore[arg-type]
        names = values.keys() & kinds.keys()
        return cls(**{name: _made(kinds[name], values[name]) for name in names})


@functools.cache
def _kinds(report: type[Report]) -> dict[str, type[Any] | None]:
    """Return the class of the objects in each field, by its annotation; None without a class.

    For metrics it is dict.
    """
    # Resolve names in the class's own module, which a failed import may have removed from
    # ``sys.modules``: a method still refers to it.
    hints = typing.get_type_hints(report, report.__init__.__globals__)
    kinds: dict[str, type[Any] | None] = {}
    for field in dataclasses.fields(report):  # type: ignore[arg-type]
        hint = hints[field.name]
        if typing.get_origin(hint) is dict:
            kinds[field.name] = dict
            continue
        parts = (hint, *typing.get_args(hint))
        classes = [part for part in parts if isinstance(part, type)]
        objects = (part for part in classes if issubclass(part, Report | DamagedTensor))
        kinds[field.name] = next(objects, None)
    return kinds


def _made(kind: type[Any] | None, value: Any) -> Any:
    """Return the value of a field. Objects without a class become tuples."""
    if kind is dict:
        return _metrics.from_json(value)
    if isinstance(value, list):
        return tuple(_made(kind, item) for item in value)
    if not isinstance(value, dict):
        return value
    if kind is None:
        return tuple(value.values())
    return kind._of(value) if issubclass(kind, Report) else kind(**value)


FallbackKind = Literal[
    "io_mode",
    "priority",
    "staging_memory",
    "pinned_memory",
    "preallocation",
    "base",
    "recycling",
    "stripes",
    "copy",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fallback(Report):
    """A fallback to a slower mode, because the faster one was unavailable."""

    kind: FallbackKind
    """The feature: the I/O mode, the priority of ringstow's threads, memory for all copies of a
    background save, memory pinned for GPUs, preallocated files, files of the base, recycled files,
    stripes on separate disks, or a file read from its copy on a tier."""
    wanted: str
    """The mode tried: ``"uring, fixed buffers, O_DIRECT"``."""
    got: str
    """The mode used instead."""
    reason: str
    """Why it was unavailable."""
    remedy: str
    """What to do about it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Damage(Report):
    """A damaged range of a file: a checksum chunk, or the missing part of the file."""

    file: str
    offset: int
    """Byte offset of the range in the file."""
    bytes: int
    """Bytes of the range."""
    what: str
    """The compared item: ``"crc32 of checksum chunk 7 (1048576 bytes)"``, ``"length in bytes"``."""
    expected: str
    """The value recorded when the checkpoint was written."""
    got: str
    """The value found."""
    tensors: tuple[str, ...]
    """Names of the tensors and objects with bytes in the range; empty for a header."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveSeconds(Report):
    """Seconds of each part of a save. Copying, checksums and writing overlap."""

    plan: float
    """Laying out the shards."""
    compare: float
    """Linking files of the base, and comparing the tensors with it."""
    prepare: float
    """Starting the engine (the first save only), opening and preallocating, trial write."""
    stage: float
    """From the first byte copied to the last: after compare + plan + prepare + stage tensors may
    change."""
    write: float
    """From the first byte copied to the last one written."""
    sync: float
    """Making the data durable."""
    commit: float
    """Manifest and renames, each made durable."""
    total: float
    """The whole time."""
    copy_cpu: float
    """Copying, added up over the threads."""
    checksum_cpu: float
    """Checksums, added up over the threads."""
    wait: float
    """Waiting for a free buffer, summed over the threads: high if the disk is the bottleneck."""
    device_copy: float
    """Copying from GPUs, timed by the GPUs and summed over them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadSeconds(Report):
    """Seconds of each part of a load. Reading and checksums overlap."""

    prepare: float
    """Opening files and the trial read."""
    read: float
    """From the first read to the last checksum chunk verified."""
    total: float
    """The whole time."""
    checksum_cpu: float
    """Checksums, added up over the threads."""
    device_copy: float
    """Copying to GPUs, timed by the GPUs and summed over them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Moved(Report):
    """How bytes were moved."""

    path: str
    """The checkpoint's directory."""
    engine: str
    """``"uring"`` or ``"portable"``."""
    direct: bool
    """Whether O_DIRECT was used."""
    fixed_buffers: int
    """Staging buffers registered with io_uring so far; each is registered when first used."""
    fallbacks: tuple[Fallback, ...]
    """The unavailable features, with reason and remedy."""
    device_bytes: int
    """Bytes of tensors that were on GPUs."""
    pinned: bool | None
    """Whether the staging memory was registered with CUDA; None if no GPU copied."""

    def _told(self, line: str, *others: str) -> str:
        """Return the report as text: one line, and a second one with notes."""
        notes = [text for text in others if text]
        if self.fallbacks:
            first = self.fallbacks[0]
            more = len(self.fallbacks) - 1
            notes.append(
                f"{first.got} in place of {first.wanted}: {first.reason}; {first.remedy}"
                + (f" ({more} more in .fallbacks)" if more else "")
            )
        return f"{line}\n  {'; '.join(notes)}" if notes else line


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Copied(_Moved):
    """How bytes were moved between GPUs and the staging memory."""

    step: int | None = None
    """The step that the checkpoint was saved with."""
    seconds: SaveSeconds | LoadSeconds

    @property
    def device_gb_per_s(self) -> float | None:
        """Gigabytes (10^9) per second of GPU copies while they ran; None if no GPU copied."""
        if not self.device_bytes:
            return None
        return self.device_bytes / 1e9 / max(self.seconds.device_copy, 1e-9)

    def _gpu(self) -> str:
        """Return the rate of GPU copies as a suffix of a line; empty if there were none."""
        if not self.device_bytes:
            return ""
        memory = "pinned" if self.pinned else "pageable"
        rate = f"{self.device_bytes / 1e9:.3g} GB at {self.device_gb_per_s:.3g} GB/s"
        return f" (GPU: {rate}, {memory} memory)"

    def _step(self) -> str:
        return "" if self.step is None else f"step {self.step}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveReport(_Copied):
    """The report of a save."""

    generation: int
    """Number of earlier saves into this directory; more on a file system that hosts share."""
    tensors: int
    """Tensors saved; tensors that share memory count once."""
    tensor_bytes: int
    """Bytes of tensor data."""
    file_bytes: int
    """Bytes of all shards, headers included."""
    files: int
    """Shards."""
    linked_bytes: int
    """Bytes of files that were linked from the base instead of being written; part of
    ``file_bytes``."""
    unchanged_bytes: int
    """Bytes of tensors that have not changed since the base, their files linked or written."""
    recycled_bytes: int
    """Bytes that were written over recycled files."""
    pool_bytes: int
    """Maximum bytes of staging memory that saves use."""
    seconds: SaveSeconds
    """Seconds of each part."""
    blocked_seconds: float | None = None
    """Seconds for which the save blocked training: the call, optimizer steps that waited for the
    copies, ``wait_staged``, and ``result`` in the thread of the call. If several threads waited,
    the longest wait. For `save`, the whole call. None if unknown: another process, or another
    library's thread, saved."""
    skipped: bool = False
    """Whether nothing was saved, since a manager with ``on_busy="skip"`` was still saving."""

    @classmethod
    def of_skipped(cls, path: str, step: int) -> Self:
        """Return the report of a skipped save."""
        numbers = {field.name: 0 for field in dataclasses.fields(cls) if field.type == "int"}
        seconds = SaveSeconds(**{field.name: 0.0 for field in dataclasses.fields(SaveSeconds)})
        return cls(
            path=path,
            step=step,
            engine="",
            direct=False,
            fallbacks=(),
            pinned=None,
            seconds=seconds,
            blocked_seconds=0.0,
            skipped=True,
            **numbers,
        )

    @property
    def written_bytes(self) -> int:
        """Bytes of files that were written."""
        return self.file_bytes - self.linked_bytes

    @property
    def gb_per_s(self) -> float:
        """Gigabytes (10^9) of written files per second, from the call to the commit."""
        return self.written_bytes / 1e9 / max(self.seconds.total, 1e-9)

    def __str__(self) -> str:
        """Return path, step, bytes, seconds, rate and mode, and fallbacks in a second line.

        `repr` has all fields.
        """
        if self.skipped:
            return f"{self.path}, {self._step()}: skipped, since the previous save was in progress"
        return self._told(_formatting.of_save(self, self._step()) + self._gpu())


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadReport(_Copied):
    """The report of a load."""

    tensors: int
    """Tensors loaded."""
    tensor_bytes: int
    """Bytes of their data."""
    read_bytes: int
    """Bytes of the files read for them."""
    verified: bool
    """Whether every checksum chunk was verified."""
    seconds: LoadSeconds
    """Seconds of each part."""
    cached_bytes: int = 0
    """Bytes of `read_bytes` that were in the page cache and copied from there."""
    received_bytes: int = 0
    """Bytes of `read_bytes` that another rank has read and sent."""
    missing: tuple[str, ...] = ()
    """Names that only the state dict has, in its order, after `load_into` with ``strict=False``."""
    unexpected: tuple[str, ...] = ()
    """Names that only the checkpoint has, as saved, after `load_into` with ``strict=False``."""
    damaged: tuple[DamagedTensor, ...] = ()
    """Names that `load_into` with ``on_corrupt="skip"`` left unchanged."""
    dropped: tuple[str, ...] = ()
    """Names of the checkpoint below which `slim` has dropped everything."""

    def followed_by(self, other: LoadReport) -> LoadReport:
        """Return one report of this load followed by the other.

        Engine and mode are those of the load that read more.
        """
        mine, others = dataclasses.asdict(self.seconds), dataclasses.asdict(other.seconds)
        most = max(self, other, key=lambda one: one.read_bytes)
        return dataclasses.replace(
            self,
            engine=most.engine,
            direct=most.direct,
            fixed_buffers=most.fixed_buffers,
            tensors=self.tensors + other.tensors,
            tensor_bytes=self.tensor_bytes + other.tensor_bytes,
            read_bytes=self.read_bytes + other.read_bytes,
            cached_bytes=self.cached_bytes + other.cached_bytes,
            received_bytes=self.received_bytes + other.received_bytes,
            device_bytes=self.device_bytes + other.device_bytes,
            pinned=_both(self.pinned, other.pinned),
            fallbacks=tuple(dict.fromkeys(self.fallbacks + other.fallbacks)),
            damaged=tuple(dict.fromkeys(self.damaged + other.damaged)),
            seconds=LoadSeconds(**{part: mine[part] + others[part] for part in mine}),
        )

    @property
    def gb_per_s(self) -> float:
        """Gigabytes (10^9) read per second."""
        return self.read_bytes / 1e9 / max(self.seconds.total, 1e-9)

    def __str__(self) -> str:
        """Return path, step, bytes, seconds, rate and mode, and notes in a second line.

        `repr` has all fields.
        """
        lacks = [
            f"{len(names):,} {what}"
            for what, names in (
                ("damaged and not loaded", self.damaged),
                ("missing in the checkpoint", self.missing),
                ("only in the checkpoint", self.unexpected),
            )
            if names
        ]
        unverified = "" if self.verified else "no checksum was compared"
        line = _formatting.of_load(self, self._step()) + self._gpu()
        return self._told(line, ", ".join(lacks), unverified)


def _both(one: bool | None, other: bool | None) -> bool | None:
    """Return whether both are true, ignoring None."""
    known = [value for value in (one, other) if value is not None]
    return all(known) if known else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteSeconds(Report):
    """Seconds of each part of a stream."""

    prepare: float
    """Starting the engine (the first time only), opening the file and the trial write."""
    wait: float
    """Waiting for a free buffer in calls of ``write``: high if the disk is the bottleneck."""
    publish: float
    """Writing the rest at the end, making everything durable, and the rename."""
    total: float
    """From `open_write` until the file was durable, the caller's own work included."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteReport(_Moved):
    """The report of `open_write`."""

    bytes: int
    """Bytes of the file."""
    crc32: int
    """CRC-32 of all its bytes, as ``zlib.crc32`` computes it."""
    checksums: bool
    """Whether its checksums were stored beside it."""
    seconds: WriteSeconds

    @property
    def gb_per_s(self) -> float:
        """Gigabytes (10^9) per second from `open_write` until the file was durable."""
        return self.bytes / 1e9 / self.seconds.total

    def __str__(self) -> str:
        """Return path, bytes, seconds, rate and mode; `repr` has all fields."""
        return self._told(_formatting.of_move(self, self.bytes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyReport(_Moved):
    """The report of `verify`."""

    files: int
    """Files checked."""
    elsewhere: int = 0
    """Files that are on other nodes, which were not checked."""
    blocks: int
    """Checksum chunks checked."""
    read_bytes: int
    """Bytes read."""
    damage: tuple[Damage, ...]
    """Every damaged range of a file; empty for an intact checkpoint."""
    problem: str | None
    """If files are missing: their names, and where to search for them."""
    tensors: int
    """Tensors, arrays and objects in the checkpoint."""
    seconds: float
    """Seconds in total."""

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged."""
        return not self.damage

    @property
    def damaged_tensors(self) -> tuple[str, ...]:
        """Names of the tensors, arrays and objects that can't be loaded, each once."""
        names = (name for damage in self.damage for name in damage.tensors)
        return tuple(dict.fromkeys(names))

    def __str__(self) -> str:
        """Return path, verdict, bytes and seconds; `repr` has all fields."""
        lost = len(self.damaged_tensors)
        verdict = "intact" if self.ok else f"DAMAGED, {lost:,} of {self.tensors:,} tensors"
        read = f"{_native.size(self.read_bytes)} read in {_native.duration(self.seconds)}"
        return self._told(f"{self.path}: {verdict}, {read}", self.problem or "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromotionReport(_Moved):
    """The report of a promotion."""

    path: str
    """The checkpoint's directory."""
    to: str
    """The URL or the directory of the copy."""
    step: int | None = None
    """The checkpoint's step; None if it has none."""
    created_unix_ms: int | None = None
    """When the checkpoint was committed; differs if a step is saved again."""
    files: int
    """Its files."""
    file_bytes: int
    """Their bytes."""
    sent_bytes: int
    """Bytes that this promotion sent; the others existed there."""
    was_there: bool
    """Whether the whole checkpoint existed there already."""
    missing: int = 0
    """Files that other nodes, which share no directory with this one, must still send. The last
    node commits; 0 if it is committed."""
    seconds: float
    """Seconds in total."""

    def __str__(self) -> str:
        """Return source, target, bytes and seconds; `repr` has all fields."""
        sent = f"{_native.size(self.sent_bytes)} of {_native.size(self.file_bytes)} sent"
        sent = "it was there" if self.was_there else sent
        waits = f"not committed: {self.missing} files of other nodes are missing"
        line = f"{self.path} to {self.to}: {sent} in {_native.duration(self.seconds)}"
        return self._told(line, waits if self.missing else "")


def bytes_of(report: SaveReport | LoadReport | PromotionReport) -> int:
    """Return the bytes written, read or sent."""
    match report:
        case SaveReport():
            return report.written_bytes
        case LoadReport():
            return report.read_bytes
    return report.sent_bytes


def seconds_of(report: SaveReport | LoadReport | PromotionReport) -> float:
    """Return the seconds that it took in total."""
    return report.seconds if isinstance(report, PromotionReport) else report.seconds.total


@dataclasses.dataclass(frozen=True)
class Progress:
    """Progress of a save in bytes of its files: staged, written, and in total."""

    staged: int
    written: int
    total: int
