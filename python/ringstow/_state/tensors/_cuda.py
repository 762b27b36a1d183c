"""All that the Python side knows of CUDA: where tensors are, on which stream, and memory for them.

Nothing here runs, and no function of torch.cuda is called, unless a value is on a GPU or the caller
asks for one. Tests put a driver of their own in the place of the functions under "Seams".

Nothing here calls ``Tensor.record_stream``, which keeps torch's allocator from reusing memory that
is freed during a copy. It is not needed: whatever starts a copy holds the tensor until the host has
seen the copy complete.
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
# In the order in which the native side looks for them, so that both find the same driver.
_DRIVERS = ("libcuda.so", "libcuda.so.1")


# Seams.


def place_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return a tensor's device pointer and its device's index; None if it is not CUDA's.

    ROCm's tensors say that they are on ``cuda``, and are not: its memory is not the CUDA driver's.
    """
    if not tensor.is_cuda or is_rocm():
        return None
    return tensor.data_ptr(), tensor.get_device()


def runtime() -> Any:
    """Return ``torch.cuda``."""
    return sys.modules["torch"].cuda


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a new 1-d tensor on a device, of torch's allocator."""
    import torch

    return torch.empty(numel, dtype=dtype, device=device)


def copy_to_host(target: torch.Tensor, source: torch.Tensor) -> None:
    """Queue a copy to dense host memory on the current stream of the source's device.

    To memory that is registered with CUDA in one piece it does not wait for the copy. The source
    must be no conjugated or negated view: torch would flip the target before its bytes are there.
    """
    target.copy_(source, non_blocking=True)


def clone(tensor: torch.Tensor) -> torch.Tensor:
    """Queue a copy of a tensor on the current stream of its device; returns the copy."""
    return tensor.detach().clone()


def copy_all(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Queue copies of tensors on the current streams of their devices; returns them, as bytes.

    Those of a device are copied together: one by one, each would take as long as several.
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


# Where tensors are.


def is_rocm() -> bool:
    """Return whether this torch's ``cuda`` is AMD's ROCm."""
    return sys.modules["torch"].version.hip is not None


def is_addressable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in memory that can be reached: the CPU's or a CUDA device's."""
    return tensor.is_cpu or (tensor.is_cuda and not is_rocm())


class Streams(dict[int, int]):
    """The handles of torch's current streams, by device: in this thread, at this moment."""

    def __missing__(self, index: int) -> int:
        """Ask torch, once for each device."""
        stream: int = runtime().current_stream(index).cuda_stream
        self[index] = stream
        return stream


def address_of(tensor: torch.Tensor, streams: Streams | None = None) -> Address:
    """Return the address of a tensor's elements; on a GPU with the stream that they are ready on.

    That is torch's current stream of the device, which ``streams`` keeps for many tensors.
    """
    place = place_of(tensor)
    if place is None:
        return tensor.data_ptr()
    return (*place, (Streams() if streams is None else streams)[place[1]])


def finder() -> Callable[[torch.Tensor], Address]:
    """Return `address_of` for many tensors: it asks torch once for each device's stream."""
    return functools.partial(address_of, streams=Streams())


def devices_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the indices of the GPUs that plain tensors are on, in ascending order."""
    places = map(place_of, tensors)
    return sorted({place[1] for place in places if place is not None})


def device_at(pointer: int, key: str) -> int:
    """Return the index of the device whose memory a pointer is into; the key is for the message.

    Raises:
        InvalidStateError: the driver knows no such memory.
        UnsupportedError: there is no driver.
    """
    import ctypes  # takes a while

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
    """Return the GPU that a load is to; None for the CPU. ``"cuda"`` is the current device.

    Raises:
        UnsupportedError: another kind of device, or none that CUDA has.
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
    """Wait until what is on the devices' current streams has been done."""
    for index in devices:
        runtime().current_stream(index).synchronize()


def to_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return dense copies in host memory of tensors on GPUs, once they are there."""
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
    """Refuse to do something while this thread captures a CUDA graph.

    Raises:
        UnsupportedError: it does; says what to do.
    """
    if runtime().is_current_stream_capturing():
        raise UnsupportedError(
            f"{what} within the capture of a CUDA graph: the tensors get their values when the "
            "graph is replayed; save before the capture or after a replay"
        )


class Fence:
    """A moment on the current streams of some devices, to be waited for by another thread's work.

    torch's current stream is the thread's: a save that runs in a thread of its own sees another
    one than the trainer that called for it.
    """

    def __init__(self, devices: Iterable[int]) -> None:
        """Take the moment: now, on this thread's current streams.

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
        """Wait until the moment has passed, or the devices run nothing any more."""
        for stream in self._streams:
            with contextlib.suppress(Exception):  # a lost context
                stream.synchronize()

    @contextlib.contextmanager
    def passed(self) -> Iterator[None]:
        """Make streams that wait for the moment this thread's current ones."""
        with contextlib.ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(runtime().stream(stream))
            yield


@functools.cache
def _side_stream(index: int) -> Any:
    """Return our own stream of a device, which only ever waits.

    One for all saves: those that share it wait for each other's moments, which have passed by the
    time that any of them copies. Of the high priority's pool, whose streams trainers rarely use: a
    stream that torch hands out is handed out again after 32 more.
    """
    return runtime().Stream(index, priority=-1)
