"""One process with Accelerate saves by ringstow, and resumes as if nothing had happened."""

import os
import pathlib
import pickle
from unittest.mock import Mock

import accelerate
import accelerate_runs as runs
import pytest
import torch
from accelerate_runs import (
    EVERY,
    STEPS,
    Training,
    accelerator,
    alone,
    at,
    checkpoints,
    fit,
    fit_stock,
)
from support import assert_same

import ringstow
from ringstow.integrations import _rename_when_complete
from ringstow.integrations._accelerate import _places
from ringstow.integrations.accelerate import RingstowAccelerator

LAST = STEPS // EVERY - 1


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return the end of a run with the stock Accelerator."""
    return fit_stock(tmp_path_factory.mktemp("stock")).end()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the directory of a run with ours; tests do not change it."""
    root = tmp_path_factory.mktemp("ours")
    fit(root)
    return root


@pytest.fixture(autouse=True)
def _fresh():
    yield
    runs.reset()


def test_a_run_ends_as_one_of_the_stock_accelerator(finished, tmp_path, unbroken):
    assert_same(fit(tmp_path).end(), unbroken)
    assert checkpoints(finished) == [f"checkpoint_{n}" for n in range(LAST + 1)]
    assert all(ringstow.verify(at(finished, n)).ok for n in range(LAST + 1))
    assert ringstow.latest(os.path.join(finished, "checkpoints")).path == at(finished)


@pytest.mark.parametrize("number", range(LAST))
def test_a_run_resumes_to_the_bit_from_each_checkpoint(finished, tmp_path, unbroken, number):
    training = Training(accelerator(tmp_path))
    training.accelerator.load_state(at(finished, number))
    training.run()
    assert_same(training.end(), unbroken)


def test_a_run_resumes_from_what_the_stock_accelerator_left(tmp_path, unbroken):
    fit_stock(tmp_path, steps=2 * EVERY)
    assert_same(fit(tmp_path).end(), unbroken)
    assert ringstow.verify(at(tmp_path, 2)).ok  # with the next number


def test_what_killed_runs_left_is_passed_over(tmp_path, caplog):
    fit_stock(tmp_path, steps=2 * EVERY)
    os.truncate(os.path.join(at(tmp_path, 1), "custom_checkpoint_0.pkl"), 100)
    os.makedirs(os.path.join(tmp_path, "checkpoints", ".ringstow-checkpoint_7"))
    one = Training(accelerator(tmp_path)).accelerator
    assert one.latest_checkpoint() == at(tmp_path, 0)
    assert "checkpoint_1" in caplog.text
    one.load_state()
    assert one.save_iteration == 2  # above all that are there
    assert one.save_state() == pathlib.Path(at(tmp_path, 2))
    one.wait_for_checkpoint()
    assert checkpoints(tmp_path) == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]


def test_no_checkpoint_is_none_and_an_error_of_load_state(tmp_path):
    one = accelerator(tmp_path)
    assert one.latest_checkpoint() is None
    with pytest.raises(FileNotFoundError, match="No complete checkpoint"):
        one.load_state()
    with pytest.raises(ValueError, match="does not exist"):
        one.load_state(str(tmp_path / "none"))
    (tmp_path / "checkpoints" / "checkpoint_0").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="This is no checkpoint"):
        one.load_state(tmp_path)  # the project's directory


def test_a_number_that_is_taken_is_refused_until_load_state(finished):
    one = Training(accelerator(finished)).accelerator
    with pytest.raises(ValueError, match="call load_state"):
        one.save_state()
    one.load_state()
    assert one.save_iteration == LAST + 1
    assert not [name for name in checkpoints(finished) if name.startswith(".")]


def test_a_run_that_begins_anew_mixes_with_no_older_one(tmp_path):
    fit(tmp_path, limit=2)
    kept = checkpoints(tmp_path)
    one = Training(accelerator(tmp_path, limit=2)).accelerator
    with pytest.raises(ValueError, match="call load_state"):
        one.save_state()  # checkpoint_0 is free, and load_state() would return the older run
    assert checkpoints(tmp_path) == kept


def test_older_checkpoints_go_only_once_the_newer_one_is_complete(tmp_path, monkeypatch):
    removed = []
    remove = _rename_when_complete.remove

    def seen(path, limit):
        removed.append((os.path.basename(path), checkpoints(tmp_path)))
        remove(path, limit)

    monkeypatch.setattr(_rename_when_complete, "remove", seen)
    fit(tmp_path, limit=2)
    assert removed == [
        ("checkpoint_0", ["checkpoint_0", "checkpoint_1", "checkpoint_2"]),
        ("checkpoint_1", ["checkpoint_1", "checkpoint_2", "checkpoint_3"]),
    ]
    assert checkpoints(tmp_path) == ["checkpoint_2", "checkpoint_3"]


def test_a_link_over_the_limit_goes_and_what_it_leads_to_stays(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "checkpoint_0").symlink_to(elsewhere)
    one = Training(accelerator(tmp_path, limit=1)).accelerator
    one.project_configuration.iteration = 1
    one.save_state()
    one.wait_for_checkpoint()
    assert checkpoints(tmp_path) == ["checkpoint_1"]
    assert elsewhere.exists()


def test_older_checkpoints_that_cannot_be_listed_fail_no_save(tmp_path, monkeypatch, caplog):
    refuses = Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr(_places, "stale", refuses)
    one = Training(accelerator(tmp_path, limit=1)).accelerator
    one.save_state()
    one.wait_for_checkpoint()
    assert "over total_limit could not be listed" in caplog.text


@pytest.mark.parametrize("call", ["save_state", "wait_for_checkpoint", "end_training"])
def test_the_next_call_raises_a_failure_once(tmp_path, monkeypatch, call):
    one = Training(accelerator(tmp_path)).accelerator
    one.save_state()
    one.wait_for_checkpoint()

    fails = Mock(side_effect=OSError(28, "No space left on device"))
    with monkeypatch.context() as patched:
        patched.setattr(_rename_when_complete, "sync", fails)
        one.save_state()
        with pytest.raises(OSError, match="No space left"):
            getattr(one, call)()
    assert checkpoints(tmp_path) == ["checkpoint_0"]
    one.wait_for_checkpoint()
    one.save_state()
    one.wait_for_checkpoint()
    assert ringstow.verify(at(tmp_path, 2)).ok


def test_output_dir_beside_automatic_naming_has_no_effect_but_a_warning(tmp_path, caplog):
    one = Training(accelerator(tmp_path)).accelerator
    assert one.save_state(tmp_path / "other") == pathlib.Path(at(tmp_path, 0))
    assert "output_dir=" in caplog.text
    one.wait_for_checkpoint()
    assert os.listdir(tmp_path) == ["checkpoints"]


def test_an_accelerator_can_be_pickled_for_a_worker_and_saves_there(tmp_path):
    one = alone(tmp_path, background=False).accelerator
    one.save_state(tmp_path / "state")
    copy = pickle.loads(pickle.dumps(RingstowAccelerator(cpu=True, background=False)))
    assert ringstow.verify(copy.save_state(tmp_path / "other")).ok


def test_with_background_false_the_directory_is_there(tmp_path):
    one = Training(accelerator(tmp_path, background=False)).accelerator
    assert ringstow.verify(one.save_state()).ok


def test_the_values_of_the_call_are_saved(tmp_path):
    training = Training(accelerator(tmp_path))
    training.step(torch.randn(2, runs.WIDTH))
    before = training.end()
    training.accelerator.save_state()
    training.step(torch.randn(2, runs.WIDTH))
    training.accelerator.wait_for_checkpoint()
    assert_same(dict(before["model"]), dict(ringstow.load(at(tmp_path, 0))["model"]))


def test_weights_that_change_during_a_save_fail_it(held, tmp_path):
    training = Training(accelerator(tmp_path))

    class Slow(runs.Progress):
        def state_dict(self):
            return held.state({})

    training.accelerator.register_for_checkpointing(Slow())
    training.accelerator.save_state()
    with torch.no_grad():
        training.bare()[0].weight.add_(1)
    held.release()
    with pytest.raises(ringstow.TornSaveError, match=r"0\.weight") as raised:
        training.accelerator.wait_for_checkpoint()
    assert 'RingstowAccelerator(staging="wait")' in raised.value.__notes__[-1]


# Directories that the caller names.


def test_a_named_directory_is_replaced_as_a_whole(tmp_path):
    training = alone(tmp_path)
    path = tmp_path / "state"
    path.mkdir()
    for _ in range(2):
        training.step(torch.randn(2, runs.WIDTH))
        assert training.accelerator.save_state(str(path)) == path
    training.accelerator.wait_for_checkpoint()
    assert os.listdir(tmp_path) == ["state"]
    assert_same(dict(ringstow.load(path)["model"]), dict(training.bare().state_dict()))


def test_a_named_directory_of_the_stock_accelerator_is_replaced(tmp_path):
    path = str(tmp_path / "state")
    Training(accelerator(tmp_path / "other", kind=accelerate.Accelerator))
    stock = accelerate.Accelerator(cpu=True)
    stock.save_state(path)
    one = alone(tmp_path, background=False).accelerator
    one.save_state(path)
    assert not os.path.exists(os.path.join(path, "random_states_0.pkl"))
    assert ringstow.verify(path).ok


def test_other_files_are_never_removed(tmp_path, monkeypatch):
    one = alone(tmp_path).accelerator
    path = tmp_path / "state"
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    with pytest.raises(ringstow.InvalidStateError, match=r"notes\.txt"):
        one.save_state(path)
    (path / "notes.txt").unlink()
    take = _rename_when_complete.take_name

    def late(part, final, may_replace):
        (path / "late.txt").write_text("mine")
        take(part, final, may_replace)

    monkeypatch.setattr(_rename_when_complete, "take_name", late)
    one.save_state(path)
    with pytest.raises(ringstow.InvalidStateError, match=r"late\.txt"):
        one.wait_for_checkpoint()
    assert os.listdir(path) == ["late.txt"]


@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_link_or_a_file_is_not_replaced(tmp_path, kind):
    one = alone(tmp_path).accelerator
    path = tmp_path / "state"
    path.symlink_to(tmp_path) if kind == "link" else path.write_text("mine")
    with pytest.raises(ringstow.InvalidStateError, match="link or a file"):
        one.save_state(path)
    with pytest.raises(ringstow.InvalidStateError, match="needs output_dir"):
        one.save_state()


def test_a_checkpoint_that_was_about_to_be_replaced_loads(tmp_path):
    training = alone(tmp_path, background=False)
    path = training.accelerator.save_state(tmp_path / "state")
    training.progress.epoch = 9
    path.rename(_rename_when_complete.replaced(str(path)))
    training.accelerator.load_state(path)
    assert training.progress.epoch == 0
    training.accelerator.save_state(path)
    assert os.listdir(tmp_path) == ["state"]
