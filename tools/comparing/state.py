"""The state that every peer saves: an LLM's parameters and Adam's moments, random from a seed."""

from __future__ import annotations

import ctypes
import math
import zlib
from collections.abc import Iterator
from typing import Any

import numpy
import torch

from comparing.durable import PAGE_BYTES
from comparing.peer import CPU, State


def parameter_shapes(state_bytes: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the parameters of a transformer whose training state has about `state_bytes` bytes."""
    width = 1024 if state_bytes >= 5e8 else 256
    yield "embed.weight", (16 * width, width)
    layer_bytes = 10 * 12 * width**2  # bf16 weight and two f32 moments: 10 bytes per parameter
    layers = max(1, round((state_bytes - 10 * 16 * width**2) / layer_bytes))
    for layer in range(layers):
        for name, rows, columns in [("qkv", 3, 1), ("project", 1, 1), ("up", 4, 1), ("down", 1, 4)]:
            yield f"layers.{layer}.{name}.weight", (rows * width, columns * width)
            yield f"layers.{layer}.{name}.bias", (rows * width,)
        for name in ("norm_attention", "norm_feed"):
            yield f"layers.{layer}.{name}.weight", (width,)
            yield f"layers.{layer}.{name}.bias", (width,)


class Dice:
    """Tensors of random bytes; the same seed gives the same tensors."""

    def __init__(self, seed: int) -> None:
        self._random = numpy.random.Generator(numpy.random.SFC64(seed))

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        length = math.prod(shape) * dtype.itemsize
        words = self._random.integers(0, 2**64, size=-(-length // 8), dtype=numpy.uint64)
        raw = torch.from_numpy(words).view(torch.uint8)[:length]
        return raw.view(dtype).reshape(shape)


def make_small_state(state_bytes: int, seed: int = 0) -> State:
    """Return tensors of 4 KiB, which measure the cost per tensor instead of per byte."""
    dice = Dice(seed)
    names = (f"layers.{number // 5}.part.{number % 5}" for number in range(state_bytes // 4096))
    return {name: dice.tensor((1024,), torch.float32) for name in names}


def make_state(state_bytes: int, seed: int = 0) -> State:
    """Return weights and Adam state: large matrices, small vectors and scalars of random bytes."""
    state: State = {}
    tensor = Dice(seed).tensor
    for name, shape in parameter_shapes(state_bytes):
        state[f"model.{name}"] = tensor(shape, torch.bfloat16)
        state[f"optimizer.{name}.exp_avg"] = tensor(shape, torch.float32)
        state[f"optimizer.{name}.exp_avg_sq"] = tensor(shape, torch.float32)
        state[f"optimizer.{name}.step"] = tensor((), torch.float32)
    return state


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8).cpu()


def on_device(state: State, device: str) -> State:
    """Return the tensors on the device, once they are there."""
    there = {name: tensor.to(device) for name, tensor in state.items()}
    synchronize(device)
    return there


def synchronize(device: str) -> None:
    """Wait for the device's queued work."""
    if device != CPU:
        torch.cuda.synchronize(device)


def digest(state: State) -> dict[str, list[Any]]:
    """Return each tensor's dtype, shape and crc32, which a load must reproduce."""
    return {
        name: [str(t.dtype), list(t.shape), zlib.crc32(raw_bytes(t).numpy().data)]
        for name, t in state.items()
    }


def touch(state: State) -> None:
    """Read a byte of every page, because a load that only maps the file has not read it yet.

    This avoids torch calls: one call per small tensor would cost as much as loading it. Tensors on
    a GPU have been read.
    """
    for tensor in state.values():
        if tensor.is_cuda:
            continue
        nbytes = tensor.nbytes
        if nbytes > PAGE_BYTES:
            raw_bytes(tensor)[::PAGE_BYTES].max()
        if nbytes:
            first = tensor.data_ptr()
            ctypes.string_at(first, 1)
            ctypes.string_at(first + nbytes - 1, 1)


def destination(expected: dict[str, list[Any]], device: str) -> State:
    """Return tensors to load into, like a model already in memory, with all pages allocated."""
    return {
        name: torch.ones(shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=device)
        for name, (dtype, shape, _) in expected.items()
    }
