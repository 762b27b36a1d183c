"""What an Accelerator's checkpoints hold, and what is refused, in one process."""

import enum
import inspect
import os
import pathlib
from unittest.mock import Mock

import accelerate
import accelerate_runs as runs
import pytest
import torch
from accelerate.data_loader import get_sampler
from accelerate_runs import EVERY, Training, accelerator, alone, at, checkpoints, fit
from all_trainers import run_page
from support import assert_same, flip

import ringstow
from ringstow.integrations import accelerate as integration
from ringstow.integrations._accelerate import _whole
from ringstow.integrations.accelerate import RingstowAccelerator


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


# What is saved.


def test_hooks_write_files_and_take_weights_away(tmp_path):
    one = alone(tmp_path).accelerator
    seen = []

    def save(models, weights, folder):
        assert list(weights[0]) == list(models[0].state_dict())
        ringstow.save({"own": weights.pop()}, os.path.join(folder, "own"))
        pathlib.Path(folder, "model.safetensors").write_bytes(b"")  # as save_pretrained does

    def load(models, folder):
        state = ringstow.load(os.path.join(folder, "own"))["own"]
        models.pop().load_state_dict(state)
        seen.append(folder)

    one.register_save_state_pre_hook(save)
    one.register_load_state_pre_hook(load)
    path = str(one.save_state(tmp_path / "state"))
    one.load_state(path)
    assert seen == [path]
    assert "model" not in ringstow.load(path)
    assert os.path.exists(os.path.join(path, "model.safetensors"))
    one.save_state(path)  # replaces it with the hook's files
    one.wait_for_checkpoint()


def test_a_hook_that_fails_or_takes_a_name_leaves_nothing(tmp_path):
    one = alone(tmp_path).accelerator
    taken = one.register_save_state_pre_hook(
        lambda models, weights, folder: pathlib.Path(folder, "manifest.json").touch()
    )
    with pytest.raises(ringstow.InvalidStateError, match=r"manifest\.json"):
        one.save_state(tmp_path / "state")
    taken.remove()
    one.register_save_state_pre_hook(lambda models, weights, folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        one.save_state(tmp_path / "state")
    assert not os.listdir(tmp_path)


def test_ctrl_c_in_a_save_leaves_what_was_committed(tmp_path):
    one = alone(tmp_path).accelerator
    one.save_state(tmp_path / "state")
    one.register_save_state_pre_hook(Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        one.save_state(tmp_path / "state")
    assert os.listdir(tmp_path) == ["state"]
    assert ringstow.verify(tmp_path / "state").ok


def test_a_registered_object_with_large_tensors_is_copied_in_the_call(tmp_path, monkeypatch):
    staged = []
    save = _whole.save_async

    def seen(*args, **options):
        staged.append(options["staging"])
        return save(*args, **options)

    monkeypatch.setattr(_whole, "save_async", seen)
    one, large = alone(tmp_path).accelerator, runs.Average()
    one.register_for_checkpointing(large)
    path = one.save_state(tmp_path / "state")
    large.average.add_(1)
    one.load_state(path)
    assert staged == ["wait"]
    assert not large.average.any()


def test_a_dataloader_comes_back_with_its_epoch_and_seed(tmp_path):
    training = alone(tmp_path)
    training.loader.set_epoch(3)
    get_sampler(training.loader).initial_seed = 77
    order = torch.cat(list(training.loader))
    training.loader.set_epoch(3)
    path = training.accelerator.save_state(tmp_path / "state")
    training.accelerator.wait_for_checkpoint()
    other = alone(tmp_path)
    assert not torch.equal(torch.cat(list(other.loader)), order)
    other.accelerator.load_state(path)
    assert torch.equal(torch.cat(list(other.loader)), order)


def test_torch_s_versions_of_modules_come_back(finished, tmp_path):
    saved = ringstow.load(at(finished), prefix="model")["model"]
    assert saved._metadata == runs.model().state_dict()._metadata


def test_values_that_need_a_pickle_are_refused_by_name(tmp_path):
    odd = runs.Odd()
    one = alone(tmp_path).accelerator
    one.register_for_checkpointing(odd)
    with pytest.raises(ringstow.InvalidStateError, match="odd") as raised:
        one.save_state(tmp_path / "state")
    assert "RingstowAccelerator(allow_pickle=True)" in raised.value.__notes__[-1]
    one = alone(tmp_path, allow_pickle=True).accelerator
    one.register_for_checkpointing(odd)
    path = one.save_state(tmp_path / "state")
    one.load_state(path)
    assert odd.odd is runs.Odd


class Loss(enum.Enum):
    MSE = "mse"


class Mode:
    """Keeps an Enum, whose members refer back to their class."""

    def __init__(self, mode=None):
        self.mode = mode

    def state_dict(self):
        return {"mode": self.mode}

    def load_state_dict(self, state):
        self.mode = state["mode"]


def test_a_registered_object_with_an_enum_comes_back(tmp_path):
    one, mode = alone(tmp_path).accelerator, Mode(Loss.MSE)
    one.register_for_checkpointing(mode)
    path = one.save_state(tmp_path / "state")
    mode.mode = None
    one.load_state(path)
    assert mode.mode is Loss.MSE


def test_a_checkpoint_that_lacks_something_changes_nothing(finished, tmp_path):
    training = Training(accelerator(tmp_path))
    training.accelerator.register_for_checkpointing(runs.Progress())
    before = training.end()
    with pytest.raises(ringstow.InvalidStateError, match="1 registered objects, and 2 are here"):
        training.accelerator.load_state(at(finished))
    assert_same(training.end(), before)


def test_a_model_alone_takes_the_weights(finished, tmp_path, caplog):
    one = accelerator(tmp_path)
    model = one.prepare(torch.nn.Sequential(*runs.model()))
    one.register_for_checkpointing(runs.Progress())
    one.load_state(at(finished))
    assert_same(dict(model.state_dict()), dict(ringstow.load(at(finished))["model"]))
    assert "1 optimizers" in caplog.text


def test_several_models_optimizers_and_a_gradient_scaler_come_back(tmp_path):
    def make(seed):
        runs.reset()
        torch.manual_seed(seed)
        one = RingstowAccelerator(cpu=True)
        one.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**seed)
        models = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)]
        optimizers = [torch.optim.Adam(each.parameters()) for each in models]
        prepared = one.prepare(*models, *optimizers)
        for model, optimizer in zip(prepared[:2], prepared[2:], strict=True):
            one.backward(model(torch.ones(3)).sum())
            optimizer.step()
        one.step = seed
        return one, prepared

    def states(one, prepared):
        return [each.state_dict() for each in prepared], one.scaler.state_dict(), one.step

    one, prepared = make(3)
    path = one.save_state(tmp_path / "state")
    saved = states(one, prepared)
    one.wait_for_checkpoint()
    other, also = make(4)
    other.load_state(path)
    assert_same(states(other, also), saved)
    assert set(ringstow.load(path)) == {
        "model",
        "model_1",
        "optimizer",
        "optimizer_1",
        "accelerator",
    }


def test_weights_that_do_not_fit_are_refused_unless_strict_is_false(finished, tmp_path):
    one = accelerator(tmp_path)
    model = one.prepare(torch.nn.Sequential(*runs.model(), torch.nn.Linear(1, 1)))
    one.register_for_checkpointing(runs.Progress())
    with pytest.raises(RuntimeError, match=r"5\.weight"):
        one.load_state(at(finished))
    one.load_state(at(finished), strict=False)
    saved = ringstow.load(at(finished))["model"]
    assert_same({name: model.state_dict()[name] for name in saved}, dict(saved))
    with pytest.raises(TypeError, match="assign"):
        one.load_state(at(finished), assign=True)


def test_slim_drops_the_optimizer_and_the_weights_load(tmp_path):
    training = fit(tmp_path, steps=EVERY)
    ringstow.slim(at(tmp_path, 0), drop=["optimizer"])
    weights = ringstow.load(at(tmp_path, 0), prefix="model")["model"]
    assert_same(dict(weights), dict(training.bare().state_dict()))
    with pytest.raises(ringstow.KeyMismatchError, match="slim"):
        training.accelerator.load_state()


def test_a_damaged_checkpoint_is_refused_and_changes_nothing(tmp_path):
    training = fit(tmp_path, steps=EVERY)
    before = training.end()
    flip(pathlib.Path(at(tmp_path, 0)) / "rank00000-0.safetensors", 5000)
    with pytest.raises(ringstow.CorruptCheckpointError, match=r"rank00000-0\.safetensors"):
        training.accelerator.load_state()
    assert_same(training.end(), before)


def test_other_checkpoints_of_ringstow_are_refused(tmp_path):
    one = alone(tmp_path).accelerator
    ringstow.save({"a": torch.ones(1)}, tmp_path / "other")
    with pytest.raises(ringstow.InvalidStateError, match="not saved by RingstowAccelerator"):
        one.load_state(tmp_path / "other")


# What is refused.


def test_arguments_that_would_be_ignored_are_refused(tmp_path):
    one = alone(tmp_path).accelerator
    with pytest.raises(ringstow.UnsupportedError, match="safe_serialization=False"):
        one.save_state(tmp_path / "state", safe_serialization=False)
    with pytest.raises(TypeError, match="tag"):
        one.save_state(tmp_path / "state", tag=1)
    with pytest.raises(ringstow.InvalidStateError, match="unguarded"):
        RingstowAccelerator(staging="unguarded")
    with pytest.raises(ringstow.InvalidStateError, match="cannot be striped"):
        RingstowAccelerator(config=ringstow.Config(stripe=[tmp_path]))
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("kind", "message"),
    [("DEEPSPEED", "use Accelerator"), ("MEGATRON_LM", "use Accelerator"), ("FSDP", "FSDP1")],
)
def test_what_is_not_supported_is_refused_before_training(kind, message):
    runs.reset()
    one = RingstowAccelerator(cpu=True)
    one.state.distributed_type = accelerate.DistributedType(kind)
    one.state.fsdp_plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=1)
    with pytest.raises(ringstow.UnsupportedError, match=message):
        one.prepare(torch.nn.Linear(1, 1))


def test_whole_fsdp_files_and_saves_on_each_node_are_refused(tmp_path):
    plugin = {"state_dict_type": "FULL_STATE_DICT"}
    one = accelerator(tmp_path, fsdp=True, plugin=plugin)
    one.project_configuration.save_on_each_node = True
    with pytest.raises(ringstow.UnsupportedError) as raised:
        one.prepare(torch.nn.Linear(1, 1))
    assert "SHARDED_STATE_DICT" in str(raised.value)
    assert "all nodes share" in str(raised.value)


@pytest.mark.parametrize("name", integration._SEAM.calls[accelerate.Accelerator])
def test_an_accelerator_without_one_of_the_methods_is_refused(name):
    Changed = type("Changed", (accelerate.Accelerator,), {name: lambda self, other: None})
    calls = {Changed: integration._SEAM.calls[accelerate.Accelerator]}
    with pytest.raises(ringstow.UnsupportedError, match=f"its Changed.{name} is not"):
        integration._SEAM._replace(calls=calls).check()


def test_an_accelerator_without_one_of_the_attributes_is_refused(monkeypatch):
    monkeypatch.setattr(integration, "_ATTRIBUTES", ("_models", "_gone"))
    runs.reset()
    with pytest.raises(ringstow.UnsupportedError, match="no _gone"):
        RingstowAccelerator(cpu=True)


def test_no_argument_of_ours_is_one_of_the_accelerators():
    ours = set(inspect.signature(RingstowAccelerator).parameters) - {"args", "kwargs"}
    assert ours == {"background", "config", "staging", "allow_pickle", "when"}
    assert not ours & set(inspect.signature(accelerate.Accelerator).parameters)


def test_the_snippets_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for _ in range(2):  # the second run finds that there is nothing to do
        runs.reset()
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters())
        loader = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2)
        names = {"model": model, "optimizer": optimizer, "loader": loader}
        run_page("huggingface.md", "Accelerate", **names)
        assert checkpoints("run") == ["checkpoint_1", "checkpoint_2", "checkpoint_3"]
