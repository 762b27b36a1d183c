"""Rank checkpoints of sharded tensors: each rank has its own shards, and only those."""

from __future__ import annotations

import json
from unittest.mock import patch

import layouts
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from layouts import EVEN_HIDDEN, HIDDEN, differences, trained
from ranks import on_ranks
from support import manifest_of
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch_has import needs_use_collectives

import ringstow
from ringstow import _native, convert
from ringstow.dcp import StorageReader
from ringstow.dcp._metadata import Contents, Entry

pytestmark = pytest.mark.torch_seam

pytestmark = needs_use_collectives

# With 5 rows, four ranks have 2, 2, 1 and 0 rows.
FEW = 5
WEIGHT = "model.first.weight"


def save(rank, layout, path, hidden=HIDDEN):
    return layouts.save(rank, layout, path, hidden, use_collectives=False)


def held(path, rank, name=WEIGHT):
    """Return the shapes of a tensor's chunks in a rank checkpoint."""
    tensors = manifest_of(path / f"rank{rank:05}")["tensors"]
    return [
        chunk.get("sizes", tensor["shape"])
        for tensor in tensors
        if tensor["name"] == name
        for chunk in tensor["chunks"]
    ]


@pytest.mark.parametrize(
    ("layout", "world", "hidden"),
    [
        ("fsdp2", 2, HIDDEN),
        ("fsdp2", 4, FEW),
        ("hsdp", 4, HIDDEN),
        ("fsdp1", 2, EVEN_HIDDEN),
        ("fsdp1", 4, FEW),
        ("tp", 2, EVEN_HIDDEN),
    ],
)
def test_the_same_ranks_load_their_own_shards(ranks, tmp_path, layout, world, hidden):
    saved = ranks(world).run(save, layout, tmp_path, hidden)[0]
    loaded = ranks(world).run(layouts.load, layout, tmp_path, hidden)[0]
    assert differences(saved, loaded) == []
    assert ringstow.latest(tmp_path).path == str(tmp_path)
    for rank in range(world):
        assert all(sizes[0] < hidden for sizes in held(tmp_path, rank)), "its own rows only"


def test_rank_without_elements_of_a_tensor_records_it(ranks, tmp_path):
    ranks(4).run(save, "fsdp2", tmp_path, FEW)
    assert [held(tmp_path, rank)[0][0] for rank in range(4)] == [2, 2, 1, 0]
    assert held(tmp_path, 3, "model.calls") == [[]]


def refusals(rank, layout, path, hidden=HIDDEN):
    """Load into another layout; return each rank's error, and True if nothing has changed."""
    model, optimizer = trained(layout, hidden, seed=2)
    parts = get_state_dict(model, optimizer)
    state = {"model": parts[0], "optim": parts[1], "step": 0}
    before = layouts.whole(model, optimizer)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=StorageReader(path))
    assert differences(before, layouts.whole(model, optimizer)) == []
    errors = {rank: error for rank, (error, _) in caught.value.failures.items()}
    return {rank: (type(error).__name__, str(error)) for rank, error in errors.items()}


@pytest.mark.parametrize(("layout", "world"), [("plain", 2), ("tp", 2), ("plain", 1)])
def test_another_layout_or_fewer_ranks_are_refused_by_name(ranks, tmp_path, layout, world):
    ranks(2).run(save, "fsdp2", tmp_path, EVEN_HIDDEN)
    for by_rank in ranks(world).run(refusals, layout, tmp_path, EVEN_HIDDEN):
        assert set(by_rank) == set(range(world))
        for rank, (kind, text) in by_rank.items():
            assert kind == "MissingShareError"
            whole = EVEN_HIDDEN * layouts.INPUT * 4
            # One matrix is sharded by columns there, the other partially.
            name = "model.second.weight" if layout == "tp" else WEIGHT
            assert f'bytes of "{name}"' in text
            assert f"it is rank {rank}'s share of what 2 ranks saved each by itself" in text
            assert "load it with dcp.load on 2 ranks" in text
            if layout == "plain":
                assert f'only {whole // 2} of {whole} bytes of "{WEIGHT}"' in text


def part(ranks, path):
    ranks(2).run(save, "fsdp2", path)
    return path / "rank00000"


SAID = r'rank 0\'s share of what 2 ranks saved .* bytes of "model\.first\.weight".* dcp\.load on 2'


def test_one_part_loads_the_tensors_it_holds_whole(ranks, tmp_path):
    path = part(ranks, tmp_path)
    loaded = ringstow.load(path, keys=["model.calls", "step"], allow_pickle=True)
    assert loaded["model"]["calls"].item() == 3
    assert loaded["step"] == 7
    with pytest.raises(ringstow.IncompleteCheckpointError, match=SAID) as caught:
        ringstow.load(path, allow_pickle=True)
    assert caught.value.path == str(path)
    with pytest.raises(ringstow.IncompleteCheckpointError, match=SAID):
        ringstow.load(path, keys=[WEIGHT])
    assert not ringstow.verify(path).damage


@pytest.mark.parametrize("contiguous", [True, False])
def test_existing_memory_is_not_changed(ranks, tmp_path, contiguous):
    path = part(ranks, tmp_path)
    weight = torch.full((layouts.INPUT, HIDDEN), 5.0).T
    state = {"model": {"first.weight": weight.contiguous() if contiguous else weight}}
    state["model"]["calls"] = torch.tensor(0)
    with pytest.raises(ringstow.IncompleteCheckpointError, match=SAID):
        ringstow.load_into(state, path, strict=False)
    assert state["model"]["calls"].item() == 0
    assert bool((state["model"]["first.weight"] == 5).all())


def test_converting_one_part_is_refused(ranks, tmp_path):
    path = part(ranks, tmp_path / "step-1")
    with pytest.raises(ringstow.IncompleteCheckpointError, match=SAID):
        convert.convert(path, tmp_path / "model.pt", target="torch", allow_pickle=True)
    assert [found.name for found in tmp_path.iterdir()] == ["step-1"]


def test_dcp_load_of_a_share_leaves_other_memory_alone(ranks, tmp_path):
    path = part(ranks, tmp_path)
    state = {"model": {"first.weight": torch.full((HIDDEN, layouts.INPUT), 5.0)}}
    with pytest.raises(CheckpointException, match=SAID):
        dcp.load(state, storage_reader=StorageReader(path), no_dist=True)
    assert bool((state["model"]["first.weight"] == 5).all())
    state = {"model": {"calls": torch.tensor(0)}}
    dcp.load(state, storage_reader=StorageReader(path), no_dist=True)
    assert state["model"]["calls"].item() == 3


def test_show_lists_the_rank_share(ranks, tmp_path, capfd):
    path = part(ranks, tmp_path)
    capfd.readouterr()
    assert _native.cli(["ringstow", "show", str(path)]) == 0
    out = capfd.readouterr().out
    assert "what 2 ranks saved each by itself: rank 0's" in out
    assert "168 B of 312 B" in out
    assert _native.cli(["ringstow", "show", str(path), "--json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert (shown["part_of"]["rank"], shown["part_of"]["ranks"]) == (0, 2)
    by_name = {tensor["name"]: tensor for tensor in shown["tensors"]}
    assert (by_name[WEIGHT]["held_bytes"], by_name[WEIGHT]["bytes"]) == (168, 312)
    assert "held_bytes" not in by_name["model.calls"]


@on_ranks(2)
def test_shards_are_refused_without_a_store(rank, tmp_path):
    with (
        patch.object(dist.distributed_c10d, "_get_default_store", lambda: None),
        pytest.raises(ringstow.InvalidStateError) as caught,
    ):
        save(rank, "fsdp2", tmp_path / "step-1")
    for said in (
        f"sharded tensors ({3 * 4}): {WEIGHT}",
        "use_collectives=False",
        "with collectives",
    ):
        assert said in str(caught.value)


def test_regions_beyond_a_rank_share_are_detected():
    chunks, holes = [((2, 0), (2, 6))], [([0, 0], [2, 6]), ([4, 0], [1, 6])]
    entry = Entry("w", "F32", (5, 6), False, chunks, holes)
    contents = Contents.of("/ckpt", [tuple(entry)], None)
    stored = contents.metadata().state_dict_metadata["w"].chunks
    stored = [(list(c.offsets), list(c.sizes)) for c in stored]
    assert stored == [([2, 0], [2, 6]), ([0, 0], [2, 6]), ([4, 0], [1, 6])]

    def item(offset, begin, lengths):
        index = MetadataIndex("w", torch.Size(offset))
        origin = torch.Size([0] * len(lengths))
        return ReadItem(
            LoadItemType.TENSOR, index, origin, index, torch.Size(begin), torch.Size(lengths)
        )

    assert not entry.lacks(item((2, 0), (1, 2), (1, 4)))
    assert entry.lacks(item((2, 0), (1, 0), (2, 6)))
    assert entry.lacks(item((0, 0), (0, 0), (2, 6)))


def test_4_bit_hole_is_rounded_up_to_pairs():
    entry = Entry("w", "F4", (1, 10), False, [((0, 0), (1, 3))], [([0, 3], [1, 7])])
    contents = Contents.of("/ckpt", [tuple(entry)], None)
    try:
        hole = contents.metadata().state_dict_metadata["w"].chunks[-1]
    except KeyError:
        pytest.skip("torch without 4-bit floats")
    assert (list(hole.offsets), list(hole.sizes)) == ([0, 1], [1, 4])
