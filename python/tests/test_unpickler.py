"""Files of torch.save are read with an unpickler of ringstow's own: nothing else notices."""

import argparse
import pickle
import warnings

import numpy as np
import pytest
import torch

import ringstow
from ringstow._foreign import _numpy_pickles
from ringstow._state import _torch_private
from ringstow.convert import convert


class Allowed:
    """A class that a program allows."""


def test_what_other_threads_load_and_allow_is_theirs(at):
    """A load must not change what the process allows, not even for its own time."""
    from torch import serialization

    class Mine:
        pass

    class Later:
        pass

    torch.save({"numpy": np.arange(3), "space": argparse.Namespace(a=1)}, at / "x.pt")
    torch.save({"space": argparse.Namespace(a=1)}, at / "space.pt")
    seen = []
    real = _numpy_pickles._reconstruct

    def meanwhile(*arguments):
        with pytest.raises(pickle.UnpicklingError):
            torch.load(at / "space.pt", weights_only=True)
        seen.append(serialization.get_safe_globals())
        serialization.add_safe_globals([Later])
        return real(*arguments)

    before = serialization.get_safe_globals()
    try:
        serialization.add_safe_globals([Mine])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_numpy_pickles, "_reconstruct", meanwhile)
            loaded = ringstow.load(at / "x.pt")
        assert loaded["numpy"].tolist() == [0, 1, 2]
        assert loaded["space"] == argparse.Namespace(a=1)
        assert len(seen) == 1
        assert {*seen[0]} == {*before, Mine}
        assert {*serialization.get_safe_globals()} == {*before, Mine, Later}
    finally:
        serialization.clear_safe_globals()
        serialization.add_safe_globals(before)


def test_what_the_program_allows_is_loaded(at):
    from torch import serialization

    value = Allowed()
    value.x = 1
    torch.save({"value": value}, at / "x.pt")
    with pytest.raises(ringstow.UnsupportedError, match="Allowed"):
        ringstow.load(at / "x.pt")
    with serialization.safe_globals([Allowed]):
        assert type(ringstow.load(at / "x.pt")["value"]) is Allowed


def test_with_a_torch_of_another_structure_only_what_the_program_allows_is_loaded(at, monkeypatch):
    def rebound(*_, **__):
        raise AttributeError

    torch.save({"w": torch.ones(2)}, at / "x.pt")
    torch.save({"space": argparse.Namespace(a=1)}, at / "space.pt")
    monkeypatch.setattr(_torch_private, "rebound", rebound)
    assert ringstow.load(at / "x.pt")["w"].tolist() == [1, 1]
    with pytest.raises(ringstow.UnsupportedError, match="argparse.Namespace"):
        ringstow.load(at / "space.pt")


def test_the_variable_that_makes_torch_strict_is_no_hindrance(at, monkeypatch):
    torch.save({"numpy": np.arange(3)}, at / "x.pt")
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    assert ringstow.load(at / "x.pt")["numpy"].tolist() == [0, 1, 2]


def test_a_torchscript_archive_is_refused(at):
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), at / "x.pt")
    with pytest.raises(ringstow.Error, match="TorchScript"):
        ringstow.load(at / "x.pt")


def test_a_conversion_leaves_the_filters_of_warnings_alone(at, monkeypatch):
    ringstow.save({"w": torch.ones(2)}, at / "x")
    changed = []
    monkeypatch.setattr(warnings, "catch_warnings", lambda *_, **__: changed.append(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warnings, "filters", tuple(warnings.filters))  # refuses changes
        convert(at / "x", at / "dcp", target="dcp")
    assert not changed
