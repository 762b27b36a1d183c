"""What ranks have of one state that differs: all of it is saved, or the save says what is not."""

from __future__ import annotations

import collections
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, raised
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import ringstow
from ringstow import distributed
from ringstow._state.tensors import _shards
from ringstow.distributed import PerRank

pytestmark = pytest.mark.torch_seam


def own(number):
    return torch.full((2,), float(number))


def of_each(rank):
    """Return dicts of all kinds, of which each rank has another part."""
    return {
        "empty first": {} if rank == 0 else {0: {"m": own(1)}},
        "empty second": {0: {"m": own(0)}} if rank == 0 else {},
        "text and numbers": {"a": own(0)} if rank == 0 else {5: own(1)},
        "ordered": collections.OrderedDict({rank: own(rank)}),
        "ordered texts": collections.OrderedDict({"ab"[rank]: own(rank)}),
        "default": collections.defaultdict(dict, {rank: own(rank)}),
    }


@on_ranks(2)
def test_keys_that_only_some_ranks_have_are_saved_in_all_kinds_of_dicts(rank, tmp_path):
    distributed.save(of_each(rank), tmp_path)
    into = of_each(rank)
    for part in into.values():
        for value in part.values():
            (value["m"] if isinstance(value, dict) else value).zero_()
    distributed.load_into(into, tmp_path)
    assert str(into) == str(of_each(rank))
    loaded = ringstow.load(tmp_path)
    keys = {name: [*part] for name, part in loaded.items()}
    assert keys == {
        "empty first": [0],
        "empty second": [0],
        "text and numbers": ["a", 5],
        "ordered": [0, 1],
        "ordered texts": ["a", "b"],
        "default": [0, 1],
    }
    assert loaded["default"][1].tolist() == [1, 1]
    assert type(loaded["ordered"]) is collections.OrderedDict


CLASHES = {
    "value and dict": (None, {"w": 1}),
    "value and tensor": (3, torch.ones(2)),
    "tensor and dict": (torch.ones(2), {"w": torch.ones(3)}),
    "longer list": ([torch.ones(1)], [torch.ones(1), torch.ones(2)]),
    "own and common": (PerRank(1), 2),
    "common and own": (2, PerRank(1)),
}


@pytest.mark.parametrize("name", CLASHES)
@on_ranks(2)
def test_what_would_be_lost_is_refused_on_all_ranks(rank, tmp_path, name):
    state = {"kept": 1, "here": [CLASHES[name][rank]]}
    kind, text = raised(lambda: distributed.save(state, tmp_path / "a"))
    assert kind == "InvalidStateError"
    assert "'here.0" in text
    dist.barrier()
    assert not (tmp_path / "a").exists()


def of_a_stage(rank, path, kind):
    """Save a tensor of one name that each of two pipeline stages shards on its own mesh."""
    stage = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipeline", "model"))["model"]
    sharded = DTensor.from_local(own(0 if kind == "equal" else rank), stage, [Shard(0)])
    value = own(rank) if kind == "plain" and rank == 1 else sharded
    return raised(lambda: distributed.save({"state": {0: value}}, path))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("different", "state.0 is one tensor on rank 0 and a different one on rank 1"),
        ("plain", "state.0 is a sharded tensor here, and not on rank 1"),
    ],
)
@on_ranks(2)
def test_different_tensors_of_one_name_are_refused_on_all_ranks(rank, tmp_path, kind, text):
    error, said = of_a_stage(rank, tmp_path / "a", kind)
    assert error == "InvalidStateError" or (kind, rank) == ("plain", 1)
    assert text in said
    dist.barrier()
    assert not (tmp_path / "a").exists()


def test_equal_sharded_tensors_of_one_name_are_saved(ranks, tmp_path):
    assert ranks(2).run(of_a_stage, tmp_path / "a", "equal") == [None, None]
    assert ringstow.load(tmp_path / "a")["state"][0].tolist() == [0, 0]


@on_ranks(2)
def test_two_values_of_each_rank_of_one_name_are_refused(rank, tmp_path):
    one, two = PerRank(1), PerRank(2)
    for state in ({"a.b": one, "a": {"b": two}}, {"a": {1: one, "1": two}}):
        _, text = raised(lambda state=state: distributed.save(state, tmp_path / "a"))
        assert "two values of each rank named" in text


def test_a_rank_of_another_number_has_another_box():
    offsets = []
    for rank in (0, 1):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            tensor = DTensor.from_local(own(rank), init_device_mesh("cpu", (2,)), [Shard(0)])
            offsets.append(_shards.sharded(tensor, str).pieces[0].offsets)
        finally:
            dist.destroy_process_group()
    assert offsets == [(0,), (2,)]


# What fails on one rank before it meets the others.


class Interrupts:
    """Raises, as Ctrl-C does, when it is saved."""

    def __reduce__(self):
        raise KeyboardInterrupt


@on_ranks(2)
def test_a_rank_that_fails_before_it_meets_the_others_fails_all(rank, tmp_path):
    """Rank 1 alone fails, in ways that its arguments or its memory can."""
    state, path = {"w": torch.ones(2)}, tmp_path / "a"
    wrong = None if rank == 1 else path
    unknown = "no such staging" if rank == 1 else "guard"
    value = Interrupts() if rank == 1 else 1
    said = [
        raised(lambda: distributed.save(state, wrong)),
        raised(lambda: distributed.save_async(state, wrong).result()),
        raised(lambda: distributed.save_async(state, path, staging=unknown).result()),
        raised(lambda: distributed.save({"x": value}, path, allow_pickle=True)),
    ]
    stage = distributed._save._guard.stage
    if rank == 1:
        stage = Mock(side_effect=MemoryError("no memory"))
    with patch.object(distributed._save._guard, "stage", stage):
        said += [
            raised(lambda: distributed.save(state, path)),
            raised(lambda: distributed.save_async(state, path).result()),
        ]
    kinds = ["TypeError", "TypeError", "InvalidStateError", "KeyboardInterrupt"]
    kinds += ["MemoryError", "MemoryError"]
    for (kind, text), cause in zip(said, kinds, strict=True):
        assert kind == (cause if rank == 1 else "Error")
        assert rank == 1 or text.startswith(f"rank 1 failed: {cause}")
    distributed.save(state, path)
    assert ringstow.load(path)["w"].tolist() == [1, 1]


@on_ranks(2)
def test_an_interrupt_of_the_rank_that_commits_is_an_error_of_the_others(rank, tmp_path):
    mark = distributed._commit._mark
    write = mark.write if rank else Mock(side_effect=KeyboardInterrupt)
    with patch.object(mark, "write", write):
        said = raised(lambda: distributed.save({"w": torch.ones(2)}, tmp_path))
    if rank == 0:
        assert said[0] == "KeyboardInterrupt"
    else:
        assert said == ("Error", "the first rank failed: KeyboardInterrupt: ")


def load_differently(rank, path):
    """Make calls of loads that differ between the ranks."""
    for number in (0, 1):
        distributed.save({"w": own(number)}, f"{path}{number}")
    mine, wrong = f"{path}{rank}", None if rank == 1 else f"{path}0"
    into = {"w": own(9)}
    bad = 5 if rank == 1 else None
    first = f"{path}0"
    either = (
        (lambda: distributed.load_into(into, first))
        if rank == 1
        else (lambda: distributed.save(into, first))
    )
    said = [
        raised(lambda: distributed.load_into(into, mine)),
        raised(lambda: distributed.load(mine)),
        raised(lambda: distributed.load_into(into, first, strict=rank == 1)),
        raised(either),
        raised(lambda: distributed.load_into(into, wrong)),
        raised(lambda: distributed.load_into(into, first, config=bad)),
    ]
    assert into["w"].tolist() == [9, 9]
    distributed.load_into(into, first)
    return said, into["w"].tolist()


def test_loads_that_differ_between_ranks_are_refused(ranks, tmp_path):
    (others, loaded), (own_errors, _) = ranks(2).run(load_differently, tmp_path / "a")
    for said in (others, own_errors):
        assert ["the same call" in text for _, text in said[:4]] == [True] * 4
    assert [kind for kind, _ in own_errors[4:]] == ["NoCheckpointError", "TypeError"]
    assert all(text.startswith("rank 1 failed: ") for _, text in others[4:])
    assert loaded == [0, 0]


@on_ranks(2)
def test_a_load_of_what_no_rank_sees_does_not_wait(rank, tmp_path):
    from ringstow._ranks import _team

    with patch.object(_team, "_wait_for", return_value=False) as waits:
        kind, _ = raised(lambda: distributed.load_into({"w": own(0)}, tmp_path / "none"))
    assert kind == "FileNotFoundError"
    assert not waits.called
