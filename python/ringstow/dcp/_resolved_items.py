"""The items that a rank writes, each resolved to the address of its bytes. Does no I/O."""

from __future__ import annotations

import ctypes
import io
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ringstow._core._errors import Error, InvalidStateError
from ringstow._state.objects._quantized_layers import Codes
from ringstow._state.tensors import _composites, _cuda, _torch
from ringstow._state.tensors._memory import ItemSpec, Memory, in_elements
from ringstow._state.tree._refusals import Refusals
from ringstow._state.tree._select import is_below
from ringstow.dcp import _objects, _private
from ringstow.dcp._composites import Taken, take
from ringstow.dcp._metadata import Shape


class Items(NamedTuple):
    """The items that a rank writes. Keep it until every byte has been read."""

    specs: list[ItemSpec]
    nbytes: int
    trees: dict[str, str]
    """The tree of each tensor that is made of others, by the name of its item; the specs have its
    inner tensors."""


_PICKLE = (
    "StorageWriter(allow_pickle=True) saves such a value as torch.save pickles it; loading it also "
    "needs StorageReader(allow_pickle=True), which can run any code"
)


def resolve(
    plan: SavePlan, planner: SavePlanner, *, alone: bool = False, allow_pickle: bool = False
) -> Items:
    """Resolve every item of a final plan.

    Args:
        plan: this rank's plan.
        planner: the planner that has the data.
        alone: whether the rank saves by itself. It then also names tensors of which it has no
            elements, since no other rank does.
        allow_pickle: save objects that the default load would refuse.

    Raises:
        UnsupportedError: items can't be saved because of their kind; names them all.
        InvalidStateError: items can't be saved, some for another reason; names them all.
    """
    items = Items([], 0, {})
    refusals = Refusals(_PICKLE)
    nbytes = 0
    names: set[str] = set()
    find = _finder()
    with torch.no_grad():  # torch's planner calls autograd for each DTensor
        for item in plan.items:
            memory = _resolve(item, planner, refusals, find, alone=alone, allow_pickle=allow_pickle)
            if memory is None:
                continue
            if isinstance(memory, Taken):
                items.trees[item.index.fqn] = memory.tree
                items.specs.extend(memory.specs)
                nbytes += sum(inner.nbytes for _, inner, *_ in memory.specs)
                continue
            is_known = alone and memory.nbytes == 0 and item.index.fqn in names
            spec = None if is_known else _spec(item, memory, keeps_empty=alone)
            if spec is not None:
                names.add(spec[0])
                items.specs.append(spec)
                nbytes += memory.nbytes
    _check_codes(plan, planner, refusals)
    refusals.check()
    return items._replace(nbytes=nbytes)


def _check_codes(plan: SavePlan, planner: SavePlanner, refusals: Refusals) -> None:
    """Refuse codes of 4-bit layers whose scales the state lacks."""
    codes = Codes()
    state = getattr(planner, "state_dict", None)  # a plan lacks what only another rank writes
    if not codes.is_on or not isinstance(state, dict):
        return
    for item in plan.items:
        if item.type == WriteItemType.SHARD and item.tensor_data is not None:
            data = item.tensor_data
            codes.note(item.index.fqn, data.size, data.properties.dtype)
    try:
        codes.check(lambda name: f"{name}.absmax" in state)
    except Error as error:
        refusals.add(error)


# Returns the address of a plain tensor's bytes; None for any other tensor.
Find = Callable[[Any], Memory | None]


def _finder() -> Find:
    exchange, address_of = _torch.usual().exchange, _cuda.finder()

    def find(value: Any) -> Memory | None:
        found = None if exchange is None else exchange.find(value, address_of)
        if found is None:
            return None
        code, shape, address = found
        # An alias, for the same reason as in `_torch.memory_of`.
        return Memory(code, shape, None, address, value.nbytes, value.detach())

    return find


def _describe(item: WriteItem) -> str:
    offset = item.index.offset
    at = f" at {list(offset)}" if offset is not None and any(offset) else ""
    return f"{item.index.fqn}{at}"


def _resolve(
    item: WriteItem,
    planner: SavePlanner,
    refusals: Refusals,
    find: Find,
    *,
    alone: bool,
    allow_pickle: bool,
) -> Memory | Taken | None:
    """Return the address of an item's bytes, or a tensor's parts; None if it is refused."""
    try:
        _check_name(item)
        if item.type != WriteItemType.BYTE_IO:
            value = planner.resolve_data(item)
            memory = find(value)
            if memory is None and _composites.is_composite(value):
                return take(value, item, planner, refusals, alone=alone)
            return _tensor(value, item, memory)
        data = _objects.loadable(item, planner, refusals, allow_pickle=allow_pickle)
        return None if data is None else _blob(data, _describe(item))
    except Error as error:
        refusals.add(error)
    except Exception as error:  # the planner's own error
        text = f"{_describe(item)}: {type(error).__name__}: {error}"
        refusals.add(InvalidStateError(text))
    return None


def _check_name(item: WriteItem) -> None:
    try:
        item.index.fqn.encode()
    except UnicodeEncodeError:
        raise InvalidStateError(
            f"the key {item.index.fqn!r:.80} is not valid Unicode (a lone surrogate)"
        ) from None


def _blob(value: Any, key: str) -> Memory:
    """Return the address of an object's bytes: the whole BytesIO, ignoring its position."""
    if isinstance(value, io.BytesIO):
        view = value.getbuffer()
    elif isinstance(value, (bytes, bytearray, memoryview)):
        view = memoryview(bytearray(value))
    else:
        kind = type(value).__name__
        raise InvalidStateError(f"{key}: the planner gave a {kind} for an object, not a BytesIO")
    if not view.nbytes:
        return Memory("U8", (0,), None, 0, 0, value)
    start = ctypes.c_char.from_buffer(view)  # holds the view, and so the bytes
    return Memory("U8", (view.nbytes,), None, ctypes.addressof(start), view.nbytes, start)


def _tensor(value: Any, item: WriteItem, memory: Memory | None) -> Memory:
    if memory is None:
        key = _describe(item)
        if not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            raise InvalidStateError(f"{key}: the planner gave a {kind} for a tensor")
        memory = _torch.memory_of(reachable(value), key)
    sizes = _chunk(item, memory.dtype)[0]
    if memory.shape != sizes:
        raise InvalidStateError(
            f"{_describe(item)} is planned with the shape {list(sizes)} and has "
            f"{list(memory.shape)}; was it resized while it was being saved?"
        )
    return memory


def reachable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose elements the native side can read: usually itself.

    Waits for a collective that still computes it (on a GPU the current stream waits), and copies it
    to host memory from devices other than CPU and CUDA.
    """
    tensor = _private.waited_for(tensor)
    if tensor.device.type != "meta" and not _cuda.is_addressable(tensor):
        tensor = tensor.detach().to("cpu")
    return tensor


def _chunk(item: WriteItem, dtype: str) -> tuple[Shape, Shape, Shape]:
    """Return an item's sizes, its offsets and the whole tensor's shape, in elements."""
    data = item.tensor_data
    if data is None or data.chunk is None:
        raise InvalidStateError(
            f"{_describe(item)}: the plan does not say which region of it to save"
        )
    sizes, offsets, shape = tuple(data.chunk.sizes), tuple(data.chunk.offsets), tuple(data.size)
    if dtype != "F4":
        return sizes, offsets, shape
    return in_elements(sizes, dtype), in_elements(offsets, dtype), in_elements(shape, dtype)


def _spec(item: WriteItem, memory: Memory, *, keeps_empty: bool) -> ItemSpec | None:
    """Return an item as the native side takes it; None if other ranks write all of the tensor.

    With ``keeps_empty`` a chunk without elements is an item, too.
    """
    if item.type == WriteItemType.BYTE_IO:
        return (item.index.fqn, memory, None, True)
    _, offsets, shape = _chunk(item, memory.dtype)
    if memory.nbytes == 0 and memory.shape != shape:
        if not keeps_empty and (0 not in shape or any(offsets)):
            return None
        if 0 in shape:  # one empty chunk of an empty tensor is enough
            memory = memory._replace(shape=shape)
    region = None if memory.shape == shape else (shape, offsets)
    return (item.index.fqn, memory, region, False)


def check_parts(plans: Sequence[SavePlan], parts: Iterable[str]) -> None:
    """Refuse ``droppable`` parts that no plan has items of, before anything is written.

    The commit checks it too: with torch's plan caching the plans may be missing here.

    Raises:
        InvalidStateError: no plan has items of a part.
    """
    if not all(getattr(plan, "usable", True) for plan in plans):
        return
    for part in parts:
        if not any(is_below(item.index.fqn, part) for plan in plans for item in plan.items):
            raise InvalidStateError(
                f"droppable: the state has nothing named {part!r}, and nothing below it"
            )


def sharded(plan: SavePlan) -> list[str]:
    """Return the names of the tensors of which a plan holds only parts."""
    missing: dict[str, int] = {}
    for item in plan.items:
        data = item.tensor_data
        if data is not None and data.chunk is not None:
            missing.setdefault(item.index.fqn, math.prod(data.size))
            missing[item.index.fqn] -= math.prod(data.chunk.sizes)
    return [name for name, elements in missing.items() if elements > 0]
