"""Dense tensors of quantized ones, for formats that have no others: made when they are needed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ringstow._core._errors import UnsupportedError
from ringstow._state.tensors import _bitsandbytes, _composites, _torch
from ringstow._state.tensors._layouts import TensorParts
from ringstow._state.tensors._memory import LazyTensor

if TYPE_CHECKING:
    import torch

_METHODS = ("dequantize", "get_original_weight", "to_original_precision")
"""What types call the method that returns their values; the first that needs no argument."""

# Types that hold the tensor of full precision, and quantize it in each step: their inner tensor.
_HOLDERS = {
    "torchao.float8.fsdp_utils:WeightWithDynamicFloat8CastTensor": "_tensor",
    "torchao.prototype.quantized_training.bitnet:BitNetTrainingLinearWeight": "_data",
    "torchao.prototype.quantized_training.int8_mixed_precision:"
    "Int8MixedPrecisionTrainingLinearWeight": "_data",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Dense:
    """A dense tensor that is made when it is needed."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    identity: tuple[object, ...]
    """A key that is equal for two tensors of the same inner tensors."""
    make: Callable[[], torch.Tensor]
    device: torch.device | None = None
    """Where it is made; None if its inner tensors are not loaded yet."""

    @property
    def code(self) -> str:
        """The dtype's name in safetensors."""
        return _torch.CODES[_torch.dtype_name(self.dtype)]

    @property
    def nbytes(self) -> int:
        """Bytes of the dense data."""
        return math.prod(self.shape) * self.dtype.itemsize

    def lazy(self) -> LazyTensor:
        """Return it for a save: on the CPU."""
        return LazyTensor(self.code, self.shape, self.nbytes, lambda: self.make().cpu())


def of_tensor(tensor: torch.Tensor, key: str) -> Dense | None:
    """Return the dense tensor of a quantized one; None if its type has no way to make one.

    The key is for messages. Raises what `_bitsandbytes.take_4bit` and `take_8bit` raise.
    """
    kind = type(tensor)
    name = _composites.name_of(kind)
    if name == _bitsandbytes.PARAMS_4BIT:
        taken = _bitsandbytes.take_4bit(tensor, key)
    elif name == _bitsandbytes.PARAMS_8BIT:
        taken = _bitsandbytes.take_8bit(tensor, key)
    else:
        way = _way(kind)
        if way is None:
            return None
        made = _checked(key, tensor.dtype, tuple(tensor.shape), lambda: way(tensor.detach()))
        return Dense(tensor.dtype, tuple(tensor.shape), _identity(tensor), made, tensor.device)
    return None if taken is None else of_parts(TensorParts(name, *taken), key)


def of_parts(parts: TensorParts, key: str) -> Dense | None:
    """Return the dense tensor of a composite's parts, some of which may be lazy.

    Returns:
        The tensor; None if the composite's type has no way to make one.

    Raises:
        UnsupportedError: the type, or one of its values, is missing here or not allowed.
    """
    import torch

    if parts.context is None and not _composites.is_layout(parts.type):
        _composites.check(parts.type, key)
        raise UnsupportedError(
            f"{key} is a {parts.type.replace(':', '.')} whose other values are of types that are "
            "missing or not allowed here: install the version that saved it"
        )
    context = parts.context or {}
    if parts.type == _bitsandbytes.PARAMS_4BIT:
        dtype, shape = _torch.dtype_named(context["dtype"], key), tuple(context["shape"])
        way: Any = _bitsandbytes.dense_of_4bit
    elif parts.type == _bitsandbytes.PARAMS_8BIT:
        dtype, shape = torch.float32, tuple(parts.tensors["data"].shape)
        way = _bitsandbytes.dense_of_8bit
    elif _composites.is_known(parts.type):
        return None
    else:
        outer = _composites.make(_of_meta(parts, key), key)
        dtype, shape, way = outer.dtype, tuple(outer.shape), _way(type(outer))
        if way is None:
            return None
    made = _checked(key, dtype, shape, lambda: way(_composites.make(_loaded(parts), key)))
    devices = (getattr(one, "device", None) for one in parts.tensors.values())
    return Dense(dtype, shape, _identity_of(parts), made, next(devices, None))


def _way(kind: Any) -> Callable[[Any], Any] | None:
    """Return the function that makes a dense tensor of one of a type; None if there is none."""
    import inspect

    import torch

    if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return None
    held = _HOLDERS.get(_composites.name_of(kind))
    if held is not None:
        return lambda tensor: getattr(tensor, held)
    for name in _METHODS:
        method = getattr(kind, name, None)
        if method is None or method is getattr(torch.Tensor, name, None):
            continue
        needed = [
            one
            for one in list(inspect.signature(method).parameters.values())[1:]
            if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        ]
        if not needed:
            return lambda tensor, name=name: getattr(tensor, name)()  # type: ignore[misc]
    return None


def _checked(
    key: str, dtype: torch.dtype, shape: tuple[int, ...], make: Callable[[], Any]
) -> Callable[[], torch.Tensor]:
    def checked() -> torch.Tensor:
        import torch

        with torch.no_grad():
            found = make()
        if not _torch.is_of_torch(found) or (found.dtype, tuple(found.shape)) != (dtype, shape):
            raise UnsupportedError(
                f"{key} is a tensor of {dtype} {list(shape)}, and its type dequantizes it to a "
                f"{type(found).__qualname__} of {getattr(found, 'dtype', None)} "
                f"{list(getattr(found, 'shape', ()))}: save a plain tensor made from it"
            )
        return found.detach()  # type: ignore[no-any-return]

    return checked


def _of_meta(parts: TensorParts, key: str) -> TensorParts:
    """Return parts of the same dtypes and shapes without elements."""
    import torch

    def without(value: Any) -> Any:
        if type(value) is TensorParts:
            return _of_meta(value, key)
        if type(value) is not LazyTensor:
            return value.detach().to("meta")
        shape = value.shape
        if value.dtype == "F4":  # torch counts pairs
            shape = (*shape[:-1], shape[-1] // 2)
        return torch.empty(shape, dtype=_torch.dtype_of(value.dtype, key), device="meta")

    tensors = {name: without(value) for name, value in parts.tensors.items()}
    tensors = {
        name: _composites.make(one, key) if type(one) is TensorParts else one
        for name, one in tensors.items()
    }
    return TensorParts(parts.type, tensors, parts.context)


def _loaded(parts: TensorParts) -> TensorParts:
    def load(value: Any) -> Any:
        if type(value) is TensorParts:
            return _composites.make(_loaded(value), "")
        return value.load() if type(value) is LazyTensor else value

    tensors = {name: load(value) for name, value in parts.tensors.items()}
    return TensorParts(parts.type, tensors, parts.context)


def _identity_of(parts: TensorParts) -> tuple[object, ...]:
    """Return a key that is equal for parts of the same memory that make the same tensor."""
    context = {**(parts.context or {})}
    context.pop("requires_grad", None)
    # Each `state_dict()` of bitsandbytes has new copies of the others.
    is_4bit = parts.type == _bitsandbytes.PARAMS_4BIT
    names = ("data", "absmax") if is_4bit else tuple(parts.tensors)
    inner = (_identity(parts.tensors[name]) for name in names)
    return (parts.type, repr(sorted(context.items())), *inner)


def _identity(tensor: Any) -> tuple[object, ...]:
    """Return a key that is equal for tensors of the same memory, also for two wrappers of it."""
    if type(tensor) is TensorParts:
        return _identity_of(tensor)
    if type(tensor) is LazyTensor:
        return (id(tensor),)
    outer = (tensor.dtype, tuple(tensor.shape), tensor.stride())
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        inner = (_identity(getattr(tensor, name)) for name in names)
        return (type(tensor), *outer, repr(context), *inner)
    return (str(tensor.device), tensor.data_ptr(), *outer)


# The weights of bitsandbytes' layers, whose scales are entries of their own in a module's state.


def has_layers(state: Any) -> bool:
    """Return whether a dict has the entries of such layers."""
    return bool(_bitsandbytes.parts_in(name for name in state if type(name) is str))


def with_layers(
    state: dict[Any, Any], is_asked: Callable[[str], bool], wrong: Callable[[str, str], Exception]
) -> dict[Any, Any]:
    """Return a module's state with such weights as composites' parts, in the order of the state.

    Args:
        state: the state; its tensors may be lazy.
        is_asked: returns whether a weight becomes parts, by its name.
        wrong: returns the error to raise, of a weight's name and a message.
    """
    kept = dict(state)
    names = (name for name in state if type(name) is str)
    for weight, (kind, inner, packed) in _bitsandbytes.parts_in(names).items():
        if not is_asked(weight):
            continue
        tensors = {one: kept.pop(name) for one, name in inner.items()}
        try:
            rest = kept.pop(packed)
            if not all(_torch.is_tensor(one) or _is_lazy(one) for one in (*tensors.values(), rest)):
                raise ValueError("not all of its entries are tensors")
            rest = rest.load() if _is_lazy(rest) else rest
            taken = _bitsandbytes.parts_of_state(kind, tensors, rest)
        except ValueError as error:
            text = f"looks like a weight of bitsandbytes, and can't be dequantized: {error}"
            raise wrong(weight, text) from None
        kept[weight] = TensorParts(kind, *taken)
    return {name: kept[name] for name in state if name in kept}


def _is_lazy(value: Any) -> bool:
    return type(value) is LazyTensor and not value.array
