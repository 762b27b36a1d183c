"""Checkpoints that move between tensor parallelism, other layouts and a Trainer without shards."""

from __future__ import annotations

import os

import children
import lightning_shards as shards
import pytest
import torch
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


def in_parallel(rank, ranks, root, results, path=None):
    lightning.seed_everything(1, verbose=False)
    run = trainer(
        root,
        shards.ModelCheckpoint(dirpath=root, every_n_train_steps=EVERY, save_top_k=-1),
        strategy=RingstowModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=ranks),
        devices=ranks,
        epochs=-1,
        max_steps=STEPS,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    run.fit(Parallel(), ckpt_path=path)
    learned = shards.whole(run)
    if rank == 0:
        torch.save(learned, results)


def test_tensor_parallel_runs_resume_to_the_bit_and_on_fewer_ranks(tmp_path):
    learned = []
    for name, ranks, path in [("a", 2, None), ("b", 2, FIRST), ("c", 1, FIRST)]:
        path = path and str(tmp_path / "a" / path)
        args = (tmp_path / name, tmp_path / "results.pt", path)
        assert children.exit_codes(ranks, in_parallel, *args) == [0] * ranks
        learned.append(torch.load(tmp_path / "results.pt"))
    assert_same(learned[1], learned[0])
    for name, tensor in learned[0]["model"].items():
        assert torch.allclose(learned[2]["model"][name], tensor, rtol=1e-4, atol=1e-6)


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


def partly(rank, ranks, root):
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    learned = []
    for folder, path in [("a", None), ("b", os.path.join(root, "a", FIRST))]:
        lightning.seed_everything(1, verbose=False)
        run = shards.run("mp", ranks, os.path.join(root, folder), save_top_k=-1)
        run.fit(Partly(), ckpt_path=path)
        learned.append(get_model_state_dict(run.strategy.model))
    assert "optimizer_0.state.extra.bias.step" not in names_of(os.path.join(root, "a", FIRST))
    for name, tensor in learned[0].items():
        assert torch.equal(learned[1][name].full_tensor(), tensor.full_tensor()), name


def names_of(path):
    return ringstow.dcp.StorageReader(path).read_metadata().state_dict_metadata


def test_parameters_without_an_optimizers_state_stay_without_one(tmp_path):
    assert children.exit_codes(2, partly, tmp_path) == [0, 0]


def alone(root, path, io, results):
    """Resume a sharded run in one process, without a strategy for shards."""
    one = shards.model()
    run = trainer(
        root, io=io, epochs=-1, max_steps=STEPS, num_sanity_val_steps=0, limit_val_batches=0
    )
    run.fit(one, ckpt_path=path, weights_only=False)
    learned = {"model": one.state_dict(), "step": run.global_step}
    learned["lr"] = run.optimizers[0].param_groups[0]["lr"]
    torch.save(learned, results)


@pytest.mark.parametrize("kind", ["mp", "fsdp"])
def test_a_trainer_without_shards_goes_on_from_a_sharded_checkpoint(kind, tmp_path):
    args = (kind, tmp_path / "run", tmp_path / "results.pt", None, None, {"save_top_k": -1})
    assert children.exit_codes(2, shards.fit, *args) == [0, 0]
    expected = torch.load(tmp_path / "results.pt")
    path, file = str(tmp_path / "run" / FIRST), str(tmp_path / "whole.ckpt")
    torch.save(RingstowCheckpointIO().load_checkpoint(path), file)
    for source, io in [(path, RingstowCheckpointIO()), (file, None)]:
        args = (tmp_path / "alone", source, io, tmp_path / "alone.pt")
        assert children.exit_code(alone, *args) == 0
        learned = torch.load(tmp_path / "alone.pt")
        assert learned["step"] == STEPS
        assert learned["lr"] == expected["optimizer"]["param_groups"][0]["lr"]
        for name, tensor in expected["model"].items():
            assert torch.allclose(learned["model"][name], tensor, rtol=1e-4, atol=1e-6), name
    # The file, and one made of the plugin's checkpoint, are what strategies for shards load, too.
    RingstowCheckpointIO(background=False).save_checkpoint(torch.load(file), tmp_path / "own.ckpt")
    ringstow.convert.convert(tmp_path / "own.ckpt", tmp_path / "own-file.ckpt")
    for source, one in [(file, f"stock-{kind}"), (str(tmp_path / "own-file.ckpt"), kind)]:
        args = (one, tmp_path / one, tmp_path / "results.pt", source)
        assert children.exit_codes(2, shards.fit, *args) == [0, 0]
        assert torch.load(tmp_path / "results.pt")["begun"] == EVERY
