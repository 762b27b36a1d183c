"""The steps that a `CheckpointManager` finds on nodes that share no directory."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import TYPE_CHECKING

from ringstow._config import native_json
from ringstow._errors import Error, MissingFilesError, NoCheckpointError
from ringstow._run import Run
from ringstow.distributed import _nodes, _whole

if TYPE_CHECKING:
    from ringstow._catalog_report import Step
    from ringstow._config import Config
    from ringstow._damage import OnCorrupt
    from ringstow.distributed._group import Group

_log = logging.getLogger("ringstow")


class NodeRun(Run):
    """The directories of a run on all nodes. All ranks call each method at the same time."""

    def __init__(self, root: str, config: Config | None, group: Group) -> None:
        super().__init__(root, config)
        self._settings = native_json(config)
        self._group = group

    def steps(self) -> list[Step]:
        """List the steps that any node has, oldest first; of several, this node's or the newest."""
        own: list[Step] = []
        error: BaseException | None = None
        try:
            own = super().steps()
        except BaseException as caught:  # the other ranks must not wait for this one
            error = caught
        found: dict[str, Step] = {}
        for step in (*own, *(step for each in self._group.agreed(error, own) for step in each)):
            name = os.path.basename(step.path)
            known = found.get(name)
            if known is None or (known.created_unix_ms or 0) < (step.created_unix_ms or 0):
                found[name] = dataclasses.replace(step, path=os.path.join(self.root, name))
        # Those without a number, such as what a killed save has left, come first.
        return sorted(found.values(), key=lambda one: -1 if one.step is None else one.step)

    def newest(self) -> Step | None:
        """Return the newest step of which all files are on some node."""
        return next(iter(self._whole(self._committed())), None)

    def candidates(self, on_corrupt: OnCorrupt) -> list[Step]:
        """Return the committed steps, newest first, from the first one that is whole.

        A node that is lost takes what was not yet copied to another one with it.

        Raises:
            MissingFilesError: none is whole: what the newest lacks.
        """
        return self._whole(self._committed())

    def named(self, step: int) -> list[Step]:
        """Return the step of this number, in a list.

        Raises:
            NoCheckpointError: no node has it.
        """
        committed = self._committed()
        wanted = [found for found in committed if found.step == step]
        if not wanted:
            there = ", ".join(str(found.step) for found in reversed(committed)) or "none yet"
            raise NoCheckpointError(
                f"no node has step {step} in {self.root}; the steps: {there}", path=self.root
            )
        return wanted[:1]

    def _whole(self, steps: list[Step]) -> list[Step]:
        why: MissingFilesError | None = None
        for number, step in enumerate(steps):
            try:
                self._find(step)
            except MissingFilesError as error:
                if self._group.is_first:
                    _log.warning("passing over %s: %s", step.path, error)
                why = why or error
            else:
                return steps[number:]
        if why is not None:
            raise why
        return []

    def _find(self, step: Step) -> None:
        """Make sure that all files of a step are on some node, and that it is committed on all."""
        seen: _whole.Seen | None = None
        try:
            seen = _whole.seen(step.path, self._settings)
        except (Error, OSError) as error:
            _log.warning("%s cannot be read here: %s", step.path, error)
        all_seen = self._group.gathered(seen)
        if any(all_seen):
            nodes = _nodes.meet(self._group, self.root)
            _whole.find(self._group, nodes, step.path, self._settings, all_seen)
