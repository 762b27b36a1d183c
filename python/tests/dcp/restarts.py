"""A training that is stopped and started again: the program of `test_restart`.

    python restarts.py ROOT save|resume RANK RANKS

``save`` trains each case for some steps, saves and kills itself. ``resume`` starts each anew, as a
second start of the same program would, trains to the end, and compares with the same training
without a stop. RANKS 0 is one process without a process group.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ringstow

STOP, END = 3, 6
ONLY = os.environ.get("RESTARTS_ONLY", "")  # "tp-": the cases with that in their name
WIDTH, BATCH = 12, 8
ONE_PROCESS = ["plain", "compiled", "checkpointed"]
KINDS = ["ddp", "fsdp1", "fsdp1-flat", "fsdp2", "tp", "hsdp", "pipeline"]
OPTIMIZERS = os.environ.get("RESTARTS_OPTIMIZERS", "adamw sgd momentum adam-groups").split()
FORMS = ["objects", "dicts"]


class Block(nn.Module):
    """Two linear layers of one shape, which tensor parallelism shards in different ways."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Four blocks and a norm with buffers."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleDict({str(n): Block() for n in range(4)})
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        for block in self.blocks.values():
            x = block(x)
        return x


def model_of(kind, rank, ranks):
    """Return the model as a training of this kind has it."""
    torch.manual_seed(5)
    model = Model()
    mesh = None if ranks == 0 else init_device_mesh("cpu", (ranks,))
    if kind == "compiled":
        return torch.compile(model, backend="eager")
    if kind == "checkpointed":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        model.blocks["1"] = checkpoint_wrapper(model.blocks["1"])
    if kind == "ddp":
        # Without it, DDP makes its buckets anew after the first iteration, in a process that was
        # started again, too: on four ranks gradients are then added up in another order.
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    if kind.startswith("fsdp1"):
        flat = kind == "fsdp1-flat"
        return FullyShardedDataParallel(
            model,
            device_id=torch.device("cpu"),
            use_orig_params=not flat,
            device_mesh=None if flat else mesh,
        )
    if kind == "hsdp":
        outer = 2 if ranks > 1 else 1
        mesh = init_device_mesh("cpu", (outer, ranks // outer), mesh_dim_names=("dp", "shard"))
    if kind in ("fsdp2", "hsdp"):
        for block in model.blocks.values():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if kind == "tp":
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in model.blocks.values():
            parallelize_module(block, mesh, plan)
    if kind == "pipeline":
        for number in range(4):
            if number * ranks // 4 != rank:
                del model.blocks[str(number)]
    return model


def optimizer_of(name, model):
    """Return a new optimizer."""
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-2)
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-2)
    if name == "momentum":
        return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    ups = [p for n, p in model.named_parameters() if ".up." in n]
    others = [p for n, p in model.named_parameters() if ".up." not in n]
    if not ups or not others:  # flat parameters
        ups, others = list(model.parameters()), []
    groups = [{"params": others, "weight_decay": 0.1}] if others else []
    groups += [{"params": ups, "lr": torch.tensor(3e-2)}]
    return torch.optim.Adam(groups, lr=torch.tensor(1e-2), foreach=False)


class Training:
    """One training: its parts and how far it is."""

    def __init__(self, kind, optimizer, form, rank, ranks):
        self.kind, self.form, self.rank, self.ranks = kind, form, rank, ranks
        self.model = model_of(kind, rank, ranks)
        self.optimizer = optimizer_of(optimizer, self.model)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4], gamma=0.5)

    def step(self, number):
        generator = torch.Generator().manual_seed(number)
        batch = torch.randn(BATCH, WIDTH, generator=generator)
        if self.kind not in ("tp", "pipeline"):
            batch = batch[self.rank :: max(self.ranks, 1)]
        self.optimizer.zero_grad()
        if self.kind == "pipeline":  # each block for itself, whichever rank has it
            blocks = self.model.blocks.values()
            loss = sum(block(batch).square().mean() for block in blocks)
        else:
            loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()

    def state(self):
        if self.form == "objects":
            return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        if self.kind.startswith("fsdp1"):
            FullyShardedDataParallel.set_state_dict_type(
                self.model, StateDictType.SHARDED_STATE_DICT
            )
            optimizer = FullyShardedDataParallel.optim_state_dict(self.model, self.optimizer)
        else:
            optimizer = self.optimizer.state_dict()
        return {
            "model": self.model.state_dict(),
            "optimizer": optimizer,
            "scheduler": self.scheduler.state_dict(),
        }

    def take(self, state):
        """Do what a program does with the dicts that were filled."""
        if self.form == "objects":
            assert state["model"] is self.model
            return
        self.model.load_state_dict(state["model"])
        optimizer = state["optimizer"]
        if self.kind.startswith("fsdp1"):
            optimizer = FullyShardedDataParallel.optim_state_dict_to_load(
                self.model, self.optimizer, optimizer
            )
        self.optimizer.load_state_dict(optimizer)
        self.scheduler.load_state_dict(state["scheduler"])

    def values(self):
        """Return all that the training has learned, on this rank, as tensors."""
        found = [p.detach() for p in self.model.parameters()]
        for parameter in [one for group in self.optimizer.param_groups for one in group["params"]]:
            state = self.optimizer.state.get(parameter, {})
            found += [state[name] for name in sorted(state) if torch.is_tensor(state[name])]
        found += [torch.as_tensor(group["lr"]) for group in self.optimizer.param_groups]
        return [one.to_local() if isinstance(one, DTensor) else one for one in found]


def cases(ranks):
    for kind in ONE_PROCESS if ranks == 0 else KINDS:
        for optimizer in OPTIMIZERS:
            for form in FORMS:
                # An optimizer's own state dict numbers its parameters on each stage anew.
                case = f"{kind}-{optimizer}-{form}"
                if not (kind == "pipeline" and form == "dicts") and ONLY in case:
                    yield kind, optimizer, form


def save(root, rank, ranks):
    for kind, optimizer, form in cases(ranks):
        training = Training(kind, optimizer, form, rank, ranks)
        with ringstow.CheckpointManager(f"{root}/{kind}-{optimizer}-{form}", keep=1) as manager:
            assert manager.restore(into=training.state()) is None
            for number in range(STOP):
                training.step(number)
                manager.save_async(number, training.state())


def resume(root, rank, ranks, saved, same):
    failed = []
    for kind, optimizer, form in cases(ranks):
        source = kind
        if not os.path.exists(f"{root}/{kind}-{optimizer}-{form}"):
            if form == "dicts" or kind in ("pipeline", "fsdp1-flat"):
                continue  # names have the wrappers' steps; other steps, and one group, there
            source = "plain" if saved == 0 else "fsdp2"
        case = f"{source}-{optimizer}-{form}"
        try:
            whole = Training(kind, optimizer, form, rank, ranks)
            for number in range(END):
                whole.step(number)
            again = Training(kind, optimizer, form, rank, ranks)
            state = again.state()
            with ringstow.CheckpointManager(f"{root}/{case}") as manager:
                restored = manager.restore(into=state)
                assert restored is not None
                again.take(state)
                for number in range(restored.step + 1, END):
                    again.step(number)
                if source == kind:
                    manager.save(END, again.state())
            pairs = list(zip(whole.values(), again.values(), strict=True))
            for one, other in pairs:
                if same and source == kind:
                    assert torch.equal(one, other), "not the same"
                else:
                    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        except Exception as error:
            failed.append(f"{case} as {kind}: {type(error).__name__}: {error}")
            if os.environ.get("RESTARTS_TRACE"):
                traceback.print_exc()
    return failed


def main():
    root, what, rank, ranks, saved = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if ranks:
        dist.init_process_group(
            "gloo", init_method=f"file://{root}/meeting-{what}-{ranks}", rank=rank, world_size=ranks
        )
    if what == "save":
        save(root, rank, ranks)
        if ranks:
            dist.barrier()
        print("saved", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    failed = resume(root, rank, ranks, saved, same=saved == ranks)
    print(f"rank {rank}: " + ("\n".join(failed) or "all resumed"), flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
