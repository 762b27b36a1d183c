"""Files as streams: what other libraries write through one, and what is published when."""

import contextlib
import errno
import gc
import io
import os
import pickle
import random
import resource
import signal
import stat
import tarfile
import threading
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save
from support import assert_same, in_child, python

import ringstow

SMALL = ringstow.Config(block_bytes=64 << 10, pool_bytes=1 << 20)


def names(directory):
    return sorted(os.listdir(directory))


def noise(seed, size):
    return random.Random(seed).randbytes(size)


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("zipped", [False, True])
def test_torch_saves_and_loads_through_streams(tmp_path, zipped, checksums):
    path = tmp_path / "model.pt"
    state = {"w": torch.randn(300, 1000), "half": torch.ones(7, dtype=torch.bfloat16), "n": 3}
    with ringstow.open_write(path, checksums=checksums, config=SMALL) as f:
        torch.save(state, f, _use_new_zipfile_serialization=zipped)
    assert_same(torch.load(path, weights_only=True), state)
    with ringstow.open_read(path, config=SMALL) as f:
        assert_same(torch.load(f, weights_only=True), state)
        assert (f.unchecked is None) == checksums
    assert names(tmp_path) == ["model.pt", "model.pt.ringstow"][: 1 + checksums]


def test_other_libraries_write_what_they_read_from_an_ordinary_file(tmp_path):
    array = np.arange(50_000.0).reshape(100, 500)

    def written(name, write):
        with ringstow.open_write(tmp_path / name, config=SMALL) as f:
            write(f)
        return tmp_path / name

    def zip_up(f):
        with zipfile.ZipFile(f, "w") as archive:
            archive.writestr("a", noise(1, 100_000))

    def tar_up(f):
        info = tarfile.TarInfo("a")
        info.size = 100_000
        with tarfile.open(fileobj=f, mode="w") as archive:
            archive.addfile(info, io.BytesIO(noise(1, 100_000)))

    assert (np.load(written("a.npy", lambda f: np.save(f, array))) == array).all()
    assert (np.load(written("a.npz", lambda f: np.savez(f, a=array)))["a"] == array).all()
    with open(written("a.pickle", lambda f: pickle.dump([array, 7], f, protocol=5)), "rb") as f:
        assert (pickle.load(f)[0] == array).all()
    with zipfile.ZipFile(written("a.zip", zip_up)) as archive:
        assert archive.read("a") == noise(1, 100_000)
    with tarfile.open(written("a.tar", tar_up)) as archive:
        assert archive.extractfile("a").read() == noise(1, 100_000)
    with ringstow.open_read(tmp_path / "a.pickle", config=SMALL) as f:
        assert (pickle.load(f)[0] == array).all()
    with ringstow.open_read(tmp_path / "a.zip") as f, zipfile.ZipFile(f) as archive:
        assert archive.read("a") == noise(1, 100_000)


def test_safetensors_bytes_and_any_buffer_are_written(tmp_path):
    path = tmp_path / "file"
    with ringstow.open_write(path) as f:
        f.write(save({"w": torch.arange(12.0)}))
    assert (load_file(path)["w"] == torch.arange(12.0)).all()
    buffers = [b"ab", bytearray(b"cd"), memoryview(b"xefx")[1:3], np.arange(6, dtype="i4"), b""]
    with ringstow.open_write(path) as f:
        assert [f.write(buffer) for buffer in buffers] == [2, 2, 2, 24, 0]
        f.writelines([b"g", b"h"])
        assert f.tell() == 32
        with pytest.raises((BufferError, TypeError)):
            f.write(np.arange(10)[::2])
        with pytest.raises(TypeError):
            f.write("text")
    assert path.read_bytes() == b"abcdef" + np.arange(6, dtype="i4").tobytes() + b"gh"


def test_report_has_the_checksum_of_the_whole_file(tmp_path):
    data = noise(2, 3_000_001)
    f = ringstow.open_write(tmp_path / "file")
    f.write(data)
    assert f.report is None
    f.close()
    f.close()
    report = f.report
    assert (report.bytes, report.crc32) == (len(data), zlib.crc32(data))
    assert report.engine in ("uring", "portable")
    assert not report.checksums
    assert report.gb_per_s > 0


def test_stream_says_what_it_is_and_what_it_cannot(tmp_path):
    path = tmp_path / "file"
    with ringstow.open_write(path) as f:
        assert (f.name, f.mode, f.closed) == (str(path), "wb", False)
        can = (f.writable(), f.readable(), f.seekable(), f.isatty())
        assert can == (True, False, False, False)
        f.flush()
        for call in (f.fileno, lambda: f.seek(0), f.read, f.truncate):
            with pytest.raises(io.UnsupportedOperation):
                call()
    for call in (lambda: f.write(b"x"), f.flush, f.tell, f.writable):
        with pytest.raises(ValueError, match="closed"):
            call()
    with ringstow.open_read(path) as f:
        assert (f.readable(), f.seekable(), f.writable()) == (True, True, False)
        assert f.engine in ("uring", "portable")
        assert f.direct in (False, True)
        with pytest.raises(io.UnsupportedOperation):
            f.write(b"x")
    with pytest.raises(ValueError, match="closed"):
        f.read()


def test_only_close_publishes(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def unfinished():
        f = ringstow.open_write(path, config=SMALL)
        f.write(noise(3, 300_000))
        return f

    with pytest.raises(KeyError), unfinished():
        raise KeyError("of the caller's")
    f = unfinished()
    f.abort()
    f.close()
    with pytest.warns(ResourceWarning, match="never closed"):
        unfinished()
    gc.collect()
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]
    unfinished().close()
    assert path.read_bytes() == noise(3, 300_000)


def test_refusals_name_the_path(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    for error, named, call in [
        (FileExistsError, "file", lambda: ringstow.open_write(path, overwrite=False)),
        (IsADirectoryError, tmp_path.name, lambda: ringstow.open_write(tmp_path)),
        (FileNotFoundError, "missing", lambda: ringstow.open_write(tmp_path / "missing" / "f")),
        (FileNotFoundError, "nothing", lambda: ringstow.open_read(tmp_path / "nothing")),
        (ringstow.InvalidStateError, "URL", lambda: ringstow.open_write("s3://bucket/file")),
    ]:
        with pytest.raises(error, match=named):
            call()
    assert names(tmp_path) == ["file"]


def test_permissions_stay_and_umask_counts_for_a_new_file(tmp_path):
    path = tmp_path / "file"
    before = os.umask(0o027)
    try:
        ringstow.open_write(path).close()
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o604)
        ringstow.open_write(path).close()
        assert stat.S_IMODE(path.stat().st_mode) == 0o604
    finally:
        os.umask(before)


def test_reads_at_any_position_return_the_file_s_bytes(tmp_path):
    path, data = tmp_path / "file", noise(5, 500_000)
    path.write_bytes(data)
    chance = random.Random(6)
    with ringstow.open_read(path, config=SMALL) as f, open(path, "rb") as ordinary:
        assert f.size == len(data)
        for _ in range(200):
            where, size = chance.randrange(510_000), chance.randrange(100_000)
            assert f.seek(where) == ordinary.seek(where)
            assert f.peek(1)[:1] == data[where : where + 1]
            assert f.read(size) == ordinary.read(size)
            assert len(f.read1(10)) <= 10
            ordinary.seek(f.tell())
            into, also = bytearray(5000), bytearray(5000)
            assert f.readinto(into) == ordinary.readinto(also)
            assert into == also
        assert f.seek(-10, os.SEEK_END) == len(data) - 10
        assert f.read() == data[-10:]
        with pytest.raises(ValueError, match="before the beginning"):
            f.seek(-1)


def test_second_thread_is_refused_while_one_writes(tmp_path):
    """A write of a buffer whose slices take long meets another: one of the two raises, or none."""
    path, data = tmp_path / "file", bytes(200 << 20)
    with ringstow.open_write(path) as f:
        outcomes = []

        def write():
            try:
                outcomes.append(f.write(data))
            except RuntimeError as error:
                outcomes.append(str(error))

        with ThreadPoolExecutor(3) as threads:
            for _ in range(3):
                threads.submit(write)
        written = [outcome for outcome in outcomes if outcome == len(data)]
        others = [outcome for outcome in outcomes if outcome != len(data)]
        assert written
        assert all("one thread at a time" in told for told in others)
        assert f.tell() == len(data) * len(written)


def test_forked_child_leaves_its_parent_s_stream_alone(tmp_path):
    path = tmp_path / "file"
    f = ringstow.open_write(path, config=SMALL)
    f.write(noise(7, 100_000))

    def child():
        with pytest.raises(ringstow.Error):
            f.write(b"more")
        f.abort()

    assert in_child(child) == 0
    f.write(b"end")
    f.close()
    assert path.read_bytes() == noise(7, 100_000) + b"end"


@contextlib.contextmanager
def full():
    """Limit the size of files, as a full disk does: each is an OSError of a write."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("is_zip", [True, False])
def test_what_the_system_refused_is_told_although_torch_hides_it(tmp_path, is_zip):
    """torch.save raises an error of its own, about positions in the zip file."""
    path, state = tmp_path / "m.pt", {"w": torch.zeros(1 << 20)}

    def write():
        with ringstow.open_write(path) as f:
            torch.save(state, f, _use_new_zipfile_serialization=is_zip)

    with full(), pytest.raises(OSError, match="m.pt") as raised:
        write()
    assert raised.value.errno == errno.EFBIG
    assert names(tmp_path) == []


def test_ctrl_c_within_a_write_publishes_nothing(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def interrupt():
        while len(names(tmp_path)) < 2:
            pass
        os.kill(os.getpid(), signal.SIGINT)

    def write():
        thread = threading.Thread(target=interrupt)
        with ringstow.open_write(path) as f:
            thread.start()
            f.write(bytes(300 << 20))
            while True:  # the write was faster: the signal is about to come
                thread.join(0.01)

    with pytest.raises(KeyboardInterrupt):
        write()
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_exit_without_close_publishes_and_leaves_nothing(tmp_path):
    code = "import sys, ringstow; f = ringstow.open_write(sys.argv[1]); f.write(bytes(10 << 20))"
    python(code, tmp_path / "file", check=True)
    assert names(tmp_path) == []
