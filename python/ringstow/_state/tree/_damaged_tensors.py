"""What ``on_corrupt="skip"`` returns, and what it puts in the place of a lost tensor."""

from __future__ import annotations

import collections
from typing import Any


class DamagedTensor:
    """A tensor, array or object that can't be loaded, because bytes of it are damaged.

    ``load(on_corrupt="skip")`` puts one in the place of each in a list, a tuple or a field: these
    can't lack an item. It has none of a tensor's methods, and `save` refuses it.
    """

    __slots__ = ("file", "name", "offset", "why")

    def __init__(self, *, name: str, file: str, offset: int, why: str) -> None:
        self.name = name
        """The name under which it is stored: its path in the state dict, joined by dots."""
        self.file = file
        """The file of its first damage."""
        self.offset = offset
        """Byte offset of that damage."""
        self.why = why
        """What is wrong there."""

    def __repr__(self) -> str:
        return (
            f"DamagedTensor(name={self.name!r}, file={self.file!r}, offset={self.offset}, "
            f"why={self.why!r})"
        )


class Salvaged(dict[Any, Any]):
    """What ``load(on_corrupt="skip")`` returns: a dict, and what is missing in it.

    It saves and loads again as a dict; as an OrderedDict if it has a module's ``_metadata``.
    """

    damaged: tuple[DamagedTensor, ...] = ()
    """What could not be loaded, in the order of the state dict; empty if all is intact."""

    def as_saved(self) -> dict[Any, Any]:
        """Return what a save of this stores."""
        metadata = vars(self).get("_metadata")
        if metadata is None:
            return dict(self)
        state = collections.OrderedDict(self)
        state._metadata = metadata  # type: ignore[attr-defined]
        return state
