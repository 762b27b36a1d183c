"""What all ranks of a run do together: agree, save, load."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torchtitan.components.checkpointer import OPTIMIZER

from ringstow._config import Config
from ringstow._errors import TornSaveError
from ringstow._guard import Staging
from ringstow.dcp import LoadPlanner, StorageReader, _latest, _together
from ringstow.dcp import _ranks as _dcp_ranks
from ringstow.dcp._handle import RanksHandle
from ringstow.dcp._stock import StockReader
from ringstow.dcp._together import each, from_first
from ringstow.integrations import _named
from ringstow.integrations._torchtitan import _steps
from ringstow.tree._mismatch import Call

_T = TypeVar("_T")

_PART = ".ringstow-export-"


class Ranks:
    """All ranks, in a group that training does not use. All of them make it together."""

    def __init__(self, config: Config | None, staging: Staging, allow_pickle: bool) -> None:
        self._config = config
        self._allow_pickle = allow_pickle
        self._group = cast("dist.ProcessGroup", dist.new_group(backend="gloo"))
        self._saves = _dcp_ranks.Ranks(config, staging, allow_pickle, self._group)
        self.is_first = self._saves.is_first

    def meet(self, call: tuple[object, ...], failure: BaseException | None) -> None:
        """Fail on all ranks if the save before failed on one, or if they call different things."""
        self._saves.meet(call, failure, None)

    def first(self, look: Callable[[], _T]) -> _T:
        """Return what a function returns on rank 0, or raise what it raises there, on all ranks."""
        return from_first(look, self._group)

    def together(self, call: Callable[[], _T]) -> _T:
        """Return what a function returns on this rank, once it has returned on all ranks.

        Raises:
            Exception: what it raises on a rank, on all ranks.
        """
        return each(call, self._group)

    def save(self, state: dict[str, Any], path: str, step: int) -> None:
        """Save, and return at the commit.

        Raises:
            Exception: what a rank failed of, on all ranks.
        """
        try:
            self._saves.save(state, path, step, apart=_apart(state))
        except CheckpointException as failure:
            raise explained(failure, f"{path} was not saved") from failure

    def save_async(self, state: dict[str, Any], path: str, step: int) -> RanksHandle:
        """Save in the background."""
        return self._saves.save_async(state, path, step, apart=_apart(state))

    def names(self, path: str) -> set[str]:
        """Return the names of all values in a checkpoint of ringstow's or torch's."""
        return set(self._reader(path, _steps.kind_of(path)).read_metadata().state_dict_metadata)

    def load(self, state: dict[str, Any], path: str) -> None:
        """Fill a state from a checkpoint of ringstow's or torch's, which may hold more.

        Raises:
            Exception: what a rank failed of, on all ranks.
        """
        kind = self.first(lambda: _steps.kind_of(path))  # a rank may see a new step later
        if kind == "ringstow":
            _latest.agree_on(path, self._group)
        planner = LoadPlanner()
        planner.may_hold_more = True
        planner.call = Call()
        self._load(state, path, self.together(lambda: self._reader(path, kind)), planner)

    def load_from(self, state: dict[str, Any], path: str, reader: Any) -> None:
        """Fill a state by a reader of torch's or torchtitan's.

        Raises:
            Exception: what a rank failed of, on all ranks.
        """
        self._load(state, path, reader, None)

    def export(self, write: Callable[[str], object], path: str) -> None:
        """Let all ranks write a checkpoint beside a path, and give it that name once it is durable.

        Raises:
            Exception: what a rank failed of, on all ranks. Nothing is at the path then, or what was
                there before.
        """
        folder, name = os.path.split(path)
        # Without ``step-N``: torchtitan takes every name that contains it for a step.
        part = os.path.join(folder, f"{_PART}{name.replace('-', '_')}")

        def write_durably() -> None:
            try:
                write(part)
            except CheckpointException as failure:
                raise explained(failure, f"{path} was not saved") from failure
            _named.sync(part)

        self.first(lambda: _remove_parts(folder))
        try:
            self.together(write_durably)
            self.first(lambda: _named.take_name(part, path))
        except BaseException:
            if self.is_first:
                shutil.rmtree(part, ignore_errors=True)
            raise

    def close(self) -> None:
        """Free the memory of saves, and end the group."""
        self._saves.close()
        if dist.is_initialized():
            with contextlib.suppress(Exception):  # it may have ended with the ranks
                dist.destroy_process_group(self._group)

    def _reader(self, path: str, kind: _steps.Kind | None) -> Any:
        if kind == "torch":
            return StockReader(path)
        return StorageReader(path, config=self._config, allow_pickle=self._allow_pickle)

    def _load(self, state: dict[str, Any], path: str, reader: Any, planner: Any) -> None:
        try:
            load(state, storage_reader=reader, planner=planner, process_group=self._group)
        except CheckpointException as failure:
            raise explained(failure, f"{path} could not be loaded") from failure


def _apart(state: dict[str, Any]) -> list[str]:
    """Return what `ringstow.slim` can drop later."""
    return [OPTIMIZER] if OPTIMIZER in state else []


def explained(failure: BaseException, what: str) -> BaseException:
    """Return why ranks have failed together, as an Exception.

    With DCP's CheckpointException, torchtitan would neither close its trainer nor log it.

    Returns:
        This rank's own error if it has failed; otherwise one that names the first rank that has.
    """
    error = _together.explained(failure, f"{what}.")
    ranks = failure.failures.values() if isinstance(failure, CheckpointException) else ()
    if any(isinstance(one, TornSaveError) for one, _ in ranks):
        error.add_note(
            "In torchtitan: call trainer.checkpointer.maybe_wait_for_staging() before you change "
            'weights outside of optimizers.step(), or set async_mode="async_with_pinned_mem".'
        )
    return error


def _remove_parts(folder: str) -> None:
    """Remove what killed exports left."""
    for path in glob.iglob(os.path.join(glob.escape(folder), f"{_PART}*")):
        shutil.rmtree(path)
