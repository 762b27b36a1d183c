"""On ranks, rank 0 decides for all whether a step is left out."""

from __future__ import annotations

import threading
from unittest.mock import patch

import pytest
import torch
from ranks import on_ranks, raised

import ringstow
from ringstow import CheckpointManager
from ringstow._manager import _after_save

STATE = {"w": torch.zeros(1000)}


def held(gate):
    """Hold saves in their last part, the removal of old steps, until an event is set."""
    clear = _after_save.cleared
    return patch.object(_after_save, "cleared", lambda *given: (gate.wait(), clear(*given))[1])


@pytest.mark.parametrize("has_nodes", [False, True])
@on_ranks(2)
def test_all_ranks_leave_out_the_same_step(rank, tmp_path, has_nodes):
    root, nodes, gate = tmp_path / "run", None, threading.Event()
    if has_nodes:
        root, nodes = tmp_path / f"node{rank}" / "run", ringstow.Nodes()
    if rank == 1:  # rank 0 is the slow one
        gate.set()
    with held(gate), CheckpointManager(root, nodes=nodes) as manager:
        handles = [manager.save_async(1, STATE, on_busy="skip")]
        if rank == 1:  # its part of the save has ended long ago
            manager._calls.saving.is_over.wait()
        handles.append(manager.save_async(2, STATE, on_busy="skip"))
        gate.set()
        manager.wait()
        handles.append(manager.save_async(3, STATE, on_busy="skip"))
        handles[-1].result()
        assert [handle.skipped for handle in handles] == [False, True, False]
        assert [step.step for step in manager.steps()] == [1, 3]


@on_ranks(2)
def test_ranks_that_save_different_steps_are_told(rank, tmp_path):
    with CheckpointManager(tmp_path) as manager:
        kind, text = raised(lambda: manager.save_async(1 + rank, STATE, on_busy="skip"))
    assert kind == "InvalidStateError"
    assert "do not make the same call" in text


@on_ranks(2)
def test_bad_metrics_of_a_step_that_is_left_out_fail_on_all_ranks(rank, tmp_path):
    """Rank 1 alone gives them."""
    gate, metrics = threading.Event(), {"loss": "x" if rank else 1}
    with held(gate), CheckpointManager(tmp_path) as manager:
        manager.save_async(1, STATE, on_busy="skip")
        try:
            with pytest.raises(ringstow.Error):
                manager.save_async(2, STATE, metrics=metrics, on_busy="skip")
        finally:
            gate.set()


@on_ranks(2)
def test_ranks_that_differ_in_on_busy_or_in_what_stays_are_told(rank, tmp_path):
    with CheckpointManager(tmp_path, keep=ringstow.Retention(every=10 + rank)) as manager:
        for step, on_busy in ((1, "skip" if rank else "wait"), (10, "skip")):
            with pytest.raises(ringstow.InvalidStateError) as caught:
                manager.save_async(step, STATE, on_busy=on_busy)
            assert "do not make the same call" in str(caught.value)
            expected = f"rank 0: save_async[{step}, 'wait']; rank 1: save_async[{step}, 'skip']"
            assert expected in str(caught.value)
