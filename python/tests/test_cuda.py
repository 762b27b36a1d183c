"""Run the tests of ``fake_gpu/``: GPU tensors on a fake CUDA driver, without a GPU.

A process loads one CUDA driver, once, so each file runs in its own process.
"""

import os
import pathlib
import re

import forked
import pytest
import torch
from support import cargo_build

import ringstow

HERE = pathlib.Path(__file__).parent
OPEN = {"FAKE_CUDA_OPEN": "1"}  # the CPU, and so torch's kernels, can access the GPUs' memory
FILES = {
    "test_save.py": OPEN,
    "test_background.py": OPEN,
    "test_load.py": OPEN,
    "test_dcp.py": OPEN,
    "test_failures.py": OPEN,
    "test_not_pinned.py": OPEN,
    "test_old_driver.py": {**OPEN, "FAKE_CUDA_DRIVER_VERSION": "9000"},
    "test_protected.py": {},
}


@pytest.fixture(scope="session")
def fake_cuda():
    """Return the path of the fake driver: ``RINGSTOW_FAKE_CUDA``, or build it."""
    path = os.environ.get("RINGSTOW_FAKE_CUDA")
    if path:
        return path
    return str(cargo_build("fake-cuda") / "libfake_cuda.so")


@pytest.mark.timeout(700)
@pytest.mark.parametrize("file", FILES)
def test_on_the_fake_driver(file, fake_cuda, tmp_path):
    clean = {name: text for name, text in os.environ.items() if not name.startswith("FAKE_CUDA")}
    settings = {"RINGSTOW_FAKE_CUDA_HERE": fake_cuda, "FAKE_CUDA_DEVICES": "2", **FILES[file]}
    options = ["-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'inner'}"]
    run = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    test = forked.Program(run, *options, HERE / "fake_gpu" / file, env={**clean, **settings})
    done = test.wait(timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"[1-9]\d* passed", done.stdout), done.stdout


def test_every_file_is_run():
    assert {path.name for path in (HERE / "fake_gpu").glob("test_*.py")} == set(FILES)


def test_cpu_save_does_not_call_torch_cuda(monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "cuda", None)
    state = {"t": torch.arange(6.0).view(2, 3).t(), "e": torch.empty(0)}
    ringstow.save(state, tmp_path / "c")
    assert torch.equal(ringstow.load(tmp_path / "c", device="cpu")["t"], state["t"])
    into = {"t": torch.zeros(3, 2), "e": torch.empty(0)}
    ringstow.load_into(into, tmp_path / "c")
    assert torch.equal(into["t"], state["t"])


NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize(
    ("device", "match"),
    [
        *(
            pytest.param(cuda, "needs a GPU", marks=NO_GPU)
            for cuda in ("cuda", "cuda:0", torch.device("cuda"))
        ),
        *(("mps", "not to mps"), ("xpu:0", "not to xpu"), ("gpu", "no device")),
    ],
    ids=str,
)
def test_missing_gpus_and_other_devices_are_refused_before_reading(device, match, tmp_path):
    with pytest.raises(ringstow.UnsupportedError, match=match):
        ringstow.load(tmp_path / "nothing", device=device)


def test_rocm_is_refused_by_name(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "hip", "6.2")
    with pytest.raises(ringstow.UnsupportedError, match="not to ROCm"):
        ringstow.load(tmp_path / "nothing", device="cuda")
