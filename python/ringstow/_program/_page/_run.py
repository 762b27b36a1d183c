"""What the page says of a run: values, and nothing that reads or writes."""

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
    """None if nothing says when it was committed."""
    nbytes: int | None
    """Bytes of its files."""
    shared_bytes: int = 0
    """Bytes of those that other checkpoints share."""
    tensors: int | None = None
    ranks: int | None = None
    writer: str = ""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    """What `slim` has dropped."""
    problem: str | None = None
    """Why it can't be loaded."""
    damage: tuple[str, ...] | None = None
    """What `verify` has found; None if it was not asked."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """What differs between a step and the one before, by checksums."""

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
    """Name, value before and value after of what is no tensor."""
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
    """How many older ones the page does not have."""
    newest: str | None
    """The newest that can be loaded."""
    tensors: tuple[Tensor, ...]
    """Its tensors."""
    values: tuple[tuple[str, str], ...]
    """Its values that are no tensors, by name, as text."""
    changes: tuple[Change, ...]
    """Oldest first."""
    measured: tuple[Checkpoint | Entry, ...]
    """What has metrics, ordered by step: the checkpoints, and saves whose step is gone."""
    saves: tuple[Entry, ...]
    """What is known of saves, in their order; those of steps that are gone, too."""
    failed_copies: tuple[tuple[str, str, str], ...]
    """Copies that failed and were not made since: of which step, where to, and why."""
    fallbacks: tuple[Fallback, ...]
    """What the last save did in a slower way."""
    unfinished: tuple[tuple[str, str], ...]
    """Copies that have begun and not ended: of which step, and where to."""
