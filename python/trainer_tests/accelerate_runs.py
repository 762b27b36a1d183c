"""A small model, and trainings of it by an Accelerator: in one process, by DDP and by FSDP2.

Accelerate enters FSDP on accelerators only, so a test on CPUs sets the kind itself.
"""

from __future__ import annotations

import os

import accelerate
import children
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedType,
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
    set_seed,
)
from torch.distributed.tensor import DTensor

from ringstow.integrations._accelerate import _shards  # noqa: F401, the server imports it
from ringstow.integrations.accelerate import RingstowAccelerator

children.preload(__name__)

EVERY = 2  # steps between two saves
EPOCHS = 2
BATCHES = 4  # a rank's in an epoch
STEPS = EPOCHS * BATCHES
WIDTH = 160  # a weight is too large for the guard to copy it


class Progress:
    """Where a training is: an object to register."""

    def __init__(self):
        self.epoch = self.batch = 0

    def state_dict(self):
        return vars(self).copy()

    def load_state_dict(self, state):
        vars(self).update(state)


class Odd(Progress):
    """Holds what only a pickle can keep."""

    def state_dict(self):
        return {"odd": type(self)}

    def load_state_dict(self, state):
        self.odd = state["odd"]


class Average(Progress):
    """Holds a large tensor, which training changes outside of the optimizer."""

    def __init__(self):
        self.average = torch.zeros(1 << 20)


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.Dropout(0.1),  # so that equal ends need equal random numbers
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.BatchNorm1d(WIDTH, track_running_stats=False),
        torch.nn.Linear(WIDTH, 1),
    )


def reset():
    """Forget the Accelerator that was in this process before."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):  # plugins set them
        os.environ.pop(name, None)


def accelerator(
    root, *, kind=RingstowAccelerator, automatic=True, fsdp=False, limit=None, **options
):
    reset()
    plugin = options.pop("plugin", {})
    if kind is accelerate.Accelerator:
        options.pop("background", None)
    one = kind(
        cpu=True,
        project_config=ProjectConfiguration(
            str(root), automatic_checkpoint_naming=automatic, total_limit=limit
        ),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1),
        **options,
    )
    if fsdp:
        one.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, cpu_ram_efficient_loading=False, **plugin
        )
        # Each object that is prepared copies this one to the Accelerator's own state.
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        one.state.distributed_type = DistributedType.FSDP
    return one


class Training:
    """All that a training prepares and registers."""

    def __init__(self, one, *, seed=1):
        set_seed(seed, device_specific=True)
        self.accelerator = one
        net = model()
        data = torch.randn(
            2 * BATCHES * one.num_processes, WIDTH, generator=torch.Generator().manual_seed(3)
        )
        loader = torch.utils.data.DataLoader(
            data, batch_size=2, shuffle=True, generator=torch.Generator()
        )
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3 * one.num_processes)
        self.model, self.optimizer, self.scheduler, self.loader = one.prepare(
            net, optimizer, scheduler, loader
        )
        sharded = hasattr(one.state, "fsdp_plugin")
        assert one.is_fsdp2 == sharded
        assert all(isinstance(each, DTensor) == sharded for each in self.model.parameters())
        set_seed(seed, device_specific=True)
        self.progress = Progress()
        one.register_for_checkpointing(self.progress)

    def step(self, batch):
        self.optimizer.zero_grad()
        loss = self.model(batch).square().mean()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.scheduler.step()

    def run(self, *, steps=STEPS, save=None):
        """Train to the end, and save as often as `EVERY` says."""
        progress, done = self.progress, self.progress.epoch * BATCHES + self.progress.batch
        save = save or self.accelerator.save_state
        while done < steps:
            self.loader.set_epoch(progress.epoch)
            for batch in self.accelerator.skip_first_batches(self.loader, progress.batch):
                self.step(batch)
                progress.batch += 1
                done += 1
                if done % EVERY == 0:
                    save()
                if done == steps:
                    break
            if progress.batch == BATCHES:
                progress.epoch, progress.batch = progress.epoch + 1, 0
        if isinstance(self.accelerator, RingstowAccelerator):
            self.accelerator.wait_for_checkpoint()

    def end(self):
        """Return what two runs must have equal at their end, in whole tensors."""
        moments = self.optimizer.optimizer.state_dict()
        return {
            "model": {name: _whole(one) for name, one in self.bare().state_dict().items()},
            "moments": [
                {name: _whole(each) for name, each in one.items()}
                for one in moments["state"].values()
            ],
            "scheduler": self.scheduler.state_dict(),
            "random": torch.random.get_rng_state(),
            "progress": self.progress.state_dict(),
        }

    def bare(self):
        return self.accelerator.unwrap_model(self.model)


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def fit(root, *, resume=True, steps=STEPS, **options):
    """Train to the end, from the newest checkpoint if there is one."""
    training = Training(accelerator(root, **options))
    if resume and training.accelerator.latest_checkpoint() is not None:
        training.accelerator.load_state()
    training.run(steps=steps)
    return training


def fit_stock(root, **options):
    """Train with the stock Accelerator."""
    return fit(root, resume=False, kind=accelerate.Accelerator, **options)


def at(root, number=STEPS // EVERY - 1):
    """Return the path of a checkpoint of a run."""
    return os.path.join(root, "checkpoints", f"checkpoint_{number}")


def alone(root, **options):
    """Return a training whose checkpoints have no automatic names."""
    return Training(accelerator(root, automatic=False, **options))


def checkpoints(root):
    return sorted(os.listdir(os.path.join(root, "checkpoints")))


def ours(rank, ranks, root, options):
    return fit(root, **options).end()


def stock(rank, ranks, root, options):
    return fit_stock(root, **options).end()
