"""A manager that goes back to an earlier step: which steps are newer, and their removal."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ringstow import _native
from ringstow._config import native_json

if TYPE_CHECKING:
    from ringstow._catalog_report import Step
    from ringstow._config import Config

_log = logging.getLogger("ringstow")


def newer(steps: Iterable[Step], step: Step) -> list[Step]:
    """Return those of these steps, newest first, that are newer than one, and not copies of it."""
    return [one for one in steps if one.order > step.order and one.step != step.step]


def tell(root: str, step: Step, steps: list[Step]) -> None:
    """Warn that a step was restored although these are newer."""
    numbers = ", ".join(dict.fromkeys(str(one.step) for one in steps))
    _log.warning(
        "step %s is restored, and %s has newer ones: %s. Until the next save, a restart goes on "
        "from step %s; restore(%s, drop_newer=True) removes them",
        step.step,
        root,
        numbers,
        steps[0].step,
        step.step,
    )


def drop(root: str, step: Step, steps: list[Step], config: Config | None) -> None:
    """Remove these steps, but for those that are kept.

    Raises:
        Exception: the first failure, once the others are removed.
    """
    kept = _native.pinned(root)
    failure: Exception | None = None
    for one in steps:
        if one.path.rpartition("/")[2] in kept:
            continue
        try:
            reason = f"the run goes back to step {step.step}"
            _native.remove_step(one.path, reason, native_json(config))
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
