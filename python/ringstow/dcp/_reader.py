"""The storage that torch.distributed.checkpoint loads from.

A rank reads what its own tensors need, straight into their memory where they lie on the CPU, and
checks every block of it. No pickle decides anything: the manifest is JSON.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ringstow import _native, _torch
from ringstow._config import Config
from ringstow._errors import InvalidStateError, KeyMismatchError
from ringstow._report import LoadReport
from ringstow.dcp import _objects, _paths, _targets
from ringstow.dcp._errors import picklable
from ringstow.dcp._fallbacks import warn_once
from ringstow.dcp._metadata import Contents, Entry
from ringstow.dcp._targets import Fill

StrPath = str | os.PathLike[str]

_log = logging.getLogger("ringstow")


class StorageReader(storage.StorageReader):
    """Loads a ringstow checkpoint by torch.distributed.checkpoint, on any number of ranks.

    ::

        dcp.load(state_dict, checkpoint_id="step-1000", storage_reader=ringstow.dcp.StorageReader())

    Reads whatever was saved by `StorageWriter` or by ``ringstow.save`` (its tensors), and plain
    directories of safetensors files, those of torch's HuggingFaceStorageWriter among them.

    Objects (all that is no tensor) are pickles: DCP's planner unpickles them without restriction.
    So each is first put through ``torch.load(weights_only=True)``, and what that refuses is an
    error, unless ``allow_pickle`` is given. Nothing else here unpickles anything.
    """

    def __init__(
        self,
        path: StrPath | None = None,
        config: Config | None = None,
        *,
        verify: bool = True,
        allow_pickle: bool = False,
    ) -> None:
        """Make a reader.

        Args:
            path: the checkpoint's directory; None leaves it to each load's ``checkpoint_id``.
            config: the knobs; None means the defaults.
            verify: compare every block that is read with its checksum before any of it is used.
            allow_pickle: unpickle whatever an object is made of; it can run any code.

        Raises:
            InvalidStateError: the path is none.
        """
        self._path = None if path is None else _paths.directory(path)
        self._config = config or Config()
        self._verify = verify
        self._allow_pickle = allow_pickle
        self._checkpoint: _native.Checkpoint | None = None
        self._contents: Contents | None = None
        self.report: LoadReport | None = None
        """What this rank's latest load that got through did."""

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Set the directory of the loads to come; None leaves it as it is.

        Raises:
            InvalidStateError: the id is no path.
        """
        self._checkpoint = self._contents = None
        if checkpoint_id is not None:
            self._path = _paths.directory(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Tell whether an id is a path; a URL is not."""
        return _paths.is_path(checkpoint_id)

    @property
    def checkpoint_id(self) -> str | None:
        """The directory of the loads to come, from the root; None if none was given yet."""
        return self._path

    # A load, in the order of the calls.

    @picklable
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Open the checkpoint and return its table of contents.

        Args:
            args: nothing that is used.
            kwargs: torch's ``rank``, where the checkpoint was saved without collectives: each
                rank then has one of its own, in ``rank00003`` below the path.

        Raises:
            IncompleteCheckpointError: the directory holds no committed checkpoint.
            CorruptCheckpointError: the manifest is damaged.
            FormatError: the manifest is not one of ringstow's, or a newer version's.
            InvalidStateError: the reader has no path.
            OSError: the system refused: no such directory, no permission, a failing disk.
        """
        rank = kwargs.get("rank")
        try:
            path = self._require_path()
            return self._open(path if rank is None else _paths.of_rank(path, rank)).metadata()
        except Exception as error:
            # DCP makes an AssertionError of it, and tries the rank's own checkpoint first.
            is_next = rank is None and self._has_ranks()
            _log.log(
                logging.DEBUG if is_next else logging.ERROR, "nothing can be loaded: %s", error
            )
            raise

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Begin a load.

        Args:
            metadata: what `read_metadata` returned.
            is_coordinator: nothing that is used, nor are the others.
            args: see above.
            kwargs: see above.
        """
        if self._contents is None:
            self._open(self._require_path())

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    @picklable
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all that the plan asks for, and return when it is in place.

        Nothing is changed unless everything fits. If damage or a failing disk is met while
        reading, or an object is refused, the elements of the tensors are undefined.

        Raises:
            KeyMismatchError: tensors of another shape than planned, or chunks that the checkpoint
                does not have; names them all.
            UnsupportedError: objects that can't be loaded without ``allow_pickle``, all named.
            CorruptCheckpointError: the bytes on disk are not those that were written.
            OSError: the system refused.
        """
        fills, blobs = self._resolve(plan, planner)
        direct, copied = _targets.split(fills)
        slices = [piece for blob in blobs for piece in blob.slices()]
        report = self._read(slices + [fill.slice_to(fill.target) for fill in direct])
        if not self._allow_pickle:
            _objects.check(blobs, self._require_path())
        for fill in direct:
            _torch.mark_changed(fill.target)
        for batch in _targets.batches(copied, self._config.pool_bytes):
            report = report.followed_by(self._copy(batch))
        for fill in fills:
            planner.commit_tensor(fill.item, fill.target)
        for blob in blobs:
            blob.stream.seek(0)
            planner.load_bytes(blob.item, blob.stream)
        self.report = report
        _log.debug("loaded %s", report)
        warn_once(report.fallbacks)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _resolve(
        self, plan: LoadPlan, planner: LoadPlanner
    ) -> tuple[list[Fill], list[_objects.Blob]]:
        """Return where everything goes."""
        fills: list[Fill] = []
        blobs: list[_objects.Blob] = []
        wrong: list[str] = []
        for item in plan.items:
            entry = self._entry(item)
            if entry is None or entry.is_object != (item.type == LoadItemType.BYTE_IO):
                wrong.append(f"{item.storage_index.fqn} is not what was planned")
            elif entry.is_object:
                blobs.append(_objects.Blob.of(item, entry))
            else:
                fill = _fill(item, entry, planner.resolve_tensor(item).detach())
                if isinstance(fill, str):
                    wrong.append(fill)
                else:
                    fills.append(fill)
        if wrong:
            path = self._require_path()
            message = f"{path} does not fit the plan; {'; '.join(wrong)}"
            raise KeyMismatchError(message, path=path, mismatched=wrong)
        return fills, blobs

    def _entry(self, item: ReadItem) -> Entry | None:
        if self._contents is None:
            raise InvalidStateError("read_data() came without read_metadata() before it")
        return self._contents.entries.get(item.storage_index.fqn)

    def _read(self, slices: list[_targets.Slice]) -> LoadReport:
        assert self._checkpoint is not None
        return LoadReport.from_json(
            self._checkpoint.read(slices, self._verify, self._config.to_json())
        )

    def _copy(self, batch: list[Fill]) -> LoadReport:
        staged = [_targets.staging_for(fill) for fill in batch]
        report = self._read([f.slice_to(s) for f, s in zip(batch, staged, strict=True)])
        for fill, source in zip(batch, staged, strict=True):
            _targets.deliver(fill, source)
        return report

    def _has_ranks(self) -> bool:
        """Tell whether the ranks have checkpoints of their own, saved without collectives."""
        path = self._path
        return path is not None and os.path.exists(
            os.path.join(_paths.of_rank(path, 0), _paths.MANIFEST)
        )

    def _open(self, path: str) -> Contents:
        self._checkpoint = self._contents = None
        checkpoint = _native.Checkpoint(path, foreign=True)
        state = checkpoint.state if checkpoint.kind == "ringstow" else None
        contents = Contents.of(path, checkpoint.entries, state)
        self._checkpoint, self._contents = checkpoint, contents
        return contents

    def _require_path(self) -> str:
        if self._path is None:
            raise InvalidStateError(
                "there is no path to load from: give StorageReader one, or a checkpoint_id to the "
                "load"
            )
        return self._path


def _fill(item: ReadItem, entry: Entry, target: torch.Tensor) -> Fill | str:
    """Return what an item needs, or what is wrong with it."""
    name = item.storage_index.fqn
    chunk = entry.chunk_of(item.storage_index)
    if chunk is None:
        return f"{name} has no chunk at {list(item.storage_index.offset or ())}"
    if target.shape != item.lengths:
        return f"{name} is read as {list(item.lengths)} into a tensor of {list(target.shape)}"
    offsets = tuple(item.storage_offsets)
    return Fill(item, entry, chunk, offsets, target, _torch.dtype_of(entry.dtype, name))
