"""Asynchronous saves under torch.distributed.checkpoint, the plain way.

    torchrun --nproc-per-node 2 examples/dcp/async_save.py --out run
    torchrun --nproc-per-node 2 examples/dcp/async_save.py --out run --resume --steps 12

`async_save` copies the state, then writes the copy while training goes on. From stock DCP only the
line that makes the writer is another (`--stock` runs that one).

A background save has collectives of its own. On CPU they need a gloo group of their own: two
threads that use one group at the same time get each other's messages.
"""

from __future__ import annotations

import argparse
from typing import Any

import ringstow.dcp
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from trainer import Trainer, arguments, digest, newest, say, set_up


def train(args: argparse.Namespace) -> None:
    trainer = Trainer(set_up(), args.width)
    saving: Any = dist.new_group(backend="gloo")
    if args.resume and (path := newest(args.out)) is not None:
        state = trainer.state()
        dcp.load(state, storage_reader=ringstow.dcp.StorageReader(path))
        trainer.restore(state)
        say(f"resumed step {trainer.step} digest {digest(trainer.state())}")

    saved: Any = None  # a future
    while trainer.step < args.steps:
        loss = trainer.backward()
        trainer.update()
        if trainer.step % args.save_every == 0:
            if saved is not None:
                saved.result()  # raises, on every rank, what went wrong on any of them
            path = args.out / f"step-{trainer.step:08}"
            writer = dcp.FileSystemWriter(path) if args.stock else ringstow.dcp.StorageWriter(path)
            state = trainer.state()
            say(f"saving step {trainer.step} digest {digest(state)} loss {loss:.6f}")
            saved = dcp.async_save(state, storage_writer=writer, process_group=saving)
    if saved is not None:
        saved.result()


if __name__ == "__main__":
    train(arguments(__doc__))
    dist.destroy_process_group()
