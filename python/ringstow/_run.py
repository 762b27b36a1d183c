"""The steps that a `CheckpointManager` finds in its directory, and where it saves the next one."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from ringstow import _catalog
from ringstow._damage import OnCorrupt, is_damage
from ringstow._errors import InvalidStateError, NoCheckpointError
from ringstow._open import open as open_checkpoint

if TYPE_CHECKING:
    from ringstow._catalog_report import Step
    from ringstow._config import Config

_log = logging.getLogger("ringstow")


class Run:
    """The directory of a run, as the rank sees it that looks."""

    def __init__(self, root: str, config: Config | None) -> None:
        self.root = root
        self._config = config
        self._paths: dict[int, str] | None = None

    def steps(self) -> list[Step]:
        """List the steps, oldest first."""
        return _catalog.steps(self.root, config=self._config)

    def newest(self) -> Step | None:
        """Return the newest step that can be loaded; log those that are newer and cannot."""
        for found in self._committed():
            if found.status == "committed":
                return found
            _log.warning("passing over %s, which cannot be loaded: %s", found.path, found.problem)
        self._refuse_other_checkpoints()
        return None

    def candidates(self, on_corrupt: OnCorrupt) -> list[Step]:
        """Return the steps that were committed, newest first, damaged ones too.

        With ``"previous"`` and a manifest on bad sectors, only the newest one that is intact.
        """
        try:
            found = self._committed()
        except OSError as error:
            if on_corrupt == "raise" or not is_damage(error):
                raise
            return self._intact(error)
        if not found:
            self._refuse_other_checkpoints()
        return found

    def _intact(self, error: OSError) -> list[Step]:
        """Return the newest step whose every byte is intact, in a list.

        Raises:
            OSError: there is none: the error of the newest.
        """
        path = _catalog.latest(self.root, verify=True, config=self._config)  # logs what it passes
        step = None if path is None else step_at(path, self._config)
        if step is None or step.step is None:
            raise error
        return [step]

    def named(self, step: int) -> list[Step]:
        """Return the step of this number, in a list.

        Raises:
            NoCheckpointError: it was not committed; names those that were.
        """
        steps = self._committed()
        wanted = [found for found in steps if found.step == step]
        if not wanted:
            there = ", ".join(str(found.step) for found in reversed(steps)) or "none yet"
            raise NoCheckpointError(
                f"{self.root} has no step {step}; its steps: {there}", path=self.root
            )
        return wanted[:1]

    def path_of(self, step: int) -> str:
        """Return where to save a step: in place of the step of that number, if there was one."""
        if self._paths is None:
            try:
                self._paths = {s.step: s.path for s in self.steps() if s.step is not None}
            except Exception as error:  # it says nothing about the save, which may go well
                _log.warning("cannot list the steps in %s: %s", self.root, error)
        return (self._paths or {}).get(step) or os.path.join(self.root, f"step-{step:08}")

    def _committed(self) -> list[Step]:
        def is_one(found: Step) -> bool:
            was_killed = found.status == "incomplete" and found.created_unix_ms is None
            return found.step is not None and not was_killed

        steps = self.steps()
        for found in reversed(steps):
            if is_one(found):
                break
            if _has_lost_manifest(found.path):
                _log.warning(
                    "passing over %s, whose manifest is gone: only a committed checkpoint has "
                    "files of these names, so somebody has removed it, or is still copying",
                    found.path,
                )
        return [found for found in reversed(steps) if is_one(found)]

    def _refuse_other_checkpoints(self) -> None:
        """Raise why nothing can be loaded, unless nothing was committed yet."""
        path = _catalog.latest(self.root, config=self._config)
        if path is not None:
            raise InvalidStateError(
                f"{path} is a checkpoint, but nothing in {self.root} counts as a step: training "
                "must not begin anew beside it. Load it with ringstow.load, or give the manager "
                "another directory"
            )


def step_at(path: str, config: Config | None) -> Step:
    """Return the committed checkpoint at a path.

    Raises:
        Error, OSError: it cannot be opened.
    """
    from ringstow._catalog_report import Step

    with open_checkpoint(path, config=config) as checkpoint:
        info = checkpoint.info
    return Step(
        path=path,
        step=info.step,
        metrics=info.metrics,
        dropped=info.dropped,
        created_unix_ms=info.created_unix_ms,
        nbytes=None,
        status="committed",
        problem=None,
    )


def _has_lost_manifest(path: str) -> bool:
    """Return whether files of a commit are in a directory, which no removal has begun to clear."""
    try:
        names = os.listdir(path)
    except OSError:
        return False
    marks = ("manifest.json", "manifest.json.retired")
    has_shards = any(name.endswith(".safetensors") for name in names)
    return has_shards and not any(mark in names for mark in marks)
