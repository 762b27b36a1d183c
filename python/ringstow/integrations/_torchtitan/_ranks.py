"""Collective operations of a run's ranks: agree, save, load."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_by_dcp

from ringstow._core._errors import Error
from ringstow.integrations import _rename_when_complete
from ringstow.integrations._kit import _ranks

_PART = ".ringstow-export-"


class Ranks(_ranks.Ranks):
    """All ranks, in a group that training does not use. All ranks create it together."""

    def load_hf(self, state: dict[str, Any], path: str, reader: Any) -> None:
        """Fill a state with torchtitan's reader of Hugging Face's files.

        Raises:
            Exception: a rank's failure, on all ranks.
        """
        with self._explaining(f"{path} could not be loaded."):
            load_by_dcp(state, storage_reader=reader, process_group=self.group)

    def export(self, write: Callable[[str], object], path: str) -> None:
        """Write a checkpoint beside a path on all ranks, and rename it once it is durable.

        Raises:
            Exception: a rank's failure, on all ranks. The path is then unchanged.
        """
        folder, name = os.path.split(path)
        # Not ``step-N``: torchtitan treats every name that contains it as a step.
        part = os.path.join(folder, f"{_PART}{name.replace('-', '_')}")

        def write_durably() -> None:
            with self._explaining(f"{path} was not saved."):
                write(part)
            _rename_when_complete.sync(part)

        self.from_first(lambda: _remove_parts(folder))
        with _rename_when_complete.discarding(part, path, removes=self.is_first):
            self.each(write_durably)
            self.from_first(lambda: _rename_when_complete.take_name(part, path))

    @contextlib.contextmanager
    def _explaining(self, what: str) -> Iterator[None]:
        """Raise this rank's own DCP error, or an error that names the first rank that failed."""
        try:
            yield
        except CheckpointException as failure:
            rank, (first, _) = min(failure.failures.items(), key=lambda one: one[0])
            error = Error(f"rank {rank} failed: {type(first).__name__}: {first}")
            own, _ = failure.failures.get(self.rank, (error, None))
            own.add_note(what)
            raise own from failure


def _remove_parts(folder: str) -> None:
    """Remove leftovers of killed exports."""
    for path in glob.iglob(os.path.join(glob.escape(folder), f"{_PART}*")):
        shutil.rmtree(path)
