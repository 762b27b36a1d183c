"""ringstow.distributed: every layout to every other, the same files as ringstow.dcp's."""

from __future__ import annotations

import itertools
import os
from unittest.mock import Mock, patch

import layouts
import pytest
import torch
import torch.distributed as dist
from layouts import EVEN_HIDDEN, differences, filled, trained, whole
from ranks import gathered, on_ranks, raised
from support import assert_same, flip, logged, shards_of
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ringstow
import ringstow.dcp
from ringstow import distributed
from ringstow._saving import _guard
from ringstow.distributed import PerRank

SHARED = ("plain", "fsdp1", "fsdp2", "hsdp", "tp", "fsdp2_tp")


def state_of(layout, seed, step, hidden=EVEN_HIDDEN):
    model, optimizer = trained(layout, hidden, seed)
    parts = get_state_dict(model, optimizer)
    return model, optimizer, {"model": parts[0], "optim": parts[1], "step": step}


def save(rank, layout, path, hidden=EVEN_HIDDEN, start=distributed.save):
    model, optimizer, state = state_of(layout, 1, 7, hidden)
    done = start(state, path)
    if start is distributed.save_async:
        done = done.result()
    assert done.path == str(path)
    state = whole(model, optimizer)
    return state if rank == 0 else None


def load(rank, layout, path, hidden=EVEN_HIDDEN):
    model, optimizer, state = state_of(layout, 2, 0, hidden)
    distributed.load_into(state, path)
    assert state["step"] == 7
    state = filled(model, optimizer, state)
    return state if rank == 0 else None


@pytest.mark.parametrize("layout", SHARED)
def test_each_layout_loads_into_each_other(ranks, tmp_path, layout):
    saved = ranks(4).run(save, layout, tmp_path)[0]
    assert ringstow.verify(tmp_path).ok
    for other, world in [*itertools.product(SHARED, [4]), ("plain", 1), ("fsdp2", 2), ("tp", 2)]:
        loaded = ranks(world).run(load, other, tmp_path)[0]
        assert differences(saved, loaded) == [], (other, world)


@pytest.mark.parametrize("layout", ["fsdp1", "fsdp2", "hsdp"])
def test_uneven_shards(ranks, tmp_path, layout):
    saved = ranks(4).run(save, layout, tmp_path, layouts.HIDDEN)[0]
    for other, world in (("fsdp2", 3), ("plain", 1), ("fsdp1", 4)):
        assert differences(saved, ranks(world).run(load, other, tmp_path, layouts.HIDDEN)[0]) == []


@pytest.mark.parametrize("layout", ["fsdp1", "fsdp2_tp"])
def test_dcp_and_distributed_load_each_others(ranks, tmp_path, layout):
    saved = ranks(4).run(save, layout, tmp_path / "ours")[0]
    loaded = ranks(2).run(layouts.load, "fsdp2", tmp_path / "ours", EVEN_HIDDEN)[0]
    assert differences(saved, loaded) == []
    saved = ranks(4).run(layouts.save, layout, tmp_path / "theirs", EVEN_HIDDEN)[0]
    loaded = ranks(2).run(load, "fsdp2", tmp_path / "theirs")[0]
    assert differences(saved, loaded) == []


def test_one_process_loads_it_whole(ranks, tmp_path):
    saved = ranks(4).run(save, "hsdp", tmp_path)[0]
    loaded = ringstow.load(tmp_path)
    assert loaded["step"] == 7
    assert differences(saved[0], loaded["model"]) == []


def test_in_the_background(ranks, tmp_path):
    saved = ranks(2).run(save, "fsdp2", tmp_path, EVEN_HIDDEN, distributed.save_async)[0]
    assert differences(saved, ranks(2).run(load, "fsdp2", tmp_path)[0]) == []


@on_ranks(2)
def test_training_goes_on_meanwhile(rank, tmp_path):
    """A step while the save runs: the save has the values of the call."""
    model, optimizer, state = state_of("fsdp2", 1, 7)
    before = whole(model, optimizer)
    handle = distributed.save_async(state, tmp_path / "a")
    model(torch.randn(5, layouts.INPUT)).square().sum().backward()
    optimizer.step()
    second = distributed.save_async({**state, "step": 8}, tmp_path / "b")
    assert [one.result().path[-1] for one in (handle, second)] == ["a", "b"]
    loaded = load(rank, "fsdp2", tmp_path / "a")
    assert rank or differences(before, loaded) == []


# The memory of background saves.

LARGE = 320 << 20
"""More than any save or load may take."""


def large_state_of(rank):
    return {f"rank {rank}": torch.ones(LARGE, dtype=torch.uint8)}


@pytest.mark.parametrize(("pool", "waits"), [("auto", False), ("64M", True)])
@on_ranks(2)
def test_copies_wait_for_the_disk_only_where_memory_is_bounded(rank, tmp_path, pool, waits):
    config = ringstow.Config(write_rate="100M", pool_bytes=pool)
    handle = distributed.save_async(large_state_of(rank), tmp_path / "c", config=config)
    assert (handle.result().seconds.wait > 0) == waits


@on_ranks(2)
def test_manager_of_ranks_copies_without_waiting_for_the_disk(rank, tmp_path):
    config = ringstow.Config(write_rate="100M")
    with ringstow.CheckpointManager(tmp_path / "run", config=config) as manager:
        assert manager.save_async(1, large_state_of(rank)).result().seconds.wait == 0


@on_ranks(2)
def test_nothing_waits_for_the_disk_once_all_is_copied(rank, tmp_path):
    options = {"config": ringstow.Config(write_rate="100M"), "staging": "snapshot"}
    handle = distributed.save_async(large_state_of(rank), tmp_path / "c", **options)
    assert handle.wait_staged(0)
    assert not _guard._holds
    assert handle.result().pool_bytes <= 256 << 20


# Replicas, each of which writes a part.


@on_ranks(4)
def test_replicas_share_the_writing(rank, tmp_path):
    large = torch.arange(6 << 20, dtype=torch.int32).reshape(-1, 256)  # 24 MiB
    mesh = init_device_mesh("cpu", (2, 2))
    state = {
        "plain": large,
        "mesh": distribute_tensor(large + 1, mesh, [Replicate(), Shard(1)]),
        "strided": distribute_tensor(large.t() + 2, mesh, [Shard(0), Replicate()]),
    }
    written = gathered(distributed.save(state, tmp_path).file_bytes)
    assert max(written) < 1.1 * min(written)
    assert sum(written) < 3.1 * (24 << 20)
    expected = {"plain": large, "mesh": large + 1, "strided": large.t() + 2}
    assert_same(ringstow.load(tmp_path), expected)


# Values, and what only some ranks have.


@on_ranks(3)
def test_values_of_each_rank_come_back(rank, tmp_path):
    path = tmp_path
    state = {
        "rng": PerRank({"cpu": torch.full((3,), rank), "seen": rank * 10}),
        "step": 5,
        "stage": {f"w{rank}": torch.full((4,), float(rank))},
        "nested": {"deep": PerRank(rank)},
        f"only{rank}": rank,
    }
    distributed.save(state, path)
    into = {
        "rng": PerRank({"cpu": torch.zeros(3, dtype=torch.int64), "seen": 0}),
        "step": 0,
        "stage": {f"w{rank}": torch.zeros(4)},
        "nested": {"deep": PerRank(None)},
        f"only{rank}": None,
    }
    distributed.load_into(into, path)
    assert into["rng"].value["cpu"].tolist() == [rank] * 3
    assert (into["rng"].value["seen"], into["step"], into[f"only{rank}"]) == (rank * 10, 5, rank)
    assert into["stage"][f"w{rank}"].tolist() == [rank] * 4
    assert into["nested"]["deep"].value == rank
    loaded = ringstow.load(tmp_path)
    assert loaded["rng"]["2"]["seen"] == 20
    assert sorted(loaded["stage"]) == ["w0", "w1", "w2"]
    assert loaded["only1"] == 1


def more_ranks(rank, path):
    return raised(lambda: distributed.load_into({"rng": PerRank(0)}, path, strict=False))[1]


def test_a_rank_without_a_value_of_its_own_is_refused_on_all(ranks, tmp_path):
    ranks(2).run(values_of_two, tmp_path)
    said = ranks(3).run(more_ranks, tmp_path)
    assert all("no value of rank 2: it has those of 2 ranks" in text for text in said)
    assert "rank 2 failed" in said[0]


def values_of_two(rank, path):
    distributed.save({"rng": PerRank(rank)}, path)


@on_ranks(2)
def test_values_that_differ_are_the_first_ranks_and_named(rank, tmp_path):
    with logged("different") as said:
        for step in range(2):
            state = {"rng": torch.full((9,), rank), "loss": rank / 2, "same": 1, "step": step}
            distributed.save(state, tmp_path / f"{step}")
    assert ["tensors of rng" in text for text in said].count(True) == (0 if rank else 2)
    # Once a structure.
    assert ["values of loss:" in text for text in said].count(True) == (0 if rank else 1)
    assert said == [] or rank == 0
    loaded = ringstow.load(tmp_path / "1")
    assert (loaded["rng"].tolist(), loaded["loss"]) == ([0] * 9, 0.0)


@on_ranks(3)
def test_ranks_with_different_keys(rank, tmp_path):
    """A pipeline: each rank has its own layers, and two have the head."""
    state = {f"layer{rank}": torch.full((3, 3), float(rank)), "head": torch.arange(5)}
    if rank == 2:
        del state["head"]
    for step in range(2):
        distributed.save(state, tmp_path / f"{step}")
    into = {key: torch.zeros_like(one) for key, one in state.items()}
    distributed.load_into(into, tmp_path / "1")
    assert all(torch.equal(into[key], state[key]) for key in state)
    loaded = ringstow.load(tmp_path / "1")
    assert sorted(loaded) == ["head", "layer0", "layer1", "layer2"]
    assert loaded["head"].tolist() == [0, 1, 2, 3, 4]


# Failures.


def bad_states(rank, path):
    from torch.distributed.tensor import Partial

    generator = (x for x in "ab") if rank == 1 else 1
    partial = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Partial()])
    said = [
        raised(lambda: distributed.save({"bad": generator}, path)),
        raised(lambda: distributed.save({"w": torch.zeros(3 + rank)}, path)),
        raised(lambda: distributed.save({"w": partial}, path)),
        raised(lambda: distributed.save({}, f"{path}{rank}")),
        raised(lambda: distributed.save({"a": 1}, path, droppable=["b"])),
        raised(lambda: distributed.save_async({"bad": generator}, path).result()),
        raised(lambda: distributed.load_into({}, path)),
    ]
    distributed.save({"good": torch.ones(2)}, path)
    return said


def test_all_ranks_raise_what_is_wrong_with_a_state(ranks, tmp_path):
    one, other = ranks(2).run(bad_states, tmp_path / "a")
    assert "rank 1 failed: InvalidStateError: bad" in one[0][1]
    assert "bad is a generator" in other[0][1]
    assert "F32 [3] on rank 0 and F32 [4] on rank 1" in one[1][1]
    assert one[1] == other[1]
    assert "partial sums" in one[2][1]
    assert "the same call" in one[3][1]
    assert "droppable" in one[4][1]
    assert "rank 1 failed: InvalidStateError: bad" in one[5][1]
    assert "bad is a generator" in other[5][1]
    assert one[6][0] == other[6][0] == "FileNotFoundError"
    assert torch.equal(ringstow.load(tmp_path / "a")["good"], torch.ones(2))
    assert os.listdir(tmp_path) == ["a"]


def fails_to_write(rank, path, victim):
    from ringstow.distributed import _save

    write = _save._native.start_write_dealt
    if rank == victim:
        write = Mock(side_effect=OSError(28, "No space left on device"))
    state = {"w": torch.full((9,), 2.0), f"own{rank}": torch.ones(4)}
    with patch.object(_save._native, "start_write_dealt", write):
        return [
            raised(lambda: distributed.save(state, path)),
            raised(lambda: distributed.save_async(state, path).result()),
        ]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_cannot_write_fails_all_and_keeps_the_checkpoint(ranks, tmp_path, victim):
    ranks(2).run(save, "fsdp2", tmp_path)
    before = sorted(os.listdir(tmp_path))
    said = ranks(2).run(fails_to_write, tmp_path, victim)
    assert all("No space left" in text for _, text in said[victim])
    assert all(f"rank {victim} failed: OSError" in text for _, text in said[1 - victim])
    assert ringstow.load(tmp_path)["step"] == 7
    assert sorted(os.listdir(tmp_path)) == before


@on_ranks(2)
def test_a_load_that_does_not_fit_one_rank_changes_none(rank, tmp_path):
    distributed.save({"w": torch.ones(4), "extra": 3}, tmp_path)
    state = {"w": torch.zeros(4 + rank), "gone": 1}
    kind, text = raised(lambda: distributed.load_into(state, tmp_path))
    assert not state["w"].any()
    assert kind == "KeyMismatchError"
    assert rank == 0 or "F32 [5] here and F32 [4]" in text


@on_ranks(2)
def test_a_key_of_the_checkpoint_must_be_on_some_rank(rank, tmp_path):
    distributed.save({"w": torch.ones(4), "extra": 3}, tmp_path)
    state = {"w": torch.zeros(4), **({"extra": 0} if rank == 0 else {})}
    distributed.load_into(state, tmp_path)  # some rank has each
    del state["w"]
    kind, text = raised(lambda: distributed.load_into(state, tmp_path))
    assert kind == "KeyMismatchError"
    assert "only in the checkpoint (1): w;" in text


@on_ranks(2)
def test_damage_is_every_ranks_error(rank, tmp_path):
    distributed.save({"w": torch.arange(64.0 * 1024)}, tmp_path)
    if rank == 0:
        flip(shards_of(tmp_path)[0], 5000)
    dist.barrier()
    state = {"w": torch.zeros(64 << 10)}
    kind, _ = raised(lambda: distributed.load_into(state, tmp_path))
    assert kind == "CorruptCheckpointError"


def test_without_a_process_group_it_says_what_to_do(tmp_path):
    if dist.is_initialized():
        pytest.skip("another test left a group")
    with pytest.raises(ringstow.InvalidStateError, match=r"init_process_group.*ringstow\.save"):
        distributed.save({}, tmp_path)


def dies(rank, path, victim, moment):
    from test_dcp_killed import die_at

    from ringstow.distributed import _save

    if rank == victim:
        die_at("before the commit" if moment == "commit" else "while writing")
        if moment == "write":
            _save._native.start_write_dealt = _save._native.start_write
    state = {"w": torch.full((64,), -1.0), "step": 8}
    distributed.save(state, path)


@pytest.mark.parametrize(("victim", "moment"), [(1, "write"), (0, "write"), (0, "commit")])
def test_a_killed_rank_leaves_the_earlier_checkpoint(ranks, tmp_path, victim, moment):
    ranks(2).run(save, "fsdp2", tmp_path)
    with pytest.raises(RuntimeError, match=f"rank {victim} died with exit code -9"):
        ranks(2).run(dies, tmp_path, victim, moment)
    assert ringstow.load(tmp_path)["step"] == 7
    saved = ranks(2).run(save, "fsdp2", tmp_path)[0]  # leftovers do not block the next save
    assert differences(saved, ranks(2).run(load, "fsdp2", tmp_path)[0]) == []
    assert not list(tmp_path.glob("*.part"))


@on_ranks(3)
def test_a_group_of_some_ranks(rank, tmp_path):
    dist.new_group([0, 2], backend="gloo")  # of the saving ranks one knows more groups
    group = dist.new_group([1, 2], backend="gloo")
    if rank == 0:
        _, said = raised(lambda: distributed.save({}, tmp_path, group=group))
        assert "not in the group" in said
    else:
        state = {"w": torch.arange(4.0), f"own{rank}": torch.full((2,), rank)}
        distributed.save(state, tmp_path, group=group)
        into = {"w": torch.zeros(4), f"own{rank}": torch.zeros(2, dtype=torch.int64)}
        distributed.load_into(into, tmp_path, group=group)
        assert into[f"own{rank}"].tolist() == [rank] * 2
    # Groups that the program makes afterwards have the same name on all ranks.
    dist.barrier(dist.new_group(backend="gloo"))
    assert sorted(ringstow.load(tmp_path)) == ["own1", "own2", "w"]


@on_ranks(2)
def test_parts_that_are_set_apart_can_be_dropped(rank, tmp_path):
    state = {"model": {f"w{rank}": torch.ones(3)}}
    if rank == 0:
        state["optimizer"] = {"m": torch.ones(3)}
    options = {"droppable": ["optimizer"], "metrics": {"loss": rank + 0.5}, "step": 3}
    distributed.save(state, tmp_path, **options)
    dist.barrier()
    if rank == 0:
        ringstow.slim(tmp_path, drop=["optimizer"])
    dist.barrier()
    said = raised(lambda: distributed.load_into(state, tmp_path))
    if rank == 0:
        assert said[0] == "KeyMismatchError"
        assert "slim" in said[1]
    assert sorted(ringstow.load(tmp_path)["model"]) == ["w0", "w1"]
    with ringstow.open(tmp_path) as checkpoint:
        assert (checkpoint.info.step, checkpoint.info.metrics) == (3, {"loss": 0.5})


@on_ranks(2)
def test_saves_one_after_the_other_leak_nothing(rank, tmp_path):
    import psutil

    used, process = [], psutil.Process()
    for step in range(60):
        handle = distributed.save_async({"w": torch.ones(1 << 16), "step": step}, tmp_path)
        if step % 20 == 10:
            used.append((process.num_fds(), process.num_threads()))
    handle.result()
    for numbers in zip(*used, strict=True):
        assert max(numbers) <= min(numbers) + 2
    assert ringstow.load(tmp_path)["step"] == 59


@on_ranks(2)
def test_a_group_of_its_own_changes_no_name_that_other_threads_give_theirs(rank, tmp_path):
    c10d = dist.distributed_c10d
    group = dist.new_group([0, 1])
    names, helper, seen = c10d._hash_ranks_to_str, c10d._new_process_group_helper, []

    def look(*args, **kwargs):
        seen.append((c10d._hash_ranks_to_str is names, c10d._world.group_count))
        return helper(*args, **kwargs)

    count = c10d._world.group_count
    with patch.object(c10d, "_new_process_group_helper", look):
        distributed.save({"w": torch.ones(3)}, tmp_path / "x", group=group)
    assert seen == [(True, count)]
    assert c10d._world.group_count == count
