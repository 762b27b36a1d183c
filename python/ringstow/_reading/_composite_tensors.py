"""Loads into tensors that are made of others: in place, so that all who hold them see it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from ringstow._reading._targets import kind_there
from ringstow._state.tensors import _composite_shards, _composites, _torch
from ringstow._state.tensors._layouts import TensorParts
from ringstow._state.tree._build import Builder, Contents, Survey
from ringstow._state.tree._damaged_tensors import DamagedTensor
from ringstow._state.tree._refusals import type_name
from ringstow._state.tree._walk import Box, Leaf, Path, describe, flat_name, stored_in


class Merge(Protocol):
    """Plans the changes of a state; see `ringstow._reading._load_plan.Merge`."""

    contents: Contents
    survey: Survey
    assigns: list[tuple[Callable[[Any], None], Callable[[Builder], Any]]]
    in_object: bool
    mismatched: list[str]
    sources: dict[tuple[str, int], tuple[Path, Any]]

    def differ(
        self, path: Path, here: str, there: str, *, kind: str = "kind", remedy: str = ""
    ) -> None:
        """Note a mismatch."""

    def is_damaged(self, node: Any) -> bool:
        """Return whether a part of a skeleton holds a damaged tensor."""

    def items(
        self, here: dict[Any, Any], saved: dict[Any, Any], path: Path
    ) -> dict[Any, Callable[[Builder], Any]]:
        """Plan the changes of a container's items; return the builders of the replaced items."""

    def assign(
        self, store: Callable[[Any, Any], None], makes: dict[Any, Callable[[Builder], Any]]
    ) -> None:
        """Plan to store new items."""


def kind_here(tensor: Any) -> str:
    """Return a tensor's type or layout with an article."""
    layout = _torch.dtype_name(tensor.layout)
    if type(tensor).__name__ not in ("Tensor", "Parameter"):
        return f"a {type_name(tensor)}"
    return f"a {layout} tensor" if layout != "strided" else f"a tensor of {tensor.dtype}"


def merge(plan: Merge, target: Any, node: Box, path: Path) -> Callable[[Builder], Any] | None:
    """Plan to make the target at a path equal to a stored composite.

    Fills the inner tensors of a wrapper in place. Makes a sparse or jagged tensor first, which
    checks its indices, and copies it into the target. In the state of an object it replaces the
    target instead: the object itself takes the elements from its state.

    Returns:
        A function that builds the new tensor; None if the target stays the same object.
    """
    assert isinstance(node.items, dict)
    if target is None or isinstance(target, DamagedTensor):
        plan.survey.add(node, path)
        return lambda builder: builder.value(node, path)
    here = None
    if _torch.is_tensor(target):
        here = _composites.take(target, describe(path))
    if here is None or here.type != node.name:
        kind = kind_here(target) if _torch.is_tensor(target) else f"a value ({type_name(target)})"
        plan.differ(path, kind, kind_there(node))
        return None
    if plan.is_damaged(node):
        return None
    is_made = not _composites.can_fill(target)
    if is_made:
        plan.survey.add(node, path)
    else:
        plan.survey.note_context(node, path)
    if _differs(plan, here, node, path) or (
        is_made and _dtype_differs(plan, here.tensors, node, path)
    ):
        return None
    if is_made:
        if plan.in_object and here.type == "sparse_coo":
            return lambda builder: builder.value(node, path)
        fill = functools.partial(_composites.fill_layout, target)
        plan.assigns.append((fill, lambda builder: _made_for(plan, target, node, path, builder)))
        return None
    makes = plan.items(here.tensors, node.items, path)
    plan.assign(functools.partial(setattr, target), makes)
    return None


def _made_for(plan: Merge, target: Any, node: Box, path: Path, builder: Builder) -> Any:
    """Build the source of a target; note that the target can't be filled from it, if so."""
    source = builder.value(node, path)
    problem = _composites.misfit(target, source)
    if problem:
        remedy = "ringstow.load returns it"
        if node.name == "sparse_coo":
            remedy = f'give the module that holds it, {{"model": model}}; {remedy}'
        plan.differ(path, *problem, kind="layout", remedy=remedy)
    else:
        check_shared(plan, target, source, path)
    return source


class Filling(Protocol):
    """Notes what tensors get."""

    mismatched: list[str]
    sources: dict[tuple[str, int], tuple[Path, Any]]


def check_shared(plan: Filling, target: Any, source: Any, path: Path) -> None:
    """Note that inner tensors share memory here, such as indices, and differ in the checkpoint."""
    sources = _composites.inner(source, "") or []
    for one, other in zip(_composites.inner(target, "") or [], sources, strict=True):
        if one.numel():
            place = str(one.device), one.data_ptr()
            at, known = plan.sources.setdefault(place, (path, other))
            if known is not other and not (known.shape == other.shape and known.equal(other)):
                names = f"{flat_name(at)} and {flat_name(path)}"
                plan.mismatched.append(f"{names} share memory here and differ in the checkpoint")
                return


def shards(
    plan: Merge, whole: _composite_shards.Whole, node: Box, path: Path
) -> list[tuple[str, Leaf]]:
    """Return the stored inner tensors of a sharded composite, by name; none if they do not fit."""
    stored = dict(node.steps())
    wrong = whole.parts.type != node.name or stored.keys() != whole.inner.keys()
    if wrong or not all(isinstance(one, Leaf) and one.tag == "$tensor" for one in stored.values()):
        shown = [
            f"a DTensor of a {kind.replace(':', '.')} of {sorted(names)}"
            for kind, names in ((whole.parts.type, whole.inner), (node.name, stored))
        ]
        plan.differ(path, *shown)
        return []
    plan.survey.note_context(node, path)
    return [] if _differs(plan, whole.parts, node, path) else [*stored.items()]


def _differs(plan: Merge, here: TensorParts, node: Box, path: Path) -> bool:
    """Note what the contexts differ in, if they do; return whether they differ."""
    assert here.context is not None
    if stored_in(node.context):
        there: Any = {}  # it would have to be read first
    else:
        there = Builder(plan.contents, {}).value(node.context, path)
    wrong = _composites.differing(here.context, there)
    for key in wrong:
        shown = [f"{key} {one.get(key)!r:.100}" for one in (here.context, there)]
        plan.differ(path, *shown, kind="size" if key == "shape" else "kind")
    return bool(wrong)


def _dtype_differs(plan: Merge, here: dict[str, Any], node: Box, path: Path) -> bool:
    """Note that an inner tensor of a tensor which is replaced has another dtype here."""
    for name, leaf in node.steps():
        if not isinstance(leaf, Leaf) or name not in here:
            continue
        stored = plan.contents.stored(leaf, path)
        code = _torch.code_of(here[name], flat_name((*path, name)))
        if stored.dtype != code:
            plan.differ((*path, name), code, stored.dtype, kind="dtype")
            return True
    return False
