"""Sharded tensors are joined and split by a rename: each rank reads its part of each source."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ringstow
from ringstow import Concat, Split, Stack, Transpose, Unstack, distributed
from ringstow._ranks import _shared_reads

pytestmark = pytest.mark.torch_seam

EXPERTS = {f"e.{n}.w": torch.arange(24.0).reshape(6, 4) + 100 * n for n in range(4)}
FUSED = torch.stack([EXPERTS[f"e.{n}.w"].T for n in range(4)])
GATES = {"q": torch.arange(10.0).reshape(5, 2), "k": torch.arange(6.0).reshape(3, 2) - 9}
STACK = {"e.*.w": Stack(Transpose("e", dims=(1, 2))), ("q", "k"): Concat("qk")}
UNSTACK = {"e": Transpose(Unstack("e.*.w"), dims=(1, 2)), "qk": Split(("q", "k"))}
PLACES = [[Shard(0)], [Shard(1)], [Shard(2)], [Replicate()]]


def sharded(value, places):
    mesh = init_device_mesh("cpu", (2,))
    return distribute_tensor(
        value, mesh, [p if not p.is_shard(2) or value.ndim > 2 else Shard(1) for p in places]
    )


def zeros(state, places):
    return {name: sharded(torch.zeros_like(value), places) for name, value in state.items()}


def check(into, state):
    for name, value in into.items():
        assert isinstance(value, DTensor)
        assert value.full_tensor().equal(state[name]), name


@on_ranks(2)
def test_every_mesh_gets_its_part(rank, tmp_path):
    apart = {**EXPERTS, **GATES}
    whole = {"e": FUSED, "qk": torch.cat([GATES["q"], GATES["k"]])}
    by_rows = {name: sharded(value, [Shard(0)]) for name, value in apart.items()}
    distributed.save(by_rows, tmp_path / "a")
    for number, places in enumerate(PLACES):
        into = zeros(whole, places)
        report = distributed.load_into(into, tmp_path / "a", rename=STACK)
        check(into, whole)
        assert not report.missing
        distributed.save(into, tmp_path / f"f{number}")
        back = zeros(apart, places)
        distributed.load_into(back, tmp_path / f"f{number}", rename=UNSTACK)
        check(back, apart)
    assert distributed.load(tmp_path / "a", rename=STACK)["e"].equal(FUSED)


@on_ranks(2)
def test_ranks_know_which_bytes_a_map_reads(rank, tmp_path):
    found, path = [], tmp_path / "c"
    units_of = _shared_reads._units

    def noted(sizes, unit_bytes, ranges):
        found.extend(ranges)
        return units_of(sizes, unit_bytes, ranges)

    if rank == 0:
        ringstow.save({f"e.{n}.w": torch.full((1 << 19,), float(n)) for n in range(8)}, path)
    torch.distributed.barrier()
    whole = {"e": sharded(torch.zeros(8, 1 << 19), [Shard(0)])}
    with patch.multiple(_shared_reads, _units=noted, _SHARED_BYTES_MIN=0):
        distributed.load_into(whole, path, rename={"e.*.w": Stack("e")})
    assert whole["e"].to_local()[:, 7].tolist() == [4 * rank + n for n in range(4)]
    half = 4 * (1 << 21)
    assert half <= sum(end - begin for _, begin, end in found) <= half + (1 << 20)
