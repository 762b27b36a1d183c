"""A value of which each rank has one of its own."""

from __future__ import annotations

from typing import Any


class PerRank:
    """A value of which each rank has one of its own, such as a position in its data.

    ::

        state = {"model": model, "position": PerRank(position)}

    The checkpoint holds those of all ranks, by rank. A load puts this rank's into ``value``. One
    process is rank 0.

    Attributes:
        value: this rank's.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"
