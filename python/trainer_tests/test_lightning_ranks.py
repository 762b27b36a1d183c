"""Sharded runs in which one rank fails: all of them end, with an error that says why."""

from __future__ import annotations

import itertools
import os
from unittest.mock import Mock

import children
import lightning_shards as shards
import pytest
import torch
from children import on_ranks
from lightning_runs import lightning
from lightning_shards import EVERY

import ringstow
from ringstow.distributed import _save
from ringstow.integrations._lightning import _paths, _ranks

pytestmark = pytest.mark.timeout(300)


class Large(lightning.Callback):
    """Has a tensor of its own, so that a save returns once it has read all tensors."""

    state_key = "large"

    def state_dict(self):
        return {"mean": torch.zeros(1 << 16)}


@on_ranks(2)
def test_a_rank_that_fails_before_it_has_read_its_tensors_fails_with_the_others(
    rank, ranks, tmp_path
):
    numbers = itertools.count(1)

    def act(*_):
        if next(numbers) == 2 and rank == 1:
            raise OSError("no more disk")

    children.before(_save._Save, "_write_share", act)
    run = shards.run("mp", ranks, tmp_path, Large())
    error, text = (OSError, "^no more disk") if rank else (ringstow.Error, "rank 1 failed: OSError")
    with pytest.raises(error, match=text):
        run.fit(shards.model())
    assert run.global_step == 3 * EVERY  # the next save has raised it, on both ranks


@on_ranks(2)
def test_a_removal_that_fails_on_rank_0_ends_the_run_on_every_rank(rank, ranks, tmp_path):
    _paths.remove = Mock(side_effect=PermissionError("no removal"))
    error = ringstow.Error if rank else PermissionError
    options = {"background": False}  # so that nothing is in flight when Lightning removes
    with pytest.raises(error, match="no removal"):
        shards.run("mp", ranks, tmp_path, options=options).fit(shards.model())


@on_ranks(2)
def test_a_load_that_fails_says_why_on_every_rank(rank, ranks, tmp_path):
    shards.run("mp", ranks, tmp_path, steps=EVERY).fit(shards.model())
    path = ringstow.latest(tmp_path).path

    def resume(path, **options):
        shards.run("mp", ranks, tmp_path, steps=2 * EVERY).fit(
            shards.model(**options), ckpt_path=path
        )

    text = r"net.0.weight is F32 \[160, 160\]"
    with pytest.raises(ringstow.KeyMismatchError, match=text) as caught:
        resume(path, width=160)
    assert "strict_loading = False" in str(caught.value)
    killed = os.path.join(tmp_path, "killed.ckpt")
    if rank == 0:
        os.mkdir(killed)
        open(os.path.join(killed, "manifest.json.part"), "w").close()
    torch.distributed.barrier()
    with pytest.raises(ringstow.IncompleteCheckpointError, match="killed before its commit"):
        resume(killed)
    if rank == 1:
        _ranks.get_optimizer_state_dict = Mock(side_effect=ZeroDivisionError)
    error, text = (ZeroDivisionError, "") if rank else (ringstow.Error, "rank 1 failed: ZeroDiv")
    with pytest.raises(error, match=text):
        resume(path)


@on_ranks(2)
def test_a_run_leaves_no_process_group_behind(ranks, tmp_path):
    groups = []
    for number in range(3):
        folder = os.path.join(tmp_path, str(number))
        run = shards.run("fsdp", ranks, folder, steps=EVERY)
        run.fit(shards.model())
        run.save_checkpoint(os.path.join(folder, "final.ckpt"))
        assert ringstow.verify(os.path.join(folder, "final.ckpt")).ok
        run.strategy.teardown()
        groups.append(len(torch.distributed.distributed_c10d._world.pg_map))
    assert groups == [1, 1, 1], "only Lightning's own is left"
