"""The results of ``on_corrupt="skip"``: `Salvaged`, and `DamagedTensor` for a lost tensor."""

from __future__ import annotations

import collections
from typing import Any


class DamagedTensor:
    """A tensor, array or object that can't be loaded, because its bytes are damaged.

    ``load(on_corrupt="skip")`` puts it in place of a damaged item of a list, a tuple or a field,
    which can't lack an item. It has none of a tensor's methods, and `save` refuses it.
    """

    __slots__ = ("file", "name", "offset", "why")

    def __init__(self, *, name: str, file: str, offset: int, why: str) -> None:
        self.name = name
        """The stored name: the path in the state dict, joined by dots."""
        self.file = file
        """The file of its first damage."""
        self.offset = offset
        """Byte offset of that damage."""
        self.why = why
        """The reason: what is damaged."""

    def __repr__(self) -> str:
        return (
            f"DamagedTensor(name={self.name!r}, file={self.file!r}, offset={self.offset}, "
            f"why={self.why!r})"
        )


class LoadedDict(dict[Any, Any]):
    """A loaded dict that knows more; it is saved as a dict, or as an OrderedDict."""

    def as_saved(self) -> dict[Any, Any]:
        """Return the dict that a save stores: an OrderedDict if it has a module's ``_metadata``."""
        metadata = vars(self).get("_metadata")
        if metadata is None:
            return dict(self)
        state = collections.OrderedDict(self)
        state._metadata = metadata  # type: ignore[attr-defined]
        return state


class Salvaged(LoadedDict):
    """The result of ``load(on_corrupt="skip")``: a dict, and a list of its missing parts.

    It saves and loads again as a dict; as an OrderedDict if it has a module's ``_metadata``.
    """

    damaged: tuple[DamagedTensor, ...] = ()
    """The damaged parts, in the order of the state dict; empty if everything is intact."""
