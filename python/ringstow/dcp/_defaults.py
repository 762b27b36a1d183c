"""Putting ringstow in the place of torch's own file system storage, for programs that name that.

Some trainers pass no storage to DCP but a path only, or name ``FileSystemWriter`` when they save.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from types import TracebackType

import torch.distributed.checkpoint as dcp

from ringstow._config import Config
from ringstow.dcp import _stock
from ringstow.dcp._stock import FileSystemReader, FileSystemWriter, StockReader, StockWriter
from ringstow.tree._select import listed

_log = logging.getLogger("ringstow")

_PACKAGE = dcp.__name__
_OURS: dict[type, type] = {StockWriter: FileSystemWriter, StockReader: FileSystemReader}
_STOCK = {ours: stock for stock, ours in _OURS.items()}


class Swap:
    """Torch's storage is ringstow's until this is called, or left as a context manager."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo = undo

    def __call__(self) -> None:
        """Put torch's own classes back."""
        self._undo()

    def __enter__(self) -> Swap:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo()


_active: list[Swap] = []
_told: set[str] = set()


def use_by_default(config: Config | None = None, *, allow_pickle: bool = False) -> Swap:
    """Make DCP save and load with ringstow where a program gives it a path only.

    ``FileSystemWriter`` and ``FileSystemReader`` are ringstow's from then on in all of
    ``torch.distributed.checkpoint``: for ``dcp.save(state, checkpoint_id=path)`` and its like, and
    for programs that look these names up there when they save. Modules that imported the classes by
    name before keep torch's: each of them is logged as a warning.

    The classes take the arguments of torch's. What has no effect here is logged, once; with
    ``_extensions``, torch's own writer saves. Checkpoints that torch's own writer wrote can still
    be loaded.

    ::

        ringstow.dcp.use_by_default()           # for the life of the process

        with ringstow.dcp.use_by_default():     # or for a while
            trainer.fit()

    Args:
        config: the knobs; None means the defaults.
        allow_pickle: as in `StorageWriter` and `StorageReader`.

    Returns:
        What undoes it: a context manager that may also be called.
    """
    before = (_stock.Settings.config, _stock.Settings.allow_pickle)

    def undo() -> None:
        if swap not in _active:
            return
        _active.remove(swap)
        _stock.Settings.config, _stock.Settings.allow_pickle = before
        if not _active:
            _replace(_STOCK)

    swap = Swap(undo)
    _active.append(swap)
    _stock.Settings.config, _stock.Settings.allow_pickle = config, allow_pickle
    _replace(_OURS)
    _warn_of_others()
    return swap


def _replace(names: dict[type, type]) -> None:
    """Put one set of classes in the place of another, wherever torch's package names them.

    A module of the package that is imported later takes them from there.
    """
    for module, name, value in _naming(names):
        if _is_dcp(module):
            setattr(sys.modules[module], name, names[value])


def _warn_of_others() -> None:
    """Tell which modules hold torch's classes under names of their own: they go on to use them."""
    holders = [
        f"{module}.{name}"
        for module, name, _ in _naming(_OURS)
        if not _is_dcp(module) and not module.startswith("ringstow.")
    ]
    kinds: list[type] = [*StockWriter.__subclasses__(), *StockReader.__subclasses__()]
    derived = [f"{k.__module__}.{k.__qualname__}" for k in kinds if not _is_dcp(k.__module__)]
    new = [name for name in dict.fromkeys(holders + derived) if name not in _told]
    _told.update(new)
    if new:
        _log.warning(
            "%s; what these save and load is not ringstow's. Call ringstow.dcp.use_by_default() "
            "before they are imported",
            listed("torch's storage was imported by name, or derived from, in", new),
        )


def _naming(classes: dict[type, type]) -> Iterator[tuple[str, str, type]]:
    """Yield the module and the name of every global variable that is one of some classes."""
    for module, loaded in list(sys.modules.items()):
        # Its dict: asking a lazy module for an attribute would load it.
        for name, value in list(getattr(loaded, "__dict__", {}).items()):
            for kind in classes:
                if value is kind:  # `==` and `isinstance` may run the value's own code
                    yield module, name, kind


def _is_dcp(name: str) -> bool:
    return name == _PACKAGE or name.startswith(f"{_PACKAGE}.")
