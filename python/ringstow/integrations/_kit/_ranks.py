"""What the ranks of an adapter do together: agree, save, load. Needs torch 2.6 or newer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ringstow._manager import _many_ranks
from ringstow.dcp import StorageReader
from ringstow.distributed._load import fill

if TYPE_CHECKING:
    from ringstow._core._config import Config
    from ringstow._state.tree._mismatch import Call


class Ranks(_many_ranks.Ranks):
    """All ranks, in a group that training does not use. All of them make it together."""

    def names(self, path: str) -> set[str]:
        """Return the names of all values in a checkpoint of ringstow's, as the first rank sees it.

        Raises:
            Exception: what is wrong with the checkpoint, on all ranks.
        """
        return self.from_first(lambda: names_in(path, self._config))

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
            group=self.group,
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
