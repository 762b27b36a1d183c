"""Lets bitsandbytes' layers load what their own ``state_dict`` returns.

``Linear4bit.state_dict`` has entries beside the codes, such as ``weight.absmax``; its
``load_state_dict`` refuses them. Under FSDP2, which shards the codes, ``state_dict`` lacks them.
``Linear8bitLt`` refuses its scales after its first forward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ringstow._core._errors import UnsupportedError
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
        if is_a(layer, "bitsandbytes.nn", "Linear4bit"):
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
        if strict and name in state_dict and _quant_state(layer) is not None:
            missing_keys.append(f"{name}.absmax")  # codes by themselves are no weights
        return
    if _quant_state(layer) is None:
        error_msgs.append(
            f"{name} is quantized in the state and not here: move the module to its device first, "
            "which quantizes it"
        )
        return
    if _bitsandbytes.is_packed_for_cpu(_quant_state(layer)):
        layer.state_dict()  # unpacks it
    problem = _bitsandbytes.fill_4bit(_quant_state(layer), stats)
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
    if here is None or getattr(layer.weight, "SCB", None) is not None:
        return  # its own load does it
    scales = state_dict.pop(f"{prefix}SCB", None)
    if scales is None:
        return
    if scales.shape == here.shape:
        here.copy_(scales)
    else:
        shown = [list(one.shape) for one in (here, scales)]
        error_msgs.append(f"{prefix}SCB has the shape {shown[0]} here and {shown[1]} in the state")
