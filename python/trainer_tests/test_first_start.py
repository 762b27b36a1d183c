"""The first start after the switch: what a stock framework left is read, and the next save is ours.

Each checkpoint here is made by the framework itself. How a run ends that begins so is in the tests
of each framework.
"""

from __future__ import annotations

import os

import accelerate_runs
import children
import lightning_runs
import lightning_shards
import pytest
import torch
import transformers
import transformers_runs
from lightning_runs import RingstowCheckpointIO
from support import assert_same

import ringstow


def test_lightning_resumes_from_latest_and_saves_by_ringstow(tmp_path):
    unbroken = lightning_runs.fit(tmp_path / "a", epochs=4)
    root = tmp_path / "b"
    lightning_runs.fit(root, epochs=2)
    (left,) = os.listdir(root)
    assert os.path.isfile(root / left)
    path = ringstow.latest(root).path
    assert path == str(root / left)
    run = lightning_runs.fit(root, RingstowCheckpointIO(), epochs=4, ckpt_path=path)
    assert_same(lightning_runs.state(run), lightning_runs.state(unbroken))
    newest = ringstow.latest(root)
    assert os.path.isdir(newest)
    assert ringstow.verify(newest).ok
    assert os.path.isfile(path)  # Lightning never removes what a run was resumed from


def test_lightnings_file_loads_as_lightning_loads_it(tmp_path):
    lightning_runs.fit(tmp_path, epochs=1)
    (name,) = os.listdir(tmp_path)
    expected = torch.load(tmp_path / name, weights_only=False)
    loaded = ringstow.load(tmp_path / name)
    assert_same(loaded["state_dict"], expected["state_dict"])
    assert_same(loaded["optimizer_states"], expected["optimizer_states"])
    assert_same(loaded["hyper_parameters"], dict(expected["hyper_parameters"]))
    assert loaded["global_step"] == lightning_runs.BATCHES


@pytest.mark.parametrize("kind", ["stock-mp", "stock-fsdp"])
def test_lightnings_shards_load_whole_with_what_is_beside_them(kind, tmp_path):
    (_, learned), _ = children.results(2, lightning_shards.fit, kind, tmp_path)
    path = ringstow.latest(tmp_path).path
    state = ringstow.load(path)
    assert path == str(tmp_path / os.path.basename(path))
    assert state["lightning"][0]["global_step"] == lightning_shards.STEPS
    expected = learned["model"]
    weights = state["model" if kind == "stock-fsdp" else "state_dict"]
    assert_same({name: weights[name] for name in expected}, dict(expected))
    assert state["optimizer_0"]["state"]
    with ringstow.open(path) as opened:
        assert opened.info.kind == "lightning"


def test_the_trainers_folder_loads_as_its_parts(tmp_path):
    run = transformers_runs.fit(tmp_path, kind=transformers.Trainer)
    path = ringstow.latest(tmp_path).path
    assert path == str(tmp_path / f"checkpoint-{transformers_runs.STEPS}")
    state = ringstow.load(path)
    assert {"model", "optimizer", "scheduler", "rng_state", "trainer_state"} <= {*state}
    assert "training_args" not in state
    assert state["trainer_state"]["global_step"] == transformers_runs.STEPS
    weights = run.model.state_dict()
    for name, tensor in state["model"].items():
        assert torch.equal(tensor, weights[name]), name
    expected = torch.load(os.path.join(path, "optimizer.pt"), weights_only=True)
    assert_same(state["optimizer"], expected)
    assert type(ringstow.load(path, allow_pickle=True)["training_args"]).__name__


def test_accelerates_folder_loads_as_its_parts(tmp_path):
    training = accelerate_runs.fit_stock(tmp_path, steps=2 * accelerate_runs.EVERY)
    path = ringstow.latest(tmp_path / "checkpoints").path
    assert path == accelerate_runs.at(tmp_path, 1)
    state = ringstow.load(path)
    assert {"model", "optimizer", "scheduler", "random_states_0"} <= {*state}
    weights = training.accelerator.unwrap_model(training.model).state_dict()
    for name, tensor in state["model"].items():
        assert torch.equal(tensor, weights[name]), name
    expected = torch.load(os.path.join(path, "optimizer.bin"), weights_only=True)
    assert_same(state["optimizer"], expected)
