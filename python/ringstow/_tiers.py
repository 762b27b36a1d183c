"""The places that a `CheckpointManager` copies its steps to, and restores them from."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from ringstow import _catalog, _native, _promote, _rules
from ringstow._arguments import StrPath, absolute, object_url
from ringstow._config import native_json
from ringstow._copier import Added, Copier
from ringstow._errors import Error, NoCheckpointError
from ringstow._rules import Rules
from ringstow._run import warn_of_lost_manifests, was_committed

if TYPE_CHECKING:
    from ringstow._catalog_report import Step
    from ringstow._config import Config
    from ringstow._damage import OnCorrupt
    from ringstow._run import Run

_log = logging.getLogger("ringstow")


def checked(
    tiers: Iterable[StrPath] | None, root: str, config: Config | None = None
) -> tuple[str, ...]:
    """Return the URLs and the directories of tiers behind a run's directory.

    Raises:
        TypeError: it is one text, not a list.
        InvalidStateError: a URL that cannot be understood; or a directory that is the run's, a
            stripe or another tier, or is in one of them, or has one in itself.
    """
    if isinstance(tiers, (str, os.PathLike)):
        raise TypeError(f'tiers is a list of URLs and directories: tiers=["{tiers}"]')
    places: list[str] = []
    others = [root, *(() if config is None else map(absolute, config.stripe))]
    for tier in tiers or ():
        url = object_url(tier)
        if url is not None:
            _native.check_url(url)
        place = url or absolute(tier)
        _native.check_apart(place, [*others, *places])
        if url is None:
            _warn_of_one_disk(place, root)
        places.append(place)
    return tuple(places)


def _warn_of_one_disk(place: str, root: str) -> None:
    here, there = (os.path.realpath(path) for path in (root, place))
    if _device(here) == _device(there):
        _log.warning(
            "%s is on the same file system as %s: copies there are lost together with it. Is a "
            "disk not mounted?",
            place,
            root,
        )


def _device(path: str) -> int:
    """Return the number of the file system that has a path, or will have it."""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return os.stat(path).st_dev


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
        self.joined: str | None = None
        """The run whose steps in the tiers training goes on with, and not yet under its own name.

        The rank that looks for all alone knows it.
        """

    def candidates(self, on_corrupt: OnCorrupt) -> list[Step]:
        """Return the committed steps, newest first, and of one step the nearest copy first.

        Raises:
            OSError: a tier does not answer. It may have the newest step.
        """
        if not self._tiers:
            return self._run.candidates(on_corrupt)
        return self._with_copies(lambda: self._run.candidates(on_corrupt), lambda _: True)

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
            raise NoCheckpointError(f"{where} have no step {step}", path=self._run.root)
        return found

    def is_here(self, path: str) -> bool:
        """Whether a step is in the run's own directory."""
        return not any(path.startswith(f"{tier}/") for tier in self._tiers)

    def _there(self) -> list[Step]:
        """Return the committed steps in the tiers."""
        joined = _native.join_run(self._run.root, self._tiers, native_json(self._config))
        self.joined = joined or self.joined
        for tier in self._tiers:
            if object_url(tier) is None and not os.path.exists(tier):
                _log.warning(
                    "%s does not exist: there is nothing to restore from it, and the first copy "
                    "creates it. Is its disk mounted?",
                    tier,
                )
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
        return sorted([*local, *copies], key=_newest_first)


def _warn_of_damage(steps: list[Step]) -> None:
    """Tell of steps whose manifest is damaged: a copy comes before them."""
    for step in steps:
        if step.status == "damaged":
            _log.warning("%s is damaged: %s", step.path, step.problem)


def _newest_first(step: Step) -> tuple[int, int]:
    return -(step.step or 0), -(step.created_unix_ms or 0)


class Plan(NamedTuple):
    """Where the steps of a run are copied to, and which of them stay there."""

    tiers: tuple[str, ...]
    rate: int
    """Bytes a second at most; 0 for no limit."""
    rules: Rules
    """What stays on each tier; all, if there is no rule."""


class Promoter(Copier):
    """Copies steps to other tiers, and removes old ones there.

    It removes after a new step alone: another one may be there because the newest is damaged.
    """

    def __init__(self, root: str, plan: Plan, config: Config | None) -> None:
        super().__init__(list(plan.tiers))
        self._root = root
        self._plan = plan
        self._config = config

    def _copy(self, step: Added) -> None:
        for tier in self._plan.tiers:
            to = f"{tier}/{os.path.basename(step.path)}"
            try:
                self._claim(tier)
                self.report = _promote.promote(
                    step.path,
                    to,
                    rate=self._plan.rate,
                    replace_older=True,  # a run that went back saves a step again
                    config=self._config,
                )
            except BaseException as error:  # a panic, too: the step is saved, training goes on
                if self._is_overtaken(step, error):
                    self._pass_over(step, tier)
                    continue
                self.error = error
                again = f"; `ringstow promote {step.path} --to {to}` copies this one"
                _log.error(
                    "%s is saved, but not copied to %s: %s. The next step is tried again%s",
                    step.path,
                    tier,
                    error,
                    again if isinstance(error, OSError) else "",
                )
            else:
                _log.info(
                    "%s is copied to %s: %.3g GB sent in %.1f s",
                    step.path,
                    tier,
                    self.report.sent_bytes / 1e9,
                    self.report.seconds,
                )
                self._clear(step, tier)

    def _claim(self, tier: str) -> None:
        """Note that a tier has steps of this run.

        Raises:
            InvalidStateError: it has steps of another.
        """
        if self.joined is not None:
            _native.take_over(self._root, self._plan.tiers, self.joined)
            self.joined = None
        _native.claim(tier, _native.claim(self._root, None))

    def _clear(self, step: Added, tier: str) -> None:
        """Remove old steps from a tier, after a new one."""
        if not step.is_new or self._plan.rules.keeps_all:
            return
        try:
            _rules.retain(tier, self._plan.rules, self._config)
        except BaseException as error:  # the step is copied
            self.error = error
            _log.error("%s is copied to %s, and old steps stay there: %s", step.path, tier, error)
