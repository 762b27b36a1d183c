"""The fake CUDA driver (tests/fake-cuda) for tests: its controls, and memory on its GPUs.

`Driver` also replaces ``torch.cuda`` and the hooks of `ringstow._state.tensors._cuda`. A CPU tensor
over the driver's memory then counts as a GPU tensor.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref

import torch

U64 = ctypes.c_uint64
NON_BLOCKING = 1
RELAXED = 2
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
SECONDS = 300
# Long enough for unblocked work to finish. Correctly blocked work does not depend on it.
AWHILE_S = 0.3


class Driver:
    def __init__(self, path):
        # RTLD_GLOBAL, because the native side and `_cuda` look for libcuda.so, its SONAME.
        self.lib = ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
        self.lib.fake_cuda_calls.restype = U64
        self.lib.fake_cuda_live.restype = ctypes.c_int64
        self.lib.fake_cuda_peak.restype = U64
        self.lib.fake_cuda_violations.restype = ctypes.c_size_t
        self._contexts = {}
        self._memory = {}  # begin -> (end, device)
        self._thread = threading.local()
        self.call("cuInit", 0)

    def call(self, function, *args):
        error = getattr(self.lib, function)(*args)
        assert error == 0, f"{function}: CUDA error {error}"

    # Controls.

    def hold(self):
        self.lib.fake_cuda_hold()

    def release(self):
        self.lib.fake_cuda_release()

    @contextlib.contextmanager
    def held(self):
        self.hold()
        try:
            yield
        finally:
            self.release()

    def fail(self, function, code, after=0):
        self.lib.fake_cuda_fail(function.encode(), ctypes.c_uint32(after), code)

    def calls(self, function):
        return self.lib.fake_cuda_calls(function.encode())

    def live(self, what):
        return self.lib.fake_cuda_live(what.encode())

    def peak(self, what):
        return self.lib.fake_cuda_peak(what.encode())

    def violations(self):
        size = self.lib.fake_cuda_violations(None, ctypes.c_size_t(0))
        text = ctypes.create_string_buffer(size + 1)
        self.lib.fake_cuda_violations(text, ctypes.c_size_t(size + 1))
        return text.value.decode().splitlines()

    def reset(self):
        self.lib.fake_cuda_reset()

    # Memory.

    @contextlib.contextmanager
    def context(self, device):
        if device not in self._contexts:
            context = ctypes.c_void_p()
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[device] = context
        self.call("cuCtxPushCurrent_v2", self._contexts[device])
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def alloc(self, nbytes, device=0):
        """Allocate memory and return its address."""
        pointer = U64()
        with self.context(device):
            self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
        self._memory[pointer.value] = (pointer.value + nbytes, device)
        return pointer.value

    def free(self, pointer):
        _, device = self._memory.pop(pointer)
        with self.context(device):
            self.call("cuMemFree_v2", U64(pointer))

    def upload(self, pointer, data):
        with self.context(self.place(pointer)[1]):
            self.call("cuMemcpyHtoD_v2", U64(pointer), data, ctypes.c_size_t(len(data)))

    def download(self, pointer, nbytes):
        data = ctypes.create_string_buffer(nbytes)
        with self.context(self.place(pointer)[1]):
            self.call("cuMemcpyDtoH_v2", data, U64(pointer), ctypes.c_size_t(nbytes))
        return data.raw

    def place(self, address):
        """Return an address with its device, or None."""
        for begin, (end, device) in list(self._memory.items()):
            if begin <= address < end:
                return address, device
        return None

    def storage(self, nbytes, device=0):
        """Return a 1-d byte tensor over new memory, which is freed with its last view."""
        pointer = self.alloc(nbytes, device)
        memory = (ctypes.c_char * nbytes).from_address(pointer)
        weakref.finalize(memory, self.free, pointer)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def tensor(self, tensor, device=0):
        """Return a GPU copy of a tensor with the same strides and storage bytes."""
        if tensor.numel() == 0:
            return torch.empty_like(tensor)
        tensor = tensor.detach()
        source = tensor.untyped_storage()
        copy = self.storage(source.nbytes(), device)
        self.upload(copy.data_ptr(), ctypes.string_at(source.data_ptr(), source.nbytes()))
        there = torch.empty(0, dtype=tensor.dtype)
        there.set_(copy.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        return there

    def write(self, target, value, stream):
        """Queue a copy between dense GPU tensors; return objects to keep until it is done."""
        with self.context(stream.device):
            nbytes = ctypes.c_size_t(target.numel() * target.element_size())
            to, source = U64(target.data_ptr()), U64(value.data_ptr())
            self.call("cuMemcpyDtoDAsync_v2", to, source, nbytes, stream.handle)
        return value

    @contextlib.contextmanager
    def blocked(self, stream):
        """Block work that is queued on a stream from now on, until the context ends."""
        go = threading.Event()
        wait = HOST_FUNCTION(lambda _: go.wait(SECONDS))
        with self.context(stream.device):
            self.call("cuLaunchHostFunc", stream.handle, wait, None)
        try:
            yield
        finally:
            go.set()
            stream.synchronize()

    # The hooks of ringstow._state.tensors._cuda.

    def place_of(self, tensor):
        return self.place(tensor.data_ptr())

    def runtime(self):
        return self

    def empty(self, numel, dtype, device):
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return self.storage(numel * dtype.itemsize, device.index).view(dtype)

    def copy_to_host(self, target, source):
        place = self.place_of(source)
        if place is None or not source.is_contiguous():  # the CPU's copy of a view
            target.copy_(source)
            return
        stream = self.current_stream(place[1])
        nbytes = ctypes.c_size_t(target.numel() * target.element_size())
        to = ctypes.c_void_p(target.data_ptr())
        with self.context(place[1]):
            self.call("cuMemcpyDtoHAsync_v2", to, U64(place[0]), nbytes, stream.handle)

    def copy_all(self, tensors):
        return [self.clone(tensor) for tensor in tensors]

    def clone(self, tensor):
        if self.place_of(tensor) is None:
            return tensor.clone()
        device = self.place_of(tensor)[1]
        if not tensor.is_contiguous():  # the CPU's copy of a view
            return self.tensor(tensor.contiguous(), device)
        copy = self.empty(tensor.numel(), tensor.dtype, torch.device("cuda", device))
        self.write(copy, tensor, self.current_stream(device))
        return copy.view(tensor.shape)

    # torch.cuda.

    OutOfMemoryError = MemoryError

    def is_initialized(self):
        return True

    is_available = is_initialized

    def device_count(self):
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def current_device(self):
        return 0

    def current_stream(self, device):
        streams = getattr(self._thread, "streams", {})
        return streams.get(device) or Stream(self, device, handle=0)

    def Stream(self, device, priority=0):
        return Stream(self, device)

    @contextlib.contextmanager
    def stream(self, stream):
        streams = vars(self._thread).setdefault("streams", {})
        before = streams.get(stream.device)
        streams[stream.device] = stream
        try:
            yield
        finally:
            streams[stream.device] = before

    def is_current_stream_capturing(self):
        status = ctypes.c_int()
        with self.context(0):
            handle = self.current_stream(0).handle
            self.call("cuStreamIsCapturing", handle, ctypes.byref(status))
        return status.value != 0

    @contextlib.contextmanager
    def capturing(self, stream):
        graph = ctypes.c_void_p()
        with self.context(stream.device):
            self.call("cuStreamBeginCapture_v2", stream.handle, RELAXED)
            try:
                yield
            finally:
                self.call("cuStreamEndCapture", stream.handle, ctypes.byref(graph))


class Stream:
    """Like torch.cuda.Stream, which never destroys a stream."""

    def __init__(self, driver, device, handle=None):
        self._driver = driver
        self.device = device
        self.handle = ctypes.c_void_p(handle)
        if handle is None:
            with driver.context(device):
                driver.call("cuStreamCreate", ctypes.byref(self.handle), NON_BLOCKING)

    @property
    def cuda_stream(self):
        return self.handle.value or 0

    def record_event(self):
        event = ctypes.c_void_p()
        with self._driver.context(self.device):
            self._driver.call("cuEventCreate", ctypes.byref(event), 0)
            self._driver.call("cuEventRecord", event, self.handle)
        return event

    def wait_event(self, event):
        with self._driver.context(self.device):
            self._driver.call("cuStreamWaitEvent", self.handle, event, 0)
            self._driver.call("cuEventDestroy_v2", event)

    def synchronize(self):
        with self._driver.context(self.device):
            self._driver.call("cuStreamSynchronize", self.handle)
