"""`retain` and `prune` remove old checkpoints, and new saves write over recycled files."""

import json
import os
import pathlib

import numpy as np
import pytest
from support import assert_same

import ringstow


def state(step, size=50_000):
    return {"step": step, "w": np.full(size, step, dtype=np.float32)}


def save(root, step, **kwargs):
    return ringstow.save(state(step), root / f"step-{step:03}", **kwargs)


def test_retain_keeps_the_newest_and_recycles_the_rest(tmp_path):
    leave_half(tmp_path / "step-000")
    for step in range(1, 5):
        save(tmp_path, step)
    done = ringstow.retain(tmp_path, 2, recycle=True)
    first, second, third, fourth = (str(tmp_path / f"step-{step:03}") for step in range(1, 5))
    assert (done.removed, done.kept) == ((first, second), (third, fourth))
    assert (done.cleared, done.left) == ((str(tmp_path / "step-000"),), ())
    report = save(tmp_path, 5)
    assert report.recycled_bytes == report.file_bytes
    assert_same(ringstow.load(tmp_path / "step-005"), state(5))
    assert_same(ringstow.load(ringstow.latest(tmp_path)), state(5))


def leave_half(path):
    """Leave the files of a save that was killed before its commit."""
    path.mkdir()
    (path / "rank00000-0.safetensors.part").write_text("half")


def test_prune_removes_killed_saves_anywhere(tmp_path):
    save(tmp_path, 1)
    leave_half(tmp_path / "step-002")
    leave_half(tmp_path / "last")
    (tmp_path / "last" / "notes.txt").write_text("mine")
    half = tmp_path / "step-001" / "rank00000-0.g1.safetensors.part"
    half.write_text("half")
    planned = ringstow.prune(tmp_path, dry_run=True)
    assert half.exists()
    done = ringstow.prune(tmp_path)
    assert planned == done
    assert isinstance(done, ringstow.Swept)
    part = "rank00000-0.safetensors.part"
    gone = (tmp_path / "last" / part, half, tmp_path / "step-002" / part, tmp_path / "step-002")
    assert done == ringstow.Swept(removed=tuple(map(str, gone)), renamed=(), kept=(), left=())
    assert sorted(os.listdir(tmp_path)) == ["last", "step-001"]
    assert_same(ringstow.load(tmp_path / "step-001"), state(1))
    leave_half(tmp_path / "step-003")
    assert len(ringstow.prune(tmp_path, no_other_writers=True).removed) == 2
    with pytest.raises(FileNotFoundError):
        ringstow.prune(tmp_path / "nowhere")


def test_prune_reports_what_it_kept(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "step-001" / "manifest.json").write_text("rubbish")
    [left] = ringstow.prune(tmp_path).left
    assert (left.path, left.failed) == (str(tmp_path / "step-001"), False)
    assert "cannot tell which" in left.reason


def test_invalid_arguments_are_refused(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(ringstow.InvalidStateError, match="keep = 0: must be 1 or more"):
        ringstow.retain(tmp_path, 0)
    with pytest.raises(ValueError, match="-1"):
        ringstow.retain(tmp_path, -1)
    with pytest.raises(ringstow.IncompleteCheckpointError):
        ringstow.remove(tmp_path)
    with pytest.raises(FileNotFoundError):
        ringstow.retain(tmp_path / "nowhere", 1)
    (tmp_path / "latest").symlink_to("step-001")
    with pytest.raises(ringstow.InvalidStateError, match=r"latest is a link to .*step-001"):
        ringstow.remove(tmp_path / "latest")
    assert_same(ringstow.load(tmp_path / "latest"), state(1))
    (tmp_path / "step-001" / "manifest.json").write_text("rubbish")
    with pytest.raises(ringstow.CorruptCheckpointError):
        ringstow.remove(tmp_path / "step-001")
    left = ringstow.retain(tmp_path, 1).left
    assert [pathlib.Path(one.path).name for one in left] == ["latest", "step-001"]


def test_left_says_whether_the_system_failed_or_it_was_left_on_purpose(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    done = ringstow.remove(tmp_path / "step-003")
    assert (done.path, done.recycled, done.left) == (str(tmp_path / "step-003"), 0, ())
    assert any(path.endswith(".safetensors") for path in done.removed), done
    (tmp_path / "best").symlink_to("step-001")
    [best, protected] = ringstow.retain(tmp_path, 1).left
    assert isinstance(best, ringstow.Left)
    assert (best.path, best.failed) == (str(tmp_path / "best"), False)
    assert (protected.path, protected.failed) == (str(tmp_path / "step-001"), False)
    native = {"path": "a", "recycled": 0, "removed": []}
    native["left"] = [{"path": "a", "reason": "b", "failed": True}]
    expected = (ringstow.Left(path="a", reason="b", failed=True),)
    assert ringstow.Removed.from_json(json.dumps(native)).left == expected


def noted(root, *losses):
    for step, loss in enumerate(losses):
        metrics = {} if loss is None else {"loss": loss}
        ringstow.save({}, root / f"step-{step:03}", step=step, metrics=metrics)


def test_every_and_best_with_their_reasons(tmp_path):
    noted(tmp_path, 0.9, 0.2, None, 0.1, float("nan"), 0.2, 0.5)
    keep = ringstow.Retention(every=4, best=("loss", "min", 2))
    plan = ringstow.retain(tmp_path, keep, dry_run=True)
    done = ringstow.retain(tmp_path, keep=keep)
    assert plan == done
    kept = [pathlib.Path(path).name for path in done.kept]
    assert dict(zip(kept, done.reasons, strict=True)) == {
        "step-000": "its number is a multiple of 4",
        "step-003": "its loss of 0.1 is among the 2 lowest",
        "step-004": "its number is a multiple of 4",
        "step-005": "its loss of 0.2 is among the 2 lowest",
        "step-006": "it is the newest",
    }
    assert sorted(os.listdir(tmp_path)) == kept


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        (ringstow.Retention(), "which steps to keep"),
        (ringstow.Retention(last=1, slim_after=1), "Retention.slim_after is for a Checkpoint"),
    ],
)
def test_rules_that_retain_cannot_follow_are_refused(tmp_path, keep, said):
    noted(tmp_path, 0.9, 0.2)
    with pytest.raises(ringstow.InvalidStateError, match=said):
        ringstow.retain(tmp_path, keep)
    assert len(ringstow.steps(tmp_path)) == 2
