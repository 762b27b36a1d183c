"""``load(mmap=True)`` returns views of the files: nothing is read before it is touched.

The values are the checkpoint's, whatever becomes of its path, and no write reaches a file.
"""

from __future__ import annotations

import copy
import json
import os
import pathlib
import pickle
import shutil
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import assert_same, flip, logged, python, shards_of

import ringstow
from ringstow._reading._mapped_files import MappedFiles

STATE = {
    "model": {"w": torch.arange(1 << 18, dtype=torch.float32), "b": torch.ones(3).bfloat16()},
    "array": np.arange(5),
    "empty": torch.zeros(0),
    "step": 3,
}


@pytest.fixture
def path(tmp_path):
    ringstow.save(STATE, tmp_path / "c")
    return tmp_path / "c"


def shard(path):
    (file,) = shards_of(path)
    return file


def mapped_bytes(path):
    """Return how many bytes of a file this process has mapped."""
    total = 0
    with open("/proc/self/maps") as maps:
        for line in maps:
            if str(path) in line:
                begin, end = (int(text, 16) for text in line.split()[0].split("-"))
                total += end - begin
    return total


def report_of(call):
    found = []
    with ringstow.on_done(lambda outcome: found.append(outcome.report)):
        call()
    return found[0]


@pytest.mark.parametrize("verify", [True, False, "background"])
def test_tensors_are_views_of_the_files(verify, path):
    loaded = ringstow.load(path, mmap=True, verify=verify)
    assert type(loaded) is ringstow.MappedState
    assert_same(dict(loaded), STATE)
    assert mapped_bytes(shard(path)) >= 1 << 20
    del loaded
    assert mapped_bytes(shard(path)) == 0


def test_nothing_is_read_before_it_is_touched(path):
    report = report_of(lambda: ringstow.load(path, mmap=True, verify=False))
    assert (report.read_bytes, report.verified, report.engine) == (0, False, "mmap")
    assert report.tensor_bytes == (4 << 18) + 6 + 40
    assert report_of(lambda: ringstow.load(path, mmap=True)).verified


def test_a_write_changes_the_tensor_and_not_the_file(path):
    loaded = ringstow.load(path, mmap=True)
    loaded["model"]["w"].zero_()
    loaded["array"][0] = 7
    assert_same(ringstow.load(path), STATE)
    assert ringstow.verify(path).ok


def test_a_part_is_mapped_and_names_are_renamed(path):
    loaded = ringstow.load(path, mmap=True, prefix="model", rename={"model": "net"})
    assert_same(dict(loaded), {"net": STATE["model"]})
    arrays = ringstow.load(path, mmap=True, keys=["model.w"], framework="numpy")
    assert arrays["model"]["w"][7] == 7


def test_a_mapped_state_is_saved_as_a_dict(path, tmp_path):
    loaded = ringstow.load(path, mmap=True)
    ringstow.save({"in": loaded}, tmp_path / "d")
    assert_same(ringstow.load(tmp_path / "d"), {"in": STATE})
    ringstow.save(loaded, path)  # over the files that it is mapped from
    assert_same(ringstow.load(path), STATE)


def remove(path):
    ringstow.remove(path)


def replace(path):
    ringstow.save({"other": torch.zeros(1 << 19)}, path)


def recycle(path):
    """Save over the files of the removed checkpoint, as far as ringstow does."""
    config = ringstow.Config(recycle=True)
    ringstow.save({"x": torch.zeros(1 << 19)}, path, config=config)
    ringstow.save({"x": torch.ones(1 << 19)}, path, config=config)


@pytest.mark.parametrize("change", [remove, replace, recycle])
def test_tensors_keep_their_bytes_whatever_becomes_of_the_path(change, path):
    loaded = ringstow.load(path, mmap=True)
    change(path)
    assert_same(dict(loaded), STATE)


@pytest.mark.parametrize("is_damaged", [False, True])
@pytest.mark.parametrize("change", [remove, replace, recycle])
def test_the_background_compares_what_is_mapped_whatever_becomes_of_the_path(
    change, is_damaged, path, monkeypatch
):
    compare, changed = MappedFiles._compare, threading.Event()

    def late(self):
        changed.wait()
        yield from compare(self)

    monkeypatch.setattr(MappedFiles, "_compare", late)
    if is_damaged:
        flip(shard(path), 4096 + 5000)
    loaded = ringstow.load(path, mmap=True, verify="background")
    change(path)
    changed.set()
    if is_damaged:
        with pytest.raises(ringstow.CorruptCheckpointError, match="is damaged") as caught:
            loaded.wait_verified()
        assert "model.w" in caught.value.tensors
    else:
        assert loaded.wait_verified()
        assert_same(dict(loaded), STATE)
    opened = [pathlib.Path("/proc/self/fd", one) for one in os.listdir("/proc/self/fd")]
    assert not [one for one in opened if str(path.parent) in os.path.realpath(one)]


@pytest.mark.parametrize("call", [lambda one: pickle.loads(pickle.dumps(one)), copy.deepcopy])
def test_the_pickle_and_copies_of_a_mapped_state_are_dicts(call, path, tmp_path):
    for verify in (True, "background"):
        copied = call(ringstow.load(path, mmap=True, verify=verify))
        assert type(copied) is dict
        assert_same(copied, STATE)
    module = torch.nn.Linear(2, 2).state_dict()
    ringstow.save(module, tmp_path / "module")
    copied = call(ringstow.load(tmp_path / "module", mmap=True))
    assert copied._metadata == module._metadata


def test_damage_is_an_error_before_the_return(path):
    flip(shard(path), 4096 + 5000)
    with pytest.raises(ringstow.CorruptCheckpointError, match="damaged at offset 0") as caught:
        ringstow.load(path, mmap=True)
    assert "model.w" in caught.value.tensors
    with pytest.raises(ringstow.CorruptCheckpointError) as read:
        ringstow.load(path)
    assert str(caught.value) == str(read.value)
    with pytest.raises(ValueError, match="nothing compares checksums here"):
        ringstow.load(path, mmap=True, verify=False).wait_verified()


def test_damage_that_the_background_finds_is_logged_and_raised(path):
    assert ringstow.load(path, mmap=True, verify="background").wait_verified()
    assert ringstow.load(path, mmap=True).wait_verified(0)
    flip(shard(path), 4096 + 5000)
    with logged("was loaded by mmap=True, and is in use") as said:
        loaded = ringstow.load(path, mmap=True, verify="background")
        with pytest.raises(ringstow.CorruptCheckpointError):
            loaded.wait_verified()
    assert len(said) == 1


def test_a_file_that_was_cut_is_an_error(path):
    os.truncate(shard(path), 4096)
    with pytest.raises(ringstow.CorruptCheckpointError, match="length in bytes"):
        ringstow.load(path, mmap=True)


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_safetensors_files_are_mapped_without_checksums(kind, tmp_path):
    save_file(STATE["model"], tmp_path / "model.safetensors")
    path = tmp_path if kind == "directory" else tmp_path / "model.safetensors"
    with logged("has no checksums: nothing is compared") as said:
        loaded = ringstow.load(path, mmap=True, verify="background")
        assert loaded.wait_verified()
    assert len(said) == 1
    assert_same(dict(loaded), STATE["model"])
    assert ringstow.load(path, mmap=True).wait_verified()


def test_tensors_in_several_parts_are_read_with_a_warning(tmp_path):
    """As several ranks save them; each file notes which part it has, as torch's own writer does."""
    for rank in range(2):
        shape = {"w": {"saved_offsets": [rank * 2, 0]}}
        file = tmp_path / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"
        part = {"w": torch.arange(6.0).reshape(2, 3) + 6 * rank}
        metadata = {"DCP_SHARDING_INFO": json.dumps(shape), "DCP_VERSION": "1.0"}
        save_file(part, file, metadata=metadata)
    with logged("1 of 1 tensors are read, and not mapped") as said:
        loaded = ringstow.load(tmp_path, mmap=True)
    assert loaded["w"].equal(torch.arange(12.0).reshape(4, 3))
    assert said


REFUSED = {
    "background": ({"verify": "background"}, 'verify="background" goes with mmap=True'),
    "a word": ({"mmap": True, "verify": "later"}, 'verify is True, False or "background"'),
    "a gpu": ({"mmap": True, "device": "cuda"}, "leave out device="),
    "skip": ({"mmap": True, "on_corrupt": "skip"}, "goes without mmap=True"),
    "a join": ({"mmap": True, "rename": {"*": ringstow.Stack("w")}}, "as they are stored"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_with_it_is_refused(case, path):
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        ringstow.load(path, **options)


def test_another_program_s_pickle_is_refused(tmp_path):
    torch.save(STATE["model"], tmp_path / "x.pt")
    with pytest.raises(ringstow.UnsupportedError, match="mmap=True maps safetensors files"):
        ringstow.load(tmp_path / "x.pt", mmap=True)


ENDS = """
import sys, ringstow
loaded = ringstow.load(sys.argv[1], mmap=True, verify="background")
print(loaded["step"])
"""


def test_a_program_may_end_while_the_background_compares(path):
    ran = python(ENDS, path, check=True)
    assert ran.stdout == "3\n"
    assert "Error" not in ran.stderr


def test_a_copy_on_another_tier_is_mapped(tmp_path):
    config = ringstow.Config(tiers=[str(tmp_path / "tier")])
    ringstow.save(STATE, tmp_path / "run/step-1", config=config)
    assert ringstow.wait_promoted()
    shard(tmp_path / "run/step-1").unlink()
    loaded = ringstow.load([tmp_path / "run", tmp_path / "tier"], mmap=True)
    assert_same(dict(loaded), STATE)
    shutil.rmtree(tmp_path / "tier")
    assert_same(dict(loaded), STATE)
