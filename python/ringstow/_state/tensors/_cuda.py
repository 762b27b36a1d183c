"""The Python side of CUDA: the addresses, streams and memory of tensors.

Nothing here runs, and no function of torch.cuda is called, unless a value is on a GPU or the caller
asks for a GPU. Tests replace the functions under "Seams".

Nothing here calls ``Tensor.record_stream``, which keeps torch's allocator from reusing memory that
is freed during a copy. It is not needed: the code that starts a copy holds the tensor until the
host has seen the copy complete.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ringstow._core._errors import InvalidStateError, UnsupportedError
from ringstow._state.tensors._memory import Address

if TYPE_CHECKING:
    import ctypes

    import torch

# cuda.h's CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL.
_DEVICE_ORDINAL = 9
# In the native side's search order, so that both find the same driver.
_DRIVERS = ("libcuda.so", "libcuda.so.1")


# Seams.


def place_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return a tensor's device pointer and its device's index; None if not in CUDA memory.

    ROCm's tensors are also on ``cuda``, but the CUDA driver does not know their memory.
    """
    if not tensor.is_cuda or is_rocm():
        return None
    return tensor.data_ptr(), tensor.get_device()


def runtime() -> Any:
    """Return ``torch.cuda``."""
    return sys.modules["torch"].cuda


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a new 1-d tensor on a device, from torch's allocator."""
    import torch

    return torch.empty(numel, dtype=dtype, device=device)


def copy_to_host(target: torch.Tensor, source: torch.Tensor) -> None:
    """Queue a copy to dense host memory on the current stream of the source's device.

    It does not wait if the target was registered with CUDA in one piece. The source must not be a
    conjugated or negated view: torch would flip the target before its bytes arrive.
    """
    target.copy_(source, non_blocking=True)


def clone(tensor: torch.Tensor) -> torch.Tensor:
    """Queue a copy of a tensor on the current stream of its device; returns the copy."""
    return tensor.detach().clone()


def copy_all(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Queue copies of tensors on the current streams of their devices; returns them, as bytes.

    Tensors of one device are copied together, which takes about as long as copying one.
    """
    import torch

    by_device: dict[torch.device, list[int]] = {}
    for number, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(number)
    copies: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for numbers in by_device.values():
            flat = [tensors[n].detach().reshape(-1).view(torch.uint8) for n in numbers]
            parts = torch.split(torch.cat(flat), [part.numel() for part in flat])
            copies.update(zip(numbers, parts, strict=True))
    return [copies[number] for number in range(len(tensors))]


# The places of tensors.


def is_rocm() -> bool:
    """Return whether this torch's ``cuda`` is AMD's ROCm."""
    return sys.modules["torch"].version.hip is not None


def is_addressable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in accessible memory: the CPU's or a CUDA device's."""
    return tensor.is_cpu or (tensor.is_cuda and not is_rocm())


class Streams(dict[int, int]):
    """The handles of torch's current streams in this thread, by device."""

    def __missing__(self, index: int) -> int:
        """Ask torch, once for each device."""
        stream: int = runtime().current_stream(index).cuda_stream
        self[index] = stream
        return stream


def address_of(tensor: torch.Tensor, streams: Streams | None = None) -> Address:
    """Return the address of a tensor's elements; on a GPU, with the stream on which they are ready.

    This is torch's current stream of the device; ``streams`` caches it for many tensors.
    """
    place = place_of(tensor)
    if place is None:
        return tensor.data_ptr()
    return (*place, (Streams() if streams is None else streams)[place[1]])


def finder() -> Callable[[torch.Tensor], Address]:
    """Return `address_of` for many tensors: it reads each device's stream once."""
    return functools.partial(address_of, streams=Streams())


def devices_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the indices of the GPUs of plain tensors, in ascending order."""
    places = map(place_of, tensors)
    return sorted({place[1] for place in places if place is not None})


def device_at(pointer: int, key: str) -> int:
    """Return the index of the device that owns a pointer; the key is for the message.

    Raises:
        InvalidStateError: the driver does not know this memory.
        UnsupportedError: there is no driver.
    """
    import ctypes  # slow import

    ordinal = ctypes.c_int(-1)
    driver = _driver(key)
    error = driver.cuPointerGetAttribute(
        ctypes.byref(ordinal), _DEVICE_ORDINAL, ctypes.c_uint64(pointer)
    )
    if error:
        raise InvalidStateError(
            f"{key} says that its data is at {pointer:#x}, which is no memory of a GPU (CUDA error "
            f"{error}): was it freed?"
        )
    return ordinal.value


def _driver(key: str) -> ctypes.CDLL:
    import ctypes

    for name in _DRIVERS:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    raise UnsupportedError(
        f"{key} is on a GPU, and there is no CUDA driver here ({' or '.join(_DRIVERS)}): install "
        "NVIDIA's driver, or in a container mount it (--gpus all)"
    )


def device_named(device: object) -> torch.device | None:
    """Return the target GPU of a load; None for the CPU. ``"cuda"`` is the current device.

    Raises:
        UnsupportedError: another kind of device, or an unknown CUDA device.
    """
    if device is None or device == "cpu":
        return None
    try:
        import torch
    except ImportError as error:
        raise UnsupportedError(f"device={device!r} needs torch ({error}): install it") from error
    try:
        wanted = torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as error:
        raise UnsupportedError(f"device={device!r} is no device of torch's: {error}") from None
    if wanted.type == "cpu":
        return None
    return _gpu(wanted)


def _gpu(wanted: torch.device) -> torch.device:
    import torch

    if wanted.type != "cuda" or is_rocm():
        what = "ROCm" if wanted.type == "cuda" else wanted.type
        raise UnsupportedError(
            f"tensors can be loaded to the CPU and to CUDA devices, not to {what}: load to the CPU "
            "and move them with .to()"
        )
    cuda = runtime()
    if not cuda.is_available():
        raise UnsupportedError(
            f"device={str(wanted)!r} needs a GPU, and torch {torch.__version__} sees none "
            "(torch.cuda.is_available() is false): load to the CPU, without device="
        )
    index = cuda.current_device() if wanted.index is None else wanted.index
    count = cuda.device_count()
    if index >= count:
        raise UnsupportedError(f"there is no device cuda:{index}: torch sees {count}")
    return torch.device("cuda", index)


# Streams.


def synchronize(devices: Iterable[int]) -> None:
    """Wait until the queued work on the devices' current streams is done."""
    for index in devices:
        runtime().current_stream(index).synchronize()


def to_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return dense copies in host memory of tensors on GPUs, once they are complete."""
    import torch

    with torch.no_grad():
        sources = [tensor.detach() for tensor in tensors]
        dense = torch.contiguous_format
        copies = [torch.empty_like(t, device="cpu", memory_format=dense) for t in sources]
        for copy, source in zip(copies, sources, strict=True):
            copy_to_host(copy, source)
    synchronize(devices_of(sources))
    return copies


def refuse_capture(what: str) -> None:
    """Refuse an operation while this thread captures a CUDA graph.

    Raises:
        UnsupportedError: the thread captures a graph; says what to do.
    """
    if runtime().is_current_stream_capturing():
        raise UnsupportedError(
            f"{what} within the capture of a CUDA graph: the tensors get their values when the "
            "graph is replayed; save before the capture or after a replay"
        )


class Fence:
    """Events on the current streams of some devices, for which another thread's work waits.

    torch's current stream is per thread: a save in a thread of its own has a different current
    stream than the trainer that called it.
    """

    def __init__(self, devices: Iterable[int]) -> None:
        """Record the events now, on this thread's current streams.

        Raises:
            UnsupportedError: this thread captures a CUDA graph.
        """
        self._streams: list[Any] = []
        for index in devices:
            refuse_capture("a state cannot be staged")
            side = _side_stream(index)
            side.wait_event(runtime().current_stream(index).record_event())
            self._streams.append(side)

    def __bool__(self) -> bool:
        """Return whether there is anything to wait for."""
        return bool(self._streams)

    def wait(self) -> None:
        """Wait until the events have completed, or the devices no longer run anything."""
        for stream in self._streams:
            with contextlib.suppress(Exception):  # a lost context
                stream.synchronize()

    @contextlib.contextmanager
    def passed(self) -> Iterator[None]:
        """In this thread, make streams current that wait for the events."""
        with contextlib.ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(runtime().stream(stream))
            yield


@functools.cache
def _side_stream(index: int) -> Any:
    """Return our own stream of a device, which is used only for waits.

    All saves share it and wait for each other's events, which have completed before any of them
    copies. It is from the high-priority pool, which trainers rarely use: torch reuses a stream of a
    pool after 32 others.
    """
    return runtime().Stream(index, priority=-1)
