"""torchtitan's Trainer with ringstow's checkpoint manager, beside torchtitan's own."""

from __future__ import annotations

import os
import resource
import shutil

import pytest
import torch
import torchtitan_processes as processes
from all_trainers import assert_slims
from support import assert_same, flip
from torchtitan_processes import results

import ringstow
import ringstow.convert

pytestmark = pytest.mark.timeout(300)

ALL = ["step-1", "step-2", "step-3", "step-4"]  # of a run with torchtitan_runs.STEPS


def fit(ranks, root, **options):
    """Return where a run begins, and what rank 0 learns."""
    return results(ranks, processes.fit, root, **options)[0]


def steps(root):
    return sorted(os.listdir(root / "checkpoint"))


def by_name(state):
    return dict(sorted(state.items()))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a folder with a run of each manager on one and on two ranks, and what it learned."""
    at = tmp_path_factory.mktemp("runs")
    learned = {}
    for ranks in (1, 2):
        for manager in ("ringstow", "stock"):
            name = f"{manager}-{ranks}"
            begun, learned[name] = fit(ranks, at / name, manager=manager)
            assert begun == 0
    return at, learned


def copied(runs, run, root, until=2):
    """Return a new run's folder with a run's steps up to a number."""
    for step in range(1, until + 1):
        name = f"checkpoint/step-{step}"
        shutil.copytree(runs[0] / run / name, root / name)
    return root


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_keeps_the_same_steps_and_learns_the_same_as_with_torchtitans_manager(ranks, runs):
    at, learned = runs
    assert_same(learned[f"ringstow-{ranks}"], learned[f"stock-{ranks}"])
    assert steps(at / f"ringstow-{ranks}") == steps(at / f"stock-{ranks}") == ALL
    for name in ALL:
        path = at / f"ringstow-{ranks}" / "checkpoint" / name
        assert ringstow.verify(path).ok
        assert (path / ".metadata").exists()


@pytest.mark.parametrize("mode", ["disabled", "async_with_pinned_mem"])
def test_every_async_mode_saves_the_same(mode, runs, tmp_path):
    assert_same(fit(1, tmp_path, async_mode=mode), (0, runs[1]["ringstow-1"]))
    for name in ALL:
        ours, other = tmp_path / "checkpoint" / name, runs[0] / "ringstow-1" / "checkpoint" / name
        assert_same(ringstow.load(ours), ringstow.load(other))


@pytest.mark.parametrize(("saved", "ranks"), [("ringstow", 1), ("stock", 1), ("stock", 2)])
def test_a_run_resumes_to_the_bit_from_either_managers_newest_step(saved, ranks, runs, tmp_path):
    copied(runs, f"{saved}-{ranks}", tmp_path)
    assert_same(fit(ranks, tmp_path), (2, runs[1][f"ringstow-{ranks}"]))


@pytest.mark.parametrize(("saved", "ranks"), [(2, 1), (1, 2)])
def test_a_checkpoint_loads_on_another_number_of_ranks(saved, ranks, runs, tmp_path):
    copied(runs, f"ringstow-{saved}", tmp_path, until=4)
    begun, learned = fit(ranks, tmp_path, exclude_from_loading=["dataloader"])
    assert begun == 4  # and nothing is trained after it
    expected = runs[1][f"ringstow-{saved}"]
    for key in ("model", "optimizer", "schedule", "train"):
        assert_same(learned[key], expected[key])


@pytest.mark.parametrize("ranks", [1, 2])
def test_slim_drops_the_optimizer_of_all_ranks(ranks, runs, tmp_path):
    source = runs[0] / f"ringstow-{ranks}" / "checkpoint" / "step-2"
    assert_slims(source, tmp_path / "step-2", "optimizer")


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_use_by_default_lets_torchtitans_own_manager_save_by_ringstow(mode, runs, tmp_path):
    results(2, by_default, tmp_path, async_mode=mode)
    for name in ALL:
        assert ringstow.verify(tmp_path / "checkpoint" / name).ok
    shutil.rmtree(tmp_path / "checkpoint" / "step-4")
    again = results(2, by_default, tmp_path, async_mode=mode)[0]
    assert_same(again, (3, runs[1]["stock-2"]))


def by_default(rank, ranks, *args, **options):
    import ringstow.dcp

    with ringstow.dcp.use_by_default():
        return processes.fit(rank, ranks, *args, manager="stock", **options)


def test_the_manager_resumes_what_use_by_default_saved(runs, tmp_path):
    results(2, by_default, tmp_path, steps=2)
    assert_same(fit(2, tmp_path), (2, runs[1]["ringstow-2"]))


@pytest.mark.parametrize("way", ["use_by_default", "convert"])
def test_torchtitans_own_manager_resumes_the_managers_steps(way, runs, tmp_path):
    copied(runs, "ringstow-2", tmp_path)
    run = by_default
    if way == "convert":
        run = stock
        for step in (1, 2):
            path = tmp_path / "checkpoint" / f"step-{step}"
            ringstow.convert.ringstow_to_dcp(path, tmp_path / "new")
            shutil.rmtree(path)
            (tmp_path / "new").rename(path)
    assert_same(results(2, run, tmp_path)[0], (2, runs[1]["stock-2"]))


def stock(*args, **options):
    return processes.fit(*args, manager="stock", **options)


# Which step is loaded.


def test_load_step_loads_that_step_and_names_the_others_if_it_is_not_there(runs, tmp_path):
    copied(runs, "ringstow-1", tmp_path, until=3)
    (tmp_path / "checkpoint" / "step-7").mkdir()  # a killed save's
    for step in (7, 5):
        results(1, refused, tmp_path, "complete steps: 1, 2, 3", load_step=step)
    assert_same(fit(1, tmp_path, load_step=1), (1, runs[1]["ringstow-1"]))


def refused(rank, ranks, root, text, **options):
    """Train; every rank must fail with an Exception that has this text, or a note."""
    with pytest.raises(Exception, match=text):
        processes.fit(rank, ranks, root, **options)


def test_names_that_only_contain_a_steps_name_are_no_steps(runs, tmp_path):
    copied(runs, "ringstow-1", tmp_path, until=2)
    folder = tmp_path / "checkpoint"
    (folder / "step-2").rename(folder / "kept-step-9")
    assert fit(1, tmp_path)[0] == 1
    assert "kept-step-9" in steps(tmp_path)


def test_a_damaged_step_is_refused_on_all_ranks_and_no_older_one_is_loaded(runs, tmp_path):
    copied(runs, "ringstow-2", tmp_path)
    flip(tmp_path / "checkpoint" / "step-2" / "rank00001-0.safetensors", -100_000)
    results(2, refused, tmp_path, "rank00001-0.safetensors")


# The last step, initial checkpoints, the seed.


def test_the_last_step_holds_the_model_in_the_export_dtype_and_starts_new_runs(runs, tmp_path):
    last = {"last_save_model_only": True, "export_dtype": "bfloat16"}
    copied(runs, "ringstow-1", tmp_path, until=3)
    fit(1, tmp_path, **last)
    path = tmp_path / "checkpoint" / "step-4"
    model = runs[1]["ringstow-1"]["model"]
    assert_same(by_name(ringstow.load(path)), by_name({k: v.bfloat16() for k, v in model.items()}))
    results(1, refused, tmp_path, "initial_load_path", steps=5)
    begun, learned = fit(1, tmp_path / "other", initial_load_path=str(path), steps=0)
    assert begun == 0
    assert_same(learned["model"], {name: one.bfloat16().float() for name, one in model.items()})
    assert fit(1, tmp_path, load_step=3)[0] == 3


def test_hugging_faces_export_is_torchtitans_own_and_starts_new_runs(runs, tmp_path):
    files = {}
    for manager in ("ringstow", "stock"):
        root = copied(runs, f"{manager}-2", tmp_path / manager, until=3)
        last = {"last_save_model_only": True, "last_save_in_hf": True, "manager": manager}
        fit(2, root, **last)
        assert steps(root) == ALL
        path = root / "checkpoint" / "step-4"
        found = [one for one in path.rglob("*") if one.is_file()]
        # Torch writes the headers of the shards that it merges in any order.
        files[manager] = {
            str(one.relative_to(path)): one.parent == path and one.read_bytes() for one in found
        }
    assert files["ringstow"] == files["stock"]
    assert {"model.safetensors.index.json", "model-00001-of-00001.safetensors"} < {*files["stock"]}
    root = tmp_path / "ringstow"
    results(2, refused, root, "load_step", steps=5)
    results(2, refused, root, "step-4 was not saved", steps=5, load_step=3)
    path = str(root / "checkpoint" / "step-4")
    new = {"initial_load_path": path, "initial_load_in_hf": True, "steps": 0}
    learned = fit(1, tmp_path / "other", **new)[1]
    assert_same(learned["model"], runs[1]["ringstow-2"]["model"])


def test_a_seed_checkpoint_is_loaded_as_the_model_of_a_new_run(tmp_path):
    results(1, seeding, tmp_path)
    assert steps(tmp_path) == ["step-0"]
    seed = by_name(ringstow.load(tmp_path / "checkpoint" / "step-0"))
    begun, learned = fit(2, tmp_path, steps=0)
    assert begun == 0
    assert_same(by_name(learned["model"]), seed)


def seeding(rank, ranks, root):
    import torchtitan_runs

    seed = torchtitan_runs.settings(create_seed_checkpoint=True, last_save_model_only=True)
    run = torchtitan_runs.trainer(root, seed)
    with torch.no_grad():
        for one in run.model_parts[0].parameters():
            one.add_(1)
    run.checkpointer.save(curr_step=0, last_step=True)
    run.close()


def test_settings_that_say_when_to_save_are_honoured(tmp_path):
    fit(1, tmp_path / "first", interval=3, enable_first_step_checkpoint=True)
    assert steps(tmp_path / "first") == ["step-1", "step-3", "step-4"]
    fit(1, tmp_path / "none", load_only=True)
    assert not (tmp_path / "none" / "checkpoint").exists()
    fit(1, tmp_path / "off", enable=False)
    assert not (tmp_path / "off" / "checkpoint").exists()


# Removal.


def test_keep_latest_k_keeps_what_torchtitans_manager_keeps(tmp_path):
    for manager in ("ringstow", "stock"):
        fit(1, tmp_path / manager, manager=manager, keep_latest_k=2, steps=5)
    assert steps(tmp_path / "ringstow") == steps(tmp_path / "stock")
    assert steps(tmp_path / "ringstow") == ["step-3", "step-4", "step-5"]  # none goes at the last


def test_steps_are_removed_only_once_the_newer_one_has_committed(tmp_path):
    results(2, failing, tmp_path, 3, 1, keep_latest_k=2)
    assert steps(tmp_path)[:2] == ["step-1", "step-2"]
    fit(2, tmp_path, keep_latest_k=2)
    assert steps(tmp_path) == ["step-2", "step-3", "step-4"]


def failing(rank, ranks, root, at_step, victim, **options):
    """Train; at a step the disk of one rank is full. All ranks must raise it at the next save."""
    import torchtitan_runs

    run = torchtitan_runs.trainer(root, torchtitan_runs.settings(**options), steps=6)
    save = run.checkpointer.save
    called = []

    def saving(step, last_step=False):
        if step == at_step and rank == victim:
            run.checkpointer.maybe_wait_for_saving()
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, resource.RLIM_INFINITY))
        called.append(step)
        return save(step, last_step)

    run.checkpointer.save = saving
    is_sync = options.get("async_mode") == "disabled"
    text = "File too large" if rank == victim else f"rank {victim} failed: OSError"
    with pytest.raises(Exception, match=text) as caught:
        run.train()
    assert f"{root}/checkpoint/step-{at_step} was not saved." in caught.value.__notes__
    assert called[-1] == (at_step if is_sync else at_step + 1)
    run.close()


@pytest.mark.parametrize(("mode", "victim"), [("async", 0), ("async", 1), ("disabled", 1)])
def test_a_full_disk_of_one_rank_fails_all_and_the_run_resumes(mode, victim, runs, tmp_path):
    results(2, failing, tmp_path, 3, victim, async_mode=mode)
    complete = sorted(path.parent.name for path in tmp_path.glob("checkpoint/*/manifest.json"))
    assert complete == ["step-1", "step-2"]
    assert_same(fit(2, tmp_path), (2, runs[1]["ringstow-2"]))
