"""`from_pretrained` opens what the ranks of a training export together."""

from __future__ import annotations

import children
import pytest
import torch
from support import assert_same
from transformers import AutoModelForCausalLM
from transformers_runs import model

import ringstow
import ringstow.dcp

pytestmark = pytest.mark.timeout(300)
children.preload(__name__)


def export(rank, ranks, path, kind, dtype):
    """Export the model as it is sharded in a training."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    made = model()
    mesh = init_device_mesh("cpu", (ranks,))
    if kind == "tp":
        for layer in made.model.layers:
            by_rows, by_columns = RowwiseParallel(), ColwiseParallel()
            plan = {
                "mlp.gate_proj": by_columns,
                "mlp.up_proj": by_columns,
                "mlp.down_proj": by_rows,
            }
            parallelize_module(layer, mesh, plan)
    else:
        for layer in (*made.model.layers, made):
            fully_shard(layer, mesh=mesh)
    report = ringstow.dcp.export_hf(
        made.state_dict(), path, dtype=dtype, max_shard_size=20_000, overwrite=True
    )
    assert len(report.files) > 1
    assert report.tied == (("lm_head.weight", "model.embed_tokens.weight"),)
    if rank == 0:
        made.config.save_pretrained(path)


@pytest.mark.parametrize("kind", ["fsdp2", "tp"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_from_pretrained_opens_an_export_of_ranks(tmp_path, kind, dtype):
    path = tmp_path / "model"
    assert children.exit_codes(2, export, str(path), kind, dtype) == [0, 0]
    found = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    expected = model()
    if dtype:
        expected = expected.to(getattr(torch, dtype))
    assert_same(dict(found.state_dict()), dict(expected.state_dict()))
    if dtype is None:  # a cast of the complete model casts buffers that no file holds
        tokens = torch.arange(8).view(1, 8)
        assert torch.equal(found(tokens).logits, expected.eval()(tokens).logits)
