"""A snapshot of a state dict, in host memory that every save reuses."""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import logging
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ringstow import _native
from ringstow._core._errors import InvalidStateError
from ringstow._core._gc_pause import collector_paused
from ringstow._saving import _jobs
from ringstow._state.tensors import _cuda, _torch
from ringstow._state.tensors._memory import Address
from ringstow._state.tree._walk import Path
from ringstow.dcp import _private, _state_copies

_log = logging.getLogger("ringstow")

# Alignment for every dtype, and a cache line, so that no two threads write to the same line.
_ALIGNMENT = 64
_PIECE = 8 << 20
# Bytes to register with CUDA at once. The driver blocks all other calls meanwhile.
_PIN = 64 << 20
# Minimum bytes of copies for each further thread.
_A_THREADS = 16 << 20
_THREADS_MAX = 4

_Key = tuple[object, ...]

_POLL_S = 0.002
# How long a save may take from stage() until it reads the snapshot, in a thread that may outlive
# the save. After that the save keeps this memory, and the next snapshot gets new memory.
_UNCLAIMED_S = 10.0
# How long DCP's thread may take to drop the snapshot that it has saved.
_LET_GO_S = 1.0


class Lease:
    """A snapshot's lease on its memory, until each save of it has read everything or has ended.

    Takes no lock: the garbage collector may end it in any thread, even while that holds a lock.
    """

    def __init__(self, claim: Callable[[None], None]) -> None:
        """Begin a lease; the thread that saves the snapshot calls ``claim(None)``."""
        self._since = time.monotonic()
        self._stager = _private.Call()
        self._save: _private.Call | None = None
        self._readings: set[object] = set()
        self._was_read = False
        self._is_gone = False
        self._is_reused = False
        self._claim = claim

    def claim(self) -> None:
        """Note that this thread saves the snapshot, unless this thread took it.

        Raises:
            InvalidStateError: the snapshot was saved before, and its memory holds the next one.
        """
        if self._is_reused:
            raise InvalidStateError(
                "this snapshot has been saved, and the writer has taken the next one in its "
                "memory: stage the state again for each save"
            )
        if self._stager.is_here():
            return
        save = self._save
        if save is None or save.has_ended() or not save.is_here():
            self._save = _private.Call()
            self._was_read = False
            self._claim(None)

    def read(self) -> object:
        """Note that a save reads the snapshot, until `end` is called with the returned value."""
        reading = object()
        self._readings.add(reading)
        return reading

    def end(self, reading: object) -> None:
        """Note that a save has read the snapshot."""
        self._readings.discard(reading)
        self._was_read = True

    def is_held(self) -> bool:
        """Return whether another thread, which has saved the snapshot, may be about to drop it."""
        is_own = self._save is not None and self._save.is_here()
        return self.is_over() and not self._is_gone and not is_own

    def gone(self) -> None:
        """Note that no tensor of the snapshot is alive."""
        self._is_gone = True

    def reuse(self) -> None:
        """Note that the next snapshot has the memory."""
        self._is_reused = True

    def is_over(self) -> bool:
        """Return whether the snapshot has been read."""
        return self._is_gone or (self._was_read and not self._readings)

    def wait(self) -> bool:
        """Wait for the end; return False if the save may never report it."""
        while not self.is_over():
            save, is_read = self._save, bool(self._readings)
            is_saved = save is not None and save.is_save
            if is_saved and not is_read and save is not None and save.has_ended():
                return True  # it failed while DCP planned it
            if not (is_read or is_saved) and time.monotonic() > self._since + _UNCLAIMED_S:
                return False
            time.sleep(_POLL_S)
        return True


class Staged(dict[str, Any]):
    """The snapshot of a state dict. When DCP's save iterates over it, it claims the lease."""

    def __init__(self, state: dict[str, Any], lease: Lease) -> None:
        super().__init__(state)
        self._lease = lease

    def items(self) -> Any:
        """Return the items, for the thread that saves them."""
        self._lease.claim()
        return super().items()

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._lease.claim()  # this thread pickles it, and waits until another process has saved it
        return dict, (list(super().items()),)


class _Slot(NamedTuple):
    """A plain tensor and its place in the memory, in bytes."""

    source: torch.Tensor
    offset: int
    nbytes: int


_Pair = tuple[torch.Tensor, _Slot]


class _Layout:
    """The places of each tensor's parts in the memory. Shared memory is stored once."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.nbytes = 0
        self.slots: list[_Slot] = []
        self._number_of: dict[_Key, int] = {}
        self._parts: dict[int, tuple[torch.Tensor, list[int] | None]] = {}
        for path, tensor in _state_copies.tensors(state):
            if id(tensor) not in self._parts:
                parts = _state_copies.parts(tensor)
                slots = None if parts is None else [self._place(part, path) for part in parts]
                self._parts[id(tensor)] = (tensor, slots)

    def parts(self, tensor: torch.Tensor) -> list[int] | None:
        """Return the slots that a tensor consists of; None if it is cloned as a whole."""
        # A mapping may make new tensors at each access: then this is not the same tensor.
        return self._parts.get(id(tensor), (tensor, None))[1]

    def _place(self, part: torch.Tensor, path: Path) -> int:
        number = self._number_of.setdefault(_identity(part), len(self.slots))
        if number == len(self.slots):
            _state_copies.check(part, path)
            nbytes = part.numel() * part.element_size()
            self.slots.append(_Slot(part, self.nbytes, nbytes))
            self.nbytes += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return number


class Snapshot:
    """Makes snapshots, one at a time."""

    def __init__(self) -> None:
        self._memory: _native.CopyMemory | None = None
        """The previous copy's lease, until no tensor of it is alive."""
        self._lease: Lease | None = None
        _all.add(self)

    def take(self, state: dict[str, Any], claim: Callable[[None], None]) -> Staged:
        """Return a copy of a state dict, after the previous save has read its copy.

        Args:
            state: the state dict.
            claim: called in the thread that saves the copy, if it is another thread.

        Raises:
            InvalidStateError: a value can't be copied; names its key.
        """
        self._wait()  # before pausing the collector, which may end the lease
        with collector_paused():
            return self._take(state, Lease(claim))

    def _take(self, state: dict[str, Any], lease: Lease) -> Staged:
        layout = _Layout(state)
        memory = self._memory_of(layout.nbytes)
        view = memoryview(memory)  # tensors that use it keep it alive
        copies = [_tensor(view, slot.offset, slot.source) for slot in layout.slots]
        _copy_all(list(zip(copies, layout.slots, strict=True)), memory)

        def replace(tensor: torch.Tensor, path: Path) -> torch.Tensor:
            slots = layout.parts(tensor)
            if slots is None:
                return _state_copies.clone(tensor, path)
            return _state_copies.with_parts(tensor, [copies[slot] for slot in slots])

        self._memory, self._lease = memory, lease
        weakref.finalize(view, self._let_go, lease).atexit = False  # the last copy is gone
        return Staged(_state_copies.rebuild(state, replace), lease)

    def lease_of(self, addresses: Iterable[Address]) -> Lease | None:
        """Return the lease of the snapshot with these addresses; None if it is another one's."""
        memory, lease = self._memory, self._lease
        if memory is None or lease is None:
            return None
        start, end = memory.address, memory.address + memory.nbytes
        if not any(isinstance(at, int) and start <= at < end for at in addresses):
            return None
        return lease

    def drop(self) -> None:
        """Free the memory, once a save that still reads from it has ended."""
        memory, self._memory, self._lease = self._memory, None, None
        if memory is not None:
            memory.discard()

    def is_held(self) -> bool:
        """Return whether the memory becomes free within a short time."""
        lease = self._lease
        return lease is not None and lease.is_held()

    def _let_go(self, lease: Lease) -> None:
        """Keep the memory for the next copy: no tensor of this one is alive."""
        lease.gone()
        if self._lease is lease:
            self._memory = self._lease = None

    def _wait(self) -> None:
        """Wait until the memory is free; if it may never be, leave it to its save."""
        lease = self._lease  # the save may read it meanwhile
        if lease is None:
            return
        if lease.wait():
            lease.reuse()
        else:
            self._memory = self._lease = None
            _log.warning(
                "a background save has not begun %d s after its snapshot was taken; the next "
                "snapshot goes to new memory",
                _UNCLAIMED_S,
            )

    def _memory_of(self, nbytes: int) -> _native.CopyMemory:
        memory = self._memory  # the collector may drop it at any moment
        if memory is None or memory.nbytes < nbytes:
            memory = None
            self.drop()  # before allocating the larger one
            memory = _native.CopyMemory(nbytes)
        return memory


_all: weakref.WeakSet[Snapshot] = weakref.WeakSet()


def _wait_until_dropped() -> None:
    """Wait for threads whose saves have ended, since the caller may notice the end earlier."""
    until = time.monotonic() + _LET_GO_S
    while any(one.is_held() for one in list(_all)) and time.monotonic() < until:
        time.sleep(_POLL_S)


_jobs.letting_go.append(_wait_until_dropped)


def _pieces(offset: int, nbytes: int) -> list[tuple[int, int]]:
    """Return a range as (begin, end) pairs, each within one registration."""
    cuts = range(_PIN - offset % _PIN, nbytes, _PIN)
    return list(zip((0, *cuts), (*cuts, nbytes), strict=True))


def _tensor(view: memoryview, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor at an offset, of the same dtype and shape.

    Its storage is only these bytes: ``torch.save`` of it must not save the whole memory.
    """
    numel = like.numel()
    if numel == 0:
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")
    flat = torch.frombuffer(view, dtype=like.dtype, count=numel, offset=offset)
    return flat if like.dim() == 1 else flat.view(like.shape)


def _identity(tensor: torch.Tensor) -> _Key:
    """Return a key that is equal for tensors with the same elements of the same memory."""
    if tensor.numel() == 0:
        return (tensor.dtype, tensor.shape)
    strides = None if tensor.is_contiguous() else tensor.stride()
    where = (tensor.data_ptr(), tensor.device, tensor.is_conj(), tensor.is_neg(), strides)
    return (*where, tensor.dtype, tensor.shape)


@functools.cache  # each reason once
def _log_not_pinned(reason: str) -> None:
    _log.warning(
        "pageable memory instead of a snapshot in pinned memory: %s; raise the memlock limit "
        "(ulimit -l unlimited), or stage with writer.stager(), which needs no memory but "
        "Config(pool_bytes=...)",
        reason,
    )


def _copy_all(pairs: list[_Pair], memory: _native.CopyMemory) -> None:
    """Copy the slots' originals into the snapshot's tensors, and wait for the copies."""
    gpu: list[_Pair] = []
    host: list[_Pair] = []
    for pair in pairs:
        (host if _cuda.place_of(pair[1].source) is None else gpu).append(pair)
    devices = _cuda.devices_of(slot.source for _, slot in gpu)
    with torch.no_grad():
        if gpu:
            _cuda.refuse_capture("no snapshot can be taken")
            # Register all or nothing: CUDA refuses a copy to partly registered memory.
            reason = memory.pin(_PIN)
            if reason is not None:
                _log_not_pinned(reason)
        try:
            for target, slot in gpu:
                _from_gpu(target, slot)
            _from_host(host)  # while the GPUs copy
        finally:
            _cuda.synchronize(devices)


def _from_gpu(target: torch.Tensor, slot: _Slot) -> None:
    """Queue the copy of a tensor on a GPU, on the current stream of its device."""
    source = slot.source.resolve_conj().resolve_neg()
    pieces = _pieces(slot.offset, slot.nbytes)
    if len(pieces) < 2:
        _cuda.copy_to_host(target, source)
        return
    # CUDA refuses a copy to memory that was registered in two pieces.
    to, start = (t.contiguous().view(-1).view(torch.uint8) for t in (target, source))
    for begin, end in pieces:
        _cuda.copy_to_host(to[begin:end], start[begin:end])


def _from_host(pairs: list[_Pair]) -> None:
    """Copy the tensors in host memory; dense ones with several threads."""
    pieces: list[tuple[int, int, int]] = []
    nbytes_dense = 0
    for target, (source, _, nbytes) in pairs:
        if source.device.type != "cpu" or not _torch.can_take_bytes(source):
            target.copy_(source)
            continue
        to, start = target.data_ptr(), source.data_ptr()
        for at in range(0, nbytes, _PIECE):
            pieces.append((to + at, start + at, min(_PIECE, nbytes - at)))
        nbytes_dense += nbytes
    threads = min(_THREADS_MAX, _native.cores(), -(-nbytes_dense // _A_THREADS))
    left = iter(pieces)

    def move() -> None:
        for to, start, size in left:  # each thread takes the next one
            ctypes.memmove(to, start, size)  # without the GIL

    with concurrent.futures.ThreadPoolExecutor(_THREADS_MAX, "ringstow-snapshot") as pool:
        for _ in range(threads - 1):
            pool.submit(move)
        move()
