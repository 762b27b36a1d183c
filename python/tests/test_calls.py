"""The error of a common wrong call names the right one."""

import inspect

import pytest
import torch

import ringstow


@pytest.mark.parametrize(
    ("word", "right"),
    [
        ("map_location", "device="),
        ("weights_only", "allow_pickle=True"),
        ("strict", "load_into"),
        ("divice", "device"),
    ],
)
def test_torch_load_arguments_get_a_hint(tmp_path, word, right):
    with pytest.raises(TypeError, match=f"ringstow.load has no argument '{word}': .*{right}"):
        ringstow.load(tmp_path, **{word: True})


@pytest.mark.parametrize("word", ["map_location", "assign", "mmap"])
def test_load_into_rejects_load_arguments_by_name(tmp_path, word):
    with pytest.raises(TypeError, match=f"ringstow.load_into has no argument '{word}'"):
        ringstow.load_into({}, tmp_path, **{word: True})


@pytest.mark.parametrize("save", [ringstow.save, ringstow.save_async])
def test_positional_config_error_shows_the_right_call(save, tmp_path):
    with pytest.raises(TypeError, match=r"config=Config\(...\)"):
        save({"step": 1}, tmp_path / "c", ringstow.Config())
    assert not (tmp_path / "c").exists()


def test_positional_and_listed_prefixes_of_load_are_explained(tmp_path):
    with pytest.raises(TypeError, match="device='cuda:1'"):
        ringstow.load(tmp_path, torch.device("cuda:1"))
    with pytest.raises(TypeError, match="prefix='model.'"):
        ringstow.load(tmp_path, "model.")
    with pytest.raises(TypeError, match="for several names give keys="):
        ringstow.load(tmp_path, prefix=["model", "optimizer"])


@pytest.mark.parametrize("call", [ringstow.save, ringstow.save_async, ringstow.load_into])
def test_swapped_arguments_error_shows_the_right_order(call, tmp_path):
    with pytest.raises(TypeError, match=rf"ringstow.{call.__name__}\(state_dict, path\)"):
        call(tmp_path / "c", {"step": 1})
    assert not (tmp_path / "c").exists()


def test_first_parameters_are_unchanged():
    assert list(inspect.signature(ringstow.load).parameters)[:2] == ["path", "prefix"]
    assert list(inspect.signature(ringstow.save).parameters)[:2] == ["state_dict", "path"]


@pytest.mark.parametrize("keep", ["2", 1.5, True, None])
def test_keep_must_be_a_number(tmp_path, keep):
    with pytest.raises(TypeError, match="keep must be a number of steps"):
        ringstow.retain(tmp_path, keep)
