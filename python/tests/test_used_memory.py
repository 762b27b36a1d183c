"""tools/compare.py --used-memory fills the page cache before each measurement."""

import os

import pytest
from comparing import memory, processes

MIB = 1 << 20


class Machine:
    """Memory whose free part shrinks with every read into the cache, down to a floor."""

    def __init__(self, free, floor):
        self.fields = {"MemTotal": 1024 * MIB, "MemFree": free}
        self.floor = floor
        self.reads = []

    def meminfo_bytes(self, field):
        return self.fields[field]

    def preadv(self, descriptor, buffers, at):
        assert os.pread(descriptor, 1, at) == b"\0"  # the file reaches so far
        self.reads.append(at)
        count = sum(map(len, buffers))
        self.fields["MemFree"] = max(self.floor, self.fields["MemFree"] - count)
        return count


@pytest.fixture
def machine(monkeypatch):
    found = Machine(free=512 * MIB, floor=10 * MIB)
    monkeypatch.setattr(memory, "meminfo_bytes", found.meminfo_bytes)
    monkeypatch.setattr(os, "preadv", found.preadv)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    return found


@pytest.fixture
def cache(tmp_path):
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", 2048 * MIB)
    with open(tmp_path / "file", "rb") as file:
        yield memory.PageCache(file.fileno())


def test_cache_is_filled_until_memory_stops_shrinking(machine, cache):
    cache.fill()
    assert machine.fields["MemFree"] == machine.floor


def test_reading_continues_at_the_offset_and_wraps(machine, cache):
    for _ in range(5):
        machine.fields["MemFree"] = 512 * MIB
        again = memory.PageCache(os.dup(cache.descriptor))  # as in another process
        again.fill()
        os.close(again.descriptor)
    steps = range(0, 2048 * MIB, memory.READ_BYTES)
    assert set(machine.reads) == set(steps)
    assert len(machine.reads) > len(steps)


def test_memory_that_stays_free_is_an_error(machine, cache):
    machine.floor = 300 * MIB
    with pytest.raises(processes.CompareFailed, match="leaves 300 MiB of memory free"):
        cache.fill()


def test_file_has_no_blocks_and_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "file_system", lambda parent: "ext4")
    monkeypatch.setattr(memory.PageCache, "fill", lambda cache: None)
    with memory.page_cache(tmp_path):
        (file,) = tmp_path.rglob("without-blocks")
        assert file.stat().st_size > memory.meminfo_bytes("MemTotal")
        assert file.stat().st_blocks == 0
    assert not list(tmp_path.iterdir())


def test_tmpfs_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "file_system", lambda parent: "tmpfs")
    with (
        pytest.raises(processes.CompareFailed, match="is in memory"),
        memory.page_cache(tmp_path),
    ):
        pass
