"""Loads of torch's own checkpoints on several ranks, with the rules of ringstow's loads.

torch's reader and planner unpickle without restriction. Here nothing is unpickled that could run
code, unless the caller allows it.
"""

from __future__ import annotations

import io
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ringstow.dcp._stock import StockReader
from ringstow.dcp._true_paths import set_paths
from ringstow.foreign import _dcp
from ringstow.foreign._pickles import reading, unpickled


class OthersReader(StockReader):
    """torch's reader of its own files, which unpickles plain values alone."""

    def __init__(self, path: str, *, allow_pickle: bool) -> None:
        super().__init__(path)
        self._where = path
        self._allow_pickle = allow_pickle

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the table of contents.

        Raises:
            UnsupportedError: it asks for classes that metadata never needs.
            CorruptCheckpointError: it is damaged.
        """
        found: Metadata = _dcp.metadata_at(self._where, allow_pickle=self._allow_pickle)
        return found

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all that the plan asks for; refuse objects that only pickle can make."""
        set_paths(planner, plan.items)
        with reading(self._where, "its data"):
            if not self._allow_pickle:
                _refuse_objects(planner, self._where)
            return super().read_data(plan, planner)


def _refuse_objects(planner: LoadPlanner, where: str) -> None:
    load_bytes = planner.load_bytes

    def checked(item: ReadItem, value: io.BytesIO) -> None:
        with reading(where, f"the value {item.storage_index.fqn!r}"):
            unpickled(value)
        value.seek(0)
        load_bytes(item, value)

    planner.load_bytes = checked  # type: ignore[method-assign,assignment]
