"""`CheckpointManager`: the object with which a training loop saves, keeps and restores steps.

It decides when to save, remove and load, and in which order. `_one_process` and `_many_ranks` do
the saves and loads. It never reads or writes a checkpoint's bytes itself.
"""

from __future__ import annotations

import contextlib
import functools
import time
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from ringstow._core import _policies
from ringstow._core import _when as _policy
from ringstow._core._arguments import StrPath, absolute, numbered, step_number
from ringstow._core._config import Config, given, without_tiers
from ringstow._core._damage import OnCorrupt
from ringstow._core._errors import InvalidStateError, NotDurableError
from ringstow._manager import _rules, _setup, _tiers
from ringstow._manager._after_save import Upkeep
from ringstow._manager._calls import Calls, Saving
from ringstow._manager._kept_steps import KeptSteps
from ringstow._manager._previous import PreviousSteps
from ringstow._manager._restore import Restored, newest_intact, passed_over
from ringstow._manager._run_directory import RunLock
from ringstow._manager._when import Schedule
from ringstow._reading._names import Names
from ringstow._reports import _history
from ringstow._reports._blocked_time import counted_since
from ringstow._saving._guard import Staging, check_staging
from ringstow._saving._tier_copies import checked

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch.distributed as dist

    from ringstow._core._policies import Mode, Nodes, Previous, Retention, Tiers
    from ringstow._core._when import When
    from ringstow._reports._checkpoint_reports import Retained, Step
    from ringstow._reports._io_reports import PromotionReport, SaveReport
    from ringstow._saving._base import Base
    from ringstow._saving._save_future import SaveHandle
    from ringstow._state.tree._rename import Given


class CheckpointManager:
    """Saves the steps of a training run into one directory, removes old ones, and resumes.

    ::

        with ringstow.CheckpointManager("run", keep=3) as manager:
            state = {"model": model, "optimizer": optimizer}
            restored = manager.restore(into=state)  # None if nothing was committed yet
            for step in range(restored.step + 1 if restored else 0, steps):
                ...
                manager.save_async(step, state, metrics={"loss": loss})

    Step 1000 is saved to ``step-00001000``. One save is in progress at a time: every method but the
    properties first waits for the save in progress and the removal of old steps after it. If that
    save failed and its handle has not reported it, the method raises the failure, once.

    With several ranks (``torch.distributed``) every rank makes the manager and calls each method in
    the same order. Saves and loads work as in ``ringstow.distributed``.

    Call it from one thread. A second thread waits until the first one's call returns. A signal
    handler that interrupts a call gets BusyError. A forked child must make a manager of its own.
    docs/manager.md is the guide.
    """

    def __init__(
        self,
        root: StrPath,
        *,
        keep: int | Retention | None = None,
        when: When | None = None,
        tiers: Iterable[StrPath] | Tiers | None = None,
        nodes: Nodes | None = None,
        base: Literal["previous"] | Previous | None = None,
        config: Config | None = None,
        allow_pickle: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Make a manager. Without ``nodes`` it creates no directory before the first save.

        Args:
            root: the directory of the run.
            keep: which steps to keep: the newest ``keep`` steps, or a `Retention`. None keeps all.
            when: when `should_save` says to save, such as ``EverySteps(500) | OnSignal()``; the
                same on all ranks. None leaves that to the program.
            tiers: where to copy each step in the background, nearest first: directories on other
                disks and object stores, such as ``["/shared/run", "s3://bucket/run"]``, or `Tiers`,
                which also sets how many steps stay in each place. If saves are faster than copies,
                steps in between are not copied. `restore` takes the newest step of all tiers;
                damaged parts come from the next copy. On several ranks, rank 0 copies; with
                ``nodes`` the first rank of each node copies its files. None means the tiers of
                ``config``, and ``[]`` no tiers.
            nodes: ``Nodes()`` if ``root`` is on each node's own disk, where other nodes cannot read
                it; ``Nodes(replicas=2)`` also copies each node's files to the next one. The first
                rank of each node removes old steps there. None means that all ranks see ``root``.
            base: ``"previous"`` links files of the previous step whose tensors have not changed,
                instead of writing them again; see `ringstow.save`. `Previous` also sets which saves
                write all files. None writes all files in each save.
            config: the settings of saves and loads; None means the defaults.
            allow_pickle: pickle values of other types, and unpickle them, which can run any code.
            group: the ranks that share the run's checkpoints: a gloo group that training does not
                use, since a background save communicates in it. None means all ranks, in a new
                group.

        Raises:
            TypeError: an argument has a value of the wrong type.
            InvalidStateError: ``keep`` is below 1; or ``root`` is a URL, or one of ``tiers`` is in
                ``root`` or is a URL that cannot be understood; or `Tiers` sets a field for places
                and names no place; or with ``Tiers.keep_here``, ``Tiers.keep`` is less than
                ``keep``, so that steps would have no copy; or ``base`` is unknown, or not for
                several ranks; or ``nodes`` is combined with one process, ``base`` or
                ``Retention.slim_after``; or there are fewer nodes than ``Nodes.replicas``.
        """
        self._keep = _policies.retention(keep)
        when = _policy.checked(when)
        self._root = absolute(root)
        found = given(config)
        there = _policies.tiers(tiers)
        places = checked(found.tiers if there.places is None else there.places, self._root, found)
        _tiers.refuse_without(places, there)
        rate = found.promotion_rate if there.rate is None else there.rate
        config = without_tiers(found)  # the manager itself copies
        evicts = there.keep_here is not None
        on_tiers = _rules.on_tiers(self._keep, there)
        plan = _tiers.Plan(places, rate, on_tiers, self._keep, evicts)
        clearing = _rules.clearing(self._root, self._keep, places, there.keep_here, config)
        previous = _policies.previous(base)
        not_for_nodes = {"base": base, "Retention.slim_after": self._keep.slim_after}
        _setup.check_nodes(_policies.nodes(nodes), config, **not_for_nodes)
        self._node_local = nodes is not None
        # Each node removes old steps independently, so all ranks need the same rules.
        rules = None if nodes is None else (self._keep, plan, there.keep_here)
        same = {"nodes": nodes, "keep and tiers": rules, "when": _policy.compared(when)}
        saves = _setup.Saves(config, "guard", allow_pickle)
        if nodes is not None:
            made = _setup.for_nodes(self._root, plan, nodes.replicas, same, saves, group)
        else:
            given_to = (self._root, plan, _rules.droppable(self._keep), same, saves, group)
            made = _setup.for_ranks(*given_to, clearing.note_damage)
        self._side, self._run, self._steps, self._copier = made
        self._kept = KeptSteps(self._side, self._run)
        self._previous: PreviousSteps | None = None
        if previous is not None:
            self._previous = PreviousSteps(previous.full_every, self._run.newest)
        self._copies_elsewhere = bool(places) and nodes is None and not self._side.is_first
        self._upkeep = Upkeep(
            self._root,
            self._copier,
            clearing,
            self._previous,
            self._side.from_first,
            leads=self._side.leads,
            evicts=evicts,
            node_local=self._node_local,
        )
        if self._side.leads:
            _history.keep(self._root)
        self._config, self._tiers = config, places
        self._lock = RunLock(self._root)
        self._calls = Calls(self._root, self._side, self._upkeep, self._copier, self._lock)
        self._owns_run = False
        self._has_read_newest = False
        # The last: a manager that cannot be made must leave the program's signals alone.
        self._schedule = None if when is None else Schedule(when, self._side, self._root)

    def __repr__(self) -> str:
        closed = " closed" if self._calls.turn.is_closed else ""
        return f"<CheckpointManager {self._root!r}{closed}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self._calls.turn.is_own():  # a forked child must not close it
            return
        if error is None:
            self.close()
        elif not self._calls.turn.is_closed:
            try:
                self._calls.give_up()
            finally:
                self._end_schedule()

    @property
    def root(self) -> str:
        """The directory of the run."""
        return self._root

    @property
    def retention_report(self) -> Retained | None:
        """The report of the last removal of old steps; None before the first, or if it failed.

        Several ranks get rank 0's report with their next call.
        """
        return self._upkeep.report

    @property
    def retention_error(self) -> Exception | None:
        """Why the last removal or slimming of old steps failed, or None. Only on rank 0."""
        return self._upkeep.error

    @property
    def promotion_report(self) -> PromotionReport | None:
        """The report of the last copy to a tier; None before the first. Only on rank 0."""
        return self._copier.report

    @property
    def promotion_error(self) -> BaseException | None:
        """Why the last copy to one of the ``tiers`` failed, or None. Only on rank 0.

        With ``Nodes.replicas``, why the last copy to another node failed.
        """
        return self._copier.error

    def raise_failures(self) -> None:
        """Raise the failure of the last removal of old steps or of the last copy, if it failed.

        The next call raises a failed save anyway. These failures do not stop training: the manager
        logs them at once, and tries again after the next save. Call this where they must count,
        such as at the end of a job, also after `close`. Only rank 0 raises; with ``nodes`` the
        first rank of each node.

        Raises:
            Exception: `retention_error` or `promotion_error`; an ExceptionGroup if both are set.
            Error: the system refused to remove steps; names them.
        """
        self._upkeep.raise_failures()

    def wait_promoted(self, timeout: float | None = None) -> bool:
        """Wait for the save in progress, and until all copies of its step are made or have failed.

        These are the copies on ``tiers``, and with ``Nodes.replicas`` on other nodes.

        Returns:
            Whether all copies exist. False if ``timeout`` seconds were not enough, if the copy
            failed (see `promotion_error`), or if the save failed (the next call raises why).

        Raises:
            InvalidStateError: without ``nodes`` only rank 0 copies, and this is another rank.
        """
        if self._copies_elsewhere:
            raise InvalidStateError("only rank 0 copies to the tiers, and knows their steps")
        saving = self._calls.saving
        if saving is not None:
            until = None if timeout is None else time.monotonic() + timeout
            if not saving.is_over.wait(timeout) or not saving.handle._is_committed():
                return False
            timeout = None if until is None else max(until - time.monotonic(), 0)
        return self._copier.wait(timeout)

    # When to save.

    def should_save(self, step: int) -> bool:
        """Return whether to save a step now, as ``when`` says; the same on all ranks.

        Call it on every rank, once after each step. In most steps it does not communicate. A signal
        is heard within about two seconds, or at the end of a step of more than one second.

        Args:
            step: the step's number, which grows by any stride and is the same on all ranks. Asking
                again for the same step returns the same answer.

        Raises:
            TypeError: the step is no integer.
            InvalidStateError: the manager has no ``when``; or the step is lower than the one
                before; or the ranks ask for different steps.
        """
        self._calls.turn.check()
        if self._schedule is None:
            raise InvalidStateError(
                "should_save needs a policy: CheckpointManager(..., when=ringstow.EverySteps(500))"
            )
        return self._schedule.asks(step)

    @property
    def stopping(self) -> bool:
        """Whether the training must end: a signal or a deadline of ``when`` was heard.

        `should_save` sets it, on all ranks at the same step. From then on `save_async` returns once
        the step is durable.
        """
        return self._schedule is not None and self._schedule.is_stopping()

    # Saves.

    def save(
        self, step: int, state: dict[Any, Any], metrics: Mapping[str, Any] | None = None
    ) -> SaveReport:
        """Save a step, return once it is durable, and remove the steps that no rule keeps.

        Replaces a step of the same number at its commit. A failed removal does not fail the save:
        it is logged, and tried again after the next save. Before it begins, the first save after
        `restore` of the newest step also finishes a removal that a kill has interrupted.

        Args:
            step: the step's number.
            state: the state dict, nested in any way; see `ringstow.save`, and on several ranks
                ``ringstow.distributed.save``. Objects with ``state_dict`` are saved by that dict.
            metrics: numbers by name, for ``Retention.best`` and `best`. On several ranks, rank 0's
                are used.

        Returns:
            The report; on several ranks, this rank's.

        Raises:
            Exception: any error of `ringstow.save`; on several ranks, of
                ``ringstow.distributed.save``, on all of them.
        """
        number, begun = numbered(step), time.perf_counter()
        self._heed()
        with self._calls.one("save", number):
            path, base = self._prepare(number)
            self._calls.left_out = None
            try:
                with counted_since(begun):
                    report = self._side.save(state, path, number, metrics, base)
            except NotDurableError:
                self._upkeep.rescue(path)
                raise
            except BaseException as error:
                _rules.explain(self._keep, error)
                raise
            if self._schedule is not None:
                self._schedule.took(time.perf_counter() - begun)
            self._upkeep.committed(path)
        return report

    def save_async(
        self,
        step: int,
        state: dict[Any, Any],
        metrics: Mapping[str, Any] | None = None,
        *,
        on_busy: _setup.OnBusy = "wait",
        staging: Staging = "guard",
    ) -> SaveHandle:
        """Start to save a step in the background, and return; otherwise the same as `save`.

        The old steps are removed in the background, after the commit. If the manager is `stopping`,
        this returns once the step is durable, or raises why it is not.

        Args:
            step: the step's number.
            state: the state dict to save; see `save`.
            metrics: numbers by name, for ``Retention.best`` and `best`.
            on_busy: what to do while the previous save, or the removal of old steps after it, is in
                progress. ``"wait"`` waits for it. ``"skip"`` does not save this step: it logs a
                warning, and the handle's ``skipped`` is true. A step that ``Retention.every`` keeps
                is never skipped: the call waits. On several ranks all must pass the same value, and
                rank 0 decides for all.
            staging: how to keep the values of the call: ``"guard"``, ``"snapshot"``, ``"wait"`` or
                ``"unguarded"`` (one process only); see `ringstow.save_async`.

        Returns:
            The handle to wait on, a `concurrent.futures.Future`. You need not keep it: the next
            call, or the end of the ``with`` block, raises its failure.

        Raises:
            InvalidStateError: an unknown ``on_busy`` or ``staging``, or one that is not for several
                ranks; or the ranks make different calls.
            Exception: any error of `ringstow.save_async`.
        """
        number, begun = numbered(step), time.perf_counter()
        self._heed()
        _setup.check_on_busy(on_busy)
        check_staging(staging)
        if self.stopping or _rules.stays(self._keep, number):
            on_busy = "wait"  # the ranks compare it, so they must have the same ``every``, too
        if on_busy == "skip":
            skipped = self._calls.skipped(number, metrics)
            if skipped is not None:
                return skipped
        with self._calls.one("save_async", number, on_busy):
            path, base = self._prepare(number)
            with counted_since(begun):
                handle: SaveHandle = self._side.save_async(
                    state, path, number, metrics, base, staging=staging
                )
            handle._explained_by(functools.partial(_rules.explain, self._keep))
            self._calls.saving = Saving(handle, self._upkeep.follow(handle, path))
            self._calls.left_out = None
        if self._schedule is not None:
            self._schedule.follow(handle)
        if self.stopping:
            handle.result()
        return handle

    def wait(self) -> None:
        """Wait for the save in progress and the removal of old steps after it.

        Ctrl-C ends the wait, not the save: wait again.

        Raises:
            Exception: why the save failed, unless its handle has reported it.
        """
        with self._calls.one("wait"):
            pass

    def close(self) -> None:
        """Wait for the save, the removals and the copies to ``tiers``; close.

        Closes even if the save failed. Tries a failed copy a last time.

        The end of a ``with`` block does it. If the block raised, a failed save is logged instead.
        After ``destroy_process_group()``, or if the process group was made after the manager, each
        rank closes by itself.

        Raises:
            Exception: why the save failed, unless its handle has reported it.
        """
        turn = self._calls.turn
        try:
            if self._schedule is not None and turn.is_own() and not turn.is_closed:
                with contextlib.suppress(Exception):  # a rank has ended: the call below says so
                    self._schedule.settle()
            self._calls.close()
        finally:
            self._end_schedule()

    def _heed(self) -> None:
        if self._schedule is not None:
            self._schedule.heed()

    def _end_schedule(self) -> None:
        if self._schedule is not None and self._calls.turn.is_closed:
            self._schedule.close()

    # Lists of steps.

    def steps(self) -> list[Step]:
        """List the steps in ``root``, oldest first, including those that can't be loaded.

        `ringstow.steps` lists a tier's steps.

        Raises:
            OSError: the directory, or a directory in it that may be a step, can't be read.
        """
        with self._calls.one("steps"):
            return self._side.first(self._run.steps)

    def latest(self) -> Step | None:
        """Return the newest step that can be loaded, by its number; None if there is none yet.

        Searches the ``tiers``, too, and returns the nearest copy that can be loaded by itself.
        Judges by manifests and lengths of files. Logs each newer step that can't be loaded.

        Raises:
            IncompleteCheckpointError, CorruptCheckpointError, FormatError: steps were committed,
                and none can be loaded; says why the newest cannot.
            InvalidStateError: nothing in the directory counts as a step, but it has checkpoints.
            OSError: the directory can't be read, or a tier does not answer.
        """
        with self._calls.one("latest"):
            return self._side.first(self._steps.newest)

    def best(self, metric: str | None = None, mode: Mode | None = None) -> Step | None:
        """Return the step with the best value of a metric; of equal steps the newest.

        Searches the ``tiers``, too, and returns the nearest copy.

        Args:
            metric: the metric's name; None means the metric of ``Retention.best``.
            mode: whether the smallest value is the best, ``"min"``, or the largest, ``"max"``.

        Returns:
            The step; None if no step that can be loaded has a number for the metric.

        Raises:
            InvalidStateError: neither the call nor ``Retention.best`` names a metric.
            OSError: the directory can't be read, or a tier does not answer.
        """
        metric, mode = _rules.metric_of_best(self._keep, metric, mode)
        with self._calls.one("best", metric, mode):
            steps = self._side.first(self._steps.loadable)
        return _rules.best_of(steps, metric, mode)

    # Resume.

    def restore(
        self,
        step: int | None = None,
        into: dict[Any, Any] | None = None,
        on_corrupt: OnCorrupt = "raise",
        strict: bool = True,
        drop_newer: bool = False,
        rename: Given | None = None,
    ) -> Restored | None:
        """Load a step, the newest if none is named.

        Saves that were killed before their commit do not count. The newest step has the highest
        number. If the run has gone back to an earlier step, the steps saved after that are newer.

        Args:
            step: the step's number.
            into: a state dict to fill in place; see `ringstow.load_into`. Several ranks need it,
                since it defines which shards this rank has.
            on_corrupt: ``"previous"`` loads the newest intact step if the newest is damaged, or its
                disk has bad sectors, and logs a warning that names the steps it skips. If none is
                intact, it raises the newest step's error. Any other failure is always raised: a
                missing disk or permission must not cost progress.
            strict: require the same keys in ``into`` and the step.
            drop_newer: remove the steps that are newer than the named one, here and on the
                ``tiers``, except those kept by `keep`; waits for copies in progress. If false, they
                stay until the rules remove them, and a warning names them.
            rename: maps the step's names to those of ``into``, and joins or splits its tensors; see
                `ringstow.load_into`.

        Returns:
            The step and its state; None if no step is named and nothing was committed yet. A
            warning then names the directory, which may be mistyped.

        Raises:
            NoCheckpointError: the directory does not have the named step; lists the steps it has.
            ValueError: an unknown ``on_corrupt``, or ``"previous"`` together with a step.
            InvalidStateError: several ranks, and no ``into``; or the directory has checkpoints, and
                none of them counts as a step.
            KeyMismatchError: the step does not fit ``into``; says why and what to do.
            CorruptCheckpointError, FormatError: bytes on disk are damaged.
                After that, ``into`` is undefined.
            MissingFilesError: files of the step are missing, or their disk is not mounted.
            OSError: the system refused: no permission, a failing disk.
        """
        if on_corrupt not in get_args(OnCorrupt):
            raise ValueError(f'on_corrupt is "raise" or "previous", not {on_corrupt!r}')
        names = Names(rename=rename)
        names.check()
        number = step_number(step)
        if number is None and drop_newer:
            raise ValueError("drop_newer removes the steps that are newer than the one you name")
        if number is not None and on_corrupt == "previous":
            raise ValueError(
                f'on_corrupt="previous" is for the newest step; step {number} was named, and no '
                "other is loaded in its place: leave out one of the two"
            )
        with self._calls.one("restore", number, on_corrupt, strict, drop_newer, *names.shown()):
            self._side.check_into(into)
            if number is None:
                look = functools.partial(self._steps.candidates, on_corrupt)
            else:
                look = functools.partial(self._steps.named, number)
            found, restored = newest_intact(
                self._side, look, into, on_corrupt, strict=strict, rename=rename
            )
            self._run.follow(found)
            if number is None:
                self._follow_newest(found, restored)
            else:
                there = self._tiers if self._side.is_first else ()
                go_back = functools.partial(self._upkeep.go_back, drop_newer=drop_newer)
                loadable = self._run.loadable
                self._side.each(lambda: go_back(found[0], there, self._config, loadable))
            if self._schedule is not None:
                self._schedule.restart()
            is_here = restored is not None and self._steps.is_here(restored.path)
            if restored is not None and is_here and self._previous is not None:
                self._previous.restored(restored.path)
        return restored

    def _follow_newest(self, found: list[Step], restored: Restored | None) -> None:
        """After a restore of the newest intact step, copy the steps that the tiers lack."""
        lacking = self._steps.lacking(found)
        self._upkeep.find_out(lacking, passed_over(found, restored))
        if restored is None:
            if self._side.is_first:
                self._steps.tell_empty()
            return
        is_here = self._steps.is_here(restored.path)
        may_lack = self._node_local or restored.path in lacking
        if is_here and not restored.dropped and may_lack:
            # A kill may have interrupted its copy, and a node may be new.
            self._copier.add_found(restored.path)
        is_newest = restored.path == found[0].path and not self._steps.passed_over
        self._has_read_newest = is_here and is_newest

    def keep(self, step: int) -> None:
        """Keep a step until `release`: no rule removes or slims it, in ``root`` or on ``tiers``.

        Raises:
            NoCheckpointError: there is no such step in ``root``.
            OSError: the system refused.
        """
        number = numbered(step)
        with self._calls.one("keep", number):
            self._kept.keep(number)

    def release(self, step: int) -> bool:
        """End the protection of `keep`: the rules decide again. Return whether the step was kept.

        Raises:
            NoCheckpointError: there is no such step in ``root``, and none was kept.
            OSError: the system refused.
        """
        number = numbered(step)
        with self._calls.one("release", number):
            return self._kept.release(number)

    def _prepare(self, step: int) -> tuple[str, Base | None]:
        """Finish a removal that a kill has interrupted; return where to save a step, and its base.

        Removes only once the newest step has been read and is intact: otherwise an older one may be
        the last that can be resumed. Before the first save, locks the run against other managers.
        """
        if not self._owns_run:
            self._side.each(self._lock.take if self._side.leads else lambda: None)
            self._owns_run = True
        if self._has_read_newest:
            self._has_read_newest = False
            self._upkeep.clear()
        self._upkeep.make_room()
        previous = self._previous

        def place() -> tuple[str, Base | None]:
            self._lock.check()
            return self._run.path_of(step), None if previous is None else previous.base()

        return self._side.first(place)
