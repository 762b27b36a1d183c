"""A driver that is too old causes an error, and nothing is written."""

from __future__ import annotations

import pytest
import torch

import ringstow


def test_old_driver_is_named(on_gpu, at):
    tensor = on_gpu(torch.ones(3))
    with pytest.raises(ringstow.UnsupportedError, match="driver"):
        ringstow.save({"t": tensor}, at / "c")
    assert not (at / "c" / "manifest.json").exists()
    ringstow.save({"t": torch.ones(3)}, at / "c")  # CPU tensors still work
