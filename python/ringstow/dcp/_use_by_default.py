"""Replaces torch's own file system storage with ringstow's, in programs that can't be changed.

Some trainers pass DCP only a path and no storage, or name ``FileSystemWriter`` when they save.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

import torch.distributed.checkpoint as dcp

from ringstow._core._config import Config
from ringstow._state.tree._select import listed
from ringstow.dcp import _drop_in, _drop_in_hf
from ringstow.dcp._drop_in import (
    FileSystemReader,
    FileSystemWriter,
    StockReader,
    StockWriter,
)

_log = logging.getLogger("ringstow")

_PACKAGE = dcp.__name__
_OURS: dict[type, type] = {StockWriter: FileSystemWriter, StockReader: FileSystemReader}
if _drop_in_hf.IS_KNOWN:
    _OURS[_drop_in_hf.StockHfWriter] = _drop_in_hf.HuggingFaceStorageWriter
_STOCK = {ours: stock for stock, ours in _OURS.items()}


class Swap(contextlib.ExitStack):
    """Restores torch's own storage when it is called, or when its ``with`` block ends."""

    def __init__(self, config: Config | None = None, *, allow_pickle: bool = False) -> None:
        super().__init__()
        self._given = config, allow_pickle

    def apply(self) -> None:
        """Install the classes with these arguments."""
        _drop_in.Settings.config, _drop_in.Settings.allow_pickle = self._given

    def __call__(self) -> None:
        """Put torch's own classes back."""
        self.close()


_active: list[Swap] = []
_warned: set[str] = set()


def use_by_default(config: Config | None = None, *, allow_pickle: bool = False) -> Swap:
    """Make DCP save and load with ringstow if a program gives it only a path.

    Replaces ``FileSystemWriter`` and ``FileSystemReader`` with ringstow's in all of
    ``torch.distributed.checkpoint``: for ``dcp.save(state, checkpoint_id=path)`` and similar calls,
    and for programs that look up these names when they save. Modules that have imported the classes
    by name keep torch's; a warning names each. ``HuggingFaceStorageWriter`` becomes `export_hf`.

    The classes take the same arguments as torch's. An argument without effect is logged once; with
    ``_extensions``, torch's own writer saves. Checkpoints by torch's own writer still load.

    ::

        ringstow.dcp.use_by_default()           # for the life of the process

        with ringstow.dcp.use_by_default():     # or for a while
            trainer.fit()

    Args:
        config: the configuration; None means the defaults.
        allow_pickle: pickle and unpickle any object, which can run any code.

    Returns:
        A context manager that undoes it; calling it undoes it too. Of several, the newest that has
        not been undone is in effect.
    """

    def undo() -> None:
        _active.remove(swap)
        if _active:
            _active[-1].apply()
        else:
            _drop_in.Settings.config, _drop_in.Settings.allow_pickle = None, False
            _replace(_STOCK)

    swap = Swap(config, allow_pickle=allow_pickle)
    swap.callback(undo)
    _active.append(swap)
    swap.apply()
    _replace(_OURS)
    _warn_of_others()
    return swap


def _replace(names: dict[type, type]) -> None:
    """Replace each class by another wherever a module of torch's package names it.

    Modules of the package that are imported later take the names from there.
    """
    for module, name, value in _naming(names):
        if _is_dcp(module):
            setattr(sys.modules[module], name, names[value])


def _warn_of_others() -> None:
    """Warn of modules that have imported torch's classes: they still use them."""
    holders = [
        f"{module}.{name}"
        for module, name, _ in _naming(_OURS)
        if not _is_dcp(module) and not module.startswith("ringstow.")
    ]
    kinds: list[type] = []
    for stock in _OURS:
        kinds += stock.__subclasses__()
    derived = [f"{k.__module__}.{k.__qualname__}" for k in kinds if not _is_dcp(k.__module__)]
    new = [name for name in dict.fromkeys(holders + derived) if name not in _warned]
    _warned.update(new)
    if new:
        _log.warning(
            "%s; these still save and load with torch's. Call ringstow.dcp.use_by_default() before "
            "they are imported",
            listed("torch's storage was imported by name, or derived from, in", new),
        )


def _naming(classes: dict[type, type]) -> Iterator[tuple[str, str, type]]:
    """Yield the module, name and value of every global variable that is one of these classes."""
    for module, loaded in list(sys.modules.items()):
        # getattr would load a lazy module.
        for name, value in list(getattr(loaded, "__dict__", {}).items()):
            for kind in classes:
                if value is kind:  # `==` and `isinstance` may run the value's own code
                    yield module, name, kind


def _is_dcp(name: str) -> bool:
    return name == _PACKAGE or name.startswith(f"{_PACKAGE}.")
