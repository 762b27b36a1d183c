"""The plugin's seam, and its single saves."""

from __future__ import annotations

import os
import pickle

import pytest
import torch
from all_trainers import assert_same_parameters, run_page
from held_save import LARGE, ONE
from lightning.fabric import Fabric
from lightning_runs import Model, RingstowCheckpointIO, in_flight, model, saved, trainer
from support import assert_same

import ringstow
from ringstow._ranks import _concurrent_saves


def module_of(package, part, fabric=False):
    """Return a module of one of Lightning's two packages, and ringstow's plugins for it."""
    names = {"lightning": ("lightning.pytorch", "lightning.fabric")}
    theirs = names.get(package, (package, "lightning_fabric"))[fabric]
    ours = pytest.importorskip(f"ringstow.integrations.{package}")
    return pytest.importorskip(f"{theirs}.{part}"), ours.RingstowCheckpointIO


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_the_plugin_has_the_calls_of_the_framework_with_their_arguments(package):
    module, ours = module_of(package, "plugins", fabric=True)
    base = module.CheckpointIO
    assert issubclass(ours, base)
    assert base.__abstractmethods__ == {"save_checkpoint", "load_checkpoint", "remove_checkpoint"}
    calls = {name for name, it in vars(base).items() if callable(it) and name[0] != "_"}
    assert calls == base.__abstractmethods__ | {"teardown"}
    for name in calls:
        assert_same_parameters(getattr(ours, name), getattr(base, name))


def test_pytorch_lightning_saves_and_resumes(tmp_path):
    package = pytest.importorskip("pytorch_lightning")
    from pytorch_lightning.callbacks import ModelCheckpoint
    from pytorch_lightning.demos.boring_classes import BoringModel

    from ringstow.integrations.pytorch_lightning import RingstowCheckpointIO

    def fit(epochs):
        run = package.Trainer(
            plugins=[RingstowCheckpointIO()],
            callbacks=[ModelCheckpoint(dirpath=tmp_path, save_last=True)],
            max_epochs=epochs,
            limit_train_batches=2,
            limit_val_batches=1,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
        )
        run.fit(BoringModel(), ckpt_path="last" if epochs > 1 else None)
        return run.global_step

    assert [fit(1), fit(2)] == [2, 4]
    assert ringstow.load(tmp_path / "last.ckpt")["global_step"] == 4


def test_fabric_saves_and_loads(tmp_path):
    io = RingstowCheckpointIO(background=False)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[io])
    net = torch.nn.Linear(3, 3)
    fabric.save(tmp_path / "a.ckpt", {"model": net, "step": 4})
    other = torch.nn.Linear(3, 3)
    rest = fabric.load(tmp_path / "a.ckpt", {"model": other})
    assert rest == {"step": 4}
    assert torch.equal(other.weight, net.weight)


def test_the_plugin_can_be_sent_to_a_process_that_a_strategy_spawns(held, tmp_path):
    io = in_flight(held, tmp_path, allow_pickle=True)
    other = pickle.loads(pickle.dumps(io))
    other.save_checkpoint({"f": max}, tmp_path / "of-the-other-1.ckpt")
    other.teardown()
    assert ringstow.load(tmp_path / "of-the-other-1.ckpt", allow_pickle=True) == {"f": max}


def test_a_spawned_run_brings_its_weights_back(tmp_path):
    run = trainer(tmp_path, io=RingstowCheckpointIO(), epochs=1, strategy="ddp_spawn", devices=1)
    one = model()
    before = one.net[0].weight.detach().clone()
    run.fit(one)
    assert not torch.equal(one.net[0].weight, before)


def test_a_save_stores_the_values_of_the_call(held, tmp_path):
    saved(tmp_path / "old-1.ckpt")
    weight = torch.nn.Parameter(torch.ones(LARGE))
    optimizer = torch.optim.SGD([weight], lr=1)
    weight.grad = torch.ones(LARGE)
    io = RingstowCheckpointIO(config=ONE, staging="snapshot")
    io.save_checkpoint(held.state({"w": weight.detach()}), tmp_path / "new-2.ckpt")
    held.release()
    optimizer.step()
    io.teardown()
    assert torch.equal(ringstow.load(tmp_path / "new-2.ckpt")["w"], torch.ones(LARGE))


def test_a_save_waits_for_the_one_before_and_raises_its_failure(held, tmp_path):
    io = in_flight(held, tmp_path)
    io._flight.handle.cancel()
    held.release()
    with pytest.raises(ringstow.SaveCancelledError):
        io.save_checkpoint({"a": 1}, tmp_path / "next-3.ckpt")
    io.save_checkpoint({"a": 1}, tmp_path / "next-3.ckpt")
    io.teardown()
    assert sorted(os.listdir(tmp_path)) == ["next-3.ckpt", "old-1.ckpt"]


def test_a_rank_that_replaces_its_own_last_checkpoint_is_not_warned(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(_concurrent_saves, "ranks", lambda: (0, 2))  # those of DDP
    io = RingstowCheckpointIO()
    for number in range(3):
        io.save_checkpoint({"a": number}, tmp_path / "last.ckpt")
    io.teardown()
    assert ringstow.load(tmp_path / "last.ckpt") == {"a": 2}
    assert not caplog.records


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_async_checkpoint_io_around_the_plugin_is_refused(package, tmp_path):
    module, ours = module_of(package, "plugins.io")
    io = module.AsyncCheckpointIO(ours())

    def save():
        io.save_checkpoint({"a": torch.ones(3)}, tmp_path / "a.ckpt")
        io.teardown()  # raises it at the latest

    with pytest.raises(ringstow.InvalidStateError, match=r"the Trainer RingstowCheckpointIO\(\)"):
        save()
    assert not (tmp_path / "a.ckpt").exists()


@pytest.mark.parametrize(
    "path", ["first-1.ckpt", "x/last.ckpt", "x/last-v1.ckpt", "x/hpc_ckpt_3.ckpt", "x/stopped.ckpt"]
)
def test_a_save_that_lightning_looks_for_is_committed_when_the_call_returns(path, tmp_path):
    (tmp_path / "x").mkdir()
    saved(tmp_path / "x" / "old-1.ckpt")
    io = RingstowCheckpointIO()
    io.save_checkpoint({"a": 1}, tmp_path / path)
    assert io._flight.handle is None
    assert ringstow.load(tmp_path / path) == {"a": 1}
    io.save_checkpoint({"a": 2}, tmp_path / path)
    assert io._flight.handle is not None  # from then on in the background
    io.teardown()
    assert ringstow.load(tmp_path / path) == {"a": 2}


def test_storage_options_and_urls_are_refused(tmp_path):
    io = RingstowCheckpointIO()
    with pytest.raises(TypeError, match="storage_options={'acl': 'x'}"):
        io.save_checkpoint({}, tmp_path / "a.ckpt", {"acl": "x"})
    with pytest.raises(ringstow.InvalidStateError, match="s3://bucket/a.ckpt is a URL"):
        io.save_checkpoint({}, "s3://bucket/a.ckpt")
    run = trainer(tmp_path, io=io, epochs=1)
    run.fit(model())
    with pytest.raises(TypeError, match="storage_options"):
        run.save_checkpoint(tmp_path / "a.ckpt", storage_options={"acl": "x"})


def test_the_snippets_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_page(
        "lightning.md",
        edit=lambda code: "" if "Strategy" in code else code,  # that needs two ranks
        Model=Model,
    )
    assert names["trainer"].global_step == 6
    assert_same(names["model"].state_dict(), names["trainer"].lightning_module.state_dict())
