"""Ray Train with ringstow's saves: ``report`` for ``ray.train.report``, and ``restore``.

Needs the package ``ray[train]``. See docs/trainers/ray.md for benefits and limits.
"""

from __future__ import annotations

import datetime
import functools
import logging
import os
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow.fs
import ray
import ray.train
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from ringstow._core._config import Config
from ringstow._core._errors import InvalidStateError, UnsupportedError
from ringstow._manager._one_process import Alone
from ringstow._reading._checkpoint import open as open_checkpoint
from ringstow._reading._run_steps import prune
from ringstow._reports._checkpoint_reports import Step
from ringstow._saving._guard import Staging, check_staging
from ringstow._state.tree._mismatch import Call
from ringstow.dcp import _mark, _private
from ringstow.integrations._kit import _values
from ringstow.integrations._kit._framework_check import Seam
from ringstow.integrations._kit._ranks import Ranks
from ringstow.integrations._kit._refusals import refuse_places

if TYPE_CHECKING:
    from ringstow._saving._save_future import SaveHandle

__all__ = ["report", "restore"]

_log = logging.getLogger("ringstow")

# Without one of these a checkpoint could count before its commit.
_SEAM = Seam(
    "ray",
    "2.60",
    "ray",
    calls={
        ray.train: {
            "report": "metrics checkpoint checkpoint_dir_name checkpoint_upload_mode "
            "delete_local_checkpoint_after_upload checkpoint_upload_fn validation"
        }
    },
)
_SEAM.check()


def report(
    metrics: Mapping[str, Any],
    state: dict[Any, Any] | None = None,
    *,
    step: int | None = None,
    validation: Any = False,
    config: Config | None = None,
    staging: Staging = "guard",
    allow_pickle: bool = False,
) -> None:
    """Report metrics, and save a state in the background as the checkpoint of this report.

    Call it on every worker, like ``ray.train.report``. It first waits for the previous save. Ray
    registers the checkpoint once it is complete and durable. The next optimizer step waits until
    the save has copied all tensors.

    All workers together save a state with DTensors, or with objects that have ``state_dict`` and
    ``load_state_dict``, as ``torch.distributed.checkpoint`` does. Any other state must be equal on
    all workers, and rank 0 saves it: the others may leave it out.

    Args:
        metrics: metrics by name, for ``ray.train.report``. The checkpoint stores rank 0's numbers.
        state: tensors and values in any nesting. None on all workers reports only the metrics.
        step: the step number to store in the checkpoint.
        validation: passed to ``ray.train.report``.
        config: ringstow's settings; None means the defaults. Stripes are refused.
        staging: how the save keeps the values of the call: ``"guard"``, ``"snapshot"`` or
            ``"wait"``; see `ringstow.save_async`.
        allow_pickle: pickle values that ringstow cannot save by itself.

    Raises:
        Exception: the previous save's failure, on all workers. Ray also ends the workers then.
        InvalidStateError: the workers' states do not match; or ``staging`` or ``config`` is not
            supported with Ray; or a value cannot be saved.
        UnsupportedError: the storage is not local, or several workers have no process group.
    """
    check_staging(staging, is_for_ranks=True)
    refuse_places(config, "Ray removes old checkpoints, and would leave their stripes")
    worker = _worker()
    ranks = worker.ranks(config, staging, allow_pickle)
    name, is_sharded = worker.plan(state)
    if name is None:
        ray.train.report(dict(metrics))
        return
    path = os.path.join(worker.root, name)
    saves = is_sharded or ranks.is_first
    checkpoint = ray.train.Checkpoint(path, worker.filesystem) if saves else None
    started: Future[SaveHandle | None] = Future()

    def wait(*_: Any) -> Any:
        """Return the checkpoint once it is durable. Ray calls it in a thread of its own."""
        if (failure := _failure_of(started.result())) is not None:
            raise failure
        return checkpoint

    def start() -> SaveHandle | None:
        numbers = {key: one for key, one in metrics.items() if type(one) in (int, float)}
        if is_sharded:
            return ranks.save_async(state or {}, path, step, numbers)
        alone = Alone(config, staging, allow_pickle, ())
        return worker.all.each(
            lambda: alone.save_async(state or {}, path, step, numbers) if saves else None
        )

    try:
        # First check Ray's report, so that nothing is saved if Ray refuses it.
        ray.train.report(
            dict(metrics),
            checkpoint=checkpoint,
            checkpoint_dir_name=name,
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=wait,
            delete_local_checkpoint_after_upload=False,
            validation=validation if saves else False,
        )
        worker.handle = start()
        started.set_result(worker.handle)
    except BaseException as error:
        started.set_exception(error)
        raise


def restore(
    into: dict[Any, Any] | None = None,
    *,
    config: Config | None = None,
    allow_pickle: bool = False,
) -> dict[Any, Any] | None:
    """Load the newest checkpoint that Ray has registered; call it on every worker.

    Args:
        into: a state to fill in place; see `ringstow.load_into`. A sharded checkpoint needs it: it
            defines which shards this worker has.
        config: ringstow's settings; None means the defaults.
        allow_pickle: unpickle values, which can run any code.

    Returns:
        The state, ``into`` if it was given; None if Ray has no checkpoint yet.

    Raises:
        Exception: the failure of the save in progress, or a worker's load error, on all workers.
        InvalidStateError: the checkpoint is sharded, and there is no ``into``.
        KeyMismatchError: the checkpoint does not fit ``into``.
        CorruptCheckpointError: bytes on disk are damaged.
        NoCheckpointError: ringstow did not save the checkpoint.
        UnsupportedError: the storage is not local, or several workers have no process group.
    """
    worker = _worker()
    worker.end()
    path = worker.all.from_first(lambda: getattr(ray.train.get_checkpoint(), "path", None))
    if path is None:
        return None
    found = worker.all.from_first(lambda: _step_at(path, config))
    is_sharded = worker.all.from_first(lambda: os.path.lexists(f"{path}/{_mark.NAME}"))
    if is_sharded and into is None:
        raise InvalidStateError(
            f"{path} is sharded: restore(into=state) with the state of a new model and optimizer, "
            "which says which shards this worker has"
        )
    if is_sharded or (into is not None and _is_sharded(into)):
        call = Call(instead="ringstow.distributed.load_into", load="ringstow.distributed.load")
        attempt = worker.ranks(config, "guard", allow_pickle).load(found, into, call=call)
    else:
        call = Call(instead="ringstow.load_into")
        attempt = Alone(config, "guard", allow_pickle, ()).load(found, into, call=call)
        worker.all.agree(attempt.error)
    if attempt.error is not None:
        raise attempt.error
    return attempt.state


class _Plan(NamedTuple):
    """A worker's message to the others before a report."""

    name: str | None
    """A name for the checkpoint; None without a state."""
    is_sharded: bool
    leaves: frozenset[str]
    """The names in its state, unless the state is sharded."""


class _Worker:
    """A worker and its saves, one at a time. All workers call each method together."""

    def __init__(self) -> None:
        self.root, self.filesystem = _storage()
        if not dist.is_initialized():
            raise UnsupportedError(
                "the workers agree on a checkpoint by torch.distributed, which has no process "
                "group: use ray.train.torch.TorchTrainer"
            )
        self.all = Ranks()
        self.handle: SaveHandle | None = None
        if dist.get_rank() == 0:
            try:
                prune(self.root)  # Ray gives each new save another name
            except OSError as error:
                _log.warning("%s: leftovers of killed saves stay: %s", self.root, error)

    def ranks(self, config: Config | None, staging: Staging, allow_pickle: bool) -> Ranks:
        """Return the object that saves and loads shards."""
        return Ranks(config, staging, allow_pickle, self.all.group)

    def end(self) -> None:
        """Wait for the save in progress, and raise its failure on all workers."""
        handle, self.handle = self.handle, None
        self.all.agree(_failure_of(handle))

    def plan(self, state: dict[Any, Any] | None) -> tuple[str | None, bool]:
        """Return the name of the next checkpoint, None without one, and whether it is sharded."""
        self.end()
        plans = self.all.gathered(self.all.each(lambda: _plan(state)))
        is_sharded = any(one.is_sharded for one in plans)
        has_state = [one.name is not None for one in plans]
        for rank, one in enumerate(plans):
            is_odd = has_state[rank] and not is_sharded and one.leaves != plans[0].leaves
            if is_odd or (is_sharded and not has_state[rank]):
                differing = ", ".join(sorted(one.leaves ^ plans[0].leaves)[:5])
                raise InvalidStateError(
                    f"worker {rank}'s state does not go with worker 0's ({differing or 'none'}). "
                    "States with shards are needed from all workers. Worker 0 saves any other "
                    "state, which is the same on all: gather there what only some workers have"
                )
        return plans[0].name, is_sharded


@functools.cache
def _worker() -> _Worker:
    """Return this process's worker. The first call is collective."""
    return _Worker()


def _storage() -> tuple[str, Any]:
    """Return the run's directory and Ray's file system, which must be local.

    Raises:
        UnsupportedError: the file system is not local.
        InvalidStateError: this worker does not see the directory.
    """
    try:
        storage = ray.train.get_context().get_storage()
    except NotImplementedError:
        raise UnsupportedError(
            "Ray's local mode has no storage: use ScalingConfig(num_workers=1) or more"
        ) from None
    path, filesystem = storage.experiment_fs_path, storage.storage_filesystem
    if not isinstance(filesystem, pyarrow.fs.LocalFileSystem):
        raise UnsupportedError(
            f"the run's storage is {path} on a file system of the kind {filesystem.type_name!r}, "
            "and ringstow writes local paths: mount it, and give RunConfig that path as "
            "storage_path, without a storage_filesystem. Or use ray.train.report"
        )
    if not os.path.isdir(path):
        raise InvalidStateError(
            f"{path} is not on this node: give RunConfig(storage_path=...) a directory that all "
            "nodes share"
        )
    return path, filesystem


def _plan(state: dict[Any, Any] | None) -> _Plan:
    if state is None:
        return _Plan(None, False, frozenset())
    is_sharded = _is_sharded(state)
    leaves = frozenset() if is_sharded else frozenset(_private.flattened(state)[0])
    name = f"checkpoint_{datetime.datetime.now():%Y-%m-%d_%H-%M-%S.%f}"  # Ray's own form
    return _Plan(name, is_sharded, leaves)


def _is_sharded(state: dict[Any, Any]) -> bool:
    """Return whether all workers save a state together."""
    return any(isinstance(one, Stateful) for one in state.values()) or any(
        isinstance(one, DTensor | _private.ShardedTensor) for one in _values.tensors_of(state)
    )


def _failure_of(handle: SaveHandle | None) -> BaseException | None:
    """Wait for a save; return its failure."""
    return None if handle is None else handle.exception()


def _step_at(path: str, config: Config | None) -> Step:
    """Return the committed checkpoint at a path.

    Raises:
        Error, OSError: it cannot be opened.
    """
    with open_checkpoint(path, config=config) as checkpoint:
        info = checkpoint.info
    return Step(
        path=path,
        step=info.step,
        metrics=info.metrics,
        dropped=info.dropped,
        created_unix_ms=info.created_unix_ms,
        order=(0, info.step or 0, 0, info.created_unix_ms),
        nbytes=None,
        status="committed",
        problem=None,
    )
