"""Tests with the fake CUDA driver. `test_cuda.py` in the folder above starts their process."""

from __future__ import annotations

import gc
import os
import pathlib
import sys
import threading

import pytest

SECONDS = 300
HERE = pathlib.Path(__file__).parent
DRIVER = os.environ.get("RINGSTOW_FAKE_CUDA_HERE")

collect_ignore_glob = [] if DRIVER else ["*"]

if DRIVER:
    sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "dcp")]
    from driver import Driver

    from ringstow._state.tensors import _cuda, _torch

    _driver = Driver(DRIVER)
    for seam in ("place_of", "runtime", "empty", "copy_to_host", "copy_all", "clone"):
        setattr(_cuda, seam, getattr(_driver, seam))
    # torch itself takes the driver's tensors for CPU tensors.
    _torch.usual = lambda: _torch.Usual((), None)


@pytest.fixture(autouse=True)
def gpu():
    """The driver. A test must free all GPU memory and do nothing that a real driver forbids."""
    _driver.reset()
    before = _driver.live("allocations")
    yield _driver
    _driver.release()
    for thread in threading.enumerate():
        # The thread releases the tensors shortly after the save ends.
        if thread.name.startswith("ringstow-save"):
            thread.join(SECONDS)
    gc.collect()
    assert _driver.violations() == []
    assert _driver.live("allocations") == before


@pytest.fixture
def on_gpu(gpu):
    """Return a function that copies a CPU tensor to a GPU."""
    return gpu.tensor
