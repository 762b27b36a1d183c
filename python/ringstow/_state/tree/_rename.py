"""Maps names between a checkpoint and a state dict: prefixes, and renamed parts. Pure."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ringstow._core._arguments import brief
from ringstow._core._errors import KeyMismatchError
from ringstow._state.tree._walk import Path, describe, flat_name

Steps = tuple[object, ...]
"""A path whose text keys are split at their dots: ``{"a.b": {0: x}}`` has ``("a", "b", 0)``."""
_NOTHING: Any = object()
_SEQUENCES = (list, tuple)


def steps_of(path: Path) -> Steps:
    """Return the steps of a path."""
    steps: list[object] = []
    for step in path:
        if isinstance(step, str):
            steps += step.split(".") if "." in step else (step,)
        else:
            steps.append(step)
    return tuple(steps)


def below(node: Any, prefix: str) -> Any:
    """Return the part of a skeleton below a prefix, as if it were the root; None if there is none.

    Keys with dots are cut: ``below({"model": {"module.w": x}}, "model.module")`` is ``{"w": x}``.
    """
    prefix = prefix.removesuffix(".")
    part: dict[Any, Any] = {}
    for key, child in node.items() if isinstance(node, dict) else ():
        step = flat_name((key,))
        if step == prefix:
            return child if isinstance(child, dict) else None
        if step.startswith(f"{prefix}."):
            part[step[len(prefix) + 1 :]] = child
        elif prefix.startswith(f"{step}."):
            part |= below(child, prefix[len(step) + 1 :]) or {}
    return part or None


class Rename:
    """Maps whole parts of the checkpoint's names to names here.

    Parts mapped to nothing are left out of the names on both sides, so that either side may have
    them.
    """

    def __init__(self, mapping: Mapping[str, str]) -> None:
        """Check and store the argument of a load.

        Raises:
            TypeError: ``mapping`` is not a mapping of text to text. ValueError: it maps an empty
                name.
        """
        if not isinstance(mapping, Mapping) or any(
            not isinstance(text, str) for pair in mapping.items() for text in pair
        ):
            raise TypeError(f'rename is a dict such as {{"module": ""}}, not {brief(mapping)}')
        runs = {_run(old): _run(new) for old, new in mapping.items()}
        if () in runs:
            raise ValueError(
                'rename maps steps of the checkpoint\'s names, and "" is none. To leave out a '
                'prefix that only the names here have, map it to "": rename={"module": ""}'
            )
        # The longest first: it is the most specific.
        self._runs = sorted(runs.items(), key=lambda pair: -len(pair[0]))
        self._gone = [(old, new) for old, new in self._runs if not new]

    def there(self, steps: Steps) -> Steps:
        """Return the new name of a name of the checkpoint."""
        return _mapped(steps, self._runs)

    def here(self, steps: Steps) -> Steps:
        """Return the mapped name of a name of the state dict."""
        return _mapped(steps, self._gone)


def _run(text: str) -> Steps:
    return tuple(text.strip(".").split(".")) if text.strip(".") else ()


def _mapped(steps: Steps, runs: list[tuple[Steps, Steps]]) -> Steps:
    if all(old[0] not in steps for old, _ in runs):
        return steps
    mapped: list[object] = []
    at = 0
    while at < len(steps):
        for old, new in runs:
            if steps[at : at + len(old)] == old:
                mapped += new
                at += len(old)
                break
        else:
            mapped.append(steps[at])
            at += 1
    return tuple(mapped) or steps  # a name is never empty


class Fitting:
    """Gives a skeleton the structure of a state dict, by their names after a `Rename`."""

    def __init__(self, rename: Rename, key_of: Callable[[Any, Path], Any], where: str) -> None:
        """Prepare; ``key_of`` returns the key that a key of the skeleton stands for."""
        self._rename = rename
        self._key_of = key_of
        self._where = where
        self.left: list[tuple[Path, Any]] = []
        """The checkpoint's leaves that have no place in the state dict."""

    def fit(self, here: dict[Any, Any], node: Any, path: Path = ()) -> Any:
        """Return a skeleton whose dicts have the keys of the state dict's.

        Raises:
            KeyMismatchError: two names of one side are equal after the renaming.
        """
        if not isinstance(node, dict):
            return node
        found: dict[Steps, tuple[Path, Any]] = {}
        groups: dict[Steps, list[tuple[Path, Any]]] = {}
        self._index(node, path, len(path), found, groups)
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
        found: dict[Steps, tuple[Path, Any]],
        groups: dict[Steps, list[tuple[Path, Any]]],
    ) -> None:
        for key, child in node.items():
            at = (*path, key if type(key) is str else self._key_of(key, path))
            steps = self._rename.there(steps_of(at[root:]))
            if isinstance(child, dict):
                groups.setdefault(steps, []).append((at, child))
                self._index(child, at, root, found, groups)
                continue
            other = found.setdefault(steps, (at, child))[0]
            if other != at:
                self._refuse((other, at), "the checkpoint")

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
                self._refuse((taken[steps], path), "the state dict")
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

    def _refuse(self, paths: Iterable[Path], side: str) -> None:
        names = " and ".join(map(describe, paths))
        raise KeyMismatchError(
            f"{self._where}: after rename= two names of {side} are one: {names}. Map longer runs "
            "of steps, such as 'model.module' in place of 'module'",
            path=self._where,
        )
