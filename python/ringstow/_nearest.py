"""Which checkpoint a load reads, and where its copies are on the tiers of its run."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ringstow import _catalog, _native
from ringstow._arguments import StrPath, directory_to_read, to_read
from ringstow._config import Config, given, native_json
from ringstow._errors import (
    CorruptCheckpointError,
    FormatError,
    MissingFilesError,
    NoCheckpointError,
)

if TYPE_CHECKING:
    from ringstow._catalog_report import Step

_log = logging.getLogger("ringstow")


class Found(NamedTuple):
    """A checkpoint that a load reads."""

    path: str
    """Its directory or URL."""
    copies: list[str]
    """Where the tiers may have copies of it, the nearest first."""


def find(path: StrPath | Sequence[StrPath], config: Config | None) -> Found:
    """Return the checkpoint that a load is to read.

    Args:
        path: its path or URL; or a list of the tiers of a run, of which it is the newest step
            that has all of its files there, on one tier or on several.
        config: the settings; of a path, its ``tiers`` may have copies.

    Raises:
        NoCheckpointError: no tier has a committed step; or the path is None.
        InvalidStateError: the tiers have steps of two runs.
        MissingFilesError, CorruptCheckpointError, FormatError: steps were committed, and none has
            all of its files on the tiers.
        OSError: a tier can't be read.
    """
    if not isinstance(path, list | tuple):
        where = to_read(path)  # type: ignore[arg-type]
        return Found(where, copies_of(where, given(config).tiers))
    tiers = [directory_to_read(tier) for tier in path]
    _catalog.refuse_two_runs(tiers)
    return _newest(tiers, config)


def _newest(tiers: list[str], config: Config | None) -> Found:
    """Return the newest step of which the tiers have all files together."""
    listed = [step for tier in tiers for step in _catalog.steps(tier, config=config)]
    # A stable sort: of copies the nearest first. A damaged manifest tells no time.
    was_committed = [step for step in listed if step.created_unix_ms is not None]
    failure: Exception | None = None
    for _, group in itertools.groupby(sorted(was_committed, key=_newest_first), _newest_first):
        nearest, *others = group
        found = Found(nearest.path, [other.path for other in others])
        if nearest.status == "committed":
            return found
        try:
            _native.Checkpoint(found.path, native_json(config), copies=found.copies)
        except (MissingFilesError, CorruptCheckpointError, FormatError) as error:
            _log.warning("passing over %s, which cannot be loaded: %s", found.path, error)
            failure = failure or error
        else:
            return found
    if failure is not None:
        raise failure
    raise NoCheckpointError(
        f"there is no checkpoint in {' and '.join(tiers) or 'an empty list of tiers'}: no step was "
        "committed"
    )


def _newest_first(step: Step) -> tuple[int, int]:
    return -(step.step or 0), -(step.created_unix_ms or 0)


def copies_of(path: str, tiers: Sequence[StrPath]) -> list[str]:
    """Return where tiers may have copies of a checkpoint: under the same name."""
    name = os.path.basename(path)
    copies = [f"{directory_to_read(tier)}/{name}" for tier in tiers]
    return [copy for copy in copies if copy != path]


def with_tiers(config: Config | None, tiers: Sequence[str]) -> Config:
    """Return the settings for a load of a checkpoint of which these tiers have copies."""
    return dataclasses.replace(given(config), tiers=tuple(tiers), promotion_rate=0)
