"""Sharded checkpoints: what Lightning's arguments do, loads, failures, removals."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import shutil

import children
import lightning_shards as shards
import pytest
import snippets
import torch
from all_trainers import PAGES, assert_same_parameters, assert_slims
from children import on_ranks, results
from lightning_runs import Model, RingstowCheckpointIO, lightning, trainer
from lightning_shards import EVERY, STEPS
from support import assert_same
from test_lightning_layouts import assert_close

import ringstow
from ringstow.integrations.lightning import (
    RingstowFSDPStrategy,
    RingstowModelParallelStrategy,
    load_from_checkpoint,
)

pytestmark = pytest.mark.timeout(300)

ALL = {"save_top_k": -1}
FIRST = f"epoch=0-step={EVERY}.ckpt"
TIERS = ringstow.Config(tiers=["/other"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a folder with a run of each kind, and what each has learned."""
    at = tmp_path_factory.mktemp("runs")
    kinds = ("mp", "stock-mp", "fsdp", "stock-fsdp")
    ends = {kind: results(2, shards.fit, kind, at / kind, None, None, ALL) for kind in kinds}
    return at, {kind: learned for kind, ((_, learned), _) in ends.items()}


@pytest.mark.parametrize("kind", ["mp", "fsdp"])
def test_a_run_keeps_the_same_checkpoints_and_learns_the_same_as_with_lightnings_strategy(
    kind, runs
):
    at, learned = runs
    assert_same(learned[kind], learned[f"stock-{kind}"])
    assert sorted(os.listdir(at / kind)) == sorted(os.listdir(at / f"stock-{kind}"))
    for name in os.listdir(at / kind):
        assert ringstow.verify(at / kind / name).ok
        meta = torch.load(at / f"stock-{kind}" / name / "meta.pt", weights_only=True)
        (own,) = ringstow.load(at / kind / name)["lightning"]
        for values in (meta, own):
            values["callbacks"] = str(values["callbacks"]).replace("stock-", "")
        assert_same(own, meta)


@pytest.mark.parametrize(
    ("kind", "saved", "ranks"),
    [
        ("mp", "stock-mp", 2),
        ("fsdp", "stock-fsdp", 2),
        ("mp", "mp", 1),
        ("fsdp", "fsdp", 1),
        ("mp", "fsdp", 2),
    ],
)
def test_a_run_resumes_from_any_sharded_checkpoint(kind, saved, ranks, runs, tmp_path):
    at, learned = runs
    path, expected = str(at / saved / FIRST), learned[kind]
    begun, resumed = results(ranks, shards.fit, kind, tmp_path, path)[0]
    assert begun == EVERY
    if ranks == 2 and kind == saved.removeprefix("stock-"):
        assert_same(resumed, expected)
    else:  # the sums of gradients are in another order
        assert_close(resumed["model"], expected["model"])
        assert resumed["step"] == STEPS


@pytest.mark.parametrize("kind", ["mp", "fsdp"])
def test_slim_drops_the_optimizer_of_all_ranks(kind, runs, tmp_path):
    assert_slims(runs[0] / kind / FIRST, tmp_path / "slim.ckpt", "optimizer_0")


@pytest.mark.parametrize("kind", ["mp", "fsdp"])
def test_checkpoints_of_stock_strategies_under_use_by_default_load(kind, tmp_path):
    root = tmp_path / "run"
    results(2, by_default, f"stock-{kind}", root)
    (path,) = root.iterdir()
    assert (path / "manifest.json").exists()
    assert results(2, shards.fit, kind, root, str(path))[0][0] == EVERY
    assert not path.exists() or (path / "meta.pt").exists()


def by_default(rank, ranks, kind, root):
    import ringstow.dcp

    with ringstow.dcp.use_by_default():
        shards.run(kind, ranks, root, steps=EVERY).fit(shards.model())


@pytest.mark.parametrize("kind", ["mp", "fsdp"])
def test_a_run_resumes_from_what_the_former_version_saved_by_dcps_planner(kind, runs, tmp_path):
    root = tmp_path / "run"
    results(2, formerly, kind, root)
    (path,) = root.iterdir()
    again = results(2, shards.fit, kind, tmp_path / "new", str(path))[0]
    assert_same(again, (EVERY, runs[1][kind]))


def formerly(rank, ranks, kind, root):
    from torch.distributed.checkpoint.state_dict_saver import save

    from ringstow.integrations._lightning import _ranks

    def save_by_dcp(self, state, path, step, apart):
        writer = ringstow.dcp.StorageWriter(droppable=apart)
        save(state, checkpoint_id=path, storage_writer=writer, process_group=self.group)

    _ranks.Ranks.save = save_by_dcp
    options = {"background": False}
    shards.run(kind, ranks, root, options=options, steps=EVERY).fit(shards.model())


def failing(rank, ranks, root, at_step, victim):
    """Train; on one rank no file may grow beyond a few pages from a step on."""

    class Full(lightning.Callback):
        def on_train_batch_start(self, run, module, batch, index):
            if run.global_step == at_step and rank == victim:
                run.strategy.wait()
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, resource.RLIM_INFINITY))

    error = OSError if rank == victim else ringstow.Error
    with pytest.raises(error, match="File too large"):
        shards.run("mp", ranks, root, Full(), steps=STEPS).fit(shards.model())


@pytest.mark.parametrize("at_step", [5, STEPS - 1])
def test_a_failed_save_ends_the_run_on_every_rank_and_keeps_the_older_checkpoint(at_step, tmp_path):
    root = tmp_path / "run"
    results(2, failing, root, at_step, 1)
    kept = ringstow.latest(root)
    assert ringstow.verify(kept).ok
    assert ringstow.load(kept)["lightning"][0]["global_step"] == at_step // EVERY * EVERY


@pytest.mark.parametrize("save_last", [True, "link"])
def test_last_is_a_checkpoint_that_fit_resumes_from(save_last, tmp_path):
    root, fit = tmp_path / "run", functools.partial(results, 2, shards.fit, "mp", tmp_path / "run")
    checkpoints = {"save_last": save_last}
    fit(None, None, checkpoints, 4)
    assert (root / "last.ckpt").is_symlink() == (save_last == "link")
    assert ringstow.load(root / "last.ckpt")["lightning"][0]["global_step"] == 4
    assert fit("last", None, checkpoints, 6)[0][0] == 4
    assert len(os.listdir(root)) == 2


def weights_only(rank, ranks, root):
    one = shards.run("mp", ranks, root, save_weights_only=True, steps=EVERY)
    one.fit(shards.model())
    path = ringstow.latest(root).path
    other = trainer(root, strategy=shards.strategy("mp", ranks), devices=ranks)
    other.test(Tested(), ckpt_path=path, verbose=False)
    with pytest.raises(ringstow.InvalidStateError, match="save_weights_only=True"):
        shards.run("mp", ranks, root, steps=4).fit(shards.model(), ckpt_path=path)


class Tested(shards.Sharded):
    def test_step(self, batch, index):
        (weight,) = self.trainer.strategy.model.net[1].weight.full_tensor()
        saved = ringstow.load(self.trainer.ckpt_path)["state_dict"]["net.1.weight"][0]
        assert torch.equal(weight, saved)

    def test_dataloader(self):
        return torch.utils.data.DataLoader(torch.arange(2))


def test_a_checkpoint_of_weights_is_tested_and_not_trained_further(tmp_path):
    results(2, weights_only, tmp_path)


@on_ranks(2)
def test_values_that_cannot_be_saved_are_refused_at_the_call_on_every_rank(rank, ranks, tmp_path):
    """Save what ringstow has no words for: refused on every rank, unless pickles are allowed."""

    def odd():
        one = shards.model()
        one.on_save_checkpoint = lambda checkpoint: checkpoint.update(odd=contextlib.suppress)
        return one

    with pytest.raises(ringstow.InvalidStateError, match="odd") as caught:
        shards.run("mp", ranks, tmp_path, steps=4).fit(odd())
    assert rank or "RingstowModelParallelStrategy(allow_pickle=True)" in caught.value.__notes__[0]
    allowed = {"allow_pickle": True}
    shards.run("mp", ranks, tmp_path, options=allowed, steps=4).fit(odd())
    path = ringstow.latest(tmp_path).path
    run = shards.run("mp", ranks, tmp_path, options=allowed, steps=4)
    load = run.strategy.load_checkpoint
    # Lightning (2.6.6) does not pass fit's weights_only to strategies that load after the setup.
    run.strategy.load_checkpoint = lambda path, weights_only: load(path, weights_only=True)
    with pytest.raises(ringstow.UnsupportedError):
        run.fit(odd(), ckpt_path=path)
    shards.run("mp", ranks, tmp_path, options=allowed, steps=6).fit(odd(), ckpt_path=path)


@on_ranks(2)
def test_large_tensors_of_callbacks_are_saved_as_at_the_call(ranks, tmp_path):
    """Change large tensors of a callback right after a save, and save once more after the run."""

    class Average(lightning.Callback):
        state_key = "average"
        mean = torch.zeros(1 << 16)

        def state_dict(self):
            return {"mean": self.mean}

        def on_train_batch_start(self, run, module, batch, index):
            self.mean += 1

    one = shards.run("mp", ranks, tmp_path, Average(), steps=6, **ALL)
    one.fit(shards.model())
    one.save_checkpoint(os.path.join(tmp_path, "final-6.ckpt"))
    assert ringstow.verify(os.path.join(tmp_path, "final-6.ckpt")).ok  # committed at once
    for step in (2, 4, 6):
        path = os.path.join(tmp_path, f"epoch=0-step={step}.ckpt")
        (meta,) = ringstow.load(path)["lightning"]
        assert set(meta["callbacks"]["average"]["mean"].tolist()) == {step}


@on_ranks(2)
def test_a_save_within_a_step_is_committed_when_it_returns(ranks, tmp_path):
    """Save within training_step, which Lightning runs in the optimizer's step."""

    class Saving(shards.Sharded):
        def training_step(self, batch, index):
            if self.global_step == 3:
                self.trainer.save_checkpoint(os.path.join(tmp_path, "within-3.ckpt"))
            return super().training_step(batch, index)

    lightning.seed_everything(1, verbose=False)
    shards.run("mp", ranks, tmp_path, steps=4).fit(Saving())
    assert (
        ringstow.load(os.path.join(tmp_path, "within-3.ckpt"))["lightning"][0]["global_step"] == 3
    )


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: RingstowFSDPStrategy(state_dict_type="full"), "state_dict_type='full' is not for"),
        (
            lambda: RingstowModelParallelStrategy(save_distributed_checkpoint=False),
            "save_distributed_checkpoint=False",
        ),
        (lambda: RingstowFSDPStrategy(staging="unguarded"), 'use "guard"'),
        (lambda: RingstowFSDPStrategy(config=TIERS), "tiers"),
        (lambda: RingstowCheckpointIO(config=TIERS), "tiers"),
        (
            lambda: setattr(RingstowFSDPStrategy(), "checkpoint_io", RingstowCheckpointIO()),
            "leave the plugin out",
        ),
        (
            lambda: RingstowFSDPStrategy(checkpoint_io=RingstowCheckpointIO()),
            "would not ask RingstowCheckpointIO",
        ),
        (
            lambda: RingstowFSDPStrategy().save_checkpoint(
                {}, "a.ckpt", storage_options={"a": "x"}
            ),
            "leave them out",
        ),
    ],
)
def test_arguments_that_cannot_be_honoured_are_refused(call, said):
    with pytest.raises((ringstow.InvalidStateError, TypeError), match=said):
        call()


def full(rank, ranks, root):
    options = {"save_distributed_checkpoint": False}
    run = shards.run("stock-mp", ranks, root, options=options, io=RingstowCheckpointIO())
    with pytest.raises(ringstow.InvalidStateError, match=r"use RingstowModelParallelStrategy\(\)"):
        run.fit(shards.model())


def test_the_plugin_refuses_strategies_that_load_files_only(tmp_path):
    codes = children.exit_codes(2, full, tmp_path / "run")
    assert codes[0] == 0  # the rank that saves
    assert codes[1] != 0
    assert not os.path.exists(tmp_path / "run" / FIRST)


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_both_packages_have_the_strategies_with_the_frameworks_calls(package):
    strategies = {"lightning": "lightning.pytorch"}.get(package, package) + ".strategies"
    theirs = pytest.importorskip(strategies)
    ours = pytest.importorskip(f"ringstow.integrations.{package}")
    for name in ("FSDPStrategy", "ModelParallelStrategy"):
        base, one = getattr(theirs, name), getattr(ours, f"Ringstow{name}")
        assert issubclass(one, base)
        one()  # with defaults that are not refused
        for call in ("save_checkpoint", "load_checkpoint", "remove_checkpoint", "teardown"):
            assert_same_parameters(getattr(one, call), getattr(base, call))


def test_a_model_is_made_of_a_sharded_checkpoint_or_one_of_the_plugins(runs, tmp_path):
    at, _ = runs
    path = ringstow.latest(at / "mp").path
    one = load_from_checkpoint(shards.Sharded, path, map_location="cpu")
    assert one.hparams.rate == 0.01
    assert_same(dict(one.state_dict()), dict(ringstow.load(path)["state_dict"]))
    ringstow.save({"state_dict": {}}, tmp_path / "plain")
    with pytest.raises(ringstow.InvalidStateError, match="not saved by Lightning's Trainer"):
        load_from_checkpoint(Model, tmp_path / "plain")
    run = trainer(tmp_path, epochs=1)
    run.fit(Model())
    run.save_checkpoint(tmp_path / "a.ckpt")
    RingstowCheckpointIO(background=False).save_checkpoint(
        torch.load(tmp_path / "a.ckpt", weights_only=False), tmp_path / "b.ckpt"
    )
    for name in ("a.ckpt", "b.ckpt"):
        other = load_from_checkpoint(Model, tmp_path / name)
        assert_same(other.state_dict(), run.lightning_module.state_dict())


def test_a_sharded_strategy_refuses_the_plugins_checkpoints_with_a_remedy(tmp_path):
    from ringstow.integrations._lightning import _ranks

    RingstowCheckpointIO(background=False).save_checkpoint({"state_dict": {}}, tmp_path / "a.ckpt")
    with pytest.raises(ringstow.InvalidStateError, match="ringstow convert"):
        _ranks.kind_of(str(tmp_path / "a.ckpt"))
    shutil.rmtree(tmp_path / "a.ckpt")
    assert _ranks.kind_of(str(tmp_path / "a.ckpt"))[1] == "theirs"


def snippet(rank, ranks, folder, code):
    os.chdir(folder)
    names = {"Model": shards.Sharded, "ModelCheckpoint": shards.ModelCheckpoint}
    exec(code, {**names, "ringstow": ringstow, "pl": lightning})


def test_the_sharded_snippet_of_the_page_runs(tmp_path):
    page = snippets.snippets(PAGES / "lightning.md")
    (code,) = [code for _, code in page if "Strategy" in code]
    results(2, snippet, tmp_path, code)
    (kept,) = os.listdir(tmp_path / "run" / "sharded")
    assert ringstow.load(tmp_path / "run" / "sharded" / kept)["lightning"][0]["global_step"] == 6
