"""`Foreign`: a checkpoint of another program, read as the native side reads ringstow's.

It has the methods of `_native.Checkpoint` that loads and `ringstow.open` use. The native reader
reads the tensors of safetensors files, all at once; others are read one at a time, from mapped
files or by torch's own readers.
"""

from __future__ import annotations

import collections
import json
import math
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ringstow._core._errors import InvalidStateError, UnsupportedError
from ringstow._foreign._nested_states import Parts, bytes_at, check, check_size
from ringstow._state.tensors import _numpy, _torch
from ringstow._state.tensors._memory import Address, LazyTensor, moved, place_at
from ringstow._state.tree import _custom_types
from ringstow._state.tree._refusals import Refused, type_name
from ringstow._state.tree._walk import (
    METADATA,
    Box,
    Leaf,
    Path,
    describe,
    flat_name,
    like,
    metadata_of,
)

if TYPE_CHECKING:
    from ringstow._foreign._torch_file import Files

_Row = tuple[str, str, tuple[int, ...], int]
_Region = tuple[tuple[int, ...], tuple[int, ...]]
_Slice = tuple[str, int, tuple[int, ...], tuple[int, ...], Address, tuple[int, ...]]


class Foreign:
    """A checkpoint of another program.

    ``tree`` is its state, with a `Leaf` in place of each tensor, array, and torch's small values.
    """

    problem: str | None = None
    dropped: list[str] = []  # noqa: RUF012 - the native side's type
    stamp: str | None = None

    def __init__(
        self,
        path: str,
        kind: str,
        parts: Parts,
        files: Files,
        *,
        left_out: Iterable[str] = (),
        verified: bool = False,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        """Open the checkpoint.

        Args:
            path: its path.
            kind: the kind, a key of `KINDS`.
            parts: the function that opens each part. A part named "" is the whole state.
            files: reads the files of the parts.
            left_out: files that are not read without ``allow_pickle``.
            verified: whether loads verify checksums.
            progress: called with the bytes read, and their total.
        """
        self.path = path
        self.kind = kind
        self.left_out = tuple(left_out)
        self._parts = parts
        self._files = files
        self._is_verified = verified
        self._progress = progress
        self._tree: dict[Any, Any] = {}
        self._opened: set[str] = set()
        self._held: dict[str, Any] = {}
        self._names: dict[Any, str] = {}
        self._rows: dict[str, _Row] = {}

    # The contents of the checkpoint.

    @property
    def has_text_keys(self) -> bool:
        """Whether DCP saved it, which writes the keys of dicts as text and drops empty ones."""
        return self.kind in ("dcp", "lightning", "megatron")

    @property
    def tree(self) -> dict[Any, Any]:
        """The skeleton of the whole state; opens every part."""
        return self.tree_of(None, None)

    def tree_of(self, prefix: str | None, names: Iterable[str] | None) -> dict[Any, Any]:
        """Return a skeleton with at least the leaves of a prefix or names, in the parts' order.

        Opens only the parts that may have them; all parts if none may.

        Raises:
            InvalidStateError: a file does not hold a state dict. UnsupportedError: a value can only
                be unpickled; or a tensor's kind is not supported. CorruptCheckpointError,
                FormatError: the checkpoint is damaged.
            OSError: the system refused.
        """
        wanted = [part for part in self._parts if _may_hold(part, prefix, names)]
        for part in wanted or self._parts:
            if part not in self._opened:
                self._open(part)
        order = {part: number for number, part in enumerate(self._parts)}
        if "" not in order:
            self._tree = dict(sorted(self._tree.items(), key=lambda item: order[item[0]]))
        return self._tree

    def _open(self, part: str) -> None:
        value = self._parts[part]()
        if not part and not isinstance(value, dict):
            raise InvalidStateError(
                f"{self.path} holds a {type_name(value)}, not a state dict: read it with "
                "torch.load(weights_only=True)"
            )
        at = (part,) if part else ()
        check(self.path, value, at)
        if part:
            self._tree[part] = self._leafed(value, at)
        else:
            self._tree = self._leafed(value, at)
        self._opened.add(part)

    def _leafed(self, value: Any, path: Path) -> Any:
        """Return a value with a leaf in place of each tensor, array and small value of torch's."""
        if type(value) is LazyTensor or _torch.is_tensor(value) or _numpy.is_array(value):
            return self._leaf(value, path)
        kind = type(value)
        if kind in (dict, collections.OrderedDict, collections.defaultdict):
            made = like(value, ())
            for key, item in value.items():
                made[key] = self._leafed(item, (*path, key))
            metadata = metadata_of(value)
            if metadata is not None:
                made._metadata = self._leafed(metadata, (*path, METADATA))
            return made
        if kind in (list, tuple, collections.deque):
            return like(value, [self._leafed(item, (*path, n)) for n, item in enumerate(value)])
        if kind.__module__ == "torch":
            return _of_torch(value)
        if _custom_types.has_fields(value):
            return self._boxed(value, path)
        return value

    def _boxed(self, value: Any, path: Path) -> Any:
        try:
            box = _custom_types.fields_of(value)
        except Refused:  # keep it unchanged
            return value
        assert box is not None
        items = [self._leafed(item, (*path, step)) for step, item in box.steps()]
        return Box(box.tag, box.name, dict(zip(box.items, items, strict=True)))

    def _leaf(self, value: Any, path: Path) -> Leaf:
        key, row, dtype = self._described(value, path)
        name = self._names.get(key)
        if name is None:
            name = base = flat_name(path)
            number = 2
            while name in self._rows:
                name, number = f"{base}#{number}", number + 1
            self._names[key] = name
            self._rows[name] = (name, *row)
            self._held[name] = value
        return Leaf("$ndarray" if dtype else "$tensor", name, dtype)

    def _described(self, value: Any, path: Path) -> tuple[Any, tuple[Any, ...], str]:
        """Return an identity of a tensor's elements, its row without the name, numpy's dtype."""
        if type(value) is LazyTensor:
            return id(value), (value.dtype, value.shape, value.nbytes), value.array
        where = f"{self.path}: {describe(path)}"
        if _numpy.is_array(value):
            code = _numpy.code_of_array(value)
            if code is None:
                raise UnsupportedError(f"{where} is an array of {value.dtype}, which is not read")
            return id(value), (code, value.shape, value.nbytes), value.dtype.str
        _torch.check_dense(value, where)
        code, shape = _torch.code_of(value, where), _torch.shape_of(value, where)
        nbytes = value.numel() * value.element_size()
        place = value.data_ptr() if nbytes else id(value)
        view = (value.stride(), value.is_conj(), value.is_neg())
        return (place, code, shape, view), (code, shape, nbytes), ""

    @property
    def tensors(self) -> list[_Row]:
        """Name, dtype, shape and bytes of each tensor of the parts that are open."""
        return list(self._rows.values())

    def tensor(self, name: str) -> _Row | None:
        """Return the row of a tensor; None if there is none."""
        return self._rows.get(name)

    @property
    def info(self) -> str:
        """Like `_native.Checkpoint.info`; times are from the file system, and versions 0."""
        rows = self.tensors
        return json.dumps(
            {
                "path": self.path,
                "kind": self.kind,
                "version": 0,
                "writer": "",
                "created_unix_ms": 0,
                "generation": 0,
                "world_size": 1,
                "block_bytes": 0,
                "tensors": len(rows),
                "tensor_bytes": sum(nbytes for *_, nbytes in rows),
                "file_bytes": bytes_at(self.path),
                "files": [],
                "stripes": [],
                "part_of": None,
                "step": None,
                "metrics": {},
                "dropped": [],
            }
        )

    def chunks(self, name: str) -> list[_Region]:
        """Return the only chunk of a tensor."""
        shape = self._rows[name][2]
        return [((0,) * len(shape), shape)]

    def check_whole(self, names: list[str]) -> None:
        """Do nothing: every tensor is whole."""

    def damaged(self, names: list[str]) -> str:
        """Refuse: without checksums the damaged tensors are unknown.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            f'{self.path} is a checkpoint of another program ({self.kind}): on_corrupt="skip" is '
            "for ringstow's, which have a checksum for each MiB"
        )

    # Reads.

    def take(self, name: str) -> Any:
        """Return a tensor or array: a view of a mapped file, or a copy that was just read.

        Raises:
            CorruptCheckpointError: the bytes are damaged.
            OSError: the system refused.
        """
        held = self._held[name]
        if type(held) is LazyTensor:
            return held.load()
        if _torch.is_tensor(held):
            self._files.check(held)
            return held.detach().resolve_conj().resolve_neg()
        return held

    def load(self, names: list[str]) -> tuple[list[Any], str]:
        """Return the bytes of tensors, in memory of their own, and a LoadReport."""
        started, reports = time.monotonic(), list[str]()
        blocks: dict[str, Any] = {}
        total = sum(self._rows[name][3] for name in names)
        check_size(self.path, total, max(names, key=lambda name: self._rows[name][3], default=""))
        done = 0
        for source, group in self._by_source(names):
            if source is not None:
                found, report = source.load([self._held[name].origin[1] for name in group])
                reports.append(report)
                blocks.update(zip(group, found, strict=True))
            for name in group if source is None else ():
                block = bytearray(self._rows[name][3])
                if block:
                    _bytes_of(_over(block), self.take(name))
                blocks[name] = block
                done += len(block)
                self._tell(done, total)
            done = sum(self._rows[name][3] for name in blocks)
            self._tell(done, total)
        return [blocks[name] for name in names], self._report(names, started, reports)

    def load_into(self, targets: list[tuple[str, Address, int]]) -> str:
        """Fill dense memory with tensors, one after the other; return a LoadReport."""
        started, reports = time.monotonic(), list[str]()
        for source, group in self._by_source(name for name, *_ in targets):
            wanted = [one for one in targets if one[0] in group]
            if source is not None:
                own = [(self._held[name].origin[1], *rest) for name, *rest in wanted]
                reports.append(source.load_into(own))
                continue
            for name, address, nbytes in wanted:
                if nbytes:
                    _bytes_of(_memory(address, (nbytes,), (1,), 1), self.take(name))
        return self._report([name for name, *_ in targets], started, reports)

    def read(self, slices: list[_Slice]) -> str:
        """Fill strided memory with regions of tensors; return a LoadReport."""
        started, reports = time.monotonic(), list[str]()
        names = list(dict.fromkeys(name for name, *_ in slices))
        for source, group in self._by_source(names):
            wanted = [one for one in slices if one[0] in group]
            if source is not None:
                own = [(self._held[name].origin[1], *rest) for name, *rest in wanted]
                reports.append(source.read(own))
                continue
            for one in wanted:
                self._read(*one)
        return self._report(names, started, reports)

    def _read(
        self,
        name: str,
        _: int,
        offsets: tuple[int, ...],
        lengths: tuple[int, ...],
        address: Address,
        strides: tuple[int, ...],
    ) -> None:
        import torch

        source = self.take(name)
        if _numpy.is_array(source):
            source = torch.from_numpy(source.astype(source.dtype.newbyteorder("=")))
        for dimension, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            source = source.narrow(dimension, offset, length)
        flipped = [n for n, step in enumerate(strides) if step < 0]
        back = sum((lengths[n] - 1) * strides[n] for n in flipped)
        target = _memory(moved(address, back), lengths, [*map(abs, strides)], 0, source.dtype)
        target.copy_(source.flip(flipped) if flipped else source)

    def _by_source(self, names: Iterable[str]) -> list[tuple[Any, dict[str, None]]]:
        """Group names by the native checkpoint that reads them; None: `take` does."""
        groups: dict[int, tuple[Any, dict[str, None]]] = {}
        for name in names:
            source = self._origin(name)
            groups.setdefault(id(source), (source, {}))[1][name] = None
        return list(groups.values())

    def _origin(self, name: str) -> Any:
        held = self._held[name]
        return held.origin[0] if type(held) is LazyTensor and held.origin else None

    def _tell(self, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(done, total)

    def _report(self, names: list[str], started: float, native: list[str]) -> str:
        """Return a LoadReport of these tensors, of which the native reader has read some."""
        reports = [json.loads(text) for text in native]
        own = sum(self._rows[name][3] for name in names if self._origin(name) is None)
        engines = [one["engine"] for one in reports] + [self.kind] * (own > 0 or not reports)
        spent = dict.fromkeys(("prepare", "checksum_cpu", "device_copy"), 0.0)
        seconds = time.monotonic() - started
        return json.dumps(
            {
                "path": self.path,
                "engine": " and ".join(dict.fromkeys(engines)),
                "direct": any(one["direct"] for one in reports),
                "fixed_buffers": sum(one["fixed_buffers"] for one in reports),
                "fallbacks": [one for report in reports for one in report["fallbacks"]],
                "device_bytes": sum(one["device_bytes"] for one in reports),
                "pinned": next((one["pinned"] for one in reports), None),
                "tensors": len(names),
                "tensor_bytes": own + sum(one["tensor_bytes"] for one in reports),
                "read_bytes": own + sum(one["read_bytes"] for one in reports),
                "verified": self._is_verified and self._files.has_checksums and not reports,
                "seconds": {**spent, "read": seconds, "total": seconds},
            }
        )


def _may_hold(part: str, prefix: str | None, names: Iterable[str] | None) -> bool:
    """Return whether a part may have leaves that a prefix or names select."""
    if not part or (not prefix and names is None):
        return True
    below = f"{part}."
    if names is not None:
        return any(f"{name}.".startswith(below) for name in names)
    return f"{prefix}.".startswith(below) or below.startswith((prefix or "").rstrip(".") + ".")


def _of_torch(value: Any) -> Any:
    import torch

    if type(value) is torch.Size:
        return Leaf("$size", list(value))
    if isinstance(value, torch.dtype):
        return Leaf("$dtype", _torch.dtype_name(value))
    return Leaf("$device", str(value)) if isinstance(value, torch.device) else value


def _bytes_of(target: Any, source: Any) -> None:
    """Copy a tensor's or array's elements, in row-major order, to a 1-d tensor of bytes."""
    import torch

    if _numpy.is_array(source):
        source = torch.frombuffer(bytearray(source.tobytes()), dtype=torch.uint8)
    elif source.element_size() and source.is_contiguous():
        source = source.reshape(-1).view(torch.uint8)
    else:  # one copy, directly to its destination
        target.view(source.dtype).view(source.shape).copy_(source)
        return
    target.copy_(source)


def _over(block: bytearray) -> Any:
    import torch

    return torch.frombuffer(block, dtype=torch.uint8)


class _OnDevice:
    """GPU memory in the protocol by which torch accepts it from other libraries."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


def _memory(
    address: Address, shape: Iterable[int], strides: Iterable[int], itemsize: int, dtype: Any = None
) -> Any:
    """Return a tensor over strided memory; strides are in bytes."""
    import ctypes

    import torch

    dtype = torch.uint8 if dtype is None else dtype
    itemsize = itemsize or dtype.itemsize
    shape, strides = tuple(shape), tuple(strides)
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype, device="cpu")
    span = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + itemsize
    pointer, device = place_at(address)
    if device is None:
        flat = torch.frombuffer((ctypes.c_char * span).from_address(pointer), dtype=torch.uint8)
    else:
        flat = torch.as_tensor(_OnDevice(pointer, span), device=f"cuda:{device}")
    return flat.view(dtype).as_strided(shape, [step // itemsize for step in strides])
