"""Checkpoints of DeepSpeed: the files of all ranks, and the weights joined from them.

ZeRO's stages 1 and 2 keep each group of parameters as one long vector, and each rank has a slice.
Stage 3 cuts each parameter into as many slices as there are ranks, and each rank keeps its slices
in one vector.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ringstow import _native
from ringstow._core._errors import FormatError, MissingFilesError, NoCheckpointError
from ringstow._foreign._nested_states import Parts, spec_of
from ringstow._foreign._pickles import REMEDY, reading
from ringstow._foreign._torch_file import Files
from ringstow._state.tensors._memory import LazyTensor

WEIGHTS = "fp32"
"""The key of the joined weights."""

_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt")
_STATES = re.compile(r".*_(model|optim)_states\.pt")


class Vector(NamedTuple):
    """A slice of one parameter: its range in a rank's vector, in elements."""

    vector: Any
    begin: int
    length: int


def parts_of(path: str, files: Files) -> Parts:
    """Return the parts of a checkpoint: each file, and `WEIGHTS` if ZeRO wrote it.

    Args:
        path: DeepSpeed's save directory, or the directory of one tag in it.
        files: reads the files.

    Raises:
        NoCheckpointError: the path holds none of DeepSpeed's files.
    """
    tag = _native.deepspeed_directory(path)
    if tag is None:
        raise NoCheckpointError(f"{path} holds no checkpoint of DeepSpeed", path=path)
    names = sorted(filter(_STATES.fullmatch, os.listdir(tag)), key=_natural)

    @functools.cache
    def opened(name: str) -> Any:
        return files.read(os.path.join(tag, name))

    parts: Parts = {name.removesuffix(".pt"): functools.partial(opened, name) for name in names}
    known = [name for name in names if _OPTIMIZER.fullmatch(name) or _MODEL.fullmatch(name)]
    has_slices = any(map(_OPTIMIZER.fullmatch, names))
    if has_slices and known == names:  # no slices of tensor parallelism, no experts
        parts[WEIGHTS] = lambda: _joined(tag, names, opened, files)
    return parts


def weights(path: str, *, allow_pickle: bool = False) -> dict[str, Any]:
    """Return the weights in single precision, as DeepSpeed's ``zero_to_fp32.py`` joins them.

    Includes frozen parameters of stages 1 and 2. Each tensor is joined when it is loaded.

    Raises:
        NoCheckpointError: it is not a ZeRO checkpoint, or has tensor parallelism or experts, whose
            slices cannot be joined.
        MissingFilesError: a rank's file is missing; names it.
        FormatError: the files do not fit each other.
    """
    opens = parts_of(path, Files(allow_pickle=allow_pickle)).get(WEIGHTS)
    if opens is None:
        raise NoCheckpointError(
            f"{path} holds no slices of ZeRO's that can be joined: load its files as they are",
            path=path,
        )
    return opens()  # type: ignore[no-any-return]


def _natural(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _joined(
    tag: str, names: list[str], opened: Callable[[str], Any], files: Files
) -> dict[str, Any]:
    """Return the joined weights, with tensors that are joined when they are loaded."""
    with reading(tag, "the parameters' shapes"):
        optimizers = _ranks(tag, names, _OPTIMIZER)
        first = opened(optimizers[0])["optimizer_state_dict"]
        stage, count = first["zero_stage"], first["partition_count"]
        ranks = max(count) if isinstance(count, list) else count
        _check_ranks(tag, optimizers, ranks)
        states = [opened(name)["optimizer_state_dict"] for name in optimizers]
        models = _ranks(tag, names, _MODEL)
        if stage == 3:
            _check_ranks(tag, models, ranks)
        model = opened(models[0])
        state: dict[str, Any] = dict(_buffers(model, files))
        if stage == 3:
            state |= _of_stage_3(tag, [opened(name) for name in models], states, files)
        else:
            state |= _of_stage_2(tag, model, states, files)
        for alias, name in dict(model["shared_params"]).items():
            if name in state:
                state[alias] = state[name]
        if stage != 3:  # frozen parameters, for which ZeRO keeps no slices
            whole = {name: one for name, one in model["module"].items() if name not in state}
            state |= {name: _single(one, files) for name, one in whole.items()}
        return state


def _ranks(tag: str, names: list[str], pattern: re.Pattern[str]) -> list[str]:
    found = {int(match[1] or 0): name for name in names if (match := pattern.fullmatch(name))}
    _check_ranks(tag, [found.get(rank) for rank in range(max(found, default=0) + 1)], 1)
    return [found[rank] for rank in sorted(found)]


def _check_ranks(tag: str, files: list[Any], ranks: int) -> None:
    lacking = [rank for rank in range(ranks) if rank >= len(files)]
    lacking += [rank for rank, name in enumerate(files) if name is None]
    if lacking:
        raise MissingFilesError(
            f"{tag} lacks the files of {len(lacking)} of DeepSpeed's ranks: "
            f"{', '.join(f'zero_pp_rank_{rank}_*' for rank in lacking[:20])}; {REMEDY}",
            path=tag,
        )


def _buffers(model: dict[str, Any], files: Files) -> Iterator[tuple[str, Any]]:
    for name, one in model["module"].items():
        if name in model["buffer_names"]:
            yield name, _single(one, files)


def _single(tensor: Any, files: Files) -> Any:
    """Return a tensor in single precision if it has fewer bits, converted when it is loaded."""
    import torch

    if not torch.is_tensor(tensor) or not tensor.is_floating_point() or tensor.dtype.itemsize >= 4:
        return tensor
    spec = spec_of(torch.float32, tensor.shape, "a weight")

    def convert() -> Any:
        files.check(tensor)
        return tensor.float()

    return LazyTensor(*spec, convert)


def _of_stage_2(tag: str, model: dict[str, Any], states: list[Any], files: Files) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, one in (model.get("frozen_param_fragments") or {}).items():
        found[name] = _single(one, files)
    paddings = states[0].get("param_alignment_paddings")
    for group, shapes in enumerate(model["param_shapes"]):
        vectors = [state["single_partition_of_fp32_groups"][group] for state in states]
        ends = [*itertools.accumulate(vector.numel() for vector in vectors)]
        at = 0
        for number, (name, shape) in enumerate(shapes.items()):
            count = math.prod(shape)
            found[name] = _lazy(tag, name, shape, [*_slices(vectors, ends, at, count)], files)
            at += count + (paddings[group][number] if paddings is not None else 0)
        unit = 2 * len(states)  # ZeRO pads a group to a multiple of this
        if math.ceil(at / unit) != math.ceil(ends[-1] / unit):
            raise FormatError(
                f"{tag}: the ranks' slices of group {group} have {ends[-1]} elements, and its "
                f"parameters {at}",
                path=tag,
            )
    return found


def _slices(vectors: list[Any], ends: list[int], begin: int, count: int) -> Iterator[Vector]:
    """Yield the ranges of a run of elements in consecutive vectors."""
    start = 0
    for vector, end in zip(vectors, ends, strict=True):
        low, high = max(begin, start), min(begin + count, end)
        if low < high:
            yield Vector(vector, low - start, high - low)
        start = end


def _of_stage_3(tag: str, models: list[Any], states: list[Any], files: Files) -> dict[str, Any]:
    ranks = len(states)
    found: dict[str, Any] = {}
    for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
        slices = [model["frozen_param_fragments"][name] for model in models]
        whole = [Vector(one.reshape(-1), 0, one.numel()) for one in slices]
        found[name] = _lazy(tag, name, shape, whole, files)
    groups = [state["fp32_flat_groups"] for state in states]
    ends = [[*itertools.accumulate(vector.numel() for vector in own)] for own in groups]
    at = 0
    shapes = {name: shape for group in models[0]["param_shapes"] for name, shape in group.items()}
    for name, shape in shapes.items():
        length = math.ceil(math.prod(shape) / ranks)
        pieces = [
            piece
            for own, end in zip(groups, ends, strict=True)
            for piece in _slices(own, end, at, length)
        ]
        found[name] = _lazy(tag, name, shape, pieces, files)
        at += length
    if any(end[-1] != at for end in ends):
        raise FormatError(
            f"{tag}: the ranks' slices have {[end[-1] for end in ends]} elements, and the "
            f"parameters {at} for each rank",
            path=tag,
        )
    return found


def _lazy(tag: str, name: str, shape: Any, pieces: list[Vector], files: Files) -> LazyTensor:
    import torch

    count = math.prod(shape)
    held = sum(piece.length for piece in pieces)
    if held < count:
        raise FormatError(f"{tag}: {name} has {held} elements of {count}", path=tag)
    dtype = pieces[0].vector.dtype if pieces else torch.float32
    dtype = torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype

    def join() -> Any:
        whole = torch.empty(count, dtype=dtype, device="cpu")
        at = 0
        for vector, begin, length in pieces:
            files.check(vector)
            length = min(length, count - at)
            whole[at : at + length] = vector.detach().reshape(-1)[begin : begin + length]
            at += length
        return whole.reshape(tuple(shape))

    return LazyTensor(*spec_of(dtype, tuple(shape), name), join)
