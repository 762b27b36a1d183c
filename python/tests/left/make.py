"""Makes the checkpoints in this directory, with the programs whose names they have.

Needs the packages ``deepspeed`` and ``megatron-core`` besides torch, and no GPU:

    DS_ACCELERATOR=cpu python make.py deepspeed 1        # ZeRO's stage: 0 to 3
    DS_ACCELERATOR=cpu python make.py deepspeed 2 bf16
    python make.py megatron

They were made by deepspeed 0.19.8 and megatron-core 0.16.1 under torch 2.15, with two ranks.
"""

import argparse
import os
import pathlib
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

HERE = pathlib.Path(__file__).parent
RANKS = 2


def by_deepspeed(rank, port, stage, dtype):
    join(rank, port)
    import deepspeed

    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 5),
        torch.nn.LayerNorm(5) if dtype else torch.nn.BatchNorm1d(5),
        torch.nn.Linear(5, 3, bias=False),
        torch.nn.Linear(3, 3),
        torch.nn.Linear(3, 3),
    )
    model[3].bias.requires_grad_(False)
    if stage != 3:
        model[4].weight = model[3].weight  # tied
    trained = [one for one in model.parameters() if one.requires_grad]
    groups = [{"params": trained[:2]}, {"params": trained[2:], "weight_decay": 0.1}]
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    if dtype:
        settings[dtype] = {"enabled": True}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.Adam(groups, lr=0.1), config=settings
    )
    for _ in range(2):
        batch = torch.randn(2, 4).to(torch.bfloat16 if dtype == "bf16" else torch.float32)
        engine.backward(engine(batch).float().square().mean())
        engine.step()
    to = HERE / f"deepspeed-{stage}{dtype}"
    engine.save_checkpoint(str(to), client_state={"epoch": 3})
    dist.barrier()
    if rank == 0:
        if stage:
            from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

            joined = get_fp32_state_dict_from_zero_checkpoint(str(to))
            torch.save({name: one.clone() for name, one in joined.items()}, f"{to}.expected")
        for program in to.glob("*.py"):
            program.unlink()


def by_megatron(rank, port):
    join(rank, port)
    dist.init_process_group("gloo")
    # It moves tensors from a GPU in any case.
    torch.cuda.synchronize = torch.cuda.current_device = lambda *_: "cpu"
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    whole = torch.arange(8.0).reshape(4, 2)
    mine = whole[rank * 2 : rank * 2 + 2].clone()
    bias = torch.full((3,), 0.5, dtype=torch.bfloat16)
    extra = {"amax": torch.ones(2), "rank": rank}
    state = {
        "model": {
            "weight": ShardedTensor.from_rank_offsets("decoder.weight", mine, (0, rank, RANKS)),
            "bias": ShardedTensor.from_rank_offsets("decoder.bias", bias, replica_id=rank),
            "extra": ShardedObject("decoder._extra_state", extra, (RANKS,), (rank,)),
        },
        "iteration": 7,
        "args": argparse.Namespace(lr=0.1, params_dtype=torch.bfloat16),
        "checkpoint_version": 3.0,
    }
    to = HERE / "megatron"
    to.mkdir(exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(state, str(to))


def join(rank, port):
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    sys.dont_write_bytecode = True


if __name__ == "__main__":
    program, *given = sys.argv[1:]
    if program == "deepspeed":
        dtype = given[1] if len(given) > 1 else ""
        processes.spawn(by_deepspeed, (29611, int(given[0]), dtype), nprocs=RANKS)
    else:
        processes.spawn(by_megatron, (29612,), nprocs=RANKS)
