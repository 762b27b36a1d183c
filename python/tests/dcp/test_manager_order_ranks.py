"""Going back to an earlier step, and steps that are kept, on several ranks and on nodes."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks

import ringstow


@pytest.mark.parametrize("has_nodes", [False, True])
@on_ranks(2)
def test_all_ranks_go_back_and_keep_alike(rank, tmp_path, has_nodes):
    root = tmp_path / f"node{rank}" if has_nodes else tmp_path
    state = {"w": torch.zeros(3), "step": torch.tensor(0)}

    def save(manager, *steps):
        for step in steps:
            state["step"] = torch.tensor(step)
            manager.save(step, state)

    def left(manager):
        return [step.step for step in manager.steps()]

    options = {"nodes": ringstow.Nodes() if has_nodes else None}
    with ringstow.CheckpointManager(root / "run", **options) as manager:
        save(manager, 10, 20, 30, 40, 50)
        assert manager.restore(30, into=state).step == 30
        save(manager, 31)
        assert left(manager) == [10, 20, 30, 40, 50, 31]
    with ringstow.CheckpointManager(root / "run", **options) as manager:
        assert manager.restore(into=state).step == 31
        assert state["step"] == 31
        manager.keep(50)
        with pytest.raises(ringstow.NoCheckpointError):
            manager.keep(7)
        assert manager.restore(20, into=state, drop_newer=True).step == 20
        assert left(manager) == [10, 20, 50]
    with ringstow.CheckpointManager(root / "run", keep=1, **options) as manager:
        save(manager, 21)
        assert left(manager) == [50, 21]
        assert manager.release(50) is True
        assert manager.release(50) is False
        save(manager, 22)
        assert left(manager) == [22]
