"""The storage that torch.distributed.checkpoint saves to.

Each rank writes its own shards, and `write_data` returns when they are durable. The coordinator's
`finish` is the commit. Only the planner knows what is in a state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ringstow import _native
from ringstow._core import _formatting
from ringstow._core._arguments import StrPath, names_of_parts
from ringstow._core._config import Config
from ringstow._core._dispatch_modes import real_tensors
from ringstow._core._errors import InvalidStateError, UnsupportedError
from ringstow._core._gc_pause import collector_paused
from ringstow._ranks import _concurrent_saves, _giving_up
from ringstow._reports import _done_callbacks
from ringstow._reports._blocked_time import Waited
from ringstow._reports._io_reports import SaveReport
from ringstow._saving import _jobs, _tier_copies
from ringstow._saving._base import Base, native
from ringstow._state.objects._quantized_layers import Codes
from ringstow._state.tree._cycles import naming_cycles
from ringstow._state.tree._select import listed
from ringstow._state.tree._walk import flat_name, leaves
from ringstow.dcp import (
    _containers,
    _independent_ranks,
    _mark,
    _metadata,
    _paths,
    _private,
    _resolved_items,
    _sent_metadata,
    _stand_ins,
)
from ringstow.dcp._checkpoint_id import Destination
from ringstow.dcp._rank_errors import picklable
from ringstow.dcp._saves_in_progress import Save, Saves, end_here
from ringstow.dcp._snapshot import Lease, Snapshot
from ringstow.dcp._step_note import Notes
from ringstow.dcp._streaming_stager import StagingFuture, StreamingStager

_log = logging.getLogger("ringstow")

RECEIPT = "__ringstow__.receipt"

# A forked child keeps its parent's objects here forever: freeing them would unpin the memory.
_inherited: list[object] = []


class _Here(threading.local):
    """One thread's save with a writer."""

    save: Save | None = None
    stream: StagingFuture | None = None
    waited: Waited | None = None


class StorageWriter(storage.StorageWriter, AsyncStager):
    """Saves states of torch.distributed.checkpoint as ringstow checkpoints.

    ::

        writer = ringstow.dcp.StorageWriter()
        writer.note(step=1000, metrics={"loss": 0.25})      # optional
        dcp.save(state_dict, checkpoint_id="run/step-1000", storage_writer=writer)

    The checkpoint appears complete or not at all, and an earlier one at the path stays until the
    commit. If a rank fails, the save fails on every rank; the writer can be used again right away.

    Keep one writer for the whole training: it reuses its staging memory and its snapshot's. Its
    saves run one after the other; a background save ends with its last collective. Let ``dcp.save``
    return before another thread saves: DCP does not tell the writer when its last collectives end,
    or that it failed between two hooks. So another thread waits only until the last hook on its
    rank, and at most 10 s between two hooks.

    ``dcp.async_save`` also takes it as the stager: `stage` takes a snapshot of the state, and
    training continues once the snapshot is complete. `stager` needs no second copy of the state.

    Values other than tensors load equal by default. All ranks refuse a save of other types, and the
    error says what to save instead: docs/values.md lists the types.

    It can be pickled for ``AsyncCheckpointerType.PROCESS``, without its memory and its running
    saves.
    """

    # The snapshot is complete when stage() returns.
    _synchronize_after_execute = False

    # Whether another process sent it here, as a pickle.
    _is_copy = False

    # Whether a save without a path uses the previous save's path.
    _keeps_id = False

    @property
    def _keeps_snapshot(self) -> bool:
        """Whether the next snapshot reuses the memory of the previous one."""
        return True

    def __init__(
        self,
        path: StrPath | None = None,
        config: Config | None = None,
        *,
        allow_pickle: bool = False,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
        droppable: Iterable[str] = (),
        base: StrPath | Base | None = None,
    ) -> None:
        """Make a writer.

        Args:
            path: the checkpoint's directory, created if missing; None if each save has a
                ``checkpoint_id``.
            config: the configuration; None means the defaults.
            allow_pickle: save objects that a load refuses by default, as torch.save pickles them.
                Loading them also needs ``StorageReader(allow_pickle=True)``.
            step: the training step, for a writer of one save; see `note`.
            metrics: numbers by name, for a writer of one save; see `note`.
            droppable: names of parts whose tensors get files of their own on every rank, so that
                `ringstow.slim` can drop them later: ``["optimizer"]``. A name includes all names
                below it, such as ``optimizer.state.0.exp_avg``. Every rank must give the same
                names, and every state must have each name, or the save fails on all ranks.
            base: an earlier checkpoint: each rank links its files whose tensors it has and have not
                changed; see `ringstow.save`. `set_base` sets another one.

        Raises:
            InvalidStateError: ``path`` is not a path in the file system, or a metric is not a
                number, or a name in ``droppable`` is invalid.
            TypeError, ValueError: an invalid step or metric; or ``droppable`` is not a list of
                names.
        """
        self._apart = names_of_parts(droppable, "droppable")
        self._base = native(base)
        self._allow_pickle = allow_pickle
        own = None if path is None else _paths.directory(path)
        self._destination = Destination(own, keeps_id=self._keeps_id)
        self._config = config or Config()
        self._notes = Notes()
        self._notes.give(step, metrics)
        self._start()

    def _start(self) -> None:
        """Set up the state of this process, which is not pickled."""
        end_here()
        self._pid = os.getpid()
        self._here = _Here()
        self._saves = Saves()
        self._snapshot = Snapshot()
        self.save_id = _paths.fresh_id()
        """The save's id, for torch's StorageMeta; after the commit, loads have the same id."""
        self.report: SaveReport | None = None
        """Report of this rank's last successful save."""
        weakref.finalize(self, self._saves.abandon)

    def _adopt(self) -> None:
        """Reset in a forked child: memory, saves and locks belong to the parent."""
        if self._pid != os.getpid():
            _inherited.append((self._snapshot, self._here))
            self._start()

    def __getstate__(self) -> dict[str, Any]:
        future = self._here.stream
        if future is not None and not future.is_over():
            _refuse_elsewhere(future)
            future.is_elsewhere = True
        return {
            name: vars(self)[name]
            for name in ("_destination", "_notes", "_config", "_allow_pickle", "_apart", "_base")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._is_copy = True
        self._start()

    # The path of saves.

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Set the directory of the next save only; None keeps it.

        Raises:
            InvalidStateError: the id is not a path in the file system.
        """
        self._adopt()
        end_here()
        if checkpoint_id is not None:
            self._destination.give(_paths.directory(checkpoint_id))
        self.save_id = _paths.fresh_id()

    def note(self, *, step: int | None = None, metrics: Mapping[str, Any] | None = None) -> None:
        """Set the step and metrics of the next save only, even if it fails.

        Call it before each ``dcp.save`` or ``dcp.async_save``, in the same thread. The
        coordinator's values are used; without collectives each rank stores its own. A second call
        before the save replaces the first.

        Args:
            step: the training step; None takes it from the directory's name.
            metrics: numbers by name, such as ``{"loss": 0.25}``; see `ringstow.save`.

        Raises:
            InvalidStateError: a metric is not a number.
            TypeError, ValueError: ``step`` is not an integer from 0 to 2**64 - 1.
        """
        self._adopt()
        self._notes.give(step, metrics)

    def set_droppable(self, parts: Iterable[str]) -> None:
        """Set which parts `slim` can drop from the next saves; see the argument ``droppable``.

        Raises:
            InvalidStateError: a name is invalid.
            TypeError, ValueError: not a list of names.
        """
        self._adopt()
        self._apart = names_of_parts(parts, "droppable")

    def set_base(self, base: StrPath | Base | None) -> None:
        """Set the earlier checkpoint whose files the next saves link; see the argument ``base``.

        Raises:
            InvalidStateError: the path is a URL.
            TypeError, ValueError: the base is not a path.
        """
        self._adopt()
        self._base = native(base)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Return whether an id is a path in the file system, not a URL."""
        return _paths.is_path(checkpoint_id)

    @property
    def checkpoint_id(self) -> str | None:
        """The directory of the next save, or of the last one; None if none was given yet."""
        return self._destination.path()

    def storage_meta(self) -> StorageMeta | None:
        """Return the directory and the save's id, for DCP's metadata."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    # The methods of a save, in the order of the calls.

    @picklable
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save, once this writer's earlier one has ended.

        Args:
            is_coordinator: whether this rank commits.
            args: ignored.
            kwargs: torch's ``rank`` and ``use_collectives``. Without collectives each rank saves
                a checkpoint of its own, in ``rank00003`` below the path, with its own shards only.

        Raises:
            InvalidStateError: neither the save nor the writer has a path, or the save would replace
                the previous one.
            UnsupportedError: the save has no collectives, and the writer has ``droppable`` or a
                base.
        """
        self._adopt()
        if self._apart and not kwargs.get("use_collectives", True):
            raise UnsupportedError(
                "StorageWriter(droppable=...) needs collectives: `slim` does not change a "
                "checkpoint that ranks save each by itself (use_collectives=False). Leave out "
                "droppable="
            )
        if self._base is not None and not kwargs.get("use_collectives", True):
            raise UnsupportedError(
                "StorageWriter(base=...) needs collectives: checkpoints that ranks save each by "
                "itself (use_collectives=False) share no files. Leave out base="
            )
        if self._config.tiers and not kwargs.get("use_collectives", True):
            raise UnsupportedError(
                "Config.tiers needs collectives: what ranks save each by itself "
                "(use_collectives=False) is not copied. Give a config with tiers=[]"
            )
        if self._config.tiers and self._is_copy:
            raise UnsupportedError(
                "Config.tiers is not for async_save in a process "
                "(AsyncCheckpointerType.PROCESS), which torch ends before its copies: save in a "
                "thread, or give a config with tiers=[] and copy by ringstow.promote"
            )
        path, note = self._destination.take(), self._notes.take()
        save = Save(path, note)
        self._saves.begin(save)
        save.rank = kwargs.get("rank")
        save.is_alone = not kwargs.get("use_collectives", True)
        save.commits = is_coordinator or save.is_alone
        save.promoter = _tier_copies.of_ranks(path, self._config, is_first=is_coordinator)
        if save.is_alone:
            rank = save.own_rank()
            save.path = _paths.of_rank(path, rank)
            save.part_of = _independent_ranks.part_of(save.path, rank)
            save.rank = 0
        save.stream, self._here.stream = self._here.stream, None
        save.waited, self._here.waited = self._here.waited, None
        save.planning = _stand_ins.Planning(_private.planner_of_save())
        self._here.save = save

    def _current(self) -> Save:
        """Return the save that this thread began, or the latest if it began none.

        Raises:
            InvalidStateError: no save was begun.
        """
        save = self._here.save or self._saves.latest
        if save is None:
            raise InvalidStateError(
                "the writer was called without set_up_storage_writer() first: save by dcp.save or "
                "dcp.async_save"
            )
        return save

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is; it has been made."""
        self._current().planning.end()
        return plan

    @picklable
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Lock the directory, on the coordinator.

        Raises:
            BusyError: another save into the directory is in progress.
            InvalidStateError: it holds safetensors files of another program; or no rank has a part
                named in ``droppable``.
            OSError: the directory can't be made or locked.
        """
        save = self._current()
        with save.hook():
            _resolved_items.check_parts(plans, self._apart)
            save.lock(len(plans), self._config.to_json())
        if save.rank is not None:
            return plans
        # torch 2.6 does not pass a writer its rank in the process group.
        return [dataclasses.replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    @picklable
    @real_tensors()
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part, and return when it is durable. Nothing is committed.

        Ctrl-C ends it. Do not change the tensors before it returns, or with `stager`, before they
        are staged.

        Returns:
            A completed future with one result for all items: a receipt for `finish`.

        Raises:
            UnsupportedError: items of a kind that can't be saved; names them all.
                InvalidStateError: items that can't be saved; names them all. Without collectives,
                also shards that cannot be identified as parts of one save.
            OSError: the system refused: no space, no permission, a failing disk.
        """
        save = self._current()
        stream = None if save.stream is None or save.stream.is_over() else save.stream
        if save.rank is None and type(plan.storage_data) is int:
            save.rank = plan.storage_data
        try:
            # Copies from GPUs wait for the current streams of this thread.
            fence = contextlib.nullcontext() if stream is None else stream.fence.passed()
            with _done_callbacks.failing("save", save.path), save.hook(is_last=not save.commits):
                with collector_paused(), fence:
                    if save.is_alone and save.part_of is None:
                        _refuse_shards(plan)
                    items = _resolved_items.resolve(
                        plan, planner, alone=save.is_alone, allow_pickle=self._allow_pickle
                    )
                    state = _private.saved_state()
                    found = _containers.containers_of(state, with_metadata=save.commits)
                with _giving_up.telling(save.path, save.own_rank()):
                    receipt, nbytes = self._write(save, items, stream)
        except BaseException as error:
            if stream is not None:
                stream.fail(error)
            raise
        done: Future[list[WriteResult]] = Future()
        said = (receipt, found, items.trees)
        done.set_result([WriteResult(MetadataIndex(RECEIPT), nbytes, said)])
        return done

    @picklable
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint, on the coordinator.

        Raises:
            InvalidStateError: results of a rank, or regions of a tensor, are missing.
            NotDurableError: the checkpoint is committed, but may not survive a crash.
            OSError: the system refused.
        """
        said = [r.storage_data for rank in results for r in rank if r.index.fqn == RECEIPT]
        receipts = [receipt for receipt, *_ in said]
        trees = {name: tree for *_, trees in said for name, tree in trees.items()}
        names = [name for name in metadata.state_dict_metadata if name not in trees]
        save = self._current()
        with _done_callbacks.failing("save", save.path), save.hook(is_last=True):
            with collector_paused():
                containers = _containers.joined(found for _, found, _ in said)
                notes = _metadata.Notes(containers, trees)
                tree = _sent_metadata.computed(metadata, _metadata.tree_of, notes)
            done = save.commit(receipts, tree, names)
            _log.debug("committed %s: %s", save.path, done)
            self.save_id = _paths.committed_id(save.path) or self.save_id
            # Torch broadcasts the metadata to all ranks: keep it small.
            metadata.storage_data = None
            metadata.storage_meta = self.storage_meta()
            _private.set_version(metadata)
            _mark.write(save.path)
            _concurrent_saves.saved(save.path)
            if save.promoter is not None:
                save.promoter.add(save.path, is_new=True)
            # A method of a derived class may pickle the metadata, before DCP does.
            if not save.is_alone and type(self).finish is _FINISH:
                _sent_metadata.announce(metadata)

    def _write(
        self, save: Save, items: _resolved_items.Items, stream: StagingFuture | None
    ) -> tuple[bytes, int]:
        since = time.perf_counter()
        lease = self._snapshot.lease_of(memory.address for _, memory, _, _ in items.specs)
        reading = None if lease is None else lease.read()
        job: _native.SaveJob | None = None
        try:  # Ctrl-C must find the job to end it
            job = _native.start_write(
                items.specs,
                save.path,
                save.own_rank(),
                self._config.to_json(background=stream is not None),
                None if stream is None else stream.watched,
                self._apart,
                self._base,
            )
            _giving_up.wait_staged(job, save.path, save.own_rank())
            if stream is not None and job.staged():
                stream.staged()
            if job.staged():
                self._end(lease, reading)
            _giving_up.wait(job, save.path, save.own_rank())
        except BaseException:  # Ctrl-C
            if job is not None:
                _jobs.abandon(job)
            raise
        finally:
            self._end(lease, reading)
        report = SaveReport.from_json(job.result())
        blocked = self._blocked(save, since)
        self.report = report = dataclasses.replace(report, blocked_seconds=blocked)
        _done_callbacks.tell(_done_callbacks.Outcome(kind="save", path=save.path, report=report))
        _done_callbacks.log_apart(_formatting.of_save(report, f"rank {save.own_rank()}"))
        return job.receipt(), items.nbytes

    def _blocked(self, save: Save, since: float) -> float | None:
        """Return how long a save, which began to write at ``began``, has blocked training."""
        if save.waited is not None:
            return save.waited.seconds()
        is_main = threading.current_thread() is threading.main_thread()
        # Otherwise training may continue, in the process that sent this writer or in another
        # thread.
        return time.perf_counter() - since if is_main and not self._is_copy else None

    def _end(self, lease: Lease | None, reading: object) -> None:
        if lease is not None:
            if not self._keeps_snapshot and not lease.is_over():
                self._snapshot.drop()  # before the next one can begin
            lease.end(reading)

    # Background saves.

    @real_tensors()
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a snapshot of a state dict, in host memory.

        Tensors on GPUs are copied as the work queued so far on this thread's current streams leaves
        them. The memory is registered with CUDA once, so that the copies are fast.

        The first call allocates memory as large as the state, and later calls reuse it: a call
        waits until this writer's previous background save has read its snapshot.

        Args:
            state_dict: nested dicts, lists and tuples with tensors of any kind that DCP takes, on
                any device. Tensors that share memory share it in the snapshot. Other values are
                deep-copied.

        Raises:
            InvalidStateError: a value can't be copied, or codes lack their scales; names its key.
            UnsupportedError: a CUDA graph is being captured.
        """
        waited = Waited()
        codes = Codes()
        if codes.is_on:  # another process may write the snapshot, and it has no layers to ask
            with naming_cycles(state_dict):
                codes.check_tensors({flat_name(at): one for at, one in leaves(state_dict)})
        with waited.here():
            # First, since in a forked child it makes a new snapshot.
            claim = self._begin_staging(waited)
            return self._snapshot.take(state_dict, claim)

    def synchronize_staging(self) -> None:
        """Do nothing: the snapshot is complete when `stage` returns."""

    def stager(self) -> AsyncStager:
        """Return a stager for this writer that copies no tensor.

        ::

            response = dcp.async_save(state, storage_writer=writer, async_stager=writer.stager())
            response.staging_completion.result()   # from here on the tensors may be changed
            response.upload_completion.result()    # the checkpoint is committed

        Needs a torch whose ``async_save`` has ``async_stager`` (2.11 has it, 2.6 does not).
        """
        return StreamingStager(self._begin_staging)

    def close(self) -> None:
        """Free the memory of unused snapshots, and clean up after a failed save.

        Do not call it during a save. The writer can be used again.
        """
        self._adopt()
        end_here()
        self._snapshot.drop()
        _native.release_memory()
        self._saves.abandon()

    def _begin_staging(
        self, waited: Waited | None = None
    ) -> Callable[[StagingFuture | None], None]:
        """Return the function that the staged save's thread calls, with its stream if it has one.

        DCP does not pass to that thread this thread's path, the stream, or how long staging has
        ``waited``.
        """
        self._adopt()
        end_here()
        destination, notes, here = self._destination, self._notes, self._here
        given, note = destination.hand_over(), notes.hand_over()

        def claim(stream: StagingFuture | None) -> None:
            destination.receive(given)
            notes.receive(note)
            here.stream = stream
            here.waited = waited if stream is None else stream.waited

        return claim


def _refuse_elsewhere(future: StagingFuture) -> None:
    """Refuse to let another process stream out of this one's GPUs.

    It could map their memory, but this process would not know when it has read the last byte, and
    it would not know what this process's streams still write.
    """
    if not future.fence:
        return
    error = UnsupportedError(
        "the state is on a GPU and cannot be streamed by another process: leave out async_stager=, "
        "so that the writer takes a snapshot, or save with AsyncCheckpointerType.THREAD"
    )
    future.fail(error)
    raise error


def _refuse_shards(plan: SavePlan) -> None:
    """Refuse to save shards that could not be identified as parts of one save."""
    names = _resolved_items.sharded(plan)
    if names:
        raise InvalidStateError(
            f"{listed('sharded tensors', names)}: with use_collectives=False a rank's shards can "
            "be saved only by ranks of the default process group, with a store that answers. Save "
            "without process_group=, or with collectives"
        )


_FINISH = StorageWriter.finish
