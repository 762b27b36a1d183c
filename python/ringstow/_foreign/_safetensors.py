"""One safetensors file, mapped into memory."""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

from ringstow import _native
from ringstow._core import _files
from ringstow._core._errors import CorruptCheckpointError, MissingFilesError
from ringstow._foreign._nested_states import State
from ringstow._foreign._pickles import REMEDY, reading
from ringstow._state.tensors import _torch

_LENGTH = 8
_HEADER_BYTES_MAX = 100_000_000


def read(path: str) -> State:
    """Return a file's tensors by name, as views of the mapped file.

    Raises:
        CorruptCheckpointError: the file is truncated, or its header is invalid.
        UnsupportedError: this torch does not have a tensor's dtype.
    """
    import torch

    with reading(path, "its header"):
        header = _header(path)
        mapped = torch.UntypedStorage.from_file(path, False, os.path.getsize(path))
        state = {one[0]: _tensor(one, mapped, header.base) for one in header.tensors}
        if len(state) < len(header.tensors):
            raise _damaged(path, "lists a tensor twice")
        return state


class _Header(NamedTuple):
    tensors: list[tuple[str, str, list[int], int, int]]
    """Name, dtype, shape, and the range of bytes in the data."""
    is_sharded: bool
    """Whether the tensors may be regions of larger tensors."""
    base: int
    """The offset at which the data begins."""


def _header(path: str) -> _Header:
    size = os.path.getsize(path)
    with _files.reading(path) as file:
        length = int.from_bytes(file.read(_LENGTH), "little")
        if not 2 <= length <= min(_HEADER_BYTES_MAX, size - _LENGTH):
            raise _damaged(path, f"has {size} bytes, which is no safetensors file")
        text = file.read(length)
    try:
        tensors, is_sharded = _native.safetensors_header(text)
    except ValueError as why:
        raise _damaged(path, f"has no valid header: {why}") from None
    base = _LENGTH + length
    end = base + max((end for *_, end in tensors), default=0)
    if end != size:
        raise _damaged(path, f"is cut short, or too long: {size} bytes, not {end}")
    return _Header(tensors, is_sharded, base)


def is_as_listed(path: str, index: str) -> bool:
    """Return whether each tensor is in its listed file, or in no file.

    Programs that read all listed files do not notice an index of an earlier save.

    Raises:
        MissingFilesError, CorruptCheckpointError: an error of `listed`, or a file is damaged.
    """
    held: set[tuple[str, str]] = set()
    for file in listed(path, index):
        with reading(file, "its header"):
            header = _header(file)
            if header.is_sharded:
                return True  # its tensors are in several files
            held.update((name, os.path.basename(file)) for name, *_ in header.tensors)
    where = _weight_map(path, index)
    return where.items() <= held or not where.keys() <= {name for name, _ in held}


def _weight_map(path: str, index: str) -> dict[str, str]:
    at = os.path.join(path, index)
    with reading(at, "the index"), _files.reading(at) as stream:
        found: dict[str, str] = json.load(stream)["weight_map"]
        for name in dict.fromkeys(found.values()):
            if os.path.basename(name) != name or name in ("", ".", ".."):
                raise _damaged(at, f"refers to {name!r}, which is not a file in its directory")
    return found


def listed(path: str, index: str) -> list[str]:
    """Return the files that an index such as ``model.safetensors.index.json`` lists.

    Raises:
        MissingFilesError: some are missing; names them.
        CorruptCheckpointError: the file is not an index, or names files outside its directory.
    """
    names = list(dict.fromkeys(_weight_map(path, index).values()))
    missing = [name for name in names if not os.path.isfile(os.path.join(path, name))]
    if missing:
        ending = os.path.splitext(missing[0])[1]
        others = sorted(n for n in {*os.listdir(path)} - {*names} if n.endswith(ending))
        remedy = REMEDY
        if others:
            remedy += (
                f". If {', '.join(others[:5])} are the newer weights, the index is of an earlier "
                "save: move it away"
            )
        raise MissingFilesError(
            f"{path} lacks {len(missing)} of the files that {index} lists: "
            f"{', '.join(missing[:20])}; {remedy}",
            path=path,
        )
    return [os.path.join(path, name) for name in names]


def _tensor(entry: tuple[str, str, list[int], int, int], mapped: Any, base: int) -> Any:
    import torch

    name, code, shape, begin, end = entry
    dtype = _torch.dtype_of(code, name)
    if code == "F4":  # torch counts pairs
        shape = [*shape[:-1], shape[-1] // 2]
    if begin == end:
        return _torch.empty(tuple(shape), dtype)
    flat = torch.empty(0, dtype=torch.uint8, device="cpu")
    flat.set_(mapped, base + begin, (end - begin,), (1,))
    if (base + begin) % dtype.itemsize:  # a view of this dtype must be aligned
        flat = flat.clone()
    return flat.view(dtype).reshape(shape)


def _damaged(path: str, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{path} {what}; {REMEDY}", file=path)
