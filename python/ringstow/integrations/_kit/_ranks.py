"""Collective operations of an adapter's ranks: agree, save, load. Needs torch 2.6 or newer."""

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
    """All ranks, in a group that training does not use. All ranks create it together."""

    def names(self, path: str) -> set[str]:
        """Return the names of all values in a checkpoint of ringstow's, as the first rank sees it.

        Raises:
            Exception: the checkpoint's error, on all ranks.
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
            state: this rank's state. Nothing changes on any rank unless everything fits.
            path: the checkpoint.
            call: the arguments of the framework's call, for messages.
            strict: require the same keys in the state and the checkpoint.
            allow_pickle: unpickle values, which can run any code; None means the setting of saves.
            ignored: returns whether not to load a name of the checkpoint. None ignores names below
                keys that the state does not have.

        Raises:
            KeyMismatchError: names the keys that do not fit.
            Exception: this rank's own failure, or an error that names another rank's.
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
        Exception: the checkpoint's error.
    """
    reader = StorageReader(path, config=config, allow_pickle=True)
    return set(reader.read_metadata().state_dict_metadata)
