"""Lets bitsandbytes' layers load what their own ``state_dict`` returns.

``Linear4bit.state_dict`` has entries beside the codes, such as ``weight.absmax``; its
``load_state_dict`` refuses them. Under FSDP2, which shards the codes, ``state_dict`` lacks them.
``Linear8bitLt`` refuses its scales after its first forward pass.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ringstow._core._errors import InvalidStateError, UnsupportedError
from ringstow._state.objects._detection import is_a
from ringstow._state.tensors import _bitsandbytes
from ringstow._state.tensors._optional_packages import imported
from ringstow._state.tensors._shards import is_sharded
from ringstow._state.tree._select import listed
from ringstow._state.tree._walk import Path

if TYPE_CHECKING:
    import torch

_TAKES_STATE = "_ringstow_takes_state"


def is_packed(name: object) -> bool:
    """Return whether an entry has the values of a quantization as JSON, which has any length."""
    return type(name) is str and _bitsandbytes.PACKED in f".{name}"


def weight_of(name: str) -> str:
    """Return the name of the weight that has such an entry."""
    return f".{name}".rpartition(_bitsandbytes.PACKED)[0][1:]


def has_4bit(module: torch.nn.Module) -> bool:
    """Return whether a module has a 4-bit layer."""
    return imported("bitsandbytes") is not None and any(map(_is_4bit, module.modules()))


def _is_4bit(layer: object) -> bool:
    return is_a(layer, "bitsandbytes.nn", "Linear4bit")


def let_load(module: torch.nn.Module) -> None:
    """Let a module's layers load what their own ``state_dict`` returns, from now on."""
    for layer, hook, added in _layers(module):
        layer.register_load_state_dict_pre_hook(hook)
        layer.register_state_dict_post_hook(added)
        setattr(layer, _TAKES_STATE, True)


@contextlib.contextmanager
def saving(module: torch.nn.Module) -> Iterator[None]:
    """Let a module's ``state_dict`` have all that its layers need, within the block."""
    with _hooked(layer.register_state_dict_post_hook(added) for layer, _, added in _layers(module)):
        yield


@contextlib.contextmanager
def loading(module: torch.nn.Module) -> Iterator[None]:
    """Let a module's layers load what their own ``state_dict`` returns, within the block."""
    with _hooked(
        layer.register_load_state_dict_pre_hook(hook) for layer, hook, _ in _layers(module)
    ):
        yield


class Codes:
    """Sharded tensors of a state that may be the codes of 4-bit layers, to refuse codes alone.

    FSDP2 makes plain DTensors of codes, without a mark. So each tensor of the shape of codes is
    compared with the layers of this process: no tensor of another shape costs anything.
    """

    def __init__(self) -> None:
        self.is_on = imported("bitsandbytes") is not None
        """Whether there may be such layers; otherwise note nothing."""
        self._found: list[tuple[str, str, tuple[tuple[int, ...], Any]]] = []

    def note(self, name: str, shape: Any, dtype: Any, *, key: Path = ()) -> None:
        """Note a sharded tensor.

        Args:
            name: its flat name.
            shape: that of the whole tensor.
            dtype: its dtype.
            key: the last step of its path, if `check` needs that.
        """
        if len(shape) == 2 and shape[1] == 1:
            self._found.append((name, str(key[0]) if key else name, (tuple(shape), dtype)))

    def check_tensors(self, tensors: Mapping[str, Any], prefix: str = "") -> None:
        """Refuse such codes among tensors by their flat names, if these have a prefix.

        Raises:
            InvalidStateError: see `check`.
        """
        for name, value in tensors.items():
            if is_sharded(value) and name.startswith(prefix):
                self.note(name, value.size(), value.dtype)
        self.check(lambda name: f"{name}.absmax" in tensors)

    def check(self, has: Callable[[str], bool]) -> None:
        """Refuse codes without scales; ``has`` returns whether there are scales of a name or key.

        Raises:
            InvalidStateError: names them all.
        """
        bare = [(name, codes) for name, key, codes in self._found if not has(key)]
        if not bare:
            return
        kind: Any = getattr(sys.modules.get("bitsandbytes.nn"), "Linear4bit", ())
        # A background save may meet a layer in its forward pass, when it is not sharded.
        weights = {
            (tuple(one.weight.shape), one.weight.dtype)
            for one in gc.get_objects()
            if issubclass(type(one), kind) and _quant_state(one) is not None
        }
        wrong = [name for name, codes in bare if codes in weights]
        if wrong:
            raise InvalidStateError(
                f"{listed('codes of 4-bit layers without their scales (.absmax)', wrong)}: call "
                "ringstow.integrations.bitsandbytes.use(model) first, which adds them to the "
                "model's state_dict()"
            )


@contextlib.contextmanager
def _hooked(registered: Iterable[Any]) -> Iterator[None]:
    handles = list(registered)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _layers(module: torch.nn.Module) -> Iterator[tuple[Any, Any, Any]]:
    """Yield each layer of bitsandbytes that has no hook yet, with its hooks."""
    if imported("bitsandbytes") is None:
        return
    for layer in module.modules():
        if getattr(layer, _TAKES_STATE, False):
            continue
        if _is_4bit(layer):
            yield layer, _take_4bit, _add_4bit
        elif is_a(layer, "bitsandbytes.nn", "Linear8bitLt"):
            yield layer, _take_8bit, _add_nothing


# Hooks, which torch calls before a layer loads its entries, and after it has stored them; functions
# of a module, to be pickled.


def _quant_state(layer: Any) -> Any:
    """Return the scales of a 4-bit layer; None if it is not quantized yet."""
    return getattr(layer.weight, "quant_state", None) or getattr(layer, "quant_state", None)


def _add_4bit(layer: Any, state_dict: dict[str, Any], prefix: str, _metadata: object) -> None:
    """Add the scales that a layer leaves out of its entries, if its weight is a DTensor."""
    name, state = f"{prefix}weight", _quant_state(layer)
    if state is None or name not in state_dict or f"{name}.absmax" in state_dict:
        return
    if _bitsandbytes.is_packed_for_cpu(state):
        raise UnsupportedError(
            f"{name}: a forward pass in eval() has packed its scales for this CPU, and its codes "
            "are sharded: save before such a pass"
        )
    for key, value in state.as_dict(packed=True).items():
        state_dict[f"{name}.{key}"] = value.detach()


def _add_nothing(*_: object) -> None:
    """Leave the entries of a layer as they are."""


def _take_4bit(layer: Any, state_dict: dict[str, Any], prefix: str, *more: Any) -> None:
    """Fill the scales of a layer, and take their entries out of the state."""
    name = f"{prefix}weight"
    entries = [key for key in state_dict if key.startswith(f"{name}.")]
    stats = {key.removeprefix(f"{name}."): state_dict.pop(key) for key in entries}
    problem = ""
    if stats and _quant_state(layer) is None:
        problem = (
            f"{name} is quantized in the state and not here: move the module to its device first, "
            "which quantizes it"
        )
    elif stats and name not in state_dict:
        problem = f"{name} has scales in the state, and no codes: load both"
    elif stats:
        if _bitsandbytes.is_packed_for_cpu(_quant_state(layer)):
            layer.state_dict()  # unpacks it
        if state_dict[name].shape != layer.weight.shape:
            return  # torch refuses the codes
        problem = _bitsandbytes.fill_4bit(_quant_state(layer), stats)
        problem = problem and f"{name} is quantized otherwise: {problem}"
    elif name in state_dict and _quant_state(layer) is not None:
        problem = f"{name} has codes in the state, and no scales ({name}.absmax): load both"
    if problem:
        _refuse(state_dict, name, problem, *more)


def _refuse(state_dict: dict[str, Any], name: str, problem: str, *more: Any) -> None:
    """Note why a weight can't be loaded, and keep torch from copying its codes before it raises."""
    *_, error_msgs = more  # torch's, the last argument of a hook
    error_msgs.append(problem)
    state_dict.pop(name, None)


def _take_8bit(layer: Any, state_dict: dict[str, Any], prefix: str, *more: Any) -> None:
    """Fill the scales of a layer that keeps them beside its weight, and take them out."""
    here = layer.state.SCB
    if here is None or getattr(layer.weight, "SCB", None) is not None:
        return  # its own load does it
    name, scales = f"{prefix}weight", state_dict.pop(f"{prefix}SCB", None)
    if (scales is None) != (name not in state_dict):
        problem = f"{name} has only one of codes and scales ({prefix}SCB) in the state: load both"
        _refuse(state_dict, name, problem, *more)
    elif scales is not None and scales.shape != here.shape:
        shown = [list(one.shape) for one in (here, scales)]
        problem = f"{prefix}SCB has the shape {shown[0]} here and {shown[1]} in the state"
        _refuse(state_dict, name, problem, *more)
    elif scales is not None and state_dict[name].shape == layer.weight.shape:
        here.copy_(scales)
