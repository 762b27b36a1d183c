"""Saves with a base: unchanged files are linked, and every checkpoint stays whole by itself."""

import logging
import pathlib
import shutil

import numpy as np
import pytest
import torch
from support import assert_same, flip

import ringstow
from ringstow import Base, CheckpointManager

FROZEN = 100_000  # bytes, more than all else in the state


def state(step):
    """Return a state of which one tensor changes, as under LoRA."""
    frozen = torch.arange(FROZEN // 4, dtype=torch.float32)
    return {
        "model": {
            "frozen": frozen,
            "tied": frozen,
            "turned": torch.arange(600, dtype=torch.int16).reshape(20, 30).T,
            "lora": torch.full((50, 3), float(step)),
        },
        "ids": np.arange(1000),
        "lr": 0.5,
        "step": step,
    }


def inodes(path):
    files = pathlib.Path(path).glob("*.safetensors")
    return {file.stat().st_ino for file in files}


def save_steps(root, steps, **options):
    """Save each step with the one before as its base; return the reports."""
    reports = []
    for step in steps:
        before = root / f"step-{step - 1}"
        base = before if step > steps[0] else Base()
        reports.append(ringstow.save(state(step), root / f"step-{step}", base=base, **options))
    return reports


def fallbacks(report):
    return [one.reason for one in report.fallbacks if one.kind == "base"]


def test_third_save_links_what_has_not_changed_and_logs_how_much(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="ringstow"):
        first, second, third = save_steps(tmp_path, [1, 2, 3])
    assert "113 kB linked" in caplog.text or "114 kB linked" in caplog.text, caplog.text
    assert (first.linked_bytes, first.unchanged_bytes) == (0, 0)
    assert (second.linked_bytes, second.unchanged_bytes) == (0, FROZEN + 1200 + 8000)
    assert third.linked_bytes > FROZEN
    assert third.written_bytes == 4096 + 600
    assert third.unchanged_bytes == second.unchanged_bytes
    assert third.seconds.compare > 0
    assert len(inodes(tmp_path / "step-2") & inodes(tmp_path / "step-3")) == 1
    assert fallbacks(first) + fallbacks(second) + fallbacks(third) == []
    for step in (1, 2, 3):
        assert_same(ringstow.load(tmp_path / f"step-{step}"), state(step))
        assert ringstow.verify(tmp_path / f"step-{step}").ok


def test_state_that_has_not_changed_is_linked_whole(tmp_path):
    ringstow.save(state(1), tmp_path / "a", base=Base())
    report = ringstow.save({**state(1), "step": 2}, tmp_path / "b", base=tmp_path / "a")
    assert (report.written_bytes, report.linked_bytes) == (0, report.file_bytes)
    assert report.gb_per_s == 0
    assert_same(ringstow.load(tmp_path / "b"), {**state(1), "step": 2})
    for path in ("a", "b"):
        assert ringstow.open(tmp_path / path).info.shared_bytes == report.file_bytes
    ringstow.remove(tmp_path / "a")
    assert ringstow.open(tmp_path / "b").info.shared_bytes == 0
    handle = ringstow.save_async(state(1), tmp_path / "c", base=tmp_path / "b")
    assert handle.wait_staged(60)
    assert handle.result().written_bytes == 0
    assert handle.progress().total == 0


def test_background_save_links_as_well(tmp_path):
    save_steps(tmp_path, [1, 2])
    for staging in ("guard", "snapshot", "wait", "unguarded"):
        path = tmp_path / staging
        done = ringstow.save_async(state(3), path, base=tmp_path / "step-2", staging=staging)
        assert done.result().linked_bytes > FROZEN
        assert_same(ringstow.load(path), state(3))


def test_base_that_is_not_there_is_an_error_unless_it_is_optional(tmp_path):
    missing = tmp_path / "step-9"
    with pytest.raises(OSError, match="base") as caught:
        ringstow.save(state(1), tmp_path / "step-1", base=missing)
    assert "step-9" in str(caught.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ringstow.NoCheckpointError):
        ringstow.save(state(1), tmp_path / "step-1", base=tmp_path / "empty")
    assert not (tmp_path / "step-1").exists()
    optional = Base(missing, optional=True)
    report = ringstow.save(state(1), tmp_path / "step-1", base=optional)
    assert ["step-9" in reason for reason in fallbacks(report)] == [True]
    assert_same(ringstow.load(tmp_path / "step-1"), state(1))


@pytest.mark.parametrize("base", [7, b"step", "", "s3://bucket/step-1"])
def test_base_that_is_no_path_is_refused(tmp_path, base):
    with pytest.raises((TypeError, ValueError, ringstow.InvalidStateError)):
        ringstow.save(state(1), tmp_path / "step-1", base=base)
    assert not (tmp_path / "step-1").exists()


def test_manager_links_the_step_before_also_after_a_restart(tmp_path):
    def saved(manager, steps):
        linked = []
        for step in steps:
            manager.save_async(step, state(step))
            manager.wait()
            assert_same(manager.restore().state, state(step))
            linked.append(len(inodes(tmp_path / f"step-{step:08}") & seen) > 0)
            seen.update(inodes(tmp_path / f"step-{step:08}"))
        return linked

    seen: set[int] = set()
    with CheckpointManager(tmp_path, base=ringstow.Previous(full_every=3)) as manager:
        assert saved(manager, range(1, 9)) == [False, False, True, False, True, True, False, True]
    with CheckpointManager(tmp_path, keep=1, base="previous") as manager:
        assert saved(manager, [9, 10]) == [True, True]
        assert [found.step for found in manager.steps()] == [10]


def test_manager_links_nothing_of_a_step_that_its_restore_has_passed_over(tmp_path):
    with CheckpointManager(tmp_path, base="previous") as manager:
        for step in (1, 2, 3):
            path = pathlib.Path(manager.save(step, state(step)).path)
        damaged = max(path.glob("*.safetensors"), key=lambda file: file.stat().st_size)
        # A file of its own, as if only this step's were damaged.
        shutil.copy(damaged, tmp_path / "copy")
        (tmp_path / "copy").rename(damaged)
        flip(damaged, -1)
        assert manager.restore(on_corrupt="previous").step == 2
        report = manager.save(4, state(4))
        assert ringstow.verify(report.path).ok
        assert not inodes(report.path) & inodes(path)


def test_manager_saves_even_if_the_step_before_is_gone_or_damaged(tmp_path):
    with CheckpointManager(tmp_path, base="previous") as manager:
        shutil.rmtree(manager.save(1, state(1)).path)
        report = manager.save(2, state(2))
        assert "step-00000001" in fallbacks(report)[0]
        flip(pathlib.Path(report.path) / "manifest.json", 40)
        report = manager.save(3, state(3))
        assert "step-00000002" in fallbacks(report)[0]
    with CheckpointManager(tmp_path, base="previous") as manager:
        flip(pathlib.Path(report.path) / "manifest.json", 40)
        manager.save(4, state(4))
        assert_same(manager.restore(4).state, state(4))
