"""Sharded tensors are joined and split by a rename: each rank reads its part of each source."""

from __future__ import annotations

import pytest
import torch
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


def round_trips(rank, path):
    apart = {**EXPERTS, **GATES}
    whole = {"e": FUSED, "qk": torch.cat([GATES["q"], GATES["k"]])}
    distributed.save(
        {name: sharded(value, [Shard(0)]) for name, value in apart.items()}, path / "a"
    )
    for number, places in enumerate(PLACES):
        into = zeros(whole, places)
        report = distributed.load_into(into, path / "a", rename=STACK)
        check(into, whole)
        assert not report.missing
        distributed.save(into, path / f"f{number}")
        back = zeros(apart, places)
        distributed.load_into(back, path / f"f{number}", rename=UNSTACK)
        check(back, apart)
    loaded = distributed.load(path / "a", rename=STACK)
    assert loaded["e"].equal(FUSED)


def plans(rank, path):
    """Return what a rank is about to read, as its share of the file."""
    _shared_reads._SHARED_BYTES_MIN = 0
    found = []
    units_of = _shared_reads._units

    def units(sizes, unit_bytes, ranges):
        found.extend(ranges)
        return units_of(sizes, unit_bytes, ranges)

    _shared_reads._units = units
    if not rank:
        ringstow.save({f"e.{n}.w": torch.full((1 << 19,), float(n)) for n in range(8)}, path)
    torch.distributed.barrier()
    whole = {"e": sharded(torch.zeros(8, 1 << 19), [Shard(0)])}
    try:
        distributed.load_into(whole, path, rename={"e.*.w": Stack("e")})
    finally:
        _shared_reads._units = units_of
    assert whole["e"].to_local()[:, 7].tolist() == [4 * rank + n for n in range(4)]
    return sum(end - begin for _, begin, end in found)


def test_ranks_know_which_bytes_a_map_reads(ranks, tmp_path):
    half = 4 * (1 << 21)
    assert all(half <= nbytes <= half + (1 << 20) for nbytes in ranks(2).run(plans, tmp_path / "c"))


def test_every_mesh_gets_its_part(ranks, tmp_path):
    ranks(2).run(round_trips, tmp_path)
