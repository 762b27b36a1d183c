"""A stand-in for the compiled module that a test can hold up or let fail at any moment.

It writes one shard with buffered writes and checks nothing that a hostile file could hold: it is
for the logic of the Python side alone.
"""

from __future__ import annotations

import ctypes
import json
import math
import pathlib
import threading
import zlib

import numpy as np


class Gate:
    """Holds a save before it stages, or before it ends, and can make it fail there."""

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


# The gate that the next save passes; tests set it.
gate = Gate()


class SaveJob:
    def __init__(self, tensors, state, path):
        self._gate = gate
        self._tensors, self._state, self._path = tensors, state, path
        self._staged, self._may_go_on, self._done = (threading.Event() for _ in range(3))
        self._cancelled = False
        self._error = None
        self._total = sum(spec[5] for spec in tensors)
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
        data = [gather(spec) for spec in self._tensors]
        self._bytes_staged = self._total
        self._staged.set()
        self._may_go_on.set()
        self._gate.end.wait()
        self._check(self._gate.end_error)
        write(pathlib.Path(self._path), self._tensors, data, self._state)

    def _check(self, error):
        from ringstow._errors import CancelledError

        if self._cancelled:
            raise CancelledError(f"{self._path} was cancelled", path=self._path)
        if error is not None:
            raise error

    def staged(self):
        return self._staged.is_set()

    def done(self):
        return self._done.is_set()

    def wait_staged(self, timeout=None):
        return self._may_go_on.wait(timeout)

    def wait(self, timeout=None):
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


MOVED = {
    "engine": "fake",
    "direct": False,
    "fixed_buffers": 0,
    "fallbacks": [{"wanted": "uring", "got": "fake", "reason": "a stand-in", "remedy": "none"}],
}


def save_report(path, tensors, size):
    parts = [
        "plan",
        "prepare",
        "stage",
        "write",
        "sync",
        "commit",
        "total",
        "copy_cpu",
        "checksum_cpu",
        "wait",
    ]
    counts = {"generation": 0, "tensors": tensors, "files": 1, "pool_bytes": 0}
    sizes = {"tensor_bytes": size, "file_bytes": size}
    return {"path": path, **counts, **sizes, **MOVED, "seconds": dict.fromkeys(parts, 0.5)}


def load_report(path, tensors, size):
    parts = ["prepare", "read", "total", "checksum_cpu"]
    sizes = {"tensors": tensors, "tensor_bytes": size, "read_bytes": size, "verified": True}
    return {"path": path, **sizes, **MOVED, "seconds": dict.fromkeys(parts, 0.5)}


def gather(spec):
    _, _, shape, strides, address, nbytes = spec
    if nbytes == 0:
        return b""
    if strides is None:
        return ctypes.string_at(address, nbytes)
    item = nbytes // math.prod(shape)
    span = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + item
    raw = np.frombuffer((ctypes.c_char * span).from_address(address), np.uint8)
    view = np.lib.stride_tricks.as_strided(raw, (*shape, item), (*strides, 1))
    return view.tobytes()


def write(path, tensors, data, state):
    path.mkdir(parents=True, exist_ok=True)
    entries, at = [], 0
    for (name, dtype, shape, *_), blob in zip(tensors, data, strict=True):
        chunk = {"file": 0, "begin": at}
        entries.append({"name": name, "dtype": dtype, "shape": shape, "chunks": [chunk]})
        at += len(blob)
    body = b"".join(data)
    file = {
        "name": "rank00000-0.safetensors",
        "bytes": len(body),
        "crc32": f"{zlib.crc32(body):08x}",
    }
    (path / file["name"]).write_bytes(body)
    manifest = {"version": 1, "files": [file], "tensors": entries, "state": json.loads(state)}
    text = json.dumps(manifest, ensure_ascii=False).encode()[:-1]
    sealed = text + b',"crc32":"%08x"}\n' % zlib.crc32(text)
    (path / "manifest.json").write_bytes(sealed)


class Block(bytearray):
    pass


class Checkpoint:
    def __init__(self, path):
        from ringstow._errors import IncompleteCheckpointError

        self._path = pathlib.Path(path)
        try:
            self._manifest = json.loads((self._path / "manifest.json").read_bytes())
        except FileNotFoundError:
            if not self._path.exists():
                raise
            message = f"{path} is not a complete checkpoint: there is no manifest.json"
            raise IncompleteCheckpointError(message, path=path) from None
        self._sizes = {}
        ends = [t["chunks"][0]["begin"] for t in self._manifest["tensors"]][1:]
        ends.append(self._manifest["files"][0]["bytes"])
        for tensor, end in zip(self._manifest["tensors"], ends, strict=False):
            self._sizes[tensor["name"]] = (tensor["chunks"][0]["begin"], end)

    @property
    def state(self):
        return json.dumps(self._manifest["state"])

    @property
    def tensors(self):
        return [
            (t["name"], t["dtype"], tuple(t["shape"]), self._nbytes(t["name"]))
            for t in self._manifest["tensors"]
        ]

    def _nbytes(self, name):
        begin, end = self._sizes[name]
        return end - begin

    def load(self, names, verify, config):
        body = (self._path / self._manifest["files"][0]["name"]).read_bytes()
        blocks = [Block(body[slice(*self._sizes[name])]) for name in names]
        size = sum(map(len, blocks))
        return blocks, json.dumps(load_report(str(self._path), len(names), size))

    def load_into(self, targets, verify, config):
        blocks, report = self.load([name for name, _, _ in targets], verify, config)
        for (_, address, nbytes), block in zip(targets, blocks, strict=True):
            assert len(block) == nbytes
            ctypes.memmove(address, bytes(block), nbytes)
        return report


def start_save(tensors, state, path, config):
    return SaveJob(tensors, state, path)


def verify(path, config):
    Checkpoint(path)
    return json.dumps({"path": path, "ok": True, "damage": []})


def latest(directory):
    found = [p.parent for p in pathlib.Path(directory).glob("*/manifest.json")]
    return (
        str(
            max(found, key=lambda p: (p / "manifest.json").stat().st_mtime_ns),
        )
        if found
        else None
    )


def cli(argv):
    return 0


def forget_after_fork():
    pass
