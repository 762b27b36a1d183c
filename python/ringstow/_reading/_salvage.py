"""The damaged parts that ``on_corrupt="skip"`` leaves out of a load."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from ringstow._core._errors import CorruptCheckpointWarning
from ringstow._state.tree._damaged_tensors import DamagedTensor
from ringstow._state.tree._select import listed
from ringstow._state.tree._walk import (
    STORED,
    Box,
    Leaf,
    Path,
    children,
    metadata_of,
    rebuild,
    stored_in,
)


def check_choice(on_corrupt: str, *, verify: bool) -> bool:
    """Return whether a call asks to skip damaged parts.

    Raises:
        ValueError: an unknown choice; or no ``verify``, without which damage is not found.
    """
    if on_corrupt not in ("raise", "skip"):
        raise ValueError(f'on_corrupt is "raise" or "skip", not {on_corrupt!r}')
    if on_corrupt == "skip" and not verify:
        raise ValueError('on_corrupt="skip" needs verify=True: checksums find the damage')
    return on_corrupt == "skip"


class Checked(Protocol):
    """A checkpoint that can be searched for damage."""

    def damaged(self, names: list[str]) -> str:
        """Return the damaged tensors as JSON: a list of DamagedTensor."""


def find(checkpoint: Checked, skeleton: Any) -> dict[str, DamagedTensor]:
    """Read and check the tensors of a skeleton, and return the damaged ones by name."""
    found = json.loads(checkpoint.damaged(stored_in(skeleton)))
    return {values["name"]: DamagedTensor(**values) for values in found}


def marked(skeleton: Any, damaged: Mapping[str, DamagedTensor]) -> Any:
    """Return the skeleton with a `DamagedTensor` for each damaged leaf."""

    def make(leaf: Leaf | Box, path: Path) -> Any:
        if isinstance(leaf, Leaf) and leaf.tag in STORED:
            return damaged.get(leaf.body, leaf)
        return leaf

    return rebuild(skeleton, (), make) if damaged else skeleton


def without(skeleton: Any, damaged: Mapping[str, DamagedTensor]) -> Any:
    """Return the skeleton without damaged leaves.

    Dicts lack the damaged keys. A defaultdict would make a new value for a missing key, so it holds
    a `DamagedTensor`, like lists, tuples and fields.
    """
    whole = marked(skeleton, damaged)
    if damaged:
        _drop(whole)
    return whole


def _drop(node: Any) -> None:
    """Remove the keys of damaged leaves from the dicts in a skeleton."""
    # Only dict and OrderedDict: see `without`.
    if isinstance(node, dict) and not hasattr(node, "default_factory"):
        for key in [key for key, child in node.items() if isinstance(child, DamagedTensor)]:
            del node[key]
    for _, child in children(node) or ():
        _drop(child)
    if metadata_of(node) is not None:
        _drop(metadata_of(node))


def holds_damage(node: Any) -> bool:
    """Return whether a marked skeleton holds a `DamagedTensor` at any depth."""
    if isinstance(node, DamagedTensor):
        return True
    inside: Iterator[tuple[Any, Any]] | tuple[()] = children(node) or ()
    return any(holds_damage(child) for _, child in inside) or (
        metadata_of(node) is not None and holds_damage(metadata_of(node))
    )


def warn(path: str, damaged: Iterable[DamagedTensor], what_became: str) -> None:
    """Warn of damaged parts that were left out, at the line that called ringstow."""
    places = ((repr(d.name), f"{d.file} at offset {d.offset}: {d.why}") for d in damaged)
    reasons = [f"{name} ({place})" for name, place in places]
    if reasons:
        text = f"{path} is damaged, and {what_became}; {listed('damaged', reasons)}"
        warnings.warn(CorruptCheckpointWarning(text), stacklevel=_depth())


def _depth() -> int:
    """Return the ``stacklevel`` at which `warn` points at the caller's code."""
    import sys

    depth = 2
    # Skip ringstow's decorators in between.
    ours = ("ringstow.", "contextlib")
    while sys._getframe(depth).f_globals.get("__name__", "").startswith(ours):
        depth += 1
    return depth
