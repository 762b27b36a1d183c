"""Ranks that need the same bytes of a slow disk read them once: by host, or for all of them."""

from __future__ import annotations

import contextlib
import os
import signal

import forked
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from ranks import on_ranks, raised
from support import flip, logged, shards_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ringstow
from ringstow import _native, distributed
from ringstow._ranks import _sent_parts, _shared_reads
from ringstow._ranks._shared_reads import Needs

ROWS = 4096
NBYTES = ROWS * 4096
SLOW, FAST = 1.0, 1e-6


@contextlib.contextmanager
def played(rank, seconds=SLOW, *, a_node=None, rate=1e12):
    """Play nodes of so many ranks, a disk whose sample takes so long, and a network of a rate."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_shared_reads, "_SHARED_BYTES_MIN", 1 << 20)
        sample = None if seconds is None else _shared_reads._Sample(seconds, seconds)
        patch.setattr(_shared_reads, "_sample", lambda *_: sample)
        patch.setattr(_sent_parts, "measured_rate", lambda *_: rate)
        patch.setattr(_sent_parts, "PART_BYTES", 1 << 20)
        patch.setattr(_shared_reads, "_UNIT_BYTES_MIN", 1 << 20)
        if a_node:
            patch.setattr(_shared_reads._native, "boot_id", lambda: f"node {rank // a_node}")
        yield patch


def values():
    return torch.arange(ROWS * 1024.0).reshape(ROWS, 1024)


def saved(rank, path, state=None):
    if rank == 0:
        ringstow.save({"w": values()} if state is None else state, path)
    dist.barrier()


def load(rank, path, seconds, *, places=(), **options):
    """Return the report of a load of one tensor, whole or with these placements."""
    saved(rank, path)
    target = torch.zeros(ROWS, 1024)
    if places:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        target = distribute_tensor(target, mesh, places)
    nodes = {name: options.pop(name) for name in ("a_node", "rate") if name in options}
    with played(rank, seconds, **nodes):
        report = distributed.load_into({"w": target}, path, **options)
    found = target.full_tensor() if places else target
    assert torch.equal(found, values())
    return report


def read(report):
    """Return the bytes that the disk gave all ranks, as multiples of the state."""
    own = report.read_bytes - report.received_bytes - report.cached_bytes
    all_read = [None] * dist.get_world_size()
    dist.all_gather_object(all_read, own)
    return sum(all_read) / NBYTES


@on_ranks(2)
def test_replicated_tensors_of_a_slow_disk(rank, tmp_path):
    assert not load(rank, tmp_path / "a", SLOW).direct
    assert load(rank, tmp_path / "b", FAST).direct
    # One rank that cannot read past the page cache says nothing about the disk.
    assert load(rank, tmp_path / "c", None if rank else SLOW).direct


@on_ranks(2)
def test_ranks_that_need_different_bytes_share_nothing(rank, tmp_path):
    assert load(rank, tmp_path / "a", SLOW, places=[Shard(0)]).direct
    report = load(rank, tmp_path / "b", SLOW, places=[Shard(0)], a_node=1)
    assert report.direct
    assert not report.received_bytes


@pytest.mark.parametrize("places", [(), (Replicate(),), (Shard(1),)])
@on_ranks(4)
def test_each_byte_is_read_once_for_all_nodes(rank, tmp_path, places):
    report = load(rank, tmp_path / "a", SLOW, places=places, a_node=2)
    assert report.received_bytes > NBYTES * 0.6
    assert "from other ranks" in str(report)
    assert read(report) <= 1.05


@on_ranks(4)
def test_a_mix_of_rows_and_replicas(rank, tmp_path):
    state = {"w": values(), "r": values() + 1, "s": torch.tensor(3.0), "n": [1, "a"]}
    saved(rank, tmp_path / "a", state)
    mesh = init_device_mesh("cpu", (4,))
    rows = distribute_tensor(torch.zeros(ROWS, 1024), mesh, [Shard(0)])
    into = {"w": rows, "r": torch.zeros(ROWS, 1024), "s": torch.tensor(0.0), "n": None}
    with played(rank, a_node=2):
        report = distributed.load_into(into, tmp_path / "a")
    assert torch.equal(into["r"], state["r"])
    assert torch.equal(rows.full_tensor(), state["w"])
    assert (into["s"], into["n"]) == (torch.tensor(3.0), [1, "a"])
    # Two ranks read the checksum chunk at the end of their rows; each for itself, all would read 5.
    assert read(report) < 2.4


@on_ranks(4)
def test_what_pays_is_chosen(rank, tmp_path):
    """A fast disk, and a slow network, leave nothing to win."""
    assert not load(rank, tmp_path / "a", FAST, a_node=2).received_bytes
    slow = load(rank, tmp_path / "b", SLOW, a_node=2, rate=1e6)
    assert not slow.received_bytes
    assert not slow.direct  # through the page cache of each node


SETTINGS = {
    "off": (0, True),
    "host": (0, False),
    "group": (NBYTES // 2, True),
}


@pytest.mark.parametrize("share", SETTINGS)
@on_ranks(2)
def test_what_the_caller_says_is_done(rank, tmp_path, share):
    config = ringstow.Config(share_reads=share)
    report = load(rank, tmp_path / "a", None, config=config)
    received, is_direct = SETTINGS[share]
    assert abs(report.received_bytes - received) <= 1 << 20
    assert report.direct is is_direct
    on = ringstow.Config(direct="on", share_reads=share)
    assert load(rank, tmp_path / "b", SLOW, config=on).direct


@on_ranks(4)
def test_off_holds_for_nodes_that_share_no_directory(rank, tmp_path):
    path = tmp_path / f"node{rank // 2}" / "run" / "step-7"
    distributed.save({"w": values()}, path, step=7, nodes=ringstow.Nodes())
    for share, is_direct in (("off", True), ("auto", False)):
        into = {"w": torch.zeros(ROWS, 1024)}
        with played(rank):
            config = ringstow.Config(share_reads=share)
            assert distributed.load_into(into, path, config=config).direct is is_direct
        assert torch.equal(into["w"], values())


@on_ranks(2)
def test_ranks_with_different_settings_are_refused(rank, tmp_path):
    saved(rank, tmp_path / "a")
    config = ringstow.Config(share_reads="group" if rank else "auto")
    target = {"w": torch.zeros(ROWS, 1024)}
    why = raised(lambda: distributed.load_into(target, tmp_path / "a", config=config))
    assert why[0] == "InvalidStateError"
    assert "share_reads" in why[1]


@on_ranks(2)
def test_little_memory_suffices(rank, tmp_path):
    config = ringstow.Config(pool_bytes="2M", block_bytes="256K", share_reads="group")
    report = load(rank, tmp_path / "a", SLOW, config=config)
    assert report.received_bytes > 0


@on_ranks(4)
def test_a_load_that_makes_new_tensors(rank, tmp_path):
    state = {"w": values(), "small": {str(n): torch.full((7,), n) for n in range(50)}}
    mesh = init_device_mesh("cpu", (4,))
    parted = {"p": distribute_tensor(values() + 2, mesh, [Shard(0)])}
    distributed.save(state | parted, tmp_path / "a")
    seen = []
    tell = distributed._load._load.tell
    with played(rank, a_node=2) as patch:
        patch.setattr(distributed._load._load, "tell", lambda one: (seen.append(one), tell(one)))
        found = distributed.load(tmp_path / "a")
        some = distributed.load(tmp_path / "a", prefix="small")
    assert torch.equal(found["w"], state["w"])
    assert torch.equal(found["p"], values() + 2)
    assert some["small"]["49"].tolist() == [49] * 7
    assert read(seen[0]) <= 2 * 1.05


@pytest.mark.parametrize("call", [distributed.load, distributed.load_into])
@on_ranks(4)
def test_damage_is_the_error_of_every_rank_as_if_it_read_alone(rank, tmp_path, call):
    saved(rank, tmp_path / "a")
    if rank == 0:
        (shard,) = shards_of(tmp_path / "a")
        flip(shard, NBYTES // 2)
    dist.barrier()
    whys = []
    for share in ("off", "group"):
        into = [{"w": torch.zeros(ROWS, 1024)}] if call is distributed.load_into else []
        config = ringstow.Config(share_reads=share)
        with played(rank):
            whys.append(raised(lambda: call(*into, tmp_path / "a", config=config)))  # noqa: B023
    assert whys[0] == whys[1]
    assert whys[0][0] == "CorruptCheckpointError"
    assert "rank00000-0.safetensors" in whys[0][1]
    assert '"w"' in whys[0][1]


@on_ranks(3)
def test_a_part_that_its_reader_cannot_read_is_read_by_each(rank, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_sent_parts.Transfer, "_read", second_half_only)
        config = ringstow.Config(share_reads="group")
        for verify in (True, False):
            path = tmp_path / str(verify)
            report = load(rank, path, SLOW, config=config, verify=verify)
            assert 1.5 < read(report) < 2.5


READ = _sent_parts.Transfer._read


def second_half_only(self, one, slot, memory):
    """Read a part, or say that it could not be read."""
    if one.part.begin < NBYTES // 2:
        memory[one.part.end - one.part.begin :][:8] = 0
        return False
    return READ(self, one, slot, memory)


@pytest.mark.parametrize("what", ["_Choice", "Arrivals", "Transfer"])
@on_ranks(3)
def test_what_one_rank_lacks_for_sending_makes_none_send(rank, tmp_path, what):
    def lacks(*_, **__):
        raise MemoryError("no memory") if what == "Arrivals" else RuntimeError("no new thread")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            where = _shared_reads._native if what == "Arrivals" else _shared_reads
            patch.setattr(where, what, lacks)
        config = ringstow.Config(share_reads="group")
        assert not load(rank, tmp_path / "a", SLOW, config=config).received_bytes


@on_ranks(3)
def test_ranks_that_find_a_file_in_another_directory_send_the_same_parts(rank, tmp_path):
    state = {f"w{n}": values() + n for n in range(4)}
    saved(rank, tmp_path / "a")
    config = ringstow.Config(shard_bytes=NBYTES, share_reads="group")
    if rank == 0:
        ringstow.save(state, tmp_path / "b", config=config)
    dist.barrier()
    files_of = _shared_reads._native.files_of

    def elsewhere(checkpoint):
        files = files_of(checkpoint)
        return [(a, f"/tier/{b}" if n == 1 else b, *c) for n, (a, b, *c) in enumerate(files)]

    into = {name: torch.zeros(ROWS, 1024) for name in state}
    with played(rank) as patch:
        if rank == 1:
            patch.setattr(_shared_reads._native, "files_of", elsewhere)
        report = distributed.load_into(into, tmp_path / "b", config=config)
    assert all(torch.equal(into[name], state[name]) for name in state)
    assert report.received_bytes > 2 * NBYTES


@on_ranks(2)
def test_files_without_checksums_are_not_sent(rank, tmp_path):
    if rank == 0:
        safetensors.torch.save_file({"w": values()}, tmp_path / "model.safetensors")
    dist.barrier()
    into = {"w": torch.zeros(ROWS, 1024)}
    config = ringstow.Config(share_reads="group")
    with played(rank, a_node=1), logged() as told:
        report = distributed.load_into(into, tmp_path / "model.safetensors", config=config)
    assert torch.equal(into["w"], values())
    assert not report.received_bytes
    assert "have no checksums" in "".join(told)


@pytest.mark.parametrize("call", [distributed.load, distributed.load_into])
@on_ranks(2)
def test_ctrl_c_on_a_rank_that_waits_for_the_others_ends_the_load_of_all(rank, tmp_path, call):
    saved(rank, tmp_path / "a")
    join = _sent_parts.Transfer._join

    def interrupted(self):
        join(self)
        raise KeyboardInterrupt

    into = [{"w": torch.zeros(ROWS, 1024)}] if call is distributed.load_into else []
    config = ringstow.Config(share_reads="group")
    with played(rank) as patch:
        if rank == 1:
            patch.setattr(_sent_parts.Transfer, "_join", interrupted)
        why = raised(lambda: call(*into, tmp_path / "a", config=config))
    assert why[0] == ("KeyboardInterrupt" if rank == 1 else "Error")


@pytest.mark.parametrize("when", ["before", "after"])
@on_ranks(3)
def test_a_rank_that_fails_is_the_error_of_all(rank, tmp_path, when):
    saved(rank, tmp_path / "a")

    def fails(*_, **__):
        raise OSError(5, "Input/output error")

    config = ringstow.Config(share_reads="group")
    into = {"w": torch.zeros(ROWS, 1024)}
    with played(rank) as patch:
        if rank == 1 and when == "before":
            patch.setattr(distributed._load._load, "_opened", fails)
        elif rank == 1:
            patch.setattr(distributed._load._load_into._torch, "mark_changed", fails)
        call = distributed.load if when == "before" else distributed.load_into
        given = [] if when == "before" else [into]
        why = raised(lambda: call(*given, tmp_path / "a", config=config))
    assert why[0] == ("OSError" if rank == 1 else "Error")
    assert rank == 1 or "rank 1" in why[1]
    assert load(rank, tmp_path / "b", SLOW, config=config).received_bytes


@on_ranks(2)
def test_sending_ends_if_it_takes_longer_than_the_disk(rank, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_sent_parts, "STRETCH", 2)
        patch.setattr(_shared_reads, "_GAIN", 1e9)  # as if it had been measured otherwise
        assert load(rank, tmp_path / "a", SLOW, a_node=1).received_bytes > NBYTES // 3
        assert load(rank, tmp_path / "b", 1e-9, a_node=1).received_bytes < NBYTES // 3


@on_ranks(2)
def test_a_manager_restores_by_its_settings(rank, tmp_path):
    config = ringstow.Config(share_reads="group")
    seen = []
    with ringstow.CheckpointManager(tmp_path, config=config) as manager, played(rank) as patch:
        manager.save(3, {"w": values()})
        patch.setattr(distributed._load._load, "tell", seen.append)
        into = {"w": torch.zeros(ROWS, 1024)}
        manager.restore(into=into)
    assert torch.equal(into["w"], values())
    assert seen[0].received_bytes > NBYTES // 3


@on_ranks(2)
def test_a_sample_of_a_real_disk_is_taken(rank, tmp_path):
    saved(rank, tmp_path / "a", {"w": torch.randn(4 << 20)})
    shard = tmp_path / "a/rank00000-0.safetensors"
    sample = _shared_reads._sample(shard.stat().st_size, str(shard), rank)
    assert sample is not None
    assert 0 < sample.seconds <= sample.steady_s

    def fails(*_):
        raise OSError(5, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.preadv", fails)
        assert _shared_reads._sample(shard.stat().st_size, str(shard), rank) is None
    assert _shared_reads._sample(1 << 30, str(tmp_path), rank) is None


@on_ranks(3)
def test_the_group_is_measured(rank):
    group = distributed._load.group_of(None)
    assert 0 < _sent_parts.measured_rate(group, 1 << 20) < float("inf")


def test_readers_and_receivers_take_turns():
    parts = [_sent_parts.Part(0, n, n + 1, (0, 1, 2, 3)) for n in range(8)]
    hosts = ["a", "a", "b", "b"]
    own = [_sent_parts.own_parts(parts, hosts, rank) for rank in range(4)]
    for number in range(8):
        reader = number % 4
        came = {rank: own[rank][number].source for rank in range(4)}
        sent = {(rank, to) for rank in range(4) for to in own[rank][number].to}
        assert came[reader] == reader
        assert sent == {(of, rank) for rank, of in came.items() if rank != reader}
        between = [(of, to) for of, to in sent if hosts[of] != hosts[to]]
        assert len(between) == 1  # the other node gets it once


def test_only_ranks_of_one_host_count():
    whole, half = bytes([255] * 4), bytes([255, 255, 0, 0])
    assert shared("a", ("a", whole), ("a", whole), ("b", whole)) == 2
    assert shared("b", ("a", whole), ("a", whole), ("b", whole)) == 1
    assert shared(None, ("a", whole), ("a", whole), ("b", whole)) == 3
    assert shared("a", ("a", half), ("a", half[::-1])) == 1
    assert shared("a", *[("a", whole)] * 3, unit_bytes=1) == 0


def test_slices_of_one_unit_are_not_the_same_bytes():
    assert shared("a", *[("a", bytes([64] * 8))] * 4) == pytest.approx(1, abs=0.01)


def test_ranks_of_a_host_have_the_cores_that_they_may_use_together():
    def cores(*ranks):
        return _shared_reads._cores([Needs("a", (), 1, (), 0, *one) for one in ranks], "a")

    assert cores((0b1111, 4), (0b1111, 4)) == 4
    assert cores((0b0011, 2), (0b1100, 2)) == 4  # each bound to its own
    assert cores((0b1111, 2), (0b1111, 2)) == 2  # a container's share of their time
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(own)})
    try:
        assert _native.cores() == 1
    finally:
        os.sched_setaffinity(0, own)


def shared(host, *needs, unit_bytes=1 << 30):
    """Return how many ranks need each byte, of ranks with these hosts and needs."""
    choice = object.__new__(_shared_reads._Choice)
    every = [Needs(where, (units,), unit_bytes, (0,), 1 << 20, 1, 1) for where, units in needs]
    choice._hosts = [one.host for one in every]
    choice._unit_bytes = unit_bytes
    choice._units = torch.stack([_shared_reads._summed(one, len(one.units[0])) for one in every])
    return choice._shared(host)


DIES = """
import os, signal, sys
import torch
import torch.distributed as dist
import ringstow
from ringstow._ranks import _sent_parts

path, rank = sys.argv[1], int(os.environ["RANK"])
dist.init_process_group("gloo")
into = {"w": torch.zeros(4096, 1024)}
finish, parts = _sent_parts.Transfer._finish, []

def dies(*args):
    parts.append(args)
    if rank == 1 and len(parts) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return finish(*args)

_sent_parts.PART_BYTES = 1 << 20
_sent_parts.Transfer._finish = dies
ringstow.distributed.load_into(into, path, config=ringstow.Config(share_reads="group"))
"""


def test_a_rank_that_dies_ends_the_load_of_the_others(tmp_path):
    ringstow.save({"w": values()}, tmp_path / "a")
    ended = forked.on_ranks(3, DIES, str(tmp_path / "a"))
    assert ended[1].returncode == -signal.SIGKILL
    for other in (0, 2):
        assert ended[other].returncode == 1
        assert "another rank has ended, or cannot be reached" in ended[other].stderr
