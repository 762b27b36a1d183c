"""States of Megatron-Core are saved by ringstow, and loaded by Megatron's own `load`."""

from __future__ import annotations

import functools
import os
import pathlib
import signal
import subprocess
import sys

import pytest

pytest.importorskip("megatron.core.dist_checkpointing")

import children
import megatron_runs as runs
import torch
from all_trainers import run_page
from children import results
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron_runs import EVERY, STEPS
from support import assert_same
from torch.distributed.checkpoint.api import CheckpointException

import ringstow
from ringstow.integrations import megatron as ours
from ringstow.integrations._megatron import _seam


def fit(ranks, folder, **options):
    return results(ranks, functools.partial(runs.fit, **options), str(folder))[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder and the end of an unbroken run, by how it saves."""

    @functools.cache
    def train(ranks, **options):
        folder = tmp_path_factory.mktemp("trained")
        begun, end = fit(ranks, folder, **options)
        assert begun == 0
        return folder, end

    return train


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_run_keeps_complete_checkpoints_and_learns_the_same(ranks, trained):
    folder, end = trained(ranks)
    assert_same(end, trained(2, stock=True)[1])
    names = [f"iter_{n:07}" for n in range(EVERY, STEPS + 1, EVERY)]
    assert sorted(os.listdir(folder)) == names
    for name in names:
        assert ringstow.verify(folder / name).ok
        assert {"common.pt", "metadata.json"} <= set(os.listdir(folder / name))


@pytest.mark.parametrize(
    ("saved", "loaded", "options"),
    [(1, 2, {}), (2, 2, {"how": "foreground"}), (2, 4, {}), (4, 1, {}), (2, 2, {"stock": True})],
)
def test_a_run_resumes_to_the_bit_on_any_number_of_ranks(saved, loaded, options, trained, tmp_path):
    folder, end = trained(saved, **options)
    name = f"iter_{EVERY:07}"
    (tmp_path / name).symlink_to(folder / name)
    assert_same(fit(loaded, tmp_path), (EVERY, end))


# The moment, how it saves, which of two ranks are killed, and whether all saves have one name.
MOMENTS = [
    ("beginning", "background", (0, 1), False),
    ("writing", "background", (1,), False),
    ("writing", "foreground", (0,), False),
    ("committing", "background", (0,), False),
    ("finalizing", "background", (0, 1), False),
    ("finalizing", "foreground", (0,), False),
    ("renaming", "background", (0,), False),
    ("writing", "background", (0, 1), True),
    ("renaming", "foreground", (0,), True),
]


@pytest.mark.parametrize(("moment", "how", "victims", "fixed"), MOMENTS)
def test_a_killed_run_resumes_from_the_last_complete_checkpoint_and_learns_the_same(
    moment, how, victims, fixed, trained, tmp_path
):
    folder = tmp_path / "run"
    codes = children.exit_codes(2, runs.killed, str(folder), moment, victims, how, fixed)
    assert all(codes[victim] == -signal.SIGKILL for victim in victims)
    assert 0 not in codes
    (name,) = [one for one in os.listdir(folder) if one.startswith("iter_")]
    assert ringstow.verify(folder / name).ok
    assert_same(fit(2, folder, how=how, fixed=fixed), (EVERY, trained(2)[1]))
    assert not [one for one in os.listdir(folder) if one.startswith(".ringstow")]


@pytest.mark.parametrize("how", ["foreground", "background"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_full_disk_of_one_rank_fails_the_save_on_all_ranks(how, victim, tmp_path):
    for rank, (said, found) in enumerate(results(2, runs.fail, str(tmp_path), victim, how)):
        assert "File too large" in said
        assert f"rank {victim} failed: OSError" in said or rank == victim
        assert "iter_0000002" not in found
    assert sorted(os.listdir(tmp_path)) == ["iter_0000001", "iter_0000002"]


def test_other_kinds_of_shards_strategies_and_directories(tmp_path):
    results(2, runs.call, others, str(tmp_path))


def others(rank, ranks, folder):
    training = runs.Training()

    def state(fill):
        return {
            "two": [
                ShardedTensor.from_rank_offsets(
                    "two", torch.full((2, 2), fill * (2 * rank + n)), (0, 2 * rank + n, 4)
                )
                for n in range(2)
            ],
            "prepended": ShardedTensor.from_rank_offsets(
                "prepended", torch.full((3,), fill * rank), (0, rank, ranks), prepend_axis_num=1
            ),
            "uneven": ShardedTensor(
                "uneven",
                torch.full((1 + rank, 2), fill * (rank + 1)),
                torch.float32,
                (1 + rank, 2),
                (3, 2),
                (rank, 0),
                None,
            ),
        }

    even = {key: one for key, one in state(1.0).items() if key != "uneven"}
    for saved in (even, state(1.0)):
        path = f"{folder}/{len(saved)}"
        ours.save(saved, path, async_sharded_save=True).execute_sync()
        template = {key: one for key, one in state(0.0).items() if key in saved}
        loaded = dist_checkpointing.load(template, path)
        assert [float(one[0, 0]) for one in loaded["two"]] == [2.0 * rank, 2.0 * rank + 1]
        assert float(loaded["prepended"][0]) == rank
    assert loaded["uneven"].shape == (1 + rank, 2)
    assert float(loaded["uneven"][0, 0]) == rank + 1

    wrapped = FullyParallelSaveStrategyWrapper(ours.RingstowSaveStrategy(staging="snapshot"))
    path = f"{folder}/parallel"
    ours.save(training.state(), path, wrapped)
    load = FullyParallelLoadStrategyWrapper(
        ours.RingstowLoadStrategy(), exchange_algo="gather_object"
    )
    _everything(training, dist_checkpointing.load(training.state(), path, load))
    metadata = dist_checkpointing.load_tensors_metadata(path)
    assert metadata["weight"].global_shape == (runs.ROWS, runs.WIDTH)
    plain = dist_checkpointing.load_plain_tensors(path)
    assert plain["weight"].shape == (runs.ROWS, runs.WIDTH)
    strict = dist_checkpointing.load(training.state(), path, strict="return_all")
    assert strict[1:] == (set(), set())

    if rank == 0:  # a user's file stays, and a shard of more ranks does not
        pathlib.Path(path, "notes.txt").write_text("the user's")
        pathlib.Path(path, "rank00007-0.safetensors").write_text("of eight ranks")
    torch.distributed.barrier()
    ours.save(training.state(), path, wrapped)
    assert "notes.txt" in os.listdir(path)
    assert "rank00007-0.safetensors" not in os.listdir(path)

    _refusals(training, path)


def _everything(training, loaded):
    before = [one.clone() for one in training.end()]
    objects = loaded["rng"]
    assert type(objects["numpy"]) is tuple
    assert torch.equal(objects["torch"], torch.ones(3))
    training.take(loaded)
    assert_same(training.end(), before)


def _refusals(training, path):
    state, save = training.state(), ours.RingstowSaveStrategy
    load = ours.RingstowLoadStrategy().check_backend_compatibility
    for said, call in [
        (r"megatron\.save", lambda: dist_checkpointing.save(state, path, save())),
        ("RingstowSaveStrategy", lambda: ours.save(state, path, ("torch_dist", 1))),
        ("guard", lambda: save(staging="unguarded")),
        ("stripe", lambda: save(config=ringstow.Config(stripe=["/other"]))),
        ("tiers", lambda: save(config=ringstow.Config(tiers=["/other"]))),
        ("save without", lambda: dist_checkpointing.remove_sharded_tensors(path, "optimizer")),
        ("torch_dist", lambda: load("torch_dist")),
    ]:
        with pytest.raises((ringstow.UnsupportedError, ringstow.InvalidStateError), match=said):
            call()


def test_damage_fails_the_load_on_all_ranks(tmp_path):
    results(2, runs.call, damaged, str(tmp_path))


def damaged(rank, ranks, folder):
    training = runs.Training()
    ours.save(training.state(), f"{folder}/one")
    if rank == 0:
        shard = next(pathlib.Path(folder, "one").glob("rank00001*.safetensors"))
        with open(shard, "r+b") as stream:
            stream.seek(shard.stat().st_size - 100)
            stream.write(b"damage")
    torch.distributed.barrier()
    with pytest.raises(CheckpointException) as caught:
        dist_checkpointing.load(training.state(), f"{folder}/one")
    errors = [error for error, _ in caught.value.failures.values()]
    assert any(isinstance(one, ringstow.CorruptCheckpointError) for one in errors)


def test_the_snippets_of_the_page_run(tmp_path):
    results(2, runs.call, page, str(tmp_path))
    assert ringstow.verify(tmp_path / "run" / "iter_0000002").ok


def page(rank, ranks, folder):
    os.chdir(folder)
    run_page(
        "large-scale.md", "Megatron-Core", training=runs.Training(), queue=runs.AsyncCallsQueue()
    )


@pytest.mark.parametrize(
    ("where", "name"), [(one, name) for one, calls in _seam.SEAM.calls.items() for name in calls]
)
def test_a_call_that_differs_is_refused_by_its_name(where, name, monkeypatch):
    monkeypatch.setattr(where, name, lambda other_argument: None)
    with pytest.raises(ringstow.UnsupportedError, match=name):
        _seam.SEAM.check()


def test_the_package_is_not_imported_before_it_is_used():
    code = "import sys, ringstow, ringstow.integrations; sys.exit('megatron' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
