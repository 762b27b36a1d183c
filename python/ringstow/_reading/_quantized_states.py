"""Loads into the ``state_dict()`` of a module with bitsandbytes' 4-bit layers.

Such a state has the values of a quantization as JSON, in a tensor that no module holds. A module
does not see what fills it, so the checkpoint must have the same values.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

from ringstow._state.objects._quantized_layers import is_packed, weight_of
from ringstow._state.tensors import _torch
from ringstow._state.tree._build import Builder, Survey
from ringstow._state.tree._walk import Leaf, Path

_REMEDY = (
    'a module does not see what fills this: give the module, {"model": model}, or take the state '
    "from ringstow.load"
)


class Merge(Protocol):
    """Plans the changes of a state; see `ringstow._reading._load_plan.Merge`."""

    survey: Survey
    assigns: list[tuple[Callable[[Any], None], Callable[[Builder], Any]]]

    def differ(
        self, path: Path, here: str, there: str, *, kind: str = "kind", remedy: str = ""
    ) -> None:
        """Note a mismatch."""

    def is_damaged(self, node: Any) -> bool:
        """Return whether a part of a skeleton holds a damaged tensor."""


def without_packed(
    plan: Merge, here: dict[Any, Any], saved: dict[Any, Any], path: Path
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Plan to compare such tensors; return what a container and the checkpoint have beside them."""
    packed = [key for key, one in here.items() if is_packed(key) and _torch.is_tensor(one)]
    found = [
        key for key in packed if key in saved or is_otherwise(plan, here[key], saved, (*path, key))
    ]
    for key in found:
        if key in saved:
            compare(plan, here[key], saved[key], (*path, key), is_seen=False)
    if not found:
        return here, saved
    kept = ({key: one for key, one in some.items() if key not in found} for some in (here, saved))
    return next(kept), next(kept)


def is_otherwise(plan: Merge, target: Any, saved: dict[Any, Any], path: Path) -> bool:
    """Return, and note, whether a checkpoint without such a tensor has other codes in its place.

    Its name has the kind of the codes, and codes of another kind fit the same memory.

    Args:
        plan: the plan.
        target: the tensor here.
        saved: what the checkpoint has of the container.
        path: the tensor's path.
    """
    weight = weight_of(str(path[-1]))
    if weight not in saved:
        return False
    others = [key for key in saved if is_packed(key) and weight_of(key) == weight]
    there = others[0] if others else f"{weight} without it"
    plan.differ(path, _text(target), there, kind="layout")
    return True


def compare(plan: Merge, target: Any, node: Any, path: Path, *, is_seen: bool) -> None:
    """Plan to refuse a checkpoint of another quantization, before anything changes.

    Args:
        plan: the plan.
        target: the tensor here.
        node: the checkpoint's part for it.
        path: its path.
        is_seen: whether the module gets what is loaded; otherwise its values must be equal, too.
    """
    if plan.is_damaged(node):
        return
    if not isinstance(node, Leaf):
        plan.differ(path, _text(target), "no tensor", kind="layout")
        return

    def check(builder: Builder) -> None:
        shown = [_text(one) for one in (target, builder.value(node, path))]
        fixed = [_without_values(one) if is_seen else one for one in shown]
        if fixed[0] != fixed[1]:
            plan.differ(path, *shown, kind="layout", remedy="" if is_seen else _REMEDY)

    plan.survey.add(node, path)
    plan.assigns.append((_nothing, check))


def _without_values(text: str) -> object:
    """Return what tensors of one quantization have equal, if a text is such JSON."""
    try:
        found: object = json.loads(text)
    except ValueError:
        return text
    return {**found, "nested_offset": None} if isinstance(found, dict) else text


def _text(packed: Any) -> str:
    if not _torch.is_tensor(packed) or packed.dim() != 1 or packed.element_size() != 1:
        return f"{packed!r:.100}"
    return bytes(packed.detach().cpu().tolist()).decode("utf-8", "replace")


def _nothing(_: object) -> None:
    """Leave a tensor as it is: it has the values already."""
