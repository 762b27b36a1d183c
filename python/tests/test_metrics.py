"""Metrics that a save notes beside its step."""

import math

import numpy as np
import pytest
import torch
from support import manifest_of

import ringstow


def save(root, step, metrics):
    return ringstow.save({"w": np.zeros(3)}, root / f"step-{step}", step=step, metrics=metrics)


def test_metrics_come_back_from_steps_and_info(tmp_path):
    save(tmp_path, 1, {"loss": 0.25, "épreuve": -3})
    handle = ringstow.save_async({}, tmp_path / "step-2", step=2, metrics={"loss": 0.5})
    handle.result()
    save(tmp_path, 3, None)
    found = [step.metrics for step in ringstow.steps(tmp_path)]
    assert found == [{"loss": 0.25, "épreuve": -3.0}, {"loss": 0.5}, {}]
    with ringstow.open(tmp_path / "step-1") as checkpoint:
        assert checkpoint.info.metrics == {"loss": 0.25, "épreuve": -3.0}
        assert type(checkpoint.info.metrics["épreuve"]) is float
    assert "metrics" not in manifest_of(tmp_path / "step-3")


def test_nan_and_infinities_are_saved_and_come_back(tmp_path):
    save(tmp_path, 1, {"loss": math.nan, "up": math.inf, "down": -math.inf})
    assert manifest_of(tmp_path / "step-1")["metrics"]["loss"] == {"$float": "nan"}
    (found,) = ringstow.steps(tmp_path)
    assert math.isnan(found.metrics["loss"])
    assert (found.metrics["up"], found.metrics["down"]) == (math.inf, -math.inf)
    assert [found] == ringstow.steps(tmp_path), "two reports of one step are equal"
    assert hash(found) == hash(ringstow.steps(tmp_path)[0])


@pytest.mark.parametrize(
    "number",
    [
        *(2, 2.0, np.float32(2), np.float64(2), np.int64(2), np.uint8(2), np.longdouble(2)),
        *(np.array(2), torch.tensor(2), torch.tensor(2.0, requires_grad=True)),
        torch.tensor(2, dtype=torch.bfloat16),
    ],
    ids=lambda number: f"{type(number).__name__} {getattr(number, 'dtype', '')}",
)
def test_number_of_any_library_is_a_metric(tmp_path, number):
    save(tmp_path, 1, {"loss": number})
    assert ringstow.steps(tmp_path)[0].metrics == {"loss": 2.0}


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ({"loss": True}, "'loss' is True, not a number"),
        ({"loss": np.True_}, "'loss' is True, not a number"),
        ({"loss": torch.tensor(True)}, "'loss' is True, not a number"),
        ({"loss": "0.25"}, "'loss' is '0.25', not a number"),
        ({"loss": None}, "'loss' is None, not a number"),
        ({"loss": 1j}, "not a number"),
        ({"loss": np.complex64(1)}, "not a number"),
        ({"loss": torch.ones(2)}, "'loss' is a Tensor of shape \\(2,\\)"),
        ({"loss": torch.ones(1)}, "pass .mean\\(\\).item\\(\\)"),
        ({"loss": np.ones((2, 1))}, "'loss' is a ndarray of shape \\(2, 1\\)"),
        ({"loss": torch.ones((), device="meta")}, "'loss' has no value"),
        ({"loss": 10**400}, "'loss' is too large"),
        pytest.param({"loss": 10**5000}, "'loss' is too large", id="10**5000"),
        ({"loss": np.longdouble("1e400")}, "'loss' is too large"),
        ({1: 0.5}, "a metric's name is a str, not 1"),
        ({"": 0.5}, "empty name"),
        ({"\ud800": 0.5}, "not Unicode"),
        ({"x" * 257: 0.5}, "257 bytes, more than 256"),
        ({"é" * 129: 0.5}, "258 bytes, more than 256"),
        ({f"m{number}": 0.5 for number in range(257)}, "257 metrics are more than 256"),
        ([("loss", 0.5)], "metrics are names and numbers"),
        (0.5, "metrics are names and numbers"),
    ],
    ids=str,
)
def test_what_is_no_metric_is_refused_before_anything_is_written(tmp_path, metrics, says):
    for save in (ringstow.save, ringstow.save_async):
        with pytest.raises(ringstow.InvalidStateError, match=says):
            save({"w": np.zeros(3)}, tmp_path / "step-1", step=1, metrics=metrics)
    assert not (tmp_path / "step-1").exists()


def test_most_metrics_with_the_longest_names(tmp_path):
    most = {f"{number:0256}": number / 7 for number in range(256)}
    save(tmp_path, 1, most)
    assert ringstow.steps(tmp_path)[0].metrics == most
