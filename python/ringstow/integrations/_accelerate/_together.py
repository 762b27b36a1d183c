"""What the ranks of an Accelerator do together: look, agree, gather."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar, cast

import torch.distributed as dist

if TYPE_CHECKING:
    from ringstow._config import Config
    from ringstow._guard import Staging
    from ringstow.dcp._ranks import Ranks

_T = TypeVar("_T")
_log = logging.getLogger("ringstow")

# After this time a rank says for whom it waits.
_PATIENCE_S = 60.0


class Together:
    """All ranks, in a group that training does not use. One process needs none."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._writers: Ranks | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The group; all ranks make it together."""
        if self._group is None:
            self._group = cast("dist.ProcessGroup", dist.new_group(backend="gloo"))
        return self._group

    @property
    def is_first(self) -> bool:
        """Whether this rank looks, decides and completes a save."""
        return not _has_ranks() or dist.get_rank() == 0

    def first(self, look: Callable[[], _T]) -> _T:
        """Return what a function returns on rank 0, or raise what it raises there, on all ranks."""
        if not _has_ranks():
            return look()
        from ringstow.dcp._together import from_first

        with _patient():
            return from_first(look, self.group)

    def agree(self, error: BaseException | None) -> None:
        """Raise on all ranks if one has failed."""
        if not _has_ranks():
            if error is not None:
                raise error
            return
        from ringstow.dcp._together import agree

        with _patient():
            agree(error, self.group)

    def each(self, call: Callable[[], _T]) -> _T:
        """Call a function on every rank, and raise on all ranks if it raises on one."""
        result: list[_T] = []
        error: BaseException | None = None
        try:
            result.append(call())
        except Exception as caught:
            error = caught
        self.agree(error)
        return result[0]

    def gathered(self, value: _T) -> list[_T]:
        """Return every rank's value, on all ranks."""
        if not _has_ranks():
            return [value]
        from ringstow.dcp._together import gathered

        return gathered(value, self.group)

    def see(self, path: str) -> None:
        """Wait until all ranks see a checkpoint: a network file system may show it late."""
        if _has_ranks():
            from ringstow.dcp._latest import agree_on

            agree_on(path, self.group)

    def writers(self, config: Config | None, staging: Staging, allow_pickle: bool) -> Ranks:
        """Return what saves shards on all ranks; the same for each save, as it keeps its memory."""
        if self._writers is None:
            from ringstow.dcp._ranks import Ranks

            self._writers = Ranks(config, staging, allow_pickle, self.group)
        return self._writers

    def tidy(self) -> None:
        """Remove what this rank wrote of a save that failed."""
        if self._writers is not None:
            self._writers.close()  # it can save again

    def close(self) -> None:
        """Give up the group, which ends with the ranks."""
        self._group = self._writers = None


def _has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized()


@contextlib.contextmanager
def _patient() -> Iterator[None]:
    """Say that the other ranks are late, if they are."""
    text = (
        f"rank {dist.get_rank()} has waited {_PATIENCE_S:.0f} s for the other ranks: call "
        "save_state, load_state and wait_for_checkpoint on every rank, not on the main process "
        "alone"
    )
    timer = threading.Timer(_PATIENCE_S, _log.warning, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
