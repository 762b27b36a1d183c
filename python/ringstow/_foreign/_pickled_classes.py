"""Protects classes that a pickle names: its BUILD can also set attributes of a class.

The classes are the process's own, so such a pickle could replace their methods permanently.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

_SLOTS = ("__bases__", "__name__", "__qualname__")  # not in a class's dict


class Kept:
    """Records classes before a pickle can change them."""

    def __init__(self) -> None:
        self._noted: dict[int, tuple[Any, dict[str, Any]]] = {}  # by id: hashes may change, too

    def note(self, kind: type) -> None:
        """Record a class, and the members of an enum."""
        for one in _of(kind):
            self._noted.setdefault(id(one), (one, _attributes(one)))

    def restore(self) -> list[str]:
        """Undo changes since the record, and return the names of changed attributes."""
        changed: list[str] = []
        for one, before in self._noted.values():
            now = _attributes(one)
            different = [name for name in {*before, *now} if not _same(name, before, now)]
            changed += [f"{getattr(one, '__name__', one)}.{name}" for name in sorted(different)]
            for name in different:
                if name in before:
                    _set(one, name, before[name])
                else:
                    _set(one, name, None, remove=True)
        return changed


def _of(kind: type) -> Iterator[Any]:
    yield kind
    if issubclass(kind, enum.Enum):
        yield from kind.__members__.values()


def _attributes(one: Any) -> dict[str, Any]:
    slots = {name: getattr(one, name) for name in _SLOTS} if isinstance(one, type) else {}
    return {**vars(one), **slots}


def _same(name: str, before: dict[str, Any], now: dict[str, Any]) -> bool:
    if name in _SLOTS:  # created anew at each access
        return bool(before[name] == now[name])
    return name in before and name in now and before[name] is now[name]


def _set(one: Any, name: str, value: Any, *, remove: bool = False) -> None:
    if isinstance(one, type):  # bypass an enum's metaclass, which refuses
        type.__delattr__(one, name) if remove else type.__setattr__(one, name, value)
    elif remove:
        vars(one).pop(name)
    else:
        vars(one)[name] = value
