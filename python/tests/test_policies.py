"""A policy checks its fields when it is made, and names the field that is wrong."""

import datetime
import inspect
import pathlib

import pytest

import ringstow
from ringstow import CheckpointManager, InvalidStateError, Nodes, Previous, Retention, Tiers


@pytest.mark.parametrize(
    ("policy", "fields", "error", "said"),
    [
        (Retention, {"last": 0}, InvalidStateError, "Retention.last = 0: must be 1 or more"),
        (Retention, {"last": -3}, InvalidStateError, "Retention.last = -3"),
        (Retention, {"last": 2**64}, InvalidStateError, "Retention.last"),
        (Retention, {"last": True}, TypeError, "Retention.last must be an int, not True"),
        (Retention, {"last": 2.0}, TypeError, "Retention.last must be an int, not 2.0"),
        (Retention, {"every": 0}, InvalidStateError, "Retention.every = 0"),
        (Retention, {"every": "1000"}, TypeError, "Retention.every must be an int, not '1000'"),
        (Retention, {"every_time": 3600}, TypeError, "Retention.every_time takes a time .* not 36"),
        (Retention, {"within": "2"}, InvalidStateError, "Retention.within takes a time .* not '2'"),
        (Retention, {"within": "0s"}, InvalidStateError, "more than zero"),
        (Retention, {"best": "loss"}, TypeError, "Retention.best must be a metric"),
        (Retention, {"best": "abc"}, TypeError, "Retention.best must be a metric"),
        (Retention, {"best": ("loss", "min")}, TypeError, "Retention.best must be a metric"),
        (Retention, {"best": ("loss", "low", 2)}, InvalidStateError, '\'min|"min" or "max"'),
        (Retention, {"best": ("", "min", 2)}, InvalidStateError, "the metric's name is empty"),
        (Retention, {"best": (3, "min", 2)}, TypeError, "a metric has a name"),
        (Retention, {"best": ("loss", "min", 0)}, InvalidStateError, "number in Retention.best"),
        (Retention, {"best": ("loss", "min", True)}, TypeError, "number in Retention.best"),
        (Retention, {"slim_after": 0}, InvalidStateError, "Retention.slim_after = 0"),
        (Retention, {"slim_after": "2"}, TypeError, "Retention.slim_after"),
        (Retention, {"slim_after": 2, "drop": []}, InvalidStateError, "Retention.slim_after"),
        (Retention, {"drop": "optimizer"}, TypeError, "Retention.drop is a list of names"),
        (Retention, {"drop": ["a."]}, InvalidStateError, "Retention.drop: 'a.' is no name"),
        (Tiers, {"places": "far"}, TypeError, "Tiers.places is a list"),
        (Tiers, {"places": [3]}, TypeError, "Tiers.places must be a list"),
        (Tiers, {"places": 5}, TypeError, "Tiers.places must be a list"),
        (Tiers, {"keep": 0}, InvalidStateError, "Tiers.keep = 0: must be 1 or more"),
        (Tiers, {"keep_here": 1.5}, TypeError, "Tiers.keep_here must be an int, not 1.5"),
        (Tiers, {"keep": 1, "keep_here": 3}, InvalidStateError, "Tiers.keep=1 .*keep_here=3"),
        (Tiers, {"rate": -5}, InvalidStateError, "Tiers.rate = -5"),
        (Tiers, {"rate": 1.5}, TypeError, "Tiers.rate must be an int, or a size"),
        (Tiers, {"rate": True}, TypeError, "Tiers.rate must be an int, or a size"),
        (Tiers, {"rate": "fast"}, InvalidStateError, "Tiers.rate = 'fast'"),
        (Nodes, {"replicas": 0}, InvalidStateError, "Nodes.replicas = 0: must be 1 or more"),
        (Nodes, {"replicas": None}, TypeError, "Nodes.replicas must be an int, not None"),
        (Previous, {"full_every": 0}, InvalidStateError, "Previous.full_every = 0"),
        (Previous, {"full_every": True}, TypeError, "Previous.full_every"),
    ],
    ids=str,
)
def test_field_that_cannot_be_is_named(policy, fields, error, said):
    with pytest.raises(error, match=said):
        policy(**fields)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"keep": 0}, InvalidStateError, "keep = 0: must be 1 or more"),
        ({"keep": True}, TypeError, "keep must be a number of steps, or a ringstow.Retention"),
        ({"keep": "3"}, TypeError, "keep must be a number of steps, or a ringstow.Retention"),
        ({"tiers": "far"}, TypeError, r'tiers is a list of URLs and directories: tiers=\["far"\]'),
        ({"tiers": [3]}, TypeError, "tiers must be a list"),
        ({"tiers": 3}, TypeError, "tiers must be a list"),
        ({"tiers": pathlib.Path("far")}, TypeError, "tiers is a list"),
        ({"nodes": 2}, TypeError, r"nodes must be ringstow.Nodes\(\) or None, not 2"),
        ({"nodes": True}, TypeError, "nodes must be ringstow.Nodes"),
        ({"base": "last"}, InvalidStateError, 'base must be "previous"'),
        ({"base": ringstow.Base()}, TypeError, 'base must be "previous"'),
    ],
    ids=str,
)
def test_manager_names_the_argument_that_cannot_be(tmp_path, arguments, error, said):
    with pytest.raises(error, match=said):
        CheckpointManager(tmp_path / "run", **arguments)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("field", ["keep", "keep_here", "rate"])
@pytest.mark.parametrize("places", [None, []])
def test_fields_of_tiers_are_refused_without_a_place(tmp_path, field, places):
    with pytest.raises(InvalidStateError, match=f"Tiers.{field} needs places, and none is named"):
        CheckpointManager(tmp_path / "run", tiers=Tiers(places, **{field: 1}))


def test_tiers_without_places_are_those_of_the_settings(tmp_path):
    config = ringstow.Config(tiers=[tmp_path / "far"])
    with CheckpointManager(tmp_path / "run", tiers=Tiers(keep=1), config=config) as manager:
        for step in (1, 2):
            manager.save(step, {"a": step})
            assert manager.wait_promoted(60)
    assert [found.step for found in ringstow.steps(tmp_path / "far")] == [2]


def test_short_words_mean_the_policies(tmp_path):
    assert Retention(best=["loss", "min", 2]) == Retention(best=("loss", "min", 2))
    assert Retention(within="2d") == Retention(within=datetime.timedelta(days=2))
    assert Retention(drop=(name for name in ["ema"])).drop == ("ema",)
    assert Tiers(["a"], rate="1M") == Tiers(("a",), rate=1 << 20)
    for keep in (2, Retention(last=2)):
        with CheckpointManager(tmp_path / str(keep), keep=keep) as manager:
            for step in (1, 2, 3):
                manager.save(step, {"a": step})
            assert [found.step for found in manager.steps()] == [2, 3]


def test_manager_takes_nine_arguments_at_most():
    assert len(inspect.signature(CheckpointManager).parameters) <= 9
