"""Exceptions survive pickle and copy, and match the hierarchy that the Rust side constructs."""

import copy
import errno
import pickle

import numpy
import pytest

import ringstow
from ringstow._ranks import _concurrent_saves
from ringstow._saving import _jobs

CASES = [
    (ringstow.Error, {}),
    (ringstow.IncompleteCheckpointError, {"path": "/a"}),
    (ringstow.NoCheckpointError, {"path": "/a"}),
    (ringstow.NotCommittedError, {"path": "/a"}),
    (ringstow.MissingShareError, {"path": "/a"}),
    (ringstow.MissingFilesError, {"path": "/a"}),
    (ringstow.PanickedError, {}),
    (
        ringstow.CorruptCheckpointError,
        {"file": "/a/b", "offset": 4096, "expected": "00", "got": "01"},
    ),
    (ringstow.FormatError, {"path": "/a"}),
    (ringstow.UnsupportedError, {}),
    (ringstow.InvalidStateError, {}),
    (
        ringstow.KeyMismatchError,
        {"path": "/a", "missing": ["x"], "unexpected": ["y"], "mismatched": ["z is ..."]},
    ),
    (ringstow.BusyError, {"path": "/a"}),
    (ringstow.NotDurableError, {"path": "/a", "errno": 5}),
    (ringstow.ReplacedCheckpointError, {"path": "/a"}),
    (ringstow.SaveCancelledError, {"path": "/a"}),
    (ringstow.TornSaveError, {"path": "/a", "tensors": ["w"]}),
    (ringstow.GpuError, {"device": 1}),
]


@pytest.mark.parametrize(
    ("cls", "attributes"), CASES, ids=lambda case: getattr(case, "__name__", "")
)
@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))]
)
def test_errors_survive_copy_and_pickle(cls, attributes, again):
    error = again(cls("what happened", **attributes))
    assert type(error) is cls
    assert isinstance(error, ringstow.Error)
    assert str(error) == "what happened"
    for name, value in attributes.items():
        assert getattr(error, name) == value


def test_missing_checkpoint_is_a_file_that_is_not_found(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        ringstow.load(tmp_path)
    assert type(caught.value) is ringstow.NoCheckpointError
    assert (caught.value.errno, caught.value.path) == (errno.ENOENT, str(tmp_path))


def test_incomplete_checkpoint_error_names_missing_files(tmp_path):
    path = tmp_path / "step-1"
    ringstow.save({"a": numpy.zeros(100, numpy.uint8)}, path)
    shard = next(path.glob("*.safetensors"))

    def error(names="", read=ringstow.load):
        with pytest.raises(ringstow.IncompleteCheckpointError, match=names or None) as caught:
            read(path)
        assert caught.value.path == str(path)
        return type(caught.value)

    shard.rename(tmp_path / "elsewhere")
    assert error(shard.name) is ringstow.MissingFilesError
    (path / "manifest.json").unlink()
    assert error(r"manifest\.json") is ringstow.NoCheckpointError
    assert error(read=ringstow.verify) is ringstow.NoCheckpointError
    (tmp_path / "elsewhere").rename(f"{shard}.part")
    assert error() is ringstow.NotCommittedError
    with pytest.raises(ringstow.NoCheckpointError):
        ringstow.load(ringstow.latest(tmp_path / "none"))


def test_an_invalid_state_is_a_value_error():
    assert issubclass(ringstow.InvalidStateError, ValueError)


def test_os_error_shows_path_and_errno_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError) as caught:
        ringstow.save({"a": 1}, tmp_path / "file" / "ckpt")
    text = str(caught.value)
    assert text.count(str(tmp_path)) == 1, text
    assert text.count("20") == 1 + str(tmp_path).count("20"), text
    assert "os error" not in text
    assert caught.value.filename.startswith(str(tmp_path))
    assert caught.value.errno == errno.ENOTDIR


def test_save_that_may_not_be_durable_is_this_process_own(monkeypatch):
    """Another save to the path replaces it: no other rank has saved it."""

    class Job:
        def result(self):
            raise ringstow.NotDurableError("it may not survive", path="/a", errno=5)

    monkeypatch.setattr(_concurrent_saves, "_saved", set())
    claim = _jobs.Claim("/a")
    claim.job = Job()
    with pytest.raises(ringstow.NotDurableError):
        claim.report()
    assert "/a" in _concurrent_saves._saved
