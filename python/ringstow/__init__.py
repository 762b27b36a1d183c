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
from ringstow._saving import _jobs as _jobs  # its handlers of exits and forks must come first

if TYPE_CHECKING:
    from ringstow._core._when import (
        AtSteps,
        Before,
        Continuous,
        Every,
        EverySteps,
        First,
        OnSignal,
        When,
    )
    from ringstow._manager._checkpoint_manager import CheckpointManager
    from ringstow._manager._restore import Restored
    from ringstow._reading._checkpoint import Checkpoint, Entry, open
    from ringstow._reading._load import load, load_into
    from ringstow._reading._run_steps import (
        diff,
        latest,
        prune,
        remove,
        retain,
        slim,
        steps,
        verify,
    )
    from ringstow._reports._checkpoint_reports import (
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
    from ringstow._reports._done_callbacks import Listener, Outcome, on_done
    from ringstow._reports._io_reports import (
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
    from ringstow._saving._base import Base
    from ringstow._saving._promote import promote
    from ringstow._saving._save import release_memory, save, save_async
    from ringstow._saving._save_future import SaveHandle
    from ringstow._saving._single_files import FileReader, FileWriter, open_read, open_write
    from ringstow._saving._tier_copies import wait_promoted
    from ringstow._state.objects._per_rank import PerRank
    from ringstow._state.objects._rng import RngState
    from ringstow._state.tensors._composites import allow_types
    from ringstow._state.tensors._layouts import TensorParts
    from ringstow._state.tree._damaged_tensors import DamagedTensor, Salvaged
    from ringstow._state.tree._key_maps import Concat, Split, Stack, Transpose, Unstack
    from ringstow._state.tree._mapped_state import MappedState

__all__ = [
    "AtSteps",
    "Base",
    "Before",
    "BusyError",
    "Checkpoint",
    "CheckpointInfo",
    "CheckpointManager",
    "Concat",
    "Config",
    "Continuous",
    "CorruptCheckpointError",
    "CorruptCheckpointWarning",
    "Damage",
    "DamagedTensor",
    "DiffReport",
    "ElementDiff",
    "Entry",
    "Error",
    "Every",
    "EverySteps",
    "Fallback",
    "FileReader",
    "FileWriter",
    "First",
    "FormatError",
    "GpuError",
    "IncompleteCheckpointError",
    "InvalidStateError",
    "KeyMismatchError",
    "Left",
    "Listener",
    "LoadReport",
    "LoadSeconds",
    "MappedState",
    "MissingFilesError",
    "MissingShareError",
    "NoCheckpointError",
    "Nodes",
    "NotCommittedError",
    "NotDurableError",
    "OnSignal",
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
    "Split",
    "Stack",
    "Step",
    "Swept",
    "TensorChange",
    "TensorDiff",
    "TensorParts",
    "Tiers",
    "TornSaveError",
    "Transpose",
    "Unstack",
    "UnsupportedError",
    "ValueDiff",
    "VerifyReport",
    "When",
    "WriteReport",
    "WriteSeconds",
    "allow_types",
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


# Imported on first use: every data loader worker imports the package again.
_MODULES = {"convert", "dcp", "distributed", "integrations", "monitoring"}
_HOMES = {
    "_core._when": "AtSteps Before Continuous Every EverySteps First OnSignal When",
    "_manager._checkpoint_manager": "CheckpointManager",
    "_manager._restore": "Restored",
    "_reading._run_steps": "diff latest prune remove retain slim steps verify",
    "_reading._checkpoint": "Checkpoint Entry open",
    "_reading._load": "load load_into",
    "_reports._done_callbacks": "Listener Outcome on_done",
    "_reports._io_reports": "Damage Fallback LoadReport LoadSeconds Progress PromotionReport"
    " SaveReport SaveSeconds VerifyReport WriteReport WriteSeconds",
    "_reports._checkpoint_reports": "CheckpointInfo DiffReport ElementDiff Left Removed Retained"
    " Slimmed Step Swept TensorChange TensorDiff ValueDiff",
    "_saving._base": "Base",
    "_saving._single_files": "FileReader FileWriter open_read open_write",
    "_saving._promote": "promote",
    "_saving._save": "release_memory save save_async",
    "_saving._save_future": "SaveHandle",
    "_saving._tier_copies": "wait_promoted",
    "_state.objects._per_rank": "PerRank",
    "_state.objects._rng": "RngState",
    "_state.tensors._composites": "allow_types",
    "_state.tensors._layouts": "TensorParts",
    "_state.tree._damaged_tensors": "DamagedTensor Salvaged",
    "_state.tree._mapped_state": "MappedState",
    "_state.tree._key_maps": "Concat Split Stack Transpose Unstack",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("ringstow")
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"ringstow.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"ringstow.{_HOME_OF[name]}"), name)
    globals()[name] = found  # the next use finds it without this function
    return found


def __dir__() -> list[str]:
    dunders = {name for name in globals() if name.startswith("__")}
    return sorted({*__all__, *_MODULES, *dunders, "__version__"})
