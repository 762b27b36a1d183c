"""An export by several ranks writes the same bytes as one by one process."""

from __future__ import annotations

import pathlib
import random
from unittest.mock import patch

import layouts
import pytest
import torch
import torch.distributed as dist
from ranks import gathered, on_ranks
from safetensors import safe_open
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ringstow
import ringstow.dcp
from ringstow.convert import ringstow_to_hf
from ringstow.dcp import _export_plan, _export_rank

# Small, so that small tensors take several files, units and rounds.
FILE_BYTES = 40_000
PAGE = _export_plan.PAGE


def contents(path):
    return {file.name: file.read_bytes() for file in pathlib.Path(path).iterdir()}


def by_one(state, at, **options):
    """Return the files of an export by one process."""
    ringstow.save(state, at / "complete")
    ringstow_to_hf(at / "complete", at / "by-one", max_shard_size=FILE_BYTES, **options)
    return contents(at / "by-one")


def small_rounds():
    """Let small tensors take several units and rounds."""
    _export_plan.UNIT_BYTES, _export_plan.ROUND_BYTES = 2 * PAGE, 4 * PAGE


def export(state, path, **options):
    small_rounds()
    return ringstow.dcp.export_hf(state, path, max_shard_size=FILE_BYTES, **options)


def opened(path):
    """Open the only file of a model."""
    return safe_open(path / "model.safetensors", "pt")


# Layouts of trainers.


def of_model(rank, layout, path, options):
    model, _ = layouts.trained(layout, layouts.EVEN_HIDDEN if "tp" in layout else 13, seed=1)
    state = get_model_state_dict(model)
    report = export(state, path, **options)
    return layouts._whole(state), report


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (1, "plain"),
        (2, "plain"),
        (2, "fsdp1"),
        (2, "tp"),
        (4, "hsdp"),
        (4, "fsdp2_tp"),
        (8, "fsdp2"),
    ],
)
@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": "bfloat16", "prefix": "one.", "rename": {"first": "one", "weight": "w"}}],
    ids=str,
)
def test_model_is_that_of_one_process(ranks, tmp_path, world, layout, options):
    outcomes = ranks(world).run(of_model, layout, tmp_path / "by-all", options)
    state = outcomes[0][0]
    assert contents(tmp_path / "by-all") == by_one(state, tmp_path, **options)
    reports = [report for _, report in outcomes]
    assert len({(one.files, one.tensors, one.tensor_bytes) for one in reports}) == 1
    assert sum(one.save.tensor_bytes for one in reports) == reports[0].tensor_bytes


# Tensors of any kind, on any mesh.

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.float8_e4m3fn]


def any_state(seed):
    """Return complete tensors; the same on all ranks."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    state = {}
    for number in range(chance.randint(2, 9)):
        sizes = chance.choice([(), (0, 5), (1, 3, 900), (1, 30, 201), (2, 9, 40)])
        shape = [chance.choice(sizes) for _ in range(chance.randint(1, 3))] if sizes else []
        shape = shape[:2] if max(shape, default=0) > 100 else shape
        tensor = torch.randint(0, 2 if number == 0 else 50, shape)
        state[f"t{number}"] = tensor.to(chance.choice(DTYPES))
    return state


def any_shards(seed, full):
    """Return a rank's part of them."""
    chance = random.Random(seed)
    meshes = [init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))]
    state = {}
    for name, tensor in full.items():
        mesh = chance.choice(meshes)
        dims = range(tensor.dim())
        placements = [
            Shard(chance.choice(dims)) if dims and chance.random() < 0.8 else Replicate()
            for _ in range(mesh.ndim)
        ]
        if chance.random() < 0.2:
            state[name] = tensor
            continue
        shards = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
        if chance.random() < 0.3 and tensor.dim() >= 2:  # a transposed view in memory
            local = shards.to_local().transpose(0, 1).contiguous().transpose(0, 1)
            shards = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
            )
        state[name] = shards
    return state


def any_exports(rank, seeds, path, options):
    sent = 0
    for seed in seeds:
        report = export(any_shards(seed, any_state(seed)), path / f"all-{seed}", **options)
        sent += report.sent_bytes
    return sent


@pytest.mark.parametrize("options", [{}, {"dtype": "float16"}], ids=str)
def test_shards_of_any_mesh_give_the_files_of_one_process(ranks, tmp_path, options):
    seeds = range(12)
    sent = ranks(4).run(any_exports, seeds, tmp_path, options)
    assert sum(sent) > 10 * PAGE, "hardly anything was exchanged: this tests too little"
    for seed in seeds:
        (tmp_path / str(seed)).mkdir()
        expected = by_one(any_state(seed), tmp_path / str(seed), **options)
        assert contents(tmp_path / f"all-{seed}") == expected, seed


@on_ranks(4)
def test_columns_are_exchanged_in_bounded_memory(rank, tmp_path):
    """Every rank holds columns of a tensor, which take many rounds."""
    mesh = init_device_mesh("cpu", (4,))
    full = torch.arange(300 * 700, dtype=torch.int32).view(300, 700)
    state = {"w": distribute_tensor(full, mesh, [Shard(1)], src_data_rank=None)}
    small_rounds()
    most = 0
    inboxes = []

    def deliver(self, memory):
        nonlocal most
        inboxes.append(self)
        most = max(most, sum(one.nbytes for one in inboxes if not one.is_gone.is_set()))
        taken(self, memory)

    taken = _export_rank.Inbox.deliver
    with patch.object(_export_rank.Inbox, "deliver", deliver):
        ringstow.dcp.export_hf(state, tmp_path / "m")
    assert len(inboxes) >= 10
    assert most <= 4 * (4 * PAGE + 3 * PAGE)
    with opened(tmp_path / "m") as file:
        assert torch.equal(file.get_tensor("w"), full)


# What is in a state.


@on_ranks(2)
def test_report_names_ties_and_what_is_left_out(rank, tmp_path):
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.arange(3.0), mesh, [Shard(0)], src_data_rank=None)
    state = {
        "model": {"embed": {"weight": weight}, "head": {"weight": weight}, "empty": {}},
        "extra": rank,
        "model.note": "text",
        f"only.{rank}": torch.full((2,), float(rank)),
    }
    report = ringstow.dcp.export_hf(state, tmp_path / "m")
    stripped = ringstow.dcp.export_hf(state, tmp_path / "m-model", prefix="model.")
    assert report.tied == (("model.head.weight", "model.embed.weight"),)
    assert report.left_out == ("extra", "model.note")
    assert report.tensors == 3
    assert stripped.tied == (("head.weight", "embed.weight"),)
    assert stripped.left_out == ("note",)
    with opened(tmp_path / "m") as file:
        assert {*file.keys()} == {"model.embed.weight", "only.0", "only.1"}
        assert file.get_tensor("only.1").tolist() == [1.0, 1.0]
        assert file.metadata() == {"format": "pt"}
    with opened(tmp_path / "m-model") as file:
        assert file.get_tensor("embed.weight").tolist() == [0.0, 1.0, 2.0]


@on_ranks(2)
def test_tie_of_some_ranks_is_none(rank, tmp_path):
    """Rank 0 alone has two names of one memory."""
    mesh = init_device_mesh("cpu", (2,))
    one, two = torch.ones(2), torch.ones(2)
    locals_ = [one, one if rank == 0 else two]
    state = {n: DTensor.from_local(t, mesh, [Shard(0)]) for n, t in zip("ab", locals_, strict=True)}
    assert ringstow.dcp.export_hf(state, tmp_path / "m").tied == ()


@on_ranks(4)
def test_small_replicated_tensors_come_from_the_first_rank(rank, tmp_path):
    state = {"mean": torch.full((3,), float(rank)), "var": torch.full((100_000,), float(rank))}
    ringstow.dcp.export_hf(state, tmp_path / "m")
    with opened(tmp_path / "m") as file:
        assert all(file.get_tensor(name).unique().tolist() == [0.0] for name in state)


@on_ranks(4)
def test_large_replicated_tensors_come_whole_from_one_rank_each(rank, tmp_path):
    state = {name: torch.full((400_000,), float(rank)) for name in "abcd"}
    written = gathered(ringstow.dcp.export_hf(state, tmp_path / "m").save.tensor_bytes)
    assert max(written) - min(written) <= 2 * PAGE
    with opened(tmp_path / "m") as file:
        values = [file.get_tensor(name).unique().tolist() for name in "abcd"]
    assert sorted(values) == [[0.0], [1.0], [2.0], [3.0]]


def test_one_process_needs_no_process_group(tmp_path):
    state = {"w": torch.arange(20_000.0), "step": 3}
    report = ringstow.dcp.export_hf(state, tmp_path / "m", dtype=torch.bfloat16)
    assert (report.tensors, report.sent_bytes, report.left_out) == (1, 0, ("step",))
    with opened(tmp_path / "m") as file:
        assert torch.equal(file.get_tensor("w"), state["w"].bfloat16())


@on_ranks(4)
def test_group_of_some_ranks_exports(rank, tmp_path):
    group = dist.new_group([2, 3])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    if rank >= 2:
        state = {"w": DTensor.from_local(torch.full((1,), float(rank)), mesh, [Shard(0)])}
        ringstow.dcp.export_hf(state, tmp_path / "m", group=group)
    dist.barrier()
    with opened(tmp_path / "m") as file:
        assert file.get_tensor("w").tolist() == [2.0, 3.0]
