"""Measures how ranks load a Hugging Face model into FSDP2's shards, beside transformers and fio.

    torchrun --nproc-per-node 4 tools/model_load.py /mnt/nvme --gb 2 --rounds 5

All loads are cold, and take turns in random order. Prints medians with quartiles, the bytes that
the disk gave as multiples of the model, and the most memory that a rank took more than before.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from comparing.cold import cold_load, quartiles, reduced
from comparing.directories import fresh_directory, machine
from comparing.fio import BLOCK_BYTES, run_job
from comparing.usage import memory_bytes, reset_peak
from ringstow import distributed
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

LAYER_BYTES, OTHER_BYTES = 268_500_000, 525_000_000


class Loaded(NamedTuple):
    """A cold load on all ranks: seconds; bytes that the disk gave; memory of the largest rank."""

    seconds: float
    read: float
    memory: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("directory", type=Path, help="where to save and load")
    parser.add_argument("--gb", type=float, default=2.0, help="the model (2)")
    parser.add_argument("--rounds", type=int, default=5, help="loads of each way, 2 or more (5)")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    rank = dist.get_rank()
    with fresh_directory(args.directory) if rank == 0 else nullcontext() as made:
        shared = [str(made)]
        dist.broadcast_object_list(shared)
        path = Path(shared[0]) / "model"
        config = config_of(args.gb)
        if rank == 0:
            LlamaForCausalLM(config).save_pretrained(path, max_shard_size="100GB")
        dist.barrier()
        [file] = path.glob("*.safetensors")
        nbytes = file.stat().st_size
        model = sharded(config)
        ways: dict[str, Callable[[], object]] = {
            "ringstow": lambda: distributed.load_into(model.state_dict(), path),
            "transformers, rank 0 sends": lambda: by_first_rank(model, path),
            "transformers, each rank": lambda: by_each_rank(model, path),
            "fio, a job a rank": partial(by_fio, file, nbytes),
        }
        found: dict[str, list[Loaded]] = {name: [] for name in ways}
        for number in range(args.rounds + 1):
            for name in random.Random(number).sample([*ways], len(ways)):
                one = load(ways[name], path)
                if number:  # the first round starts engines
                    found[name].append(one)
        dist.barrier()
    if rank == 0:
        print(f"{dist.get_world_size()} ranks, {nbytes / 1e9:.2f} GB, {machine(args.directory)}")
        for name, loads in found.items():
            read, memory = (statistics.median(one[at] for one in loads) for at in (1, 2))
            print(
                f"{name:<27} {quartiles([one.seconds for one in loads])}, "
                f"read {read / nbytes:.2f} x, memory {memory / nbytes:.2f} x"
            )
    dist.destroy_process_group()


def config_of(gb: float) -> LlamaConfig:
    """Return a model of about so many bytes, in float32."""
    layers = max(round((gb * 1e9 - OTHER_BYTES) / LAYER_BYTES), 1)
    return LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=layers, vocab_size=32_000
    )


def sharded(config: LlamaConfig) -> LlamaForCausalLM:
    """Return a model whose parameters are shards of all ranks, without values."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model.to_empty(device="cpu")


def by_first_rank(model: LlamaForCausalLM, path: Path) -> None:
    """Load by one rank, which sends the others their shards, as trainers do."""
    is_first = dist.get_rank() == 0
    full = LlamaForCausalLM.from_pretrained(path).state_dict() if is_first else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)


def by_each_rank(model: LlamaForCausalLM, path: Path) -> None:
    """Load the whole model on each rank, which takes its shards of it."""
    full = LlamaForCausalLM.from_pretrained(path).state_dict()
    set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True))


def by_fio(file: Path, nbytes: int) -> float:
    """Return the seconds of as many jobs as there are ranks, each of which reads a part."""
    if dist.get_rank():
        return 0.0
    jobs = dist.get_world_size()
    each = nbytes // jobs // BLOCK_BYTES * BLOCK_BYTES
    options = [f"--filename={file}", f"--numjobs={jobs}", f"--offset_increment={each}"]
    job = run_job("read", each, *options, "--group_reporting")
    return float(nbytes / job["read"]["bw_bytes"])


def load(way: Callable[[], object], path: Path) -> Loaded:
    """Return a cold load on all ranks."""
    reset_peak()
    before = memory_bytes("VmRSS")
    one = cold_load(path, way)
    seconds = one.result if isinstance(one.result, float) else one.seconds  # fio starts slowly
    peak = reduced(memory_bytes("VmHWM") - before, dist.ReduceOp.MAX)
    return Loaded(seconds, one.read, peak)


if __name__ == "__main__":
    main()
