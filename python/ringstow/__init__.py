"""Training checkpoints at the speed of the disk.

``save`` and ``save_async`` write a state dict as a directory of plain safetensors files with a
JSON manifest; ``load`` and ``load_into`` read it back, whole or in part, every byte checked.
"""

from __future__ import annotations

from ringstow._api import (
    latest,
    load,
    load_into,
    retain,
    retire,
    save,
    save_async,
    verify,
)
from ringstow._config import Config
from ringstow._errors import (
    BusyError,
    CancelledError,
    CorruptCheckpointError,
    Error,
    FormatError,
    GpuError,
    IncompleteCheckpointError,
    InvalidStateError,
    KeyMismatchError,
    UnsupportedError,
)
from ringstow._handle import SaveHandle
from ringstow._report import (
    Damage,
    Fallback,
    LoadReport,
    LoadSeconds,
    Progress,
    Retained,
    SaveReport,
    SaveSeconds,
    VerifyReport,
)

__all__ = [
    "BusyError",
    "CancelledError",
    "Config",
    "CorruptCheckpointError",
    "Damage",
    "Error",
    "Fallback",
    "FormatError",
    "GpuError",
    "IncompleteCheckpointError",
    "InvalidStateError",
    "KeyMismatchError",
    "LoadReport",
    "LoadSeconds",
    "Progress",
    "Retained",
    "SaveHandle",
    "SaveReport",
    "SaveSeconds",
    "UnsupportedError",
    "VerifyReport",
    "latest",
    "load",
    "load_into",
    "retain",
    "retire",
    "save",
    "save_async",
    "verify",
]


def __getattr__(name: str) -> str:
    # Read from the installed package's metadata, and only if somebody asks: it takes a while.
    if name == "__version__":
        from importlib.metadata import version

        return version("ringstow")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
