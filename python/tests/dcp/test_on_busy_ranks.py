"""On ranks, rank 0 decides for all whether a step is left out."""

from __future__ import annotations

import threading

import pytest
import torch

import ringstow
from ringstow import CheckpointManager
from ringstow._manager import _after_save


def train(rank, root, has_nodes, slow_rank):
    """Save steps of which one comes while a rank is busy; return which were skipped, and why."""
    root = root / f"node{rank}" if has_nodes else root
    gate = threading.Event()
    clear = _after_save.cleared

    def held(*given):
        gate.wait()
        return clear(*given)

    if rank == slow_rank:
        _after_save.cleared = held
    try:
        state = {"w": torch.zeros(1000)}
        nodes = ringstow.Nodes() if has_nodes else None
        with CheckpointManager(root / "run", nodes=nodes) as manager:
            handles = [manager.save_async(1, state, on_busy="skip")]
            if rank != slow_rank:  # its part of the save has ended long ago
                manager._calls.saving.is_over.wait()
            handles.append(manager.save_async(2, state, on_busy="skip"))
            gate.set()
            manager.wait()
            handles.append(manager.save_async(3, state, on_busy="skip"))
            handles[-1].result()
            return [handle.skipped for handle in handles], [s.step for s in manager.steps()]
    finally:
        _after_save.cleared = clear


@pytest.mark.parametrize("has_nodes", [False, True])
def test_all_ranks_leave_out_the_same_step(ranks, tmp_path, has_nodes):
    expected = ([False, True, False], [1, 3])
    assert ranks(2).run(train, tmp_path, has_nodes, 0) == [expected] * 2


def other_calls(rank, root):
    with CheckpointManager(root) as manager:
        try:
            manager.save_async(1 + rank, {"w": torch.zeros(4)}, on_busy="skip")
        except ringstow.InvalidStateError as error:
            return str(error)
    return ""


def test_ranks_that_save_different_steps_are_told(ranks, tmp_path):
    for said in ranks(2).run(other_calls, tmp_path / "run"):
        assert "do not make the same call" in said


def bad_metrics(rank, root):
    """Leave a step out with metrics that rank 1 alone gives wrongly; return what each rank gets."""
    gate = threading.Event()
    clear = _after_save.cleared
    _after_save.cleared = lambda *given: (gate.wait(), clear(*given))[1]
    try:
        with CheckpointManager(root) as manager:
            manager.save_async(1, {"w": torch.zeros(4)}, on_busy="skip")
            try:
                manager.save_async(
                    2, {"w": torch.zeros(4)}, metrics={"loss": "x" if rank else 1}, on_busy="skip"
                )
            except ringstow.Error as error:
                return type(error).__name__
            finally:
                gate.set()
    finally:
        _after_save.cleared = clear
    return ""


def test_bad_metrics_of_a_step_that_is_left_out_fail_on_all_ranks(ranks, tmp_path):
    assert "" not in ranks(2).run(bad_metrics, tmp_path / "run")


def other_words(rank, root):
    said = []
    with CheckpointManager(root, keep=ringstow.Retention(every=10 + rank)) as manager:
        for step, on_busy in ((1, "skip" if rank else "wait"), (10, "skip")):
            try:
                manager.save_async(step, {"w": torch.zeros(4)}, on_busy=on_busy)
            except ringstow.InvalidStateError as error:
                said.append(str(error))
    return said


def test_ranks_that_differ_in_on_busy_or_in_what_stays_are_told(ranks, tmp_path):
    for said, every in ranks(2).run(other_words, tmp_path / "run"):
        assert "do not make the same call" in said
        assert "rank 0: save_async[1, 'wait']; rank 1: save_async[1, 'skip']" in said
        assert "rank 0: save_async[10, 'wait']; rank 1: save_async[10, 'skip']" in every
