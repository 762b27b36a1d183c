"""`from_pretrained` makes a model of each checkpoint that holds one, without an export."""

from __future__ import annotations

import pathlib

import pytest
import torch
from support import assert_same, flip, shards_of
from transformers import AutoModelForCausalLM
from transformers_runs import qwen2_moe

import ringstow
from ringstow.integrations.transformers import from_pretrained

CONFIG = qwen2_moe()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG)


def objects(model, path):
    ringstow.save({"model": model, "optimizer": torch.optim.AdamW(model.parameters())}, path)


SAVES = {
    "objects": objects,
    "a flat state dict": lambda model, path: ringstow.save(model.state_dict(), path),
    "a directory of transformers": lambda model, path: model.save_pretrained(path),
    "a file of torch.save": lambda model, path: torch.save(
        {"state_dict": model.state_dict(), "epoch": 3}, path
    ),
}


@pytest.mark.parametrize("kind", SAVES)
def test_a_model_is_made_of_each_kind(kind, model, tmp_path):
    SAVES[kind](model, tmp_path / "c")
    made = from_pretrained(AutoModelForCausalLM, tmp_path / "c", config=CONFIG)
    assert_same(dict(made.state_dict()), dict(model.state_dict()))
    assert not made.training


def test_the_arguments_of_from_pretrained_are_taken(model, tmp_path):
    objects(model, tmp_path / "c")
    CONFIG.save_pretrained(tmp_path / "c")
    made, info = from_pretrained(
        type(model), tmp_path / "c", dtype=torch.bfloat16, output_loading_info=True
    )
    assert made.dtype == torch.bfloat16
    assert not info["missing_keys"]


def test_names_that_do_not_fit_are_an_error_and_not_a_new_model(model, tmp_path):
    """transformers itself warns, and returns a model of random values."""
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    ringstow.save({"ema": state, "step": 3}, tmp_path / "c")
    with pytest.raises(ringstow.InvalidStateError, match=r"has no config\.json: give config="):
        from_pretrained(AutoModelForCausalLM, tmp_path / "c", prefix="ema")
    with pytest.raises(ringstow.KeyMismatchError, match="has no weight of Qwen2MoeForCausalLM"):
        from_pretrained(AutoModelForCausalLM, tmp_path / "c", prefix="ema", config=CONFIG)
    made = from_pretrained(
        AutoModelForCausalLM, tmp_path / "c", prefix="ema", rename={"module": ""}, config=CONFIG
    )
    assert_same(dict(made.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("prefix", [None, "model"])
@pytest.mark.parametrize(
    ("path", "error", "said"),
    [
        ("run", ringstow.NoCheckpointError, "directory of checkpoints, such as .*step-00000001"),
        ("nowhere", FileNotFoundError, "no checkpoint was saved there"),
        ("run/step-00000001", ringstow.InvalidStateError, r"has no config\.json: give config="),
    ],
)
def test_the_error_of_a_path_says_what_is_there(prefix, path, error, said, tmp_path):
    with ringstow.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"model": {"w": torch.ones(2)}})
    with pytest.raises(error, match=said):
        from_pretrained(AutoModelForCausalLM, tmp_path / path, prefix=prefix)


def test_a_state_dict_is_refused_by_name(tmp_path):
    with pytest.raises(TypeError, match="state_dict= has no place here"):
        from_pretrained(AutoModelForCausalLM, tmp_path, state_dict={})


def test_the_snippet_of_the_page_runs(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    objects(model, "run/checkpoint-500")
    CONFIG.save_pretrained("run/checkpoint-500")
    page = pathlib.Path(__file__).parents[2] / "docs" / "servers.md"
    snippet = page.read_text().split("```python\n")[1].split("```")[0]
    names = {}
    exec(snippet, names)
    assert names["model"].dtype == torch.bfloat16


def test_a_flipped_bit_is_an_error(model, tmp_path):
    objects(model, tmp_path / "c")
    (shard,) = shards_of(tmp_path / "c")
    flip(shard, 5000)
    with pytest.raises(ringstow.CorruptCheckpointError):
        from_pretrained(AutoModelForCausalLM, tmp_path / "c", config=CONFIG)
