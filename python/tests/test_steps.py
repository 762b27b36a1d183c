"""Which checkpoints count as steps, for `steps`, `latest` and `retain`."""

import logging
import os
import pathlib
import re
import time
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from support import flip

import ringstow


def save(root, *names, **kwargs):
    """Save checkpoints with these names in this order."""
    for name in names:
        ringstow.save({"name": name, "w": np.zeros(9)}, root / name, **kwargs)
        # Commit times have milliseconds, and these tests depend on their order.
        before = time.time_ns() // 1_000_000
        while time.time_ns() // 1_000_000 == before:
            pass


def names(paths):
    return [pathlib.Path(path).name for path in paths]


def newest(root, **kwargs):
    found = ringstow.latest(root, **kwargs)
    return found and pathlib.Path(found).name


def retain_as_planned(root, keep, **kwargs):
    before = sorted(os.listdir(root))
    plan = ringstow.retain(root, keep, dry_run=True, **kwargs)
    assert sorted(os.listdir(root)) == before, "a dry run changes nothing"
    done = ringstow.retain(root, keep, **kwargs)
    assert plan == done
    return done


def left(done):
    return {pathlib.Path(one.path).name: one.reason for one in done.left}


def warnings_in(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_report_lists_steps_and_reasons_for_the_rest(tmp_path, caplog):
    save(tmp_path, "gpt2", "v1.5", "best", "step-1", "step-2", "step-3")
    (tmp_path / "good").symlink_to("step-1")
    done = retain_as_planned(tmp_path, 1)
    assert done.counted == "step-*"
    assert (names(done.kept), names(done.removed)) == (["step-3"], ["step-2"])
    reasons = left(done)
    assert sorted(reasons) == ["best", "good", "gpt2", "step-1", "v1.5"]
    assert re.search("the link .*good leads to it", reasons["step-1"])
    assert "the steps here are step-*" in reasons["gpt2"]
    assert "does not end in a number" in reasons["best"]
    assert done.warnings == ()
    assert not caplog.records


def test_ambiguous_or_missing_steps_are_warned_of(tmp_path, caplog):
    save(tmp_path, "a.bak", "b.bak")
    [warning] = retain_as_planned(tmp_path, 1).warnings
    assert "none of the 2 checkpoints" in warning
    assert "step=1000" in warning
    assert [record.getMessage() for record in caplog.records] == [warning] * 2
    assert {record.name.partition(".")[0] for record in caplog.records} == {"ringstow"}
    save(tmp_path, "step-1", "step-2", "step-3", "epoch-1", "epoch-2")
    [warning] = retain_as_planned(tmp_path, 1).warnings
    assert "several kinds of names" in warning
    assert 'pattern="step-*"' in warning
    assert newest(tmp_path) == "epoch-2"
    assert newest(tmp_path, pattern="step-*") == "step-3"
    assert names(retain_as_planned(tmp_path, 1, pattern="step-*").removed) == ["step-1", "step-2"]


def test_step_is_kept_whatever_the_name(tmp_path):
    save(tmp_path, "gpt2", "step-8", "step-9")
    save(tmp_path, "epoch=1-loss=0.25", step=100)
    save(tmp_path, "final", step=200)
    ringstow.save_async({}, tmp_path / "epoch=10-loss=0.2", step=np.int64(1000)).result()
    assert [found.step for found in ringstow.steps(tmp_path)] == [100, 200, 1000]
    with ringstow.open(tmp_path / "final") as checkpoint:
        assert checkpoint.info.step == 200
    assert newest(tmp_path) == "epoch=10-loss=0.2"
    done = retain_as_planned(tmp_path, 1)
    assert names(done.removed) == ["epoch=1-loss=0.25", "final"]
    assert sorted(left(done)) == ["gpt2", "step-8", "step-9"]


@pytest.mark.parametrize(
    ("step", "error"), [(True, TypeError), (1.5, TypeError), ("7", TypeError), (-1, ValueError)]
)
@pytest.mark.parametrize("save", [ringstow.save, ringstow.save_async])
def test_bad_step_number_is_refused_before_the_save(tmp_path, save, step, error):
    with pytest.raises(error, match="step is"):
        save({}, tmp_path / "c", step=step)
    assert not (tmp_path / "c").exists()


def test_steps_lists_a_run_with_what_cannot_be_loaded(tmp_path, caplog):
    save(tmp_path, "step-10", "step-9", "step-100", "best")
    (tmp_path / "step-100" / "manifest.json").write_text("rubbish")
    (tmp_path / "step-200").mkdir()
    (tmp_path / "step-200" / "rank00000-0.safetensors.part").write_text("half")
    found = ringstow.steps(tmp_path)
    statuses = {9: "committed", 10: "committed", 100: "damaged", 200: "incomplete"}
    assert [(one.step, one.status) for one in found] == list(statuses.items())
    first, damaged = found[0], found[2]
    assert isinstance(first, ringstow.Step)
    assert first.path == str(tmp_path / "step-9")
    assert abs(datetime.now(UTC) - first.created) < timedelta(hours=1)
    assert first.nbytes > 72
    assert first.problem is None
    assert damaged.created is None
    assert "manifest.json" in damaged.problem
    assert newest(tmp_path) == "step-10"
    (said,) = warnings_in(caplog)  # a killed save is none
    assert str(tmp_path / "step-100") in said


def test_commit_time_decides_without_steps(tmp_path):
    save(tmp_path, "final", "best")
    found = ringstow.steps(tmp_path)
    assert [(one.step, *names([one.path])) for one in found] == [(None, "final"), (None, "best")]
    assert newest(tmp_path) == "best"
    assert newest(tmp_path, before=tmp_path / "best") == "final"
    with pytest.raises(ringstow.InvalidStateError, match="nothing in .* counts as a step"):
        ringstow.latest(tmp_path, before=7)


def test_resume_from_before_a_damaged_step(tmp_path, caplog):
    save(tmp_path, "step-1", "step-2", "step-3", "step-4")
    for step in ("step-4", "step-3"):
        flip(next((tmp_path / step).glob("*.safetensors")), 4100)
    path = ringstow.latest(tmp_path)
    assert names([path]) == ["step-4"]
    with pytest.raises(ringstow.CorruptCheckpointError, match=r"latest\(dir, verify=True\)"):
        ringstow.load(path)
    assert newest(tmp_path, verify=True) == "step-2"
    assert len(warnings_in(caplog)) == 2
    assert "step-4, it is damaged" in warnings_in(caplog)[0]
    assert newest(tmp_path, before=path) == "step-3"
    assert newest(tmp_path, before=path, verify=True) == "step-2"
    assert newest(tmp_path, before=2) == "step-1"
    assert newest(tmp_path, before=1) is None


def test_newest_step_without_its_manifest_is_warned_of_once(tmp_path, caplog):
    save(tmp_path, "step-1", "step-2", "step-3")
    (tmp_path / "step-3" / "manifest.json").unlink()
    # What a killed save leaves is no loss.
    (tmp_path / "step-4").mkdir()
    (tmp_path / "step-4" / "rank00000-0.safetensors.part").write_bytes(b"half")
    assert newest(tmp_path) == newest(tmp_path) == "step-2"
    (said,) = warnings_in(caplog)
    assert "step-3, whose manifest is gone" in said


def test_checkpoints_further_down_are_pointed_to(tmp_path, caplog):
    save(tmp_path, "step-1/actor", "step-1/critic")
    assert ringstow.latest(tmp_path) is None
    (said,) = warnings_in(caplog)
    assert str(tmp_path / "step-1" / "actor") in said
    assert str(tmp_path / "step-1") + " to look there" in said
    caplog.clear()
    assert ringstow.latest(tmp_path / "step-1") is not None
    save(tmp_path, "step-2")
    assert newest(tmp_path) == "step-2"
    assert warnings_in(caplog) == []


def test_invalid_before_is_refused(tmp_path):
    save(tmp_path, "step-1")
    with pytest.raises(ringstow.InvalidStateError, match="step-9 is none of the 1 steps"):
        ringstow.latest(tmp_path, before=tmp_path / "step-9")
    with pytest.raises(ValueError, match="before is"):
        ringstow.latest(tmp_path, before=-1)
    with pytest.raises(TypeError, match="before is"):
        ringstow.latest(tmp_path, before=1.5)
    for call in (ringstow.steps, ringstow.latest, lambda *a, **k: ringstow.retain(*a, 1, **k)):
        with pytest.raises(ringstow.InvalidStateError, match=r"put `{step}` where the step is"):
            call(tmp_path, pattern="epoch=*-loss=*")


def test_new_run_has_no_steps(tmp_path):
    run = tmp_path / "run"
    assert ringstow.latest(run) is None
    assert ringstow.steps(run) == []
    calls = (ringstow.load, ringstow.verify, ringstow.open)
    for call in (*calls, lambda path: ringstow.load_into({}, path)):
        with pytest.raises(ringstow.IncompleteCheckpointError, match="no checkpoint"):
            call(ringstow.latest(run))
    with pytest.raises(TypeError):
        ringstow.save({}, None)


def test_removal_recycles_files_only_on_request(tmp_path):
    save(tmp_path, "step-1", "step-2", "step-3", "step-4", "step-5")
    ringstow.retain(tmp_path, 4)
    ringstow.remove(tmp_path / "step-2")
    assert not (tmp_path / ".ringstow-spares").exists()
    ringstow.remove(tmp_path / "step-3", config=ringstow.Config(recycle=True))
    assert os.listdir(tmp_path / ".ringstow-spares") == ["rank00000-0.spare"]
    # prune knows them.
    assert ringstow.prune(tmp_path).removed == ()
    gone = ringstow.prune(tmp_path, recycled=True).removed
    spares = tmp_path / ".ringstow-spares"
    assert gone == (str(spares / "rank00000-0.spare"), str(spares))
    ringstow.retain(tmp_path, 1, config=ringstow.Config(recycle=True))
    assert (tmp_path / ".ringstow-spares").exists()
    ringstow.retain(tmp_path, 1, recycle=False, config=ringstow.Config(recycle=True))
    assert os.listdir(tmp_path) == ["step-5"]
    ringstow.remove(tmp_path / "step-5", recycle=False)
    assert os.listdir(tmp_path) == []
