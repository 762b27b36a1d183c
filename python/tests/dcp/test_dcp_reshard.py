"""A checkpoint of any layout and world size loads bit-identically in any other."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from layouts import EVEN_HIDDEN, HIDDEN, differences, filled, load, save, trained
from torch.distributed.checkpoint.state_dict import get_state_dict

import ringstow.dcp

pytestmark = pytest.mark.torch_seam

WORLDS = [1, 2, 4]


@pytest.mark.parametrize("loaders", WORLDS)
@pytest.mark.parametrize("savers", WORLDS)
def test_any_number_of_ranks_to_any_other(ranks, tmp_path, savers, loaders):
    saved = ranks(savers).run(save, "fsdp2", tmp_path)[0]
    loaded = ranks(loaders).run(load, "fsdp2", tmp_path)[0]
    assert differences(saved, loaded) == []


LAYOUTS = [
    (("fsdp2", 2), ("fsdp1", 2)),
    (("fsdp1", 2), ("fsdp2", 4)),
    (("fsdp1", 4), ("fsdp1", 2)),
    (("fsdp2", 4), ("plain", 2)),
    (("plain", 2), ("fsdp2", 4)),
    (("plain", 2), ("fsdp1", 2)),
    (("hsdp", 4), ("fsdp2", 2)),
    (("fsdp2", 2), ("hsdp", 4)),
    (("tp", 2), ("tp", 4)),
    (("tp", 4), ("fsdp2", 2)),
    (("fsdp2", 4), ("tp", 2)),
    (("fsdp2_tp", 4), ("fsdp2", 2)),
    (("tp", 2), ("fsdp2_tp", 4)),
    (("tp", 2), ("plain", 1)),
]


@pytest.mark.parametrize(("saver", "loader"), LAYOUTS, ids=lambda side: f"{side[0]}-{side[1]}")
def test_any_layout_to_any_other(ranks, tmp_path, saver, loader):
    hidden = EVEN_HIDDEN if "tp" in saver[0] + loader[0] else HIDDEN
    saved = ranks(saver[1]).run(save, saver[0], tmp_path, hidden)[0]
    loaded = ranks(loader[1]).run(load, loader[0], tmp_path, hidden)[0]
    assert differences(saved, loaded) == []


@pytest.mark.parametrize(("layout", "world"), [("fsdp2", 4), ("fsdp1", 2), ("hsdp", 4)])
def test_into_a_model_without_a_process_group(ranks, tmp_path, layout, world):
    saved = ranks(world).run(save, layout, tmp_path)[0]
    model, optimizer = trained("plain", HIDDEN, seed=2)
    parts = get_state_dict(model, optimizer)
    state = {"model": parts[0], "optim": parts[1]}
    dcp.load(state, storage_reader=ringstow.dcp.StorageReader(tmp_path))
    assert differences(saved, filled(model, optimizer, state)) == []


def test_plain_load_puts_shards_together(ranks, tmp_path):
    saved = ranks(4).run(save, "fsdp2", tmp_path)[0]
    loaded = ringstow.load(tmp_path)
    assert loaded["step"] == 7
    assert differences(dict(saved[0]), loaded["model"]) == []


def slice_of(rank, path, world):
    """Load one rank's rows of a large matrix, as one of many ranks would."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import LoadPlan
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    class Planner(dcp.DefaultLoadPlanner):
        def create_local_plan(self):
            rows = self.state_dict["big"].shape[0]
            entry = self.metadata.state_dict_metadata["big"]
            box = ChunkStorageMetadata(torch.Size([rank * rows, 0]), self.state_dict["big"].shape)
            return LoadPlan(create_read_items_for_chunk_list("big", entry, [box]))

        def lookup_tensor(self, index):
            return self.state_dict[index.fqn]

    state = {"big": torch.empty(4096 // world, 1024)}
    reader = ringstow.dcp.StorageReader(path)
    dcp.load(state, storage_reader=reader, planner=Planner(), no_dist=True)
    return state["big"], reader.report


@pytest.mark.parametrize("number", [0, 7, 15])
def test_a_slice_reads_no_more_than_it_needs(tmp_path, number):
    """16 MiB in blocks of 64 KiB; one of 16 row slices is 1 MiB."""
    big = torch.arange(4096 * 1024, dtype=torch.float32).reshape(4096, 1024)
    config = ringstow.Config(block_bytes=64 << 10, pool_bytes=4 << 20)
    state = {"before": torch.ones(1000), "big": big, "after": torch.ones(1000)}
    dcp.save(state, storage_writer=ringstow.dcp.StorageWriter(tmp_path, config), no_dist=True)
    loaded, report = slice_of(number, tmp_path, 16)
    assert torch.equal(loaded, big[number * 256 : (number + 1) * 256])
    assert report.tensor_bytes == 1 << 20
    assert report.read_bytes <= 1.05 * report.tensor_bytes + (64 << 10)
