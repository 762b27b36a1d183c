"""Loads of ringstow's checkpoints and of torch.save's files."""

from __future__ import annotations

import pickle

import pytest
import torch
from held_save import LARGE
from lightning_runs import Model, RingstowCheckpointIO, fit, saved
from support import assert_same, flip, shards_of

import ringstow

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def tied():
    shared = torch.arange(6.0)
    return {"a": shared, "list": [shared.view(6)], "tuple": ({"b": torch.ones(2)}, "text")}


@pytest.mark.parametrize(
    "place",
    [
        None,
        "cpu",
        torch.device("cpu"),
        {"cuda:1": "cuda:0"},
        {"cpu": "cpu"},
        lambda storage, location: None,
        lambda storage, location: storage,
        lambda storage, location: storage.clone(),
        *(
            pytest.param(place, marks=ON_GPU)
            for place in (
                "cuda:0",
                torch.device("cuda"),
                {"cpu": "cuda:0"},
                lambda storage, location: storage.cuda(),
            )
        ),
    ],
)
def test_map_location_places_tensors_as_torch_load_does(place, tmp_path):
    state = tied()
    torch.save(state, tmp_path / "stock.ckpt")
    io = RingstowCheckpointIO()
    io.save_checkpoint(state, tmp_path / "ours.ckpt")
    ours, stock = (
        io.load_checkpoint(tmp_path / f"{name}.ckpt", place) for name in ("ours", "stock")
    )
    assert_same(ours, stock)
    assert ours["a"].device == stock["a"].device
    ours["a"][0] = 9
    assert ours["list"][0][0] == 9  # still one memory


def test_a_callable_map_location_sees_each_storage_once_on_the_cpu(tmp_path):
    io = RingstowCheckpointIO()
    io.save_checkpoint(tied(), tmp_path / "a.ckpt")
    seen = []
    io.load_checkpoint(tmp_path / "a.ckpt", lambda storage, place: seen.append(place))
    assert seen == ["cpu", "cpu"]
    with pytest.raises(TypeError, match="map_location"):
        io.load_checkpoint(tmp_path / "a.ckpt", 3)


def test_files_of_torch_load_as_by_lightnings_plugin(tmp_path):
    torch.save({"w": torch.ones(3), "f": max}, tmp_path / "a.ckpt")
    io = RingstowCheckpointIO()
    assert io.load_checkpoint(tmp_path / "a.ckpt", weights_only=False)["f"] is max
    with pytest.raises(pickle.UnpicklingError):
        io.load_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(FileNotFoundError, match="none.ckpt"):
        io.load_checkpoint(tmp_path / "none.ckpt")


def test_damage_and_missing_commits_are_errors(tmp_path):
    io = RingstowCheckpointIO()
    path = saved(tmp_path / "a.ckpt")
    flip(shards_of(path)[0], -1)
    with pytest.raises(ringstow.CorruptCheckpointError, match="state_dict.w"):
        io.load_checkpoint(path)
    (path / "manifest.json").unlink()
    with pytest.raises(ringstow.IncompleteCheckpointError):
        io.load_checkpoint(path)


def test_a_load_waits_for_the_save_in_flight(held, tmp_path):
    saved(tmp_path / "old-1.ckpt")
    io = RingstowCheckpointIO()
    io.save_checkpoint({"a": torch.ones(LARGE)}, tmp_path / "new-2.ckpt")
    assert torch.equal(io.load_checkpoint(tmp_path / "new-2.ckpt")["a"], torch.ones(LARGE))


def test_load_from_checkpoint_reads_a_conversion(tmp_path):
    import ringstow.convert

    run = fit(tmp_path, RingstowCheckpointIO(), epochs=1)
    path = run.checkpoint_callback.best_model_path
    ringstow.convert.convert(path, tmp_path / "stock.ckpt")
    back = Model.load_from_checkpoint(tmp_path / "stock.ckpt", weights_only=False)
    assert_same(back.state_dict(), run.lightning_module.state_dict())
