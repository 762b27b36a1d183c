"""The names that a load selects from a checkpoint, and their names in the state dict."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

from ringstow import _native
from ringstow._core._errors import KeyMismatchError
from ringstow._foreign import Foreign
from ringstow._state.tree import _skeleton
from ringstow._state.tree._named_leaves import steps_of
from ringstow._state.tree._rename import Given, Rename, below
from ringstow._state.tree._select import by_keys, by_prefix, listed
from ringstow._state.tree._walk import Leaf, flat_name, leaves

_log = logging.getLogger("ringstow")


def skeleton_of(checkpoint: _native.Checkpoint | Foreign, path: str) -> dict[Any, Any]:
    """Return the skeleton of a checkpoint, also of another program's.

    Raises:
        Exception: any error of `_skeleton.parse` and `Foreign.tree_of`.
    """
    if isinstance(checkpoint, Foreign):
        return checkpoint.tree
    if checkpoint.kind == "ringstow":
        return _skeleton.parse(checkpoint.state, path)
    return {name: Leaf("$tensor", name) for name, *_ in checkpoint.tensors}


def part_of(
    checkpoint: _native.Checkpoint | Foreign,
    path: str,
    prefix: str | None,
    names: list[str] | None = None,
) -> dict[Any, Any]:
    """Return the skeleton of the leaves below a prefix, or of the leaves with these names.

    Parses only names near the selected ones. If one is missing, it parses all names, so that the
    error can suggest similar ones.

    Raises:
        KeyMismatchError: the checkpoint has no such names.
    """

    def select(skeleton: dict[Any, Any]) -> dict[Any, Any]:
        if names is None:
            return by_prefix(skeleton, prefix or "", path, checkpoint.dropped)
        return by_keys(skeleton, names, path, checkpoint.dropped)

    if isinstance(checkpoint, Foreign):
        return select(checkpoint.tree_of(prefix, names))
    if checkpoint.kind != "ringstow":
        return select(skeleton_of(checkpoint, path))
    part = _skeleton.parse(checkpoint.part_of_state(prefix, names), path)
    if part:
        with contextlib.suppress(KeyMismatchError):
            return select(part)
    return select(_skeleton.parse(checkpoint.state, path))


def check_cut(
    rename: Rename, part: dict[Any, Any], checkpoint: _native.Checkpoint | Foreign, path: str
) -> None:
    """Refuse a selection that has some of the tensors that ``rename`` joins, and lacks others.

    Raises:
        KeyMismatchError: names those that it lacks.
    """

    def joins(skeleton: dict[Any, Any]) -> Iterator[tuple[Hashable, str]]:
        for at, leaf in leaves(skeleton):
            join = rename.join_of(steps_of(at)) if isinstance(leaf, Leaf) else None
            if join is not None:
                yield join, flat_name(at)

    names: dict[Hashable, set[str]] = {}
    for join, name in joins(part):
        names.setdefault(join, set()).add(name)
    if not names:
        return
    whole = joins(skeleton_of(checkpoint, path))
    lacking = [name for join, name in whole if join in names and name not in names[join]]
    if lacking:
        raise KeyMismatchError(
            f"{path}: prefix= or keys= selects a part of the tensors that rename= joins; "
            f"{listed('left out', lacking)}. Select all of a joined tensor, or load these without "
            "its entry in rename=",
            path=path,
            missing=lacking,
        )


def tell_idle(rename: Rename, path: str) -> None:
    """Warn of entries of ``rename`` that should join or split, and have found no tensor."""
    idle = rename.idle()
    if idle:
        _log.warning("%s: %s", path, listed("entries of rename= that match no tensor", idle))


class Names(NamedTuple):
    """The part of a checkpoint to load, and how to rename it for the state dict."""

    prefix: str | None = None
    rename: Given | None = None

    def check(self) -> None:
        """Raise TypeError or ValueError if prefix, keys or rename are invalid."""
        if not isinstance(self.prefix, str | None):
            raise TypeError(f"prefix is one name, not {self.prefix!r}")
        if self.rename is not None:
            Rename(self.rename)

    def shown(self) -> list[str]:
        """Return the arguments that the caller has given."""
        return [f"{name}={one!r}" for name, one in self._asdict().items() if one is not None]

    def skeleton(self, checkpoint: _native.Checkpoint | Foreign, path: str) -> dict[Any, Any]:
        """Return the skeleton of the part.

        Raises:
            KeyMismatchError: there is no such part, or it is one value.
        """
        if not self.prefix:
            return skeleton_of(checkpoint, path)
        part: dict[Any, Any] | None = below(part_of(checkpoint, path, self.prefix), self.prefix)
        if part is None:
            raise KeyMismatchError(
                f"{path} has one value at {self.prefix!r}, and prefix= names a part: "
                f"ringstow.load(path, keys=[{self.prefix!r}]) loads it",
                path=path,
                missing=[self.prefix],
            )
        return part


ALL = Names()
