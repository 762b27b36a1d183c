"""A kill at any moment of a save leaves a checkpoint to resume from: one process, DDP and FSDP2."""

from __future__ import annotations

import os
import shutil
import signal

import accelerate_runs as runs
import children
import pytest
import torch
from accelerate_runs import EVERY, STEPS
from support import assert_same

import ringstow
from ringstow._state.tensors._memory import LazyTensor
from ringstow.integrations import _rename_when_complete
from ringstow.integrations._accelerate import _places, _whole

pytestmark = pytest.mark.timeout(300)  # four processes, each of them a whole run
children.preload(__name__)

LIMIT = 2
KINDS = {"one": (1, False), "ddp": (2, False), "fsdp2": (2, True)}
# What is called at each moment of a save, in this order.
CALLS = {
    "preparing": (_rename_when_complete, "prepare"),
    "hooks": (_places, "hooks_files"),
    "starting": (_whole, "save_async"),
    "committed": (_places, "seal"),
    "durable": (_rename_when_complete, "sync"),
    "complete": (_rename_when_complete, "take_name"),
    "named": (_rename_when_complete, "remove"),
    "removing": (shutil, "rmtree"),
}
# The kind; the moment; its which call, from 1; which ranks; how many checkpoints were complete.
# A removal comes after the third save: it and the two before are there.
MOMENTS = [
    ("one", "preparing", 1, (0,), 0),
    ("one", "hooks", 2, (0,), 1),
    ("one", "starting", 3, (0,), 2),
    ("one", "writing", 2, (0,), 1),
    ("one", "committed", 2, (0,), 1),
    ("one", "durable", 3, (0,), 2),
    ("one", "complete", 1, (0,), 0),
    ("one", "named", 1, (0,), 3),
    ("one", "removing", 1, (0,), 3),
    ("ddp", "starting", 3, (0, 1), 2),
    ("ddp", "writing", 2, (0,), 1),
    ("ddp", "committed", 2, (0,), 1),
    ("ddp", "complete", 3, (0,), 2),
    ("ddp", "named", 1, (0, 1), 3),
    ("fsdp2", "hooks", 2, (0,), 1),
    ("fsdp2", "writing", 1, (0, 1), 0),
    ("fsdp2", "writing", 3, (1,), 2),
    ("fsdp2", "written", 3, (1,), 2),
    ("fsdp2", "committing", 3, (0,), 2),
    ("fsdp2", "committed", 2, (0,), 1),
    ("fsdp2", "durable", 1, (0, 1), 0),
    ("fsdp2", "complete", 3, (0, 1), 2),
    ("fsdp2", "named", 1, (0,), 3),
    ("fsdp2", "removing", 1, (0, 1), 3),
]


def run(kind, function, *args):
    """Run a function on each rank; return how they ended."""
    ranks, fsdp = KINDS[kind]
    if ranks == 1:
        return [children.exit_code(_alone, function, *args, {"fsdp": fsdp})]
    return children.exit_codes(ranks, function, *args, {"fsdp": fsdp})


def _alone(function, *args):
    torch.set_num_threads(1)
    function(0, 1, *args)


class Deadly(runs.Progress):
    """Kills the process when the save of a number copies its state."""

    def __init__(self, number=0, die=None):
        super().__init__()
        self.number = number
        self.die = die

    def state_dict(self):
        self.number -= 1
        die = LazyTensor("F32", (1 << 18,), 4 << 18, self.die)
        return {"die": die if self.number == 0 and self.die else 0}

    def load_state_dict(self, state):
        pass


def killed(rank, ranks, root, moment, number, victims, options):
    """Train, and be killed at a moment, counted from 1."""
    from ringstow.distributed import _commit, _save

    calls = {**CALLS, "writing": (_save._Save, "_write_share")}
    calls |= {"written": calls["writing"], "committing": (_commit.Shared, "_commit")}
    owner, name = calls[moment]
    call, count = getattr(owner, name), 0
    one = runs.accelerator(root, limit=LIMIT, **options)
    pids = [os.getpid()]
    if ranks > 1:
        torch.distributed.all_gather_object(pids := [0] * ranks, os.getpid())

    def die():
        """Kill all victims at this moment of the first one."""
        for victim in reversed(victims):
            os.kill(pids[victim], signal.SIGKILL)
        signal.pause()

    def counted(*args, **more):
        nonlocal count
        count += 1
        if count == number:
            if moment == "written":
                call(*args, **more)
            if moment == "removing":
                os.unlink(os.path.join(args[0], "manifest.json"))
            die()
        return call(*args, **more)

    is_first = rank == victims[0]
    is_lazy = moment == "writing" and not options["fsdp"]
    training = runs.Training(one)
    one.register_for_checkpointing(Deadly(number if is_lazy and is_first else 0, die))
    if is_first and not is_lazy:
        setattr(owner, name, counted)
    training.run()


def resumed(rank, ranks, root, results, options):
    """Train to the end, from the newest checkpoint if there is one; store how it ended."""
    one = runs.accelerator(root, limit=LIMIT, **options)
    training = runs.Training(one)
    one.register_for_checkpointing(Deadly())
    if one.latest_checkpoint() is not None:
        one.load_state()
    begun = training.progress.epoch * runs.BATCHES + training.progress.batch
    training.run()
    torch.save({"begun": begun, **training.end()}, f"{results}.{rank}")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return how runs of each kind end on each rank that are not killed."""
    at = tmp_path_factory.mktemp("unbroken")
    ends = {}
    for kind, (ranks, _) in KINDS.items():
        assert run(kind, resumed, at / kind, at / f"{kind}.end") == [0] * ranks
        ends[kind] = [torch.load(f"{at / kind}.end.{rank}") for rank in range(ranks)]
    return ends


@pytest.mark.parametrize(("kind", "moment", "number", "victims", "complete"), MOMENTS)
def test_a_killed_run_resumes_to_the_bit(
    kind, moment, number, victims, complete, tmp_path, unbroken
):
    root = tmp_path / "run"
    codes = run(kind, killed, root, moment, number, victims)
    assert all(codes[victim] == -signal.SIGKILL for victim in victims)
    assert 0 not in codes  # the others do not take a lost save for a success
    found, halves = _places.newest(os.path.join(root, "checkpoints"), 2)
    assert not halves
    if complete:
        assert os.path.basename(found) == f"checkpoint_{complete - 1}"
        assert ringstow.verify(found).ok
    else:
        assert found is None
    ranks = len(codes)
    assert run(kind, resumed, root, tmp_path / "end") == [0] * ranks
    for rank in range(ranks):
        end = torch.load(f"{tmp_path / 'end'}.{rank}")
        assert end.pop("begun") == complete * EVERY
        assert_same(end, {k: v for k, v in unbroken[kind][rank].items() if k != "begun"})
    last = STEPS // EVERY - 1
    assert runs.checkpoints(root) == [f"checkpoint_{last - 1}", f"checkpoint_{last}"]
