"""Finds and removes the steps in torchtitan's checkpoint folder.

torchtitan treats every name that contains ``step-N`` as a step, and a step as valid if it has
``.metadata`` or Hugging Face's index. Here the whole name must match, and ringstow's steps have a
manifest. A removal first deletes ``.metadata``, so that after a kill neither manager loads the
remains.
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
    """The steps in a folder, as this rank sees them.

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
        """Return the kind of a step; None if it is not complete, or missing."""
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
            OSError: the folder can't be read.
        """
        return max(self.complete(), default=None)

    def check(self, step: int) -> None:
        """Refuse a step that is not complete.

        Raises:
            NoCheckpointError: names the complete steps.
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

        An incomplete step is removed only if all steps that stay are newer.

        Args:
            keep: how many of the newest steps stay; 0 means all.
            saving: the step being saved, which stays.
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
        except NotCommittedError:  # leftovers of a killed save or removal
            prune(path)
        except NoCheckpointError:  # it holds nothing of ringstow's
            pass
        if os.path.isdir(path):  # with files of other programs
            shutil.rmtree(path)

    def _named(self) -> list[int]:
        """Return the numbers of all directories with a step's name, in order."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        found = [int(match[1]) for name in names if (match := _NAME.fullmatch(name))]
        return sorted(n for n in found if os.path.isdir(self.path(n)))

    def _link_targets(self) -> set[str]:
        """Return the targets of the links in the folder: the user relies on them."""
        if not os.path.isdir(self.folder):
            return set()
        with os.scandir(self.folder) as entries:
            return {os.path.realpath(entry.path) for entry in entries if entry.is_symlink()}


def kind_of(path: str) -> Kind | None:
    """Return the kind of the complete checkpoint in a directory; None if there is none."""

    def has(name: str) -> bool:
        return os.path.isfile(os.path.join(path, name))

    if has(_paths.MANIFEST):
        return "ringstow"
    if _mark.is_torchs(os.path.join(path, _mark.NAME)):
        return "torch"
    return "hf" if has(_HF_INDEX) else None
