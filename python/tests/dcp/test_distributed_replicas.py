"""CheckpointManager on nodes that share no directory: each rank's node is a folder of its own."""

from __future__ import annotations

import os
import shutil
import threading
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from layouts import EVEN_HIDDEN, differences, filled
from node_runs import manager_on, root_on, saved_and_copied, train, train_own
from ranks import on_ranks
from support import flip, logged
from test_distributed import state_of
from tiered import pause

import ringstow
from ringstow import distributed
from ringstow.distributed import PerRank


def resume(rank, root, options, step=None, on_corrupt="raise"):
    model, optimizer, state = state_of("fsdp2", 99, 0, EVEN_HIDDEN)
    state["own"] = PerRank(torch.zeros(5000, dtype=torch.int64))
    with manager_on(rank, root, **options) as manager:
        restored = manager.restore(step, into=state, on_corrupt=on_corrupt)
        found = [one.step for one in manager.steps()]
        newest = manager.latest()
    if restored is None:
        return None
    assert restored.path.startswith(str(root_on(root, rank)))
    assert int(state["own"].value[0]) == restored.step + rank
    assert newest is not None
    return restored.step, found, filled(model, optimizer, state)


def ranks_in(directory):
    return sorted({int(name[4:9]) for name in os.listdir(directory) if name.startswith("rank")})


def test_any_one_node_can_be_lost(ranks, tmp_path):
    options = {"replicas": 2, "keep": 2}
    saved = ranks(4).run(train, tmp_path / "whole", [1, 2, 3], options)[0]
    for rank in range(4):
        run = root_on(tmp_path / "whole", rank)
        hidden = [".ringstow-copied", ".ringstow-history.jsonl", ".ringstow-node.json"]
        assert sorted(os.listdir(run)) == [*hidden, "step-00000002", "step-00000003"]
        assert ranks_in(run / "step-00000003") == sorted({rank, (rank - 1) % 4})
        assert ringstow.verify(run / "step-00000003").ok
    for lost in range(4):
        root = tmp_path / f"without{lost}"
        shutil.copytree(tmp_path / "whole", root)
        shutil.rmtree(root / f"node{lost}")
        step, found, loaded = ranks(4).run(resume, root, options)[0]
        assert (step, found) == (3, [2, 3])
        assert differences(saved, loaded) == []


def test_new_node_gets_the_files_of_the_lost_one_and_then_the_other_can_be_lost(ranks, tmp_path):
    options = {"replicas": 2}
    saved = ranks(2).run(train, tmp_path, [1], options)[0]
    for lost in (1, 0, 1):
        shutil.rmtree(tmp_path / f"node{lost}")
        step, _, loaded = ranks(2).run(resume, tmp_path, options)[0]
        assert step == 1
        assert differences(saved, loaded) == []
        assert ranks_in(root_on(tmp_path, lost) / "step-00000001") == [0, 1]


def test_two_neighbours_can_be_lost_with_three_copies(ranks, tmp_path):
    options = {"replicas": 3}
    saved = ranks(4).run(train, tmp_path, [1], options)[0]
    for lost in (3, 0):
        shutil.rmtree(tmp_path / f"node{lost}")
    step, _, loaded = ranks(4).run(resume, tmp_path, options)[0]
    assert step == 1
    assert differences(saved, loaded) == []


def test_more_lost_than_there_are_copies_is_an_error_that_names_the_node(ranks, tmp_path):
    ranks(4).run(train, tmp_path, [1, 2], {"replicas": 2})
    for lost in (1, 2):
        shutil.rmtree(tmp_path / f"node{lost}")
    with pytest.raises(ringstow.MissingFilesError, match="on none of the 4 nodes: rank00001"):
        ranks(4).run(resume, tmp_path, {"replicas": 2})


def test_step_that_was_lost_with_a_node_is_passed_over(ranks, tmp_path):
    """The newest step was not copied yet when the node was lost; the one before was."""
    ranks(2).run(train, tmp_path, [1], {"replicas": 2})
    ranks(2).run(train, tmp_path, [2], {})
    shutil.rmtree(tmp_path / "node1")
    step, found, _ = ranks(2).run(resume, tmp_path, {})[0]
    assert (step, found) == (1, [1, 2])
    with pytest.raises(ringstow.MissingFilesError, match="rank00001"):
        ranks(2).run(resume, tmp_path, {}, 2)


@pytest.mark.parametrize("has_tier", [False, True], ids=["alone", "with a tier"])
@on_ranks(2)
def test_best_step_is_one_of_which_no_file_is_lost(rank, tmp_path, has_tier):
    options = {"tiers": ringstow.Tiers([tmp_path / "shared"], keep=1)} if has_tier else {}
    own = {"own": PerRank(torch.zeros(5))}
    with manager_on(rank, tmp_path, **options) as manager:
        for step in (1, 2):
            manager.save(step, own, metrics={"loss": step})
            assert manager.wait_promoted()
        assert manager.best("loss", "min").step == 1
        dist.barrier()
        if rank == 1:
            for lost in (root_on(tmp_path, 1) / "step-00000001").glob("rank*"):
                lost.unlink()
        dist.barrier()
        assert manager.best("loss", "min").step == 2


def load_all(rank, root):
    return distributed.load(root_on(root, rank) / "step-00000001")


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("into", [False, True])
def test_replica_is_used_where_a_file_is_damaged(ranks, tmp_path, is_cut, into):
    saved = ranks(2).run(train, tmp_path, [1], {"replicas": 2})[0]
    here = root_on(tmp_path, 1) / "step-00000001"
    for damaged in here.glob("rank00001*"):
        flip(damaged, -1)
        if is_cut:
            os.truncate(damaged, damaged.stat().st_size - 1)
    assert not ringstow.verify(here).ok
    if into:
        step, _, loaded = ranks(2).run(resume, tmp_path, {"replicas": 2})[0]
        assert step == 1
        assert differences(saved, loaded) == []
    else:
        loaded = ranks(2).run(load_all, tmp_path)
        assert all(differences(saved[0], each["model"]) == [] for each in loaded)
    assert ringstow.verify(here).ok


def save_while_copies_wait(rank, root, steps):
    """Save steps whose copies do not begin before the last of them is saved."""
    from ringstow._manager import _node_copies

    replicate, saved = _node_copies.replicate, threading.Event()

    def wait_and_replicate(*args):
        saved.wait()
        return replicate(*args)

    with manager_on(rank, root, replicas=2, keep=1) as manager:
        manager.save(1, {"own": PerRank(torch.ones(5))})
        assert manager.wait_promoted()
        _node_copies.replicate = wait_and_replicate
        try:
            for step in steps:
                manager.save(step, {"own": PerRank(torch.full((5,), float(step)))})
            here = sorted(one.step for one in manager.steps())
        finally:
            saved.set()
            manager.wait()
            assert manager.wait_promoted()
            _node_copies.replicate = replicate
    return here


def test_no_rule_removes_the_last_step_that_has_its_copies(ranks, tmp_path):
    assert ranks(2).run(save_while_copies_wait, tmp_path, [2, 3, 4]) == [[1, 2, 4], [1, 2, 4]]
    shutil.rmtree(tmp_path / "node1")
    assert ranks(2).run(restore_own, tmp_path) == [(4, 4.0), (4, 4.0)]


def restore_own(rank, root):
    state = {"own": PerRank(torch.zeros(5))}
    with manager_on(rank, root, replicas=2, keep=1) as manager:
        return manager.restore(into=state).step, float(state["own"].value[0])


def save_before_the_copy(rank, root):
    """Go back to a step that has its copies, and save another one."""
    state = {"own": PerRank(torch.zeros(5))}
    with manager_on(rank, root, keep=1, replicas=2) as manager:
        assert manager.restore(into=state).step == 1
        assert 1 in [one.step for one in manager.steps()]
        manager.save(2, state)
        assert manager.wait_promoted()


def test_step_that_was_restored_stays_until_another_has_its_copies(ranks, tmp_path):
    ranks(2).run(train_own, tmp_path, [1], {"replicas": 2})
    ranks(2).run(train_own, tmp_path, [3, 4], {})
    shutil.rmtree(tmp_path / "node1")
    ranks(2).run(save_before_the_copy, tmp_path)
    assert ranks(2).run(restore_own, tmp_path)[0][0] == 2


def test_damaged_steps_and_lost_ones_are_passed_over(ranks, tmp_path):
    """3 is damaged, 2 is not whole, 1 is."""
    ranks(2).run(train_own, tmp_path, [1], {"replicas": 2})
    ranks(2).run(train_own, tmp_path, [2, 3], {})
    for lost in (root_on(tmp_path, 1) / "step-00000002").glob("rank*"):
        lost.unlink()
    for damaged in (root_on(tmp_path, 1) / "step-00000003").glob("rank*"):
        damaged.write_bytes(bytes(damaged.stat().st_size))
    with pytest.raises(ringstow.Error, match="CorruptCheckpointError"):
        ranks(2).run(restore_previous, tmp_path, "raise")
    assert ranks(2).run(restore_previous, tmp_path, "previous") == [1, 1]


def restore_previous(rank, root, on_corrupt):
    state = {"own": PerRank(torch.zeros(5))}
    with manager_on(rank, root) as manager:
        return manager.restore(into=state, on_corrupt=on_corrupt).step


@on_ranks(2)
def test_manager_looks_while_another_save_of_the_ranks_runs(rank, tmp_path):
    """A manager and a save of the same ranks communicate at the same time."""
    state = {"own": PerRank(torch.zeros(1 << 20))}
    with manager_on(rank, tmp_path / "managed") as manager:
        manager.save(1, state)
        for step in range(5):
            path = root_on(tmp_path / "other", rank) / f"step-{step}"
            handle = distributed.save_async(state, path, nodes=ringstow.Nodes())
            assert manager.latest().step == 1
            handle.result()


@on_ranks(2)
def test_nothing_saved_yet_is_none(rank, tmp_path):
    with manager_on(rank, tmp_path) as manager:
        assert manager.steps() == []
        assert manager.latest() is None
        assert manager.restore(into={"w": torch.ones(3)}) is None


@on_ranks(2)
def test_full_disk_of_the_other_node_fails_the_copy_alone(rank, tmp_path):
    """Copies fail on rank 1, whose disk is full; saves go on."""
    from ringstow.distributed import _node_replicas

    state = {"large": PerRank(torch.zeros(2 << 20)), "step": 1}
    with manager_on(rank, tmp_path, replicas=2) as manager:
        manager.save(1, state)
        assert manager.wait_promoted()
        write = full_disk if rank == 1 else _node_replicas.open_write
        with patch.object(_node_replicas, "open_write", write):
            manager.save(2, state)
            assert not manager.wait_promoted()
        assert "No space left" in str(manager.promotion_error)
        manager.save(3, state)
        assert manager.wait_promoted()
    assert ranks_in(root_on(tmp_path, 1) / "step-00000002") == [1]
    assert ranks_in(root_on(tmp_path, 1) / "step-00000003") == [0, 1]


def full_disk(path):
    raise OSError(28, "No space left on device", path)


@on_ranks(2)
def test_copy_to_a_node_whose_disk_was_full_is_tried_again(rank, tmp_path):
    """The disk of rank 1 is full at the first two tries, and nothing is saved after that."""
    from ringstow.distributed import _node_replicas

    was, tries = _node_replicas.open_write, []

    def full_at_first(path):
        tries.append(path)
        return full_disk(path) if rank == 1 and len(tries) <= 2 else was(path)

    with pytest.MonkeyPatch.context() as patch:
        pause(patch)
        patch.setattr(_node_replicas, "open_write", full_at_first)
        assert saved_and_copied(rank, tmp_path, replicas=2) is None
    assert ranks_in(root_on(tmp_path, rank) / "step-00000001") == [0, 1]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"replicas": 3}, r"Nodes\(replicas=3\) needs as many nodes, and these ranks are on 2"),
        ({"replicas": 0}, "1 or more"),
        ({"base": "previous"}, "base is for a directory"),
        ({"keep": ringstow.Retention(slim_after=1)}, "Retention.slim_after is for a directory"),
    ],
)
@on_ranks(2)
def test_what_cannot_be_is_refused(rank, tmp_path, options, match):
    with pytest.raises((ringstow.InvalidStateError, ValueError), match=match):
        manager_on(rank, tmp_path, **options)


@on_ranks(2)
def test_ranks_that_make_different_managers_are_all_told(rank, tmp_path):
    nodes, two = ringstow.Nodes(), ringstow.Nodes(replicas=2)
    for options, match in [
        ([{}, {"nodes": nodes}], r"different nodes: rank 0: None, rank 1: Nodes\(replicas=1\)"),
        ([{}, {"nodes": two}], "different nodes"),
        ([{"nodes": nodes}, {"nodes": two}], "different nodes"),
        ([{"nodes": nodes, "keep": n} for n in (1, 2)], "different keep and tiers"),
    ]:
        with pytest.raises(ringstow.InvalidStateError, match=match):
            ringstow.CheckpointManager(root_on(tmp_path, rank), **options[rank])


@on_ranks(2)
def test_wait_for_copies_waits_for_the_save_and_says_if_it_failed(rank, tmp_path):
    with manager_on(rank, tmp_path, replicas=2) as manager:
        manager.save_async(1, {"w": torch.ones(5)})
        assert manager.wait_promoted()
        assert manager.latest().step == 1
        manager.save_async(2, {"w": torch.ones(5 + rank)})
        assert not manager.wait_promoted()
        with pytest.raises(ringstow.InvalidStateError, match="w is"):
            manager.wait()


def test_one_process_has_no_nodes(tmp_path):
    with pytest.raises(ringstow.InvalidStateError, match="for several ranks"):
        ringstow.CheckpointManager(tmp_path, nodes=ringstow.Nodes())
    assert not dist.is_initialized()


@on_ranks(2)
def test_step_whose_manifest_is_gone_on_all_nodes_is_told(rank, tmp_path):
    train_own(rank, tmp_path, (1, 2), {})
    os.remove(root_on(tmp_path, rank) / "step-00000002/manifest.json")
    gone = logged("step-00000002, whose manifest is gone")
    with gone as said, manager_on(rank, tmp_path) as manager:
        assert manager.latest().step == 1
    assert said
