"""One rank of ``compare_dcp.py --tensors``: what many tiny sharded tensors cost.

compare_dcp.py starts this program on each rank through torch.distributed.run, and then once more on
one rank with --saved-by, which loads what the ranks have saved. Rank 0 prints one JSON object per
measurement: {"round", "row", "what", and figures}. Saves are durable, loads are warm: the bytes are
few, and planning is what costs.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ringstow.dcp
import ringstow.distributed
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_ranks import State, ranks, report, settle, timed
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

ROWS, WIDTH = 4, 4  # of each tensor on each rank

Row = tuple[str, Callable[[], object]]


class NullWriter(dcp.StorageWriter):
    """Writes nothing, so that only DCP's own time remains."""

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        return plans

    def write_data(self, plan: Any, planner: Any) -> Any:
        done: torch.futures.Future[list[Any]] = torch.futures.Future()
        done.set_result([])
        return done

    def finish(self, metadata: Any, results: Any) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def sharded(parts: list[Tensor], *, flat: bool) -> State:
    """Return tensors of which each rank has a part: of one model, or all at the top level."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = {
        f"layers.{i // 10}.block.{i % 10}.weight": DTensor.from_local(part, mesh, [Shard(0)])
        for i, part in enumerate(parts)
    }
    return tensors if flat else {"model": tensors}


def paths(directory: Path) -> tuple[Path, Path, Path]:
    """Return where ringstow.dcp, ringstow.distributed and DCP itself save."""
    return directory / "many", directory / "many-own", directory / "many-dcp"


# --- the ranks that save -------------------------------------------------------------------------


def save_rows(state: State, directory: Path, round_: int) -> list[list[Row]]:
    """Return the saves. Those of an inner list belong together: the second reuses a plan."""
    ours, own, theirs = paths(directory)
    save, writer = partial(dcp.save, state), ringstow.dcp.StorageWriter
    # Ours keeps plans for each process group, torch's for each class: these are new.
    known = {"process_group": dist.new_group(backend="gloo")}
    caching = type(f"Caching{round_}", (DefaultSavePlanner,), {})
    planned = partial(save, planner=ringstow.dcp.SavePlanner(), **known)
    cached = partial(save, planner=caching(enable_plan_caching=True))
    return [
        [("no writer", partial(save, storage_writer=NullWriter()))],
        [("ringstow", partial(save, storage_writer=writer(ours)))],
        [
            ("planner first", partial(planned, storage_writer=writer(ours))),
            ("planner later", partial(planned, storage_writer=writer(ours))),
        ],
        [
            ("caching first", partial(cached, storage_writer=writer(ours))),
            ("caching later", partial(cached, storage_writer=writer(ours))),
        ],
        [("distributed", partial(ringstow.distributed.save, state, own))],
        [("dcp", partial(save, storage_writer=dcp.FileSystemWriter(theirs)))],
    ]


def load_rows(state: State, directory: Path) -> list[Row]:
    ours, own, theirs = paths(directory)
    load, reader = partial(dcp.load, state), ringstow.dcp.StorageReader
    planner = ringstow.dcp.LoadPlanner()
    return [
        ("load ringstow", partial(load, storage_reader=reader(ours))),
        ("load planner", partial(load, storage_reader=reader(ours), planner=planner)),
        ("load distributed", partial(ringstow.distributed.load_into, state, own)),
        ("load dcp", partial(load, checkpoint_id=theirs)),
    ]


def measure_saves(args: argparse.Namespace) -> None:
    """Measure saves and loads by the same ranks. The last checkpoints stay."""
    one = torch.full((ROWS, WIDTH), dist.get_rank() + 1.0)
    state = sharded([one] * args.tensors, flat=args.flat)
    for round_ in range(args.rounds):
        rows = save_rows(state, args.dir, round_)
        turn = round_ % len(rows)
        for row, action in itertools.chain(*rows[turn:], *rows[:turn], load_rows(state, args.dir)):
            settle()
            report(round_, row, "planning", tensors=args.tensors, seconds=timed(action))


# --- the process that loads what they saved ------------------------------------------------------


def measure_resharding(args: argparse.Namespace) -> None:
    """Measure loads, by one process, of the checkpoints that --saved-by ranks left here."""
    buffer = torch.zeros(args.tensors, args.saved_by * ROWS, WIDTH)
    saved = torch.arange(1.0, args.saved_by + 1).repeat_interleave(ROWS)[:, None]
    state = sharded(list(buffer.unbind()), flat=args.flat)
    for round_ in range(args.rounds):
        rows = [row for row in load_rows(state, args.dir) if row[0] != "load ringstow"]
        turn = round_ % len(rows)
        for row, action in rows[turn:] + rows[:turn]:
            buffer.zero_()
            settle()
            seconds = timed(action)
            assert torch.equal(buffer, saved.expand_as(buffer)), row
            name = row.replace("load", "reshard")
            report(round_, name, "planning", tensors=args.tensors, seconds=seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tensors", type=int, required=True)
    parser.add_argument("--flat", action="store_true")
    parser.add_argument("--saved-by", type=int, default=0, metavar="RANKS")
    args = parser.parse_args()
    with ranks():
        if args.saved_by:
            measure_resharding(args)
        else:
            measure_saves(args)


if __name__ == "__main__":
    main()
