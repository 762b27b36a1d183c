"""What all ranks of a run do together: agree, save, load."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_by_dcp

from ringstow._errors import Error
from ringstow.integrations import _named
from ringstow.integrations._kit import _ranks

_PART = ".ringstow-export-"


class Ranks(_ranks.Ranks):
    """All ranks, in a group that training does not use. All of them make it together."""

    def load_hf(self, state: dict[str, Any], path: str, reader: Any) -> None:
        """Fill a state by torchtitan's reader of Hugging Face's files.

        Raises:
            Exception: what a rank failed of, on all ranks.
        """
        try:
            load_by_dcp(state, storage_reader=reader, process_group=self.group)
        except CheckpointException as failure:
            raise self._explained(failure, f"{path} could not be loaded.") from failure

    def export(self, write: Callable[[str], object], path: str) -> None:
        """Let all ranks write a checkpoint beside a path, and give it that name once it is durable.

        Raises:
            Exception: what a rank failed of, on all ranks. Nothing is at the path then, or what was
                there before.
        """
        folder, name = os.path.split(path)
        # Without ``step-N``: torchtitan takes every name that contains it for a step.
        part = os.path.join(folder, f"{_PART}{name.replace('-', '_')}")

        def write_durably() -> None:
            try:
                write(part)
            except CheckpointException as failure:
                raise self._explained(failure, f"{path} was not saved.") from failure
            _named.sync(part)

        self.from_first(lambda: _remove_parts(folder))
        try:
            self.each(write_durably)
            self.from_first(lambda: _named.take_name(part, path))
        except BaseException:
            if self.is_first:
                shutil.rmtree(part, ignore_errors=True)
            raise

    def _explained(self, failure: CheckpointException, what: str) -> BaseException:
        """Return this rank's own error, or one that names the first rank that has failed."""
        failures = {rank: error for rank, (error, _) in failure.failures.items()}
        error = failures.get(self.rank)
        if error is None:
            rank, first = min(failures.items())
            error = Error(f"rank {rank} failed: {type(first).__name__}: {first}")
        error.add_note(what)
        return error


def _remove_parts(folder: str) -> None:
    """Remove what killed exports left."""
    for path in glob.iglob(os.path.join(glob.escape(folder), f"{_PART}*")):
        shutil.rmtree(path)
