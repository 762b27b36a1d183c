"""The steps in torchtitan's checkpoint folder: which are complete, which are removed, and how.

torchtitan takes every name that contains ``step-N`` for a step, and a step for valid if it has
``.metadata`` or Hugging Face's index. Here the whole name counts, and ringstow's steps are those
with a manifest. A removal takes ``.metadata`` away first: a kill then leaves nothing that either
manager loads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from typing import Literal

from ringstow import _native
from ringstow._core._config import Config
from ringstow._core._errors import Error, NoCheckpointError, NotCommittedError
from ringstow._reading._run_steps import prune, remove
from ringstow.dcp import _mark, _paths

Kind = Literal["ringstow", "torch", "hf"]

_NAME = re.compile(r"step-(0|[1-9][0-9]*)")
_HF_INDEX = "model.safetensors.index.json"
_log = logging.getLogger("ringstow")


class Steps:
    """The steps in a folder, as the rank sees them that looks.

    Args:
        folder: the folder; it need not exist.
        config: ringstow's settings; None means the defaults.
    """

    def __init__(self, folder: str, config: Config | None) -> None:
        self.folder = folder
        self._config = config

    def path(self, step: int) -> str:
        """Return the directory of a step."""
        return os.path.join(self.folder, f"step-{step}")

    def kind(self, step: int) -> Kind | None:
        """Return what a step is; None if it is not complete, or not there."""
        return kind_of(self.path(step))

    def complete(self) -> list[int]:
        """Return the complete steps, oldest first.

        Raises:
            OSError: the folder can't be read.
        """
        return [step for step in self._named() if self.kind(step) is not None]

    def newest(self) -> int | None:
        """Return the newest complete step; None if there is none.

        Raises:
            OSError: as in `complete`.
        """
        return max(self.complete(), default=None)

    def check(self, step: int) -> None:
        """Refuse a step that is not complete.

        Raises:
            NoCheckpointError: names the steps that are.
        """
        if self.kind(step) is None:
            path = self.path(step)
            there = ", ".join(map(str, self.complete())) or "none"
            why = "was not completed" if os.path.isdir(path) else "is not there"
            raise NoCheckpointError(
                f"checkpoint.load_step={step}: {path} {why}; complete steps: {there}", path=path
            )

    def stale(self, keep: int, saving: int) -> list[str]:
        """Return the directories to remove once a step has committed.

        What was not completed goes only if all steps that stay are newer.

        Args:
            keep: how many of the newest steps stay; 0 means all.
            saving: the step that is being saved, which stays.
        """
        if keep == 0:
            return []
        try:
            named, complete = self._named(), {*self.complete(), saving}
            targets = self._link_targets()
        except OSError as error:
            _log.warning("cannot list the steps in %s, and removes none: %s", self.folder, error)
            return []
        stay = {*sorted(complete)[-keep:], saving}
        gone = [n for n in named if n not in stay and (n in complete or n < min(stay))]
        paths = map(self.path, gone)
        return [p for p in paths if not os.path.islink(p) and os.path.realpath(p) not in targets]

    def remove(self, path: str) -> None:
        """Remove a step; log a failure."""
        try:
            if os.path.isdir(path):
                self._remove(path)
        except (OSError, Error) as error:
            _log.warning(
                "%s is over keep_latest_k and could not be removed; the next save tries again: %s",
                path,
                error,
            )

    def _remove(self, path: str) -> None:
        for name in (_mark.NAME, _HF_INDEX):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(path, name))
        _native.sync_dir(path)
        try:
            remove(path, config=self._config)
        except NotCommittedError:  # a killed save or removal left it
            prune(path)
        except NoCheckpointError:  # nothing of it is ringstow's
            pass
        if os.path.isdir(path):  # with files of other programs
            shutil.rmtree(path)

    def _named(self) -> list[int]:
        """Return the numbers of all directories of a step's name, in order."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        found = [int(match[1]) for name in names if (match := _NAME.fullmatch(name))]
        return sorted(n for n in found if os.path.isdir(self.path(n)))

    def _link_targets(self) -> set[str]:
        """Return where the links in the folder lead: somebody relies on it."""
        if not os.path.isdir(self.folder):
            return set()
        with os.scandir(self.folder) as entries:
            return {os.path.realpath(entry.path) for entry in entries if entry.is_symlink()}


def kind_of(path: str) -> Kind | None:
    """Return what kind of a complete checkpoint is in a directory; None if none is."""

    def has(name: str) -> bool:
        return os.path.isfile(os.path.join(path, name))

    if has(_paths.MANIFEST):
        return "ringstow"
    if _mark.is_torchs(os.path.join(path, _mark.NAME)):
        return "torch"
    return "hf" if has(_HF_INDEX) else None
