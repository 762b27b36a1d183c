"""`StorageWriter` and `StorageReader` with the arguments of torch's file system storage.

Each argument has its effect, is refused, or is named in a warning.
"""

from __future__ import annotations

import inspect
import logging
import os
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan
from torch.futures import Future

from ringstow._config import Config
from ringstow._errors import InvalidStateError, UnsupportedError
from ringstow.dcp import _mark, _paths
from ringstow.dcp._reader import StorageReader
from ringstow.dcp._saves import Save
from ringstow.dcp._writer import StorageWriter

StrPath = str | os.PathLike[str]

_log = logging.getLogger("ringstow")

StockWriter = filesystem.FileSystemWriter
StockReader = filesystem.FileSystemReader

_SIGNATURE = inspect.signature(StockWriter)
_HONOURED = {"path", "overwrite", "cache_staged_state_dict", "_extensions"}
_warned: set[str] = set()


class Settings:
    """What `use_by_default` was given."""

    config: Config | None = None
    allow_pickle = False


class FileSystemWriter(StorageWriter):
    """`StorageWriter` with the arguments of torch's FileSystemWriter.

    With ``_extensions``, which transform what is written (to encrypt or compress it), it returns
    torch's own writer, whose checkpoints torch's own reader loads.
    """

    _keeps_id = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a writer, or torch's own if it has to transform the bytes."""
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
        self._keeps_snapshot = bool(given.arguments.get("cache_staged_state_dict", True))
        given.apply_defaults()
        self._given = {k: v for k, v in given.arguments.items() if k not in ("path", "_extensions")}
        vars(self).update(self._given)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "given": self._given,
            "keeps_snapshot": self._keeps_snapshot,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._given, self._keeps_snapshot = state["given"], state["keeps_snapshot"]
        vars(self).update(self._given)

    @property
    def path(self) -> pathlib.Path:
        """The directory, as in torch's writer."""
        return pathlib.Path(self.checkpoint_id or "")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is.

        Raises:
            InvalidStateError: there is a checkpoint, and ``overwrite=False`` was given.
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
                need no ``_extension_registry``.
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
        """Set the directory of later loads; None leaves it as it is."""
        super().reset(checkpoint_id)
        self._stock.reset(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the table of contents of a checkpoint of either kind."""
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
        """Read all that the plan asks for."""
        if self._is_stock:
            return self._stock.read_data(plan, planner)
        return super().read_data(plan, planner)


FileSystemReader.register(StockReader)


def _single_file(value: Any) -> str | None:
    return None if value else "a rank writes as few files as Config(shard_bytes=...) allows"


def _sync(value: Any) -> str | None:
    return None if value else "a save is durable when it returns"


def _threads(value: Any) -> str | None:
    return None if value == 1 else "one ring does the I/O, whose knobs are in ringstow.Config"


def _ahead(value: Any) -> str | None:
    default = _SIGNATURE.parameters["per_thread_copy_ahead"].default
    return None if value == default else "copies ahead go to Config(pool_bytes=...)"


def _serialization(value: Any) -> str | None:
    return None if getattr(value, "name", "") == "SAFETENSORS" else "the files are safetensors"


# For each argument without effect: a function that says what ringstow does instead.
_INSTEAD: dict[str, Callable[[Any], str | None]] = {
    "single_file_per_rank": _single_file,
    "sync_files": _sync,
    "thread_count": _threads,
    "per_thread_copy_ahead": _ahead,
    "serialization_format": _serialization,
}


def _check(given: dict[str, Any]) -> None:
    """Warn of arguments that have no effect; refuse unknown ones."""
    unknown = []
    for name, value in given.items():
        if name in _INSTEAD:
            why = _INSTEAD[name](value)
            if why is not None:
                _warn_once(
                    name, f"FileSystemWriter({name}={value!r}) has no effect in ringstow: {why}"
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
    """Tell whether a save would replace a checkpoint, ringstow's or torch's."""
    path = save.path
    if save.is_alone:
        files = [
            os.path.join(path, _paths.MANIFEST),
            os.path.join(os.path.dirname(path), f"__0{_mark.NAME}"),
        ]
    else:
        parts = _paths.of_rank(path, 0)
        files = [
            os.path.join(place, name)
            for place, name in (
                (path, _paths.MANIFEST),
                (path, _mark.NAME),
                (parts, _paths.MANIFEST),
            )
        ]
    return any(map(os.path.exists, files))


def _is_stock(path: str) -> bool:
    """Tell whether a directory holds a checkpoint by torch's own writer, and none by ringstow."""
    ours = (path, _paths.of_rank(path, 0))
    if any(os.path.exists(os.path.join(place, _paths.MANIFEST)) for place in ours):
        return False
    return any(
        os.path.exists(os.path.join(path, name)) for name in (_mark.NAME, f"__0{_mark.NAME}")
    )
