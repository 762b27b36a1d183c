"""Sharded runs in which one rank fails: all of them end, with an error that says why."""

from __future__ import annotations

import os
import sys

import children
import lightning_shards as shards
import pytest
import torch
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


def failing_to_write(rank, ranks, root):
    write, count = _save._Save._write_share, 0

    def write_share(self, state):
        nonlocal count
        count += 1
        if count == 2 and rank == 1:
            raise OSError("no more disk")
        return write(self, state)

    _save._Save._write_share = write_share
    run = shards.run("mp", ranks, root, Large())
    error, text = (OSError, "^no more disk") if rank else (ringstow.Error, "rank 1 failed: OSError")
    with pytest.raises(error, match=text):
        run.fit(shards.model())
    assert run.global_step == 3 * EVERY  # the next save has raised it, on both ranks
    sys.exit(3)


def test_a_rank_that_fails_before_it_has_read_its_tensors_fails_with_the_others(tmp_path):
    assert children.exit_codes(2, failing_to_write, tmp_path) == [3, 3]


def failing_to_remove(rank, ranks, root):
    def remove(path, ours):
        raise PermissionError(f"no removal of {path}")

    _paths.remove = remove
    error = ringstow.Error if rank else PermissionError
    options = {"background": False}  # so that nothing is in flight when Lightning removes
    with pytest.raises(error, match="no removal of"):
        shards.run("mp", ranks, root, options=options).fit(shards.model())
    sys.exit(3)


def test_a_removal_that_fails_on_rank_0_ends_the_run_on_every_rank(tmp_path):
    assert children.exit_codes(2, failing_to_remove, tmp_path) == [3, 3]


def failing_to_load(rank, ranks, root):
    shards.run("mp", ranks, root, steps=EVERY).fit(shards.model())
    path = ringstow.latest(root).path

    def resume(path, **options):
        shards.run("mp", ranks, root, steps=2 * EVERY).fit(shards.model(**options), ckpt_path=path)

    text = r"net.0.weight is F32 \[160, 160\]"
    with pytest.raises(ringstow.KeyMismatchError, match=text) as caught:
        resume(path, width=160)
    assert "strict_loading = False" in str(caught.value)
    killed = os.path.join(root, "killed.ckpt")
    if rank == 0:
        os.mkdir(killed)
        open(os.path.join(killed, "manifest.json.part"), "w").close()
    torch.distributed.barrier()
    with pytest.raises(ringstow.IncompleteCheckpointError, match="killed before its commit"):
        resume(killed)
    state_of = _ranks.get_optimizer_state_dict

    def fails(*args):
        return 1 / 0 if rank == 1 else state_of(*args)

    _ranks.get_optimizer_state_dict = fails
    error, text = (ZeroDivisionError, "") if rank else (ringstow.Error, "rank 1 failed: ZeroDiv")
    with pytest.raises(error, match=text):
        resume(path)


def test_a_load_that_fails_says_why_on_every_rank(tmp_path):
    assert children.exit_codes(2, failing_to_load, tmp_path) == [0, 0]


def several(rank, ranks, root):
    groups = []
    for number in range(3):
        folder = os.path.join(root, str(number))
        run = shards.run("fsdp", ranks, folder, steps=EVERY)
        run.fit(shards.model())
        run.save_checkpoint(os.path.join(folder, "final.ckpt"))
        assert ringstow.verify(os.path.join(folder, "final.ckpt")).ok
        run.strategy.teardown()
        groups.append(len(torch.distributed.distributed_c10d._world.pg_map))
    assert groups == [1, 1, 1], "only Lightning's own is left"


def test_a_run_leaves_no_process_group_behind(tmp_path):
    assert children.exit_codes(2, several, tmp_path) == [0, 0]
