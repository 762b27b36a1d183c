"""Checkpoints that move between tensor parallelism, other layouts and a Trainer without shards."""

from __future__ import annotations

import os

import lightning_shards as shards
import pytest
import torch
from children import on_ranks, result, results
from lightning_runs import RingstowCheckpointIO, lightning, trainer
from lightning_shards import EVERY, STEPS
from support import assert_same
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ringstow
import ringstow.convert
import ringstow.dcp
from ringstow.integrations.lightning import RingstowModelParallelStrategy

pytestmark = pytest.mark.timeout(300)

FIRST = f"epoch=0-step={EVERY}.ckpt"


class Parallel(shards.Sharded):
    """A model with two kinds of tensor parallelism. Each rank trains with the same batches."""

    def __init__(self, **options):
        super().__init__(**options)
        width = self.hparams.width
        self.net = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 1)
        )

    def configure_model(self):
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)


def in_parallel(rank, ranks, root, path=None):
    lightning.seed_everything(1, verbose=False)
    run = trainer(
        root,
        shards.ModelCheckpoint(dirpath=root, every_n_train_steps=EVERY, save_top_k=-1),
        strategy=RingstowModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=ranks),
        devices=ranks,
        **shards.SHORT,
    )
    run.fit(Parallel(), ckpt_path=path)
    return shards.whole(run)


def test_tensor_parallel_runs_resume_to_the_bit_and_on_fewer_ranks(tmp_path):
    first = str(tmp_path / "a" / FIRST)
    learned, resumed, on_one = (
        results(ranks, in_parallel, tmp_path / name, path)[0]
        for name, ranks, path in [("a", 2, None), ("b", 2, first), ("c", 1, first)]
    )
    assert_same(resumed, learned)
    assert_close(on_one["model"], learned["model"])


def assert_close(weights, expected):
    """Two models are the same but for the order of sums."""
    for name, tensor in expected.items():
        assert torch.allclose(weights[name], tensor, rtol=1e-4, atol=1e-6), name


class Partly(shards.Sharded):
    """A model with a layer that the first steps do not use: an optimizer has no state for it."""

    def __init__(self, **options):
        super().__init__(**options)
        self.extra = torch.nn.Linear(1, 1)

    def configure_model(self):
        super().configure_model()
        fully_shard(self.extra, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        return self.extra(loss[None])[0] ** 2 if self.global_step >= 2 * EVERY else loss


@on_ranks(2)
def test_parameters_without_an_optimizers_state_stay_without_one(ranks, tmp_path):
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    learned = []
    for folder, path in [("a", None), ("b", os.path.join(tmp_path, "a", FIRST))]:
        lightning.seed_everything(1, verbose=False)
        run = shards.run("mp", ranks, os.path.join(tmp_path, folder), save_top_k=-1)
        run.fit(Partly(), ckpt_path=path)
        weights = get_model_state_dict(run.strategy.model)
        learned.append({name: one.full_tensor() for name, one in weights.items()})
    assert "optimizer_0.state.extra.bias.step" not in names_of(os.path.join(tmp_path, "a", FIRST))
    assert_same(*learned)


def names_of(path):
    return ringstow.dcp.StorageReader(path).read_metadata().state_dict_metadata


def alone(root, path, io):
    """Resume a sharded run in one process, without a strategy for shards."""
    one = shards.model()
    run = trainer(root, io=io, **shards.SHORT)
    run.fit(one, ckpt_path=path, weights_only=False)
    return one.state_dict(), run.global_step, run.optimizers[0].param_groups[0]["lr"]


@pytest.mark.parametrize("kind", ["mp", "fsdp"])
def test_a_trainer_without_shards_goes_on_from_a_sharded_checkpoint(kind, tmp_path):
    args = kind, tmp_path / "run", None, None, {"save_top_k": -1}
    (_, expected), _ = results(2, shards.fit, *args)
    path, file = str(tmp_path / "run" / FIRST), str(tmp_path / "whole.ckpt")
    torch.save(RingstowCheckpointIO().load_checkpoint(path), file)
    for source, io in [(path, RingstowCheckpointIO()), (file, None)]:
        weights, step, rate = result(alone, tmp_path / "alone", source, io)
        assert (step, rate) == (STEPS, expected["optimizer"]["param_groups"][0]["lr"])
        assert_close(weights, expected["model"])
    # The file, and one made of the plugin's checkpoint, are what strategies for shards load, too.
    RingstowCheckpointIO(background=False).save_checkpoint(torch.load(file), tmp_path / "own.ckpt")
    ringstow.convert.convert(tmp_path / "own.ckpt", tmp_path / "own-file.ckpt")
    for source, one in [(file, f"stock-{kind}"), (str(tmp_path / "own-file.ckpt"), kind)]:
        assert results(2, shards.fit, one, tmp_path / one, source)[0][0] == EVERY
