"""torch.distributed.checkpoint on a real GPU, including FSDP2 and NCCL."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from states import blank, every_kind, plain
from support import assert_same
from test_dcp_async import STAGERS, WITH_STAGERS, background
from test_gpu_save import MIB, SECONDS, host, on_gpu

from ringstow.dcp import StorageReader, StorageWriter, _snapshot

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:The function definition for SavePlanner"),
    pytest.mark.filterwarnings("ignore:ShardedTensor"),
]


@pytest.fixture
def writer():
    writer = StorageWriter()
    yield writer
    writer.close()


def moved(value):
    if isinstance(value, torch.Tensor):
        return on_gpu(value)
    if isinstance(value, dict):
        return {key: moved(item) for key, item in value.items()}
    return [moved(item) for item in value] if isinstance(value, list) else value


def back(value):
    if isinstance(value, list):
        return [back(item) for item in value]
    return {k: back(v) for k, v in value.items()} if isinstance(value, dict) else host(value)


def test_every_kind_round_trips(writer, tmp_path):
    expected = plain(every_kind())
    dcp.save(moved(every_kind()), checkpoint_id=tmp_path, storage_writer=writer)
    reader, target = StorageReader(), moved(blank(expected))
    dcp.load(target, checkpoint_id=tmp_path, storage_reader=reader)
    assert_same(back(target), expected)
    assert writer.report.device_bytes > 0
    assert reader.report.device_bytes > 0


@pytest.mark.parametrize("which", WITH_STAGERS)
def test_values_of_the_call_are_saved(which, group, writer, busy, tmp_path):
    tensor = torch.zeros(4 * MIB, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        busy()
        tensor.fill_(1)
        stager, gloo = STAGERS[which](writer), dist.new_group(backend="gloo")
        staging, upload = background(
            {"t": tensor}, tmp_path / "c", writer, stager, process_group=gloo
        )
        if staging is not None:
            staging.result(SECONDS)
        tensor.fill_(2)
    upload.result(SECONDS)
    target = {"t": torch.zeros(4 * MIB, device="cuda")}
    dcp.load(target, checkpoint_id=tmp_path / "c", storage_reader=StorageReader())
    assert_same(host(target), {"t": torch.ones(4 * MIB)})


def test_a_snapshot_larger_than_a_registered_piece(writer):
    numbers = torch.arange(40 * MIB, dtype=torch.int32, device="cuda")
    staged = writer.stage({"first": numbers[:3], "n": numbers})
    assert_same(staged["n"].clone(), numbers.cpu())
    assert writer._snapshot._memory.nbytes > _snapshot._PIN
    assert writer._snapshot._memory.pin(_snapshot._PIN) is None


def test_fsdp_on_one_gpu(group, writer, tmp_path):
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    def trained(seed):
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)]
        model = fully_shard(torch.nn.Sequential(*layers).cuda())
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(16, 256, device="cuda")).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = trained(0)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=tmp_path / "c", storage_writer=writer)

    other, its_optimizer = trained(1)
    into = dict(zip(("model", "optimizer"), get_state_dict(other, its_optimizer), strict=True))
    reader = StorageReader()
    dcp.load(into, checkpoint_id=tmp_path / "c", storage_reader=reader)
    set_state_dict(
        other, its_optimizer, model_state_dict=into["model"], optim_state_dict=into["optimizer"]
    )
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), two.full_tensor())
    assert reader.report.device_bytes > 0


def test_a_load_needs_no_memory_on_the_gpu(growth, writer, tmp_path):
    state = {"t": torch.ones(64 * MIB, device="cuda")}
    held = growth()
    dcp.save(state, checkpoint_id=tmp_path, storage_writer=writer)
    dcp.load(state, checkpoint_id=tmp_path, storage_reader=StorageReader())
    assert growth() - held <= 64 * MIB
