"""The steps that a `CheckpointManager` finds on nodes that share no directory."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import TYPE_CHECKING

from ringstow._config import native_json
from ringstow._errors import MissingFilesError, NoCheckpointError
from ringstow._run import Run
from ringstow.distributed import _nodes, _whole

if TYPE_CHECKING:
    from ringstow._catalog_report import Step
    from ringstow._config import Config
    from ringstow._damage import OnCorrupt
    from ringstow._ranks._group import Group

_log = logging.getLogger("ringstow")


class NodeRun(Run):
    """The directories of a run on all nodes. All ranks call each method at the same time.

    All of them get the same answers, but for the directory in each path.
    """

    def __init__(self, root: str, config: Config | None, group: Group) -> None:
        super().__init__(root, config)
        self._settings = native_json(config)
        self._group = group

    def steps(self) -> list[Step]:
        """List the steps that any node has, oldest first."""
        with self._group.turn.held():
            all_steps = self._group.together(super().steps)
        found: dict[str, Step] = {}
        for step in (step for each in all_steps for step in each):
            name = os.path.basename(step.path)
            if name not in found or _is_better(step, found[name]):
                found[name] = dataclasses.replace(step, path=os.path.join(self.root, name))
        # Those without a number, such as what a killed save has left, come first.
        return sorted(found.values(), key=lambda one: (one.step is not None, one.order, one.path))

    def newest(self) -> Step | None:
        """Return the newest step of which all files are on some node."""
        return next(iter(self._whole(self._committed(), stops=True)), None)

    def loadable(self) -> list[Step]:
        """Return the steps of which all files are on some node, newest first."""
        committed = [found for found in self._committed() if found.status == "committed"]
        try:
            return self._whole(committed, stops=False)
        except MissingFilesError:  # none is
            return []

    def candidates(self, on_corrupt: OnCorrupt) -> list[Step]:
        """Return the committed steps that are whole, newest first; without "previous" one of them.

        A node that is lost takes what was not yet copied to another one with it.

        Raises:
            MissingFilesError: none is whole: what the newest lacks.
        """
        return self._whole(self._committed(), stops=on_corrupt == "raise")

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

    def _whole(self, steps: list[Step], *, stops: bool) -> list[Step]:
        """Return the steps that are whole, or with ``stops`` the first of them."""
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
        own = _whole.look(step.path, self._settings)
        if own.problem is not None:
            _log.warning("%s cannot be read here: %s", step.path, own.problem)
        all_seen = self._group.gathered(own.seen)
        if any(all_seen):
            nodes = _nodes.meet(self._group, self.root)
            _whole.find(self._group, nodes, step.path, own, all_seen)


def _is_better(one: Step, other: Step) -> bool:
    """Whether a node knows more of a step than another: a later save of it, or its commit."""
    return _worth(one) > _worth(other)


def _worth(step: Step) -> tuple[tuple[int, ...], bool]:
    return step.order, step.status == "committed"
