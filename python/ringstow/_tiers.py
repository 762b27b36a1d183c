"""The places that a `CheckpointManager` copies its steps to, and restores them from."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ringstow import _catalog, _native, _rules, _run
from ringstow._config import native_json
from ringstow._copier import Stays
from ringstow._errors import Error, InvalidStateError, NoCheckpointError
from ringstow._nearest import (
    newest_first,
    warn_if_missing,
    warn_of_lost_manifests,
    was_committed,
)
from ringstow._promoter import Promoter

if TYPE_CHECKING:
    from ringstow._catalog_report import Step
    from ringstow._config import Config
    from ringstow._damage import OnCorrupt
    from ringstow._policies import Retention, Tiers
    from ringstow._run import Run

_log = logging.getLogger("ringstow")


class Steps:
    """The steps of a run on all of its tiers."""

    def __init__(
        self,
        run: Run,
        tiers: tuple[str, ...],
        config: Config | None,
        first: Callable[[Callable[[], list[Step]]], list[Step]] = lambda look: look(),
    ) -> None:
        """Name them; ``first`` has one rank look into the tiers for all, if all ranks call."""
        self._run = run
        self._tiers = tiers
        self._config = config
        self._first = first

    def candidates(self, on_corrupt: OnCorrupt) -> list[Step]:
        """Return the committed steps, newest first, and of one step the nearest copy first.

        Raises:
            OSError: a tier does not answer. It may have the newest step.
        """
        if not self._tiers:
            return self._run.candidates(on_corrupt)
        return self._with_copies(lambda: self._run.candidates(on_corrupt), lambda _: True)

    def loadable(self) -> list[Step]:
        """Return the steps that can be loaded, newest first, and of one the nearest copy first.

        Raises:
            OSError: a tier does not answer.
        """
        if not self._tiers:
            return self._run.loadable()
        found = self._with_copies(self._run.loadable, lambda _: True)
        return [step for step in found if step.status == "committed"]

    def newest(self) -> Step | None:
        """Return the newest step that can be loaded; None if nothing was committed.

        Raises:
            Error: steps were committed, and none can be loaded.
            OSError: a tier does not answer.
        """
        if not self._tiers:
            return self._run.newest()
        found = self.candidates("raise")
        whole = _run.first_whole(found)
        if whole is None and found:
            _run.step_at(found[0].path, self._config)  # raises what is wrong with it
        return whole

    def named(self, step: int) -> list[Step]:
        """Return the copies of the step of this number, the nearest first.

        Raises:
            NoCheckpointError: no tier has it.
        """
        if not self._tiers:
            return self._run.named(step)
        found = self._with_copies(lambda: self._named_here(step), lambda copy: copy.step == step)
        if not found:
            where = " and ".join((self._run.root, *self._tiers))
            numbers = {one.step for one in self.loadable() if one.step is not None}
            there = ", ".join(map(str, sorted(numbers))) or "none yet"
            raise NoCheckpointError(
                f"{where} have no step {step}; their steps: {there}", path=self._run.root
            )
        return found

    def tell_empty(self) -> None:
        """Warn that there is nothing to restore: the directory may be mistyped."""
        root = self._run.root
        there = "" if os.path.isdir(root) else " (no such directory)"
        tiers = f" and {' and '.join(self._tiers)}" if self._tiers else ""
        _log.warning("nothing in %s%s%s: starting anew", root, there, tiers)

    def lacking(self, found: list[Step]) -> list[str]:
        """Return the paths of the whole steps here that a tier lacks, going by what was found."""
        seen = [(step.path, step.order, step.status == "committed") for step in found]
        return _native.lacking(seen, self._tiers)

    def is_here(self, path: str) -> bool:
        """Whether a step is in the run's own directory."""
        return not any(path.startswith(f"{tier}/") for tier in self._tiers)

    def _there(self) -> list[Step]:
        """Return the committed steps in the tiers."""
        _native.join_run(self._run.root, self._tiers, native_json(self._config))
        for tier in self._tiers:
            warn_if_missing(tier)
        found = [_catalog.steps(tier, config=self._config) for tier in self._tiers]
        for steps in found:
            warn_of_lost_manifests(steps)
        return [step for steps in found for step in steps if was_committed(step)]

    def _named_here(self, step: int) -> list[Step]:
        try:
            return self._run.named(step)
        except NoCheckpointError:
            return []

    def _with_copies(
        self, here: Callable[[], list[Step]], is_wanted: Callable[[Step], bool]
    ) -> list[Step]:
        copies = [step for step in self._first(self._there) if is_wanted(step)]
        try:
            local = here()
        except (Error, FileNotFoundError) as error:
            # What another rank has met is the cause of this rank's error.
            cause = error.__cause__ if type(error) is Error else error
            is_refused = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
            if not copies or is_refused:
                raise
            _log.warning("%s has nothing to restore: %s", self._run.root, error)
            _warn_of_damage(_catalog.steps(self._run.root, config=self._config))
            local = []
        if copies:
            _warn_of_damage(local)
        # Of two saves of one number the newer first. A stable sort: of copies the nearest.
        return sorted([*local, *copies], key=newest_first)


def _warn_of_damage(steps: list[Step]) -> None:
    """Tell of steps whose manifest is damaged: a copy comes before them."""
    for step in steps:
        if step.status == "damaged":
            _log.warning("%s is damaged: %s", step.path, step.problem)


def refuse_without(places: tuple[str, ...], tiers: Tiers) -> None:
    """Refuse fields that say something about places where none is named.

    Raises:
        InvalidStateError: one of them is given.
    """
    for name in ("keep", "keep_here", "rate"):
        if getattr(tiers, name) is not None and not places:
            raise InvalidStateError(
                f"Tiers.{name} is for places, and none is named: name places, or leave it out"
            )


class Plan(NamedTuple):
    """Where the steps of a run are copied to, and which of them stay there."""

    tiers: tuple[str, ...]
    rate: int
    """Bytes a second at most; 0 for no limit."""
    there: Retention
    """What stays on each tier; all, if there is no rule."""
    here: Retention
    """What stays in the run's directory."""
    evicts: bool = False
    """Whether steps leave that once all tiers have them."""

    def stays(self) -> Stays:
        """Return which steps must get to the tiers, however many newer ones wait."""
        return not _rules.keeps_all(self.here), self.evicts, self.here.every


def promoter(
    root: str, plan: Plan, config: Config | None, note_damage: Callable[[str], object]
) -> Promoter:
    """Return what copies a manager's steps. `CheckpointManager.close` waits for it."""

    def clear(tier: str) -> None:
        _rules.retain(tier, plan.there, config, root)

    removes = None if _rules.keeps_all(plan.there) else clear
    return Promoter(
        root,
        plan.tiers,
        plan.rate,
        config,
        removes,
        stays=plan.stays(),
        note_damage=note_damage,
    )
