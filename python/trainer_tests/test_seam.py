"""Of another version of a framework an integration warns, or it names what is gone."""

from __future__ import annotations

import logging
from importlib.metadata import version

import pytest

import ringstow
from ringstow.integrations._kit._framework_check import Seam


class Base:
    def save(self, state, path=None):
        pass


def seam(save, tested=None, **more):
    owner = type("Engine", (Base,), {} if save is None else {"save": save})
    tested = tested or ".".join(version("torch").split(".")[:2])
    return Seam("torch", tested, "lightning", {owner: {"save": "state path"}}, **more)


def refused(one):
    with pytest.raises(ringstow.UnsupportedError, match="saves in another way") as caught:
        one.check()
    return str(caught.value)


@pytest.mark.parametrize(
    "save",
    [
        None,
        lambda self, state, path, more=None: None,
        lambda self, state, path, *more, other=None, **others: None,
    ],
)
def test_arguments_that_are_added_with_a_default_are_taken(save, caplog):
    seam(save).check()
    assert not caplog.records


@pytest.mark.parametrize(
    "save",
    [
        lambda self, state: None,
        lambda self, path, state: None,
        lambda self, state, path, more: None,
        lambda self, state, path, *, more: None,
    ],
)
def test_a_function_that_lacks_an_argument_or_needs_a_new_one_is_refused_by_its_name(save):
    said = refused(seam(save))
    assert "its Engine.save is not save(state, path)" in said
    assert "docs/trainers/lightning.md has the versions that work" in said


def test_a_function_that_is_gone_is_refused_by_its_name():
    one = seam(None)
    gone = one._replace(calls={Base: {"save": "state path", "commit": "info"}})
    assert "its Base.commit is not commit(info)" in refused(gone)


def test_an_abstract_method_that_is_new_is_refused_by_its_name():
    kind = type("Strategy", (), {"__abstractmethods__": frozenset({"save", "stage"})})
    assert "stage" in refused(seam(None, hooks={kind: frozenset({"save"})}))


def test_a_version_that_is_not_tested_is_warned_of_and_works(caplog):
    with caplog.at_level(logging.WARNING, "ringstow"):
        seam(None, tested="1.0").check()
    (line,) = caplog.messages
    assert f"torch {version('torch')} is not tested with ringstow, and 1.0 is" in line
