"""A background save with a base guards tensors that it found unchanged until all is copied."""

from __future__ import annotations

import threading

import pytest
import torch
from held_save import LARGE, ONE
from support import litter

import ringstow
from ringstow._state.tensors._memory import LazyTensor


class Stopping:
    """A tensor at which a save stops, the first time that it reads it."""

    def __init__(self):
        self.reached = threading.Event()
        self.may_go_on = threading.Event()
        self.tensor = LazyTensor("F32", (LARGE,), 4 * LARGE, self.load)

    def load(self):
        self.reached.set()
        assert self.may_go_on.wait(60)
        return torch.zeros(LARGE)


@pytest.mark.parametrize("is_compared", [False, True])
def test_change_of_a_tensor_before_or_after_it_is_compared_fails_the_save(is_compared, tmp_path):
    """Nothing is to be written: all tensors are as the base has them."""
    stopping = Stopping()
    tensors = {"stop": stopping.tensor, "frozen": torch.ones(LARGE)}
    state = dict(reversed(tensors.items())) if is_compared else tensors
    before = {**state, "stop": torch.zeros(LARGE)}
    ringstow.save(before, tmp_path / "base", config=ONE, base=ringstow.Base())
    handle = ringstow.save_async(state, tmp_path / "c", config=ONE, base=tmp_path / "base")
    try:
        assert stopping.reached.wait(60)
        tensors["frozen"].add_(1)
    finally:
        stopping.may_go_on.set()
    with pytest.raises(ringstow.TornSaveError) as caught:
        handle.result()
    assert caught.value.tensors == ["frozen"]
    assert not (tmp_path / "c").exists()
    assert litter(tmp_path / "base") == []


def test_save_that_compares_can_be_cancelled(tmp_path):
    before = {"frozen": torch.ones(LARGE), "stop": torch.zeros(LARGE)}
    ringstow.save(before, tmp_path / "base", config=ONE, base=ringstow.Base())
    stopping = Stopping()
    state = {**before, "stop": stopping.tensor}
    handle = ringstow.save_async(state, tmp_path / "c", config=ONE, base=tmp_path / "base")
    assert stopping.reached.wait(60)
    handle.cancel()
    stopping.may_go_on.set()
    with pytest.raises(ringstow.SaveCancelledError):
        handle.result()
    assert not (tmp_path / "c").exists()
