"""The errors for files that torch.save did not write, or did not finish."""

import os

import forked
import pytest
import torch
import torch.distributed.checkpoint as dcp
from converted import saved

import ringstow
from ringstow.convert import convert, dcp_to_ringstow

pytestmark = pytest.mark.filterwarnings("ignore:.*before 1.6")

STATE = {
    **{f"w{i}": torch.randn(40, 40) for i in range(6)},
    "step": 3,
    "list": [1, "x", {"y": 2.5}],
}
JUNK = [
    b"hello world, not a checkpoint\n",
    b"{}",
    b"P",
    b"\x80\x02}q\x00.",
    b"\x89HDF\r\n\x1a\n" + bytes(100),
    b"PK\x05\x06" + bytes(18),
]


def said_of(at, data, **options):
    """Return the error of a conversion of these bytes, which is that of a load."""
    (at / "x.pt").write_bytes(data)
    with pytest.raises((ringstow.Error, OSError)) as caught:
        convert(at / "x.pt", at / "ckpt", **options)
    with pytest.raises(type(caught.value)):
        ringstow.load(at / "x.pt", **options)
    assert str(at / "x.pt") in str(caught.value)
    assert not (at / "ckpt").exists()
    return caught.value


def test_truncated_file_is_reported_as_cut_short(at, recwarn):
    data = saved(STATE, at / "a.pt").read_bytes()
    for length in (3, 10, 2000, 20_000, len(data) - 100, len(data) - 1):
        error = said_of(at, data[:length])
        assert isinstance(error, ringstow.CorruptCheckpointError)
        assert error.file == str(at / "x.pt")
        for words in (f"{length} bytes", "cut short", "take another copy"):
            assert words in str(error)
    assert not recwarn.list
    assert "is empty" in str(said_of(at, b""))
    zeros = said_of(at, bytes(20_000))
    assert isinstance(zeros, ringstow.CorruptCheckpointError)
    assert "zeros" in str(zeros)


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_truncated_file_of_the_old_format_is_named(at, allow_pickle):
    torch.save(STATE, at / "old.pt", _use_new_zipfile_serialization=False)
    data = (at / "old.pt").read_bytes()
    for length in (*range(1, 1500, 23), *range(1500, len(data), 4001), len(data) - 1):
        error = said_of(at, data[:length], allow_pickle=allow_pickle)
        assert isinstance(error, (ringstow.CorruptCheckpointError, ringstow.UnsupportedError))
    convert(at / "old.pt", at / "ckpt")


@pytest.mark.parametrize("junk", JUNK, ids=lambda junk: repr(junk[:8]))
def test_file_not_written_by_torch_save_is_refused(at, junk):
    error = said_of(at, junk)
    if junk != b"P":  # a torch file may begin with P
        assert isinstance(error, ringstow.InvalidStateError)
        assert "was not written by torch.save" in str(error)
        assert repr(junk[:8]) in str(error)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_damaged_dcp_directory_is_named(at, name):
    dcp.save(STATE, checkpoint_id=at / "dcp", no_dist=True)
    data = (at / "dcp" / name).read_bytes()
    for length in [*range(0, 200, 23), *range(200, len(data), len(data) // 9)]:
        (at / "dcp" / name).write_bytes(data[:length])
        with pytest.raises((ringstow.Error, OSError)) as caught:
            dcp_to_ringstow(at / "dcp", at / "ckpt")
        assert str(at / "dcp") in str(caught.value)
    assert not (at / "ckpt").exists()


def test_missing_class_is_not_reported_as_damage(at):
    torch.save({"a": ringstow.Config}, at / "a.pt", _use_new_zipfile_serialization=False)
    data = (at / "a.pt").read_bytes()
    data = data.replace(b"cringstow._core._config", b"cringstow_core_config_")
    error = said_of(at, data, allow_pickle=True)
    assert isinstance(error, ringstow.UnsupportedError)
    assert "ringstow_core_config_" in str(error)


def test_exit_code_separates_damage_from_other_files(at):
    data = saved(STATE, at / "a.pt").read_bytes()
    (at / "cut.pt").write_bytes(data[:20_000])
    (at / "empty.pt").write_bytes(b"")
    (at / "junk.pt").write_bytes(b"hello")
    for name, code in [("cut.pt", 1), ("empty.pt", 1), ("junk.pt", 2)]:
        ran = forked.ringstow("convert", at / name, at / "ckpt")
        assert ran.returncode == code, ran.stderr
        assert ran.stderr.count("\n") == 1
        assert name in ran.stderr
    assert sorted(os.listdir(at)) == ["a.pt", "cut.pt", "empty.pt", "junk.pt"]
