"""A state dict to a JSON tree and a list of tensors. Pure: it reads the values, and does no I/O.

The tree (``_tree`` reads it back):

=====================  ===========================================================================
value                  JSON
=====================  ===========================================================================
None, bool, str        JSON's own
int                    a JSON integer within ±2^53; else ``{"$int": "decimal"}``, or ``"0x..."``
                       where it has more than 2000 bits
float                  a JSON number, always with ``.`` or ``e``; ``{"$float": "nan"}``, ``"inf"``,
                       ``"-inf"``
bytes                  ``{"$bytes": base64}``
list                   a JSON array
tuple                  ``{"$tuple": [...]}``
dict                   a JSON object, in order, if every key is a str that does not begin with
                       ``$``; else ``{"$dict": [[key, value], ...]}``
OrderedDict            ``{"$odict": ...}`` of the object or of the pairs; with ``"attrs":
                       {"_metadata": ...}`` where it carries one (``Module.state_dict()`` does)
Counter                ``{"$counter": [[key, count], ...]}``, of numbers and text (the learning
                       rate schedulers of torch carry one)
tensor                 ``{"$tensor": name}``: its data is the tensor of that name in the shards
numpy array            ``{"$ndarray": name, "dtype": "<f4"}``: stored little-endian, given back
                       in that byte order
array on a GPU         the same: what has ``__cuda_array_interface__``, such as CuPy's and Numba's
                       arrays, comes back as a numpy array
numpy scalar           ``{"$scalar": "<f8", "data": base64}``
torch.Size             ``{"$size": [...]}``
torch.dtype            ``{"$dtype": "float32"}``
torch.device           ``{"$device": "cpu"}``
object                 ``{"$object": name}``: what ``torch.load`` makes of the entry of that name;
                       written by `ringstow.dcp` only
anything else          ``{"$pickle": base64}``, only where pickle was allowed
=====================  ===========================================================================

Types are exact: what would come back as another type (an IntEnum, a named tuple, a defaultdict, a
set) is an error that names its key. Two kinds come back changed on purpose: sub-classes of Tensor,
nn.Parameter among them, as plain tensors without requires_grad, and views as dense tensors.

A tensor's name is its path joined by dots: str keys as they are, ints and list indices in decimal,
other keys by ``repr``. One that is taken gets ``#2``, ``#3``, ... Tensors that are the same
elements of the same memory are stored once, under the first one's name (``_native.Tensors``).
"""

from __future__ import annotations

import base64
import collections
import json
from typing import Any, NoReturn

from ringstow import _cuda, _device_array, _native, _numpy, _torch
from ringstow._collector import collector_paused
from ringstow._errors import InvalidStateError
from ringstow._memory import LazyMemory, LazyTensor, Memory, Placed
from ringstow._optional import imported

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Path = tuple[object, ...]

DEPTH_MAX = _native.DEPTH_MAX
PICKLE_PROTOCOL = 4
# safetensors keeps this name in a shard's header for itself.
RESERVED_NAMES = {"__metadata__"}


class Attribute(str):
    """A step of a path that is an attribute, not a key."""

    __slots__ = ()


class Encoded:
    """A state dict, ready to be written: its tensors and the JSON tree.

    ``tensors`` holds the tensors' memory: keep it until every byte has been read.
    """

    def __init__(self, tensors: _native.Tensors, tree: str) -> None:
        self.tensors = tensors
        self.tree = tree


def encode(state: object, *, allow_pickle: bool = False) -> Encoded:
    """Encode a state dict; every value but the tensors' elements is copied now.

    Raises:
        InvalidStateError: a value that can't be saved; names its key and type.
        UnsupportedError: a tensor that can't be saved yet; says what to do.
    """
    if type(state) not in (dict, collections.OrderedDict):
        raise InvalidStateError(f"a state dict must be a dict, not {type_name(state)}")
    tensors = _native.Tensors(RESERVED_NAMES)
    with collector_paused():
        tree = _native.encode(state, tensors, _Others(tensors, allow_pickle))
    return Encoded(tensors, tree)


def describe(path: Path) -> str:
    """Return a path as it would be written in Python: ``optimizer['state'][0]``."""
    if not path:
        return "the state dict"
    root, *rest = path
    text = root if isinstance(root, str) else f"[{root!r}]"
    for step in rest:
        text += f".{step}" if isinstance(step, Attribute) else f"[{step!r}]"
    return text


def flat_name(path: Path) -> str:
    """Return a path joined by dots: ``optimizer.state.0``."""
    return ".".join(map(_step, path))


def _step(step: object) -> str:
    return step if isinstance(step, str) else repr(step)


def type_name(value: object) -> str:
    """Return the full name of the value's type, without ``builtins``."""
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else kind.__module__ + "."
    return module + kind.__qualname__


class _Others:
    """What `_native.encode` is to know of torch, and asks of what is rare."""

    def __init__(self, tensors: _native.Tensors, allow_pickle: bool) -> None:
        self.exchange = _torch.usual().exchange
        self.address_of = _cuda.finder()
        self.describe = describe
        self._tensors = tensors
        self._allow_pickle = allow_pickle

    def value(self, value: Any, path: Path) -> str:
        """Return the JSON of a value that is no container, and that JSON has not."""
        return json.dumps(self._tree(value, path), ensure_ascii=False, separators=(",", ":"))

    def check_key(self, key: object, path: Path) -> None:
        """Refuse a key of the dict at a path that cannot be one."""
        if _holds_tensor(key):
            raise InvalidStateError(f"{describe(path)} has a tensor as a key, or in one")

    def attributes(self, value: object, path: Path) -> dict[str, object] | None:
        """Return the attributes that the OrderedDict at a path carries, if it carries any."""
        attributes = vars(value)
        unknown = sorted(attributes.keys() - {"_metadata"})
        if unknown:
            raise InvalidStateError(
                f"{describe(path)} is an OrderedDict with the attribute {unknown[0]!r}, which "
                "would be lost: make it an item"
            )
        return {Attribute("_metadata"): attributes["_metadata"]} if attributes else None

    def _tree(self, value: Any, path: Path) -> Json:
        kind = type(value)
        if kind is int:
            return {"$int": _digits(value)}
        if kind is float:
            return {"$float": repr(value)}
        if kind is bytes:
            return {"$bytes": _base64(value)}
        return self._foreign(value, path)

    def _foreign(self, value: Any, path: Path) -> Json:
        if type(value) is LazyTensor:
            name = self._store(lazy_memory(value, describe(path)), flat_name(path))
            return {"$ndarray": name, "dtype": value.array} if value.array else {"$tensor": name}
        if _torch.is_tensor(value):
            memory = _torch.memory_of(value, describe(path))
            return {"$tensor": self._store(memory, flat_name(path))}
        if _numpy.is_array(value) and _numpy.code_of(value.dtype.str):
            name = self._store(_numpy.memory_of(value), flat_name(path))
            return {"$ndarray": name, "dtype": value.dtype.str}
        interface = _device_array.interface_of(value)
        if interface is not None:
            array = _device_array.parse(value, interface, describe(path))
            return {"$ndarray": self._store(array.memory, flat_name(path)), "dtype": array.typestr}
        if _numpy.is_scalar(value) and _numpy.code_of(value.dtype.str):
            return {"$scalar": value.dtype.str, "data": _base64(value.tobytes())}
        torch = imported("torch")
        if torch is not None:
            if type(value) is torch.Size:
                return {"$size": list(value)}
            if type(value) is torch.dtype:
                return {"$dtype": _torch.dtype_name(value)}
            if type(value) is torch.device:
                return {"$device": str(value)}
        return self._pickle(value, path)

    def _pickle(self, value: object, path: Path) -> Json:
        if not self._allow_pickle:
            self._refuse(value, path)
        try:
            import pickle  # takes a while, and is rarely wanted

            return {"$pickle": _base64(pickle.dumps(value, PICKLE_PROTOCOL))}
        except Exception as error:
            raise InvalidStateError(
                f"{describe(path)} is a {type_name(value)}, which can't be pickled: {error}"
            ) from error

    def _refuse(self, value: object, path: Path) -> NoReturn:
        what = type_name(value)
        if _numpy.is_array(value):
            what += f" of dtype {value.dtype}"
        raise InvalidStateError(
            f"{describe(path)} is a {what}, which can't be saved as it is: save what it is made "
            "of (dict, list, tuple, int, float, str, bytes, bool, None, tensors, numpy arrays); "
            "allow_pickle=True would take it, for those who then trust the file when loading"
        )

    def _store(self, memory: Memory | LazyMemory, wanted: str) -> str:
        """Note the tensor, unless the same memory was met before; returns its name."""
        return self._tensors.add(wanted, *memory)


def _holds_tensor(key: object) -> bool:
    return any(map(_holds_tensor, key)) if type(key) is tuple else _torch.is_tensor(key)


def lazy_memory(lazy: LazyTensor, key: str) -> LazyMemory:
    """Return the memory that a tensor will have once it is loaded."""

    def load() -> Placed:
        value = lazy.load()
        memory = _numpy.memory_of(value) if lazy.array else _torch.memory_of(value, key)
        if (memory.dtype, tuple(memory.shape)) != (lazy.dtype, lazy.shape):
            raise InvalidStateError(
                f"{key} was to be {lazy.dtype} {list(lazy.shape)}, and was loaded as "
                f"{memory.dtype} {list(memory.shape)}"
            )
        if not isinstance(memory.address, int):
            raise InvalidStateError(f"{key} was loaded to a GPU, and was to be on the CPU")
        return memory.strides, memory.address, memory.owner

    return LazyMemory(lazy.dtype, lazy.shape, None, load, lazy.nbytes, lazy)


def _digits(value: int) -> str:
    # Python refuses to convert thousands of decimal digits, which takes quadratic time.
    return str(value) if value.bit_length() <= 2000 else hex(value)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
