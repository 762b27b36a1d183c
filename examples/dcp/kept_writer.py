"""Asynchronous saves with one writer for all of them.

    torchrun --nproc-per-node 2 examples/dcp/kept_writer.py --out run

The memory that a save copies the state into is taken once and used again: the second and later
saves block training for little more than the copy itself. From stock DCP only the line that makes
the writer is another (`--stock` runs that one).
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import ringstow.dcp
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from trainer import Trainer, arguments, digest, newest, say, set_up


def train(args: argparse.Namespace) -> None:
    trainer = Trainer(set_up(), args.width)
    saving: Any = dist.new_group(backend="gloo")  # see async_save.py
    if args.resume and (path := newest(args.out)) is not None:
        state = trainer.state()
        dcp.load(state, storage_reader=ringstow.dcp.StorageReader(path))
        trainer.restore(state)
        say(f"resumed step {trainer.step} digest {digest(trainer.state())}")

    writer = dcp.FileSystemWriter(args.out) if args.stock else ringstow.dcp.StorageWriter()
    saved: Any = None  # a future
    while trainer.step < args.steps:
        loss = trainer.backward()
        trainer.update()
        if trainer.step % args.save_every == 0:
            if saved is not None:
                saved.result()
            state = trainer.state()
            say(f"saving step {trainer.step} digest {digest(state)} loss {loss:.6f}")
            started = time.perf_counter()
            saved = dcp.async_save(
                state,
                checkpoint_id=args.out / f"step-{trainer.step:08}",
                storage_writer=writer,
                process_group=saving,
            )
            say(f"blocked for {time.perf_counter() - started:.3f} s")
    if saved is not None:
        saved.result()
    writer.close()


if __name__ == "__main__":
    train(arguments(__doc__))
    dist.destroy_process_group()
