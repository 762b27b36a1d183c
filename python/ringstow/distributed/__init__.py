"""Save and load state that is distributed over the ranks of a job, without a planner.

::

    import ringstow.distributed

    state = {"model": model, "optimizer": optimizer, "step": step, "rng": ringstow.RngState()}
    ringstow.distributed.save(state, path)             # on every rank
    ringstow.distributed.load_into(state, path)        # on any number of ranks

Each rank derives from its DTensors what it writes and reads. The file format is the same as
ringstow.dcp's: each loads the other's checkpoints. Unlike ``import ringstow`` this imports torch.
``docs/distributed.md`` is the guide.
"""

from __future__ import annotations

from ringstow._state.objects._per_rank import PerRank

try:
    from ringstow.distributed._load import load, load_into
    from ringstow.distributed._save import save, save_async
except ImportError as error:
    raise ImportError(f"ringstow.distributed needs torch 2.6 or newer: {error}") from error

__all__ = ["PerRank", "load", "load_into", "save", "save_async"]
