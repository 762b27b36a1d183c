"""Encodes a state dict as a JSON tree and a list of tensors.

Pure: it does no I/O. docs/format.md describes the tree, docs/values.md the values that load as
another type, and `_skeleton` reads the tree. All other types load exactly: a value that would load
as another type (a subclass of dict) is an error that names its key.

A tensor's name is its path joined by dots: str keys unchanged, ints and list indices in decimal,
other keys by ``repr``. A name that is taken gets ``#2``, ``#3``, ... Tensors with the same elements
of the same memory are stored once, under the first name (``_native.Tensors``).
"""

from __future__ import annotations

import base64
import collections
import enum
import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ringstow import _native
from ringstow._core._errors import InvalidStateError, UnsupportedError
from ringstow._core._gc_pause import collector_paused
from ringstow._state.tensors import _composites, _cuda, _device_arrays, _numpy, _torch
from ringstow._state.tensors._layouts import TensorParts
from ringstow._state.tensors._memory import LazyMemory, LazyTensor, Memory, Placed
from ringstow._state.tensors._optional_packages import imported
from ringstow._state.tree import _custom_types, _cycles, _small_values
from ringstow._state.tree._damaged_tensors import DamagedTensor, LoadedDict
from ringstow._state.tree._refusals import Refusals, Refused, remedy, type_name
from ringstow._state.tree._walk import COMPOSITE, METADATA, Attribute, Path, describe, flat_name

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Parts = tuple[str | list[Any] | dict[Any, Any] | tuple[tuple[str, Any], ...], ...]
"""A container's JSON: finished text, and items between it that are not encoded yet.

Items are in a list, in a dict (written as an object if its keys allow it, otherwise as pairs), or
in a tuple of (name, item), which is written as an object.
"""

Special = Callable[[Any, Path, _native.Tensors], "str | None"]
"""Adds the tensors of a value at a path, and returns its JSON; None for a value like any other."""
StandIn = Callable[[Any, Path], Any]
"""Returns the value to save for a value at a path, such as an object's state; or the value."""

_NOT_UNICODE = "which is not valid Unicode (a lone surrogate)"
# safetensors reserves this name in a shard's header.
RESERVED_NAMES = {"__metadata__"}


class Encoded(NamedTuple):
    """A state dict, ready to be written: its tensors and the JSON tree.

    ``tensors`` holds the tensors' memory: keep it until every byte has been read.
    """

    tensors: _native.Tensors
    tree: str


def encode(
    state: object,
    *,
    allow_pickle: bool = False,
    refusals: Refusals | None = None,
    fast: bool = True,
    special: Special | None = None,
    stand_in: StandIn | None = None,
) -> Encoded:
    """Encode a state dict; copies every value now, except the tensors' elements.

    Args:
        state: the state dict.
        allow_pickle: pickle values that the format does not support.
        refusals: collects values that can't be saved, for the caller to raise an error; None raises
            here.
        fast: encode plain tensors natively. If false, the owner of each tensor's memory is a tensor
            of that dtype and shape.
        special: encodes values that the caller supports and this module does not.
        stand_in: returns the value to save for a value that this module does not know.

    Raises:
        InvalidStateError: values that can't be saved; names the key and type of each, and what to
            save instead.
        UnsupportedError: all of these values are tensors that can't be saved yet.
    """
    if isinstance(state, LoadedDict):
        state = state.as_saved()
    if type(state) not in (dict, collections.OrderedDict):
        raise InvalidStateError(f"a state dict must be a dict, not {type_name(state)}")
    tensors = _native.Tensors(RESERVED_NAMES)
    others = _Others(tensors, allow_pickle, Refusals() if refusals is None else refusals)
    others.special = special
    others.stand_in = stand_in
    if not fast:
        others.exchange = None
    tree = ""
    with collector_paused():
        try:
            tree = _native.encode(state, tensors, others)
        except InvalidStateError as error:
            others.refusals.add(error)
    if refusals is None:
        others.refusals.check()
    return Encoded(tensors, tree)


class _Others:
    """The information about torch, and the callbacks for rare values, for `_native.encode`."""

    def __init__(self, tensors: _native.Tensors, allow_pickle: bool, refusals: Refusals) -> None:
        self.exchange = _torch.usual().exchange
        self.address_of = _cuda.finder()
        self.describe = describe
        self.refusals = refusals
        self.special: Special | None = None
        self.stand_in: StandIn | None = None
        self._tensors = tensors
        self._allow_pickle = allow_pickle

    def value(self, value: Any, path: Path) -> str | Parts:
        """Return the JSON of a value that `_native.encode` does not know, or its parts.

        Collects values that can't be saved, so that one error names all of them.
        """
        try:
            known = None if self.special is None else self.special(value, path, self._tensors)
            if known is not None:
                return known
            stand_in = value if self.stand_in is None else self.stand_in(value, path)
            return self._value(value, path) if stand_in is value else self._stand_in(stand_in, path)
        except Refused as refused:
            key = describe(path)
            self.refusals.add_value(key, value, refused, pickled=self._allow_pickle)
        except (InvalidStateError, UnsupportedError) as error:
            self.refusals.add(error)
        return "null"

    def refuse(self, problem: str) -> None:
        """Collect an error that `_native.encode` found in a value."""
        self.refusals.add(InvalidStateError(problem))

    def check_key(self, key: object, path: Path) -> None:
        """Collect an invalid key of the dict at a path."""
        if _holds_tensor(key):
            self.refuse(f"{describe(path)} has a tensor as a key, or in one")

    def _stand_in(self, value: Any, path: Path) -> str | Parts:
        """Return the result of `value` for any type, also for types that `_native.encode` knows."""
        if type(value) is dict:
            return _of_dict(value)
        if type(value) in (list, tuple):
            return (list(value),) if type(value) is list else ('{"$tuple":', list(value), "}")
        return self._value(value, path)

    def _value(self, value: Any, path: Path) -> str | Parts:
        try:
            tree = self._tree(value, path)
        except Refused:
            if not self._allow_pickle:
                raise
            tree = None
        if isinstance(tree, tuple):
            return tree
        if tree is None:
            tree = self._pickle(value, path)
        text = json.dumps(tree, ensure_ascii=False, separators=(",", ":"))
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Refused("x.encode('utf-8', 'surrogatepass')", _NOT_UNICODE) from None
        return text

    def _tree(self, value: Any, path: Path) -> Json | Parts:
        """Return the tree of a value, or a container's parts; None if the format has neither."""
        kind = type(value)
        if kind is DamagedTensor:
            raise InvalidStateError(
                f"{describe(path)} is a DamagedTensor: this tensor was lost; put a value in its "
                "place"
            )
        if kind is int:
            return {"$int": _digits(value)}
        if kind is float:
            return {"$float": repr(value)}
        if kind is bytes:
            return {"$bytes": _base64(value)}
        tree = self._foreign(value, path)
        if tree is not None:
            return tree
        fixed = _small_values.take(value)
        if fixed is not None:
            name, args = fixed
            return (f'{{"$value":"{name}","args":', args, "}")
        if isinstance(value, enum.Enum):
            return _custom_types.member_of(value)
        if isinstance(value, str):
            return _custom_types.text_of(value)
        return self._parts(value, path)

    def _foreign(self, value: Any, path: Path) -> Json | Parts:
        if type(value) is LazyTensor:
            name = self._store(lazy_memory(value, describe(path)), flat_name(path))
            return {"$ndarray": name, "dtype": value.array} if value.array else {"$tensor": name}
        if type(value) is TensorParts:
            if value.context is None:
                raise Refused("the tensor itself", "whose context needs types that are missing")
            return _of_composite(value)
        if _torch.is_tensor(value):
            return self._tensor(value, path)
        if _numpy.is_array(value) and _numpy.code_of(value.dtype.str):
            name = self._store(_numpy.memory_of(value), flat_name(path))
            return {"$ndarray": name, "dtype": value.dtype.str}
        interface = _device_arrays.interface_of(value)
        if interface is not None:
            array = _device_arrays.parse(value, interface, describe(path))
            return {"$ndarray": self._store(array.memory, flat_name(path)), "dtype": array.typestr}
        if _numpy.is_scalar(value) and _numpy.code_of(value.dtype.str):
            if type(value) is not value.dtype.type:
                raise Refused(f"numpy.{value.dtype.name}(x)")
            return {"$scalar": value.dtype.str, "data": _base64(value.tobytes())}
        torch = imported("torch")
        if torch is not None:
            if type(value) is torch.Size:
                return {"$size": list(value)}
            if type(value) is torch.dtype:
                return {"$dtype": _torch.dtype_name(value)}
            if type(value) is torch.device:
                return {"$device": str(value)}
        return None

    def _tensor(self, value: Any, path: Path) -> Json | Parts:
        key = describe(path)
        parts = None if _torch.is_of_torch(value) else _composites.take(value, key)
        if parts is None:
            try:
                memory = _torch.memory_of(value, key)
                return {"$tensor": self._store(memory, flat_name(path))}
            except UnsupportedError:
                parts = _composites.take(value, key)
                if parts is None:
                    raise
        return _of_composite(parts)

    def _parts(self, value: Any, path: Path) -> Parts | None:
        """Return the parts of a container that `_native.encode` does not know.

        Raises:
            Refused: the items are not its whole state.
        """
        kind = type(value)
        if isinstance(value, LoadedDict):
            return _of_dict(dict(value))
        if kind is collections.OrderedDict:
            return self._ordered_dict(value, path)
        if kind is collections.Counter and _is_plain(value):
            return ('{"$counter":', [list(pair) for pair in value.items()], "}")
        if kind is set or kind is frozenset:
            if any(map(_holds_tensor, value)):
                raise Refused("list(x)", "which holds tensors")
            return (f'{{"${kind.__name__}":', _ordered(value), "}")
        if kind is collections.deque:
            return ('{"$deque":', list(value), f',"maxlen":{json.dumps(value.maxlen)}}}')
        if kind is collections.defaultdict:
            factory = json.dumps(_custom_types.factory_of(value))
            return ('{"$defaultdict":', dict(value), f',"factory":{factory}}}')
        box = _custom_types.fields_of(value)
        if box is None:
            return None
        name = json.dumps(box.name, ensure_ascii=False)
        return (f'{{"{box.tag}":{name},"fields":', tuple(box.steps()), "}")

    def _ordered_dict(self, value: Any, path: Path) -> Parts:
        attributes = vars(value)
        unknown = sorted(attributes.keys() - {METADATA})
        if unknown:
            self.refuse(
                f"{describe(path)} is an OrderedDict with the attribute {unknown[0]!r}, which "
                "would be lost: make it an item"
            )
        if METADATA not in attributes:
            return ('{"$odict":', value, "}")
        metadata = ((METADATA, attributes[METADATA]),)
        return ('{"$odict":', value, ',"attrs":', metadata, "}")

    def _pickle(self, value: object, path: Path) -> Json:
        if not self._allow_pickle:
            raise Refused(remedy(value))
        from ringstow._state.tree import _pickles  # slow import, rarely needed

        try:
            return {"$pickle": _base64(_pickles.dumps(value))}
        except Refused:
            raise
        except Exception as error:
            raise Refused(remedy(value), f"which can't be pickled ({error})") from error

    def _store(self, memory: Memory | LazyMemory, wanted: str) -> str:
        """Add the tensor, unless the same memory was added before; return its name."""
        return self._tensors.add(wanted, memory)


def _of_dict(value: dict[Any, Any]) -> Parts:
    """Return the parts of a dict, as `_native.encode` writes one."""
    plain = all(type(key) is str and not key.startswith("$") for key in value)
    return (value,) if plain else ('{"$dict":', value, "}")


def _of_composite(parts: TensorParts) -> Parts:
    name = json.dumps(parts.type, ensure_ascii=False)
    tensors = tuple((Attribute(name), one) for name, one in parts.tensors.items())
    return (f'{{"{COMPOSITE}":{name},"tensors":', tensors, ',"context":', parts.context or {}, "}")


def composite_tree(parts: TensorParts, tensors: dict[str, Json], path: Path) -> str:
    """Return the JSON of a composite whose inner tensors have been added, by their trees.

    Raises:
        InvalidStateError: its context has values that can't be saved.
    """
    key = f"{flat_name(path)}.context"
    context = encode({key: parts.context}, fast=False)
    if len(context.tensors):
        raise InvalidStateError(f"{describe(path)} is a DTensor whose context has tensors")
    tree = {COMPOSITE: parts.type, "tensors": tensors, "context": json.loads(context.tree)[key]}
    return json.dumps(tree, ensure_ascii=False, separators=(",", ":"))


def _is_plain(counter: collections.Counter[Any]) -> bool:
    """Return whether a counter counts only numbers and text."""
    kinds = {*map(type, counter), *map(type, counter.values())}
    return kinds <= {int, float, str} and str not in map(type, counter.values())


def _ordered(items: Iterable[Any]) -> list[Any]:
    """Return a set's items, in the same order at every save if they can be ordered."""
    listed = list(items)
    kinds = set(map(type, listed))
    return sorted(listed) if kinds == {str} or kinds == {int} else listed


def _holds_tensor(key: object) -> bool:
    return any(map(_torch.is_tensor, _cycles.reached(key, _inside_key)))


def _inside_key(key: Any) -> Iterable[Any]:
    return key if isinstance(key, (tuple, frozenset)) else _custom_types.items_of(key)


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
