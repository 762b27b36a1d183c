"""Converts torch tensors to memory and back. torch is imported on demand, never required.

Nothing here imports torch before a checkpoint with tensors is loaded: a value can only be a
tensor if the caller has imported torch already.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from ringstow import _native
from ringstow._core._errors import InvalidStateError, UnsupportedError
from ringstow._state.tensors import _cuda
from ringstow._state.tensors._memory import Address, Memory, Stored, Target, share_elements
from ringstow._state.tensors._optional_packages import imported, require

if TYPE_CHECKING:
    import torch

# torch's name of each dtype that can be saved, and safetensors' name of it. C32 and C128 are not
# in safetensors; the native side stores them as raw bytes.
CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float4_e2m1fn_x2": "F4",
    "complex32": "C32",
    "complex64": "C64",
    "complex128": "C128",
}
NAMES = {code: name for name, code in CODES.items()}
CASTS = ("float32", "bfloat16", "float16")
"""The dtypes that a model's weights can be cast to."""


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether the value is a torch tensor, without importing torch."""
    torch = imported("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_of_torch(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of torch's own class, and none that derives from it."""
    torch = sys.modules["torch"]
    return type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's own name of a dtype: ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str, key: str) -> torch.dtype:
    """Return the dtype with torch's own name; the key is for the message.

    Raises:
        UnsupportedError: this torch has no such dtype.
    """
    torch = require("torch", key)
    dtype = vars(torch).get(name)  # getattr would make torch import modules
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(f"{key}: torch {torch.__version__} has no dtype {name!r}")
    return dtype  # type: ignore[no-any-return]


def dtype_of(code: str, key: str) -> torch.dtype:
    """Return the dtype that safetensors calls ``"F32"``; the key is for the message.

    Raises:
        UnsupportedError: this torch has no such dtype.
    """
    dtype = _dtypes.get(code)
    if dtype is None:
        dtype = _dtypes[code] = dtype_named(NAMES.get(code, code), key)
    return dtype


_dtypes: dict[str, torch.dtype] = {}


def cast_code(code: str, dtype: str | None) -> str:
    """Return the code of a tensor's dtype after a cast to a dtype of `CASTS`; None casts nothing.

    Floats of eight bits and less stay: they are codes, with their scales in other tensors.
    """
    is_cast = dtype is not None and code in ("F64", "F32", "BF16", "F16")
    return CODES[dtype] if is_cast and dtype is not None else code


def device_named(name: str, key: str) -> torch.device:
    """Return the device of that name, ``"cuda:0"``, whether or not this machine has it.

    Raises:
        UnsupportedError: this torch does not know such a device.
    """
    torch = require("torch", key)
    try:
        return torch.device(name)  # type: ignore[no-any-return]
    except RuntimeError:
        raise UnsupportedError(f"{key}: torch {torch.__version__} has no device {name!r}") from None


class Usual(NamedTuple):
    """The native fast path for plain tensors; see `_native.Exchange`."""

    kinds: tuple[type, ...]
    """The exact classes of the tensors that it handles; empty if it is unavailable."""
    exchange: _native.Exchange | None


def usual() -> Usual:
    """Return the fast path for plain tensors; unavailable without torch, or before 2.10."""
    return _NOTHING if imported("torch") is None else _usual()


def maker() -> _native.Exchange | None:
    """Return the fast path to make tensors; None without torch, or before 2.10. Imports torch."""
    with contextlib.suppress(ImportError):
        importlib.import_module("torch")
    return usual().exchange


_NOTHING = Usual((), None)


@functools.cache
def _usual() -> Usual:
    import torch

    kinds = (torch.Tensor, torch.nn.Parameter)
    # No elements of half a byte, and no complex numbers, which may be conjugated views.
    names = [
        (name, code) for name, code in CODES.items() if code not in ("F4", "C32", "C64", "C128")
    ]
    dtypes = [(getattr(torch, name), code) for name, code in names if hasattr(torch, name)]
    exchange = _native.Exchange.of(list(kinds), dtypes)
    return _NOTHING if exchange is None else Usual(kinds, exchange)


def memory_of(tensor: torch.Tensor, key: str) -> Memory:
    """Return the memory of a tensor on the CPU or a CUDA device.

    The owner is an alias of the tensor, so that ``parameter.data = ...`` does not free it. For a
    conjugated or negated view, the owner is a copy on the same device.

    Raises:
        UnsupportedError: not a strided tensor of a known dtype on such a device; says what to do.
        InvalidStateError: the tensor has no memory (lazy, or its storage was freed).
    """
    import torch

    with torch._C.DisableTorchFunctionSubclass():
        check_dense(tensor, key)
        check_device(tensor, key)
        plain = tensor.detach()
        if plain.is_conj() or plain.is_neg():
            plain = plain.resolve_conj().resolve_neg()
        code = code_of(plain, key)
        if code == "F4" and not plain.is_contiguous():
            plain = plain.contiguous()  # 4-bit elements have no stride in bytes
        check_storage(plain, key)
        size = plain.element_size()
        dense = plain.is_contiguous()
        return Memory(
            code,
            shape_of(plain, key),
            None if dense else strides_of(plain),
            _cuda.address_of(plain) if plain.numel() else 0,
            plain.numel() * size,
            plain,
        )


def check_dense(tensor: torch.Tensor, key: str) -> None:
    """Refuse every kind of tensor whose elements are not plain memory.

    Raises:
        UnsupportedError: names the kind and what to do.
        InvalidStateError: a lazy module's parameter that has no memory yet.
    """
    import torch

    kind = type(tensor)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise UnsupportedError(f"{key} is a {kind.__module__}.{kind.__qualname__}: {_remedy(kind)}")
    if torch.nn.parameter.is_lazy(tensor):
        raise InvalidStateError(f"{key} is not initialized yet: run the lazy module once first")
    if tensor.device.type == "meta":
        raise UnsupportedError(f"{key} is on the meta device and has no data; materialize it first")
    if tensor.is_nested:
        raise UnsupportedError(f"{key} is a nested tensor; use its .unbind() parts instead")
    if tensor.layout != torch.strided:
        raise UnsupportedError(
            f"{key} is sparse or in a library's own layout ({tensor.layout}); use .to_dense(), "
            "or its indices and values, instead"
        )
    if tensor.is_quantized:
        raise UnsupportedError(
            f"{key} is quantized ({tensor.dtype}); use .int_repr(), its scale and its zero point"
        )


def check_device(tensor: torch.Tensor, key: str) -> None:
    """Refuse a tensor whose memory can't be reached.

    Raises:
        UnsupportedError: the tensor is neither on the CPU nor on a CUDA device.
    """
    if _cuda.is_addressable(tensor):
        return
    rocm = " of ROCm" if tensor.device.type == "cuda" else ""
    raise UnsupportedError(
        f"{key} is on {tensor.device}{rocm}: tensors on the CPU and on CUDA devices can be saved; "
        "move it with .cpu() first"
    )


def _remedy(kind: type) -> str:
    if kind.__name__ == "DTensor":
        return (
            "save it on all ranks with ringstow.distributed.save, or by "
            "torch.distributed.checkpoint with ringstow.dcp.StorageWriter(), or "
            ".full_tensor() on one rank, or .to_local() on each"
        )
    return (
        "it computes its elements (__torch_dispatch__); use a plain tensor made from it, such as "
        ".dequantize()"
    )


def check_storage(tensor: torch.Tensor, key: str) -> None:
    """Refuse a tensor larger than its storage, such as one freed by a sharding library."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        span = tensor.numel() - 1
    else:
        span = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + span + 1) * tensor.element_size()
    held = tensor.untyped_storage().nbytes()
    if needed > held or tensor.data_ptr() == 0:
        raise InvalidStateError(
            f"{key} has no memory: it needs {needed} bytes and its storage holds {held} "
            "(freed by a sharding library?); gather it first"
        )


def code_of(tensor: torch.Tensor, key: str | Callable[[], str]) -> str:
    """Return safetensors' name of the tensor's dtype.

    Args:
        tensor: the tensor.
        key: its name in messages, or a function that returns it.

    Raises:
        UnsupportedError: the dtype has no name there.
    """
    code = CODES.get(dtype_name(tensor.dtype))
    if code is None:
        raise UnsupportedError(
            f"{key if isinstance(key, str) else key()} has dtype {tensor.dtype}, which the format "
            "does not know; use a .view() of it as another dtype"
        )
    return code


def shape_of(tensor: torch.Tensor, key: str) -> tuple[int, ...]:
    """Return the shape in elements: torch counts pairs in the last dimension of a 4-bit dtype.

    Raises:
        UnsupportedError: a 4-bit tensor without dimensions.
    """
    shape = tuple(tensor.shape)
    if CODES.get(dtype_name(tensor.dtype)) != "F4":
        return shape
    if not shape:
        raise UnsupportedError(f"{key} is a pair of 4-bit numbers without a dimension; reshape(1)")
    return (*shape[:-1], shape[-1] * 2)


def flat_over(block: Any, stored: Stored, dtype: torch.dtype) -> torch.Tensor:
    """Return a 1-d tensor over the block, with a storage of exactly the block."""
    import torch

    if stored.nbytes == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(block, dtype=dtype)


def empty_on(device: torch.device, stored: Stored, key: str) -> torch.Tensor:
    """Return a new 1-d tensor on a CUDA device, as large as the stored tensor.

    Raises:
        UnsupportedError: torch lacks this dtype.
    """
    dtype = dtype_of(stored.dtype, key)
    return _cuda.empty(stored.nbytes // dtype.itemsize, dtype, device)


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a new tensor on the CPU, ignoring the default device."""
    import torch

    return torch.empty(shape, dtype=dtype, device="cpu")


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of the elements of a tensor on the CPU."""
    return tensor.data_ptr()


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor if it is exactly its storage, in order; otherwise a copy."""
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def reshape(flat: torch.Tensor, stored: Stored) -> None:
    """Give a 1-d tensor the stored shape, in place."""
    shape = stored.shape
    if stored.dtype == "F4":
        shape = (*shape[:-1], shape[-1] // 2)
    if len(shape) != 1:
        flat.resize_(shape)


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a new tensor over the same storage, which is not an autograd view."""
    return tensor.detach()


def in_reach(tensor: torch.Tensor) -> bool:
    """Return whether memory of the CPU or a CUDA device holds the elements' actual values."""
    return _cuda.is_addressable(tensor) and not tensor.is_conj() and not tensor.is_neg()


def can_take_bytes(tensor: torch.Tensor) -> bool:
    """Return whether dense bytes written to the tensor's address are its elements."""
    return in_reach(tensor) and tensor.is_contiguous()


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides in bytes."""
    size = tensor.element_size()
    return tuple(step * size for step in tensor.stride())


def target_of(
    tensor: torch.Tensor, key: str, address_of: Callable[[torch.Tensor], Address]
) -> Target:
    """Return how a load can fill a tensor.

    Raises:
        UnsupportedError: not a strided tensor of a known dtype; says what to do.
        InvalidStateError: the tensor has no memory (lazy, or its storage was freed).
    """
    check_dense(tensor, key)
    check_storage(tensor, key)
    code = code_of(tensor, key)
    strides = None if can_take_bytes(tensor) else strides_of(tensor)
    takes_regions = (
        strides is not None
        and in_reach(tensor)
        and _cuda.place_of(tensor) is not None
        and code != "F4"  # 4-bit elements have no stride in bytes
        and not share_elements(tensor.shape, tensor.stride())
    )
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    is_expanded = tensor.numel() > 0 and any(step == 0 and n > 1 for n, step in pairs)
    problem = "an expanded view" if is_expanded else ""
    shape = shape_of(tensor, key)
    return Target(tensor, code, shape, address_of(tensor), strides, takes_regions, problem)


def mark_changed(tensors: Iterable[torch.Tensor]) -> None:
    """Raise the tensor's version, as an in-place operation would."""
    if imported("torch") is not None:
        sys.modules["torch"].autograd.graph.increment_version(list(tensors))


def without_autograd() -> contextlib.AbstractContextManager[object]:
    """Return a context in which autograd records nothing; an empty one without torch."""
    torch = imported("torch")
    return contextlib.nullcontext() if torch is None else torch.no_grad()


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy the elements, across devices and strides, without autograd recording it."""
    import torch

    with torch.no_grad():
        target.copy_(source)
