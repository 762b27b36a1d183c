"""Replaces quantized tensors by dense ones, which are made when they are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringstow._core._errors import FormatError
from ringstow._foreign._nested_states import State, is_stored, is_tensor, loaded, replaced
from ringstow._state.tensors import _bitsandbytes, _dequantize
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
            return replaced(_with_parts(value, at, path), make, at, is_leaf)
        return value

    def is_leaf(value: object) -> bool:
        is_dict = isinstance(value, dict)
        return (
            is_stored(value) or type(value) is TensorParts or (is_dict and bool(_layers_in(value)))
        )

    return replaced(state, make, (), is_leaf)  # type: ignore[no-any-return]


def _layers_in(state: Any) -> dict[str, tuple[str, dict[str, str], str]]:
    return _bitsandbytes.parts_in(name for name in state if type(name) is str)


def _with_parts(state: dict[Any, Any], at: Path, path: str) -> dict[Any, Any]:
    """Return a module's state with the weights of bitsandbytes' layers as composites."""
    kept = dict(state)
    for weight, (kind, names, packed) in _layers_in(state).items():
        inner = {one: kept.pop(name) for one, name in names.items()}
        rest = kept.pop(packed)
        key = f"{path}: {describe((*at, weight))}"
        try:
            if not all(map(is_tensor, (*inner.values(), rest))):
                raise ValueError("not all of its entries are tensors")
            taken = _bitsandbytes.parts_of_state(kind, inner, loaded(rest))
        except ValueError as error:
            raise FormatError(
                f"{key} looks like a weight of bitsandbytes, and can't be dequantized: {error}",
                path=path,
            ) from None
        kept[weight] = TensorParts(kind, *taken)
    # In the order of the state.
    return like(state, {name: kept[name] for name in state if name in kept}.items())  # type: ignore[no-any-return]
