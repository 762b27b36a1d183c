"""The steps that callers give."""

from __future__ import annotations

import operator


def step_number(step: int | None, name: str = "step") -> int | None:
    """Return a step as the native side takes it: an int, or anything that counts as one.

    Raises:
        TypeError: it is no integer.
        ValueError: it is negative, or has more than 64 bits.
    """
    if step is None:
        return None
    if isinstance(step, bool):
        raise TypeError(f"{name} is a number, not {step!r}")
    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(f"{name} is an integer, not {step!r}") from None
    if not 0 <= number < 1 << 64:
        raise ValueError(f"{name} is from 0 to 2**64 - 1, not {number}")
    return number
