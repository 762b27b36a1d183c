"""Cut a file system's power during conversions and DCP saves, for ``test_power_cut.py``.

``unshare --mount python power_cuts.py CUT_DISK ext4|xfs|btrfs CUTS SEED OUTSIDE``. Each operation
runs in a forked child, which has torch imported already and keeps no file open.
"""

from __future__ import annotations

import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import ringstow
import ringstow.dcp
from ringstow.convert import convert

NAMES = [f"w{i}" for i in range(4)]
ELEMENTS = 50_000
RANKS = 2

# The maximum size of a model's file, small enough for several files.
SMALL = ringstow.Config(block_bytes=64 << 10, pool_bytes=1 << 20, shard_bytes=300_000)


def state(step):
    """Return the state of a step; every element identifies the step."""
    return {name: torch.full((ELEMENTS,), float(step + i)) for i, name in enumerate(NAMES)}


def step_of(found):
    """Return the step of a state after checking every element."""
    step = int(found["w0"][0])
    assert set(found) == set(NAMES)
    for name, tensor in state(step).items():
        assert torch.equal(found[name], tensor), f"{name} is not of step {step}"
    return step


# Operations: each writes a step to a path.


def converts(source, target):
    """Return a conversion from one kind of checkpoint to another that overwrites an earlier one."""

    def operation(step, path, outside):
        of = outside / f"{source}-{step}"
        if not os.path.lexists(of):
            ringstow.save(state(step), outside / "saved")
            convert(outside / "saved", of, target=source, overwrite=True, verify=False)
        convert(of, path, target=target, overwrite=True, verify=False, config=SMALL)

    return operation


def saves(step, path, outside):
    """Save with DCP over an earlier checkpoint."""
    writer = ringstow.dcp.StorageWriter(path, config=SMALL)
    dcp.save(state(step), storage_writer=writer, no_dist=True)


def saves_in_background(step, path, outside):
    """Save with DCP in the background."""
    in_one_process(outside)
    writer = ringstow.dcp.StorageWriter(path, config=SMALL)
    dcp.async_save(state(step), storage_writer=writer).result()


def saves_by_ranks(step, path, outside):
    """Save with DCP on two ranks, each with some of the tensors."""
    store = tempfile.mktemp(dir=outside)
    in_children(RANKS, lambda rank: save_a_rank(rank, step, path, store))


def save_a_rank(rank, step, path, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    share = {
        name: tensor for i, (name, tensor) in enumerate(state(step).items()) if i % RANKS == rank
    }
    dcp.save(share, storage_writer=ringstow.dcp.StorageWriter(path, config=SMALL))


def in_one_process(outside):
    store = tempfile.mktemp(dir=outside)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)


OPERATIONS = {
    "torch-to-ringstow": converts("torch", "ringstow"),
    "dcp-to-ringstow": converts("dcp", "ringstow"),
    "hf-to-ringstow": converts("hf", "ringstow"),
    "ringstow-to-torch": converts("ringstow", "torch"),
    "ringstow-to-dcp": converts("ringstow", "dcp"),
    "ringstow-to-hf": converts("ringstow", "hf"),
    "dcp-save": saves,
    "dcp-async-save": saves_in_background,
    "dcp-save-by-ranks": saves_by_ranks,
}


def load(path, outside):
    """Return the state at a path; None if there is no complete checkpoint."""
    if not os.path.lexists(path):
        return None
    try:
        convert(path, outside / "looked", target="ringstow", overwrite=True)
    except (ringstow.NoCheckpointError, ringstow.NotCommittedError):
        return None
    except ringstow.MissingFilesError:
        # A committed checkpoint has its files. A model is committed once its index has its name.
        if "model.safetensors.index.json.part" in os.listdir(path):
            return None
        raise
    except ringstow.InvalidStateError as error:
        if "is not a checkpoint of a known kind" in str(error):
            return None
        raise
    return ringstow.load(outside / "looked")


def left_over(path):
    """Clean up, then return the files in or beside a checkpoint that do not belong to it."""
    if os.path.isdir(path):
        assert not ringstow.prune(path.parent).left
    known = re.compile(r"c|fresh-\d+")  # the power cut may undo a removal
    beside = [name for name in os.listdir(path.parent) if not known.fullmatch(name)]
    inside = (
        [entry.name for entry in path.iterdir() if entry.name.endswith(".part")]
        if path.is_dir()
        else []
    )
    return beside + inside


# Processes.


def in_children(count, work):
    """Run a function in forked children, each with its number; raise if one of them failed."""
    children = []
    for number in range(count):
        child = os.fork()
        if child == 0:
            end(work, number)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        raise RuntimeError(f"children ended with {codes}")


def end(work, *args):
    """Run a function and exit with 0, or with 1 after an exception."""
    try:
        work(*args)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def start(work, *args):
    """Start a function in a forked child; return a function that waits for code and messages."""
    log = tempfile.TemporaryFile()  # noqa: SIM115
    child = os.fork()
    if child == 0:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        end(work, *args)

    def wait():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        log.seek(0)
        return code, log.read().decode(errors="replace")

    return wait


def look(path, outside, allowed):
    """Assert that a path holds one of the allowed steps, byte for byte; None means no step."""
    found = load(path, outside)
    step = None if found is None else step_of(found)
    assert step in allowed, f"step {step} is there, not one of {allowed}"
    print(f"found {step or 0}")


class Disk:
    """A file system on a disk whose power can be cut."""

    def __init__(self, program, kind, seed):
        command = [program, kind, str(seed)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, **pipes)
        answer = self._answer()
        if not answer or answer.startswith("error:"):
            sys.exit(f"no rig: {answer}")
        self.path = pathlib.Path(answer)

    def _answer(self):
        return self._process.stdout.readline().strip()

    def tell(self, word):
        """Cut or restore the power. A disk that can't be mounted afterwards is a broken promise."""
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        assert answer == "done", f"after {word}: {answer}"

    def close(self):
        self._process.stdin.close()
        self._process.wait()


def must(outcome, what):
    code, said = outcome
    assert code == 0, f"{what}: {said}"
    return said


def sync(folder):
    """Makes what is in a folder durable. Other file systems may hang: they are left alone."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def cut_and_check(disk, outside, cuts, seed):
    chance = random.Random(seed)
    steps, usual, within = dict.fromkeys(OPERATIONS, 0), {}, 0
    for cut in range(cuts):
        name = list(OPERATIONS)[cut % len(OPERATIONS)]
        operation, folder = OPERATIONS[name], disk.path / name
        if not folder.exists():
            folder.mkdir()
            sync(disk.path)
        if not steps[name]:
            began = time.monotonic()
            for step in (1, 2):
                must(start(operation, step, folder / "c", outside)(), name)
            usual[name], steps[name] = (time.monotonic() - began) / 2, 2
        last = steps[name]
        steps[name] += 2
        fresh = chance.random() < 0.3
        path, before = (folder / f"fresh-{cut}", None) if fresh else (folder / "c", last)
        running = start(operation, last + 1, path, outside)
        time.sleep(chance.random() * 1.1 * usual[name])  # the random moment of the cut
        disk.tell("cut")
        code, said = running()
        disk.tell("restore")
        # The operation may have ended just before the cut.
        allowed = [last + 1] if code == 0 else [before, last + 1]
        within += code != 0
        what = f"cut {cut} of seed {seed} in {name} to {path}, ended with {code}: {said}\nthen"
        must(start(look, path, outside, allowed)(), what)
        began = time.monotonic()
        must(start(operation, last + 2, path, outside)(), f"{what} it fails")
        usual[name] = (usual[name] + time.monotonic() - began) / 2
        must(start(look, path, outside, [last + 2])(), what)
        left = left_over(path)
        if fresh:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            steps[name] = last
        assert not left, f"{what}: {left} is left"
    print(f"{cuts} cuts, {within} of them within an operation, seed {seed}")


def main():
    program, kind, cuts, seed, outside = sys.argv[1:]
    disk = Disk(program, kind, seed)
    try:
        cut_and_check(disk, pathlib.Path(outside), int(cuts), int(seed))
    finally:
        disk.close()


if __name__ == "__main__":
    main()
