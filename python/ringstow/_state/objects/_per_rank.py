"""`PerRank`: a value that differs between ranks."""

from __future__ import annotations

from typing import Any


class PerRank:
    """A value that differs between ranks, such as the position in each rank's data.

    ::

        state = {"model": model, "position": PerRank(position)}

    The checkpoint holds all ranks' values, by rank. A load puts this rank's into ``value``. A
    single process is rank 0.

    Attributes:
        value: this rank's value.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"
