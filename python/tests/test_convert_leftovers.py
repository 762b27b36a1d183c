"""What a conversion had removed, and a loss of power brings back: it harms nothing, and goes."""

import os
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from converted import mild_load, read_hf

import ringstow
from ringstow.convert import convert


def source(at, number):
    """Return a checkpoint that can be converted to any kind."""
    ringstow.save({"a": torch.full((1000,), number)}, at / f"source-{number}")
    return at / f"source-{number}"


def number_in(path, kind):
    if kind == "dcp":
        state = {"a": torch.zeros(1000)}
        dcp.load(state, checkpoint_id=path, no_dist=True)
    else:
        state = (mild_load if kind == "torch" else read_hf)(path)
    return state["a"].unique().tolist()


@pytest.mark.parametrize("kind", ["dcp", "hf", "torch"])
@pytest.mark.parametrize("is_whole", [True, False])
def test_leftover_that_comes_back_harms_nothing_and_goes(at, kind, is_whole):
    to = at / "to.pt"
    convert(source(at, 1.0), to, target=kind)
    lost = at / ("to.pt.part" if kind == "torch" else "to.pt.convert.part")
    old = at / "kept"
    (shutil.copy if kind == "torch" else shutil.copytree)(to, old)
    convert(source(at, 2.0), to, target=kind, overwrite=True)
    assert not lost.exists()

    old.rename(lost)
    if not is_whole:
        first = lost if kind == "torch" else lost / sorted(os.listdir(lost))[0]
        first.unlink() if first is not lost else os.truncate(lost, 10)
    before = sorted(os.listdir(at))
    assert number_in(to, kind) == [2.0]
    swept = ringstow.prune(at)
    assert not swept.removed
    assert not swept.left
    with pytest.raises(FileExistsError):  # it is the target that is in the way
        convert(at / "source-1.0", to, target=kind)
    assert sorted(os.listdir(at)) == before
    convert(at / "source-1.0", to, target=kind, overwrite=True)
    assert number_in(to, kind) == [1.0]
    assert sorted(os.listdir(at)) == sorted({*before} - {lost.name})
