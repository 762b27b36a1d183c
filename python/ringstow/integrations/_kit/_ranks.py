"""What the ranks of an adapter do together: agree, save, load. Needs torch 2.6 or newer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch.distributed as dist

from ringstow.dcp import StorageReader, _latest
from ringstow.dcp._together import agree, gathered
from ringstow.distributed import _ranks
from ringstow.distributed._group import end_beside
from ringstow.distributed._load import fill

if TYPE_CHECKING:
    from ringstow._config import Config
    from ringstow._guard import Staging
    from ringstow.tree._mismatch import Call

_T = TypeVar("_T")


class Ranks(_ranks.Ranks):
    """All ranks, in a group that training does not use. All of them make it together."""

    def __init__(
        self,
        config: Config | None = None,
        staging: Staging = "guard",
        allow_pickle: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        # Saves communicate beside it, so it is not left to the default group, which outlives it.
        own = dist.new_group(backend="gloo") if group is None else None
        used = cast("dist.ProcessGroup", group or own)
        super().__init__({}, config, staging, allow_pickle, used)
        self._own = own

    @property
    def group(self) -> dist.ProcessGroup:
        """The group in which they agree; background saves communicate beside it."""
        return self._group

    def close(self) -> None:
        """End the groups; no save is in flight."""
        if self._own is not None:
            end_beside(cast("dist.ProcessGroup", self._own))
        super().close()

    def agree(self, error: BaseException | None) -> None:
        """Raise on all ranks if one has failed."""
        agree(error, self._group)

    def gathered(self, value: _T) -> list[_T]:
        """Return every rank's value, on all ranks."""
        return gathered(value, self._group)

    def see(self, path: str) -> None:
        """Wait until all ranks see a checkpoint: a network file system may show it late."""
        _latest.agree_on(path, self._group)

    def names(self, path: str) -> set[str]:
        """Return the names of all values in a checkpoint of ringstow's, as the first rank sees it.

        Raises:
            Exception: what is wrong with the checkpoint, on all ranks.
        """
        return self.first(lambda: names_in(path, self._config))

    def fill(
        self,
        state: dict[str, Any],
        path: str,
        call: Call,
        *,
        strict: bool = True,
        allow_pickle: bool | None = None,
        ignored: Callable[[str], bool] | None = None,
    ) -> None:
        """Fill a state from a checkpoint of any number of ranks, in the dtypes of the state.

        Args:
            state: this rank's. Nothing changes on any rank unless all fits.
            path: the checkpoint.
            call: what the framework's call takes, for messages.
            strict: as in `ringstow.distributed.load_into`.
            allow_pickle: likewise; None means as for saves.
            ignored: accepts names of the checkpoint that are left there. None leaves what is below
                other keys than the state's.

        Raises:
            KeyMismatchError: names what does not fit.
            Exception: this rank's own failure, or one that names another rank's.
        """
        fill(
            state,
            path,
            call,
            group=self._given,
            strict=strict,
            cast=True,
            allow_pickle=self._allow_pickle if allow_pickle is None else allow_pickle,
            config=self._config,
            ignored=ignored or (lambda name: name.partition(".")[0] not in state),
        )


def names_in(path: str, config: Config | None) -> set[str]:
    """Return the names of all values in a checkpoint of ringstow's.

    Raises:
        Exception: what is wrong with the checkpoint.
    """
    reader = StorageReader(path, config=config, allow_pickle=True)
    return set(reader.read_metadata().state_dict_metadata)
