"""A Trainer with FSDP2 saves by shards, and resumes on any number of ranks."""

import os
import shutil
import signal

import children
import pytest
import torch
import transformers_sharded as sharded
from all_trainers import assert_slims
from children import results
from support import assert_same
from transformers import AutoModelForCausalLM
from transformers.trainer_utils import get_last_checkpoint
from transformers_runs import EVERY, STEPS, checkpoints, model

import ringstow
from ringstow.convert import ringstow_to_hf
from ringstow.integrations.transformers import from_pretrained

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the directory of a run of two ranks, and its end on each rank."""
    root = tmp_path_factory.mktemp("sharded")
    return root / "ours", results(2, sharded.stock_and_ours, str(root))


def test_runs_end_and_resume_as_the_stock_trainers(run):
    root, ends = run
    assert ends[0]["step"] == STEPS
    names = [f"checkpoint-{step}" for step in range(EVERY, STEPS + 1, EVERY)]
    assert checkpoints(root) == names
    for name in names:
        assert ringstow.verify(root / name).ok
        files = set(os.listdir(root / name))
        assert {"rank00000-0.safetensors", "rank00001-0.safetensors"} <= files
        assert {"rng_state_0.pth", "rng_state_1.pth", "config.json", "trainer_state.json"} <= files
        assert not {"model.safetensors.index.json", "model.safetensors", "optimizer.pt"} & files


def test_one_process_loads_the_whole_model(run):
    root, ends = run
    loaded = ringstow.load(root / f"checkpoint-{STEPS}", prefix="__model__")["__model__"]
    assert_same(dict(loaded), dict(ends[0]["model"]))


def test_slim_drops_the_optimizer_of_all_ranks(run, tmp_path):
    assert_slims(run[0] / f"checkpoint-{STEPS}", tmp_path / f"checkpoint-{STEPS}", "__trainer__")
    ends = results(2, sharded.resumed_at_the_end, str(tmp_path))
    for found, end in zip(ends, run[1], strict=True):
        assert_same(found["model"], end["model"])


def test_convert_makes_a_directory_that_from_pretrained_opens(run, tmp_path):
    root, ends = run
    path = root / f"checkpoint-{STEPS}"
    ringstow_to_hf(path, tmp_path / "model", prefix="__model__.")
    shutil.copy(path / "config.json", tmp_path / "model")
    loaded = type(model()).from_pretrained(tmp_path / "model")
    assert_same(dict(loaded.state_dict()), dict(ends[0]["model"]))


def test_from_pretrained_makes_the_whole_model_of_the_shards(run):
    root, ends = run
    path = root / f"checkpoint-{STEPS}"
    made = from_pretrained(AutoModelForCausalLM, path)
    assert_same(dict(made.state_dict()), dict(ends[0]["model"]))
    assert from_pretrained(type(model()), path, dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_resumes(run, ranks):
    root, ends = run
    for found in results(ranks, sharded.resumed_at_the_end, str(root)):
        for key in ("model", "optimizer", "scheduler", "step"):
            assert_same(found[key], ends[0][key])


def test_a_trainer_without_fsdp_says_what_it_does_not_resume(run):
    results(1, sharded.stock_loads, str(run[0]))


def test_training_goes_on_while_the_ranks_save(run, tmp_path):
    assert_same(results(2, sharded.in_the_background, str(tmp_path)), run[1])
    assert len(checkpoints(tmp_path)) == STEPS // EVERY


def test_the_best_model_is_loaded_at_the_end(tmp_path):
    ends = results(2, sharded.best_at_the_end, str(tmp_path))
    assert checkpoints(tmp_path) == [f"checkpoint-{EVERY}"]
    best = ringstow.load(tmp_path / f"checkpoint-{EVERY}", prefix="__model__")["__model__"]
    assert_same(dict(best), dict(ends[1]["model"]))


@pytest.mark.parametrize(
    ("moment", "number", "rank"),
    [("preparing", 3, 0), ("sharding", 3, 1), ("complete", 3, 0), ("named", 1, 0)],
)
def test_a_killed_run_resumes_to_the_bit(run, tmp_path, moment, number, rank):
    args = str(tmp_path), {"save_total_limit": 2}
    ranks = children.start_ranks(2, sharded.run, *args, moment, number, (), rank)
    ranks[rank].join(120)
    ranks[1 - rank].kill()  # as torchrun does
    assert children.ended(ranks)[rank] == -signal.SIGKILL
    newest = get_last_checkpoint(tmp_path)
    assert int(newest.rsplit("-", 1)[1]) == (3 if moment == "named" else 2) * EVERY
    assert ringstow.verify(newest).ok
    assert_same(results(2, sharded.run, *args), [{**end, "said": []} for end in run[1]])
    assert len(checkpoints(tmp_path)) == 2  # nothing hidden is left


def test_a_rank_without_a_state_ends_the_run_on_all(tmp_path):
    results(2, sharded.without_a_state, str(tmp_path))
    assert checkpoints(tmp_path) == []


def test_a_rank_that_cannot_write_ends_the_run_on_all(run, tmp_path):
    results(2, sharded.filling_the_disk, str(tmp_path))
    assert [one for one in checkpoints(tmp_path) if one[0] != "."] == [f"checkpoint-{EVERY}"]
    ends = results(2, sharded.run, str(tmp_path), {})
    assert_same(ends, [{**end, "said": []} for end in run[1]])


def test_what_does_not_go_with_shards_is_refused(tmp_path):
    (said,) = results(1, sharded.refused, str(tmp_path))
    assert "FSDP and save_on_each_node=True: all ranks write to one directory" in said
    assert "FSDP and PEFT together: use Trainer" in said
