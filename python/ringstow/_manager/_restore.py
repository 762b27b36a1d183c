"""The search of `CheckpointManager.restore` for the first intact step."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import os
from typing import TYPE_CHECKING, Any

from ringstow import _native
from ringstow._core._damage import OnCorrupt
from ringstow._core._errors import MissingFilesError, NoCheckpointError
from ringstow._core._waiting import Again
from ringstow._manager._one_process import Side

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ringstow._reports._checkpoint_reports import Step
    from ringstow._state.tree._rename import Given

_log = logging.getLogger("ringstow")


@dataclasses.dataclass(frozen=True)
class Restored:
    """The result of `CheckpointManager.restore`."""

    step: int
    """The step's number."""
    path: str
    """The checkpoint's directory."""
    metrics: Mapping[str, float]
    """The metrics that were saved with it."""
    state: dict[Any, Any] = dataclasses.field(repr=False)
    """The state dict; the caller's own if it was passed as ``into``."""
    dropped: tuple[str, ...] = ()
    """Names below which `ringstow.slim` has dropped everything: the state lacks them."""
    missing: tuple[str, ...] = ()
    """With ``strict=False``: names that only ``into`` has; their values are unchanged."""
    unexpected: tuple[str, ...] = ()
    """With ``strict=False``: names that only the checkpoint has. On ranks, both are this rank's."""


class _Gone(Exception):
    """A listed step was removed before it was loaded."""


def newest_intact(
    side: Side[Any],
    look: Callable[[], list[Step]],
    into: dict[Any, Any] | None,
    on_corrupt: OnCorrupt,
    *,
    strict: bool,
    rename: Given | None = None,
) -> tuple[list[Step], Restored | None]:
    """Load the first intact one of the steps that ``look`` finds on the first rank.

    Another process may save and remove meanwhile: if a listed step is gone, it lists them again.

    Args:
        side: the process or the ranks that load.
        look: lists the steps, newest first; of one step, the nearest copy first.
        into: a state dict to fill.
        on_corrupt: ``"previous"`` skips damaged steps until the first intact one.
        strict: whether ``into`` and the step must have the same keys.
        rename: maps the step's names to those of ``into``.

    Returns:
        The steps that were found, and the one that was loaded; None if none was found.

    Raises:
        Exception: any error of ``look``; any failure other than damage; the first step's error, if
            no step is intact.
    """
    again = Again()
    while True:
        found = side.first(look)
        try:
            return found, _first_intact(side, found, into, on_corrupt, strict=strict, rename=rename)
        except _Gone as gone:
            error = gone.__cause__
            assert error is not None
            if not side.from_first(again.may_try):
                raise error from None
            _log.debug("looking again for a step to restore: %s", error)


def _first_intact(
    side: Side[Any],
    candidates: list[Step],
    into: dict[Any, Any] | None,
    on_corrupt: OnCorrupt,
    *,
    strict: bool,
    rename: Given | None,
) -> Restored | None:
    """Load the first of these steps, or with ``"previous"`` the first intact one.

    Of the copies of one step, it always loads the first intact one.
    """
    damage: BaseException | None = None
    for number, found in enumerate(candidates, 1):
        copies = itertools.takewhile(functools.partial(_is_copy, found), candidates[number:])
        tiers = [os.path.dirname(copy.path) for copy in copies]
        attempt = side.load(found, into, tiers, strict=strict, rename=rename)
        if attempt.error is None:
            assert attempt.state is not None
            assert found.step is not None
            return Restored(
                found.step,
                found.path,
                found.metrics,
                attempt.state,
                attempt.dropped,
                attempt.missing,
                attempt.unexpected,
            )
        is_missing = isinstance(attempt.error, MissingFilesError | NoCheckpointError)
        met = found.path, bool(tiers), attempt.is_damage, is_missing, on_corrupt == "previous"
        verdict = side.from_first(functools.partial(_native.after_failure, *met))
        if verdict == "again":
            raise _Gone from attempt.error
        if verdict == "raise":
            if attempt.is_damage:
                _advise(attempt.error, candidates[: number - 1], found, candidates[number:])
            raise attempt.error
        _log.warning("passing over %s, which cannot be loaded: %s", found.path, attempt.error)
        damage = damage or attempt.error
    if damage is not None:
        raise damage
    return None


def passed_over(candidates: list[Step], restored: Restored | None) -> list[str]:
    """Return the paths of the candidates that could not be loaded."""
    paths = [found.path for found in candidates]
    return paths if restored is None else paths[: paths.index(restored.path)]


def _advise(error: BaseException, copies: list[Step], step: Step, others: list[Step]) -> None:
    """Add to a step's error the copies that failed, too, and how to load an earlier step."""
    if copies:
        error.add_note(
            f"its copies cannot be loaded, either: {', '.join(one.path for one in copies)}"
        )
    if any(other.step != step.step for other in others):  # otherwise the caller named the step
        error.add_note(
            'restore(on_corrupt="previous") loads the newest earlier step that is intact'
        )


def _is_copy(one: Step, other: Step) -> bool:
    """Return whether two steps are copies of one save: a run may save a number again."""
    return one.order == other.order
