"""Gives a skeleton the names that a `Rename` makes, and the structure of a state dict. Pure."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ringstow._core._errors import KeyMismatchError, UnsupportedError
from ringstow._state.tree._named_leaves import Named, Steps, Tensors, steps_of, text_of
from ringstow._state.tree._rename import Rename
from ringstow._state.tree._tensor_views import View
from ringstow._state.tree._walk import Leaf, Path, describe, flat_name, like

_NOTHING: Any = object()
_SEQUENCES = (list, tuple)


def renamed_tree(
    node: dict[Any, Any],
    rename: Rename,
    tensors: Tensors,
    where: str,
    *,
    keeps_optimizers: bool = False,
) -> dict[Any, Any]:
    """Return a skeleton with new names, for a load without a state dict.

    Each leaf stays in its dict, as long as its new name begins with the dict's. With
    ``keeps_optimizers``, an optimizer's state is not joined or split.

    Raises:
        KeyMismatchError: two names are equal after the renaming; or tensors to join are missing.
        UnsupportedError: the rename would join or split an optimizer's state.
    """
    leaves: list[Named] = []
    dicts: dict[Path, dict[Any, Any]] = {(): node}
    _flatten(node, (), leaves, dicts, tensors, may_join=rename.joins)
    if rename.joins and not keeps_optimizers:
        _refuse_optimizers(leaves, rename, where)
    made: dict[Any, Any] = like(node, ())
    placed: dict[int, dict[Steps, Path]] = {}
    for steps, path, leaf, _ in rename.apply(leaves, tensors, where):
        held = made
        base: Steps = ()
        for number, key in enumerate(path[:-1], 1):
            at = rename.there(steps_of(path[:number]))
            if len(at) <= len(base) or at[: len(base)] != base or steps[: len(at)] != at:
                continue
            if len(at) >= len(steps):
                break
            child = _key(key, at[len(base) :])
            held, base = held.setdefault(child, like(dicts[path[:number]], ())), at
        if isinstance(leaf, View):
            leaf = tensors.leaf(text_of(steps), leaf)
        names = placed.setdefault(id(held), {})
        if steps in names:
            raise _refusal((names[steps], path), "the checkpoint", where)
        names[steps] = path
        held[_key(path[-1], steps[len(base) :])] = leaf
    return made


def _flatten(
    node: dict[Any, Any],
    path: Path,
    leaves: list[Named],
    dicts: dict[Path, dict[Any, Any]],
    tensors: Tensors,
    *,
    may_join: bool,
) -> None:
    """List the leaves and dicts of a skeleton; those of an optimizer's state may not join."""
    may_join = may_join and not tensors.is_optimizer(node)
    for key, child in node.items():
        at = (*path, key)
        if isinstance(child, dict) and child:
            dicts[at] = child
            _flatten(child, at, leaves, dicts, tensors, may_join=may_join)
        else:
            leaves.append(Named(steps_of(at), at, child, may_join))


def cannot_follow(name: str, where: str) -> UnsupportedError:
    """Return the error for an optimizer here whose parameters, or their states, are joined."""
    return UnsupportedError(
        f"{where}: rename= joins or splits {name}, and an optimizer's state cannot follow: load "
        "the model alone, without the optimizer in the state dict, by strict=False"
    )


def _refuse_optimizers(leaves: list[Named], rename: Rename, where: str) -> None:
    """Refuse to join or split an optimizer's state; say which part is without it.

    Raises:
        UnsupportedError: the rename would do so.
    """

    def first(*, may_join: bool) -> Named | None:
        alike = (one for one in leaves if one.may_join == may_join and isinstance(one.node, Leaf))
        return next((one for one in alike if rename.takes(one.steps)), None)

    state = first(may_join=False)
    if state is None:
        return
    other = first(may_join=True)
    model = () if other is None else other.path
    same = next((n for n, (a, b) in enumerate(zip(model, state.path, strict=False)) if a != b), 0)
    part = flat_name(model[: same + 1]) or "model"
    raise UnsupportedError(
        f"{where}: rename= joins or splits {text_of(state.steps)}, and an optimizer's state cannot "
        f"follow: load the model alone, by ringstow.load({where!r}, prefix={part!r}, rename=...)"
    )


def _key(key: Any, steps: Steps) -> Any:
    """Return the key of a dict for these steps: as it was, if they are its own."""
    return key if steps_of((key,)) == steps else text_of(steps)


def _refusal(paths: Iterable[Path], side: str, where: str) -> KeyMismatchError:
    return two_of_one_name(map(describe, paths), side, where)


def two_of_one_name(found: Iterable[str], side: str, where: str) -> KeyMismatchError:
    """Return the error of a rename that makes one name of these."""
    names = " and ".join(found)
    return KeyMismatchError(
        f"{where}: after rename= two names of {side} are one: {names}. Map longer runs of steps, "
        "such as 'model.module' in place of 'module'",
        path=where,
    )


class Fitting:
    """Gives a skeleton the structure of a state dict, by their names after a `Rename`."""

    def __init__(
        self, rename: Rename, key_of: Callable[[Any, Path], Any], where: str, tensors: Tensors
    ) -> None:
        """Prepare; ``key_of`` returns the key that a key of the skeleton stands for."""
        self._rename = rename
        self._key_of = key_of
        self._where = where
        self._tensors = tensors
        self.left: list[tuple[Path, Any]] = []
        """The checkpoint's leaves that have no place in the state dict."""

    def fit(self, here: dict[Any, Any], node: Any, path: Path = ()) -> Any:
        """Return a skeleton whose dicts have the keys of the state dict's.

        Raises:
            KeyMismatchError: two names of one side are equal after the renaming; or tensors to join
                are missing.
            UnsupportedError: the rename would join or split the state of an optimizer here.
        """
        if not isinstance(node, dict):
            return node
        leaves: list[Named] = []
        groups: dict[Steps, list[tuple[Path, Any]]] = {}
        joins = self._rename.joins
        ours = {*self._optimizers(here, path, len(path))} if joins else set()
        self._index(node, path, len(path), leaves, groups, ours, may_join=joins)
        found: dict[Steps, tuple[Path, Any]] = {}
        for steps, at, node, _ in self._rename.apply(leaves, self._tensors, self._where):
            if isinstance(node, View):
                at, node = steps, self._tensors.leaf(text_of(steps), node)
            if steps in found:
                raise _refusal((found[steps][0], at), "the checkpoint", self._where)
            found[steps] = at, node
        taken: dict[Steps, Path] = {}
        fitted = self._dict(here, path, len(path), (found, groups, taken))
        for steps, (at, leaf) in found.items():
            if steps not in taken:
                self.left.append((at, leaf))
        return fitted

    def _index(
        self,
        node: dict[Any, Any],
        path: Path,
        root: int,
        leaves: list[Named],
        groups: dict[Steps, list[tuple[Path, Any]]],
        ours: set[Steps],
        *,
        may_join: bool,
    ) -> None:
        """List the leaves and dicts of a skeleton.

        An optimizer's state is not joined. That is an error if the optimizer is among ``ours``.
        """
        is_own = may_join and self._tensors.is_optimizer(node)
        is_wanted = is_own and self._rename.there(steps_of(path[root:])) in ours
        may_join = may_join and not is_own
        begin = len(leaves)
        for key, child in node.items():
            at = (*path, key if type(key) is str else self._key_of(key, path))
            steps = steps_of(at[root:])
            if isinstance(child, dict):
                groups.setdefault(self._rename.there(steps), []).append((at, child))
                self._index(child, at, root, leaves, groups, ours, may_join=may_join)
            else:
                leaves.append(Named(steps, at, child, may_join))
        for one in leaves[begin:] if is_wanted else ():
            if isinstance(one.node, Leaf) and self._rename.takes(one.steps):
                raise cannot_follow(text_of(one.steps), self._where)

    def _optimizers(self, here: dict[Any, Any], path: Path, root: int) -> Iterator[Steps]:
        """Yield the mapped names of the optimizers' state dicts of the state dict."""
        if self._tensors.is_optimizer(here):
            yield self._rename.here(steps_of(path[root:]))
        for key, value in here.items():
            if isinstance(value, dict):
                yield from self._optimizers(value, (*path, key), root)

    def _dict(self, here: dict[Any, Any], path: Path, root: int, names: Any) -> dict[Any, Any]:
        fitted: dict[Any, Any] = {}
        for key, value in here.items():
            node = self._node(value, (*path, key), root, names)
            if node is not _NOTHING:
                fitted[key] = node
        return fitted

    def _node(self, value: Any, path: Path, root: int, names: Any) -> Any:
        found, groups, taken = names
        if isinstance(value, dict) and value and type(value) is not collections.Counter:
            return self._dict(value, path, root, names)
        steps = self._rename.here(steps_of(path[root:]))
        if steps in found:
            if steps in taken:
                raise _refusal((taken[steps], path), "the state dict", self._where)
            taken[steps] = path
            return self._item(value, found[steps][1], path)
        if steps not in groups:
            return _NOTHING
        # An empty dict, or not a dict here: use the checkpoint's dict.
        (at, node), *_ = groups[steps]
        taken |= {one: path for one, (other, _) in found.items() if other[: len(at)] == at}
        return node

    def _item(self, value: Any, node: Any, path: Path) -> Any:
        """Return the node of a value; its lists may hold state dicts."""
        if type(value) not in _SEQUENCES or type(node) is not type(value):
            return node
        items = list(node)
        for number, (one, item) in enumerate(zip(value, node, strict=False)):
            at = (*path, number)
            is_dict = isinstance(one, dict) and one
            items[number] = self.fit(one, item, at) if is_dict else self._item(one, item, at)
        return type(node)(items)
