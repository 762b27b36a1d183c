"""The error for a path that is not a checkpoint names its format and the call that reads it."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

import ringstow
import ringstow.dcp
from ringstow import _native
from ringstow.convert import convert


@pytest.fixture
def others(tmp_path):
    state = {"w": torch.ones(3)}
    ringstow.save(state, tmp_path / "run" / "step-1")
    ringstow.save(state, tmp_path / "run" / "step-2")
    dcp.save(dict(state), checkpoint_id=tmp_path / "stock")
    torch.save(state, tmp_path / "model.pt")
    (tmp_path / "hf").mkdir()
    save_file(state, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "empty").mkdir()
    return tmp_path


INCOMPLETE = ringstow.IncompleteCheckpointError
OURS = {
    "run": (INCOMPLETE, ["step-2", "`latest`", "`ringstow ls`"]),
    "empty": (INCOMPLETE, ["nothing was saved here"]),
    "run/step-3": (FileNotFoundError, ["no checkpoint was saved there, or it was r", "step-2"]),
}
OF_OTHERS = {
    name: (kind, ["ringstow.load", "`ringstow convert"])
    for name, kind in {
        "stock": INCOMPLETE,
        "hf": INCOMPLETE,
        "model.pt": NotADirectoryError,
    }.items()
}
CASES = OURS | OF_OTHERS


@pytest.mark.parametrize("name", CASES)
def test_error_names_the_format_and_its_reader(others, name):
    kind, words = CASES[name]
    loads = (ringstow.load, lambda path: ringstow.load_into({}, path))
    if name in OF_OTHERS:  # which only `load` and `open` read
        assert ringstow.load(others / name)["w"].tolist() == [1, 1, 1]
        with ringstow.open(others / name) as opened:
            assert opened["w"].load().tolist() == [1, 1, 1]
        loads = ()
    for read in (ringstow.verify, *loads):
        with pytest.raises(kind) as caught:
            read(others / name)
        for word in [str(others / name), *words]:
            assert word in str(caught.value)


def test_unfinished_dcp_directory_gets_one_message(others, capfd):
    """Regression: `load` advised to convert it, and `convert` did not know it."""
    path = others / "stock"
    (path / ".metadata").unlink()
    said = set()
    calls = (ringstow.load, ringstow.open, ringstow.verify)
    for call in (*calls, lambda path: convert(path, others / "new")):
        with pytest.raises(ringstow.NotCommittedError, match="no .metadata") as caught:
            call(path)
        said.add(str(caught.value))
    assert _native.cli(["ringstow", "show", str(path)]) != 0
    assert "no .metadata, which that writes last" in capfd.readouterr().err
    (message,) = said
    assert "ringstow convert" not in message
    assert "remove this directory once nothing writes there" in message


@pytest.mark.parametrize("name", ["run", "stock", "empty"])
def test_dcp_reader_raises_the_same_error(others, name):
    reader = ringstow.dcp.StorageReader()
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"w": torch.zeros(3)}, checkpoint_id=others / name, storage_reader=reader)
    assert all(word in str(caught.value) for word in CASES[name][1])
