"""Arrays with __cuda_array_interface__, on a GPU whose memory the CPU can't access.

An access crashes the process, so only the driver can copy.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from driver import AWHILE_S
from support import assert_same

import ringstow

LEGACY, PER_THREAD = 1, 2
DTYPES = ["|b1", "|u1", "|i1", "<u2", "<i4", "<i8", "<f2", "<f4", "<f8", "<c8", "<c16"]


class Array:
    """An array like CuPy's and Numba's, with __cuda_array_interface__."""

    def __init__(self, gpu, array, **fields):
        self.gpu = gpu
        base = array if array.base is None else array.base
        self.nbytes = base.nbytes
        self.pointer = gpu.alloc(base.nbytes) if base.nbytes else 0
        if base.nbytes:
            gpu.upload(self.pointer, base.tobytes())
        offset = array.ctypes.data - base.ctypes.data if base.nbytes else 0
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (self.pointer + offset if base.nbytes else 0, False),
            "strides": None if array.flags.c_contiguous else array.strides,
            "version": 3,
            "stream": None,
            **fields,
        }

    def bytes(self):
        return self.gpu.download(self.pointer, self.nbytes)

    def __del__(self):
        if self.pointer:
            self.gpu.free(self.pointer)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_as_a_numpy_array(dtype, gpu, at):
    array = (np.arange(12) % 2).astype(dtype).reshape(3, 4)
    report = ringstow.save({"a": Array(gpu, array)}, at / "c")
    assert_same(ringstow.load(at / "c"), {"a": array})
    assert report.device_bytes == array.nbytes


NUMBERS = np.arange(24.0).reshape(4, 6)
LAYOUTS = {
    "transposed": NUMBERS.T,
    "columns": NUMBERS[:, 1:4],
    "every other row": NUMBERS[::2],
    "0-dim": np.array(2.5),
    "empty": np.empty((0, 3)),
    "broadcast": np.broadcast_to(np.arange(3.0), (2, 3)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout, gpu, at):
    array = LAYOUTS[layout]
    ringstow.save({"a": Array(gpu, array)}, at / "c")
    assert_same(ringstow.load(at / "c"), {"a": np.ascontiguousarray(array).reshape(array.shape)})


def test_strides_of_dense_or_one_row_arrays_are_ignored(gpu, at):
    dense = Array(gpu, NUMBERS, strides=NUMBERS.strides)
    row = Array(gpu, np.arange(3.0).reshape(1, 3), strides=(999, 8))
    ringstow.save({"dense": dense, "row": row}, at / "c")
    assert_same(ringstow.load(at / "c"), {"dense": NUMBERS, "row": np.arange(3.0).reshape(1, 3)})


def test_the_same_array_is_stored_once(gpu, at):
    array = Array(gpu, NUMBERS)
    assert ringstow.save({"a": array, "b": array}, at / "c").tensors == 1
    assert_same(ringstow.load(at / "c"), {"a": NUMBERS, "b": NUMBERS})


@pytest.mark.parametrize("named", [LEGACY, PER_THREAD, None])
def test_named_streams_are_accepted(named, gpu, at):
    ringstow.save({"a": Array(gpu, NUMBERS, stream=named)}, at / "c")
    assert_same(ringstow.load(at / "c"), {"a": NUMBERS})


def test_work_queued_on_the_arrays_stream_is_saved(gpu, at):
    stream = gpu.Stream(0)
    array = Array(gpu, np.zeros(1000), stream=stream.cuda_stream)
    ones = np.ones(1000)
    scratch = Array(gpu, ones)
    with gpu.blocked(stream), gpu.context(0):
        gpu.call(
            "cuMemcpyDtoDAsync_v2",
            ctypes.c_uint64(array.pointer),
            ctypes.c_uint64(scratch.pointer),
            ctypes.c_size_t(ones.nbytes),
            stream.handle,
        )
        handle = ringstow.save_async({"a": array}, at / "c", staging="unguarded")
        assert not handle.wait_staged(AWHILE_S)
    handle.result()
    assert_same(ringstow.load(at / "c"), {"a": ones})


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"version": 4}, ringstow.UnsupportedError, "version 4"),
        ({"mask": object()}, ringstow.UnsupportedError, "masked"),
        ({"stream": 0}, ringstow.InvalidStateError, "stream is 0"),
        ({"typestr": ">f8"}, ringstow.UnsupportedError, "'>f8'"),
        ({"typestr": "|V8"}, ringstow.UnsupportedError, "'|V8'"),
        ({"strides": (-48, 8)}, ringstow.UnsupportedError, "backwards"),
        ({"strides": (8,)}, ringstow.InvalidStateError, "2 dimensions and 1 strides"),
        ({"data": None}, ringstow.InvalidStateError, "breaks the protocol"),
        ({"data": (8, False)}, ringstow.InvalidStateError, "no memory of a GPU"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arrays_beyond_protocol_or_format_are_named(fields, error, match, gpu, at):
    with pytest.raises(error, match=match) as caught:
        ringstow.save({"layers": [Array(gpu, NUMBERS, **fields)]}, at / "c")
    assert str(caught.value).startswith("layers[0]")


def test_targets_are_filled_in_place(gpu, at):
    state = {"dense": NUMBERS, "columns": NUMBERS[:, 1:4] + 1, "cpu": np.arange(3)}
    ringstow.save(state, at / "c")
    dense = Array(gpu, np.zeros((4, 6)))
    columns = Array(gpu, np.zeros((4, 6))[:, 2:5])
    cpu = np.zeros(3, int)
    report = ringstow.load_into({"dense": dense, "columns": columns, "cpu": cpu}, at / "c")
    assert dense.bytes() == NUMBERS.tobytes()
    expected = np.zeros((4, 6))
    expected[:, 2:5] = state["columns"]
    assert columns.bytes() == expected.tobytes()
    assert cpu.tolist() == [0, 1, 2]
    assert report.device_bytes == NUMBERS.nbytes + state["columns"].nbytes


def test_one_stored_array_fills_two(gpu, at):
    array = Array(gpu, NUMBERS)
    ringstow.save({"a": array, "b": array}, at / "c")
    first, second = (Array(gpu, np.zeros((4, 6))) for _ in "ab")
    ringstow.load_into({"a": first, "b": second}, at / "c")
    assert first.bytes() == second.bytes() == NUMBERS.tobytes()


def test_unfillable_targets_are_named(gpu, at):
    ringstow.save({name: np.ones((2, 2)) for name in ("shape", "frozen", "wide", "fit")}, at / "c")
    fit = Array(gpu, np.zeros((2, 2)))
    frozen = Array(gpu, np.zeros((2, 2)))
    frozen.__cuda_array_interface__["data"] = (frozen.pointer, True)
    state = {
        "shape": Array(gpu, np.zeros((2, 3))),
        "frozen": frozen,
        "wide": Array(gpu, np.broadcast_to(np.zeros(2), (2, 2))),
        "fit": fit,
    }
    with pytest.raises(ringstow.KeyMismatchError) as caught:
        ringstow.load_into(state, at / "c")
    assert [text.split()[0] for text in caught.value.mismatched] == ["shape", "frozen", "wide"]
    assert fit.bytes() == bytes(32)


def test_object_with_made_up_attributes_is_not_an_array(at):
    class Anything:
        def __getattr__(self, name):
            return 5

    with pytest.raises(ringstow.InvalidStateError, match="Anything"):
        ringstow.save({"a": Anything()}, at / "c")
