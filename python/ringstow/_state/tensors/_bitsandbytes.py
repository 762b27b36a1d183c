"""bitsandbytes' 4-bit and 8-bit parameters, which have no protocol to take them apart."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from ringstow._core._errors import UnsupportedError
from ringstow._state.tensors._optional_packages import require

PARAMS_4BIT = "bitsandbytes.nn.modules:Params4bit"
PARAMS_8BIT = "bitsandbytes.nn.modules:Int8Params"

PACKED = ".quant_state.bitsandbytes__"
"""Between a weight's name and ``nf4`` or ``fp4``: the entry with its other values, as JSON."""

Taken = tuple[dict[str, Any], dict[str, Any]]
"""The inner tensors by name, and the context."""


def take_4bit(tensor: Any, key: str) -> Taken | None:
    """Return the parts of a parameter; None if it is not quantized yet.

    Raises:
        UnsupportedError: the elements are in an order that only this CPU's kernels read.
    """
    state = getattr(tensor, "quant_state", None)
    if state is None:
        return None
    if is_packed_for_cpu(state):
        raise UnsupportedError(
            f"{key} is a Params4bit that a forward pass has packed for this CPU: save the module, "
            "or its state_dict(), which unpacks it"
        )
    found = state.as_dict()
    tensors = {"data": _plain(tensor), "absmax": found["absmax"], "quant_map": found["quant_map"]}
    context: dict[str, Any] = {
        "quant_type": state.quant_type,
        "blocksize": state.blocksize,
        "dtype": found["dtype"],
        "shape": list(state.shape),
    }
    if state.nested:
        tensors["nested_absmax"] = state.state2.absmax
        tensors["nested_quant_map"] = state.state2.code
        tensors["nested_offset"] = state.offset
        context |= {name: found[name] for name in ("nested_blocksize", "nested_dtype")}
    return tensors, context


def make_4bit(tensors: dict[str, Any], context: dict[str, Any]) -> Any:
    """Return the parameter that is made of the parts."""
    modules = require("bitsandbytes.nn.modules", "a 4-bit parameter")
    stats = {**tensors, **context, "shape": tuple(context["shape"])}
    stats.pop("requires_grad", None)
    data = stats.pop("data")
    if "nested_offset" in stats:
        stats["nested_offset"] = stats["nested_offset"].item()
    return modules.Params4bit.from_prequantized(data, stats, device=data.device)


def is_packed_for_cpu(quant_state: Any) -> bool:
    """Return whether a forward pass has packed a parameter for this CPU's kernels."""
    return bool(getattr(quant_state, "packing_format_for_cpu", False))


def fill_4bit(quant_state: Any, stats: dict[str, Any]) -> str:
    """Fill what a quantized parameter has beside its codes, in place.

    Args:
        quant_state: the parameter's.
        stats: the entries of its layer's ``state_dict`` beside the codes, by bitsandbytes' names.

    Returns:
        Why they do not fit the parameter, which stays as it is then; empty if they do.
    """
    functional = require("bitsandbytes.functional", "a 4-bit parameter")
    here = quant_state
    try:
        there = functional.QuantState.from_dict(dict(stats), device=here.absmax.device)
    except Exception as error:  # bitsandbytes checks little of them
        return f"its entries in the state are not what it writes ({type(error).__name__}: {error})"
    pairs = [("absmax", here, there), ("code", here, there)]
    if here.nested and there.nested:
        pairs += [("absmax", here.state2, there.state2), ("code", here.state2, there.state2)]
        pairs.append(("offset", here, there))
    shown = [
        ", ".join(
            f"{name} {getattr(state, name)}"
            for name in ("shape", "dtype", "quant_type", "blocksize", "nested")
        )
        for state in (here, there)
    ]
    if shown[0] != shown[1]:
        return f"{shown[0]} here, and {shown[1]} in the state"
    for name, one, other in pairs:
        if getattr(one, name).shape != getattr(other, name).shape:
            return f"{name} of other shapes here and in the state"
    for name, one, other in pairs:
        getattr(one, name).copy_(getattr(other, name))
    return ""


def take_8bit(tensor: Any, key: str) -> Taken | None:
    """Return the parts of a parameter; None if it is not quantized yet.

    Raises:
        UnsupportedError: its scales are elsewhere.
    """
    if getattr(tensor, "SCB", None) is None:
        if str(tensor.dtype) != "torch.int8":
            return None
        raise UnsupportedError(
            f"{key} is an Int8Params whose layer has taken its scales, as a forward pass does: "
            "save the module, or its state_dict(), which has them"
        )
    flag = bool(tensor.has_fp16_weights)
    return {"data": _plain(tensor), "SCB": tensor.SCB}, {"has_fp16_weights": flag}


def make_8bit(tensors: dict[str, Any], context: dict[str, Any]) -> Any:
    """Return the parameter that is made of the parts."""
    modules = require("bitsandbytes.nn.modules", "an 8-bit parameter")
    data = tensors["data"]
    return modules.Int8Params(
        data,
        requires_grad=False,
        has_fp16_weights=context["has_fp16_weights"],
        CB=data,
        SCB=tensors["SCB"],
    )


def dense_of_4bit(tensor: Any) -> Any:
    """Return the values of a quantized parameter."""
    functional = require("bitsandbytes.functional", "a 4-bit parameter")
    return functional.dequantize_4bit(_plain(tensor), tensor.quant_state)


def dense_of_8bit(tensor: Any) -> Any:
    """Return the values of a quantized parameter."""
    functional = require("bitsandbytes.functional", "an 8-bit parameter")
    return functional.int8_vectorwise_dequant(_plain(tensor), tensor.SCB)


def parts_in(names: Iterable[str]) -> dict[str, tuple[str, dict[str, str], str]]:
    """Find the quantized weights in the names of a module's state.

    Returns:
        By the name of each weight: the name of its type, the names of its inner tensors by
        their own names, and the name of the tensor with its other values.
    """
    every = set(names)
    found: dict[str, tuple[str, dict[str, str], str]] = {}
    for name in every:
        weight, packed, _ = name.rpartition(PACKED)
        if packed and weight in every:
            stats = {one: f"{weight}.{one}" for one in _STATS if f"{weight}.{one}" in every}
            found[weight] = (PARAMS_4BIT, {"data": weight, **stats}, name)
        start, is_scale, rest = name.rpartition("SCB")
        layer_format = f"{start}weight_format"
        if is_scale and not rest and {f"{start}weight", layer_format} <= every:
            inner = {"data": f"{start}weight", "SCB": name}
            found[f"{start}weight"] = (PARAMS_8BIT, inner, layer_format)
    return found


def entries_in(names: Iterable[str]) -> set[str]:
    """Return the names of all entries of such weights, whose dtypes belong together."""
    found = parts_in(names).values()
    return {one for _, inner, packed in found for one in (*inner.values(), packed)}


_STATS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


def parts_of_state(kind: str, inner: dict[str, Any], packed: Any) -> Taken:
    """Return the parts of a weight by its entries in a module's state; see `parts_in`.

    Raises:
        ValueError: the other values are not what bitsandbytes writes, or a tensor is missing.
    """
    if kind == PARAMS_8BIT:
        if packed.numel() != 1 or packed.item() != 0:
            raise ValueError("its weight_format is not that of rows")
        return inner, {"has_fp16_weights": False}
    try:
        context = json.loads(bytes(packed.tolist()))
    except (TypeError, ValueError):
        raise ValueError("its quant_state is not JSON") from None
    if not isinstance(context, dict) or not _has_values(context):
        raise ValueError("its quant_state is not what bitsandbytes writes")
    is_nested = "nested_offset" in context
    needed = [name for name in _STATS if is_nested or not name.startswith("nested_")]
    if not is_nested and any(name not in needed for name in inner if name != "data"):
        raise ValueError("it has nested scales, and its quant_state no values of them")
    missing = [name for name in needed if name not in inner]
    if missing:
        raise ValueError(f"it has no {' and no '.join(missing)}")
    tensors = {"data": inner["data"], **{name: inner[name] for name in needed}}
    if is_nested:
        import torch

        offset = float(context.pop("nested_offset"))
        tensors["nested_offset"] = torch.tensor(offset, device="cpu")
    return tensors, context


def _has_values(context: dict[str, Any]) -> bool:
    types: dict[str, Any] = {"quant_type": str, "blocksize": int, "dtype": str, "shape": list}
    nested = {"nested_offset": (int, float), "nested_blocksize": int, "nested_dtype": str}
    if not nested.keys().isdisjoint(context):
        types |= nested
    return (
        all(isinstance(context.get(name), kind) for name, kind in types.items())
        and bool(context["shape"])
        and all(type(size) is int and size >= 0 for size in context["shape"])
    )


def _plain(tensor: Any) -> Any:
    return tensor.detach()
