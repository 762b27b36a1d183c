"""A part of a checkpoint that was saved apart can be dropped, and the rest loads as before."""

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import ringstow


def state_of(step=1):
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}


def size(path):
    return sum(file.stat().st_size for file in path.iterdir())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "step-1"


def slimmed(path):
    """Save with the optimizer apart, and drop it; return what was saved."""
    state = state_of()
    ringstow.save(state, path, droppable=["optimizer"])
    ringstow.slim(path, drop=["optimizer"])
    return state


def test_optimizer_is_dropped_its_space_is_free_and_the_model_loads(tmp_path, path):
    state = state_of()
    ringstow.save(state, path, step=1, droppable=["optimizer"])
    before = size(path)
    done = ringstow.slim(path, drop=["optimizer"])
    assert done.names == ("optimizer",)
    assert done.tensors == 6  # two moments and a counter for each of two parameters
    assert done.left == ()
    assert size(path) < before - done.file_bytes + 4096
    loaded = ringstow.load(path)
    assert list(loaded) == ["model", "step"]
    assert all(torch.equal(loaded["model"][name], state["model"][name]) for name in state["model"])
    assert ringstow.open(path).info.dropped == ("optimizer",)
    assert ringstow.latest(tmp_path).path == str(path)
    assert [step.dropped for step in ringstow.steps(tmp_path)] == [("optimizer",)]
    assert ringstow.verify(path).ok
    assert ringstow.slim(path, drop=["optimizer"]).names == ()


def test_load_into_a_whole_state_says_that_the_part_was_dropped(path):
    state = slimmed(path)
    with pytest.raises(ringstow.KeyMismatchError, match="`slim` has dropped optimizer"):
        ringstow.load_into(state, path)
    assert ringstow.load_into(state, path, strict=False).missing


@pytest.mark.parametrize("prefix", ["optimizer", "optimizer.", "optimizer.state"])
def test_loads_of_parts_say_that_the_part_was_dropped(path, prefix):
    slimmed(path)
    said = "`slim` has dropped optimizer"
    with pytest.raises(ringstow.KeyMismatchError, match=said):
        ringstow.load(path, prefix=prefix)
    with pytest.raises(ringstow.KeyMismatchError, match=said):
        ringstow.load(path, keys=[prefix])
    with ringstow.open(path) as opened, pytest.raises(ringstow.KeyMismatchError, match=said):
        opened[prefix]
    with pytest.raises(ringstow.KeyMismatchError) as never:
        ringstow.load(path, prefix="optimizers")
    assert said not in str(never.value)


def test_background_save_sets_parts_apart_too(path):
    ringstow.save_async(state_of(), path, droppable=["optimizer.state"]).result()
    assert ringstow.slim(path, drop=["optimizer.state"]).tensors == 6
    assert list(ringstow.load(path)["optimizer"]) == ["param_groups"]


def test_optimizer_without_tensors_is_set_apart_and_dropped(path):
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters()).state_dict()
    ringstow.save({"w": np.ones(3), "optimizer": optimizer}, path, droppable=["optimizer"])
    assert ringstow.slim(path, drop=["optimizer"]).tensors == 0
    assert list(ringstow.load(path)) == ["w"]


def test_part_that_was_not_saved_apart_stays(path):
    state = state_of()
    ringstow.save(state, path)
    with pytest.raises(ringstow.InvalidStateError, match="name it in `droppable` of the save"):
        ringstow.slim(path, drop=["optimizer"])
    assert list(ringstow.load(path)) == list(state)


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        ("optimizer", TypeError, "list of names"),
        ([1], TypeError, "not of int"),
        (["optimizer."], ringstow.InvalidStateError, "is no name"),
        (["optimiser"], ringstow.InvalidStateError, "nothing named 'optimiser'"),
    ],
)
def test_wrong_names_are_refused_before_anything_is_written(path, names, error, message):
    with pytest.raises(error, match=message):
        ringstow.save(state_of(), path, droppable=names)
    assert not path.exists()


def test_checkpoint_that_pytorch_saved_over_is_not_slimmed(path):
    ringstow.save(state_of(), path, droppable=["optimizer"])
    dcp.save({"w": torch.ones(3)}, checkpoint_id=path, no_dist=True)
    with pytest.raises(ringstow.Error, match="PyTorch"):
        ringstow.slim(path, drop=["optimizer"])
    with pytest.raises(ringstow.Error, match="PyTorch"):
        ringstow.load(path)


def test_part_that_could_not_be_dropped_later_is_not_set_apart(path):
    for name, state in {"True": {True: {"w": 1}, "m": 1}, "a.0": {"a": [torch.ones(2)]}}.items():
        with pytest.raises(ringstow.InvalidStateError, match="nothing named"):
            ringstow.save(state, path, droppable=[name])


def test_tensors_that_the_model_shares_with_the_part_keep_none_of_its_files(path):
    weight, moment = torch.ones(5000), torch.full((50_000,), 2.0)
    # the optimizer comes first, so the weight has its name
    state = {"optimizer": {"params": {"w": weight}, "m": moment}, "model": {"w": weight}}
    ringstow.save(state, path, droppable=["optimizer"])
    done = ringstow.slim(path, drop=["optimizer"])
    assert done.tensors == 1
    assert done.file_bytes > moment.nbytes
    assert size(path) < weight.nbytes + 2 * 4096
    loaded = ringstow.load(path)
    assert list(loaded) == ["model"]
    assert torch.equal(loaded["model"]["w"], weight)
