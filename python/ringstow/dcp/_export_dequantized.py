"""Dense tensors in place of quantized ones in an export: made when their bytes are written."""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from ringstow._core._errors import Error, InvalidStateError, UnsupportedError
from ringstow._state.objects._quantized_layers import Codes
from ringstow._state.tensors import _dequantize, _shards, _torch
from ringstow._state.tensors._dequantize import Dense
from ringstow._state.tensors._layouts import TensorParts
from ringstow._state.tree._refusals import Refusals
from ringstow._state.tree._select import listed


class Planner(DefaultSavePlanner):
    """Plans a model's state, and gives a `Dense` for each quantized tensor."""

    _dense: Mapping[str, Dense] = types.MappingProxyType({})

    def dequantize(self, prefix: str) -> None:
        """Plan dense tensors in place of the quantized ones whose names have a prefix.

        Raises:
            UnsupportedError: bitsandbytes is missing, a tensor is packed for this CPU, or the codes
                of its layers are sharded.
            InvalidStateError: the entries of a layer are not what bitsandbytes writes, or lack.
        """
        self._dense = found = _of_tensors(self.state_dict, prefix)
        self._check_codes(prefix)
        state = _dequantize.with_layers(
            self.state_dict,
            lambda weight: weight.startswith(prefix),
            lambda weight, text: InvalidStateError(f"{weight} {text}"),
        )
        for weight, parts in state.items():
            if type(parts) is TensorParts and parts is not self.state_dict[weight]:
                found[weight] = _of_layer(weight, parts)
                state[weight] = parts.tensors["data"]
        # Without elements, which torch's planner needs none of.
        self.state_dict = {
            name: _planned(value, found[name]) if name in found else value
            for name, value in state.items()
        }

    def refuse_quantized(self, prefix: str) -> None:
        """Refuse quantized tensors.

        Raises:
            UnsupportedError: names them all.
            InvalidStateError: the state lacks the scales of codes.
        """
        self._check_codes(prefix)
        found = _of_tensors(self.state_dict, prefix)
        if found:
            raise UnsupportedError(
                f"{listed('a model can not hold quantized tensors', [*found])}; dequantize=True "
                "writes their values"
            )

    def _check_codes(self, prefix: str) -> None:
        codes = Codes()
        if codes.is_on:
            codes.check_tensors(self.state_dict, prefix)

    @contextlib.contextmanager
    def naming_tensors(self) -> Iterator[None]:
        """Name the tensors that torch's planner can't plan; its own error names none.

        Raises:
            UnsupportedError: names them all.
        """
        try:
            yield
        except Exception:
            refusals = Refusals()
            for name, value in self.state_dict.items():
                is_one = isinstance(value, torch.Tensor) and name not in self._dense
                if is_one and not _shards.is_sharded(value):
                    try:
                        _torch.memory_of(value, name)
                    except Error as refusal:
                        refusals.add(refusal)
            refusals.check()
            raise

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return what an item stands for."""
        dense = self._dense.get(write_item.index.fqn)
        return super().resolve_data(write_item) if dense is None else dense


def _of_tensors(state: dict[str, Any], prefix: str) -> dict[str, Dense]:
    found: dict[str, Dense] = {}
    for name, value in state.items():
        local = _shards.local_of(value) if isinstance(value, DTensor) else value
        if not isinstance(local, torch.Tensor) or _torch.is_of_torch(local):
            continue
        if name.startswith(prefix) and (dense := _dequantize.of_tensor(local, name)) is not None:
            found[name] = dense
    return found


def _of_layer(name: str, parts: TensorParts) -> Dense:
    if isinstance(parts.tensors["data"], DTensor):
        raise UnsupportedError(
            f"{name} has its codes in shards, which no rank can dequantize alone: save the model "
            "by ringstow.distributed.save, and convert that with dequantize=True"
        )
    dense = _dequantize.of_parts(parts, name)
    assert dense is not None
    return dense


def _planned(value: Any, dense: Dense) -> torch.Tensor:
    """Return a tensor without elements that torch plans as the dense one."""
    empty = torch.empty(dense.shape, dtype=dense.dtype, device="meta")
    if isinstance(value, DTensor):
        return _shards.dtensor_like(value, empty)  # type: ignore[no-any-return]
    return empty


def _current(device: torch.device | None) -> contextlib.AbstractContextManager[object]:
    """Make a GPU current, for kernels that run on the current one; a native thread's is GPU 0."""
    is_gpu = device is not None and device.type == "cuda"
    return torch.cuda.device(device) if is_gpu else contextlib.nullcontext()


class LastMade:
    """Makes dense tensors, one at a time, and keeps the last: its pieces follow each other."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._last: tuple[Dense, torch.Tensor] | None = None

    def of(self, dense: Dense) -> torch.Tensor:
        """Return a dense tensor; called by threads of the save."""
        with self._lock:
            if self._last is None or self._last[0] is not dense:
                self._last = None  # frees the memory first
                with _current(dense.device):
                    self._last = dense, dense.make()
            return self._last[1]
