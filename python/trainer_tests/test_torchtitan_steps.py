"""Which steps torchtitan's checkpoint folder has, and which are removed."""

from __future__ import annotations

import logging
import os
import pathlib
import shutil
from unittest.mock import Mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ringstow
import ringstow.dcp
from ringstow import _native
from ringstow._core._config import native_json
from ringstow.integrations._torchtitan import _steps
from ringstow.integrations._torchtitan._steps import Steps

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE = {"a": torch.arange(40_000.0), "train_state": {"step": 1}}


def write(path, kind="ringstow", config=None):
    path = pathlib.Path(path)
    if kind == "hf":
        path.mkdir(parents=True)
        (path / "model.safetensors.index.json").write_text("{}")
        return
    writer = ringstow.dcp.StorageWriter(config=config) if kind == "ringstow" else None
    dcp.save(STATE, checkpoint_id=path, no_dist=True, storage_writer=writer)
    if kind == "killed":
        (path / ".metadata").unlink()


@pytest.fixture
def folder(tmp_path):
    """Return a folder with steps of all kinds."""
    kinds = {2: "killed", 4: "torch", 6: "ringstow", 8: "ringstow", 10: "hf", 12: "killed"}
    for step, kind in kinds.items():
        write(tmp_path / f"step-{step}", kind)
    (tmp_path / "step-x").mkdir()
    (tmp_path / "old-step-3").mkdir()
    (tmp_path / "step-14").touch()
    return tmp_path


def names(paths):
    return sorted((os.path.basename(path) for path in paths), key=lambda name: int(name[5:]))


def test_complete_steps_are_ringstows_torchs_and_exports(folder):
    steps = Steps(str(folder), None)
    kinds = {4: "torch", 6: "ringstow", 8: "ringstow", 10: "hf"}
    assert {step: steps.kind(step) for step in steps.complete()} == kinds
    assert steps.newest() == 10
    steps.check(6)
    with pytest.raises(
        ringstow.NoCheckpointError, match="was not completed; complete.* 4, 6, 8, 10"
    ):
        steps.check(12)
    with pytest.raises(ringstow.NoCheckpointError, match="is not there"):
        steps.check(3)
    none = Steps(str(folder / "none"), None)
    assert (none.complete(), none.newest(), none.stale(2, 1)) == ([], None, [])


def test_the_newest_and_the_step_being_saved_stay(folder):
    steps = Steps(str(folder), None)
    assert names(steps.stale(2, 14)) == ["step-2", "step-4", "step-6", "step-8"]
    assert names(steps.stale(4, 14)) == ["step-2", "step-4"]
    assert steps.stale(0, 14) == []
    # After a return to an older step the abandoned ones are newer.
    assert names(steps.stale(2, 5)) == ["step-2", "step-4", "step-6"]
    assert names(steps.stale(2, 6)) == ["step-2", "step-4"]


def test_links_and_what_they_lead_to_stay(folder):
    (folder / "best").symlink_to("step-4")
    (folder / "step-5").symlink_to(folder / "step-6")
    assert names(Steps(str(folder), None).stale(1, 16)) == [
        "step-2",
        "step-8",
        "step-10",
        "step-12",
    ]


def test_a_removal_leaves_nothing_of_a_step(folder):
    steps = Steps(str(folder), None)
    (folder / "step-6" / "notes.txt").touch()
    for path in steps.stale(1, 16):
        steps.remove(path)
    assert steps.complete() == []
    assert sorted(os.listdir(folder)) == ["old-step-3", "step-14", "step-x"]


@pytest.mark.parametrize("kind", ["ringstow", "torch"])
@pytest.mark.parametrize("after", range(6))
def test_a_removal_that_ends_early_leaves_no_valid_step_and_the_next_one_ends_it(
    kind, after, tmp_path, monkeypatch
):
    path = tmp_path / "step-4"
    write(path, kind)
    calls = 0

    class KilledError(BaseException):
        pass

    def counted(call):
        def wrapper(*args, **options):
            nonlocal calls
            calls += 1
            if calls > after:
                raise KilledError
            return call(*args, **options)

        return wrapper

    def uncommit(path, **_):  # how ringstow's removal begins
        manifest = f"{path}/manifest.json"
        if not os.path.exists(manifest):
            raise ringstow.NoCheckpointError("none", path=path)
        os.rename(manifest, f"{manifest}.retired")
        os.unlink = counted(unlink)
        raise ringstow.NotCommittedError("it has begun", path=path)

    unlink = os.unlink
    with monkeypatch.context() as patch:
        patch.setattr(_steps, "remove", uncommit)
        patch.setattr(_steps, "prune", counted(_steps.prune))
        patch.setattr(os, "unlink", counted(unlink))
        patch.setattr(shutil, "rmtree", counted(shutil.rmtree))
        steps = Steps(str(tmp_path), None)
        try:
            steps._remove(str(path))
        except KilledError:
            if after:
                assert not (path / ".metadata").exists()  # torchtitan's own manager takes none
            assert (steps.kind(4) == "ringstow") == (path / "manifest.json").exists()
    write(tmp_path / "step-6")
    steps = Steps(str(tmp_path), None)
    assert [steps.remove(old) for old in steps.stale(1, 6)] in ([], [None])
    assert os.listdir(tmp_path) == ["step-6"]


def test_a_removal_that_fails_is_logged_and_tried_again(folder, monkeypatch, caplog):
    steps = Steps(str(folder), None)
    path = steps.path(6)

    full = Mock(side_effect=OSError(5, "Input/output error"))
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "ringstow"):
        patch.setattr(_steps, "remove", full)
        steps.remove(path)
    assert "step-6 is over keep_latest_k and could not be removed" in caplog.text
    assert steps.kind(6) == "ringstow"
    steps.remove(path)
    assert not os.path.exists(path)


def test_a_step_that_another_process_is_saving_stays(folder):
    steps = Steps(str(folder), None)
    path = steps.path(8)
    session = _native.Session(path, 1, native_json(None))
    try:
        steps.remove(path)
        assert ringstow.verify(path).ok
    finally:
        session.abandon()
    steps.remove(path)
    assert not os.path.exists(path)


def test_a_removal_finds_the_stripes_of_a_step(tmp_path):
    config = ringstow.Config(stripe=[str(tmp_path / "other")])
    (tmp_path / "other").mkdir()
    path = tmp_path / "run" / "step-2"
    write(path, config=config)
    assert any((tmp_path / "other").rglob("*.safetensors"))
    Steps(str(tmp_path / "run"), config).remove(str(path))
    assert not path.exists()
    assert not any((tmp_path / "other").rglob("*.safetensors"))
