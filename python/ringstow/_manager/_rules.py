"""The rules for which steps of a run stay: `Retention`, and the best step by a metric."""

from __future__ import annotations

import dataclasses
import errno
from typing import TYPE_CHECKING

from ringstow import _native
from ringstow._core._config import native_json
from ringstow._core._errors import InvalidStateError
from ringstow._core._policies import Retention, check_metric

if TYPE_CHECKING:
    from ringstow._core._config import Config
    from ringstow._core._policies import Mode, Tiers
    from ringstow._reports._checkpoint_reports import Step


def droppable(keep: Retention) -> tuple[str, ...]:
    """Return the parts that a save writes into files of their own."""
    return () if keep.slim_after is None else keep.drop


def stays(keep: Retention, step: int) -> bool:
    """Return whether a step stays for good by its number."""
    return keep.every is not None and step % keep.every == 0


def room(keep: Retention) -> str:
    """Return a hint on how many steps the disk must hold, and which rule to change."""
    if keep.keeps_all:
        return (
            "The manager removes no step, since it has no rule: one with keep=n keeps n steps, and "
            "needs room for n + 1"
        )
    last = keep.last or 1  # the newest step stays in any case
    others = {name: getattr(keep, name) for name in ("every", "every_time", "within", "best")}
    given = [f"{name}={value!r}" for name, value in others.items() if value is not None]
    besides = f", and for the steps that {' and '.join(given)} keeps" if given else ""
    return (
        "The manager removes old steps after the commit, so the disk needs room for keep + 1 "
        f"steps: with {'last' if given else 'keep'}={last} for {last + 1}{besides}"
        + (". Make the manager with a `keep` that keeps fewer" if given or last > 1 else "")
    )


def explain(keep: Retention, error: BaseException) -> None:
    """If a save failed on a full disk, add to its error how much room the rules need."""
    met = error if isinstance(error, OSError) else error.__cause__  # another rank's
    if not isinstance(met, OSError) or met.errno not in (errno.ENOSPC, errno.EDQUOT):
        return
    needed = room(keep)
    if needed in str(error):
        return
    if isinstance(error, OSError):
        error.strerror = f"{error.strerror}. {needed}"
    else:
        error.args = (f"{error}. {needed}", *error.args[1:])


def metric_of_best(keep: Retention, metric: str | None, mode: Mode | None) -> tuple[str, Mode]:
    """Return the metric and the mode of the best step: the given ones, or those of ``keep.best``.

    Raises:
        InvalidStateError: neither names a metric, or the mode is unknown.
        TypeError: the metric has no name.
    """
    if metric is None and mode is None and keep.best is not None:
        return keep.best[:2]
    if metric is None or mode is None:
        raise InvalidStateError(
            "which step is the best? Make the manager with "
            'keep=Retention(best=("loss", "min", 2)), or call best("loss", "min")'
        )
    check_metric(metric, mode)
    return metric, mode


def clearing(
    root: str,
    keep: Retention,
    tiers: tuple[str, ...],
    keep_here: int | None,
    config: Config | None,
) -> _native.Clearing:
    """Return the function that removes and slims the steps of a run."""
    slim = None if keep.slim_after is None else (keep.slim_after, list(keep.drop))
    eviction = None if keep_here is None else (tiers, keep_here)
    return _native.Clearing(root, keep.rules, slim, eviction, native_json(config))


def on_tiers(keep: Retention, tiers: Tiers) -> Retention:
    """Return the rules for further tiers: the same, except for the number of newest steps.

    Raises:
        InvalidStateError: ``tiers.keep`` would remove steps that must stay, or the last copies.
    """
    if tiers.keep is None:
        return Retention()
    if tiers.keep_here is not None and keep.last is not None:
        _native.check_covers(("Tiers.keep", tiers.keep), [("keep", keep.last)])
    return dataclasses.replace(keep, last=tiers.keep, slim_after=None)


def best_of(steps: list[Step], metric: str, mode: Mode) -> Step | None:
    """Return the step with the best value of a metric; of equal steps the newest.

    Steps without that metric, or whose value is not a number, do not count.

    Args:
        steps: the steps, newest first.
        metric: the metric's name.
        mode: ``"min"`` or ``"max"``.
    """
    at = _native.best_of([step.metrics.get(metric) for step in steps], mode)
    return None if at is None else steps[at]
