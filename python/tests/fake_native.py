"""A stand-in for the native saves that a test can hold or fail at any moment.

It writes no file: `saved` holds the saved bytes.
"""

import ctypes
import json
import math
import threading

import numpy as np

from ringstow import SaveCancelledError

# By checkpoint path: each tensor's bytes by name, and the tree.
saved: dict[str, tuple[dict[str, bytes], str]] = {}


class Gate:
    """Holds a save before it stages or before it ends, and can make it fail there."""

    def __init__(self, *, staging=True, end=True):
        self.staging = threading.Event()
        self.end = threading.Event()
        self.staging_error = None
        self.end_error = None
        if staging:
            self.staging.set()
        if end:
            self.end.set()

    def open(self):
        self.staging.set()
        self.end.set()


# The gate of the next save; tests set it.
gate = Gate()


class SaveJob:
    def __init__(self, tensors, state, path):
        self._gate = gate
        self._tensors, self._state, self._path = tensors, state, path
        self._staged, self._may_go_on, self._done = (threading.Event() for _ in range(3))
        self._cancelled = False
        self._error = None
        self._total = sum(memory[4] for _, memory in tensors)
        self._bytes_staged = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        try:
            self._save()
        except BaseException as error:
            self._error = error
        self._done.set()
        self._may_go_on.set()

    def _save(self):
        self._gate.staging.wait()
        self._check(self._gate.staging_error)
        data = {spec[0]: gather(spec) for spec in self._tensors}
        self._bytes_staged = self._total
        self._staged.set()
        self._may_go_on.set()
        self._gate.end.wait()
        self._check(self._gate.end_error)
        saved[self._path] = (data, self._state)

    def _check(self, error):
        if self._cancelled:
            raise SaveCancelledError(f"{self._path} was cancelled", path=self._path)
        if error is not None:
            raise error

    def staged(self):
        return self._staged.is_set()

    def done(self):
        return self._done.is_set()

    def wait_staged(self, timeout=None, *, logs=True):
        return self._may_go_on.wait(timeout)

    def wait(self, timeout=None, *, logs=True):
        return self._done.wait(timeout)

    def result(self):
        if self._error is not None:
            raise self._error
        return json.dumps(save_report(self._path, len(self._tensors), self._total))

    def progress(self):
        return self._bytes_staged, 0, self._total

    def cancel(self):
        self._cancelled = True
        self._gate.open()


def start_save(tensors, state, path, config, noted=(None, {}), *, apart=(), base=None):
    return SaveJob(tensors, state, path)


def gather(spec):
    """Return a tensor's bytes as the native side reads them."""
    _, (_, shape, strides, address, nbytes, _) = spec
    if nbytes == 0:
        return b""
    if strides is None:
        return ctypes.string_at(address, nbytes)
    item = nbytes // math.prod(shape)
    span = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + item
    raw = np.frombuffer((ctypes.c_char * span).from_address(address), np.uint8)
    view = np.lib.stride_tricks.as_strided(raw, (*shape, item), (*strides, 1))
    return view.tobytes()


FALLBACK = {"kind": "io_mode", "wanted": "uring", "got": "fake"}
FALLBACK |= {"reason": "a stand-in", "remedy": "none"}
MOVED = {"engine": "fake", "direct": False, "fixed_buffers": 0, "device_bytes": 0, "pinned": None}
MOVED |= {"fallbacks": [FALLBACK]}
SAVE_PARTS = ("compare", "plan", "prepare", "stage", "write", "sync", "commit", "total")
SAVE_CPU_PARTS = ("copy_cpu", "checksum_cpu", "wait", "device_copy")
LOAD_PARTS = ("prepare", "read", "total", "checksum_cpu", "device_copy")


def save_report(path, tensors, size):
    counts = {"generation": 0, "tensors": tensors, "files": 1, "recycled_bytes": 0, "pool_bytes": 0}
    sizes = {"tensor_bytes": size, "file_bytes": size, "linked_bytes": 0, "unchanged_bytes": 0}
    seconds = dict.fromkeys(SAVE_PARTS + SAVE_CPU_PARTS, 0.5)
    return {"path": path, **counts, **sizes, **MOVED, "seconds": seconds}


def load_report(path, tensors, size):
    sizes = {"tensors": tensors, "tensor_bytes": size, "read_bytes": size, "verified": True}
    return {"path": path, **sizes, **MOVED, "seconds": dict.fromkeys(LOAD_PARTS, 0.5)}
