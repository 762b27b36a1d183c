"""If CUDA refuses to register the staging memory, saves fall back to pageable copies."""

from __future__ import annotations

import logging

import torch
from support import assert_same

import ringstow
from ringstow.dcp import StorageWriter

OUT_OF_MEMORY = 2


def test_save_falls_back_to_pageable_copies(gpu, on_gpu, at):
    gpu.fail("cuMemHostRegister_v2", OUT_OF_MEMORY)
    report = ringstow.save({"t": on_gpu(torch.arange(1000.0))}, at / "c")
    assert report.pinned is False
    (fallback,) = [f for f in report.fallbacks if f.kind == "pinned_memory"]
    assert fallback.got == "pageable copies"
    assert fallback.reason
    assert fallback.remedy
    assert "pageable memory" in str(report)
    assert_same(ringstow.load(at / "c"), {"t": torch.arange(1000.0)})


def test_snapshot_falls_back_to_pageable_memory(gpu, on_gpu, caplog):
    writer = StorageWriter()
    tensor = on_gpu(torch.arange(1000.0))
    gpu.fail("cuMemHostRegister_v2", OUT_OF_MEMORY)
    with caplog.at_level(logging.WARNING, "ringstow"):
        staged = writer.stage({"t": tensor})
    assert_same(staged["t"].clone(), torch.arange(1000.0))
    assert "pageable memory instead of a snapshot in pinned memory" in caplog.text
    del staged
    writer.close()
