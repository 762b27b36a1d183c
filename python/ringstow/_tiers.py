"""The object stores that a `CheckpointManager` copies its steps to, and restores them from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from ringstow import _catalog, _native, _promote, _rules
from ringstow._arguments import object_url
from ringstow._copier import Added, Copier
from ringstow._errors import Error, InvalidStateError, NoCheckpointError
from ringstow._rules import Rules
from ringstow._run import was_committed

if TYPE_CHECKING:
    from ringstow._catalog_report import Step
    from ringstow._config import Config
    from ringstow._damage import OnCorrupt
    from ringstow._run import Run

_log = logging.getLogger("ringstow")


def checked(tiers: Iterable[str]) -> tuple[str, ...]:
    """Return the URLs of tiers.

    Raises:
        TypeError: it is one text, not a list.
        InvalidStateError: one is not the URL of an object store.
    """
    if isinstance(tiers, str):
        raise TypeError(f'tiers is a list of URLs: tiers=["{tiers}"]')
    urls = []
    for tier in tiers:
        url = object_url(tier)
        if url is None:
            raise InvalidStateError(
                f"{tier!r} in tiers is not the URL of an object store (s3://, gs://, az://); the "
                "manager's directory is the first tier and need not be named"
            )
        _native.check_url(url)
        urls.append(url)
    return tuple(urls)


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

    def _there(self) -> list[Step]:
        """Return the committed steps in the tiers."""
        found = [_catalog.steps(tier, config=self._config) for tier in self._tiers]
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
            local = []
        # Of two saves of one number the newer first. A stable sort: of copies the nearest.
        return sorted([*local, *copies], key=_newest_first)


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
    """Copies steps to object stores, and removes old ones there.

    It removes after a new step alone: another one may be there because the newest is damaged.
    """

    def __init__(self, plan: Plan, config: Config | None) -> None:
        super().__init__(list(plan.tiers))
        self._plan = plan
        self._config = config

    def _copy(self, step: Added) -> None:
        path = step.path
        name = path.rstrip("/").rpartition("/")[2]
        for tier in self._plan.tiers:
            try:
                self.report = _promote.promote(
                    path,
                    f"{tier}/{name}",
                    rate=self._plan.rate,
                    replace_older=True,  # a run that went back saves a step again
                    config=self._config,
                )
                if step.is_new and not self._plan.rules.keeps_all:
                    _rules.retain(tier, self._plan.rules, self._config)
            except BaseException as error:  # a panic, too: the step is saved, training goes on
                self.error = error
                _log.error(
                    "%s is saved, but not copied to %s: %s. The next step is tried again; "
                    "`ringstow promote %s --to %s/%s` copies this one",
                    path, tier, error, path, tier, name,
                )  # fmt: skip
