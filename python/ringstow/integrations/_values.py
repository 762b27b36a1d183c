"""A framework's own values beside the tensors of a model: what a sharded save makes of them."""

from __future__ import annotations

import dataclasses
import io
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ringstow._errors import InvalidStateError
from ringstow._guard import SMALL
from ringstow.tree import _packed
from ringstow.tree._remedies import Refusals


def tensors_of(node: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in dicts, lists, tuples, deques, dataclasses and namespaces."""
    if isinstance(node, torch.Tensor):
        yield node
        return
    inner: Any = ()
    if isinstance(node, Mapping):
        inner = node.values()
    elif isinstance(node, list | tuple | deque):
        inner = node
    elif dataclasses.is_dataclass(node) or hasattr(node, "__dict__"):
        inner = vars(node).values() if hasattr(node, "__dict__") else ()
    for value in inner:
        yield from tensors_of(value)


def has_large(node: object) -> bool:
    """Return whether a save streams tensors that may change before the next optimizer step."""
    return any(tensor.nbytes > SMALL for tensor in tensors_of(node))


def check(key: str, value: object, *, allow_pickle: bool) -> None:
    """Refuse at the call what a sharded save would refuse later.

    Raises:
        InvalidStateError: names each value, with what to save instead.
    """
    from ringstow.dcp import _objects  # needs a newer torch than a whole save

    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except Exception:  # what it is made of may be saved nevertheless, or is named below
        pass
    else:
        if _objects.refusal(stream) is None or allow_pickle:
            return
    refusals = Refusals()
    _packed.pack(key, value, refusals)
    refusals.check()


def explain_pickles(error: InvalidStateError, who: str, *, allow_pickle: bool) -> None:
    """Say in an error where a framework's class takes ``allow_pickle``."""
    if not allow_pickle and "allow_pickle" in str(error):
        error.add_note(f"{who}(allow_pickle=True)")
