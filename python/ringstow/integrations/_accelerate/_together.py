"""What the ranks of an Accelerator do together: look, agree, gather."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

import torch.distributed as dist

if TYPE_CHECKING:
    from ringstow._config import Config
    from ringstow._guard import Staging
    from ringstow.dcp._ranks import Ranks

_T = TypeVar("_T")


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

        return from_first(look, self.group)

    def agree(self, error: BaseException | None) -> None:
        """Raise on all ranks if one has failed."""
        if not _has_ranks():
            if error is not None:
                raise error
            return
        from ringstow.dcp._together import agree

        agree(error, self.group)

    def each(self, call: Callable[[], _T]) -> _T:
        """Call a function on every rank, and raise on all ranks if it raises on one."""
        if not _has_ranks():
            return call()
        from ringstow.dcp._together import each

        return each(call, self.group)

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
