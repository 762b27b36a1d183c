"""The storage that torch.distributed.checkpoint loads from.

A rank reads only what its own tensors need, directly into their memory if they are on the CPU or a
CUDA device, and verifies every checksum chunk of it. The manifest is JSON, not a pickle.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import logging
import os
from collections.abc import Container
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ringstow import _native
from ringstow._core import _formatting
from ringstow._core._arguments import StrPath
from ringstow._core._config import Config
from ringstow._core._dispatch_modes import real_tensors
from ringstow._core._errors import (
    IncompleteCheckpointError,
    InvalidStateError,
    KeyMismatchError,
    NotCommittedError,
    ReplacedCheckpointError,
)
from ringstow._core._gc_pause import collector_paused
from ringstow._ranks import _shared_fs_lag
from ringstow._ranks._group import Group, group_of
from ringstow._ranks._shared_reads import SharedLoad
from ringstow._reading import _shard_boxes
from ringstow._reading._resolve import copies_of
from ringstow._reports import _done_callbacks
from ringstow._reports._io_reports import LoadReport
from ringstow._saving import _tier_copies
from ringstow._state.tensors import _torch
from ringstow._state.tensors._memory import in_elements
from ringstow._state.tree import _build, _select
from ringstow._state.tree._walk import COMPOSITE, Box
from ringstow.dcp import (
    _broadcast,
    _objects,
    _paths,
    _plan_transfer,
    _private,
    _targets,
    _true_paths,
)
from ringstow.dcp import _composites as _wrappers
from ringstow.dcp._broadcast import Broadcast
from ringstow.dcp._metadata import Contents, Entry, Shape, note_dropped
from ringstow.dcp._missing_checkpoint import Absence
from ringstow.dcp._objects import Blob
from ringstow.dcp._rank_errors import picklable
from ringstow.dcp._targets import Fill

Target = Fill | Blob

_log = logging.getLogger("ringstow")


class StorageReader(storage.StorageReader):
    """Loads a ringstow checkpoint by torch.distributed.checkpoint, on any number of ranks.

    ::

        dcp.load(state_dict, checkpoint_id="step-1000", storage_reader=ringstow.dcp.StorageReader())

    It reads checkpoints of `StorageWriter` and ``ringstow.save``, and plain directories of
    safetensors files, such as those of torch's HuggingFaceStorageWriter.

    Objects (all values but tensors) are pickles, or packed by ringstow. DCP's planner unpickles
    them without restriction, so each pickle first goes through ``torch.load(weights_only=True)``.
    A pickle that torch refuses is an error, unless ``allow_pickle`` is given. Nothing else here
    unpickles. All objects are checked before any tensor is changed.
    """

    def __init__(
        self,
        path: StrPath | None = None,
        config: Config | None = None,
        *,
        verify: bool = True,
        allow_pickle: bool = False,
        broadcast: Broadcast = None,
    ) -> None:
        """Make a reader.

        Args:
            path: the checkpoint's directory, or its URL in an object store; None if each load gives
                a ``checkpoint_id``.
            config: the configuration; None means the defaults.
            verify: verify every checksum chunk that is read before using any of it.
            allow_pickle: unpickle any object, which can run any code.
            broadcast: the process group in which one rank reads what several need, and sends it to
                them, over a gloo group of ringstow's own. It must be the load's own group; True
                means the default group. Give it on every rank. It has no effect if the ranks load
                independently.

        Raises:
            InvalidStateError: ``path`` is neither a path in the file system nor the URL of a store.
        """
        self._path = None if path is None else _paths.to_read(path)
        self._config = config or Config()
        self._verify = verify
        self._allow_pickle = allow_pickle
        self._broadcast = broadcast
        self._use_collectives = True
        self._checkpoint: _native.Checkpoint | None = None
        self._contents: Contents | None = None
        self.load_id = _paths.fresh_id()
        """The load's id, for torch's StorageMeta."""
        self.report: LoadReport | None = None
        """Report of this rank's last successful load."""

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Set the directory of later loads; None keeps it.

        Raises:
            InvalidStateError: the id is not a path in the file system.
        """
        self._checkpoint = self._contents = None
        if checkpoint_id is not None:
            self._path = _paths.to_read(checkpoint_id)
        self.load_id = _paths.fresh_id()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Return whether an id is a path in the file system, or the URL of an object store."""
        return _paths.is_path(checkpoint_id) or _paths.is_object(checkpoint_id)

    @property
    def checkpoint_id(self) -> str | None:
        """The absolute path of the directory of later loads; None if none was given yet."""
        return self._path

    # The methods of a load, in the order of the calls.

    @picklable
    @collector_paused()
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Open the checkpoint and return its metadata.

        Args:
            args: ignored.
            kwargs: torch's ``rank``, if the checkpoint was saved without collectives: each rank
                then has its own part, in ``rank00003`` below the path.

        Raises:
            IncompleteCheckpointError: the directory holds no committed checkpoint, or not this
                rank's part.
            CorruptCheckpointError: the manifest is damaged.
            FormatError: the manifest is not ringstow's, or of a newer version.
            InvalidStateError: the reader has no path; or torch's own writer has saved over the
                checkpoint.
            OSError: the system refused: no such directory, no permission, a failing disk.
        """
        rank = kwargs.get("rank")
        try:
            path = self._require_path()
            open_it = self._open if rank is None else functools.partial(self._open_part, rank=rank)
            with Absence(path, "all" if rank is None else "rank") as absence:
                contents = _shared_fs_lag.opened(
                    path, lambda: open_it(path), lambda error: self._is_late(error, rank, absence)
                )
            metadata = self._with_ids(contents.metadata(allow_pickle=self._allow_pickle))
            self._tell_dropped(metadata)
            return metadata
        except Exception as error:
            # DCP turns both failures into one AssertionError, which an older torch leaves empty.
            level = logging.ERROR if self._is_meant(rank) else logging.DEBUG
            _log.log(level, "the checkpoint cannot be loaded: %s", error)
            raise

    def _tell_dropped(self, metadata: Metadata) -> None:
        """Log what `slim` has dropped: torch's planner only says that keys are missing."""
        dropped = () if self._checkpoint is None else tuple(self._checkpoint.dropped)
        note_dropped(metadata, dropped)
        if dropped:
            _log.warning("%s: %s", self._path, _select.said_of_slim(dropped))

    def _is_meant(self, rank: int | None) -> bool:
        """Return whether the checkpoint is of the kind that DCP asks for; it tries both kinds."""
        return (rank is not None) == self._has_ranks()

    def _is_late(self, error: Exception, rank: int | None, absence: Absence) -> bool:
        """Return whether this rank may still come to see what other ranks see."""
        if _shared_fs_lag.lacks_files(error):
            return True
        is_absent = isinstance(error, FileNotFoundError | NotCommittedError)
        return is_absent and self._is_meant(rank) and not absence.is_everywhere()

    def _with_ids(self, metadata: Metadata) -> Metadata:
        stamp = None if self._checkpoint is None else self._checkpoint.stamp
        meta = metadata.storage_meta or StorageMeta()
        meta.save_id, meta.load_id = _paths.id_of(stamp), self.load_id
        metadata.storage_meta = meta
        if stamp is not None:
            _private.set_version(metadata)
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Begin a load.

        Args:
            metadata: the result of `read_metadata`.
            is_coordinator: ignored.
            args: ignored.
            kwargs: torch's ``use_collectives`` and ``rank``.

        Raises:
            IncompleteCheckpointError: each rank saved by itself, and a part is missing, or this
                rank's part and rank 0's are of different saves. DCP makes all ranks fail.
            OSError: the system refused.
        """
        self._use_collectives = kwargs.get("use_collectives", True)
        rank = kwargs.get("rank")
        if not self._use_collectives and rank is not None:
            # Not in `read_metadata`, whose errors DCP turns into an AssertionError.
            _native.check_own_share(self._require_path(), rank)
        if self._contents is None:
            self._open(self._require_path())

    @picklable
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan, with a note for the coordinator.

        Raises:
            IncompleteCheckpointError: the checkpoint is the part of a rank that saved by itself,
                and the plan asks for elements that it does not hold; names the tensors.
        """
        self._check_held(plan)
        if not self._broadcast and type(self).prepare_global_plan is _PREPARE:
            _plan_transfer.leave_here(plan.items)  # the coordinator does not read them
        if not self._use_collectives or self._checkpoint is None:
            return plan
        willing = _broadcast.group_of(self._broadcast) is not None
        note = _broadcast.Note(willing, self._checkpoint.stamp)
        return dataclasses.replace(plan, storage_data=note)

    @picklable
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans; if all ranks broadcast, note that in each.

        Raises:
            ReplacedCheckpointError: the ranks have opened different checkpoints, since a save
                replaced the first meanwhile.
            InvalidStateError: the load and the group to broadcast in have different numbers of
                ranks.
        """
        given = (plan.storage_data for plan in plans)
        notes = [note for note in given if isinstance(note, _broadcast.Note)]
        if len({note.fingerprint for note in notes}) > 1:
            path = self._require_path()
            raise ReplacedCheckpointError(
                f"another save replaced {path} while the ranks opened it, or it was slimmed, and "
                "not all of them have the same checkpoint: load it again",
                path=path,
            )
        if not self._broadcast:
            return plans
        group = _broadcast.group_of(self._broadcast)
        willing = len(notes) == len(plans) and all(note.willing for note in notes)
        if group is None or len(plans) == 1 or not willing:
            _log.debug("no broadcast: there is one rank, or not every rank broadcasts")
            return plans
        if len(plans) != dist.get_world_size(group):
            raise InvalidStateError(
                f"the load has {len(plans)} ranks and the group to broadcast in has "
                f"{dist.get_world_size(group)}: pass the load's own process group as "
                "StorageReader(broadcast=)"
            )
        return _broadcast.together(plans)

    @picklable
    @real_tensors()
    @collector_paused()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read everything that the plan asks for, and return when it is in place.

        Nothing changes unless everything fits and every object can be loaded. If reading then meets
        damage or a failing disk, the elements of the tensors are undefined.

        Raises:
            KeyMismatchError: tensors have another shape than planned, or the checkpoint lacks
                chunks; names them all.
            UnsupportedError: objects can't be loaded without ``allow_pickle``; names them all.
            ReplacedCheckpointError: another save replaced the checkpoint after it was opened.
            CorruptCheckpointError: bytes on disk are damaged.
            OSError: the system refused.
        """
        with _done_callbacks.failing("load", self._require_path()):
            self.report = report = self._read_data(plan, planner)
        _tier_copies.loaded(report.path)
        _done_callbacks.tell(_done_callbacks.Outcome(kind="load", path=report.path, report=report))
        _done_callbacks.log_apart(_formatting.of_load(report))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_data(self, plan: LoadPlan, planner: LoadPlanner) -> LoadReport:
        group = _broadcast.group_of(self._broadcast)
        if group is not None and isinstance(plan.storage_data, _broadcast.Together):
            targets, report = self._read_together(plan, planner, group_of(group))
        else:
            targets = self._resolve(plan, planner)
            report = self._read_own(targets)
        self._hand_over(targets, planner)
        return report

    def _read_together(
        self, plan: LoadPlan, planner: LoadPlanner, ranks: Group
    ) -> tuple[list[Target], LoadReport]:
        """Read what the plan asks for; what several ranks need, one reads and sends."""
        settings = dataclasses.replace(self._config, share_reads="group").to_json()
        with ranks.turn.held():
            ranks.doing = f"the load of {self._require_path()}"
            shared = SharedLoad(ranks, settings)
            is_done = False
            try:
                targets = self._resolve(plan, planner)
                report = self._read_own(targets, shared)
                is_done = True
            finally:
                shared.end(failed=not is_done)
        return targets, report

    def _resolve(self, plan: LoadPlan, planner: LoadPlanner) -> list[Target]:
        """Return the target of each item."""
        filling = _wrappers.Filling()
        wrong = filling.mismatched
        targets: list[Target] = []
        cut = self._sharded_composites(plan, planner, wrong)
        values = self._values(plan, cut)
        self._check_once(plan)
        for item in plan.items:
            entry = self._entry(item)
            if item.storage_index.fqn in cut:
                targets.append(cut[item.storage_index.fqn])
            elif item.storage_index.fqn in values:
                value = values[item.storage_index.fqn]
                blob = Blob.made(item, value)
                blob.is_filled = _wrappers.check(planner, item, value, filling)
                targets.append(blob)
            elif entry is None or entry.is_object != (item.type == LoadItemType.BYTE_IO):
                kind = "an object" if item.type == LoadItemType.BYTE_IO else "a tensor"
                wrong.append(f"{item.storage_index.fqn} is not there as {kind}")
            elif entry.is_object:
                targets.append(Blob.of(item, entry))
            else:
                fill = _fill(item, entry, planner.resolve_tensor(item).detach())
                if isinstance(fill, str):
                    wrong.append(fill)
                else:
                    targets.append(fill)
        if wrong:
            path = self._require_path()
            message = (
                f"{path} does not hold what the planner asked for: {'; '.join(wrong)}. Was the "
                "load planned with the metadata of another checkpoint?"
            )
            raise KeyMismatchError(message, path=path, mismatched=wrong)
        return targets

    def _check_once(self, plan: LoadPlan) -> None:
        """Refuse names that several values of the checkpoint share: DCP could mean any of them."""
        if self._contents is None or not self._contents.twice:
            return
        wrong = sorted({item.storage_index.fqn for item in plan.items} & self._contents.twice)
        if wrong:
            path = self._require_path()
            listed = _select.listed("names that several keys have as text", wrong)
            raise KeyMismatchError(
                f"{path} has {listed}, and DCP can't tell them apart: load it by "
                "ringstow.load_into, or ringstow.distributed.load_into",
                path=path,
                mismatched=wrong,
            )

    def _read_own(self, targets: list[Target], shared: SharedLoad | None = None) -> LoadReport:
        """Read everything that these targets need."""
        # Objects first: if one is refused, no tensor has changed.
        blobs = [target for target in targets if isinstance(target, Blob)]
        pieces = [piece for blob in blobs for piece in blob.slices()]
        read = self._read(pieces) if pieces else None
        _objects.check(blobs, self._require_path(), allow_pickle=self._allow_pickle)
        direct, copied = _targets.split([t for t in targets if isinstance(t, Fill)])
        if shared is not None and self._checkpoint is not None:
            passes = [self._boxes(fills) for fills in (direct, copied)]
            shared.planned(self._checkpoint, [([], boxes) for boxes in passes])
        report = self._read([fill.slice_to(fill.target) for fill in direct])
        report = report if read is None else read.followed_by(report)
        _torch.mark_changed(fill.target for fill in direct)
        if self._checkpoint is not None and (boxes := [box for b in blobs for box in b.boxes]):
            cut = _shard_boxes.fill(self._checkpoint, boxes)
            report = report if cut is None else report.followed_by(cut)
        for batch in _targets.batches(copied, self._config.staging_bytes):
            report = report.followed_by(self._copy(batch))
        return report

    def _boxes(self, fills: list[Fill]) -> list[tuple[str, Shape, Shape]]:
        """Return the boxes of the checkpoint's tensors that these fills read."""
        assert self._checkpoint is not None
        chunks: dict[str, list[tuple[Shape, Shape]]] = {}
        boxes = []
        for fill in fills:
            name, code = fill.entry.name, fill.entry.dtype
            if name not in chunks:
                chunks[name] = self._checkpoint.chunks(name)
            begin = zip(chunks[name][fill.chunk][0], in_elements(fill.offsets, code), strict=True)
            lengths = in_elements(tuple(fill.target.shape), code)
            boxes.append((name, tuple(map(sum, begin)), lengths))
        return boxes

    def _hand_over(self, targets: list[Target], planner: LoadPlanner) -> None:
        """Pass the loaded objects to the planner."""
        for target in targets:
            if isinstance(target, Fill):
                planner.commit_tensor(target.item, target.target)
        blobs = [target for target in targets if isinstance(target, Blob)]
        _true_paths.set_paths(planner, (blob.item for blob in blobs))
        for blob in blobs:
            if blob.is_filled:  # the planner then keeps the tensor that is there
                blob.hold(_wrappers.fill(planner, blob.item, blob.value))
            blob.stream.seek(0)
            planner.load_bytes(blob.item, blob.stream)

    def _sharded_composites(
        self, plan: LoadPlan, planner: LoadPlanner, wrong: list[str]
    ) -> dict[str, Blob]:
        """Return the planned DTensors of wrappers, each with this rank's regions; note misfits."""
        found: dict[str, Blob] = {}
        if self._contents is None or self._checkpoint is None:
            return found
        contents = self._values_of()
        for item in plan.items:
            name = item.storage_index.fqn
            node = self._contents.values.get(name)
            if not (isinstance(node, Box) and node.tag == COMPOSITE):
                continue
            value = _wrappers.current(planner, item.dest_index.fqn)
            boxes = _wrappers.boxes(contents, node, value, name)
            if isinstance(boxes, str):
                wrong.append(f"{item.dest_index.fqn} is {boxes}")
            if boxes is not None:
                found[name] = Blob.made(item, value)
                found[name].boxes = [] if isinstance(boxes, str) else boxes
        return found

    def _values_of(self) -> _build.Contents:
        assert self._contents is not None
        assert self._checkpoint is not None
        return _build.Contents(
            self._contents.path, self._checkpoint.tensor, allow_pickle=self._allow_pickle
        )

    def _values(self, plan: LoadPlan, others: Container[str]) -> dict[str, Any]:
        """Return the planned values that are objects only for DCP, without these others."""
        if self._contents is None or self._checkpoint is None or not self._contents.values:
            return {}
        nodes = self._contents.values
        planned = {item.storage_index.fqn for item in plan.items}
        names = {name for name in planned if name in nodes and name not in others}
        contents = self._values_of()
        survey = _build.Survey(contents)
        for name in names:
            survey.add(nodes[name], self._contents.paths[name])
        builder = _build.Builder(contents, _build.read(self._checkpoint, survey.names))
        return {name: builder.value(nodes[name], self._contents.paths[name]) for name in names}

    def _entry(self, item: ReadItem) -> Entry | None:
        if self._contents is None:
            raise InvalidStateError(
                "read_data() was called without read_metadata() first: load by dcp.load"
            )
        return self._contents.entries.get(item.storage_index.fqn)

    def _check_held(self, plan: LoadPlan) -> None:
        """Refuse a plan that asks for elements that a rank's part leaves out."""
        checkpoint = self._checkpoint
        if checkpoint is None:
            return
        entries = ((item, self._entry(item)) for item in plan.items)
        lacking = {e.name: e for item, e in entries if e is not None and e.holes and e.lacks(item)}
        checkpoint.check_whole(list(lacking))

    def _read(self, slices: list[_targets.Slice]) -> LoadReport:
        assert self._checkpoint is not None
        return LoadReport.from_json(self._checkpoint.read(slices))

    def _copy(self, batch: list[Fill]) -> LoadReport:
        staged = [_targets.staging_for(fill) for fill in batch]
        report = self._read([f.slice_to(s) for f, s in zip(batch, staged, strict=True)])
        for fill, source in zip(batch, staged, strict=True):
            _targets.deliver(fill, source)
        return report

    def _has_ranks(self) -> bool:
        """Return whether the checkpoint was saved without collectives, in a part for each rank."""
        path = self._path
        return path is not None and os.path.exists(
            os.path.join(_paths.of_rank(path, 0), _paths.MANIFEST)
        )

    def _open_part(self, path: str, rank: int) -> Contents:
        """Open the checkpoint of a rank that saved by itself."""
        own = _paths.of_rank(path, rank)
        try:
            return self._open(own)
        except (FileNotFoundError, IncompleteCheckpointError) as error:
            _native.check_own_share(path, rank)  # raises a clearer error, if rank 0's part exists
            if not os.path.lexists(own):
                # DCP shows this after the error of the whole checkpoint, which the user asked for.
                raise FileNotFoundError(
                    errno.ENOENT,
                    f"it has no {os.path.basename(own)} either, as a save of each rank by itself "
                    "(use_collectives=False) would leave",
                    path,
                ) from error
            raise

    def _open(self, path: str) -> Contents:
        self._checkpoint = self._contents = None
        knobs = self._config.to_json()
        # A rank's part has no copies of its own.
        copies = copies_of(path, self._config.tiers) if path == self._path else []
        checkpoint = _native.Checkpoint(
            path, knobs, copies=copies, foreign=True, verify=self._verify
        )
        is_ours = checkpoint.kind == "ringstow"
        state = checkpoint.state if is_ours else None
        contents = Contents.of(path, checkpoint.entries, state)
        self._checkpoint, self._contents = checkpoint, contents
        return contents

    def _require_path(self) -> str:
        if self._path is None:
            raise InvalidStateError(
                "there is no path to load from: give StorageReader one, or the load a checkpoint_id"
            )
        return self._path


_PREPARE = StorageReader.prepare_global_plan


def _fill(item: ReadItem, entry: Entry, target: torch.Tensor) -> Fill | str:
    """Return how to fill an item's target, or why it cannot be filled."""
    name = item.storage_index.fqn
    chunk = entry.chunk_of(item.storage_index)
    if chunk is None:
        return f"{name} has no chunk at {list(item.storage_index.offset or ())}"
    if target.shape != item.lengths:
        return f"{name} is read as {list(item.lengths)} into a tensor of {list(target.shape)}"
    offsets = tuple(item.storage_offsets)
    return Fill(item, entry, chunk, offsets, target, _torch.dtype_of(entry.dtype, name))
