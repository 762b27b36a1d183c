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


CASES = [
    ("run", ringstow.IncompleteCheckpointError, ["step-2", "`latest`", "`ringstow ls`"]),
    ("empty", ringstow.IncompleteCheckpointError, ["nothing was saved here"]),
    (
        "run/step-3",
        FileNotFoundError,
        ["no checkpoint was saved there, or it was removed", "step-2"],
    ),
]


OF_OTHERS = [
    ("stock", ringstow.IncompleteCheckpointError, ["ringstow.load", "`ringstow convert"]),
    ("hf", ringstow.IncompleteCheckpointError, ["ringstow.load", "`ringstow convert"]),
    ("model.pt", NotADirectoryError, ["ringstow.load", "`ringstow convert"]),
]


@pytest.mark.parametrize(("name", "kind", "words"), OF_OTHERS, ids=[one[0] for one in OF_OTHERS])
def test_only_load_and_open_read_what_another_program_wrote(others, name, kind, words):
    assert ringstow.load(others / name)["w"].tolist() == [1, 1, 1]
    with ringstow.open(others / name) as opened:
        assert opened["w"].load().tolist() == [1, 1, 1]
    with pytest.raises(kind) as caught:
        ringstow.verify(others / name)
    for word in [str(others / name), *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(("name", "kind", "words"), CASES, ids=[case[0] for case in CASES])
def test_load_error_names_the_format_and_its_reader(others, name, kind, words):
    for load in (ringstow.load, lambda path: ringstow.load_into({}, path), ringstow.verify):
        with pytest.raises(kind) as caught:
            load(others / name)
        for word in [str(others / name), *words]:
            assert word in str(caught.value)


def test_unfinished_dcp_directory_gets_one_message(others, capfd):
    """Regression: `load` advised to convert it, and `convert` did not know it."""
    path = others / "stock"
    (path / ".metadata").unlink()
    said = set()
    for call in (
        ringstow.load,
        ringstow.open,
        ringstow.verify,
        lambda path: convert(path, others / "new"),
    ):
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
    words = next(words for case, _, words in [*CASES, *OF_OTHERS] if case == name)
    reader = ringstow.dcp.StorageReader()
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"w": torch.zeros(3)}, checkpoint_id=others / name, storage_reader=reader)
    assert all(word in str(caught.value) for word in words)
