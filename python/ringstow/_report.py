"""Reports of saves, loads and verifications, built from the native side's JSON.

The fields are those of the Rust structs of the same names (``src/pipeline/report.rs``).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import typing
from typing import TYPE_CHECKING, Any, Literal, Self

from ringstow.tree._damaged import DamagedTensor

if TYPE_CHECKING:
    import datetime


class _Report:
    """What the native side reports as JSON. Subclasses are dataclasses of the fields they take."""

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Build one from the native side's JSON text."""
        return cls._of(json.loads(text))

    @classmethod
    def _of(cls, values: dict[str, Any]) -> Self:
        kinds = _kinds(cls)  # type: ignore[arg-type]
        names = values.keys() & kinds.keys()
        return cls(**{name: _made(kinds[name], values[name]) for name in names})


@functools.cache
def _kinds(report: type[_Report]) -> dict[str, type[Any] | None]:
    """Return the class of the objects in each field, by its annotation; None if it has none."""
    # By these names: an import that failed elsewhere may have taken this module away.
    hints = typing.get_type_hints(report, globals())
    kinds: dict[str, type[Any] | None] = {}
    for field in dataclasses.fields(report):  # type: ignore[arg-type]
        parts = (hints[field.name], *typing.get_args(hints[field.name]))
        classes = [part for part in parts if isinstance(part, type)]
        objects = (part for part in classes if issubclass(part, _Report | DamagedTensor))
        kinds[field.name] = next(objects, None)
    return kinds


def _made(kind: type[Any] | None, value: Any) -> Any:
    """Return what a field holds. Objects without a class become tuples."""
    if isinstance(value, list):
        return tuple(_made(kind, item) for item in value)
    if not isinstance(value, dict):
        return value
    if kind is None:
        return tuple(value.values())
    return kind._of(value) if issubclass(kind, _Report) else kind(**value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fallback(_Report):
    """A step to a slower way of working, because the faster one was unavailable."""

    wanted: str
    """What was tried: ``"uring, fixed buffers, O_DIRECT"``."""
    got: str
    """What was used instead."""
    reason: str
    """Why it was unavailable."""
    remedy: str
    """What to do about it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Damage(_Report):
    """A damaged range of a file: a checksum chunk, or what is missing of the file."""

    file: str
    offset: int
    """Byte offset of the range in the file."""
    bytes: int
    """Bytes of the range."""
    what: str
    """What was compared: ``"crc32 of checksum chunk 7 (1048576 bytes)"``, ``"length in bytes"``."""
    expected: str
    """What was recorded when the checkpoint was written."""
    got: str
    """What was found."""
    tensors: tuple[str, ...]
    """Names of the tensors and objects with bytes in the range; none if it is only a header."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveSeconds(_Report):
    """Seconds of each part of a save. Copying, checksums and writing overlap."""

    plan: float
    """Laying out the shards."""
    prepare: float
    """Starting the engine (the first save only), opening and preallocating, trial write."""
    stage: float
    """From the first byte copied to the last: after plan + prepare + stage tensors may change."""
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
    """Copying from GPUs, as they timed it, summed over them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadSeconds(_Report):
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
    """Copying to GPUs, as they timed it, summed over them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Moved(_Report):
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
    """What was unavailable, why, and what to do about it."""
    device_bytes: int
    """Bytes of tensors that were on GPUs."""
    pinned: bool | None
    """Whether the staging memory was registered with CUDA; None if no GPU copied."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Copied(_Moved):
    """How bytes were moved between GPUs and the staging memory."""

    seconds: SaveSeconds | LoadSeconds

    @property
    def device_gb_per_s(self) -> float | None:
        """Gigabytes (10^9) per second of GPU copies while they ran; None if no GPU copied."""
        if not self.device_bytes:
            return None
        return self.device_bytes / 1e9 / max(self.seconds.device_copy, 1e-9)

    def __str__(self) -> str:
        """Return all fields, and the rate of GPU copies if there were any."""
        if not self.device_bytes:
            return repr(self)
        memory = "pinned" if self.pinned else "pageable"
        rate = f"{self.device_bytes / 1e9:.3g} GB at {self.device_gb_per_s:.3g} GB/s"
        return f"{self!r} (GPU: {rate}, {memory} memory)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveReport(_Copied):
    """What a save did."""

    generation: int
    """Number of earlier saves into this directory."""
    tensors: int
    """Tensors saved; those that share memory count once."""
    tensor_bytes: int
    """Bytes of tensor data."""
    file_bytes: int
    """Bytes of all shards, headers included."""
    files: int
    """Shards."""
    recycled_bytes: int
    """Bytes that were written over recycled files."""
    pool_bytes: int
    """Most bytes of staging memory that saves use."""
    seconds: SaveSeconds
    """Where the time went."""

    @property
    def gb_per_s(self) -> float:
        """Gigabytes (10^9) of files per second, from the call to the commit."""
        return self.file_bytes / 1e9 / max(self.seconds.total, 1e-9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadReport(_Copied):
    """What a load did."""

    tensors: int
    """Tensors loaded."""
    tensor_bytes: int
    """Bytes of their data."""
    read_bytes: int
    """Bytes read from disk for them."""
    verified: bool
    """Whether every checksum chunk was verified."""
    seconds: LoadSeconds
    """Where the time went."""
    missing: tuple[str, ...] = ()
    """Names that only the state dict has, in its order, after `load_into` with ``strict=False``."""
    unexpected: tuple[str, ...] = ()
    """Likewise, names that only the checkpoint has, in the order in which they were saved."""
    damaged: tuple[DamagedTensor, ...] = ()
    """What was left as it was by `load_into` with ``on_corrupt="skip"``."""

    def followed_by(self, other: LoadReport) -> LoadReport:
        """Return one report of this load followed by the other."""
        mine, others = dataclasses.asdict(self.seconds), dataclasses.asdict(other.seconds)
        return dataclasses.replace(
            self,
            tensors=self.tensors + other.tensors,
            tensor_bytes=self.tensor_bytes + other.tensor_bytes,
            read_bytes=self.read_bytes + other.read_bytes,
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


def _both(one: bool | None, other: bool | None) -> bool | None:
    """Return whether both are true, ignoring None."""
    known = [value for value in (one, other) if value is not None]
    return all(known) if known else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyReport(_Moved):
    """What a verification found."""

    files: int
    """Files checked."""
    blocks: int
    """Checksum chunks checked."""
    read_bytes: int
    """Bytes read."""
    damage: tuple[Damage, ...]
    """Every damaged range of a file; empty for an intact checkpoint."""
    problem: str | None
    """If files are missing: which, and where to look for them."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElementDiff(_Report):
    """How the elements of two tensors differ, bit by bit."""

    differing: int
    """Elements that differ."""
    elements: int
    """Elements in all."""
    max_abs: float | None
    """The largest absolute difference between two finite elements; None for dtypes that are neither
    floats nor integers, or if no two such elements differ."""
    not_finite: int
    """Elements that differ, one of which is infinite or not a number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorDiff(_Report):
    """A tensor or array whose bytes differ."""

    name: str
    elements: ElementDiff | None
    """How its elements differ; None unless `diff` was called with ``values=True``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorChange(_Report):
    """A tensor whose dtype or shape differs. Dtypes have safetensors' names: ``"BF16"``."""

    name: str
    dtype_a: str
    dtype_b: str
    shape_a: tuple[int, ...]
    shape_b: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueDiff(_Report):
    """A value that differs, or that only one checkpoint has."""

    name: str
    """Its path in the state dict, joined by dots; empty for the state itself."""
    a: str | None
    """The value in ``a`` as JSON, as in the manifest; None if only ``b`` has it. In words for a
    container, tensor, array or object, and for a key or an order of keys that differs:
    ``"a dict"``, ``"tied to w"``, ``"key 1 (int)"``."""
    b: str | None
    """Likewise in ``b``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiffReport(_Report):
    """How two checkpoints differ."""

    a: str
    """The one checkpoint's directory."""
    b: str
    """The other's."""
    only_in_a: tuple[str, ...]
    """Names of the tensors and arrays that only ``a`` has."""
    only_in_b: tuple[str, ...]
    """Likewise ``b``."""
    changed: tuple[TensorChange, ...]
    """Tensors whose dtype or shape differs."""
    differing: tuple[TensorDiff, ...]
    """Tensors and arrays whose bytes differ."""
    values: tuple[ValueDiff, ...]
    """Values that differ, or that only one checkpoint has; DCP's objects too, by their bytes."""
    values_compared: bool
    """Whether values were compared: not with another program's files, which have none."""
    equal_tensors: int
    """Number of tensors and arrays that are equal."""
    read_bytes: int
    """Bytes of tensors that were read, because checksums did not decide."""
    seconds: float
    """Seconds in total."""

    def __bool__(self) -> bool:
        """Refuse: ``if diff(a, b)`` could mean either answer.

        Raises:
            TypeError: always.
        """
        raise TypeError("a DiffReport is neither true nor false: ask for its is_equal")

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not (
            self.only_in_a or self.only_in_b or self.changed or self.differing or self.values
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointInfo(_Report):
    """What a checkpoint's manifest says about the save."""

    path: str
    """The checkpoint's directory."""
    kind: Literal["ringstow", "safetensors"]
    """``"safetensors"``: files of another program, without checksums; times and versions are 0."""
    version: int
    """Version of the format."""
    writer: str
    """Version of the library that wrote it."""
    created_unix_ms: int
    """When it was committed, in milliseconds since 1970-01-01 UTC."""
    generation: int
    """Number of earlier saves into this directory."""
    world_size: int
    """Ranks that wrote it."""
    block_bytes: int
    """Bytes that one checksum covers."""
    tensors: int
    """Tensors stored; those that share memory count once."""
    tensor_bytes: int
    """Bytes of their data."""
    file_bytes: int
    """Bytes of all shards, headers included."""
    files: tuple[tuple[str, int], ...]
    """Name and bytes of each shard."""
    stripes: tuple[str, ...]
    """Other directories that its files were striped over, as the saver named them."""
    part_of: tuple[int, int, str] | None
    """Rank, number of ranks, and id of the save, if this is a rank checkpoint."""
    step: int | None
    """The step of training that it was saved as; None if none was given."""

    @property
    def created(self) -> datetime.datetime:
        """When it was committed, in UTC."""
        return _utc(self.created_unix_ms)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step(_Report):
    """One of the steps of a run, as `steps` lists them."""

    path: str
    """The checkpoint's directory."""
    step: int | None
    """Its number; None if nothing in the directory counts as a step."""
    created_unix_ms: int | None
    """When it was committed, in milliseconds since 1970-01-01 UTC; None if it never was, or its
    manifest can't be read."""
    nbytes: int | None
    """Bytes of its files, headers included."""
    status: Literal["committed", "incomplete", "damaged"]
    """Whether it can be loaded, going by its manifest and the lengths of its files. `verify` and
    ``latest(verify=True)`` compare the bytes."""
    problem: str | None
    """Why it can't be loaded, if it can't."""

    @property
    def created(self) -> datetime.datetime | None:
        """When it was committed, in UTC."""
        return None if self.created_unix_ms is None else _utc(self.created_unix_ms)

    @classmethod
    def list_from_json(cls, text: str) -> list[Self]:
        """Build a list of them from the native side's JSON text."""
        found = json.loads(text)
        return [cls._of({**values, "nbytes": values["file_bytes"]}) for values in found]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retained(_Report):
    """What `retain` did, or would do."""

    counted: str | None
    """What counted as a step: ``"step-*"``. None if nothing did."""
    kept: tuple[str, ...]
    """Steps that were kept, oldest first."""
    removed: tuple[str, ...]
    """Steps that were removed, oldest first."""
    cleared: tuple[str, ...]
    """Directories of killed saves of earlier steps. Their files were removed, and the directory if
    it was then empty."""
    left: tuple[tuple[str, str], ...]
    """Directories that were left alone, and why: not a step, can't be loaded, a link, or the target
    of one; and empty ones that the system refused to remove."""
    removed_recycled: tuple[str, ...]
    """Recycled files of earlier calls that were removed, and their directory if it was then
    empty."""
    warnings: tuple[str, ...]
    """Warnings if nothing counted as a step, or several kinds of names looked like steps. Also
    logged."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Removed(_Report):
    """What `remove` did."""

    path: str
    """The checkpoint's directory."""
    recycled: int
    """How many of its files are kept for the next save to write over."""
    removed: tuple[str, ...]
    """Files that were removed."""
    left: tuple[tuple[str, str], ...]
    """Directories that stay although no file of the checkpoint is in them, and why: the system
    refused to remove them, or a save from elsewhere may be about to use them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Swept(_Report):
    """What `prune` did, or would do."""

    removed: tuple[str, ...]
    """Files that were removed, and directories that held nothing else."""
    renamed: tuple[str, ...]
    """Shards of a committed checkpoint that got their final name."""
    kept: tuple[str, ...]
    """Shards that became recycled files: none, `prune` makes none."""
    left: tuple[tuple[str, str], ...]
    """Directories that were left alone, and why."""


def _utc(unix_ms: int) -> datetime.datetime:
    import datetime

    return datetime.datetime.fromtimestamp(unix_ms / 1000, datetime.UTC)


@dataclasses.dataclass(frozen=True)
class Progress:
    """Progress of a save in bytes of its files: staged, written, and in total."""

    staged: int
    written: int
    total: int
