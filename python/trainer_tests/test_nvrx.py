"""NVRx's local checkpoints by ringstow, on gloo ranks: kills, full disks, damage, replicas."""

from __future__ import annotations

import inspect
import logging
import pickle
import signal
import threading

import children
import pytest
import torch
from all_trainers import assert_same_parameters, run_page
from children import results
from support import assert_same, flip

import ringstow

pytest.importorskip(
    "nvidia_resiliency_ext", reason="needs the extra nvrx: make test-trainers installs it"
)
import nvrx_runs as runs
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers import base_manager, local_manager

from ringstow.integrations import nvrx

pytestmark = pytest.mark.timeout(300)

LAST = runs.ITERATIONS - 1


def assert_ended(root, begun, *how):
    """All ranks go on from an iteration to the end, and only that is left."""
    for rank, found in enumerate(results(2, runs.train, root, *how)):
        assert_same(found, (begun, runs.state_at(rank, LAST)))
        assert runs.names(root, rank) == [f"iter_{LAST:07}_{rank}_local"]
        path = runs.folder(root, rank) / f"iter_{LAST:07}_{rank}_local"
        assert ringstow.verify(path).ok
        assert_same(ringstow.load(path)["attributes"]["state_dict"], runs.state_at(rank, LAST))


@pytest.mark.parametrize("mode", ["sync", "forked", "persistent"])
def test_ranks_save_in_every_way_of_nvrx_and_resume(mode, tmp_path):
    results(2, runs.train, tmp_path, mode, LAST)
    assert_ended(tmp_path, LAST - 1)


# The moment, the iteration, which ranks, how NVRx saves, and the iteration that is complete then.
MOMENTS = [
    ("starting", 2, (0,), "sync", 1),
    ("writing", 2, (0, 1), "sync", 1),
    ("committed", 2, (0, 1), "sync", 2),
    ("committed", 0, (1,), "sync", 0),
    ("removing", 2, (1,), "sync", 2),
]


@pytest.mark.parametrize(("moment", "at", "victims", "mode", "complete"), MOMENTS)
def test_killed_ranks_resume_to_the_bit(moment, at, victims, mode, complete, tmp_path):
    codes = children.exit_codes(2, runs.killed, tmp_path, moment, at, victims, mode)
    assert all(codes[victim] == -signal.SIGKILL for victim in victims)
    assert 0 not in codes
    assert_ended(tmp_path, complete)


def test_an_iteration_that_one_rank_alone_has_saved_is_saved_anew_by_all(tmp_path):
    """A run that went another way must not count a rank's older checkpoint as its new one."""
    results(2, runs.saved, tmp_path, [1, 2], {})
    ringstow.remove(runs.folder(tmp_path, 0) / "iter_0000002_0_local")
    other = runs.folder(tmp_path, 1) / "iter_0000002_1_local"
    ringstow.save({"class": "another"}, other, step=2)
    assert_ended(tmp_path, 1)


@pytest.mark.parametrize("moment", ["starting", "writing"])
def test_a_killed_saving_process_fails_the_save_on_all_ranks(moment, tmp_path):
    codes = children.exit_codes(2, runs.killed, tmp_path, moment, 2, (1,), "forked")
    assert codes == [1, 1]
    assert_ended(tmp_path, 1, "forked")


@pytest.mark.parametrize("mode", ["sync", "forked"])
def test_a_full_disk_of_one_rank_raises_on_all_and_the_next_save_goes_well(mode, tmp_path):
    results(2, runs.full_disk, tmp_path, mode)


def damage(root, rank):
    """Change a byte of a rank's checkpoint."""
    (shard,) = runs.folder(root, rank).glob(f"iter_0000002_{rank}_local/*.safetensors")
    flip(shard, -100)


def test_a_damaged_checkpoint_counts_as_missing_and_an_older_one_is_taken(tmp_path):
    results(2, runs.saved, tmp_path, [1, 2], {})
    damage(tmp_path, 1)
    for rank, (found, loaded) in enumerate(results(2, runs.newest, tmp_path, {})):
        assert (found, loaded.max()) == (1, 100 * rank + 1)
    assert_ended(tmp_path, 1)


def test_a_damaged_checkpoint_is_taken_from_its_replica(tmp_path):
    options = {"replicas": True}
    results(2, runs.saved, tmp_path, [1, 2], options)
    assert len(runs.names(tmp_path, 0)) == 4
    damage(tmp_path, 1)
    for rank, (found, loaded) in enumerate(results(2, runs.newest, tmp_path, options)):
        assert (found, loaded.max()) == (2, 100 * rank + 2)


def test_one_ranks_failure_to_load_is_raised_on_all(tmp_path):
    options = {"verify": False}
    results(2, runs.saved, tmp_path, [2], options)
    damage(tmp_path, 1)
    (_, first), (_, second) = results(2, runs.newest, tmp_path, options)
    assert "rank 1 failed" in first
    assert "checksum" in second


def test_other_state_dicts_are_pickled_only_if_that_is_allowed(tmp_path):
    results(1, runs.unlisted, tmp_path)


def test_the_pages_example_trains_and_resumes(tmp_path):
    for first in (0, 20):
        results(1, page, str(tmp_path), first)
    (name,) = runs.names(tmp_path / "mnt", 0)
    assert name == "iter_0000020_0_local"


def page(rank, ranks, root, first):
    """Run the page's example, without its GPU; it begins after the iteration that is there."""
    runs.without_cuda()
    kind = runs.BasicTensorAwareStateDict
    kind.__init__, kind.restore_tensor_device = runs.OnCpu.__init__, lambda *_, **__: None

    def edit(code):
        return code.replace("/mnt/nvme", f"{root}/mnt/session").replace('"nccl"', '"gloo"')

    names = run_page("large-scale.md", "NVRx", edit, model=torch.nn.Linear(8, 8))
    assert names["first"] == (first + 1 if first else 0)


# Without ranks.


def test_nvrxs_seam_is_as_this_module_knows_it():
    base = base_manager.BaseCheckpointManager
    ours, stock = nvrx.LocalCheckpointManager, local_manager.LocalCheckpointManager
    calls = "_my_ckpt_ids _load _save _cleanup _cleanup_failed_save"
    assert base.__abstractmethods__ == set(calls.split())
    for name in nvrx._METHODS:
        assert_same_parameters(getattr(ours, name), getattr(base, name))
    taken = list(inspect.signature(stock).parameters)
    assert list(inspect.signature(ours).parameters)[: len(taken)] == taken
    finalize = inspect.getsource(base.save)
    assert finalize.index("save_fn(*save_args)") < finalize.rindex("finalize_fn()")
    assert finalize.index("self.find_latest()") < finalize.index("self._cleanup_failed_save")


@pytest.mark.parametrize("name", ["_save", "_cleanup", "another"])
def test_an_nvrx_with_another_seam_is_refused(name):
    changed = type("Base", (base_manager.BaseCheckpointManager,), {})
    if name == "another":
        changed.__abstractmethods__ = changed.__abstractmethods__ | {name}
    else:
        setattr(changed, name, lambda self, more, arguments, than: None)
    with pytest.raises(ringstow.UnsupportedError, match=name):
        nvrx._check_seam(changed)


@pytest.fixture
def one(tmp_path):
    """Return a manager of one rank."""
    return nvrx.LocalCheckpointManager(tmp_path, state_dicts=[runs.OnCpu])


def test_a_checkpoint_that_is_there_already_is_never_replaced(one):
    one._save(runs.wrapped(0, 1), (1, 0, ""))
    with pytest.raises(base_manager.SameMachineReplicationException):
        one._save(runs.wrapped(0, 5), (1, 0, ""))
    assert one._load((1, 0, "")).state_dict["w"].max() == 1


def test_a_process_that_saves_gets_a_manager_without_process_groups(tmp_path):
    groups = threading.Lock()  # as little to be pickled as they are
    one = nvrx.LocalCheckpointManager(tmp_path, "s", groups, state_dicts=[runs.OnCpu])
    other = pickle.loads(pickle.dumps(one))
    other._save_fn({(1, 0, "s"): runs.wrapped(0, 1), (1, 3, "s"): runs.wrapped(3, 1)})
    assert sorted(one._my_ckpt_ids()) == [(1, 0, "s"), (1, 3, "s")]  # its own, and a replica
    assert one.repl_strategy is groups


def test_a_failed_saves_late_removal_spares_a_newer_save_of_the_same_iteration(one):
    one._tries[1] = 2  # one has failed, and the next has begun
    one._save(runs.wrapped(0, 1), (1, 0, ""))
    one._cleanup_failed_save(1)
    assert one._my_ckpt_ids() == [(1, 0, "")]
    one._cleanup_failed_save(1)
    assert one._my_ckpt_ids() == []


def test_what_killed_saves_left_and_other_names_do_not_count(one):
    one._save(runs.wrapped(0, 3), (3, 0, ""))
    ringstow.save({"n": 1}, one.local_ckpt_dir / "mine", step=9)
    half = one.local_ckpt_dir / "iter_0000004_0_local"
    half.mkdir()
    (half / "rank00000-0.safetensors.part").touch()
    assert one._my_ckpt_ids() == [(3, 0, "")]
    one._cleanup(3)
    assert not half.exists()
    assert (one.local_ckpt_dir / "mine").exists()


def test_checkpoints_of_nvrxs_own_manager_are_named_in_a_warning(one, caplog):
    one.local_ckpt_dir.mkdir(parents=True)
    (one.local_ckpt_dir / "iter_0000001_0_local.pt").touch()
    with caplog.at_level(logging.WARNING, "ringstow"):
        assert one._my_ckpt_ids() == []
    assert "iter_0000001_0_local.pt" in caplog.text


def test_urls_are_refused_and_tiers():
    with pytest.raises(ringstow.InvalidStateError, match="is a URL"):
        nvrx.LocalCheckpointManager("s3://bucket/checkpoints")
    with pytest.raises(ringstow.InvalidStateError, match="tiers"):
        nvrx.LocalCheckpointManager("checkpoints", config=ringstow.Config(tiers=["/other"]))
