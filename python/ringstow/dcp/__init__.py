"""ringstow under torch.distributed.checkpoint (DCP): sharded saves and resharded loads.

::

    import torch.distributed.checkpoint as dcp
    import ringstow.dcp

    dcp.save(state, checkpoint_id=path, storage_writer=ringstow.dcp.StorageWriter())
    dcp.load(state, checkpoint_id=path, storage_reader=ringstow.dcp.StorageReader())
    path = ringstow.dcp.latest("run")  # the same on every rank
    ringstow.dcp.export_hf(model.state_dict(), "out/model")  # one model, written by all ranks

Unlike ``import ringstow`` this imports torch. ``docs/dcp.md`` is the guide.
"""

from __future__ import annotations

try:
    from ringstow.dcp._export_hf import ExportReport, export_hf
    from ringstow.dcp._latest import latest
    from ringstow.dcp._planner import LoadPlanner
    from ringstow.dcp._reader import StorageReader
    from ringstow.dcp._save_planner import SavePlanner
    from ringstow.dcp._use_by_default import use_by_default
    from ringstow.dcp._writer import StorageWriter
except ImportError as error:
    raise ImportError(f"ringstow.dcp needs torch 2.6 or newer: {error}") from error

__all__ = [
    "ExportReport",
    "LoadPlanner",
    "SavePlanner",
    "StorageReader",
    "StorageWriter",
    "export_hf",
    "latest",
    "use_by_default",
]
