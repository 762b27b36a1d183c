"""Loads of a checkpoint that another save replaces after it was opened."""

import numpy as np
import pytest
from support import assert_same

import ringstow
from ringstow import _native
from ringstow._core import _waiting


def state(step):
    # A strided tensor, which needs a copy, and a dense one, which is read in place.
    strided = np.full((64, 96), step, dtype=np.float32)[:, ::2]
    return {"step": step, "w": np.full(20_000, step, dtype=np.float32), "s": strided}


class Saver:
    """Saves over a path as soon as a load opens the checkpoint, the given number of times."""

    def __init__(self, path):
        self.path, self.step, self.times = path, 0, 1
        self.open = _native.Checkpoint
        ringstow.save(state(0), path)

    def __call__(self, *args, **kwargs):
        checkpoint = self.open(*args, **kwargs)
        if self.times > 0:
            self.times -= 1
            self.step += 1
            ringstow.save(state(self.step), self.path)
        return checkpoint


@pytest.fixture
def saver(tmp_path, monkeypatch):
    saver = Saver(tmp_path / "last")
    monkeypatch.setattr(_native, "Checkpoint", saver)
    return saver


@pytest.mark.parametrize("verify", [True, False])
def test_load_returns_the_newer_checkpoint(saver, verify):
    assert_same(ringstow.load(saver.path, verify=verify), state(1))


@pytest.mark.parametrize("part", [{"prefix": "w"}, {"keys": iter(["w"])}])
def test_partial_load_returns_the_newer_checkpoint(saver, part):
    saver.times = 2
    loaded = ringstow.load(saver.path, **part)
    assert list(loaded) == ["w"]
    assert (loaded["w"] == 2).all()


def test_load_into_returns_the_newer_checkpoint(saver):
    filled = state(-1)
    report = ringstow.load_into(filled, saver.path)
    assert report.path == str(saver.path)
    assert_same(filled, state(1))


def test_load_gives_up_after_repeated_replacement(saver, monkeypatch):
    monkeypatch.setattr(_waiting, "_LIMIT_S", 0.5)
    saver.times = 1_000_000
    filled = state(-1)
    with pytest.raises(ringstow.ReplacedCheckpointError, match="open it again") as raised:
        ringstow.load_into(filled, saver.path)
    assert raised.value.path == str(saver.path)
    assert saver.times > 0
    assert_same(filled, state(-1))
