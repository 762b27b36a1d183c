"""The data of the page as plain values; nothing here reads or writes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringstow._reports._history import Entry
    from ringstow._reports._io_reports import Fallback


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor of the newest step."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One step."""

    name: str
    """The last part of its path."""
    step: int | None
    created_unix_ms: int | None
    """The time of the commit; None if unknown."""
    nbytes: int | None
    """Bytes of its files."""
    shared_bytes: int = 0
    """Bytes of files that other checkpoints share."""
    tensors: int | None = None
    ranks: int | None = None
    writer: str = ""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    """Names that `slim` has dropped."""
    problem: str | None = None
    """Why it can't be loaded."""
    damage: tuple[str, ...] | None = None
    """Damage that `verify` has found; None if it was not called."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """The differences between a step and the previous one, by checksums."""

    before: str
    after: str
    changed: tuple[str, ...] = ()
    """Names of the tensors whose bytes, dtype or shape differ."""
    changed_bytes: int = 0
    equal: int = 0
    """How many tensors do not differ."""
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    values: tuple[tuple[str, str, str], ...] = ()
    """Name, value before and value after of values that are not tensors."""
    problem: str | None = None
    """Why they could not be compared."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A directory of checkpoints."""

    directory: str
    written: str
    """When the page was written, in UTC."""
    version: str
    checkpoints: tuple[Checkpoint, ...]
    """Oldest first."""
    left_out: int
    """How many older checkpoints the page leaves out."""
    newest: str | None
    """The newest checkpoint that can be loaded."""
    tensors: tuple[Tensor, ...]
    """Its tensors."""
    values: tuple[tuple[str, str], ...]
    """Its values that are not tensors, by name, as text."""
    changes: tuple[Change, ...]
    """Oldest first."""
    measured: tuple[Checkpoint | Entry, ...]
    """Entries with metrics, ordered by step: checkpoints, and saves of removed steps."""
    saves: tuple[Entry, ...]
    """The recorded saves, in their order, also of removed steps."""
    failed_copies: tuple[tuple[str, str, str], ...]
    """Copies that failed and have not succeeded since: the step, the target, and the reason."""
    fallbacks: tuple[Fallback, ...]
    """The fallbacks of the last save."""
    unfinished: tuple[tuple[str, str], ...]
    """Copies that have begun and not ended: the step, and the target."""
