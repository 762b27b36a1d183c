"""Tensors that are made of other tensors: quantized and other wrappers, sparse and nested tensors.

A composite is saved as its inner tensors, and as a context: the values that its maker needs beside
them. Wrapper subclasses are taken apart and made by their own protocol, ``__tensor_flatten__`` and
``__tensor_unflatten__``, if their type is allowed. Functions of this module make all others.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from ringstow._core._errors import InvalidStateError, UnsupportedError
from ringstow._state.tensors import _torch, _transformer_engine
from ringstow._state.tensors._layouts import LAYOUTS, Differs, TensorParts, grad, take_bits
from ringstow._state.tensors._optional_packages import imported

if TYPE_CHECKING:
    import torch

LIBRARIES = ("torch", "torchao", "transformer_engine", "bitsandbytes")
"""The packages whose wrapper types are allowed."""

_T = TypeVar("_T", bound=type)
_allowed: dict[str, type] = {}

# Types of torch that have the protocol, and no elements that another process could load.
_WITHOUT_ELEMENTS = (
    "FakeTensor",
    "FunctionalTensor",
    "DTensor",
    "LocalTensor",
    "AsyncCollectiveTensor",  # its elements are still being computed
)


def allow_types(*types: _T) -> _T:
    """Allow tensor types of this program: saves take them apart, and loads make them again.

    ::

        ringstow.allow_types(MyTensor)      # before the first save, and before each load

    For types with ``__tensor_flatten__`` and ``__tensor_unflatten__``, torch's protocol for tensors
    that are made of other tensors. A load calls ``__tensor_unflatten__`` with the saved context, so
    allow only types whose method is safe to call with any values. Types of torch, torchao,
    transformer_engine and bitsandbytes are allowed already. Also a decorator of a class.

    Returns:
        The first type.

    Raises:
        TypeError: one of them is not a subclass of Tensor with the protocol.
        InvalidStateError: a load would not find a type by its name: a function defines it.
    """
    if not types:
        raise TypeError("allow_types needs at least one type")
    for one in types:
        if not _is_wrapper(one):
            raise TypeError(
                f"{one!r} is not a subclass of torch.Tensor with __tensor_flatten__ and "
                "__tensor_unflatten__"
            )
        if "<" in one.__qualname__:
            raise InvalidStateError(
                f"a load can't find {one.__qualname__} by its name: define it at the top level of "
                "a module"
            )
        _allowed[name_of(one)] = one
    return types[0]


def name_of(kind: type) -> str:
    """Return the name of a type in a manifest: ``"module:Name"``."""
    return f"{kind.__module__}:{kind.__qualname__}"


def _is_wrapper(kind: Any) -> bool:
    torch = imported("torch")
    return (
        torch is not None
        and isinstance(kind, type)
        and issubclass(kind, torch.Tensor)
        and hasattr(kind, "__tensor_flatten__")
        and hasattr(kind, "__tensor_unflatten__")
    )


def take(tensor: torch.Tensor, key: str) -> TensorParts | None:
    """Return the parts of a tensor; None for a tensor that is plain memory of a known dtype.

    Raises:
        UnsupportedError: a wrapper type that is not allowed.
    """
    kind = type(tensor)
    module: Any = sys.modules["torch"]
    if kind.__torch_dispatch__ is not module.Tensor.__torch_dispatch__:
        return _take_wrapper(tensor, kind, key)
    if not _torch.is_of_torch(tensor) and name_of(kind) in LAYOUTS:
        return LAYOUTS[name_of(kind)].take(tensor, name_of(kind), key)
    with module._C.DisableTorchFunctionSubclass():  # a save runs no code of a type of the program
        if tensor.device.type == "meta" or tensor.is_nested or tensor.is_quantized:
            return None
        found: TensorParts | None = None
        if tensor.layout is not module.strided:
            layout = _torch.dtype_name(tensor.layout)  # "sparse_coo"
            found = LAYOUTS[layout].take(tensor, layout, key) if layout in LAYOUTS else None
        elif _torch.dtype_name(tensor.dtype) not in _torch.CODES:
            found = take_bits(tensor)
        return found


def inner(tensor: torch.Tensor, key: str) -> list[torch.Tensor] | None:
    """Return the plain tensors that a composite is made of, at any depth; None for another tensor.

    Raises:
        UnsupportedError: an error of `take`.
    """
    parts = take(tensor, key)
    if parts is None:
        return None
    found: list[torch.Tensor] = []
    for name, one in parts.tensors.items():
        if _torch.is_tensor(one):
            found += inner(one, f"{key}.{name}") or [one]
    return found


def with_inner(tensor: torch.Tensor, plain: Iterator[torch.Tensor], key: str) -> torch.Tensor:
    """Return a composite like another, with the next plain tensors in place of its `inner` ones."""
    parts = take(tensor, key)
    if parts is None:
        return next(plain)
    tensors = {
        name: with_inner(one, plain, key) if _torch.is_tensor(one) else one
        for name, one in parts.tensors.items()
    }
    made: torch.Tensor = make(TensorParts(parts.type, tensors, parts.context), key)
    return made


def can_fill(tensor: torch.Tensor) -> bool:
    """Return whether a composite's inner tensors can be filled in place: not indices or offsets."""
    parts = take(tensor, "")
    return parts is not None and (not is_known(parts.type) or LAYOUTS[parts.type].is_view)


def misfit(target: torch.Tensor, source: torch.Tensor) -> Differs:
    """Return in what a tensor of a layout and its source differ; empty if it can be filled.

    Both are of one layout and shape. The target is filled in place, so that the module of a
    ``state_dict()`` sees its new elements.
    """
    here, there = _both(target, source)
    for name in here.tensors.keys() & there.tensors.keys():
        dtypes = [one.tensors[name].dtype for one in (here, there)]
        if dtypes[0] != dtypes[1]:
            return f"a {here.type} tensor with {name} of {dtypes[0]}", f"one of {dtypes[1]}"
    if any(_is_expanded(one) for one in here.tensors.values()):
        return f"a {here.type} tensor of an expanded view", "one of its own"
    return LAYOUTS[here.type].differs(here, there)


def fill_layout(target: torch.Tensor, source: torch.Tensor) -> None:
    """Give a tensor of a layout the elements of another, which has no `misfit` with it."""
    here, there = _both(target, source)
    with sys.modules["torch"].no_grad():
        target = target.detach() if target.requires_grad else target
        LAYOUTS[here.type].fill(here, there, target, source)


def _both(target: torch.Tensor, source: torch.Tensor) -> tuple[TensorParts, TensorParts]:
    here, there = take(target, ""), take(source, "")
    assert here is not None
    assert there is not None
    return here, there


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def differing(here: dict[str, Any], there: dict[str, Any]) -> list[str]:
    """Return the keys of two contexts that make one tensor unfit for the elements of the other."""
    keys = [key for key in dict.fromkeys([*here, *there]) if key not in _OF_VALUES]
    return [key for key in keys if not _is_equal(here.get(key), there.get(key))]


# Keys of contexts that elements need not agree in.
_OF_VALUES = ("requires_grad", "coalesced", "min_seqlen", "max_seqlen", "stride")


def _is_equal(one: Any, other: Any) -> bool:
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # any: the comparison is the type's own code
        return False


def difference(here: Any, there: Any, path: str = "") -> str:
    """Return why a value of a state can't get the elements of another; empty if it can."""
    at = f"{path} " if path else ""
    ours, theirs = (take(one, "") if _torch.is_tensor(one) else None for one in (here, there))
    if ours is None or theirs is None:
        pair = [
            f"{one.dtype} {list(one.shape)}" if _torch.is_tensor(one) else type(one).__qualname__
            for one in (here, there)
        ]
        is_plain = ours is theirs and pair[0] == pair[1]
        return "" if is_plain else f"{at}{pair[0]} here and {pair[1]} in the checkpoint"
    if ours.type != theirs.type:
        return f"{at}a {ours.type} here and a {theirs.type} in the checkpoint"
    contexts = [one.context or {} for one in (ours, theirs)]
    for key in differing(*contexts):
        shown = [f"{key} {one.get(key)!r:.100}" for one in contexts]
        return f"{at}{shown[0]} here and {shown[1]} in the checkpoint"
    if not can_fill(here):
        return ""
    if ours.tensors.keys() != theirs.tensors.keys():
        names = [sorted(one.tensors) for one in (ours, theirs)]
        return f"{at}made of {names[0]} here and of {names[1]} in the checkpoint"
    inside = (difference(one, theirs.tensors[n], f"{path}.{n}") for n, one in ours.tensors.items())
    return next(filter(None, inside), "")


def fill(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy the inner tensors of a composite into those of another, which `difference` accepts."""
    torch: Any = sys.modules["torch"]
    pairs = zip(inner(target, "") or [], inner(source, "") or [], strict=True)
    with torch.no_grad():
        for one, other in pairs:
            one.copy_(other)


def is_composite(value: object) -> bool:
    """Return whether `take` takes a value apart, without looking whether its type is allowed."""
    if not _torch.is_tensor(value):
        return False
    try:
        return take(value, "") is not None
    except UnsupportedError:
        return True


def _take_wrapper(tensor: Any, kind: type, key: str) -> TensorParts | None:
    name = kind.__name__
    if name == "NestedTensor" and kind.__module__.startswith("torch.nested."):
        return LAYOUTS["jagged"].take(tensor, "jagged", key)
    if name in _WITHOUT_ELEMENTS or not _is_wrapper(kind):
        return None
    if not is_allowed(name_of(kind)):
        raise UnsupportedError(
            f"{key} is a {kind.__module__}.{kind.__qualname__}, a type that is not allowed: call "
            f"ringstow.allow_types({kind.__qualname__}) before saves and loads, or save plain "
            "tensors made from it"
        )
    if _attribute(sys.modules.get(kind.__module__), kind.__qualname__) is not kind:
        raise UnsupportedError(
            f"{key} is a {kind.__module__}.{kind.__qualname__}, which a load would not find by "
            "this name: define it at the top level of its module"
        )
    names, context = tensor.__tensor_flatten__()
    if _transformer_engine.is_of(name_of(kind)):
        context = _transformer_engine.plain(context)
    made = {"context": context, **_outer(tensor)}
    return TensorParts(name_of(kind), {one: getattr(tensor, one) for one in names}, made)


def _outer(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the size and stride of a wrapper, and whether it needs a gradient."""
    with sys.modules["torch"]._C.DisableTorchFunctionSubclass():
        outer: dict[str, Any] = {"shape": list(tensor.shape), "stride": list(tensor.stride())}
        return outer | grad(tensor)


def as_parts(value: Any) -> Any:
    """Return a composite as its parts, and any other value itself."""
    return (take(value, "") or value) if is_composite(value) else value


def is_allowed(name: str) -> bool:
    """Return whether a type's name, ``"module:Name"``, is on the list of allowed types."""
    return name in _allowed or name.partition(":")[0].partition(".")[0] in LIBRARIES


def is_known(name: str) -> bool:
    """Return whether a name is that of a layout which this module makes, not of a type."""
    return name in LAYOUTS


def is_layout(name: str) -> bool:
    """Return whether a name is that of a layout or dtype of torch's own tensors."""
    return is_known(name) and ":" not in name


def check(name: str, key: str) -> None:
    """Refuse a composite that this program can't make.

    Imports the type's module, if it is of `LIBRARIES`.

    Raises:
        UnsupportedError: names the type, and says what to do.
    """
    if not is_known(name):
        _type_named(name, key)


def _type_named(name: str, key: str) -> Any:
    module, _, path = name.partition(":")
    shown = name.replace(":", ".")
    rest = "; ringstow.load(path, tensor_parts=True) loads its parts"
    if not is_allowed(name):
        raise UnsupportedError(
            f"{key} is a {shown}, a tensor type that is not allowed here: if its "
            f"__tensor_unflatten__ is safe to call, ringstow.allow_types({path}) allows it{rest}"
        )
    found: Any = _allowed.get(name) or _found(module, path)
    if not _is_wrapper(found) or found.__name__ in _WITHOUT_ELEMENTS:
        library = module.partition(".")[0]
        raise UnsupportedError(
            f"{key} is a {shown}, and {library} here has no such tensor type: install the version "
            f"that saved it{rest}"
        )
    return found


def _found(module: str, path: str) -> Any:
    library = module.partition(".")[0]
    for one in dict.fromkeys((library, module)):
        if "__main__" in one.split("."):
            return None
        try:
            importlib.import_module(one)
        except Exception:  # any: a library that is broken here is as good as none
            return None
        found = _attribute(sys.modules.get(module), path)
        if found is not None:
            return found
    return None


def _attribute(module: Any, path: str) -> Any:
    # Not getattr: that runs a module's __getattr__, which may import others.
    found = module
    for step in path.split("."):
        found = getattr(found, "__dict__", {}).get(step)
    return found


def make(parts: TensorParts, key: str) -> Any:
    """Return the tensor that is made of the parts.

    Raises:
        UnsupportedError: its type is missing or refuses the parts; says what to do.
        ValueError: these are no parts of such a tensor.
    """
    context = parts.context
    assert context is not None
    if not is_known(parts.type):
        return _grown(_make_wrapper(parts.type, parts.tensors, context, key), context)
    known = LAYOUTS[parts.type]
    if not known.fits(parts.tensors, context) or type(context.get("coalesced", True)) is not bool:
        raise ValueError(f"these are no parts of a tensor of the kind {parts.type!r}")
    try:
        return _grown(known.make(parts.type, dict(parts.tensors), context), context)
    except UnsupportedError:
        raise
    except Exception as error:
        raise ValueError(f"its parts make no tensor: {error}") from None


def _grown(tensor: Any, context: dict[str, Any]) -> Any:
    return tensor.requires_grad_(True) if context.get("requires_grad") is True else tensor


def _make_wrapper(name: str, tensors: dict[str, Any], context: dict[str, Any], key: str) -> Any:
    kind = _type_named(name, key)
    size: Any = context.get("shape")
    stride: Any = context.get("stride")
    if not (_are_sizes(size) and _are_sizes(stride)):
        raise ValueError("it has no shape or no stride")
    torch: Any = sys.modules["torch"]
    own = context.get("context")
    if _transformer_engine.is_of(name):
        own = _transformer_engine.whole(own, kind)
    try:
        with torch.no_grad():
            made = kind.__tensor_unflatten__(tensors, own, torch.Size(size), tuple(stride))
    except Exception as error:
        raise UnsupportedError(
            f"{key} is a {name.replace(':', '.')}, which the type here does not make of the saved "
            f"parts ({type(error).__name__}: {error}): use the version that saved it; "
            "ringstow.load(path, tensor_parts=True) loads its parts"
        ) from error
    if not isinstance(made, kind):
        raise UnsupportedError(
            f"{key} is a {name.replace(':', '.')}, whose __tensor_unflatten__ makes a "
            f"{type(made).__name__}; ringstow.load(path, tensor_parts=True) loads its parts"
        )
    return made


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(one) is int for one in value)
