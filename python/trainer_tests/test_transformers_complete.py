"""When a Trainer's checkpoint is complete: what is called then, and what waits for it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from unittest.mock import Mock

import children
import pytest
import transformers
import transformers_processes as processes
from support import assert_same
from transformers.trainer_utils import get_last_checkpoint
from transformers_runs import (
    BEST,
    EVERY,
    FIRST_IS_BEST,
    STEPS,
    RingstowTrainer,
    checkpoints,
    fit,
    state,
    trainer,
)

import ringstow
from ringstow.integrations import _rename_when_complete
from ringstow.integrations._kit._in_flight import InFlight
from ringstow.integrations._transformers import _refusals

NAMES = [f"checkpoint-{step}" for step in range(EVERY, STEPS + 1, EVERY)]


class Noting(RingstowTrainer):
    """Notes what `on_checkpoint_complete` finds."""

    def on_checkpoint_complete(self, path):
        assert ringstow.verify(path).ok
        assert transformers.AutoModelForCausalLM.from_pretrained(path)
        self.noted = [*getattr(self, "noted", []), (path, threading.current_thread())]
        self.beside = os.listdir(os.path.dirname(path))


def test_it_is_called_for_each_complete_checkpoint_in_a_thread_of_its_own(tmp_path):
    run = fit(tmp_path, kind=Noting, save_total_limit=1)
    assert [path for path, _ in run.noted] == [str(tmp_path / name) for name in NAMES]
    assert all(thread is not threading.main_thread() for _, thread in run.noted)
    assert run.beside == [NAMES[-1]]  # those over the limit are gone by then


def test_training_goes_on_meanwhile_and_the_next_save_waits(tmp_path):
    has_trained, ended = threading.Event(), []

    class Waits(RingstowTrainer):
        def on_checkpoint_complete(self, path):
            if path.endswith(NAMES[0]):
                assert has_trained.wait(300)
            ended.append(path)

    class Trains(transformers.TrainerCallback):
        def on_step_begin(self, args, one, control, **_):
            if one.global_step == EVERY + 1:
                assert not ended
                has_trained.set()
            if one.global_step == 2 * EVERY:
                assert ended

    run = fit(tmp_path, kind=Waits, callbacks=[Trains()])
    assert run.state.global_step == STEPS
    assert len(ended) == len(NAMES)


def test_a_function_can_be_assigned(tmp_path):
    paths = []
    run = trainer(tmp_path)
    run.on_checkpoint_complete = paths.append
    run.train()
    assert paths == [str(tmp_path / name) for name in NAMES]


def test_its_failure_ends_the_run_and_the_checkpoint_stays(tmp_path):
    class Fails(RingstowTrainer):
        def on_checkpoint_complete(self, path):
            raise ConnectionError("no bucket")

    with pytest.raises(ConnectionError, match="no bucket") as caught:
        fit(tmp_path, kind=Fails)
    assert f"{tmp_path / NAMES[0]} is complete" in caught.value.__notes__[0]
    assert checkpoints(tmp_path) == NAMES[:1]
    assert ringstow.verify(tmp_path / NAMES[0]).ok


def test_it_is_not_called_for_a_save_that_failed(tmp_path, monkeypatch):
    fails = Mock(side_effect=OSError(5, "Input/output error"))
    monkeypatch.setattr(_rename_when_complete, "take_name", fails)
    paths = []
    run = trainer(tmp_path)
    run.on_checkpoint_complete = paths.append
    with pytest.raises(OSError, match="Input/output"):
        run.train()
    assert not paths


def paths_noted(rank, ranks, root):
    run = trainer(root)
    paths = []
    run.on_checkpoint_complete = paths.append
    run.train()
    return paths


def test_of_two_ranks_the_first_calls_it(tmp_path):
    paths = [str(tmp_path / name) for name in NAMES]
    assert children.results(2, paths_noted, str(tmp_path)) == [paths, []]


class Reads(transformers.TrainerCallback):
    """Reads each checkpoint when it is saved, as callbacks that upload it do."""

    def __init__(self):
        self.found = []

    def on_save(self, args, one, control, **_):
        path = os.path.join(args.output_dir, f"checkpoint-{one.global_step}")
        self.found.append(os.path.isdir(path) and ringstow.verify(path).ok)


def test_a_callback_with_on_save_reads_a_complete_checkpoint(tmp_path, caplog):
    reads = Reads()
    fit(tmp_path, callbacks=[reads])
    assert reads.found == [True] * len(NAMES)
    said = [one for one in caplog.messages if "Reads.on_save may use the checkpoint" in one]
    assert len(said) == 1


def test_transformers_own_callbacks_are_waited_for_only_if_they_upload_checkpoints():
    from transformers.integrations import integration_utils

    kinds = [one for one in vars(integration_utils).values() if isinstance(one, type)]
    stock = transformers.TrainerCallback
    kinds = [one for one in kinds if "on_save" in vars(one) and one is not stock]
    assert {one.__name__ for one in kinds} == set(_refusals._IDLE)
    kinds.append(integration_utils.DagsHubCallback)  # it has MLflow's
    for kind in kinds:
        one = object.__new__(kind)  # without the package that it logs to
        one.__dict__.update(_log_model=None, _log_artifacts=False, _log_checkpoints=None)
        one.__dict__.update(sync_checkpoints=False, _should_upload_checkpoint=False)
        assert not _refusals._may_read(one), kind
    wandb = object.__new__(integration_utils.WandbCallback)
    assert _refusals._may_read(wandb)  # its setting cannot be found
    for setting, uploads in (("false", False), ("end", False), ("checkpoint", True)):
        wandb._log_model = integration_utils.WandbLogModel(setting)
        assert _refusals._may_read(wandb) == uploads


def test_a_method_around_the_save_adds_to_a_complete_checkpoint(tmp_path):
    class Adds(RingstowTrainer):
        def _save_checkpoint(self, model, trial):
            super()._save_checkpoint(model, trial)
            path = os.path.join(self.args.output_dir, f"checkpoint-{self.state.global_step}")
            os.makedirs(path, exist_ok=True)
            with open(os.path.join(path, "mine.json"), "w") as stream:
                json.dump(self.state.global_step, stream)

    fit(tmp_path, kind=Adds)
    for name in NAMES:
        assert (tmp_path / name / "mine.json").exists()
        assert ringstow.verify(tmp_path / name).ok


def test_a_run_that_says_so_does_not_wait_for_on_save(tmp_path, monkeypatch):
    was_called = threading.Event()
    take = _rename_when_complete.take_name

    def waits(*args):
        assert was_called.wait(300)
        return take(*args)

    class Called(transformers.TrainerCallback):
        def on_save(self, *_, **__):
            was_called.set()

    class InTheBackground(RingstowTrainer):
        ringstow_background = True

    monkeypatch.setattr(_rename_when_complete, "take_name", waits)
    fit(tmp_path, kind=InTheBackground, callbacks=[Called()])
    assert checkpoints(tmp_path) == NAMES


def test_the_last_checkpoint_is_there_at_the_end_of_training(tmp_path, monkeypatch):
    is_waited_for = threading.Event()
    end, take = InFlight.end, _rename_when_complete.take_name

    def noting(saves):
        if run.state.global_step == STEPS:
            is_waited_for.set()
        return end(saves)

    def waits(part, *args):
        if part.endswith(NAMES[-1]):
            assert is_waited_for.wait(300)
        return take(part, *args)

    class Ends(transformers.TrainerCallback):
        def on_train_end(self, args, one, control, **_):
            self.found = checkpoints(tmp_path)

    monkeypatch.setattr(InFlight, "end", noting)
    monkeypatch.setattr(_rename_when_complete, "take_name", waits)
    # The last is the best, and still being saved.
    run = trainer(tmp_path, callbacks=[ends := Ends()], **{**BEST, "save_total_limit": 1})
    run.train()
    assert ends.found == NAMES[-1:]


@pytest.mark.parametrize("loads", [True, False])
def test_a_kill_in_the_last_clean_up_leaves_no_half_checkpoint(tmp_path, loads):
    root, options = str(tmp_path), {**FIRST_IS_BEST, "load_best_model_at_end": loads}
    # The third removal is the one after the last save: only the best stays.
    codes = children.exit_codes(0, processes.run, root, options, "removing", 3)
    assert codes == [-signal.SIGKILL]
    newest = get_last_checkpoint(root)
    assert os.path.exists(os.path.join(newest, "trainer_state.json"))
    assert ringstow.verify(newest).ok
    children.results(0, processes.run, root, options)
    assert checkpoints(root) == NAMES[:1]


def test_a_save_goes_on_where_the_program_was_when_it_began(tmp_path, monkeypatch):
    elsewhere, has_moved = tmp_path / "elsewhere", threading.Event()
    elsewhere.mkdir()
    complete = _rename_when_complete.complete

    def waits(*args):
        assert has_moved.wait(300)
        complete(*args)

    class Moves(transformers.TrainerCallback):
        def on_step_begin(self, args, one, control, **_):
            if one.global_step == EVERY:
                os.chdir(elsewhere)
                has_moved.set()

    monkeypatch.setattr(_rename_when_complete, "complete", waits)
    monkeypatch.chdir(tmp_path)
    run = trainer("run", callbacks=[Moves()], max_steps=2 * EVERY, save_steps=EVERY)
    run.train()
    assert checkpoints(tmp_path / "run") == NAMES[:1]
    assert checkpoints(elsewhere / "run") == NAMES[1:2]  # where the path leads by then


def test_a_killed_save_is_not_resumed_and_not_removed_by_that(tmp_path):
    fit(tmp_path, max_steps=2 * EVERY)
    hidden = (tmp_path / NAMES[1]).rename(tmp_path / f".ringstow-{NAMES[1]}")
    with pytest.raises(ringstow.InvalidStateError, match="resume_from_checkpoint=True finds"):
        fit(tmp_path, resume=str(hidden))
    assert hidden.exists()


def test_a_copy_of_a_checkpoint_under_a_name_of_yours_is_not_over_the_limit(tmp_path):
    fit(tmp_path, max_steps=EVERY)
    mine = [tmp_path / f"{NAMES[0]}-backup", tmp_path / "checkpoint-best"]
    for path in mine:
        shutil.copytree(tmp_path / NAMES[0], path)
    fit(tmp_path, save_total_limit=1)
    assert checkpoints(tmp_path) == sorted([NAMES[-1], *(path.name for path in mine)])


def test_shards_without_their_manifest_are_refused(tmp_path):
    fit(tmp_path, max_steps=EVERY)
    (tmp_path / NAMES[0] / "manifest.json").unlink()
    with pytest.raises(ringstow.IncompleteCheckpointError, match=r"no manifest\.json"):
        fit(tmp_path)


def test_a_slimmed_checkpoint_resumes_with_a_new_optimizer_and_says_so(tmp_path, caplog):
    fit(tmp_path)
    path = tmp_path / NAMES[1]
    ringstow.slim(path, drop=["__trainer__"])
    shutil.rmtree(tmp_path / NAMES[-1])
    run = fit(tmp_path, resume=str(path))
    assert run.state.global_step == STEPS
    assert "the optimizer and the learning rate start anew" in caplog.text


def test_the_end_of_a_run_is_the_same_with_either_background(tmp_path):
    class Awaited(RingstowTrainer):
        ringstow_background = False

    ends = [state(fit(tmp_path / kind.__name__, kind=kind)) for kind in (RingstowTrainer, Awaited)]
    assert_same(*ends)
