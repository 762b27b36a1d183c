"""A kill at any moment of a save leaves a checkpoint to resume from: one process, DDP and FSDP2."""

from __future__ import annotations

import itertools
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


def run(kind, call, function, *args):
    """Run a function on each rank; return how they ended, or what they returned."""
    ranks, fsdp = KINDS[kind]
    return call(0 if ranks == 1 else ranks, function, *args, {"fsdp": fsdp})


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

    moments = {**CALLS, "writing": (_save._Save, "_write_share")}
    moments |= {"written": moments["writing"], "committing": (_commit.Shared, "_commit")}
    owner, name = moments[moment]
    call, numbers = getattr(owner, name), itertools.count(1)
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
        is_now = next(numbers) == number
        if is_now and moment == "written":
            call(*args, **more)
        if is_now and moment == "removing":
            os.unlink(os.path.join(args[0], "manifest.json"))
        return die() if is_now else call(*args, **more)

    is_first = rank == victims[0]
    is_lazy = moment == "writing" and not options["fsdp"]
    training = runs.Training(one)
    one.register_for_checkpointing(Deadly(number if is_lazy and is_first else 0, die))
    if is_first and not is_lazy:
        setattr(owner, name, counted)
    training.run()


def resumed(rank, ranks, root, options):
    """Train to the end, from the newest checkpoint if there is one; return how it ended."""
    one = runs.accelerator(root, limit=LIMIT, **options)
    training = runs.Training(one)
    one.register_for_checkpointing(Deadly())
    if one.latest_checkpoint() is not None:
        one.load_state()
    begun = training.progress.epoch * runs.BATCHES + training.progress.batch
    training.run()
    return begun, training.end()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Return how runs of each kind end on each rank that are not killed."""
    at = tmp_path_factory.mktemp("unbroken")
    return {kind: run(kind, children.results, resumed, at / kind) for kind in KINDS}


@pytest.mark.parametrize(("kind", "moment", "number", "victims", "complete"), MOMENTS)
def test_a_killed_run_resumes_to_the_bit(
    kind, moment, number, victims, complete, tmp_path, unbroken
):
    root = tmp_path / "run"
    root = tmp_path / "run"
    codes = run(kind, children.exit_codes, killed, root, moment, number, victims)
    assert all(codes[victim] == -signal.SIGKILL for victim in victims)
    assert 0 not in codes  # the others do not take a lost save for a success
    found, halves = _places.newest(os.path.join(root, "checkpoints"), 2)
    assert not halves
    if complete:
        assert os.path.basename(found) == f"checkpoint_{complete - 1}"
        assert ringstow.verify(found).ok
    else:
        assert found is None
    ends = run(kind, children.results, resumed, root)
    assert_same(ends, [(complete * EVERY, end) for _, end in unbroken[kind]])
    last = STEPS // EVERY - 1
    assert runs.checkpoints(root) == [f"checkpoint_{last - 1}", f"checkpoint_{last}"]
