"""A framework's own values beside a model's tensors, for a sharded save."""

from __future__ import annotations

import contextlib
import io
from collections import deque
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from ringstow._core._errors import InvalidStateError
from ringstow._saving._guard import SMALL
from ringstow._state.tree import _custom_types, _cycles, _packed_values
from ringstow._state.tree._refusals import Refusals


def tensors_of(node: object) -> Iterator[torch.Tensor]:
    """Yield the tensors that a value holds in containers and in attributes of objects, each once.

    Enum members, configurations and similar objects refer back to their owners. Classes, functions
    and modules hold the program, not its state: they are not searched.
    """
    return (one for one in _cycles.reached(node, _inside) if isinstance(one, torch.Tensor))


def _inside(node: Any) -> Iterator[Any]:
    if isinstance(node, torch.Tensor | type | FunctionType | MethodType | ModuleType):
        return
    if isinstance(node, dict):
        yield from dict.values(node)  # not its own method, which may compute or raise
    elif isinstance(node, list | tuple | set | frozenset | deque):
        yield from node
    elif isinstance(node, Mapping):
        with contextlib.suppress(Exception):  # such as a value that OmegaConf reports as missing
            yield from node.values()
    with contextlib.suppress(Exception):  # a property in place of an attribute may raise
        yield from _custom_types.held(node).values()


def has_large(node: object) -> bool:
    """Return whether a save streams tensors that may change before the next optimizer step."""
    return any(tensor.nbytes > SMALL for tensor in tensors_of(node))


def check(key: str, value: object, *, allow_pickle: bool) -> None:
    """Refuse values at the call that a sharded save would refuse later.

    Raises:
        InvalidStateError: names each value, with what to save instead.
    """
    from ringstow.dcp import _objects  # needs a newer torch than a whole save

    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except Exception:  # its parts may be saved nevertheless, or are named below
        pass
    else:
        if _objects.refusal(stream) is None or allow_pickle:
            return
    refusals = Refusals()
    _packed_values.pack(key, value, refusals)
    refusals.check()


@contextlib.contextmanager
def explaining_pickles(who: str, *, allow_pickle: bool) -> Iterator[None]:
    """Add to an error which framework class takes ``allow_pickle``."""
    try:
        yield
    except InvalidStateError as error:
        if not allow_pickle and "allow_pickle" in str(error):
            error.add_note(f"{who}(allow_pickle=True)")
        raise
