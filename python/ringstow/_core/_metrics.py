"""Converts the metrics of a step: from callers' values, and for reports."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

from ringstow import _native
from ringstow._core._arguments import brief
from ringstow._core._errors import InvalidStateError

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def metrics_of(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return metrics for the native side; empty for None.

    Args:
        metrics: numbers by name: ints, floats, NumPy scalars, and 0-dimensional tensors and arrays.

    Raises:
        InvalidStateError: not a mapping, or a name is not text, or a metric is not a number; or
            there are too many, or a name is empty or too long.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise InvalidStateError(
            f'metrics are names and numbers, {{"loss": 0.25}}, not {brief(metrics)}'
        )
    checked = {_name(name): _number(name, value) for name, value in metrics.items()}
    _native.check_metrics(checked)
    return checked


def to_json(metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return metrics as the native side reports them; JSON has no NaN and no infinities."""
    return {
        name: value if math.isfinite(value) else {"$float": str(value)}
        for name, value in metrics.items()
    }


def from_json(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a report of the native side."""
    # A single NaN object, so that two reports of one step are equal.
    return {
        name: _NOT_FINITE[value["$float"]] if isinstance(value, dict) else value
        for name, value in metrics.items()
    }


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise InvalidStateError(f"a metric's name is a str, not {brief(name)}")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InvalidStateError(f"the metric's name {name!r} is not Unicode: {error}") from None
    return str(name)


def _number(name: str, value: Any) -> float:
    """Return a number, also from a 0-dimensional tensor or array."""
    if not isinstance(value, int | float) and hasattr(value, "item"):
        shape = getattr(value, "shape", None)
        if shape is None or len(shape) > 0:
            raise InvalidStateError(
                f"the metric {name!r} is a {type(value).__name__} of shape "
                f"{None if shape is None else tuple(shape)}, not one number: pass .mean().item()"
            )
        try:
            value = value.item()
        except Exception as error:
            raise InvalidStateError(f"the metric {name!r} has no value: {error}") from error
    # A bool is an int, but is probably a flag passed by mistake.
    if isinstance(value, bool) or not isinstance(value, int | float | numbers.Real):
        raise InvalidStateError(
            f"the metric {name!r} is {brief(value)}, not a number: pass an int, a float, or a "
            "tensor or array without a dimension; save anything else in the state"
        )
    try:
        number = float(value)
    except OverflowError:
        raise _too_large(name) from None
    # A wider float would become infinite without an error.
    if math.isinf(number) and value not in (math.inf, -math.inf):
        raise _too_large(name)
    return number


def _too_large(name: str) -> InvalidStateError:
    return InvalidStateError(f"the metric {name!r} is too large for a float of 64 bits")
