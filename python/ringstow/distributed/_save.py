"""Save a state that is distributed over the ranks of a group.

Each rank derives from its own tensors what it writes. The ranks synchronize three times: before
they write, after all have written, and after the first rank has committed.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ringstow import _native
from ringstow._core import _formatting, _policies
from ringstow._core._arguments import StrPath, absolute, names_of_parts, step_number
from ringstow._core._config import Config, given
from ringstow._core._dispatch_modes import real_tensors
from ringstow._core._errors import InvalidStateError, SaveCancelledError, torn
from ringstow._core._metrics import metrics_of
from ringstow._core._policies import Nodes
from ringstow._ranks import _giving_up
from ringstow._ranks._group import Group, group_of
from ringstow._ranks._team import sendable
from ringstow._reports import _done_callbacks
from ringstow._reports._io_reports import SaveReport
from ringstow._saving import _guard, _jobs, _tier_copies
from ringstow._saving._base import Base, native
from ringstow._saving._guard import Staging
from ringstow._saving._save_future import SaveHandle
from ringstow._state.objects._state_dicts import Parts
from ringstow.distributed import _nodes, _write_plan
from ringstow.distributed._commit import Apart, Asked, Directory, Shared, Written
from ringstow.distributed._handle import OwnPart
from ringstow.distributed._rank_state import State, encode

if TYPE_CHECKING:
    import torch.distributed as dist

    from ringstow._saving._tier_copies import Promoter


class _Begun(NamedTuple):
    """A rank's state before the ranks first synchronize."""

    asked: Asked
    state: State | None
    error: BaseException | None
    is_copied: bool
    """Whether the call may return."""
    is_whole: bool = False
    """Whether all tensors were copied at the call, so that they may be changed at once."""
    promoter: Promoter | None = None
    """The copier of the checkpoint to tiers; None except on the first rank."""


def save(
    state_dict: dict[Any, Any],
    path: StrPath,
    *,
    group: dist.ProcessGroup | None = None,
    step: int | None = None,
    metrics: Mapping[str, Any] | None = None,
    droppable: Iterable[str] = (),
    base: StrPath | Base | None = None,
    nodes: Nodes | None = None,
    config: Config | None = None,
    allow_pickle: bool = False,
) -> SaveReport:
    """Save a state dict of all ranks, and return once the checkpoint is durable.

    Call it on every rank of the group, with each rank's own state dict: DTensors of any mesh,
    FSDP1's ShardedTensors, other tensors, and values. No rank plans for the others. Replicated
    tensors are split among their ranks: each writes a part.

    Tensors that are not sharded, and values, are assumed to be equal on all ranks that have them:
    the first rank's is saved. If small ones differ, a warning names them once. Wrap values that
    differ between ranks in `PerRank`. A key that only some ranks have is saved, too.

    Args:
        state_dict: this rank's state dict.
        path: the checkpoint's directory, which all ranks see.
        group: the ranks; None means all.
        step: the training step; None takes it from the directory's name.
        metrics: numbers by name to store with the step; the first rank's are used.
        droppable: names of parts that `ringstow.slim` can drop later, the same on all ranks; some
            rank must have each.
        base: an earlier checkpoint whose unchanged files are linked, the same on all ranks; see
            `ringstow.save`. Each rank links files whose tensors it has; another number of ranks may
            have saved them.
        nodes: ``ringstow.Nodes()`` if the path is on each node's own disk, where other nodes cannot
            read it. Each node keeps the files of its own ranks, and a load fetches what a rank
            needs from other nodes. docs/distributed.md says what is lost with a node. None means
            that all ranks see the path.
        config: the settings; None means the defaults.
        allow_pickle: pickle values of other types; loading them can run any code.

    Returns:
        The report of this rank: bytes written and seconds taken. The first rank then copies the
        checkpoint to ``Config.tiers`` in the background; `ringstow.wait_promoted` waits for that.

    Raises:
        InvalidStateError: an error of `ringstow.save`; or the ranks make different calls, or have a
            tensor in different shapes; or there is no process group. UnsupportedError: an error of
            `ringstow.save`; or a DTensor of partial sums.
        Error: another rank failed; names it. All ranks fail, and nothing is committed.
        BusyError, TornSaveError, NotDurableError, OSError: an error of `ringstow.save`.
    """
    ranks = group_of(group)
    hold = _guard.Hold()
    with ranks.turn.held(), hold.waited.here(), real_tensors(), hold:
        hold.begin(may_wait=False)
        asked = (state_dict, path, step, metrics, droppable, base, nodes, config)
        begun = _begun(ranks, asked, hold, None, allow_pickle=allow_pickle)
        job = _Save(ranks, begun, hold)
        report = job.run()
    if begun.promoter is not None:
        begun.promoter.add(begun.asked.path, is_new=True)
    report = dataclasses.replace(report, blocked_seconds=hold.waited.seconds())
    return _told(begun.asked, ranks, report)


def save_async(
    state_dict: dict[Any, Any],
    path: StrPath,
    *,
    group: dist.ProcessGroup | None = None,
    step: int | None = None,
    metrics: Mapping[str, Any] | None = None,
    droppable: Iterable[str] = (),
    base: StrPath | Base | None = None,
    nodes: Nodes | None = None,
    config: Config | None = None,
    allow_pickle: bool = False,
    staging: Staging = "guard",
) -> SaveHandle:
    """Start `save` in the background, and return.

    As with `ringstow.save_async` the training loop needs no change: the next ``step()`` of any
    torch optimizer waits until this rank's tensors have been copied. A second save waits until the
    previous one has ended on this rank.

    Args:
        state_dict: this rank's state dict.
        path: the checkpoint's directory, which all ranks see, or each node's own with ``nodes``.
        group: the ranks; None means all.
        step: the training step; None takes it from the directory's name.
        metrics: numbers by name to store with the step; the first rank's are used.
        droppable: names of parts that `ringstow.slim` can drop later.
        base: an earlier checkpoint whose unchanged files are linked; see `save`.
        nodes: ``ringstow.Nodes()`` if the path is on each node's own disk; see `save`.
        config: the settings; None means the defaults.
        allow_pickle: pickle values of other types; loading them can run any code.
        staging: how to keep the values of the call: ``"guard"``, ``"snapshot"`` or ``"wait"``; see
            `ringstow.save_async`.

    Returns:
        The handle. Its ``result()`` raises what `save` raises, on all ranks.

    Raises:
        InvalidStateError, UnsupportedError: this rank's state can't be saved; see `save`. The
            handles of the other ranks raise it, too.
    """
    ranks = group_of(group)
    hold = _guard.Hold()
    ranks.turn.acquire()  # released by the thread that saves
    try:
        with hold.waited.here(), real_tensors():
            may_return = hold.begin()
            asked = (state_dict, path, step, metrics, droppable, base, nodes, config)
            begun = _begun(ranks, asked, hold, staging, allow_pickle=allow_pickle)
        job = _Save(ranks, begun, hold)
        handle = job.start()
    except BaseException:
        hold.end()
        ranks.turn.release()
        raise
    ranks.turn.hand_over()
    if begun.error is not None:
        handle.exception()
        raise begun.error
    if not begun.is_whole and not (may_return and begun.is_copied):
        with hold.waited.here():
            job.part.copied.exception()
    return handle


def _begun(
    ranks: Group,
    arguments: tuple[Any, ...],
    hold: _guard.Hold,
    staging: Staging | None,
    *,
    allow_pickle: bool,
) -> _Begun:
    """Check the arguments and encode the state; return a failure instead of raising it.

    Staging is None for a save that does not return before its end.
    """
    state_dict, path, step, metrics, droppable, base, nodes, config = arguments
    node_local = nodes is not None
    asked = Asked(str(path), None, {}, [], None, node_local, "")
    try:
        parts = Parts(state_dict)  # first: FSDP1's ranks communicate, even for invalid arguments
        config = given(config)
        asked = Asked(
            absolute(path),
            step_number(step),
            metrics_of(metrics),
            names_of_parts(droppable, "droppable"),
            native(base),
            node_local,
            config.to_json(background=staging is not None),
        )
        hold.path = asked.path
        if nodes is not None:
            _refuse_replicas(nodes)
            _nodes.refuse(asked.config, base=base)
            _refuse_tiers(config)
        promoter = _tier_copies.of_ranks(asked.path, config, is_first=ranks.is_first)
        _jobs.log_unreported()
        if staging is not None:
            _guard.check_staging(staging, is_for_ranks=True)
            hold.let_steps_end()
        state = encode(state_dict, parts, ranks.rank, allow_pickle=allow_pickle)
        if staging == "snapshot":  # the save reads the copies, not the tensors
            state.watched.clear()
        room = config.staging_bytes
        is_copied = _guard.stage(state.tensors, staging or "wait", asked.path, hold, room)
        is_whole = is_copied and staging == "snapshot"
        if is_whole:  # nothing waits for the writes, and they need no more memory
            asked = asked._replace(config=config.to_json())
        return _Begun(asked, state, None, is_copied, is_whole, promoter)
    except BaseException as error:  # Ctrl-C, too: the other ranks must not wait for this one
        return _Begun(asked, None, error, True)


def _refuse_replicas(nodes: Nodes) -> None:
    if _policies.nodes(nodes) != Nodes():
        raise InvalidStateError(
            f"{nodes} is for a ringstow.CheckpointManager, which copies to other nodes: a save by "
            "itself takes Nodes()"
        )


def _refuse_tiers(config: Config) -> None:
    if config.tiers:
        raise InvalidStateError(
            "Config.tiers without a manager is for ranks that all see the path. Of nodes that "
            "share none, CheckpointManager(nodes=Nodes(), tiers=[...]) copies"
        )


def _told(asked: Asked, ranks: Group, report: SaveReport) -> SaveReport:
    report = dataclasses.replace(report, step=asked.step)
    _done_callbacks.tell(
        _done_callbacks.Outcome(
            kind="save",
            path=asked.path,
            step=asked.step,
            metrics=asked.metrics,
            report=report,
        )
    )
    _done_callbacks.log(_formatting.of_save(report, f"rank {ranks.rank}"))
    return report


class _Save:
    """One save of this rank."""

    def __init__(self, group: Group, begun: _Begun, hold: _guard.Hold) -> None:
        self._group = group
        self._asked, self._state, self._error, _, self._is_whole, self._promoter = begun
        self._hold = hold
        kind = Apart if self._asked.node_local else Shared
        self._directory: Directory = kind(group, self._asked)
        self.part = OwnPart()

    def start(self) -> SaveHandle:
        """Run in a thread of its own."""
        copies = None if self._promoter is None else self._promoter.expected()
        handle = SaveHandle(self._asked.path, self.part, self._hold)
        handle._copies = copies

        def run() -> None:
            try:
                try:
                    report = self.run()
                finally:
                    self._group.turn.release()
                if self._promoter is not None:
                    self._promoter.add(self._asked.path, is_new=True, ended=copies)
                waited = self._hold.waited.seconds()
                report = dataclasses.replace(report, blocked_seconds=waited)
                handle.set_result(_told(self._asked, self._group, report))
            except BaseException as error:
                if not isinstance(error, SaveCancelledError):  # another rank has cancelled the save
                    handle._note_failure(error)
                # Drop this frame, which refers to the handle: it could not be freed.
                trace = error.__traceback__
                handle.set_exception(error.with_traceback(trace and trace.tb_next))

        # The call ends before the ranks synchronize; from now on a step of its thread waits, too.
        self._hold.follow(self.part.copied.done)
        if self._is_whole:
            self._let_go(None)
        threading.Thread(target=run, name="ringstow-ranks", daemon=False).start()
        return handle

    def run(self) -> SaveReport:
        """Save; on failure of one rank, fail on all."""
        self._group.doing = f"the save to {self._asked.path}"
        try:
            with _done_callbacks.failing("save", self._asked.path, self._asked.step):
                return self._run()
        except BaseException as error:
            self._let_go(error)
            self._directory.abandon()
            raise
        finally:
            self._state = None  # drop its copies before the result is set

    def _run(self) -> SaveReport:
        state, dealt = self._meet()
        written, report = self._write(state, dealt)
        own = written.error
        said = written if own is None else Written(sendable(own))
        try:
            self._directory.commit(said)
        except Exception:
            if own is None or isinstance(own, _giving_up.StoppedError):
                raise
            raise own from None
        assert report is not None
        return report

    def _meet(self) -> tuple[State, _write_plan.Deal]:
        """Return this rank's share of the state."""
        own: _write_plan.Own | None = None
        error = self._error
        try:
            own = self._look() if error is None else None
        except BaseException as caught:  # Ctrl-C, too: the others must not wait for this rank
            error = caught
        call = self._asked.call()
        all_said = _write_plan.agreed(self._group, call, None if own is None else own.said, error)
        assert own is not None
        assert self._state is not None
        self._directory.begin_together()
        ranks = [one for one in all_said if one is not None]  # all ranks: none has failed
        had = {part for one in ranks for part in one.parts}
        if missing := [part for part in self._asked.apart if part not in had]:
            raise InvalidStateError(
                f"droppable: no rank's state has anything named {missing[0]!r}, or below it"
            )
        is_apart = self._asked.node_local
        dealt = _write_plan.deal(self._group, self._state, own, ranks, is_apart=is_apart)
        return self._state, dealt

    def _look(self) -> _write_plan.Own:
        """Compare this rank's state with the others', and begin."""
        assert self._state is not None
        own = _write_plan.looked_at(self._state, self._asked.apart)
        self._directory.begin_alone()
        return own

    def _write(self, state: State, dealt: _write_plan.Deal) -> tuple[Written, SaveReport | None]:
        """Write this rank's share."""
        try:
            with _giving_up.telling(self._asked.path, self._group.rank):
                receipt, report = self._write_share(state)
        except BaseException as error:  # Ctrl-C, too: the others must not wait for this rank
            return Written(error), None
        if self._group.is_first or dealt.sends_tree:
            return Written(None, receipt, state.tree, dealt.names, state.own), report
        names = [name for tree in state.own.values() for name in _native.outline(tree)[2]]
        return Written(None, receipt, None, names, state.own), report

    def _write_share(self, state: State) -> tuple[bytes, SaveReport]:
        path = self._asked.path
        job = _native.start_write_dealt(
            state.tensors,
            path,
            self._group.rank,
            self._asked.config,
            apart=self._asked.apart,
            base=self._asked.base,
        )
        self.part.begins(job)
        self._hold.follow(lambda: job.staged() or job.done())
        try:
            _giving_up.wait_staged(job, path, self._group.rank)
            if job.staged():
                if changed := state.changed():
                    raise torn(path, changed)
                self._let_go(None)
            _giving_up.wait(job, path, self._group.rank)
        except BaseException:  # Ctrl-C
            _jobs.abandon(job)
            raise
        report = SaveReport.from_json(job.result())
        return job.receipt(), report

    def _let_go(self, error: BaseException | None) -> None:
        """Allow changes to this rank's tensors."""
        copied = self.part.copied
        if copied.done():
            return
        if error is not None:
            self._hold.wait_copied()
        self._hold.end()
        if error is None:
            copied.set_result(None)
        else:
            copied.set_exception(sendable(error))
