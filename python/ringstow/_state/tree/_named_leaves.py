"""Leaves of a checkpoint, by names whose steps a rename maps. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from ringstow._state.tensors._memory import Stored
from ringstow._state.tree import _tensor_views
from ringstow._state.tree._tensor_views import CannotJoinError, View
from ringstow._state.tree._walk import COMPOSITE, Box, Leaf, Path

Steps = tuple[object, ...]
"""A path whose text keys are split at their dots: ``{"a.b": {0: x}}`` has ``("a", "b", 0)``."""


def steps_of(path: Path) -> Steps:
    """Return the steps of a path."""
    steps: list[object] = []
    for step in path:
        if isinstance(step, str):
            steps += step.split(".") if "." in step else (step,)
        else:
            steps.append(step)
    return tuple(steps)


class Named(NamedTuple):
    """A leaf of the checkpoint, on its way to its name in the state dict."""

    steps: Steps
    """Its name so far."""
    path: Path
    """Where it is in the checkpoint; of several joined tensors, where the first one is."""
    node: Any
    """Its node of the skeleton, or a `View`."""
    may_join: bool = True
    """False for an optimizer's state: it gets another name, and is not joined or split."""


class Tensors(Protocol):
    """What a rename that joins and splits tensors must know of both sides."""

    def stored(self, leaf: Leaf, path: Path) -> Stored:
        """Return what is stored for a tensor of the checkpoint."""

    has_state: bool
    """Whether there is a state dict."""

    def is_optimizer(self, node: object) -> bool:
        """Return whether a dict is an optimizer's state dict, or the skeleton of one."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor of the state dict; None if there is none of that name."""

    def leaf(self, name: str, view: View) -> Leaf:
        """Return a leaf of the skeleton that stands for a view."""


def text_of(steps: Steps) -> str:
    """Return the flat name of steps."""
    return ".".join(step if isinstance(step, str) else repr(step) for step in steps)


def starred(steps: Steps) -> Steps:
    """Return steps with a ``*`` in place of each number."""
    return tuple("*" if str(step).isdecimal() else step for step in steps)


def view_of(one: Named, tensors: Tensors) -> View | None:
    """Return a leaf as a view; None if it is no tensor.

    Raises:
        CannotJoinError: it is a tensor made of others: sparse, quantized.
    """
    if isinstance(one.node, View):
        return one.node
    if isinstance(one.node, Box) and one.node.tag == COMPOSITE:
        raise CannotJoinError(
            f"joins, splits or turns {text_of(one.steps)}, which is made of several tensors "
            f"({one.node.name}): it can only get another name"
        )
    if not isinstance(one.node, Leaf) or one.node.tag not in ("$tensor", "$ndarray"):
        return None
    stored = tensors.stored(one.node, one.path)
    return _tensor_views.whole(one.node.body, stored.dtype, one.node.dtype, stored.shape)
