"""The steps that a `CheckpointManager` finds on nodes that share no directory."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import TYPE_CHECKING

from ringstow._core._config import native_json
from ringstow._core._errors import Error, MissingFilesError, NoCheckpointError
from ringstow._manager._run_directory import Run, listed
from ringstow.distributed import _node_files, _nodes

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringstow._core._config import Config
    from ringstow._core._damage import OnCorrupt
    from ringstow._ranks._group import Group
    from ringstow._reports._checkpoint_reports import Step

_log = logging.getLogger("ringstow")


class NodeRun(Run):
    """The directories of a run on all nodes. All ranks call each method at the same time.

    All ranks get the same answers, except for the directory in each path.
    """

    def __init__(
        self, root: str, config: Config | None, group: Group, tiers: tuple[str, ...] = ()
    ) -> None:
        super().__init__(root, config, tiers)
        self._settings = native_json(config)
        self._group = group

    def steps(self) -> list[Step]:
        """List the steps that any node has, oldest first."""
        return self._merged(super().steps)

    def _merged(self, own: Callable[[], list[Step]]) -> list[Step]:
        """Return what all ranks list, oldest first; of each step, what the best informed says."""
        with self._group.turn.held():
            all_steps = self._group.together(own)
        found: dict[str, Step] = {}
        for step in (step for each in all_steps for step in each):
            name = os.path.basename(step.path)
            if name not in found or _is_better(step, found[name]):
                found[name] = dataclasses.replace(step, path=os.path.join(self.root, name))
        # Steps without a number, such as the remains of a killed save, come first.
        return sorted(found.values(), key=lambda one: (one.step is not None, one.order, one.path))

    def newest(self) -> Step | None:
        """Return the newest step whose files are all on some node, or on a tier."""
        return next(iter(self.candidates("raise")), None)

    def loadable(self) -> list[Step]:
        """Return the steps whose files are all on some node or on a tier, newest first."""

        def look() -> list[Step]:
            committed = [found for found in self._committed() if found.status == "committed"]
            try:
                return self._whole(committed, stops=False)
            except MissingFilesError:  # no step is whole
                return []

        return [found for found in self._with_copies(look) if found.status == "committed"]

    def candidates(self, on_corrupt: OnCorrupt) -> list[Step]:
        """Return the whole committed steps, newest first; without "previous" only the first.

        Includes the steps of the tiers. Files of a lost node that were not copied are lost.

        Raises:
            MissingFilesError: no step is whole; says what the newest lacks.
        """
        stops = on_corrupt == "raise"
        return self._with_copies(lambda: self._whole(self._committed(), stops=stops))

    def named(self, step: int) -> list[Step]:
        """Return the copies of the step of this number, the nodes' copy first.

        Raises:
            NoCheckpointError: neither a node nor a tier has it.
        """
        found = self._with_copies(self._committed)
        wanted = [one for one in found if one.step == step]
        if not wanted:
            numbers = {one.step for one in found if one.step is not None}
            there = ", ".join(map(str, sorted(numbers))) or "none yet"
            tiers = f" and {' and '.join(self.tiers)}" if self.tiers else ""
            raise NoCheckpointError(
                f"no node has step {step} in {self.root}{tiers}; the steps: {there}", path=self.root
            )
        return wanted

    def _committed(self) -> list[Step]:
        return self._merged(lambda: listed(self._found.committed()))[::-1]

    def _with_copies(self, here: Callable[[], list[Step]]) -> list[Step]:
        """Return the steps of the nodes and tiers, newest first; of copies the nearest."""
        if not self.tiers:
            return here()
        with self._group.turn.held():
            there = self._group.from_first(lambda: listed(self._found.there()))
        try:
            own = here()
        except (Error, FileNotFoundError) as error:
            # The cause of this rank's error is the other rank's error.
            cause = error.__cause__ if type(error) is Error else error
            is_refused = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
            if not there or is_refused:
                raise
            _log.warning("%s has nothing to restore: %s", self.root, error)
            own = []
        # The sort is stable: the nearest copy stays first.
        return sorted([*own, *there], key=lambda step: step.order, reverse=True)

    def _whole(self, steps: list[Step], *, stops: bool) -> list[Step]:
        """Return the whole steps, or with ``stops`` the first of them."""
        whole: list[Step] = []
        why: MissingFilesError | None = None
        self.passed_over = []
        for step in steps:
            try:
                with self._group.turn.held():
                    self._find(step)
            except MissingFilesError as error:
                if self._group.is_first:
                    _log.warning("passing over %s: %s", step.path, error)
                why = why or error
                if not whole:
                    self.passed_over.append(step)
            else:
                whole.append(step)
                if stops:
                    break
        if why is not None and not whole:
            raise why
        return whole

    def _find(self, step: Step) -> None:
        """Make sure that all files of a step are on some node, and that it is committed on all."""
        own = _node_files.look(step.path, self._settings)
        if own.problem is not None:
            _log.warning("%s cannot be read here: %s", step.path, own.problem)
        all_seen = self._group.gathered(own.seen)
        if any(all_seen):
            nodes = _nodes.meet(self._group, self.root)
            _node_files.find(self._group, nodes, step.path, own, all_seen)


def _is_better(one: Step, other: Step) -> bool:
    """Return whether a node has a later save of a step than another, or has it committed."""
    return _worth(one) > _worth(other)


def _worth(step: Step) -> tuple[tuple[int, ...], bool]:
    return step.order, step.status == "committed"
