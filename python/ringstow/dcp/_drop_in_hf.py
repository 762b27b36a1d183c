"""`export_hf` with the arguments of torch's HuggingFaceStorageWriter, for `use_by_default`."""

from __future__ import annotations

import inspect
import logging
import pathlib
from typing import Any

from torch.distributed.checkpoint import hf_storage, storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ringstow._core._arguments import StrPath
from ringstow._core._errors import UnsupportedError
from ringstow._ranks._group import team_of
from ringstow._ranks._team import Team
from ringstow.dcp import _paths, _private
from ringstow.dcp._drop_in import Settings
from ringstow.dcp._export_hf import ExportReport, Options, export_planned
from ringstow.dcp._rank_errors import picklable

_log = logging.getLogger("ringstow")

StockHfWriter = hf_storage.HuggingFaceStorageWriter

_SIGNATURE = inspect.signature(StockHfWriter)
IS_KNOWN = {"save_distributed", "enable_consolidation"} <= {*_SIGNATURE.parameters}
"""Whether this torch's writer takes the same arguments as ours; older versions do not."""
_HONOURED = {"path", "fqn_to_index_mapping", "save_distributed", "enable_consolidation"}
_INSTEAD = {
    "thread_count": "one ring does the I/O; ringstow.Config has its settings",
    "thread_count_consolidation": "the ranks write the final files; nothing is consolidated",
}
_warned: set[str] = set()


class HuggingFaceStorageWriter(storage.StorageWriter):
    """Writes a model by `export_hf`, with the arguments of torch's HuggingFaceStorageWriter.

    All ranks write the final files, with or without ``enable_consolidation``, and there is no
    directory ``sharded``. With ``save_distributed`` and no consolidation the caller wants shards:
    it returns torch's own writer.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a writer, or torch's own if the caller wants the shards of each rank."""
        given = _SIGNATURE.bind(*args, **kwargs).arguments if args or kwargs else {}
        if not given.get("save_distributed") or given.get("enable_consolidation"):
            return super().__new__(cls)
        if cls is not HuggingFaceStorageWriter:
            raise UnsupportedError(
                f"{cls.__name__}(save_distributed=True) without enable_consolidation writes the "
                "shards of each rank, which ringstow does not: derive the class from torch's "
                "HuggingFaceStorageWriter, imported before use_by_default()"
            )
        _warn_once(
            "save_distributed",
            "HuggingFaceStorageWriter(save_distributed=True): torch's own writer saves the shards "
            "of each rank. With enable_consolidation=True, ringstow writes the model's final files "
            "by all ranks",
        )
        return StockHfWriter(*args, **kwargs)

    def __init__(self, path: StrPath, *args: Any, **kwargs: Any) -> None:
        """Make a writer.

        Args:
            path: the model's directory. A model there is replaced once the new one is complete.
            args: the other arguments of torch's writer. A warning names, once, each argument that
                has no effect here.
            kwargs: as args.

        Raises:
            TypeError: torch's writer does not take the argument either.
            UnsupportedError: an argument of another torch that ringstow does not know.
            InvalidStateError: the path is not in the file system.
        """
        given = _SIGNATURE.bind(path, *args, **kwargs)
        _check(given.arguments)
        given.apply_defaults()
        mapping = given.arguments["fqn_to_index_mapping"]
        self._path = _paths.directory(path)
        self._numbers = None if mapping is None else tuple(mapping.items())
        self._config = Settings.config
        self.save_id = _paths.fresh_id()
        self.report: ExportReport | None = None
        """Report of the last export; None on a rank that has saved nothing."""

    @property
    def path(self) -> pathlib.Path:
        """The directory, as in torch's writer."""
        return pathlib.Path(self._path)

    @property
    def checkpoint_id(self) -> str:
        """The directory."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Return whether an id is a path in the file system, not a URL."""
        return _paths.is_path(checkpoint_id)

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Set the directory of later saves; None keeps it."""
        if checkpoint_id is not None:
            self._path = _paths.directory(checkpoint_id)
        self.save_id = _paths.fresh_id()

    def storage_meta(self) -> StorageMeta | None:
        """Return the directory and the save's id, for DCP's metadata."""
        return StorageMeta(checkpoint_id=self._path, save_id=self.save_id)

    @picklable
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save.

        Raises:
            UnsupportedError: the ranks save without collectives.
        """
        if not kwargs.get("use_collectives", True):
            raise UnsupportedError(
                "HuggingFaceStorageWriter needs collectives: the ranks write one model together. "
                "Save without use_collectives=False"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans as they are."""
        return plans

    @picklable
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the model, together with the other ranks; it is complete when this returns.

        Raises:
            Exception: any error of `export_hf`.
            UnsupportedError: this torch does not show which ranks save.
        """
        team = _team()
        options = Options(
            path=self._path,
            overwrite=True,
            numbers="one" if self._numbers is None else self._numbers,
        )
        self.report = export_planned(lambda: (options, plan, planner), team, self._config)
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Note the save in DCP's metadata; the model is complete already."""
        metadata.storage_data = None
        metadata.storage_meta = self.storage_meta()
        _private.set_version(metadata)


HuggingFaceStorageWriter.register(StockHfWriter)


def _team() -> Team:
    meeting = _private.save_meeting()
    if meeting is None:
        raise UnsupportedError(
            "this torch does not show which ranks save: call ringstow.dcp.export_hf(state, path, "
            "group=...) instead of HuggingFaceStorageWriter"
        )
    return team_of(meeting.group) if meeting.use_dist else Team()


def _check(given: dict[str, Any]) -> None:
    """Warn of arguments that have no effect; refuse unknown ones."""
    for name, value in given.items():
        if name in _HONOURED or value == _SIGNATURE.parameters[name].default:
            continue
        if name not in _INSTEAD:
            raise UnsupportedError(
                f"HuggingFaceStorageWriter({name}={value!r}): this version of ringstow does not "
                "know the argument; leave it out, or save with torch's own writer"
            )
        _warn_once(
            name,
            f"HuggingFaceStorageWriter({name}={value!r}) has no effect in ringstow: "
            f"{_INSTEAD[name]}",
        )


def _warn_once(name: str, text: str) -> None:
    if name not in _warned:
        _warned.add(name)
        _log.warning("%s", text)
