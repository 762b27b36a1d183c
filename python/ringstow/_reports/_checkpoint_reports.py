"""Reports of steps, removals, comparisons and open checkpoints.

The fields equal those of the Rust structs of the same names (``src/store/diff``, ``catalog`` and
``cleanup``).
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Literal, Self

from ringstow._reports._io_reports import Report

if TYPE_CHECKING:
    import datetime


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElementDiff(Report):
    """How the elements of two tensors differ, bit by bit."""

    differing: int
    """Elements that differ."""
    elements: int
    """Elements in total."""
    max_abs: float | None
    """The largest absolute difference between two finite elements; None for dtypes that are neither
    floats nor integers, or if no two such elements differ."""
    not_finite: int
    """Differing elements of which at least one is infinite or NaN."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorDiff(Report):
    """A tensor or array whose bytes differ."""

    name: str
    elements: ElementDiff | None
    """How its elements differ; None unless `diff` was called with ``values=True``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorChange(Report):
    """A tensor whose dtype or shape differs. Dtypes have safetensors' names: ``"BF16"``."""

    name: str
    dtype_a: str
    dtype_b: str
    shape_a: tuple[int, ...]
    shape_b: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueDiff(Report):
    """A value that differs, or that only one checkpoint has."""

    name: str
    """The path in the state dict, joined by dots; empty for the state itself."""
    a: str | None
    """The value in ``a`` as JSON, as in the manifest; None if only ``b`` has it. Text for a
    container, tensor, array or object, and for a differing key or order of keys: ``"a dict"``,
    ``"tied to w"``, ``"key 1 (int)"``."""
    b: str | None
    """The value in ``b``, in the same form; None if only ``a`` has it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiffReport(Report):
    """How two checkpoints differ."""

    a: str
    """The first checkpoint's directory."""
    b: str
    """The second checkpoint's directory."""
    step_a: int | None = None
    """The step that ``a`` was saved with."""
    step_b: int | None = None
    """The step that ``b`` was saved with."""
    metrics_a: dict[str, float] = dataclasses.field(default_factory=dict, hash=False)
    """The metrics that ``a`` was saved with."""
    metrics_b: dict[str, float] = dataclasses.field(default_factory=dict, hash=False)
    """The metrics that ``b`` was saved with."""
    dropped_a: tuple[str, ...]
    """Names below which `slim` has dropped everything from ``a``."""
    dropped_b: tuple[str, ...]
    """Names below which `slim` has dropped everything from ``b``."""
    only_in_a: tuple[str, ...]
    """Names of the tensors and arrays that only ``a`` has."""
    only_in_b: tuple[str, ...]
    """Names of the tensors and arrays that only ``b`` has."""
    changed: tuple[TensorChange, ...]
    """Tensors whose dtype or shape differs."""
    differing: tuple[TensorDiff, ...]
    """Tensors and arrays whose bytes differ."""
    values: tuple[ValueDiff, ...]
    """Values that differ, or that only one checkpoint has; also DCP's objects, by their bytes."""
    values_compared: bool
    """Whether values were compared; False for another program's files, which have none."""
    equal_tensors: int
    """Number of tensors and arrays that are equal."""
    read_bytes: int
    """Bytes read: of tensors whose checksums did not decide, and of objects that differ."""
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
        """Whether no tensor and no value differs. Steps and metrics do not count."""
        return not (
            self.only_in_a or self.only_in_b or self.changed or self.differing or self.values
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointInfo(Report):
    """The description of a save in a checkpoint's manifest."""

    path: str
    """The checkpoint's directory."""
    kind: str
    """``"ringstow"``; or the other program that wrote it (times and versions are then 0):
    ``"safetensors"``, ``"torch"``, ``"dcp"``, ``"lightning"``, ``"trainer"``, ``"accelerate"``,
    ``"deepspeed"``, ``"megatron"``, ``"hf"``."""
    version: int
    """Version of the format."""
    writer: str
    """Version of the ringstow that wrote it."""
    created_unix_ms: int
    """When it was committed, in milliseconds since 1970-01-01 UTC."""
    generation: int
    """Number of earlier saves into this directory; larger on a file system that hosts share."""
    world_size: int
    """Ranks that wrote it."""
    block_bytes: int
    """Bytes that one checksum covers."""
    tensors: int
    """Tensors stored; tensors that share memory count once."""
    tensor_bytes: int
    """Bytes of the tensors' data."""
    file_bytes: int
    """Bytes of all shards, headers included."""
    shared_bytes: int = 0
    """Bytes of shards that have another hard link, most likely in another checkpoint."""
    files: tuple[tuple[str, int], ...]
    """Name and bytes of each shard."""
    stripes: tuple[str, ...]
    """Other directories that its files were striped over, as the save named them."""
    part_of: tuple[int, int, str] | None
    """Rank, number of ranks, and id of the save, if this is a rank checkpoint."""
    step: int | None
    """The training step of the save; None if none was given."""
    metrics: dict[str, float] = dataclasses.field(hash=False)
    """The metrics that it was saved with."""
    dropped: tuple[str, ...]
    """Names below which `slim` has dropped everything."""

    @property
    def created(self) -> datetime.datetime:
        """When it was committed, in UTC."""
        return _utc(self.created_unix_ms)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step(Report):
    """One of the steps of a run, as `steps` lists them.

    It is an ``os.PathLike``: `load`, `verify` and other functions take it in place of its path.
    """

    path: str
    """The checkpoint's directory."""
    step: int | None
    """The step's number; None if nothing in the directory counts as a step."""
    metrics: dict[str, float] = dataclasses.field(hash=False)
    """The metrics that it was saved with. For rank checkpoints, the lowest rank's."""
    dropped: tuple[str, ...]
    """Names below which `slim` has dropped everything."""
    created_unix_ms: int | None
    """When it was committed, in milliseconds since 1970-01-01 UTC; None if it never was, or its
    manifest can't be read."""
    saved_as: str | None = None
    """The name under which it was saved, if it has another now, as a copy or after a rename."""
    order: tuple[int, int, int, int] = (0, 0, 0, 0)
    """A greater value is newer: how often the run had gone back to an earlier step, the step, the
    number of the save in its run, and the time."""
    nbytes: int | None
    """Bytes of its files, headers included."""
    status: Literal["committed", "incomplete", "damaged"]
    """Whether it can be loaded, judging by its manifest and the lengths of its files. `verify` and
    ``latest(verify=True)`` compare the bytes."""
    problem: str | None
    """Why it can't be loaded; None if it can."""

    def __fspath__(self) -> str:
        return self.path

    @property
    def created(self) -> datetime.datetime | None:
        """When it was committed, in UTC."""
        return None if self.created_unix_ms is None else _utc(self.created_unix_ms)

    @classmethod
    def of_foreign(cls, path: str, step: int | None) -> Self:
        """Return the step for a checkpoint that another program has left."""
        return cls(
            path=path,
            step=step,
            metrics={},
            dropped=(),
            created_unix_ms=None,
            order=(0, step or 0, 0, 0),
            nbytes=None,
            status="committed",
            problem=None,
        )

    @classmethod
    def list_from_json(cls, text: str) -> list[Self]:
        """Build a list of steps from the native side's JSON text."""
        found = json.loads(text)
        return [cls._of({**values, "nbytes": values["file_bytes"]}) for values in found]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Left(Report):
    """A directory or file that `retain`, `remove` or `prune` did not touch."""

    path: str
    """The directory, or the file."""
    reason: str
    """Why."""
    failed: bool
    """Whether the system failed or refused; False if it was left on purpose."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retained(Report):
    """The report of `retain`."""

    counted: str | None
    """The pattern of names that counted as steps: ``"step-*"``. None if nothing did."""
    kept: tuple[str, ...]
    """Steps that were kept, oldest first."""
    reasons: tuple[str, ...]
    """Why each of ``kept`` stays, in the same order: ``"it is among the 3 newest"``."""
    removed: tuple[str, ...]
    """Steps that were removed, oldest first."""
    cleared: tuple[str, ...]
    """Directories of killed saves of earlier steps. Their files were removed, and the directory if
    it was then empty."""
    left: tuple[Left, ...]
    """Directories that were left alone, and why: not a step, can't be loaded, a link, or a link's
    target; and paths that the system refused to remove, with ``failed``."""
    removed_recycled: tuple[str, ...]
    """Recycled files of earlier calls that were removed, and their directory if it was then
    empty."""
    warnings: tuple[str, ...]
    """Warnings if nothing counted as a step, or several kinds of names looked like steps. Also
    logged."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Removed(Report):
    """The report of `remove`."""

    path: str
    """The checkpoint's directory."""
    recycled: int
    """How many of its files are kept for the next save to overwrite."""
    removed: tuple[str, ...]
    """Files that were removed."""
    left: tuple[Left, ...]
    """Directories that stay without files of the checkpoint, and why: the system refused to remove
    them, or a save from another host may be about to use them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slimmed(Report):
    """The report of `slim`."""

    path: str
    """The checkpoint's directory."""
    names: tuple[str, ...]
    """Names that it dropped, without names that were dropped before."""
    tensors: int
    """Tensors, arrays and objects that it dropped."""
    file_bytes: int
    """Bytes of the files that it removed."""
    removed: tuple[str, ...]
    """Files that it removed."""
    left: tuple[Left, ...]
    """Files that could not be removed, and why: `prune` tries again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Swept(Report):
    """The report of `prune`."""

    removed: tuple[str, ...]
    """Files that were removed, and directories that held nothing else."""
    renamed: tuple[str, ...]
    """Shards of a committed checkpoint that were renamed to their final name."""
    kept: tuple[str, ...]
    """Shards that became recycled files; always empty, since `prune` makes none."""
    left: tuple[Left, ...]
    """Directories that were left alone, and why."""


def _utc(unix_ms: int) -> datetime.datetime:
    import datetime

    try:
        return datetime.datetime.fromtimestamp(unix_ms / 1000, datetime.UTC)
    except (ValueError, OverflowError, OSError):  # a clock beyond the year 9999
        return datetime.datetime.max.replace(tzinfo=datetime.UTC)
