"""`StorageWriter` and `StorageReader` with the arguments of torch's file system storage.

Each argument takes effect, is refused, or is named in a warning.
"""

from __future__ import annotations

import inspect
import logging
import os
import pathlib
import warnings
from typing import Any

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan
from torch.futures import Future

from ringstow._core._arguments import StrPath
from ringstow._core._config import Config
from ringstow._core._errors import InvalidStateError, UnsupportedError
from ringstow.dcp import _mark, _paths
from ringstow.dcp._reader import StorageReader
from ringstow.dcp._saves_in_progress import Save
from ringstow.dcp._true_paths import set_paths
from ringstow.dcp._writer import StorageWriter

_log = logging.getLogger("ringstow")

StockWriter = filesystem.FileSystemWriter
StockReader = filesystem.FileSystemReader

_SIGNATURE = inspect.signature(StockWriter)
_HONOURED = {"path", "overwrite", "cache_staged_state_dict", "_extensions"}
# The file that torch writes beside the data of rank 0 without collectives.
_RANK_MARK = f"__0{_mark.NAME}"
_warned: set[str] = set()


class Settings:
    """The arguments of `use_by_default`."""

    config: Config | None = None
    allow_pickle = False


class FileSystemWriter(StorageWriter):
    """`StorageWriter` with the arguments of torch's FileSystemWriter.

    With ``_extensions``, which transform the bytes (encryption, compression), it returns torch's
    own writer, whose checkpoints torch's own reader loads.
    """

    _keeps_id = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a writer, or torch's own if the bytes must be transformed."""
        given = _SIGNATURE.bind(*args, **kwargs).arguments if args or kwargs else {}
        if not given.get("_extensions"):
            return super().__new__(cls)
        if cls is not FileSystemWriter:
            raise UnsupportedError(
                f"{cls.__name__}(_extensions=...): ringstow does not transform what it writes; "
                "derive the class from torch's FileSystemWriter, imported before use_by_default()"
            )
        _warn_once(
            "_extensions",
            "FileSystemWriter(_extensions=...): torch's own writer saves these checkpoints, since "
            "ringstow does not transform what it writes",
        )
        return StockWriter(*args, **kwargs)

    def __init__(self, path: StrPath, *args: Any, **kwargs: Any) -> None:
        """Make a writer.

        Args:
            path: the checkpoint's directory.
            args: the other arguments of torch's writer. ``overwrite=False`` refuses to replace a
                checkpoint; ``cache_staged_state_dict=False`` frees a snapshot's memory once it is
                saved. A warning names, once, each argument that has no effect here.
            kwargs: as args.

        Raises:
            TypeError: torch's writer does not take the argument either.
            UnsupportedError: an argument of a newer torch that ringstow does not know.
        """
        given = _SIGNATURE.bind(path, *args, **kwargs)
        _check(given.arguments)
        super().__init__(path, Settings.config, allow_pickle=Settings.allow_pickle)
        given.apply_defaults()
        self._given = {k: v for k, v in given.arguments.items() if k not in ("path", "_extensions")}
        vars(self).update(self._given)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_given": self._given, **self._given}

    @property
    def _keeps_snapshot(self) -> bool:
        return bool(self._given.get("cache_staged_state_dict", True))

    @property
    def path(self) -> pathlib.Path:
        """The directory, as in torch's writer."""
        return pathlib.Path(self.checkpoint_id or "")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is.

        Raises:
            InvalidStateError: the path has a checkpoint, and ``overwrite=False`` was given.
        """
        save = self._current()
        if _holds_checkpoint(save):
            if not self._given["overwrite"]:
                raise InvalidStateError(
                    f"Checkpoint already exists and overwrite=False was given: {save.path}. Save "
                    "to another path, or leave overwrite=False out to replace it"
                )
            warnings.warn(
                f"Detected an existing checkpoint in {save.path}, which this save replaces when "
                "it is committed; overwrite=False refuses that",
                stacklevel=2,
            )
        return super().prepare_local_plan(plan)


# So that `isinstance(writer, FileSystemWriter)` is true of torch's own writers too.
FileSystemWriter.register(StockWriter)


class FileSystemReader(StorageReader):
    """`StorageReader` with the arguments of torch's FileSystemReader.

    It loads a checkpoint by torch's FileSystemWriter with torch's own reader.
    """

    def __init__(self, path: StrPath, *args: Any, **kwargs: Any) -> None:
        """Make a reader.

        Args:
            path: the checkpoint's directory.
            args: the other arguments of torch's reader, for a checkpoint by torch. ringstow's own
                checkpoints need no ``_extension_registry``.
            kwargs: as args.
        """
        super().__init__(path, Settings.config, allow_pickle=Settings.allow_pickle)
        self._stock = StockReader(path, *args, **kwargs)
        self._is_stock = False

    @property
    def path(self) -> pathlib.Path:
        """The directory, as in torch's reader."""
        return pathlib.Path(self.checkpoint_id or "")

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Set the directory of later loads; None keeps it."""
        super().reset(checkpoint_id)
        self._stock.reset(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of a checkpoint by ringstow or torch."""
        self._is_stock = _is_stock(self._require_path())
        if self._is_stock:
            self._checkpoint = self._contents = None
            self._stock.load_id = self.load_id
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
        """Read everything that the plan asks for."""
        if self._is_stock:
            set_paths(planner, plan.items)
            return self._stock.read_data(plan, planner)
        return super().read_data(plan, planner)


FileSystemReader.register(StockReader)


# For each argument without effect: the value (or its name) that needs no warning, and what ringstow
# does instead.
_INSTEAD: dict[str, tuple[object, str]] = {
    "single_file_per_rank": (
        True,
        "a rank writes as few files as Config(shard_bytes=...) allows",
    ),
    "sync_files": (True, "a save is durable when it returns"),
    "thread_count": (1, "one ring does the I/O; ringstow.Config has its settings"),
    "per_thread_copy_ahead": (
        _SIGNATURE.parameters["per_thread_copy_ahead"].default,
        "Config(pool_bytes=...) limits how much is copied ahead",
    ),
    "serialization_format": ("SAFETENSORS", "the files are safetensors"),
}


def _check(given: dict[str, Any]) -> None:
    """Warn of arguments that have no effect; refuse unknown ones."""
    unknown = []
    for name, value in given.items():
        if name in _INSTEAD:
            harmless, instead = _INSTEAD[name]
            if getattr(value, "name", value) != harmless:
                _warn_once(
                    name, f"FileSystemWriter({name}={value!r}) has no effect in ringstow: {instead}"
                )
        elif name not in _HONOURED and value != _SIGNATURE.parameters[name].default:
            unknown.append(f"{name}={value!r}")
    if unknown:
        raise UnsupportedError(
            f"FileSystemWriter({', '.join(unknown)}): this version of ringstow does not know the "
            "argument; leave it out, or save with torch's own writer"
        )


def _warn_once(name: str, text: str) -> None:
    if name not in _warned:
        _warned.add(name)
        _log.warning("%s", text)


def _holds_checkpoint(save: Save) -> bool:
    """Return whether a save would replace a checkpoint, ringstow's or torch's."""
    if save.is_alone:
        return _has(save.path, _paths.MANIFEST) or _has(os.path.dirname(save.path), _RANK_MARK)
    return _has(save.path, _mark.NAME) or _is_ours(save.path)


def _is_stock(path: str) -> bool:
    """Return whether a directory holds a checkpoint by torch's own writer, and none by ringstow."""
    return not _is_ours(path) and (_has(path, _mark.NAME) or _has(path, _RANK_MARK))


def _is_ours(path: str) -> bool:
    return _has(path, _paths.MANIFEST) or _has(_paths.of_rank(path, 0), _paths.MANIFEST)


def _has(directory: str, name: str) -> bool:
    return os.path.exists(os.path.join(directory, name))
