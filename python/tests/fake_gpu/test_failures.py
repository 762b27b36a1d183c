"""A GPU that fails during a save. Only one test, because the error stays in the CUDA context."""

from __future__ import annotations

import pytest
import torch
from support import assert_same, litter

import ringstow

ILLEGAL_ADDRESS = 700


def test_failed_gpu_copy_raises_and_commits_nothing(gpu, on_gpu, at):
    before = {"t": torch.arange(1000.0)}
    ringstow.save(before, at / "c")
    tensor = on_gpu(torch.ones(1 << 20))
    gpu.fail("execute", ILLEGAL_ADDRESS)
    handle = ringstow.save_async({"layer": tensor}, at / "c")
    with pytest.raises(ringstow.Error, match="layer|cuda:0|GPU 0|device 0") as caught:
        handle.result()
    assert "700" in str(caught.value) or "ILLEGAL" in str(caught.value).upper()
    assert not handle.staged()
    assert litter(at / "c") == []
    assert_same(ringstow.load(at / "c"), before)
    gpu.reset()
