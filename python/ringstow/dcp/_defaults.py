"""Putting ringstow in the place of torch's own file system storage, for programs that name that.

Some trainers pass no storage to DCP but a path only, or name ``FileSystemWriter`` when they save.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _storage_utils, filesystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan
from torch.futures import Future

from ringstow._config import Config
from ringstow._errors import InvalidStateError
from ringstow.dcp import _mark, _paths
from ringstow.dcp._reader import StorageReader
from ringstow.dcp._writer import StorageWriter

StrPath = str | os.PathLike[str]

_log = logging.getLogger("ringstow")

_StockReader = filesystem.FileSystemReader

_MODULES: tuple[ModuleType, ...] = (dcp, filesystem, _storage_utils)
_told: set[str] = set()


class _Settings:
    """What `use_by_default` was given."""

    config: Config | None = None
    allow_pickle = False


class FileSystemWriter(StorageWriter):
    """`StorageWriter` with the arguments of torch's FileSystemWriter."""

    def __init__(self, path: StrPath, *args: Any, overwrite: bool = True, **kwargs: Any) -> None:
        """Make a writer.

        Args:
            path: the checkpoint's directory.
            args: whatever else torch's writer takes; it has no meaning here.
            overwrite: False refuses to replace a checkpoint.
            kwargs: as args.
        """
        super().__init__(path, _Settings.config, allow_pickle=_Settings.allow_pickle)
        self._overwrite = overwrite
        _ignore(["positional arguments"] if args else [])
        _ignore(sorted(kwargs))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "overwrite": self._overwrite}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._overwrite = state["overwrite"]

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is.

        Raises:
            InvalidStateError: there is a checkpoint, and it is not to be replaced.
        """
        if not self._overwrite and _holds_checkpoint(self._save_path):
            raise InvalidStateError(
                f"{self._save_path} holds a checkpoint already, and overwrite=False was given"
            )
        return super().prepare_local_plan(plan)


class FileSystemReader(StorageReader):
    """`StorageReader` with the arguments of torch's FileSystemReader, which it calls if need be.

    A checkpoint that torch's FileSystemWriter wrote is loaded by torch's own reader.
    """

    def __init__(self, path: StrPath, *args: Any, **kwargs: Any) -> None:
        """Make a reader.

        Args:
            path: the checkpoint's directory.
            args: whatever else torch's reader takes, for a checkpoint of torch's.
            kwargs: as args.
        """
        super().__init__(path, _Settings.config, allow_pickle=_Settings.allow_pickle)
        self._stock = _StockReader(path, *args, **kwargs)
        self._is_stock = False

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Set the directory of the loads to come; None leaves it as it is."""
        super().reset(checkpoint_id)
        self._stock.reset(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the table of contents of a checkpoint of either kind."""
        self._is_stock = _is_stock(self._require_path())
        if self._is_stock:
            return self._stock.read_metadata(*args, **kwargs)
        return super().read_metadata(*args, **kwargs)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Begin a load."""
        if self._is_stock:
            self._stock.set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        else:
            super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all that the plan asks for."""
        if self._is_stock:
            return self._stock.read_data(plan, planner)
        return super().read_data(plan, planner)


class Swap:
    """Torch's storage is ringstow's until this is called, or left as a context manager."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo = undo

    def __call__(self) -> None:
        """Put torch's own classes back."""
        self._undo()

    def __enter__(self) -> Swap:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo()


def use_by_default(config: Config | None = None, *, allow_pickle: bool = False) -> Swap:
    """Make DCP save and load with ringstow where a program gives it a path only.

    ``FileSystemWriter`` and ``FileSystemReader`` of ``torch.distributed.checkpoint`` are ringstow's
    from then on: for ``dcp.save(state, checkpoint_id=path)`` and its like, and for programs that
    name these classes when they save. Names that were imported before stay torch's. The classes
    take the arguments of torch's; what has no meaning here is ignored, and logged once.

    Checkpoints that torch's own writer wrote can still be loaded.

    ::

        ringstow.dcp.use_by_default()           # for the life of the process

        with ringstow.dcp.use_by_default():     # or for a while
            trainer.fit()

    Args:
        config: the knobs; None means the defaults.
        allow_pickle: as in `StorageWriter` and `StorageReader`.

    Returns:
        What undoes it: a context manager that may also be called.
    """
    before = (_Settings.config, _Settings.allow_pickle)
    names = {"FileSystemWriter": FileSystemWriter, "FileSystemReader": FileSystemReader}
    originals = [(m, name, getattr(m, name)) for m in _MODULES for name in names]

    def undo() -> None:
        _Settings.config, _Settings.allow_pickle = before
        for module, name, original in originals:
            setattr(module, name, original)

    _Settings.config, _Settings.allow_pickle = config, allow_pickle
    for module, name, _ in originals:
        setattr(module, name, names[name])
    return Swap(undo)


def _ignore(names: list[str]) -> None:
    for name in names:
        if name not in _told:
            _told.add(name)
            _log.info("FileSystemWriter(%s) has no meaning for ringstow and is ignored", name)


def _holds_checkpoint(path: str) -> bool:
    return any(os.path.exists(os.path.join(path, name)) for name in (_paths.MANIFEST, _mark.NAME))


def _is_stock(path: str) -> bool:
    """Tell whether a directory holds a checkpoint of torch's FileSystemWriter, and none of ours."""
    ours = (path, _paths.of_rank(path, 0))
    if any(os.path.exists(os.path.join(place, _paths.MANIFEST)) for place in ours):
        return False
    return any(
        os.path.exists(os.path.join(path, name)) for name in (_mark.NAME, f"__0{_mark.NAME}")
    )
