"""Trainings by DeepSpeed save by ringstow, and resume as if nothing had happened."""

from __future__ import annotations

import functools
import os

import pytest

pytest.importorskip("deepspeed")

import children
import deepspeed_runs as runs
import torch
from children import on_ranks
from deepspeed_runs import EVERY, STEPS
from support import assert_same

import ringstow

TAGS = [f"global_step{n}" for n in range(EVERY, STEPS + 1, EVERY)]
KINDS = {
    "stage 0": {"stage": 0, "precision": "fp32"},
    "stage 1": {"stage": 1, "precision": "bf16"},
    "stage 2": {"stage": 2, "precision": "fp32"},
    "stage 3": {"stage": 3, "precision": "bf16"},
}
CASES = [("stage 0", 2), ("stage 1", 1), ("stage 1", 2), ("stage 2", 2), ("stage 3", 2)]


def fit(kind, ranks, folder, **options):
    return children.results(ranks, runs.fit, {**KINDS[kind], **options}, folder)


def latest(folder):
    return (folder / "latest").read_text()


def point(folder, tag, copy):
    """Make a directory whose `latest` names a tag of another one."""
    copy.mkdir()
    (copy / tag).symlink_to(folder / tag)
    (copy / "latest").write_text(tag)
    return copy


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return folder and end of a run, by kind, number of ranks and whether it is stock."""

    @functools.cache
    def train(kind, ranks, stock=False):
        folder = tmp_path_factory.mktemp("trained")
        return folder, fit(kind, ranks, folder, stock=stock)

    return train


@pytest.mark.parametrize(("kind", "ranks"), CASES)
def test_a_run_ends_as_with_the_stock_engine_and_keeps_the_same_tags(kind, ranks, trained):
    ours, end = trained(kind, ranks)
    stock, expected = trained(kind, ranks, stock=True)
    assert_same(end, expected)
    assert sorted(os.listdir(ours)) == sorted(os.listdir(stock))
    assert latest(ours) == latest(stock) == TAGS[-1]
    for tag in TAGS:
        assert sorted(os.listdir(ours / tag)) == sorted(os.listdir(stock / tag))
        for one in (ours / tag).iterdir():
            assert ringstow.verify(one).ok


@pytest.mark.parametrize("of_stock", [False, True], ids=["ours", "stock"])
@pytest.mark.parametrize(("kind", "ranks"), CASES)
def test_a_run_resumes_to_the_bit(kind, ranks, of_stock, trained, tmp_path):
    folder, _ = trained(kind, ranks, stock=of_stock)
    _, expected = trained(kind, ranks)
    copy = point(folder, TAGS[0], tmp_path / "run")
    end = fit(kind, ranks, copy)
    assert_same(end, [(EVERY, learned) for _, learned in expected])


def test_no_pickle_is_in_a_checkpoint(trained):
    folder, _ = trained("stage 1", 2)
    for one in folder.glob("*/*_states.pt"):
        state = ringstow.load(one)  # refuses pickles
        assert "ds_version" in state
    assert latest(folder) == TAGS[-1]


def test_a_run_with_each_staging_and_in_the_foreground_ends_the_same(trained, tmp_path):
    _, expected = trained("stage 1", 1)
    for number, more in enumerate(
        ({"staging": "wait"}, {"staging": "snapshot", "background": False})
    ):
        end = fit("stage 1", 1, tmp_path / f"{number}", **more)
        assert_same(end, expected)
        assert latest(tmp_path / f"{number}") == TAGS[-1]


@on_ranks(2)
def test_a_tag_that_is_saved_again_keeps_the_users_files_and_no_stale_ones(rank, tmp_path):
    made = runs.engine()
    step_and_save(made, tmp_path)
    tag = tmp_path / "last"
    if rank == 0:
        (tag / "tokenizer").mkdir()
        (tag / "tokenizer" / "vocab.json").write_text("{}")
        (tag / "zero_pp_rank_7_mp_rank_00_optim_states.pt").write_text("of eight ranks")
        (tmp_path / "old").mkdir()
    torch.distributed.barrier()
    before = sorted(os.listdir(tag))
    step_and_save(made, tmp_path)
    before.remove("zero_pp_rank_7_mp_rank_00_optim_states.pt")
    assert sorted(os.listdir(tag)) == before
    assert (tag / "tokenizer" / "vocab.json").read_text() == "{}"
    assert (tmp_path / "old").is_dir()
    state = ringstow.load(tag / "mp_rank_00_model_states.pt")
    assert state["global_steps"] == made.global_steps == 2


def step_and_save(made, folder):
    runs.step(made)
    runs.save(made, folder, "last")
    made.checkpoint_engine.wait()
    torch.distributed.barrier()


def test_save_latest_false_leaves_latest_alone_and_16_bit_models_are_torch_files(tmp_path):
    children.results(1, save_others, tmp_path)
    assert sorted(os.listdir(tmp_path / "run")) == ["aside", "zero_to_fp32.py", "zero_to_torch.py"]
    assert sorted(os.listdir(tmp_path / "model")) == ["pytorch_model.bin"]
    weights = torch.load(tmp_path / "model" / "pytorch_model.bin")
    assert weights["0.weight"].shape == (runs.WIDTH, runs.WIDTH)


def save_others(rank, ranks, folder):
    made = runs.engine()
    runs.step(made)
    made.save_checkpoint(str(folder / "run"), tag="aside", save_latest=False)
    made.save_16bit_model(str(folder / "model"))
    made.destroy()


@on_ranks(1)
def test_a_background_save_has_the_values_of_the_call(tmp_path):
    made = runs.engine()
    runs.step(made)
    weights = {name: one.clone() for name, one in made.module_state_dict().items()}
    runs.save(made, tmp_path)
    for _ in range(3):
        runs.step(made)
    made.checkpoint_engine.wait()
    saved = ringstow.load(tmp_path / "global_step1" / "mp_rank_00_model_states.pt")["module"]
    assert_same(dict(saved), weights)
    assert not torch.equal(made.module_state_dict()["0.weight"], weights["0.weight"])


@on_ranks(1)
def test_two_engines_save_into_one_directory_at_the_same_time(tmp_path):
    actor, critic = runs.engine(), runs.engine(stage=2)
    for made in (actor, critic):
        runs.step(made)
    (tmp_path / ".ringstow-left").mkdir()
    for number in range(3):
        actor.save_checkpoint(str(tmp_path), tag=f"actor{number}")
        critic.save_checkpoint(str(tmp_path), tag=f"critic{number}")
    actor.destroy()
    critic.destroy()
    names = [f"{who}{number}" for who in ("actor", "critic") for number in range(3)]
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == names


def test_a_dict_in_itself_is_left_to_the_save_which_names_it(tmp_path):
    from ringstow.integrations._deepspeed import _states

    one = {}
    one["me"] = one
    with pytest.raises(ringstow.InvalidStateError, match="contains itself"):
        ringstow.save(_states.packed({"client": one}), tmp_path / "one")
