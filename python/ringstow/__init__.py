"""Training checkpoints at the speed of the disk.

``save`` and ``save_async`` write a state dict as a directory of plain safetensors files with a
JSON manifest; ``load`` and ``load_into`` read it back, whole or in part, every byte checked;
``open`` looks into it without loading.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringstow._core._config import Config
from ringstow._core._errors import (
    BusyError,
    CorruptCheckpointError,
    CorruptCheckpointWarning,
    Error,
    FormatError,
    GpuError,
    IncompleteCheckpointError,
    InvalidStateError,
    KeyMismatchError,
    MissingFilesError,
    MissingShareError,
    NoCheckpointError,
    NotCommittedError,
    NotDurableError,
    PanickedError,
    ReplacedCheckpointError,
    SaveCancelledError,
    TornSaveError,
    UnsupportedError,
)
from ringstow._core._policies import Nodes, Previous, Retention, Tiers
from ringstow._manager._checkpoint_manager import CheckpointManager
from ringstow._manager._restore import Restored
from ringstow._reading._catalog import diff, latest, prune, remove, retain, slim, steps, verify
from ringstow._reading._checkpoint import Checkpoint, Entry, open
from ringstow._reading._load import load, load_into
from ringstow._reports._outcomes import Listener, Outcome, on_done
from ringstow._saving._base import Base
from ringstow._saving._file_streams import FileReader, FileWriter, open_read, open_write
from ringstow._saving._promote import promote
from ringstow._saving._save import release_memory, save, save_async
from ringstow._saving._tier_copies import wait_promoted
from ringstow._state.objects._per_rank import PerRank
from ringstow._state.objects._rng import RngState
from ringstow._state.tree._damaged_tensors import DamagedTensor, Salvaged

if TYPE_CHECKING:
    from ringstow._reports._reports import (
        Damage,
        Fallback,
        LoadReport,
        LoadSeconds,
        Progress,
        PromotionReport,
        SaveReport,
        SaveSeconds,
        VerifyReport,
        WriteReport,
        WriteSeconds,
    )
    from ringstow._reports._run_reports import (
        CheckpointInfo,
        DiffReport,
        ElementDiff,
        Left,
        Removed,
        Retained,
        Slimmed,
        Step,
        Swept,
        TensorChange,
        TensorDiff,
        ValueDiff,
    )
    from ringstow._saving._save_future import SaveHandle

__all__ = [
    "Base",
    "BusyError",
    "Checkpoint",
    "CheckpointInfo",
    "CheckpointManager",
    "Config",
    "CorruptCheckpointError",
    "CorruptCheckpointWarning",
    "Damage",
    "DamagedTensor",
    "DiffReport",
    "ElementDiff",
    "Entry",
    "Error",
    "Fallback",
    "FileReader",
    "FileWriter",
    "FormatError",
    "GpuError",
    "IncompleteCheckpointError",
    "InvalidStateError",
    "KeyMismatchError",
    "Left",
    "Listener",
    "LoadReport",
    "LoadSeconds",
    "MissingFilesError",
    "MissingShareError",
    "NoCheckpointError",
    "Nodes",
    "NotCommittedError",
    "NotDurableError",
    "Outcome",
    "PanickedError",
    "PerRank",
    "Previous",
    "Progress",
    "PromotionReport",
    "Removed",
    "ReplacedCheckpointError",
    "Restored",
    "Retained",
    "Retention",
    "RngState",
    "Salvaged",
    "SaveCancelledError",
    "SaveHandle",
    "SaveReport",
    "SaveSeconds",
    "Slimmed",
    "Step",
    "Swept",
    "TensorChange",
    "TensorDiff",
    "Tiers",
    "TornSaveError",
    "UnsupportedError",
    "ValueDiff",
    "VerifyReport",
    "WriteReport",
    "WriteSeconds",
    "diff",
    "latest",
    "load",
    "load_into",
    "on_done",
    "open",
    "open_read",
    "open_write",
    "promote",
    "prune",
    "release_memory",
    "remove",
    "retain",
    "save",
    "save_async",
    "slim",
    "steps",
    "verify",
    "wait_promoted",
]


# Imported on first use: some import torch.
_MODULES = {"convert", "dcp", "distributed", "integrations", "monitoring"}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES, "__version__"})


def __getattr__(name: str) -> Any:
    # What takes a while is made on first use: the classes of reports and handles, and the version,
    # which the installed package's metadata has.
    if name == "SaveHandle":
        from ringstow._saving._save_future import SaveHandle

        return SaveHandle
    if name in _MODULES:
        import importlib

        return importlib.import_module(f"ringstow.{name}")
    if name == "__version__":
        from importlib.metadata import version

        return version("ringstow")
    if name in __all__:  # a report: all else is here already
        from ringstow._reports import _reports, _run_reports

        return getattr(_reports if hasattr(_reports, name) else _run_reports, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
