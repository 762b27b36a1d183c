"""Nodes that share no directory, with tiers: each sends its files, and the last one commits."""

from __future__ import annotations

import os
import shutil
from unittest.mock import patch

import forked
import pytest
import torch
from layouts import EVEN_HIDDEN, differences, filled
from node_runs import manager_on, root_on, saved_and_copied, train, train_own
from ranks import on_ranks
from test_distributed import state_of
from tiered import AT_ONCE, before_copies, pause

import ringstow
from ringstow.distributed import PerRank


def in_environment(rank, values, function, *args):
    with patch.dict(os.environ, values):
        return function(rank, *args)


def test_nodes_send_their_files_to_a_store_and_the_last_one_commits(ranks, tmp_path, bucket):
    """All nodes are lost; the store has the newest step that all had sent."""
    options = {"tiers": ringstow.Tiers([f"{bucket.url}/run"], keep=2), "keep": 1}
    arguments = (bucket.environment(), train, tmp_path, [1, 2, 3], options)
    saved = ranks(4).run(in_environment, *arguments)[0]
    found = ringstow.steps(f"{bucket.url}/run")
    assert [(one.step, one.status) for one in found] == [(2, "committed"), (3, "committed")]
    loaded = ringstow.load(f"{bucket.url}/run/step-00000003")
    assert differences(saved[0], loaded["model"]) == []
    assert sorted(loaded["own"]) == ["0", "1", "2", "3"]
    shutil.rmtree(tmp_path / "node2")
    arguments = (bucket.environment(), resume_from_store, tmp_path, options)
    step, loaded = ranks(4).run(in_environment, *arguments)[0]
    assert step == 3
    assert differences(saved, loaded) == []


def test_nodes_send_their_files_to_a_directory_that_all_see(ranks, tmp_path):
    """Each node is lost with its disk; the directory has the newest step that all had sent."""
    there = tmp_path / "shared" / "run"
    options = {"tiers": ringstow.Tiers([there], keep=2), "keep": 1}
    saved = ranks(4).run(train, tmp_path, [1, 2, 3], options)[0]
    found = ringstow.steps(there)
    assert [(one.step, one.status) for one in found] == [(2, "committed"), (3, "committed")]
    assert ringstow.verify(there / "step-00000003").ok
    for rank in range(4):
        shutil.rmtree(tmp_path / f"node{rank}")
    step, loaded = ranks(4).run(resume_from_store, tmp_path, options)[0]
    assert step == 3
    assert differences(saved, loaded) == []


@on_ranks(3)
def test_tier_that_one_node_cannot_ask_is_tried_again_by_all(rank, tmp_path):
    """Rank 1 fails to read from the tier which run its steps belong to, at the first two tries."""
    from ringstow import _native

    was, asked = _native.run_of, []

    def away(place):
        if rank == 1 and str(place).endswith("shared/run"):
            asked.append(place)
            if len(asked) <= 2:
                raise ConnectionRefusedError(place)
        return was(place)

    with pytest.MonkeyPatch.context() as patch:
        pause(patch)
        patch.setattr(_native, "run_of", away)
        assert saved_and_copied(rank, tmp_path, tiers=[tmp_path / "shared" / "run"]) is None
    assert [one.step for one in ringstow.steps(tmp_path / "shared/run")] == [1]


def send_to_one_that_is_away(rank, root, pauses_s, tries):
    """On rank 1 the tier does not answer the first tries; return how the copies ended."""
    calls = []

    def away(path, to):
        calls.append(to)
        if rank == 1 and len(calls) <= tries:
            raise ConnectionRefusedError(to)

    with pytest.MonkeyPatch.context() as patch:
        pause(patch, pauses_s)
        before_copies(patch, away)
        with manager_on(rank, root, tiers=[root / "shared" / "run"]) as manager:
            manager.save(1, {"own": PerRank(torch.full((100,), rank))})
            is_there = manager.wait_promoted()
            if pauses_s == AT_ONCE:
                while not is_there:
                    is_there = manager.wait_promoted(60)
                manager.save(2, {"own": PerRank(torch.full((100,), rank))})
                assert manager.wait_promoted()
        return is_there, manager.promotion_error


def test_all_nodes_try_again_until_the_tier_of_one_is_back(ranks, tmp_path):
    ended = ranks(3).run(send_to_one_that_is_away, tmp_path, AT_ONCE, 4)
    assert ended == [(True, None)] * 3
    assert [one.step for one in ringstow.steps(tmp_path / "shared/run")] == [1, 2]
    assert ringstow.verify(tmp_path / "shared/run/step-00000001").ok


def test_all_nodes_try_a_last_time_at_the_end(ranks, tmp_path):
    ended = ranks(3).run(send_to_one_that_is_away, tmp_path, (3600.0, 3600.0), 1)
    assert ended == [(False, None)] * 3
    assert [one.step for one in ringstow.steps(tmp_path / "shared/run")] == [1]


def test_a_last_try_that_fails_ends_on_all_nodes(ranks, tmp_path):
    ended = ranks(3).run(send_to_one_that_is_away, tmp_path, (3600.0, 3600.0), 99)
    assert [is_there for is_there, _ in ended] == [False] * 3
    [_, (_, own), (_, others)] = ended
    assert isinstance(own, ConnectionRefusedError)
    assert "rank 1 failed: ConnectionRefusedError" in str(others)
    assert ringstow.latest(tmp_path / "shared/run") is None


@on_ranks(2)
def test_steps_leave_all_nodes_once_the_tier_has_them(rank, tmp_path):
    options = {"tiers": ringstow.Tiers([tmp_path / "shared" / "run"], keep_here=1)}
    with manager_on(rank, tmp_path, **options) as manager:
        assert manager.restore(into={"own": PerRank(torch.zeros(100))}) is None
        for step in (1, 2, 3):
            manager.save(step, {"own": PerRank(torch.full((100,), 10.0 * step + rank))})
            assert manager.wait_promoted()
    state = {"own": PerRank(torch.zeros(100))}
    with manager_on(rank, tmp_path, **options) as manager:
        assert manager.restore(1, into=state).step == 1
        assert manager.restore(into={"own": PerRank(torch.zeros(100))}).step == 3
        manager.save(4, {"own": PerRank(torch.full((100,), 40.0 + rank))})
    assert state["own"].value[0] == 10.0 + rank
    assert [one.step for one in ringstow.steps(root_on(tmp_path, rank))] == [4]
    assert [one.step for one in ringstow.steps(tmp_path / "shared/run")] == [1, 2, 3, 4]


def test_step_stays_while_other_nodes_have_yet_to_send_their_files(ranks, tmp_path, caplog):
    """The run goes on in one process, with one node's directory."""
    ranks(2).run(train_own, tmp_path, [1], {})
    run, there = root_on(tmp_path, 0), tmp_path / "shared"
    with ringstow.CheckpointManager(run, tiers=ringstow.Tiers([there], keep_here=1)) as manager:
        for step in (2, 3, 4):
            manager.save(step, {"w": torch.ones(5)})
            manager.wait_promoted()
    assert [one.step for one in ringstow.steps(run)] == [1, 4]
    assert "other nodes have still to send 1 files" in caplog.text
    whole = [one.step for one in ringstow.steps(there) if one.status == "committed"]
    assert whole == [2, 3, 4]


def resume_from_store(rank, root, options):
    model, optimizer, state = state_of("fsdp2", 99, 0, EVEN_HIDDEN)
    state["own"] = PerRank(torch.zeros(5000, dtype=torch.int64))
    with manager_on(rank, root, **options) as manager:
        restored = manager.restore(into=state)
    assert restored.path.startswith(str(options["tiers"].places[0]))
    assert int(state["own"].value[0]) == restored.step + rank
    return restored.step, filled(model, optimizer, state)


def test_node_by_node_from_the_command_line(ranks, tmp_path, bucket):
    saved = ranks(2).run(train, tmp_path, [1], {})[0]
    paths = [str(root_on(tmp_path, rank) / "step-00000001") for rank in (0, 1)]
    url = f"{bucket.url}/copy"
    first = ringstow.promote(paths[0], url)
    assert first.missing > 0
    assert ringstow.latest(bucket.url) is None
    again = ringstow.promote(paths[0], url)
    assert (again.missing, again.sent_bytes) == (first.missing, 0)
    program = "from ringstow._program import _cli; _cli.main()"
    forked.python(program, "promote", paths[1], "--to", url, check=True)
    assert ringstow.promote(paths[0], url).was_there
    assert differences(saved[0], ringstow.load(url)["model"]) == []


def test_replica_is_sent_for_a_node_that_is_lost(ranks, tmp_path, bucket):
    ranks(2).run(train, tmp_path, [1], {"replicas": 2})
    path, url = root_on(tmp_path, 0) / "step-00000001", f"{bucket.url}/copy"
    assert ringstow.promote(path, url, replicas=False).missing > 0
    assert ringstow.promote(path, url).missing == 0
    assert ringstow.verify(url).ok


@on_ranks(2)
def test_kept_step_outlives_the_rules_of_the_tier_of_nodes(rank, tmp_path):
    options = {"tiers": ringstow.Tiers([tmp_path / "shared" / "run"], keep=1), "keep": 1}
    with manager_on(rank, tmp_path, **options) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"own": PerRank(torch.full((100,), 10.0 * step + rank))})
            assert manager.wait_promoted()
            if step == 1:
                manager.keep(1)
    assert [one.step for one in ringstow.steps(tmp_path / "shared/run")] == [1, 3]
