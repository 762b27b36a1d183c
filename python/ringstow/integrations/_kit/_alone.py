"""One process in place of ranks, for frameworks that train with and without ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

if TYPE_CHECKING:
    from ringstow.integrations._kit._ranks import Ranks

_T = TypeVar("_T")


class Alone:
    """Does what `Ranks` does, for one process."""

    is_first = True

    def first(self, look: Callable[[], _T]) -> _T:
        """Return what a function returns."""
        return look()

    each = first

    def agree(self, error: BaseException | None) -> None:
        """Raise an error, if there is one."""
        if error is not None:
            raise error

    def gathered(self, value: _T) -> list[_T]:
        """Return a value."""
        return [value]

    def see(self, path: str) -> None:
        """Do nothing: this process saved it."""

    def close(self) -> None:
        """Do nothing: there is no group."""


def ranks_or_alone(*options: Any) -> Ranks | Alone:
    """Return the ranks, which make this call together, or this process if there are none."""
    if not (dist.is_available() and dist.is_initialized()):
        return Alone()
    from ringstow.integrations._kit._ranks import Ranks  # needs a newer torch than one process

    return Ranks(*options)
