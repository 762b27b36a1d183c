"""What the integration with DeepSpeed relies on, refuses, and does outside of a training."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("deepspeed")

import children
import deepspeed_runs as runs
import torch
from all_trainers import run_page
from children import on_ranks
from deepspeed.runtime.checkpoint_engine import FastCheckpointEngine
from deepspeed_runs import EVERY
from support import assert_same
from test_deepspeed import TAGS, fit, latest

import ringstow
from ringstow.integrations import deepspeed as ours
from ringstow.integrations._deepspeed import _seam, _states


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in _seam.SEAM.calls.items() for name in names]
)
def test_a_method_that_differs_is_refused_by_its_name(kind, name, monkeypatch):
    monkeypatch.setattr(kind, name, lambda self, other_argument: None)
    with pytest.raises(ringstow.UnsupportedError, match=f"{name} is not {name}"):
        _seam.SEAM.check()


def test_all_abstract_methods_are_defined():
    assert not ours.RingstowCheckpointEngine.__abstractmethods__


def test_the_package_is_not_imported_before_it_is_used():
    code = "import sys, ringstow, ringstow.integrations; sys.exit('deepspeed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@on_ranks(1)
def test_what_cannot_be_saved_is_refused_before_the_training(tmp_path):
    with pytest.raises(TypeError, match=r"deepspeed\.initialize"):
        ours.use(torch.nn.Linear(1, 1))
    stock = runs.engine(stock=True)
    for more, kind, text in (
        ({"staging": "unguarded"}, ringstow.InvalidStateError, "guard"),
        ({"staging": "other"}, ringstow.InvalidStateError, "other"),
        ({"config": ringstow.Config(stripe=[str(tmp_path)])}, ringstow.InvalidStateError, "stripe"),
        ({"config": ringstow.Config(tiers=[str(tmp_path)])}, ringstow.InvalidStateError, "tiers"),
    ):
        with pytest.raises(kind, match=text):
            ours.use(stock, **more)
    made = ours.use(stock)
    assert made is stock
    with pytest.raises(ringstow.InvalidStateError, match="once"):
        ours.use(made)
    local = runs.engine(stock=True, more={"checkpoint": {"use_node_local_storage": True}})
    with pytest.raises(ringstow.UnsupportedError, match="use_node_local_storage"):
        ours.use(local)
    other = runs.engine(stock=True)
    other.checkpoint_engine = FastCheckpointEngine(other._config, None, False)
    with pytest.raises(ringstow.UnsupportedError, match="FastCheckpointEngine"):
        ours.use(other)
    for name in ("super_offload", "zero_nvme_offload_optimizer"):
        other = runs.engine(stock=True)
        setattr(other, name, lambda: True)
        with pytest.raises(ringstow.UnsupportedError):
            ours.use(other)
    runs.step(made)
    with pytest.raises(ValueError, match="save_dir"):
        made.save_checkpoint("")
    runs.save(made, tmp_path / "run")
    with pytest.raises(ringstow.NoCheckpointError, match="gone"):
        made.load_checkpoint(str(tmp_path / "run"), tag="gone")
    (tmp_path / "run" / "latest").write_text("lost")
    with pytest.raises(ringstow.NoCheckpointError, match="lost"):
        made.load_checkpoint(str(tmp_path / "run"))
    assert made.load_checkpoint(str(tmp_path)) == (None, None)
    file = tmp_path / "run" / "global_step1" / "mp_rank_00_model_states.pt"
    with pytest.raises(TypeError, match="device"):
        made.checkpoint_engine.load(str(file), map_location={"cpu": "cpu"})


def test_ranks_with_other_tags_all_fail_and_the_next_save_succeeds(tmp_path):
    children.results(2, other_tags, tmp_path)
    assert latest(tmp_path) == "both"


def other_tags(rank, ranks, folder):
    made = runs.engine()
    with pytest.raises(ringstow.InvalidStateError, match="tag"):
        made.save_checkpoint(str(folder), tag=f"of {rank}")
    made.save_checkpoint(str(folder), tag="both")
    made.destroy()


@on_ranks(2)
def test_damage_fails_the_load_on_all_ranks(rank, tmp_path):
    made = runs.engine()
    runs.step(made)
    runs.save(made, tmp_path)
    made.checkpoint_engine.wait()
    if rank == 0:
        one = tmp_path / "global_step1" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
        (shard,) = one.glob("*.safetensors")
        with open(shard, "r+b") as stream:
            stream.seek(shard.stat().st_size - 100)
            stream.write(b"damage")
    torch.distributed.barrier()
    kind = ringstow.CorruptCheckpointError if rank == 1 else ringstow.Error
    with pytest.raises(kind):
        made.load_checkpoint(str(tmp_path))


@on_ranks(1)
def test_weights_alone_of_stage_3_are_refused_with_the_remedy(tmp_path):
    made = runs.engine(stage=3)
    runs.step(made)
    runs.save(made, tmp_path)
    with pytest.raises(ringstow.UnsupportedError, match="stock files"):
        made.load_checkpoint(str(tmp_path), load_optimizer_states=False)


@pytest.mark.parametrize("kind", ["stage 1", "stage 3"])
def test_the_stock_engine_resumes_from_stock_files_of_a_tag(kind, tmp_path):
    expected = fit(kind, 2, tmp_path / "run")
    (tmp_path / "run" / TAGS[0] / "note.txt").write_text("the user's")
    ours.to_stock(tmp_path / "run" / TAGS[0], tmp_path / "stock" / TAGS[0])
    assert (tmp_path / "stock" / TAGS[0] / "note.txt").exists()
    (tmp_path / "stock" / "latest").write_text(TAGS[0])
    end = fit(kind, 2, tmp_path / "stock", stock=True)
    assert_same(end, [(EVERY, learned) for _, learned in expected])
    children.results(1, merge, tmp_path / "stock", TAGS[-1])
    with pytest.raises(FileExistsError):
        ours.to_stock(tmp_path / "run" / TAGS[0], tmp_path / "stock" / TAGS[0])
    with pytest.raises(ringstow.NoCheckpointError):
        ours.to_stock(tmp_path / "stock" / TAGS[0], tmp_path / "new")


def merge(rank, ranks, folder, tag):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    weights = get_fp32_state_dict_from_zero_checkpoint(str(folder), tag)
    assert weights["0.weight"].shape == (runs.WIDTH, runs.WIDTH)


def test_a_dynamic_loss_scaler_comes_back_without_a_pickle(tmp_path):
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    options = {"min_scale": 1.0, "delayed_shift": 2, "consecutive_hysteresis": False}
    scaler = DynamicLossScaler(2**10, scale_window=7, dtype=torch.half, **options)
    scaler.cur_iter, scaler.cur_scale = 3, 512.0
    state = {"optimizer_state_dict": {"loss_scaler": scaler, "n": 1}}
    ringstow.save(_states.packed(state), tmp_path / "one")
    again = _states.unpacked(ringstow.load(tmp_path / "one"))["optimizer_state_dict"]
    assert type(again["loss_scaler"]) is DynamicLossScaler
    assert vars(again["loss_scaler"]) == vars(scaler)
    assert state["optimizer_state_dict"]["loss_scaler"] is scaler


def test_the_snippets_of_the_page_run(tmp_path):
    children.results(1, page, tmp_path)
    assert latest(tmp_path / "run") == "global_step6"
    for tag in ("run/global_step6", "stock/global_step6"):
        assert (tmp_path / tag / "mp_rank_00_model_states.pt").is_file() == tag.startswith("stock")


def page(rank, ranks, folder):
    os.chdir(folder)
    runs.engine(stock=True)
    names = {
        "model": torch.nn.Linear(runs.WIDTH, runs.WIDTH),
        "config": runs.config(),
        "batch": lambda step: torch.ones(2, runs.WIDTH, dtype=torch.bfloat16),
    }
    run_page("large-scale.md", "DeepSpeed", **names)
