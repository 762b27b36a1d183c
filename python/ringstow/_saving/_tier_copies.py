"""Copies to tiers after a commit, in a thread."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ringstow import _native
from ringstow._core._arguments import StrPath, absolute, object_url
from ringstow._core._config import given, native_json, without_tiers
from ringstow._core._errors import CorruptCheckpointError, InvalidStateError
from ringstow._core._policies import Retention
from ringstow._saving import _promote
from ringstow._saving._copy_queue import Added, Copier, Stays, passes

if TYPE_CHECKING:
    from ringstow._core._config import Config

_log = logging.getLogger("ringstow")


def checked(
    tiers: Iterable[StrPath],
    root: str,
    config: Config,
    *,
    warns: bool = True,
) -> tuple[str, ...]:
    """Return the URLs and the directories of tiers behind a run's directory.

    Raises:
        InvalidStateError: a URL that cannot be understood; or a directory that is, is inside, or
            contains the run's directory, a stripe or another tier.
    """
    places: list[str] = []
    others = [root, *map(absolute, config.stripe)]
    for tier in tiers:
        url = object_url(tier)
        if url is not None:
            _native.check_url(url)
        place = url or absolute(tier, may_be_store=True)
        _native.check_apart(place, [*others, *places])
        if url is None and warns:
            warn_of_one_disk(place, root)
        places.append(place)
    return tuple(places)


def warn_of_one_disk(place: str, root: str) -> None:
    """Warn if a tier is on the file system of the run's directory."""
    here, there = (os.path.realpath(path) for path in (root, place))
    if _device(here) == _device(there):
        _log.warning(
            "%s is on the same file system as %s: copies there are lost together with it. Is a "
            "disk not mounted?",
            place,
            root,
        )


def _device(path: str) -> int:
    """Return the device number of the file system of a path, which need not exist yet."""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return os.stat(path).st_dev


class Promoter(Copier):
    """Copies the checkpoints of one directory to tiers."""

    def __init__(
        self,
        root: str,
        tiers: tuple[str, ...],
        rate: int,
        config: Config | None,
        keep: Retention = Retention(),  # noqa: B008, it never changes
        *,
        stays: Stays = (True, False, None),
        note_damage: Callable[[str], object] | None = None,
        unchecked: tuple[str, ...] = (),
    ) -> None:
        """Make a copier, which starts a thread when there is something to copy.

        Args:
            root: the directory.
            tiers: where to copy.
            rate: maximum bytes a second; 0 for no limit.
            config: the settings for reads.
            keep: the rules for each tier; without one, all steps stay.
            stays: which steps are always copied.
            note_damage: called with the path of each step that is damaged here.
            unchecked: tier directories that have not yet been checked to be on another disk.
        """
        super().__init__(tiers, stays)
        self._root = root
        self._tiers = tiers
        self._copying = _native.Copying(root, tiers, rate, keep.rules, native_json(config))
        self._unchecked = unchecked
        self._note_damage = note_damage

    def _copy(self, step: Added) -> bool:
        self._warn_of_one_disk()
        are_there = [self._copy_to(tier, step) for tier in self._tiers]  # to all of them
        return all(are_there)

    def _copy_to(self, tier: str, step: Added) -> bool:
        """Copy to one tier; return False if the copy was skipped."""
        to = f"{tier}/{os.path.basename(step.path)}"
        try:
            report = _promote.copied(step.path, to, copying=self._copying, is_new=step.is_new)
        except BaseException as error:  # a panic, too: the step is saved, training continues
            if not passes(self.error):  # keep an error after which the copy is tried again
                self.error = error
            is_here = isinstance(error, CorruptCheckpointError) and error.file.startswith(step.path)
            if is_here and self._note_damage is not None:
                self._note_damage(step.path)
            _promote.tell_failure(step.path, to, error)
            self._tell(step, tier, error)
            return True
        if report is None:
            self._pass_over(step.path, tier)
            return False
        self.report = report
        _promote.tell(report)
        _log.info(
            "%s is copied to %s: %.3g GB sent in %.1f s",
            step.path,
            tier,
            report.sent_bytes / 1e9,
            report.seconds,
        )
        return True

    def _tell(self, step: Added, tier: str, error: BaseException) -> None:
        pause_s = self.pause_s()
        again = ""
        if pause_s is not None:
            again = f". It is tried again in {pause_s:.0f} s, or the next step once that is saved"
        if isinstance(error, OSError):
            to = f"{tier}/{os.path.basename(step.path)}"
            again += f"; `ringstow promote {step.path} --to {to}` copies this one"
        _log.error("%s is saved, but not copied to %s: %s%s", step.path, tier, error, again)

    def _warn_of_one_disk(self) -> None:
        places, self._unchecked = self._unchecked, ()
        for place in places:
            with contextlib.suppress(OSError):
                warn_of_one_disk(place, self._root)


_promoters: dict[tuple[str, Config], Promoter] = {}
"""The copiers for `Config.tiers`, by directory and settings."""
_making = threading.RLock()  # re-entrant: a signal handler may save, too
_loaded: set[str] = set()
"""The directories of the checkpoints that this process has loaded."""
_elsewhere = ""
"""The other process that copies this process's saves, if any."""


def _forget_after_fork() -> None:
    global _making, _elsewhere
    _making = threading.RLock()
    if _promoters:
        _elsewhere = "the process that this one was forked from"
    _promoters.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


def loaded(path: str) -> None:
    """Note that this process has loaded a checkpoint: it may continue that run."""
    _loaded.add(os.path.dirname(path))


def of_config(path: str, config: Config | None) -> Promoter | None:
    """Return the copier of a checkpoint to the tiers of a configuration; None if it names none.

    The interpreter's exit waits for its copies.

    Raises:
        InvalidStateError: invalid tiers; see `checked`.
    """
    config = given(config)
    if not config.tiers:
        return None
    root = os.path.dirname(path)
    with _making:
        known = _promoters.get((root, config))
        # A signal handler may have made the copier meanwhile.
        return known or _promoters.setdefault((root, config), _of_config(root, config))


def of_ranks(path: str, config: Config, *, is_first: bool) -> Promoter | None:
    """Return the copier for a save of several ranks: the first rank's, None on the others."""
    global _elsewhere
    if is_first:
        return of_config(path, config)
    if config.tiers:
        _elsewhere = "the first rank"
    return None


def _of_config(root: str, config: Config) -> Promoter:
    tiers = checked(config.tiers, root, config, warns=False)
    directories = tuple(tier for tier in tiers if object_url(tier) is None)
    # A new directory continues the run of the tier that was loaded.
    if not _loaded.isdisjoint(tiers) and _native.run_of(root) is None:
        with contextlib.suppress(InvalidStateError):  # the copies then fail and report it
            _native.join_run(root, tiers, config.to_json())
    return Promoter(
        root,
        tiers,
        config.promotion_rate,
        without_tiers(config),
        unchecked=directories,
    )


def wait_promoted(timeout: float | None = None) -> bool:
    """Wait until the copies of this process's committed checkpoints to ``Config.tiers`` have ended.

    For saves without a handle, such as `save` and the saves of ``ringstow.dcp``; the handle of
    `save_async` and `CheckpointManager` have a ``wait_promoted()`` of their own. The interpreter's
    exit also waits, but does not report the outcome.

    Args:
        timeout: seconds to wait; None waits without limit.

    Returns:
        Whether the last checkpoint of each directory is on all its tiers. False if the time ran
        out, or if a copy failed, which the log reports.

    Raises:
        InvalidStateError: another process copies: the first rank, or the parent of a fork. Call it
            there.
    """
    if _elsewhere and not _promoters:
        raise InvalidStateError(f"{_elsewhere} makes the copies: call it there")
    until = None if timeout is None else time.monotonic() + timeout
    are_there = True
    for promoter in list(_promoters.values()):
        left = None if until is None else max(until - time.monotonic(), 0)
        are_there &= promoter.wait(left)
    return are_there
