"""Fully asynchronous saves: the state is not copied, it is streamed while training computes.

    torchrun --nproc-per-node 2 examples/dcp/overlap.py --out run

The stager hands the live tensors to the save, which reads them during the next forward and backward
pass. `optimizer.step()`, the first moment that changes them, waits until it has; the write goes on
after that. Memory taken: the staging pool, however large the model.
From stock DCP only the lines that make the writer and the stager are others (`--stock` runs those).
"""

from __future__ import annotations

import argparse
from typing import Any

import ringstow.dcp
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from trainer import Trainer, arguments, digest, newest, say, set_up


def train(args: argparse.Namespace) -> None:
    trainer = Trainer(set_up(), args.width)
    saving: Any = dist.new_group(backend="gloo")  # see async_save.py
    if args.resume and (path := newest(args.out)) is not None:
        state = trainer.state()
        dcp.load(state, storage_reader=ringstow.dcp.StorageReader(path))
        trainer.restore(state)
        say(f"resumed step {trainer.step} digest {digest(trainer.state())}")

    writer: Any
    stager: Any
    if args.stock:
        pinned = torch.cuda.is_available()
        writer = dcp.FileSystemWriter(args.out)
        stager = DefaultStager(StagingOptions(pinned, pinned, True, pinned))
    else:
        writer = ringstow.dcp.StorageWriter()
        stager = writer.stager()
    saved: AsyncSaveResponse | None = None
    while trainer.step < args.steps:
        loss = trainer.backward()
        if saved is not None and args.stock:
            saved.staging_completion.result()  # stock DCP: the weights may change from here on
        trainer.update()
        if trainer.step % args.save_every == 0:
            if saved is not None:
                saved.upload_completion.result()
            state = trainer.state()
            say(f"saving step {trainer.step} digest {digest(state)} loss {loss:.6f}")
            response = dcp.async_save(
                state,
                checkpoint_id=args.out / f"step-{trainer.step:08}",
                storage_writer=writer,
                async_stager=stager,
                process_group=saving,
            )
            assert isinstance(response, AsyncSaveResponse)
            saved = response
    if saved is not None:
        saved.upload_completion.result()
    stager.close()


if __name__ == "__main__":
    train(arguments(__doc__))
    dist.destroy_process_group()
