"""Lets bitsandbytes' layers load what their own ``state_dict`` returns.

``Linear4bit.state_dict`` has entries beside the codes, such as ``weight.absmax``; its
``load_state_dict`` refuses them. ``Linear8bitLt`` refuses its scales after its first forward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ringstow._state.objects._detection import is_a
from ringstow._state.tensors import _bitsandbytes
from ringstow._state.tensors._optional_packages import imported

if TYPE_CHECKING:
    import torch

_TAKES_STATE = "_ringstow_takes_state"


def is_packed(name: object) -> bool:
    """Return whether an entry has the values of a quantization as JSON, which has any length."""
    return type(name) is str and ".quant_state.bitsandbytes__" in f".{name}"


def let_load(module: torch.nn.Module) -> None:
    """Let a module's layers load what their own ``state_dict`` returns, from now on."""
    for layer, hook in _layers(module):
        layer.register_load_state_dict_pre_hook(hook)
        setattr(layer, _TAKES_STATE, True)


@contextlib.contextmanager
def loading(module: torch.nn.Module) -> Iterator[None]:
    """Let a module's layers load what their own ``state_dict`` returns, within the block."""
    handles = [layer.register_load_state_dict_pre_hook(hook) for layer, hook in _layers(module)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _layers(module: torch.nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield each layer of bitsandbytes that has no hook yet, with its hook."""
    if imported("bitsandbytes") is None:
        return
    for layer in module.modules():
        if getattr(layer, _TAKES_STATE, False):
            continue
        if is_a(layer, "bitsandbytes.nn", "Linear4bit"):
            yield layer, _take_4bit
        elif is_a(layer, "bitsandbytes.nn", "Linear8bitLt"):
            yield layer, _take_8bit


# Hooks, called by torch before a layer loads its entries; functions of a module, to be pickled.


def _take_4bit(
    layer: Any,
    state_dict: dict[str, Any],
    prefix: str,
    _metadata: object,
    strict: bool,
    missing_keys: list[str],
    _unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Fill the scales of a layer, and take their entries out of the state."""
    name = f"{prefix}weight"
    entries = [key for key in state_dict if key.startswith(f"{name}.")]
    stats = {key.removeprefix(f"{name}."): state_dict.pop(key) for key in entries}
    if not stats:
        if strict and name in state_dict and layer.weight.quant_state is not None:
            missing_keys.append(f"{name}.absmax")  # codes by themselves are no weights
        return
    if layer.weight.quant_state is None:
        error_msgs.append(
            f"{name} is quantized in the state and not here: move the module to its device first, "
            "which quantizes it"
        )
        return
    if _bitsandbytes.is_packed_for_cpu(layer.weight):
        layer.state_dict()  # unpacks it
    problem = _bitsandbytes.fill_4bit(layer.weight, stats)
    if problem:
        error_msgs.append(f"{name} is quantized otherwise: {problem}")


def _take_8bit(
    layer: Any,
    state_dict: dict[str, Any],
    prefix: str,
    _metadata: object,
    _strict: bool,
    _missing_keys: list[str],
    _unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Fill the scales of a layer that keeps them beside its weight, and take them out."""
    here = layer.state.SCB
    if here is None or layer.weight.SCB is not None:
        return  # its own load does it
    scales = state_dict.pop(f"{prefix}SCB", None)
    if scales is None:
        return
    if scales.shape == here.shape:
        here.copy_(scales)
    else:
        shown = [list(one.shape) for one in (here, scales)]
        error_msgs.append(f"{prefix}SCB has the shape {shown[0]} here and {shown[1]} in the state")
