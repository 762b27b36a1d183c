"""Every damage to a checkpoint's files is detected and named, and never returned as data."""

import pytest
import torch
from support import flip, manifest_of, reseal, shards_of

import ringstow

CONFIG = ringstow.Config(block_bytes=8192, pool_bytes=64 << 10)


@pytest.fixture
def path(tmp_path):
    state = {"w": torch.arange(10_000.0), "b": torch.ones(3), "step": 7, "name": "naïve"}
    ringstow.save(state, tmp_path / "c", config=CONFIG)
    return tmp_path / "c"


@pytest.fixture
def shard(path):
    (only,) = shards_of(path)
    return only


def data_begins(shard):
    return 8 + int.from_bytes(shard.read_bytes()[:8], "little")


@pytest.mark.parametrize("offset", [0, 1, 2, 17, 4999, 9999])
def test_a_flipped_bit_in_the_data_is_never_handed_out(path, shard, offset):
    at = data_begins(shard) + 4 * offset
    flip(shard, at)
    with pytest.raises(ringstow.CorruptCheckpointError) as caught:
        ringstow.load(path)
    error = caught.value
    assert error.file == str(shard)
    assert error.offset == at // 8192 * 8192
    assert error.expected != error.got
    assert str(shard) in str(error)
    with pytest.raises(ringstow.CorruptCheckpointError):
        ringstow.load_into(
            {"w": torch.zeros(10_000), "b": torch.zeros(3), "step": 0, "name": ""}, path
        )
    ringstow.load(path, verify=False)


@pytest.mark.parametrize("where", ["first", "header", "padding", "data", "last"])
def test_verify_finds_a_flipped_bit_anywhere(path, shard, where):
    begin, size = data_begins(shard), shard.stat().st_size
    offsets = {"first": 0, "header": 20, "padding": begin - 1, "data": begin + 9, "last": size - 1}
    assert ringstow.verify(path).ok
    flip(shard, offsets[where])
    report = ringstow.verify(path)
    assert not report.ok
    (damage,) = report.damage
    assert damage.file == str(shard)
    assert damage.offset == offsets[where] // 8192 * 8192
    assert damage.expected != damage.got


@pytest.mark.parametrize("cut", [1, 8192, 10**9])
def test_a_truncated_shard_is_found(path, shard, cut):
    data = shard.read_bytes()
    shard.write_bytes(data[: max(0, len(data) - cut)])
    with pytest.raises(ringstow.CorruptCheckpointError, match="length") as caught:
        ringstow.load(path)
    assert caught.value.file == str(shard)
    assert caught.value.expected == str(len(data))
    (damage,) = ringstow.verify(path).damage
    assert (damage.file, damage.what) == (str(shard), "length in bytes")
    assert (damage.expected, damage.got) == (str(len(data)), str(max(0, len(data) - cut)))


def test_a_resealed_manifest_loads(path):
    reseal(path, manifest_of(path))
    assert ringstow.load(path)["step"] == 7


# What Rust decides: tests/suite/hostile_manifest.rs, src/format/manifest/check.rs.
HOSTILE = {
    "dot": lambda m: m["files"][0].update(name="."),
    "name of another type": lambda m: m["files"][0].update(name=5),
    "length beyond 64 bits": lambda m: m["files"][0].update(bytes=1 << 70),
    "half a checksum": lambda m: m["files"][0].update(crc32="0123"),
    "checksums that are no hex": lambda m: m["files"][0].update(
        crc32="z" * len(m["files"][0]["crc32"])
    ),
    "no files": lambda m: m.update(files=[]),
    "unknown dtype": lambda m: m["tensors"][0].update(dtype="F7"),
    "another dtype": lambda m: m["tensors"][0].update(dtype="F64"),
    "shape of another type": lambda m: m["tensors"][0].update(shape=["x"]),
    "negative file": lambda m: m["tensors"][0]["chunks"][0].update(file=-1),
    "block size that is not aligned": lambda m: m.update(block_bytes=4097),
    "block size beyond memory": lambda m: m.update(block_bytes=1 << 60),
    "no version": lambda m: m.pop("version"),
    "version zero": lambda m: m.update(version=0),
    "no state": lambda m: m.pop("state"),
    "state that is a list": lambda m: m.update(state=[1]),
    "state that names no tensor": lambda m: m.update(state={"a": {"$tensor": "nowhere"}}),
    "state of an unknown kind": lambda m: m.update(state={"a": {"$eval": "1"}}),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_manifest_is_refused(what, path):
    manifest = manifest_of(path)
    HOSTILE[what](manifest)
    reseal(path, manifest)
    with pytest.raises(ringstow.Error) as caught:
        ringstow.load(path)
    assert not isinstance(caught.value, ringstow.InvalidStateError)
