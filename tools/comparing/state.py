"""The state that every peer saves: an LLM's parameters and Adam's moments, random from a seed."""

from __future__ import annotations

import ctypes
import math
import zlib
from collections.abc import Callable, Iterator
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


def llama3_8b() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the parameters of Llama 3 8B, by its published configuration."""
    width, keys, feed, words = 4096, 1024, 14336, 128256
    yield "embed.weight", (words, width)
    for layer in range(32):
        for name, shape in [
            ("q", (width, width)), ("k", (keys, width)), ("v", (keys, width)),
            ("o", (width, width)), ("gate", (feed, width)), ("up", (feed, width)),
            ("down", (width, feed)), ("norm_attention", (width,)), ("norm_feed", (width,)),
        ]:  # fmt: skip
            yield f"layers.{layer}.{name}.weight", shape
    yield "norm.weight", (width,)
    yield "output.weight", (words, width)


def make_llama_share(state_bytes: int, seed: int = 0) -> State:
    """Return one rank's share of Llama 3 8B's training state, sharded by rows (FSDP, ZeRO 3).

    As in MLPerf Storage: the weights in 16 bits, and Adam's weights and moments in 32 (112 GB in
    all). As many ranks share them as give one of them about `state_bytes` bytes.
    """
    shapes = list(llama3_8b())
    all_bytes = (2 + 3 * 4) * sum(math.prod(shape) for _, shape in shapes)
    ranks = max(1, round(all_bytes / max(state_bytes, 1)))
    state: State = {}
    tensor = Dice(seed).tensor
    for name, (rows, *columns) in shapes:
        shape = (-(-rows // ranks), *columns)
        state[f"model.{name}"] = tensor(shape, torch.bfloat16)
        for part in ("weight", "exp_avg", "exp_avg_sq"):
            state[f"optimizer.{name}.{part}"] = tensor(shape, torch.float32)
    return state


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


STATES: dict[str, Callable[[int], State]] = {
    "transformer": make_state,
    "small": make_small_state,
    "llama3-8b": make_llama_share,
}
"""What can be saved, by name; each gets about how many bytes it is to have."""


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
