"""A training that signals stop and that starts again: the program of `test_stops`.

    python stops.py ROOT RANK RANKS LIFE

LIFE is the JSON of a `test_stops.Life`: which rank gets a signal, when, and how the ranks listen.
Prints the last step, and at the end of the training the weights' digest.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import signal
import sys
import threading
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ringstow
from ringstow import CheckpointManager, EverySteps, First, OnSignal
from ringstow._manager import _signals, _when

END = 450
WIDTH = 24
# Saves that are still in progress some steps later.
CONFIG = ringstow.Config(write_rate="2M")


class Stopper:
    """Sends a signal to a rank, at a moment of this one's life."""

    def __init__(self, root, rank, life):
        self._root = root
        self._life = life
        self._at = -1
        self._is_here = rank == life["by"]

    def starts(self, step):
        """Note the last step before this life."""
        self._at = step + self._life["after"] if self._is_here else -1

    def now(self, step, moment):
        """Send it, if this is the moment."""
        if step == self._at and moment == self._life["moment"]:
            self.send()
        elif step == self._at and moment == "step" and self._life["moment"] == "anytime":
            threading.Timer(self._life["later_s"], self.send).start()

    def send(self):
        with open(f"{self._root}/pid-{self._life['to']}") as file:
            pid = int(file.read())
        for _ in range(self._life["times"]):
            os.kill(pid, signal.SIGTERM)

    def in_promotion(self, step, manager):
        """Send it from a thread, once a copy has begun."""
        if step == self._at and self._life["moment"] == "promotion":
            copy = manager._copier._copy

            def copied(*args, **kwargs):
                self.send()
                return copy(*args, **kwargs)

            manager._copier._copy = copied


def train(root, rank, ranks, life):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(WIDTH, 99), nn.GELU(), nn.Linear(99, WIDTH))
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer}
    when = EverySteps(20) | First() | OnSignal(grace=life["grace"])
    if life["every"]:
        when |= ringstow.Every(life["every"])
    stopper = Stopper(root, rank, life)
    tiers = [f"{root}/tier"]
    with CheckpointManager(f"{root}/run", keep=2, tiers=tiers, when=when, config=CONFIG) as manager:
        with open(f"{root}/pid-{rank}", "w") as file:
            file.write(str(os.getpid()))
        restored = manager.restore(into=state)
        step = restored.step if restored else -1
        stopper.starts(step)
        dist.barrier()
        while step < END and not manager.stopping:
            step += 1
            generator = torch.Generator().manual_seed(step)
            batch = torch.randn(8, WIDTH, generator=generator)[rank::ranks]
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            stopper.now(step, "step")
            loss.backward()
            optimizer.step()
            stopper.in_promotion(step, manager)
            if manager.should_save(step) or step == END:
                handle = manager.save_async(step, state)
                assert handle.done() or not manager.stopping
            stopper.now(step, "save")
        handle.result()
    print("ended", json.dumps([step, manager.stopping]), flush=True)
    if not manager.stopping:
        whole = b"".join(one.full_tensor().detach().numpy().tobytes() for one in model.parameters())
        print("digest", hashlib.sha256(whole).hexdigest(), flush=True)


def main():
    root, rank, ranks = sys.argv[1], *map(int, sys.argv[2:4])
    life = json.loads(sys.argv[4])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    _when.BEAT_US, _when.LONG_STEP_US = life["beat_us"], life["long_step_us"]
    _signals.SAME_NOTICE_S = life["same_notice_s"]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{root}/meeting-{life['number']}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=120),
    )
    train(root, rank, ranks, life)
    assert threading.current_thread() is threading.main_thread()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
