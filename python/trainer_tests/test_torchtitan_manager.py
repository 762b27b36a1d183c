"""The values, the end of a run and the settings of torchtitan's manager by ringstow."""

from __future__ import annotations

import io
import json
import os
import resource
import sys
import threading
from unittest.mock import Mock

import children
import pytest
from all_trainers import run_page
from torchtitan_processes import results

import ringstow

pytestmark = pytest.mark.timeout(300)


# Values.


def test_states_of_a_users_own_come_back(tmp_path):
    for is_saved in (False, True):
        results(2, with_own_state, tmp_path, is_saved)


class Own:
    """A state with what DCP gives its own treatment."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, state):
        self.value = state


def with_own_state(rank, ranks, root, is_saved):
    import torchtitan_runs

    value = {"bytes": io.BytesIO(b"seven"), "text": "seven", "numbers": [7, 7.0], "none": None}
    own = Own(dict.fromkeys(value) if is_saved else value)
    run = torchtitan_runs.trainer(root, torchtitan_runs.settings(), steps=2)
    run.checkpointer.states["own"] = own
    run.train()
    run.close()
    assert own.value.pop("bytes").getvalue() == b"seven"
    assert own.value == {"text": "seven", "numbers": [7, 7.0], "none": None}


@pytest.mark.parametrize(
    ("when", "loads"), [("state_dict", False), ("state_dict", True), ("load_state_dict", True)]
)
def test_a_state_that_fails_on_one_rank_fails_on_all(when, loads, tmp_path):
    if loads:
        results(2, with_own_state, tmp_path, False)
    results(2, with_failing_state, tmp_path, when)


def with_failing_state(rank, ranks, root, when):
    import torchtitan_runs

    own = Own(dict.fromkeys(("bytes", "text", "numbers", "none")))
    if rank == 1:
        setattr(own, when, Mock(side_effect=KeyError("no such state")))
    run = torchtitan_runs.trainer(root, torchtitan_runs.settings(), steps=3)
    run.checkpointer.states["own"] = own
    with pytest.raises(KeyError if rank == 1 else ringstow.Error, match="no such state"):
        run.train()
    run.close()


def test_a_value_that_cannot_be_saved_is_refused_on_all_ranks_by_name(tmp_path):
    for allow_pickle in (False, True):
        results(2, saving_a_function, tmp_path, allow_pickle)


def saving_a_function(rank, ranks, root, allow_pickle):
    import torchtitan_runs

    chosen = torchtitan_runs.settings(allow_pickle=allow_pickle)
    run = torchtitan_runs.trainer(root, chosen, steps=2)
    run.checkpointer.states["own"] = Own({"function": saving_a_function})
    if allow_pickle:
        run.train()
    else:
        with pytest.raises(Exception, match=r"own\['function'\]"):
            run.train()
    run.close()


# The end.


def test_close_awaits_the_save_in_flight(tmp_path):
    results(1, closing, tmp_path)


def closing(rank, ranks, root):
    import torchtitan_runs

    from ringstow.distributed._save import _Save

    run = torchtitan_runs.trainer(root, torchtitan_runs.settings(last_save_model_only=True))
    is_closing = threading.Event()
    write = _Save._write_share

    def write_share(self, state):
        assert is_closing.wait(300)
        return write(self, state)

    _Save._write_share = write_share
    assert run.checkpointer.save(1)
    assert run.checkpointer.save_future is not None
    assert not os.path.exists(f"{root}/checkpoint/step-1/manifest.json")
    children.before(run.checkpointer._flight, "end", is_closing.set)
    run.close()
    assert os.path.exists(f"{root}/checkpoint/step-1/manifest.json")
    assert run.checkpointer.save_future is None
    run.close()
    with pytest.raises(ringstow.InvalidStateError, match="is closed"):
        run.checkpointer.save(2)


def test_close_raises_a_failure_unless_another_error_ends_the_run(tmp_path):
    for is_ending in (False, True):
        results(1, closing_a_failed_save, tmp_path, is_ending)


def closing_a_failed_save(rank, ranks, root, is_ending):
    import torchtitan_runs

    run = torchtitan_runs.trainer(root, torchtitan_runs.settings())
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, resource.RLIM_INFINITY))
    run.checkpointer.save(1)
    if not is_ending:
        with pytest.raises(OSError, match="File too large"):
            run.close()
        return
    try:
        raise KeyError("training")
    except KeyError:
        run.close()


# Settings and the seam.


def test_settings_that_cannot_be_honoured_are_refused_with_a_remedy(tmp_path):
    results(1, refusing, tmp_path)


def refusing(rank, ranks, root):
    import torchtitan_runs

    for text, options in {
        "folder=gs://b/run: .* Mount it": {"folder": "gs://b/run"},
        "initial_load_path=s3://b: .* Mount it": {"initial_load_path": "s3://b"},
        "last_save_in_hf=True, and .*: leave it out": {
            "last_save_in_hf": True,
            "last_save_model_only": True,
        },
        "initial_load_in_hf=True, and .*: leave it out": {"initial_load_in_hf": True},
    }.items():
        chosen = torchtitan_runs.config(root, torchtitan_runs.settings(**options))
        chosen.model_spec.state_dict_adapter = None
        with pytest.raises((ringstow.UnsupportedError, ringstow.InvalidStateError), match=text):
            chosen.build()
    run = torchtitan_runs.trainer(root, torchtitan_runs.settings(exclude_from_loading=["typo"]))
    with pytest.raises(ringstow.InvalidStateError, match="names typo; the states are train_state"):
        run.train()
    with pytest.raises(ValueError, match="async_mode='later'"):
        torchtitan_runs.settings(async_mode="later")


def test_the_configuration_is_parsed_from_the_command_line(tmp_path):
    results(1, parsing, tmp_path)


def parsing(rank, ranks, root):
    import types

    import torchtitan_runs
    from torchtitan.config import ConfigManager

    pool = ringstow.Config(pool_bytes="64M")
    start = torchtitan_runs.config(root, torchtitan_runs.settings(ringstow_config=pool))
    module = types.ModuleType("own.config_registry")
    module.run = lambda: start
    sys.modules |= {"own": types.ModuleType("own"), "own.config_registry": module}
    arguments = "--module own --config run --checkpoint.interval 7 --checkpoint.async_mode disabled"
    parsed = ConfigManager().parse_args(arguments.split()).checkpoint
    assert (parsed.interval, parsed.async_mode, parsed.ringstow_config) == (7, "disabled", pool)
    assert type(parsed) is type(start.checkpoint)
    json.dumps(parsed.to_dict())  # as `debug.print_config` does


def test_the_seam_is_the_one_that_the_manager_fills(tmp_path):
    results(1, the_seam)


def the_seam(rank, ranks):
    import dataclasses
    import inspect

    from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager

    from ringstow.integrations._torchtitan import _seam

    _seam.check(BaseCheckpointManager, CheckpointManager)  # fails when hooks or settings are gone
    public = {name for name in vars(BaseCheckpointManager) if not name.startswith("_")}
    calls = "Config close load maybe_wait_for_saving maybe_wait_for_staging save"
    assert public == set(calls.split())
    for name, parameters in {
        "_save": ["self", "curr_step", "last_step"],
        "_load": ["self", "step"],
        "_close": ["self"],
        "_maybe_wait_for_staging": ["self"],
        "_wait_for_saving": ["self"],
    }.items():
        assert [*inspect.signature(getattr(BaseCheckpointManager, name)).parameters] == parameters
    export = inspect.signature(CheckpointManager.dcp_save).parameters
    assert [*export][:4] == ["self", "state_dict", "checkpoint_id", "async_mode"]
    assert "to_hf" in export

    @dataclasses.dataclass
    class Config:
        enable: bool = False

    class Other(BaseCheckpointManager):
        pass

    Other.__abstractmethods__ = frozenset({"_save", "_stage"})
    with pytest.raises(
        ringstow.UnsupportedError, match=r"methods: _close, .*_stage.*docs/trainers"
    ):
        _seam.check(Other, CheckpointManager)
    Other.Config = Config
    with pytest.raises(ringstow.UnsupportedError, match=r"Config has no folder"):
        _seam.check(Other, CheckpointManager)


def test_the_snippet_of_the_page_runs(tmp_path):
    results(1, running_the_snippet, tmp_path)


def running_the_snippet(rank, ranks, root):
    import torchtitan_runs

    chosen = run_page("large-scale.md", "torchtitan")["llama3_with_ringstow"]().checkpoint
    run = torchtitan_runs.trainer(root, chosen)
    assert type(run.checkpointer) is torchtitan_runs.CheckpointManager
    run.train()
    run.close()
    assert os.listdir(f"{root}/checkpoint") == ["step-4"]
