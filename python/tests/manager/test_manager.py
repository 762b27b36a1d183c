"""A training loop saves, keeps and resumes by one object."""

from __future__ import annotations

import logging
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import torch
from support import flip, shards_of

import ringstow
from ringstow import CheckpointManager
from ringstow._manager import _after_save


def state(step):
    return {"w": torch.full((1000,), float(step)), "step": step}


def numbers(root):
    return [found.step for found in ringstow.steps(root)]


def save_all(manager, steps):
    for step in steps:
        manager.save(step, state(step), metrics={"loss": float(step)})


def names(root):
    """Return what is in a run's directory, but for the manager's own notes."""
    return sorted(name for name in os.listdir(root) if not name.startswith("."))


def test_loop_saves_and_resumes(root):
    with CheckpointManager(root, keep=2) as manager:
        assert manager.restore() is None
        assert manager.latest() is None
        assert manager.steps() == []
        for step in range(0, 500, 100):
            manager.save_async(step, state(step), metrics={"loss": 1 / (step + 1)})
        manager.wait()
        assert manager.retention_error is None
        kept = [pathlib.Path(path).name for path in manager.retention_report.kept]
    assert numbers(root) == [300, 400]
    assert names(root) == kept == ["step-00000300", "step-00000400"]

    with CheckpointManager(root) as manager:
        restored = manager.restore()
        assert (restored.step, restored.metrics) == (400, {"loss": 1 / 401})
        assert restored.path == str(root / "step-00000400")
        assert torch.equal(restored.state["w"], state(400)["w"])
        assert "tensor" not in repr(restored)
        assert manager.restore(300).state["step"] == 300
        assert manager.latest().step == 400


def test_restore_fills_the_tensors_that_are_there(root):
    into = state(0)
    tensor = into["w"]
    with CheckpointManager(root) as manager:
        manager.save(7, state(7))
        restored = manager.restore(into=into)
    assert restored.state is into
    assert into["w"] is tensor
    assert torch.equal(tensor, state(7)["w"])
    assert into["step"] == 7


def test_a_step_that_is_not_there_is_refused_naming_those_that_are(root):
    with CheckpointManager(root) as manager:
        with pytest.raises(ringstow.NoCheckpointError, match="has no step 5; its steps: none yet"):
            manager.restore(5)
        save_all(manager, [10, 20])
        with pytest.raises(ringstow.NoCheckpointError, match="has no step 5; its steps: 10, 20"):
            manager.restore(5)
        assert manager.retention_report is None  # there are no rules


def test_best_needs_a_rule_and_passes_over_what_is_no_number(root):
    with CheckpointManager(root) as manager:
        with pytest.raises(ringstow.InvalidStateError, match="which step is the best"):
            manager.best()
        with pytest.raises(ValueError, match='"min" or "max"'):
            manager.best("loss", "least")
        assert manager.best("loss", "min") is None
        manager.save(1, state(1), metrics={"loss": float("nan")})
        manager.save(2, state(2))
        assert manager.best("loss", "min") is None
        manager.save(3, state(3), metrics={"loss": torch.tensor(0.5)})
        manager.save(4, state(4), metrics={"loss": 0.5})
        assert manager.best("loss", "min").step == 4
        manager.save(5, state(5), metrics={"loss": 0.75})
        assert manager.best("loss", "max").step == 5


def test_the_step_that_exists_is_replaced_where_it_is(root):
    ringstow.save(state(5), root / "step-5", step=5)
    with CheckpointManager(root) as manager:
        manager.save(5, state(50))
        manager.save(6, state(6))
        assert manager.restore(5).state["step"] == 50
    assert names(root) == ["step-00000006", "step-5"]


def test_kept_links_and_other_programs_files_stay(root):
    with CheckpointManager(root, keep=1) as manager:
        manager.save(1, state(1))
        (root / "best").symlink_to("step-00000001")
        (root / "notes.txt").write_text("mine")
        save_all(manager, [2, 3])
    assert names(root) == ["best", "notes.txt", "step-00000001", "step-00000003"]


def test_killed_saves_do_not_count(root):
    with CheckpointManager(root) as manager:
        manager.save(1, state(1))
        half = root / "step-00000002"
        half.mkdir()
        (half / "rank00000-0.safetensors.part").write_bytes(b"half")
        assert manager.restore().step == 1
        assert manager.latest().step == 1
        with pytest.raises(ringstow.NoCheckpointError, match="its steps: 1"):
            manager.restore(2)


def test_a_newer_step_whose_manifest_is_gone_is_not_passed_over_in_silence(root, caplog):
    with CheckpointManager(root) as manager:
        save_all(manager, (1, 2))
        (root / "step-00000002" / "manifest.json").unlink()
        assert manager.restore().step == 1
    assert "step-00000002, whose manifest is gone" in caplog.text


def test_checkpoints_that_are_no_steps_are_not_begun_beside(root):
    ringstow.save(state(1), root / "final")
    with CheckpointManager(root) as manager:
        with pytest.raises(ringstow.InvalidStateError, match="final is a checkpoint, but nothing"):
            manager.restore()
        with pytest.raises(ringstow.InvalidStateError, match="final is a checkpoint, but nothing"):
            manager.latest()


def test_retention_that_fails_is_logged_and_tried_again(root, monkeypatch, caplog):
    real, fails = _after_save.cleared, [True, True, False]

    def clear(*given):
        if not fails.pop(0):
            return real(*given)
        root.rename(f"{root}-away")
        root.write_bytes(b"a file in its place")
        try:
            return real(*given)
        finally:
            root.unlink()
            pathlib.Path(f"{root}-away").rename(root)

    monkeypatch.setattr(_after_save, "cleared", clear)
    with CheckpointManager(root, keep=1) as manager:
        manager.save(1, state(1))
        assert isinstance(manager.retention_error, NotADirectoryError)
        assert manager.retention_report is None
        with pytest.raises(NotADirectoryError):
            manager.raise_failures()
        manager.save_async(2, state(2)).result()
        manager.wait()
        assert numbers(root) == [1, 2]
        manager.save_async(3, state(3))
        manager.wait()
        assert manager.retention_error is None
        assert len(manager.retention_report.removed) == 2
    manager.raise_failures()
    assert numbers(root) == [3]
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(said) == 2
    assert all("step is saved" in text and "The next save tries again" in text for text in said)


def test_what_the_system_refused_to_remove_is_logged(root, monkeypatch, caplog):
    manifest = root / "step-00000001/manifest.json"
    real = _after_save.cleared

    def clear(*given):
        (root / "step-00000001/manifest.json.retired/in the way").mkdir(parents=True)
        return real(*given)

    with CheckpointManager(root, keep=1) as manager:
        manager.save(1, state(1))
        monkeypatch.setattr(_after_save, "cleared", clear)
        manager.save(2, state(2))
        assert manifest.exists()
        assert [left.path for left in manager.retention_report.left if left.failed]
    with pytest.raises(ringstow.Error, match="not removed: .*step-00000001"):
        manager.raise_failures()
    assert any("was not removed: " in r.getMessage() for r in caplog.records)


def test_pickles_and_settings_are_those_of_the_manager(root):
    config = ringstow.Config(pool_bytes=8 << 20)
    with CheckpointManager(root, allow_pickle=True, config=config) as manager:
        report = manager.save(1, {**state(1), "odd": re.compile("a+")})
        assert report.pool_bytes == 8 << 20
        assert manager.restore().state["odd"] == re.compile("a+")
    with CheckpointManager(root) as manager, pytest.raises(ringstow.UnsupportedError):
        manager.restore()


def several(step):
    return {"step": step, "w": [torch.full((1000,), float(step + i)) for i in range(9)]}


def test_striped_steps_are_saved_kept_and_restored(root, tmp_path):
    disks = [tmp_path / "a", tmp_path / "b"]
    for disk in disks:
        disk.mkdir()
    config = ringstow.Config(stripe=disks)
    with CheckpointManager(root, keep=1, config=config) as manager:
        for step in (1, 2, 3):
            manager.save_async(step, several(step))
        assert manager.restore().state["step"] == 3
        assert [os.listdir(disk) for disk in disks] == [["step-00000003"]] * 2
    with CheckpointManager(root, config=config) as manager:
        manager.save(3, several(33))
        manager.save(4, several(4))
        assert manager.restore(3).state["step"] == 33
        shutil.move(disks[0] / "step-00000004", tmp_path / "unmounted")
        with pytest.raises(ringstow.MissingFilesError):  # an older one would cost progress
            manager.restore(on_corrupt="previous")


# Damage.


def damage(root, *steps):
    for step in steps:
        (shard,) = shards_of(root / f"step-{step:08}")
        flip(shard, shard.stat().st_size - 1)


@pytest.fixture
def run(root):
    with CheckpointManager(root) as manager:
        save_all(manager, [1, 2, 3])
    return root


def test_damage_is_raised_with_the_way_out(run):
    damage(run, 3)
    with CheckpointManager(run) as manager:
        with pytest.raises(ringstow.CorruptCheckpointError) as caught:
            manager.restore()
        assert 'on_corrupt="previous"' in caught.value.__notes__[0]
        with pytest.raises(ringstow.CorruptCheckpointError):
            manager.restore(3)


@pytest.mark.parametrize("into", [None, "into"])
def test_previous_is_the_newest_earlier_step_that_is_intact(run, into, caplog):
    damage(run, 2, 3)
    with CheckpointManager(run) as manager:
        restored = manager.restore(into=into and state(0), on_corrupt="previous")
    assert restored.step == restored.state["step"] == 1
    assert torch.equal(restored.state["w"], state(1)["w"])
    said = [r.getMessage() for r in caplog.records if "passing over" in r.getMessage()]
    assert len(said) == 2
    assert all(f"step-0000000{step}, " in text for step, text in zip((3, 2), said, strict=True))


def test_if_none_is_intact_the_newest_ones_error_is_raised(run):
    damage(run, 1, 2, 3)
    manager = CheckpointManager(run)
    with pytest.raises(ringstow.CorruptCheckpointError, match="step-00000003"):
        manager.restore(on_corrupt="previous")


@pytest.mark.parametrize("how", ["manifest", "cut"])
def test_a_damaged_manifest_and_a_cut_file_are_damage(run, how):
    if how == "manifest":
        manifest = run / "step-00000003/manifest.json"
        flip(manifest, manifest.stat().st_size // 2)
    else:
        (shard,) = shards_of(run / "step-00000003")
        os.truncate(shard, shard.stat().st_size - 10)
    with CheckpointManager(run) as manager:
        with pytest.raises((ringstow.CorruptCheckpointError, ringstow.FormatError)):
            manager.restore()
        assert manager.restore(on_corrupt="previous").step == 2
        assert manager.latest().step == 2


def test_restore_that_is_not_strict_says_what_it_has_not_filled(root, caplog):
    with CheckpointManager(root) as manager:
        manager.save(1, {"model": {"body": torch.ones(3), "head": torch.ones(2)}})
        state = {"model": {"body": torch.zeros(3), "classifier": torch.zeros(2)}}
        restored = manager.restore(into=state, strict=False)
    assert (restored.missing, restored.unexpected) == (("model.classifier",), ("model.head",))
    assert "not in the checkpoint, left as it was (1): model.classifier" in caplog.text
    assert "only in the checkpoint, not loaded (1): model.head" in caplog.text


def test_bad_sectors_are_damage_and_a_refusal_is_not(run, monkeypatch):
    from ringstow._manager import _one_process

    real, numbers = _one_process.loaded, iter([5, 13])

    def load(path, **options):
        if path.endswith("3"):
            number = next(numbers)
            raise OSError(number, os.strerror(number), path)
        return real(path, **options)

    monkeypatch.setattr(_one_process, "loaded", load)
    with CheckpointManager(run) as manager:
        assert manager.restore(on_corrupt="previous").step == 2
        with pytest.raises(PermissionError):
            manager.restore(on_corrupt="previous")


def test_missing_files_are_no_damage(run):
    (shard,) = shards_of(run / "step-00000003")
    shard.unlink()
    with CheckpointManager(run) as manager:
        for on_corrupt in ("raise", "previous"):
            with pytest.raises(ringstow.MissingFilesError):
                manager.restore(on_corrupt=on_corrupt)
        assert manager.latest().step == 2
        assert manager.restore(2).step == 2


def test_another_step_is_never_loaded_in_place_of_a_named_one(run):
    with CheckpointManager(run) as manager:
        with pytest.raises(ValueError, match="step 3 was named"):
            manager.restore(3, on_corrupt="previous")
        with pytest.raises(ValueError, match="on_corrupt"):
            manager.restore(on_corrupt="skip")


def test_a_damaged_step_is_replaced_by_the_next_save_of_it(run):
    damage(run, 3)
    with CheckpointManager(run, keep=2) as manager:
        assert manager.restore(on_corrupt="previous").step == 2
        manager.save(3, state(3))
        assert manager.restore().state["step"] == 3
    assert numbers(run) == [2, 3]


def test_the_manager_imports_no_torch(root):
    code = (
        "import ringstow, sys; m = ringstow.CheckpointManager(sys.argv[1], keep=1)\n"
        "m.save_async(1, {'a': 1}); m.save(2, {'a': 2}); m.close()\n"
        "assert m.retention_report.removed and 'torch' not in sys.modules, sys.modules['torch']"
    )
    subprocess.run([sys.executable, "-c", code, str(root)], check=True)
