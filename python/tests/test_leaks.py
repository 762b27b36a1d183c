"""Nothing grows over many saves and loads, failures among them: descriptors, threads, memory.

``RINGSTOW_SEED`` chooses what each round does, ``RINGSTOW_ROUNDS`` how many there are;
``make torture-leaks`` is the long form.
"""

import gc
import os
import pathlib
import random
import time

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import assert_same, flip

import ringstow
import ringstow.dcp
from ringstow.convert import convert

pytestmark = pytest.mark.skipif(
    not pathlib.Path("/proc/self/status").exists(), reason="reads /proc"
)

ROUNDS = int(os.environ.get("RINGSTOW_ROUNDS", "240"))
SEED = int(os.environ.get("RINGSTOW_SEED", "0"))

ELEMENTS = 20_000
CONFIG = ringstow.Config(block_bytes=64 << 10, pool_bytes=1 << 20)
OTHER = ringstow.Config(block_bytes=64 << 10, pool_bytes=2 << 20, files=2)

# What the allocators of Python, torch and C may keep; a round's state has 240 KB.
RESIDENT_SLACK_KB = 24 << 10
MAPPINGS_SLACK = 40
SETTLES_WITHIN_S = 30


class Unreadable:
    """An array whose bytes cannot be read."""

    @property
    def __array_interface__(self):
        raise RuntimeError("a tensor of the caller that fails")


def state(step):
    return {
        "model": {f"w{i}": torch.full((ELEMENTS,), float(step + i)) for i in range(2)},
        "noise": np.full(ELEMENTS, step, dtype=np.int32),
        "step": step,
    }


def save(path, step, config):
    ringstow.save(state(step), path / "saved", config=config)
    assert_same(ringstow.load(path / "saved", config=config), state(step))


def save_in_background(path, step, config):
    ringstow.save_async(state(step), path / "saved", config=config).result()
    into = state(-1)
    ringstow.load_into(into, path / "saved", config=config)
    assert_same(into, state(step))


def drop_handle(path, step, config):
    """Forget a handle; the save ends all the same."""
    ringstow.save_async(state(step), path / "dropped", config=config).wait_staged()
    gc.collect()


def change_meanwhile(path, step, config):
    """Change a tensor while a save may be reading it."""
    changed = state(step)
    handle = ringstow.save_async(changed, path / "torn", config=config)
    changed["model"]["w0"].add_(1)
    try:
        handle.result()
    except ringstow.TornSaveError:
        return
    assert_same(ringstow.load(path / "torn", config=config), state(step))


def refused_state(path, step, config):
    with pytest.raises((ringstow.InvalidStateError, RuntimeError)):
        ringstow.save({**state(step), "odd": Unreadable()}, path / "refused", config=config)


def refused_path(path, step, config):
    (path / "file").write_text("no directory")
    for call in (ringstow.save, lambda *args, **kw: ringstow.save_async(*args, **kw).result()):
        with pytest.raises(OSError, match="file"):
            call(state(step), path / "file" / "below", config=config)


def damaged(path, step, config):
    """Load what is damaged, with and without ``on_corrupt="skip"``."""
    save(path, step, config)
    flip(next((path / "saved").glob("*.safetensors")), -1)
    with pytest.raises(ringstow.CorruptCheckpointError):
        ringstow.load(path / "saved", config=config)
    with pytest.warns(ringstow.CorruptCheckpointWarning):
        assert ringstow.load(path / "saved", on_corrupt="skip", config=config).damaged


def opened(path, step, config):
    """Read parts of an opened checkpoint, and leave another one open to the collector."""
    save(path, step, config)
    opened = ringstow.open(path / "saved", config=config)
    assert opened["model.w1"][3:5].tolist() == [step + 1.0] * 2
    del opened


def checkpointed(path, step, config):
    writer = ringstow.dcp.StorageWriter(path / "dcp", config=config)
    dcp.save({"w": state(step)["model"]["w0"]}, storage_writer=writer, no_dist=True)
    into = {"w": torch.zeros(ELEMENTS)}
    dcp.load(into, storage_reader=ringstow.dcp.StorageReader(path / "dcp"), no_dist=True)
    assert (into["w"] == step).all()


def converted(path, step, config):
    save(path, step, config)
    convert(path / "saved", path / "model.pt", target="torch", overwrite=True)
    assert_same(torch.load(path / "model.pt", weights_only=False), state(step))


DEEDS = [
    *(save, save_in_background, drop_handle, change_meanwhile, refused_state, refused_path),
    *(damaged, opened, checkpointed, converted),
]


def threads():
    """Return the names of the process' threads."""
    tasks = pathlib.Path("/proc/self/task").iterdir()
    return sorted((task / "comm").read_text().strip() for task in tasks)


def usage():
    gc.collect()
    status = pathlib.Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    kb = {name: int(fields[name].split()[0]) for name in ("VmRSS", "VmLck", "VmPin")}
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(threads()),
        "locked": kb["VmLck"] + kb["VmPin"],
        "mappings": len(pathlib.Path("/proc/self/maps").read_text().splitlines()),
        "resident": kb["VmRSS"],
    }


def growth(before):
    """Return what there is more of than before."""
    slack = {"resident": RESIDENT_SLACK_KB, "mappings": MAPPINGS_SLACK}
    now = usage()
    return {
        name: (before[name], now[name])
        for name in now
        if now[name] > before[name] + slack.get(name, 0)
    }


def use_other_pools(path):
    """Let the same pools and engines be the ones that are kept: those that were used last."""
    for mib in (3, 4):
        ringstow.save(
            state(0),
            path / "saved",
            config=ringstow.Config(block_bytes=64 << 10, pool_bytes=mib << 20),
        )


@pytest.mark.timeout(60 + ROUNDS)
def test_nothing_grows_over_saves_loads_and_failures(tmp_path):
    choose = random.Random(SEED)

    def rounds(first, last):
        for step in range(first, last):
            deed = choose.choice(DEEDS)
            deed(tmp_path, step, choose.choice([CONFIG, OTHER]))

    rounds(1, ROUNDS // 2)
    use_other_pools(tmp_path)
    before = usage()
    rounds(ROUNDS // 2, ROUNDS)
    use_other_pools(tmp_path)
    until = time.monotonic() + SETTLES_WITHIN_S
    while (more := growth(before)) and time.monotonic() < until:
        time.sleep(0.1)
    assert more == {}, threads()
    print(
        "promise: descriptors, threads, mappings and memory stay flat in Python programs: "
        f"{ROUNDS} rounds, 0 broken"
    )
