"""Compares two states, tensor by tensor and bit by bit, one in memory at a time."""

from __future__ import annotations

import collections
import decimal
import io
from collections.abc import Callable
from typing import Any

from ringstow._core._errors import CorruptCheckpointError
from ringstow._foreign._nested_states import is_stored, is_tensor, loaded
from ringstow._state.tensors import _composites, _numpy
from ringstow._state.tensors._memory import LazyTensor
from ringstow._state.tree import _custom_types
from ringstow._state.tree._custom_types import parts
from ringstow._state.tree._refusals import type_name
from ringstow._state.tree._walk import METADATA, Path, describe, metadata_of

# Packages whose types have a reliable `==`. Other values, which were pickled, compare by type.
_PLAIN = (
    "builtins",
    "collections",
    "datetime",
    "decimal",
    "fractions",
    "numpy",
    "pathlib",
    "torch",
    "uuid",
)


class Comparison:
    """Compares the target with the source."""

    def __init__(self, source: str, target: str, compared: Callable[[int], None]) -> None:
        self._source = source
        self._target = target
        self._compared = compared
        self._known: set[tuple[int, int]] = set()

    def check(self, expected: Any, found: Any, path: Path = ()) -> None:
        """Compare two states, or the values at a path in them.

        Raises:
            CorruptCheckpointError: the states differ; names the first difference.
        """
        expected = _composites.as_parts(expected)
        if is_stored(expected) and is_stored(found):
            return self._tensors(expected, found, path)
        if type(expected) is not type(found):
            self._differ(path, f"a {type_name(expected)}", f"a {type_name(found)}")
        if isinstance(expected, dict):
            return self._dicts(expected, found, path)
        if _custom_types.has_fields(expected):
            here, there = dict(parts(expected) or ()), dict(parts(found) or ())
            return self._dicts(here, there, path)
        if type(expected) in (list, tuple, collections.deque):
            if len(expected) != len(found):
                self._differ(path, f"{len(expected)} items", f"{len(found)}")
            for index, (one, other) in enumerate(zip(expected, found, strict=True)):
                self.check(one, other, (*path, index))
        elif not _is_equal(expected, found):
            self._differ(path, f"{expected!r:.80}", f"{found!r:.80}")

    def _dicts(self, expected: dict[Any, Any], found: dict[Any, Any], path: Path) -> None:
        ours, theirs = ({_exact(key): key for key in some} for some in (expected, found))
        # A NaN key does not equal any key: match NaN keys in their order.
        here, there = (
            [key for exact, key in some.items() if exact not in others]
            for some, others in ((ours, theirs), (theirs, ours))
        )
        for key in there[len(here) :]:
            self._differ((*path, key), "not there", "there")
        for number, key in enumerate(here):
            if number >= len(there) or not _is_equal(key, there[number]):
                self._differ((*path, key), "there", "missing")
        names = dict(zip(here, there, strict=True))
        for key, value in expected.items():
            self.check(value, found[names.get(key, key)], (*path, key))
        self.check(metadata_of(expected), metadata_of(found), (*path, METADATA))

    def _tensors(self, expected: Any, found: Any, path: Path) -> None:
        pair = (id(expected), id(found))
        if pair in self._known:  # tied
            return
        one, other = loaded(expected), loaded(found)
        here, there = (f"{t.dtype} {list(t.shape)}" for t in (one, other))
        if type(one) is not type(other) and not (is_tensor(one) and is_tensor(other)):
            self._differ(path, f"a {type_name(one)}", f"a {type_name(other)}")
        if here != there:
            self._differ(path, here, there)
        if not _same_bits(one, other):
            self._differ(path, f"{here} of these bits", "of others")
        # Ids are unique only among objects alive at the same time: lazy tensors are, loaded ones
        # are not.
        if type(expected) is LazyTensor:
            self._known.add(pair)
        self._compared(one.nbytes)

    def _differ(self, path: Path, expected: str, got: str) -> None:
        raise CorruptCheckpointError(
            f"{self._target} is not what {self._source} holds: {describe(path)} is {expected} in "
            f"the source, and {got} in what was written. Nothing was removed; do not use it",
            file=self._target,
            expected=expected,
            got=got,
        )


def _same_bits(one: Any, other: Any) -> bool:
    if _numpy.is_array(one):
        return bool(one.tobytes() == other.tobytes())
    import torch

    flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(flat[0], flat[1])


def _exact(key: Any) -> Any:
    """Return a key that is equal only within one type: 1, True and 1.0 are equal to each other."""
    if isinstance(key, tuple | frozenset):
        items = map(_exact, key)
        return type(key), tuple(items) if isinstance(key, tuple) else frozenset(items)
    if type(key) in (float, complex):  # 0.0 is not -0.0
        return type(key), repr(key) if key == key else id(key)
    return type(key), key


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, io.BytesIO):
        return bool(one.getvalue() == other.getvalue() and one.tell() == other.tell())
    if type(one) is not type(other):
        return False
    if type(one) in (float, complex, decimal.Decimal):  # NaN is NaN, and 0.0 is not -0.0
        return repr(one) == repr(other)
    if _numpy.is_scalar(one):
        return bool(one.dtype == other.dtype and one.tobytes() == other.tobytes())
    if type(one).__module__.partition(".")[0] not in _PLAIN:
        return True
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    if isinstance(one, (set, frozenset)):
        same = {*map(_exact, one)} == {*map(_exact, other)}
        return same or sorted(map(repr, one)) == sorted(map(repr, other))
    return bool(one == other) or repr(one) == repr(other)
