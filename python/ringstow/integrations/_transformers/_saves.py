"""A Trainer's saves in the background: a hidden directory that gets its name once it is whole.

The Trainer takes every ``checkpoint-N`` for a complete checkpoint. So a save goes to
``.ringstow-checkpoint-N`` beside it, and its last step is one rename. A removal begins with a
rename to a hidden name. What a killed process leaves under hidden names is removed by the next
save.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ringstow import _native
from ringstow._config import Config
from ringstow._errors import InvalidStateError
from ringstow._guard import Staging
from ringstow._handle import SaveHandle
from ringstow._save import save_async
from ringstow.integrations._transformers import _weights

_HIDDEN = ".ringstow-"
# Where two names cannot be swapped, the older checkpoint has this one between two renames.
_REPLACED = f"{_HIDDEN}replaced-"
_NO_SWAP = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)

_log = logging.getLogger("ringstow")


class Saves:
    """The saves of one Trainer, one at a time.

    Args:
        config: ringstow's settings; None means the defaults.
        staging: how a background save keeps the values of the call: as in `ringstow.save_async`.

    Raises:
        InvalidStateError: the settings stripe checkpoints: they could not be renamed.
    """

    def __init__(self, *, config: Config | None, staging: Staging) -> None:
        if (Config() if config is None else config).stripe:
            raise InvalidStateError(
                "a Trainer's checkpoints cannot be striped: they get their name by a rename, and "
                "from_pretrained opens one directory. Give a config with stripe=[]"
            )
        self._config = config
        self._staging: Staging = staging
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="ringstow-transformers")
        self._in_flight: Future[None] | None = None

    def wait(self) -> None:
        """Wait until the save in flight has its name.

        Raises:
            Exception: what that save failed of; only the first time.
        """
        if self._in_flight is None:
            return
        try:
            self._in_flight.result()
        finally:
            if self._in_flight.done():  # not after Ctrl-C: the save goes on
                self._in_flight = None

    def start(
        self, state: dict[str, Any], part: str, step: int, stale: Callable[[str], Iterable[str]]
    ) -> None:
        """Start to save a state into a directory that `prepare` made.

        Args:
            state: the weights, and all else below `_weights.TRAINER`.
            part: the directory, with all other files of the checkpoint.
            step: the step of training.
            stale: returns the older checkpoints to remove, given the new one's path, once that is
                complete.
        """
        apart = [_weights.TRAINER] if _weights.TRAINER in state else []
        handle = save_async(
            state, part, step=step, apart=apart, config=self._config, staging=self._staging
        )
        self._in_flight = self._worker.submit(_finish, handle, part, stale)


def prepare(run: str, name: str) -> str:
    """Make the hidden directory for a checkpoint, and remove what killed processes left.

    Args:
        run: the directory of the checkpoints.
        name: the checkpoint's name in it.

    Returns:
        The hidden directory.

    Raises:
        OSError: the system refused.
    """
    os.makedirs(run, exist_ok=True)
    recover(run)
    part = os.path.join(run, f"{_HIDDEN}{name}")
    os.mkdir(part)
    return part


def recover(run: str) -> None:
    """Give a replaced checkpoint its name back if nothing took it; remove other hidden ones."""
    if not os.path.isdir(run):
        return
    for name in os.listdir(run):
        path = os.path.join(run, name)
        if name.startswith(_REPLACED):
            final = os.path.join(run, name.removeprefix(_REPLACED))
            if not os.path.lexists(final):
                os.rename(path, final)
                _native.sync_dir(run)
                continue
        if name.startswith(f"{_HIDDEN}checkpoint-") or name.startswith(_REPLACED):
            shutil.rmtree(path)


def _finish(handle: SaveHandle, part: str, stale: Callable[[str], Iterable[str]]) -> None:
    """Wait for a save's commit, name the directory, and remove older checkpoints."""
    try:
        handle.result()
        _weights.write_index(part)
        _sync(part)
        final = _take_name(part)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    for path in stale(final):
        _remove(path)


def _sync(path: str) -> None:
    """Make all files and names below a directory durable."""
    for folder, _, names in os.walk(path):
        for name in names:
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        _native.sync_dir(folder)


def _take_name(part: str) -> str:
    """Rename a complete directory to its name; one that has the name goes."""
    run, hidden = os.path.split(part)
    final = os.path.join(run, hidden.removeprefix(_HIDDEN))
    if not os.path.lexists(final):
        os.rename(part, final)
        _native.sync_dir(run)
        return final
    old = part
    try:
        _native.swap_names(part, final)
    except OSError as error:
        if error.errno not in _NO_SWAP:
            raise
        old = os.path.join(run, f"{_REPLACED}{os.path.basename(final)}")
        os.rename(final, old)
        os.rename(part, final)
    _native.sync_dir(run)
    shutil.rmtree(old, ignore_errors=True)
    return final


def _remove(path: str) -> None:
    """Remove a checkpoint, so that a kill never leaves half of one under its name."""
    run, name = os.path.split(path)
    hidden = os.path.join(run, f"{_HIDDEN}{name}")
    try:
        os.rename(path, hidden)
        shutil.rmtree(hidden)
    except OSError as error:
        _log.warning("%s is over save_total_limit and could not be removed: %s", path, error)
