"""Helpers: comparing states, reading and resealing manifests, other processes."""

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import io
import json
import logging
import math
import os
import pathlib
import re
import subprocess
import sys
import threading
import types
import zlib

import fake_native
import numpy as np
import pytest
import torch

from ringstow._state.tree import _build, _encode, _skeleton

ROOT = pathlib.Path(__file__).parent.parent.parent


def assert_same(a, b, at="root"):
    """Assert that two states are equal: values, types, order, NaNs and the sign of zero."""
    assert type(a) is type(b), f"{at}: {type(a)} and {type(b)}"
    if isinstance(a, dict):
        assert len(a) == len(b), at
        for (key_a, value_a), (key_b, value_b) in zip(a.items(), b.items(), strict=True):
            assert_same(key_a, key_b, f"{at} key {key_a!r}")
            assert_same(value_a, value_b, f"{at}[{key_a!r}]")
        if isinstance(a, collections.OrderedDict):
            assert_same(vars(a), vars(b), f"{at}.__dict__")
        assert getattr(a, "default_factory", None) is getattr(b, "default_factory", None), at
    elif isinstance(a, (list, tuple, collections.deque)):
        assert getattr(a, "maxlen", None) == getattr(b, "maxlen", None), at
        assert len(a) == len(b), at
        for index, (item_a, item_b) in enumerate(zip(a, b, strict=True)):
            assert_same(item_a, item_b, f"{at}[{index}]")
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, at
        assert a.shape == b.shape, at
        assert raw(a) == raw(b), at
    elif isinstance(a, (np.ndarray, np.generic)):
        assert a.dtype == b.dtype, at
        assert a.dtype.str == b.dtype.str, at
        assert a.shape == b.shape, at
        assert a.tobytes() == b.tobytes(), at
    elif isinstance(a, io.BytesIO):
        assert (a.getvalue(), a.tell()) == (b.getvalue(), b.tell()), at
    elif dataclasses.is_dataclass(a) or isinstance(a, (argparse.Namespace, types.SimpleNamespace)):
        assert_same(fields_of(a), fields_of(b), at)
    elif isinstance(a, float):
        assert math.isnan(a) == math.isnan(b), at
        assert math.isnan(a) or (a == b and math.copysign(1, a) == math.copysign(1, b)), at
    else:
        assert a == b, at


def fields_of(value):
    """Return the fields of a dataclass, with or without slots, or of a namespace."""
    if not dataclasses.is_dataclass(value):
        return dict(vars(value))
    names = (field.name for field in dataclasses.fields(value))
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def raw(tensor):
    """Return the elements' bytes in row-major order."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(dense.data_ptr(), dense.numel() * dense.element_size())


def codec(state, **options):
    """Encode and decode a state without a file."""
    encoded = _encode.encode(state, **options)
    rows = {
        name: (name, dtype, shape, nbytes)
        for name, (dtype, shape, _, _, nbytes, _) in encoded.tensors
    }
    blocks = {spec[0]: bytearray(fake_native.gather(spec)) for spec in encoded.tensors}
    contents = _build.Contents("/ckpt", rows.get, **options)
    skeleton = _skeleton.parse(encoded.tree, "/ckpt")
    _build.Survey(contents).add(skeleton)
    return _build.Builder(contents, blocks).value(skeleton)


def manifest_of(path):
    """Return the parsed manifest of a checkpoint."""
    return json.loads((pathlib.Path(path) / "manifest.json").read_bytes())


def shards_of(path):
    """Return the paths of a checkpoint's shards in the manifest's order."""
    return [pathlib.Path(path) / file["name"] for file in manifest_of(path)["files"]]


def reseal(path, manifest):
    """Write a manifest with a correct trailer checksum, so that its content reaches the parser.

    ``manifest`` is an object (its ``crc32`` is ignored) or the bytes before ``,"crc32"``.
    """
    if isinstance(manifest, bytes):
        text = manifest
    else:
        fields = {name: value for name, value in manifest.items() if name != "crc32"}
        text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()[:-1]
    sealed = text + b',"crc32":"%08x"}\n' % zlib.crc32(text)
    (pathlib.Path(path) / "manifest.json").write_bytes(sealed)


@contextlib.contextmanager
def logged(words=""):
    """Collect the messages of ringstow's log that have these words; yield their list."""
    said, handler, logger = [], logging.Handler(), logging.getLogger("ringstow")
    handler.emit = lambda record: words in record.getMessage() and said.append(record.getMessage())
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def wait_for_saves():
    """Wait until no save in the background reports any more."""
    for thread in threading.enumerate():
        if thread.name == "ringstow-save":
            thread.join()


def flip(file, offset):
    """Flip a bit of a byte in a file."""
    data = bytearray(file.read_bytes())
    data[offset] ^= 0x10
    file.write_bytes(data)


def python(code, *args, limit=300, check=False, **options):
    """Run Python code in a new process; return the completed process, with text."""
    command = [sys.executable, "-c", code, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, **options)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def python_start(code, *args, **options):
    """Start Python code in a new process, with pipes for its output."""
    command = [sys.executable, "-c", code, *map(str, args)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **{**pipes, **options})


def in_child(act):
    """Run a function in a forked child; return the child's exit code, 1 if it raised."""
    child = os.fork()
    if child == 0:
        try:
            act()
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def raising(error):
    """Return a function that raises an error, whatever it is called with."""

    def call(*_, **__):
        raise error

    return call


def mounted(folder, options, kind="tmpfs"):
    """Mount a file system in memory, if this machine allows it."""
    folder.mkdir()
    command = ["mount", "-t", kind, "-o", options, "ringstow-test", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        missing(f"cannot mount: {error}")
    if done.returncode != 0:
        missing(f"mounting a {kind} needs root: {done.stderr.strip()}")


def resident_bytes():
    with open("/proc/self/status") as status:
        return int(re.search(r"VmRSS:\s+(\d+) kB", status.read())[1]) * 1024


def cargo_build(package):
    """Build a package with debug assertions; return the directory of the result."""
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    command = ["cargo", "build", "-q", "-p", package]
    environment = {**os.environ, "PYO3_PYTHON": sys.executable}
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 900}
    try:
        done = subprocess.run(command, env=environment, **options)
    except OSError as error:
        missing(f"no cargo: {error}")
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return target / "debug"


def litter(directory):
    """Return the files in a checkpoint's directory that its manifest does not name."""
    directory = pathlib.Path(directory)
    if not directory.exists():
        return []
    known = {"manifest.json"}
    if (directory / "manifest.json").exists():
        known |= {file["name"] for file in manifest_of(directory)["files"]}
    return sorted(p.name for p in directory.iterdir() if p.name not in known)


def missing(reason):
    """Skip a test if this machine lacks a rig; fail it if RINGSTOW_REQUIRE_RIGS is set.

    A rig is a device, a file system, a permission or a program.
    """
    if os.environ.get("RINGSTOW_REQUIRE_RIGS"):
        pytest.fail(f"RINGSTOW_REQUIRE_RIGS is set, and this machine lacks a rig: {reason}")
    pytest.skip(reason)
