"""bitsandbytes' 4-bit and 8-bit parameters, which have no protocol to take them apart."""

from __future__ import annotations

from typing import Any

from ringstow._state.tensors._optional_packages import require

PARAMS_4BIT = "bitsandbytes.nn.modules:Params4bit"
PARAMS_8BIT = "bitsandbytes.nn.modules:Int8Params"

Taken = tuple[dict[str, Any], dict[str, Any]]
"""The inner tensors by name, and the context."""


def take_4bit(tensor: Any) -> Taken | None:
    """Return the parts of a parameter; None if it is not quantized yet."""
    state = getattr(tensor, "quant_state", None)
    if state is None:
        return None
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


def take_8bit(tensor: Any) -> Taken | None:
    """Return the parts of a parameter; None if it is not quantized yet."""
    if getattr(tensor, "SCB", None) is None:
        return None
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


def _plain(tensor: Any) -> Any:
    return tensor.detach()
