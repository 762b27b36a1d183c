"""A module's state under names that do not depend on how it is wrapped.

DDP, torch.compile, FSDP1 and activation checkpointing each insert a part into the names of the
wrapped module: ``module.``, ``_orig_mod.``. A checkpoint has the names without these parts, so that
it also fits the same model with other wrappers.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

from ringstow._state.objects import _fsdp, _quantized_layers
from ringstow._state.objects._detection import is_a

if TYPE_CHECKING:
    import torch

INSERTED = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Steps of a name that only a wrapper inserts."""
_DDP = "module"
_METADATA = "_metadata"


def has_any_size(name: str) -> bool:
    """Return whether an entry of a module's state may have another size in a checkpoint."""
    return name.rpartition(".")[2] == "_extra_state" or _quantized_layers.is_packed(name)


class Names:
    """The names of a module's entries without the steps that wrappers insert."""

    def __init__(self, module: torch.nn.Module) -> None:
        wrappers = (
            path
            for path, one in module.named_modules()
            if is_a(one, "torch.nn.parallel", "DistributedDataParallel", "DataParallel")
        )
        self._ddp = {f"{path}.{_DDP}" if path else _DDP for path in wrappers}

    def of(self, raw: str) -> str:
        """Return the name of an entry."""
        steps = raw.split(".")
        if not self._ddp and INSERTED.isdisjoint(steps):
            return raw
        kept = []
        for number, step in enumerate(steps, 1):
            if step not in INSERTED and ".".join(steps[:number]) not in self._ddp:
                kept.append(step)
        return ".".join(kept)


def named_parameters(module: torch.nn.Module) -> dict[int, str]:
    """Return the names of a module's parameters by the ``id`` of each."""
    names = Names(module)
    return {id(one): names.of(raw) for raw, one in module.named_parameters()}


class ModuleState:
    """The state of one module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.is_fsdp = _fsdp.has_fsdp(module)
        """Whether the ranks communicate to make and to load the state."""
        with _quantized_layers.saving(module):
            raw = _fsdp.model_state(module) if self.is_fsdp else module.state_dict()
        self._names = names = Names(module)
        self._raw = {names.of(name): name for name in raw}
        self._metadata = getattr(raw, _METADATA, None)
        self.state: Any = raw
        """The state dict, whose tensors are the module's own."""
        if len(self._raw) < len(raw):  # two entries would have one name
            self._raw = {name: name for name in raw}
        elif any(name != old for name, old in self._raw.items()):
            self.state = _renamed(raw, zip(self._raw, raw.values(), strict=True), names.of)

    def fitting(self, node: Any) -> Any:
        """Return the checkpoint's part for the module, under the names of the state.

        It may have been saved with wrappers, or by an earlier version that kept their parts of
        names.
        """
        if not isinstance(node, dict) or not all(type(key) is str for key in node):
            return node
        best, most = node, _count(self._raw, node)
        for rename in _renames(node):
            if most == len(self._raw):
                break
            renamed = {rename(name): child for name, child in node.items()}
            fitting = _count(self._raw, renamed)
            if len(renamed) == len(node) and fitting > most:
                best, most = _renamed(node, renamed.items(), rename), fitting
        return best

    def load(self) -> None:
        """Load the filled state into the module."""
        state = self.state
        if any(name != raw for name, raw in self._raw.items()):
            state = collections.OrderedDict((raw, state[name]) for name, raw in self._raw.items())
            state._metadata = self._versions()  # type: ignore[attr-defined]
        with _quantized_layers.loading(self._module):
            if self.is_fsdp:
                _fsdp.load_model(self._module, state)
            else:
                self._module.load_state_dict(state)

    def _versions(self) -> Any:
        """Return the ``_metadata`` that was loaded, by the module's own names."""
        if not isinstance(self._metadata, dict):
            return self._metadata
        loaded = getattr(self.state, _METADATA, None) or {}
        return {raw: loaded.get(self._names.of(raw), one) for raw, one in self._metadata.items()}


def _count(names: Iterable[str], node: Collection[Any]) -> int:
    return sum(name in node for name in names)


def _renames(node: Iterable[str]) -> list[Callable[[str], str]]:
    """Return the renames that may turn a checkpoint's names into the module's."""

    def unwrapped(name: str) -> str:
        return ".".join(step for step in name.split(".") if step not in INSERTED)

    def without_ddp(name: str) -> str:
        return unwrapped(name).removeprefix(f"{_DDP}.")

    every = all(unwrapped(name).startswith(f"{_DDP}.") for name in node)
    return [unwrapped, without_ddp] if every else [unwrapped]


def _renamed(state: Any, pairs: Iterable[tuple[str, Any]], rename: Callable[[str], str]) -> Any:
    """Return a state dict of the same kind with other names, also in its ``_metadata``."""
    renamed = collections.OrderedDict(pairs)
    metadata = getattr(state, _METADATA, None)
    if isinstance(metadata, dict):
        renamed._metadata = {rename(name): one for name, one in metadata.items()}  # type: ignore[attr-defined]
    return renamed if type(state) is not dict else dict(renamed)
