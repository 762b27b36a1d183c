"""Collects each rank's parts of a model, and merges them on all ranks.

Does no I/O. The planner of torch.distributed.checkpoint supports every kind of sharded tensor: it
returns which region of which tensor a rank has.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ringstow import _native
from ringstow._core._errors import Error, InvalidStateError, KeyMismatchError
from ringstow._state.tensors import _bitsandbytes, _torch
from ringstow._state.tensors._dequantize import Dense
from ringstow._state.tensors._memory import Memory, in_elements
from ringstow._state.tree._fitting import two_of_one_name
from ringstow._state.tree._named_leaves import steps_of, text_of
from ringstow._state.tree._refusals import Refusals
from ringstow._state.tree._rename import Rename
from ringstow._state.tree._select import listed
from ringstow.dcp import _resolved_items
from ringstow.dcp._export_plan import Box, Shape, Tensor

# Replicated tensors of fewer bytes come from the first rank that has them: normalization statistics
# may differ between ranks, and must come from one rank.
_SMALL_BYTES = 1 << 20


class Chunk(NamedTuple):
    """One rank's description of a region that it holds."""

    name: str
    code: str
    """safetensors' name of the dtype in the file."""
    item_bytes: int
    """Bytes of an element in the file."""
    shape: Shape
    box: Box
    tie: str | None
    """The name of an earlier tensor with the same memory, of which this is the same region."""
    is_plain: bool
    """Whether it is a complete tensor that is not distributed."""


class Local(NamedTuple):
    """The data of a chunk, on the rank that holds it."""

    tensor: torch.Tensor | Dense
    memory: Memory | None
    """None of a tensor that is made when it is written."""


@dataclasses.dataclass
class Held:
    """One rank's part of the model."""

    chunks: list[Chunk]
    locals: list[Local]
    """The tensor of each chunk."""
    left_out: list[str]
    """Names of values that are not tensors."""
    outside: set[str]
    """First keys of the names without the prefix."""
    renamed: dict[str, str]
    """The new name of each name, if names are mapped."""


class Model(NamedTuple):
    """The whole model of all ranks."""

    tensors: list[Tensor]
    codes: list[str]
    """safetensors' name of each tensor's dtype."""
    tied: list[tuple[str, str]]
    """Each name that is not written, with the written name of the same tensor."""
    left_out: list[str]

    def specs(self) -> list[tuple[str, str, Shape]]:
        """Return name, dtype and shape of each tensor, as the native side takes them."""
        pairs = zip(self.tensors, self.codes, strict=True)
        return [(one.name, code, in_elements(one.shape, code)) for one, code in pairs]


def held(
    plan: SavePlan, planner: SavePlanner, prefix: str, dtype: str | None, rename: Rename | None
) -> Held:
    """Return this rank's part by its plan, of the names with a prefix after the renaming.

    Raises:
        UnsupportedError: tensors of kinds that can't be written; names them all.
        InvalidStateError: tensors can't be written, some for another reason; names them all.
    """
    mine = Held([], [], [], set(), {})
    refusals = Refusals()
    first: dict[object, str] = {}
    # Codes of bitsandbytes' layers, and the scales that fit them.
    fixed = set() if dtype is None else _bitsandbytes.entries_in(i.index.fqn for i in plan.items)
    for item in plan.items:
        name = item.index.fqn
        if rename is not None:
            name = text_of(rename.there(steps_of((name,))))
            mine.renamed.setdefault(item.index.fqn, name)
        if not name.startswith(prefix) or len(name) == len(prefix):
            mine.outside.add(name.partition(".")[0])
        elif item.type == WriteItemType.BYTE_IO:
            mine.left_out.append(name.removeprefix(prefix))
        else:
            try:
                to = None if item.index.fqn in fixed else dtype
                _add(mine, item, planner, name.removeprefix(prefix), to, first)
            except Error as error:
                refusals.add(error)
            except Exception as error:  # the planner's own error
                refusals.add(InvalidStateError(f"{name}: {type(error).__name__}: {error}"))
    refusals.check()
    return mine


def _add(
    mine: Held,
    item: WriteItem,
    planner: SavePlanner,
    name: str,
    dtype: str | None,
    first: dict[object, str],
) -> None:
    value: Any = planner.resolve_data(item)
    memory: Memory | None = None
    tensor: Any = value
    if isinstance(value, Dense):
        stored, identity = value.code, value.identity
    elif isinstance(value, torch.Tensor):
        tensor = _resolved_items.reachable(value)
        memory = _torch.memory_of(tensor, item.index.fqn)
        stored, identity = memory.dtype, memory.identity
    else:
        raise InvalidStateError(f"{item.index.fqn}: the planner gave no tensor")
    data = item.tensor_data
    if data is None or data.chunk is None:
        raise InvalidStateError(
            f"{item.index.fqn}: the plan does not say which region of it to save"
        )
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    shape = tuple(data.size)
    if tuple(tensor.shape) != box.sizes:
        raise InvalidStateError(
            f"{item.index.fqn} has the shape {list(tensor.shape)}, and its plan says "
            f"{list(box.sizes)}"
        )
    tie = None
    if box.elements():
        known = first.setdefault((identity, box, shape), name)
        tie = known if known != name else None
    code = _torch.cast_code(stored, dtype)
    size = _torch.dtype_of(code, item.index.fqn).itemsize
    is_plain = item.type == WriteItemType.TENSOR
    mine.chunks.append(Chunk(name, code, size, shape, box, tie, is_plain))
    owner: Any = tensor if memory is None else memory.owner
    mine.locals.append(Local(owner, memory))


def merged(said: Sequence[tuple[list[Chunk], list[str], set[str]]], prefix: str) -> Model:
    """Return the whole model of all ranks; equal on all of them.

    Args:
        said: each rank's chunks, names of other values, and first keys without the prefix.
        prefix: the prefix of names, for messages.

    Raises:
        KeyMismatchError: no tensor has a name with the prefix.
        InvalidStateError: the ranks' tensors do not match, or parts of a tensor are missing or held
            twice.
    """
    of_name: dict[str, list[tuple[int, Chunk]]] = {}
    for rank, (held_there, _, _) in enumerate(said):
        for chunk in held_there:
            of_name.setdefault(chunk.name, []).append((rank, chunk))
    if not of_name:
        raise _nothing(set().union(*(outside for _, _, outside in said)), prefix)
    for name, chunks in of_name.items():
        _check_alike(name, chunks)
    ties = _ties(of_name)
    load = [0] * len(said)
    model = Model([], [], list(ties.items()), [])
    for name, chunks in of_name.items():
        if name not in ties:
            model.tensors.append(_tensor(chunks, load))
            model.codes.append(chunks[0][1].code)
    _check_whole(model.tensors)
    others = (other for _, names, _ in said for other in names)
    model.left_out.extend(sorted({name for name in others if name not in of_name}))
    return model


def check_renamed(said: Iterable[dict[str, str]], where: str) -> None:
    """Refuse a renaming that makes one name of two.

    Args:
        said: each rank's new name of each name.
        where: the path, for messages.

    Raises:
        KeyMismatchError: two names are equal after the renaming.
    """
    names: dict[str, str] = {}
    for old, new in itertools.chain.from_iterable(one.items() for one in said):
        if names.setdefault(new, old) != old:
            raise two_of_one_name((names[new], old), "the state dict", where)


def _nothing(outside: set[str], prefix: str) -> KeyMismatchError:
    others = ", ".join(sorted(outside)[:20])
    what = f"that starts with {prefix!r}; there are {others}" if prefix else "in it"
    return KeyMismatchError(f"no tensor has a name {what}", missing=[prefix])


def _check_alike(name: str, chunks: list[tuple[int, Chunk]]) -> None:
    first_rank, first = chunks[0]
    for rank, chunk in chunks:
        if (chunk.code, chunk.shape, chunk.is_plain) != (first.code, first.shape, first.is_plain):
            raise InvalidStateError(
                f"{name} is {_described(first)} on rank {first_rank} and {_described(chunk)} on "
                f"rank {rank}: export the same model on all ranks"
            )


def _described(chunk: Chunk) -> str:
    kind = "a plain tensor" if chunk.is_plain else "a sharded tensor"
    return f"{kind} of {chunk.code} {list(chunk.shape)}"


def _ties(of_name: dict[str, list[tuple[int, Chunk]]]) -> dict[str, str]:
    """Return each name that shares its memory with another name on every rank."""
    ties: dict[str, str] = {}
    for name, chunks in of_name.items():
        known = {chunk.tie for _, chunk in chunks if chunk.box.elements()}
        if len(known) == 1:
            (tie,) = known
            if tie is not None:
                ties[name] = ties.get(tie, tie)
    return ties


def _tensor(chunks: list[tuple[int, Chunk]], load: list[int]) -> Tensor:
    first = chunks[0][1]
    boxes: dict[Box, list[int]] = {}
    for rank, chunk in chunks:
        holders = boxes.setdefault(chunk.box, []) if chunk.box.elements() else []
        if rank not in holders:
            holders.append(rank)
    tensor = Tensor(first.name, first.shape, first.item_bytes, boxes)
    # Ranks may hold different values of a plain tensor: one rank provides the whole tensor.
    if first.is_plain and tensor.nbytes:
        ((box, holders),) = boxes.items()
        small = tensor.nbytes < _SMALL_BYTES
        holder = holders[0] if small else min(holders, key=lambda rank: (load[rank], rank))
        load[holder] += tensor.nbytes
        boxes[box] = [holder]
    return tensor


def _check_whole(tensors: list[Tensor]) -> None:
    wrong = [
        tensor.name
        for tensor in tensors
        if math.prod(tensor.shape) and not _native.tiles(tensor.shape, list(tensor.boxes))
    ]
    if wrong:
        raise InvalidStateError(
            f"{listed('the ranks do not hold each element once of', wrong)}. Call export_hf on "
            "every rank that holds a shard, with a group of all of them"
        )
