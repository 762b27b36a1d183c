"""Two gloo ranks with Accelerate, by DDP and by FSDP2: saves, loads, failures of one rank."""

from __future__ import annotations

import errno
import logging
import os
import resource
import subprocess
import sys

import accelerate_runs as runs
import children
import pytest
import torch
from accelerate_runs import EVERY, STEPS
from slimming import assert_slims
from support import assert_same
from torch.distributed.checkpoint.api import CheckpointException

import ringstow
from ringstow.integrations import _rename_when_complete
from ringstow.integrations.accelerate import RingstowAccelerator

pytestmark = pytest.mark.timeout(300)
children.preload(__name__)

RANKS = 2
LAST = STEPS // EVERY - 1


def newest(root):
    return os.path.join(root, "checkpoints", f"checkpoint_{LAST}")


@pytest.fixture(scope="module")
def runs_of(tmp_path_factory):
    """Return the directories of finished runs by kind, and how their ranks ended."""
    at = tmp_path_factory.mktemp("runs")
    found = {}
    for kind, options in (("ddp", {}), ("fsdp2", {"fsdp": True})):
        root, results = at / kind, at / f"{kind}.end"
        assert children.exit_codes(RANKS, runs.ours, results, root, options) == [0] * RANKS
        found[kind] = root, [torch.load(f"{results}.{rank}") for rank in range(RANKS)]
    return found


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ddp", {}),
        ("fsdp2", {"fsdp": True}),
        ("fsdp2", {"fsdp": True, "plugin": {"state_dict_type": "FULL_STATE_DICT"}}),
    ],
    ids=["ddp", "fsdp2", "fsdp2-whole-files"],
)
def test_ranks_resume_from_what_the_stock_accelerator_left(kind, options, runs_of, tmp_path):
    root, results = tmp_path / "run", tmp_path / "end"
    first = {**options, "steps": 2 * EVERY}
    assert children.exit_codes(RANKS, runs.stock, results, root, first) == [0] * RANKS
    options.pop("plugin", None)
    assert children.exit_codes(RANKS, runs.ours, results, root, options) == [0] * RANKS
    for rank, end in enumerate(runs_of[kind][1]):  # of a run that was never broken
        assert_same(torch.load(f"{results}.{rank}"), end)
    assert ringstow.verify(newest(root)).ok


def test_the_weights_of_ranks_load_in_one_process(runs_of):
    for root, ends in runs_of.values():
        saved = ringstow.load(newest(root), prefix="model")["model"]
        assert_same(dict(saved), ends[0]["model"])


def loaded(rank, ranks, path, results, options):
    """Load a checkpoint; store what is there then, and what was logged."""
    logged = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("ringstow").addHandler(handler)
    training = runs.Training(runs.accelerator(os.path.dirname(results), **options))
    before = torch.random.get_rng_state()
    try:
        training.accelerator.load_state(path)
    except (ringstow.Error, CheckpointException) as error:  # DCP's is no Exception
        torch.save({"error": str(error)}, f"{results}.{rank}")
        return
    found = {"logged": logged, "is_kept": torch.random.get_rng_state().equal(before)}
    torch.save({**training.end(), **found}, f"{results}.{rank}")


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_checkpoint_loads_on_other_numbers_of_ranks(kind, ranks, runs_of, tmp_path):
    root, ends = runs_of[kind]
    results = str(tmp_path / "end")
    options = {"fsdp": kind == "fsdp2"}
    codes = children.exit_codes(ranks, loaded, newest(root), results, options)
    assert codes == [0] * ranks
    for rank in range(ranks):
        found = torch.load(f"{results}.{rank}")
        for name in ("model", "moments"):
            assert_same(found[name], ends[0][name])
        assert found["is_kept"] == (rank >= RANKS)
        if rank < RANKS:
            assert_same(found["random"], ends[rank]["random"])
        expected = {2: "rank 2 keeps the random numbers"}.get(rank, "ranks 1 to 1 are left out")
        assert any(expected in line for line in found["logged"]) == (ranks == 1 or rank == 2)


def test_slim_drops_the_optimizer_of_all_ranks(runs_of, tmp_path):
    root, results = tmp_path / "checkpoints" / "checkpoint_0", str(tmp_path / "end")
    assert_slims(newest(runs_of["fsdp2"][0]), root, "optimizer")
    assert children.exit_codes(RANKS, loaded, root, results, {"fsdp": True}) == [0] * RANKS
    assert "slim" in torch.load(f"{results}.0")["error"]


def test_kinds_do_not_mix(runs_of, tmp_path):
    results = str(tmp_path / "end")
    codes = children.exit_codes(RANKS, loaded, newest(runs_of["ddp"][0]), results, {"fsdp": True})
    assert codes == [0] * RANKS
    for rank in range(RANKS):
        assert (
            "saved by one process or DDP, and this is FSDP2"
            in torch.load(f"{results}.{rank}")["error"]
        )


def failing(rank, ranks, root, victim, options):
    """Fail in one rank, then go on; each rank exits with 3 if all raised what they should."""
    one = runs.accelerator(root, **options)
    training = runs.Training(one)
    training.step(torch.randn(2, runs.WIDTH))
    one.save_state()
    one.wait_for_checkpoint()
    if rank == victim:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, hard))
    one.save_state()
    caught = []
    try:
        one.wait_for_checkpoint()
    except BaseException as error:
        caught.append(str(error) + str(getattr(error, "failures", "")))
    if rank == victim:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    hook = one.register_save_state_pre_hook(lambda *_: 1 / (rank - 1))  # fails on rank 1
    try:
        one.save_state()
    except (ZeroDivisionError, ringstow.Error) as error:
        caught.append(str(error))
    hook.remove()
    is_left = rank == 0 and any(name.startswith(".") for name in runs.checkpoints(root))
    one.save_state()
    one.wait_for_checkpoint()
    is_told = len(caught) == 2 and "File too large" in caught[0] and "division" in caught[1]
    sys.exit(3 if is_told and not is_left else 4)


@pytest.mark.parametrize(("kind", "victim"), [("ddp", 0), ("fsdp2", 0), ("fsdp2", 1)])
def test_a_failure_of_one_rank_raises_on_all_and_the_next_save_works(kind, victim, tmp_path):
    options = {"fsdp": kind == "fsdp2"}
    assert children.exit_codes(RANKS, failing, tmp_path, victim, options) == [3] * RANKS
    # A failed save has used its number; the one of the hook has not.
    assert runs.checkpoints(tmp_path) == ["checkpoint_0", "checkpoint_2"]
    for name in runs.checkpoints(tmp_path):
        assert ringstow.verify(tmp_path / "checkpoints" / name).ok


def refused(rank, ranks, root, options):
    """Save what only a pickle can keep; each rank exits with 3 if that is refused at the call."""
    training = runs.Training(runs.accelerator(root, **options))
    training.accelerator.register_for_checkpointing(runs.Odd())
    try:
        training.accelerator.save_state()
    except ringstow.Error as error:
        notes = getattr(error, "__notes__", [""])
        is_told = "allow_pickle=True" in notes[-1] if rank == 0 else "rank 0 failed" in str(error)
        sys.exit(3 if "odd" in str(error) and is_told else 4)


@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp2"])
def test_a_value_that_cannot_be_saved_is_refused_on_all_ranks_at_the_call(fsdp, tmp_path):
    assert children.exit_codes(RANKS, refused, tmp_path, {"fsdp": fsdp}) == [3] * RANKS
    assert runs.checkpoints(tmp_path) == []


def lopsided(rank, ranks, root, options):
    """Register an object on rank 0 alone; each rank exits with 3 if the load is refused."""
    one = runs.Training(runs.accelerator(root, **options)).accelerator
    if rank == 0:
        one.register_for_checkpointing(runs.Progress())
    one.save_state()
    one.wait_for_checkpoint()
    try:
        one.load_state()
    except ringstow.Error as error:
        sys.exit(3 if "2 registered objects, and 1 are here" in str(error) else 4)


@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp2"])
def test_an_object_of_one_rank_alone_is_refused_on_all_ranks_by_load_state(fsdp, tmp_path):
    assert children.exit_codes(RANKS, lopsided, tmp_path, {"fsdp": fsdp}) == [3] * RANKS


def averaging(rank, ranks, root, options):
    """Change a large tensor of a registered object right after the call."""
    large = runs.Average()
    one = runs.Training(runs.accelerator(root, **options)).accelerator
    one.register_for_checkpointing(large)
    one.save_state()
    large.average.add_(1)
    one.load_state()
    sys.exit(4 if large.average.any() else 3)


def test_large_tensors_of_objects_are_saved_by_fsdp2_as_they_were_at_the_call(tmp_path):
    assert children.exit_codes(RANKS, averaging, tmp_path, {"fsdp": True}) == [3] * RANKS


def leaving(rank, ranks, root, options):
    """Exit with a save in flight."""
    training = runs.Training(runs.accelerator(root, **options))
    training.accelerator.save_state()


@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp2"])
def test_a_process_that_exits_completes_its_save(fsdp, tmp_path):
    assert children.exit_codes(RANKS, leaving, tmp_path, {"fsdp": fsdp}) == [0] * RANKS
    assert runs.checkpoints(tmp_path) == ["checkpoint_0"]
    # No step was made: the optimizer has no state, and torch would make one up.
    assert "optimizer" not in ringstow.load(newest_of(tmp_path)) or not fsdp


def newest_of(root):
    return os.path.join(root, "checkpoints", runs.checkpoints(root)[-1])


def unstepped(rank, ranks, root, results, options):
    """Load a checkpoint from before the first step into a trained optimizer."""
    training = runs.Training(runs.accelerator(root, **options))
    training.accelerator.save_state()
    training.step(torch.ones(2, runs.WIDTH))
    training.accelerator.load_state()
    moments = training.optimizer.optimizer.state_dict()["state"]
    torch.save([len(moments), len(training.optimizer.param_groups[0]["params"])], results)


@pytest.mark.parametrize("fsdp", [False, True], ids=["one", "fsdp2"])
def test_an_optimizer_before_its_first_step_comes_back_without_a_state(fsdp, tmp_path):
    results = tmp_path / "end"
    assert children.exit_codes(1, unstepped, tmp_path / "run", results, {"fsdp": fsdp}) == [0]
    moments, parameters = torch.load(results)
    assert moments == 0
    assert parameters > 0


def exits_with_a_failure(root):
    """Exit with a save in flight that fails; not called in this process."""

    def fails(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    _rename_when_complete.sync = fails
    one = RingstowAccelerator(cpu=True)
    one.prepare(torch.nn.Linear(2, 2))
    one.save_state(os.path.join(root, "state"))


def test_a_process_exits_with_1_if_its_last_save_fails(tmp_path):
    code = "import sys, test_accelerate_ranks as t; t.exits_with_a_failure(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert not os.listdir(tmp_path)
