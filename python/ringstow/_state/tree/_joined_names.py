"""Guesses which tensors of one side are joined or turned in the other, such as stacked experts.

Pure. A guess of joined tensors needs equal dtypes, shapes that add up, and names with the same
steps around.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from ringstow._state.tree._key_maps import Transpose
from ringstow._state.tree._named_leaves import Steps, starred, text_of
from ringstow._state.tree._rename import Rename
from ringstow._state.tree._walk import Path

Kind = tuple[str, tuple[int, ...]]
"""A dtype and a shape."""
Names = dict[Steps, Kind]
_PARTS_MAX = 4


class Join(NamedTuple):
    """Tensors of one side, and the tensor of the other that they are joined in."""

    parts: list[list[Steps]]
    """For each name of a key, its tensors: one, or those of all numbers."""
    whole: Steps
    is_stacked: bool

    def shown(self, *, joins: bool) -> tuple[str, str]:
        """Return the key and the value of the rename that joins, or that splits."""
        names = [self._pattern(part) for part in self.parts]
        ahead = _ahead([*names, self.whole])
        (*texts, whole) = (repr(text_of(starred(one[ahead:]))) for one in (*names, self.whole))
        texts = [text.replace("'", '"') for text in texts]
        whole = whole.replace("'", '"')
        dim = ", dim=1" if self.is_stacked else ""
        if joins:
            to = f"ringstow.Concat({whole}{dim})" if len(texts) > 1 else whole
            return _tuple(texts), f"ringstow.Stack({to})" if self.is_stacked else to
        each = [f"ringstow.Unstack({text})" for text in texts] if self.is_stacked else texts
        return whole, f"ringstow.Split({_tuple(each)}{dim})" if len(each) > 1 else each[0]

    def _pattern(self, part: list[Steps]) -> Steps:
        """Return the name of a part, with a ``*`` for the number that is stacked."""
        if not self.is_stacked:
            return part[0]
        at = _number_at(part[0])
        assert at is not None
        return (*part[0][:at], "*", *part[0][at + 1 :])


def joins(parts: Iterable[tuple[Steps, Any]], wholes: Iterable[tuple[Steps, Any]]) -> list[Join]:
    """Return the tensors that are joined from others.

    Args:
        parts: names and kinds on the side where they are apart.
        wholes: names and kinds on the other side.
    """
    apart, whole = (
        {steps: kind for steps, kind in side if isinstance(kind, tuple) and len(kind) == 2}
        for side in (parts, wholes)
    )
    return [*_stacked(apart, whole), *_concatenated(apart, whole)]


def kinds(
    gaps: dict[Steps, tuple[Path, Any]], kind_of: Callable[[Any], object]
) -> list[tuple[Steps, Any]]:
    """Return names and kinds of what only one side has."""
    return [(steps, kind_of(value)) for steps, (_, value) in gaps.items()]


def turns(turned: Iterable[Steps], others: Iterable[Steps]) -> list[str]:
    """Return the keys of a rename that takes all of these names and none of the others.

    A key is the longest ending that many of them have. Empty: no keys do that.
    """
    others = set(others)
    alike = {starred(steps) for steps in others}
    left = dict.fromkeys(turned)
    found: list[str] = []
    while left:
        first = next(iter(left))
        name = starred(first)
        endings = (name[at:] for at in reversed(range(len(name))))
        ending = next((one for one in endings if _takes_none(one, alike)), None)
        if ending is None:
            if not all(isinstance(step, str) for step in first) or not _takes_none(first, others):
                return []
            ending, group = first, [first]
        else:
            size = len(ending)
            group = [steps for steps in left if starred(steps)[-size:] == ending]
            names = [starred(steps) for steps in group]
            while size < len(name) and all(one[-size - 1 :] == name[-size - 1 :] for one in names):
                size += 1
            ending = name[-size:]
        found.append(text_of(ending))
        for steps in group:
            del left[steps]
    return found


def _takes_none(key: Steps, names: Iterable[Steps]) -> bool:
    """Return whether a key of a rename is in none of the names."""
    text = text_of(key)
    rename = Rename({text: Transpose(text)})
    return not any(map(rename.takes, names))


def _stacked(apart: Names, whole: Names) -> Iterator[Join]:
    groups: dict[tuple[Steps, Steps], dict[int, Steps]] = {}
    for steps in apart:
        at = _number_at(steps)
        if at is not None:
            group = groups.setdefault((steps[:at], steps[at + 1 :]), {})
            group[int(str(steps[at]))] = steps
    # Of each place, the groups of one kind, and how many numbers they have.
    places: dict[tuple[Steps, Kind, int], list[list[Steps]]] = {}
    for (ahead, _), group in groups.items():
        names = [group[number] for number in sorted(group)]
        alike = {apart[steps] for steps in names}
        if len(alike) == 1 and len(group) > 1 and sorted(group) == list(range(len(group))):
            places.setdefault((ahead, alike.pop(), len(group)), []).append(names)
    below: dict[Steps, list[Steps]] = {ahead: [] for ahead, *_ in places}
    for one in whole:
        for at in range(len(one)):
            if one[:at] in below:
                below[one[:at]].append(one)
    for (ahead, (dtype, shape), count), lots in places.items():
        fits = below[ahead]
        for lot in lots[:]:
            alike_names = [one for one in fits if whole[one] == (dtype, (count, *shape))]
            found = _of_name(alike_names, lot[0])
            if found is not None:
                lots.remove(lot)
                yield Join([lot], found, is_stacked=True)
        if 1 < len(lots) <= _PARTS_MAX and shape:
            joined = (dtype, (count, shape[0] * len(lots), *shape[1:]))
            found = _of_name([one for one in fits if whole[one] == joined], ())
            if found is not None:
                yield Join(lots, found, is_stacked=True)


def _of_name(names: list[Steps], like: Steps) -> Steps | None:
    """Return the only name, or the only one that ends in a step of another."""
    if len(names) > 1:
        names = [one for one in names if one[-1] in like]
    return names[0] if len(names) == 1 else None


def _concatenated(apart: Names, whole: Names) -> Iterator[Join]:
    siblings: dict[tuple[Steps, Steps], list[Steps]] = {}
    for steps, at in itertools.chain.from_iterable(
        ((steps, at) for at in range(len(steps))) for steps in apart
    ):
        siblings.setdefault((steps[:at], steps[at + 1 :]), []).append(steps)
    for name, (dtype, shape) in whole.items():
        for at in reversed(range(len(name))):
            found = siblings.get((name[:at], name[at + 1 :]), [])
            if 2 <= len(found) <= _PARTS_MAX and shape and not _are_numbers(found, at):
                rows = [apart[one] for one in found]
                sizes = [one[1][0] if one[1] else 0 for one in rows]
                is_alike = {(one[0], one[1][1:]) for one in rows} == {(dtype, shape[1:])}
                if is_alike and sum(sizes) == shape[0]:
                    yield Join([[one] for one in found], name, is_stacked=False)
                    break


def _are_numbers(names: list[Steps], at: int) -> bool:
    return all(str(one[at]).isdecimal() for one in names)


def _number_at(steps: Steps) -> int | None:
    """Return where the last number of a name is."""
    return next(
        (at for at in reversed(range(len(steps))) if str(steps[at]).isdecimal()),
        None,
    )


def _ahead(names: list[Steps]) -> int:
    """Return how many steps all names begin with; the last of them stays."""
    at = 0
    while all(at + 1 < len(one) and one[at] == names[0][at] for one in names):
        at += 1
    return max(at - 1, 0)


def _tuple(texts: list[str]) -> str:
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"
