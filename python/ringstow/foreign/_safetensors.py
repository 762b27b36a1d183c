"""One safetensors file, mapped into memory."""

from __future__ import annotations

import json
import math
import os
from typing import Any

from ringstow import _file_io
from ringstow._errors import CorruptCheckpointError, MissingFilesError, UnsupportedError
from ringstow.foreign._pickles import REMEDY, reading
from ringstow.foreign._states import State
from ringstow.tensors import _torch
from ringstow.tensors._memory import overlapping

_LENGTH = 8
_METADATA = "__metadata__"
# What torch's writer of Hugging Face's format notes in each file of a sharded checkpoint.
_SHARDING = "DCP_SHARDING_INFO"
_HEADER_BYTES_MAX = 100_000_000


def read(path: str) -> State:
    """Return a file's tensors by name, as views of the mapped file.

    Raises:
        CorruptCheckpointError: the file is cut short, or its header is not what the format says.
        UnsupportedError: this torch does not have a tensor's dtype.
    """
    import torch

    with reading(path, "its header"):
        header, base = _header(path)
        header.pop(_METADATA, None)
        spans = ((*one["data_offsets"], name) for name, one in header.items())
        if (twice := overlapping(spans)) is not None:
            raise _damaged(path, f"has bytes of {twice} in another tensor, too")
        mapped = torch.UntypedStorage.from_file(path, False, os.path.getsize(path))
        return {name: _tensor(path, name, one, mapped, base) for name, one in header.items()}


def _header(path: str) -> tuple[dict[str, Any], int]:
    """Return the header of a file, and where its data begins."""
    size = os.path.getsize(path)
    with _file_io.reading(path) as file:
        length = int.from_bytes(file.read(_LENGTH), "little")
        if not 2 <= length <= min(_HEADER_BYTES_MAX, size - _LENGTH):
            raise _damaged(path, f"has {size} bytes, which is no safetensors file")
        return json.loads(file.read(length)), _LENGTH + length


def is_as_listed(path: str, index: str) -> bool:
    """Return whether each tensor is in the file that an index lists for it, or is nowhere.

    Programs that read all listed files do not notice an index of an earlier save.

    Raises:
        MissingFilesError, CorruptCheckpointError: as `listed`, or a file is damaged.
    """
    held: set[tuple[str, str]] = set()
    for file in listed(path, index):
        with reading(file, "its header"):
            header, _ = _header(file)
            if _SHARDING in header.pop(_METADATA, {}):
                return True  # its tensors are in several files
            held.update((name, os.path.basename(file)) for name in header)
    where = _weight_map(path, index)
    return where.items() <= held or not where.keys() <= {name for name, _ in held}


def _weight_map(path: str, index: str) -> dict[str, str]:
    at = os.path.join(path, index)
    with reading(at, "the index"), _file_io.reading(at) as stream:
        found: dict[str, str] = json.load(stream)["weight_map"]
        for name in dict.fromkeys(found.values()):
            if os.path.basename(name) != name or name in ("", ".", ".."):
                raise _damaged(at, f"refers to {name!r}, which is not a file in its directory")
    return found


def listed(path: str, index: str) -> list[str]:
    """Return the files that an index such as ``model.safetensors.index.json`` lists.

    Raises:
        MissingFilesError: some are missing; names them.
        CorruptCheckpointError: it is no index, or leads out of its directory.
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


def _tensor(path: str, name: str, entry: dict[str, Any], mapped: Any, base: int) -> Any:
    import torch

    if entry["dtype"] not in _torch.NAMES:
        raise UnsupportedError(f"{path}: {name} has the dtype {entry['dtype']!r}, unknown here")
    dtype = _torch.dtype_of(entry["dtype"], name)
    shape = list(entry["shape"])
    if entry["dtype"] == "F4":  # torch counts pairs
        shape[-1] //= 2
    begin, end = (base + offset for offset in entry["data_offsets"])
    count = math.prod(shape)
    if min(shape, default=0) < 0 or end - begin != count * dtype.itemsize:
        raise _damaged(path, f"has {end - begin} bytes for {name}, {entry['dtype']} {shape}")
    if not base <= begin <= end <= mapped.nbytes():
        raise _damaged(path, f"is cut short: {name} ends at byte {end} of {mapped.nbytes()}")
    flat = torch.empty(0, dtype=torch.uint8, device="cpu")
    flat.set_(mapped, begin, (end - begin,), (1,))
    if begin % dtype.itemsize:  # a view of this dtype must be aligned
        flat = flat.clone()
    return flat.view(dtype).reshape(shape) if count else _torch.empty(tuple(shape), dtype)


def _damaged(path: str, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{path} {what}; {REMEDY}", file=path)
