"""Tensors of torchao and bitsandbytes, by their types; a seed gives other elements."""

from __future__ import annotations

import bitsandbytes
import torch
import torchao.quantization as quantization
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor
from torchao.optim.subclass_4bit import OptimState4bit
from torchao.optim.subclass_8bit import OptimState8bit
from torchao.optim.subclass_fp8 import OptimStateFp8
from torchao.prototype.dtypes.uintx.uintx_utils import to_uintx
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
from torchao.prototype.quantized_training.bitnet import BitNetTrainingLinearWeight
from torchao.prototype.quantized_training.int8 import Int8QuantizedTrainingLinearWeight
from torchao.prototype.quantized_training.int8_mixed_precision import (
    Int8MixedPrecisionTrainingConfig,
    Int8MixedPrecisionTrainingLinearWeight,
)
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4
from torchao.sparsity.blocksparse import BlockSparseTensor

SHAPE = (64, 64)


def _noise(seed, shape=SHAPE):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _by_config(name):
    def make(seed):
        layer = torch.nn.Linear(*SHAPE, bias=False, dtype=torch.bfloat16)
        layer.weight.data.copy_(_noise(seed))
        model = torch.nn.Sequential(layer)
        quantization.quantize_(model, getattr(quantization, name)())
        return model[0].weight.detach()

    return make


def _optimizer_state(kind):
    def make(seed):
        state = kind.zeros((256, 64))
        state.copy_(_noise(seed, (256, 64)))
        return state

    return make


def _block_sparse(seed):
    return BlockSparseTensor.from_dense(_noise(seed), 32)


def _four_bits(seed):
    torch.manual_seed(seed)
    return bitsandbytes.nn.Linear4bit(*SHAPE, quant_type="nf4").to("cpu").weight


def _eight_bits(seed):
    torch.manual_seed(seed)
    return bitsandbytes.nn.Linear8bitLt(*SHAPE, has_fp16_weights=False).to("cpu").weight


MAKERS = [
    _by_config("Float8WeightOnlyConfig"),
    _by_config("Int8WeightOnlyConfig"),
    _by_config("Int8DynamicActivationInt8WeightConfig"),
    _by_config("Int8DynamicActivationIntxWeightConfig"),
    lambda seed: to_nf4(_noise(seed, (512, 64))),
    lambda seed: MXTensor.to_mx(_noise(seed), torch.float8_e4m3fn, 32),
    lambda seed: MXTensor.to_mx(_noise(seed), torch.float4_e2m1fn_x2, 32),
    lambda seed: NVFP4Tensor.to_nvfp4(_noise(seed).bfloat16()),
    lambda seed: Int8QuantizedTrainingLinearWeight.from_float(_noise(seed)),
    lambda seed: Int8MixedPrecisionTrainingLinearWeight(
        _noise(seed), Int8MixedPrecisionTrainingConfig()
    ),
    lambda seed: BitNetTrainingLinearWeight(_noise(seed)),
    lambda seed: WeightWithDynamicFloat8CastTensor(
        _noise(seed), LinearMMConfig(), torch.float8_e4m3fn
    ),
    lambda seed: hp_tensor_to_float8_dynamic(_noise(seed), torch.float8_e4m3fn, LinearMMConfig()),
    lambda seed: to_uintx((_noise(seed).abs() * 2).clamp(max=7).byte(), torch.uint3, -1),
    _block_sparse,
    *map(_optimizer_state, (OptimState8bit, OptimState4bit, OptimStateFp8)),
    _four_bits,
    _eight_bits,
]


def kind_of(make):
    """Return the library and the name of a tensor's type."""
    kind = type(make(0))
    return f"{kind.__module__.partition('.')[0]} {kind.__qualname__}"


def dense(tensor):
    """Return what a tensor stands for, by its library's own function."""
    if hasattr(tensor, "quant_state"):
        return bitsandbytes.functional.dequantize_4bit(tensor.data, tensor.quant_state)
    if hasattr(tensor, "SCB"):
        return bitsandbytes.functional.int8_vectorwise_dequant(tensor.data, tensor.SCB)
    for name in ("get_original_weight", "to_original_precision"):
        if hasattr(tensor, name):
            return getattr(tensor, name)()
    for name in ("_data", "_tensor"):  # of full precision, quantized in each step
        if hasattr(tensor, name) and getattr(tensor, name).dtype == tensor.dtype:
            return getattr(tensor, name)
    return tensor.dequantize()


def parts_of(tensor):
    """Return all plain tensors that a tensor is made of, by name."""
    if hasattr(tensor, "quant_state"):
        state = tensor.quant_state
        nested = {"nested": state.state2.absmax, "offset": state.offset} if state.nested else {}
        return {"data": tensor.data, "absmax": state.absmax, "code": state.code, **nested}
    if hasattr(tensor, "SCB"):
        return {"data": tensor.data, "SCB": tensor.SCB}
    if not hasattr(tensor, "__tensor_flatten__"):
        return {"": tensor}
    names, context = tensor.__tensor_flatten__()
    inner = {name: parts_of(getattr(tensor, name)) for name in names}
    flat = {f"{name}.{n}": one for name, each in inner.items() for n, one in each.items()}
    return {"context": str(context), **flat}
