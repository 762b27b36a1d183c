"""Replaces quantized tensors by dense ones, which are made when they are written."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ringstow._core._errors import FormatError
from ringstow._foreign._nested_states import State, is_stored, replaced
from ringstow._state.tensors import _dequantize
from ringstow._state.tensors._layouts import TensorParts
from ringstow._state.tensors._memory import LazyTensor
from ringstow._state.tree._walk import Path, describe, like


def dequantized(state: State, path: str, is_written: Callable[[Path], bool]) -> State:
    """Return a copy of a state with lazy dense tensors in place of quantized ones.

    These are composites that can be dequantized, and the weights of bitsandbytes' layers, whose
    scales are entries of their own in a module's state. Other composites stay, such as sparse ones.

    Args:
        state: the state, with composites as their parts.
        path: its checkpoint, for messages.
        is_written: returns whether the target gets what is at a path; the rest stays as it is.

    Raises:
        UnsupportedError: a wrapper's type is missing here.
        FormatError: the entries of a layer are not what bitsandbytes writes.
    """
    known: dict[tuple[object, ...], LazyTensor] = {}

    def make(value: Any, at: Path) -> Any:
        if type(value) is TensorParts:
            dense = (
                _dequantize.of_parts(value, f"{path}: {describe(at)}") if is_written(at) else None
            )
            # Once, so that tied tensors stay tied.
            return value if dense is None else known.setdefault(dense.identity, dense.lazy())
        if isinstance(value, dict):
            found = _dequantize.with_layers(value, lambda _: True, functools.partial(wrong, at))
            return replaced(like(value, found.items()), make, at, is_leaf)
        return value

    def wrong(at: Path, weight: str, text: str) -> FormatError:
        return FormatError(f"{path}: {describe((*at, weight))} {text}", path=path)

    def is_leaf(value: object) -> bool:
        is_dict = isinstance(value, dict)
        return (
            is_stored(value)
            or type(value) is TensorParts
            or (is_dict and _dequantize.has_layers(value))
        )

    return replaced(state, make, (), is_leaf)  # type: ignore[no-any-return]
