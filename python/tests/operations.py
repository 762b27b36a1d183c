"""What programs do to a checkpoint, for tests that cut the power or make each call fail.

An operation is called with a step, a path, a directory for what is not under test, and a function
that it calls in each process before what is under test begins. It leaves the step's state at the
path, and replaces an earlier one. Each runs in a forked child.
"""

import itertools
import os
import re
import sys
import tempfile
import traceback

import torch
import torch._dynamo  # distribute_tensor imports it, for two seconds in each child
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ringstow
import ringstow.dcp
from ringstow.convert import convert

NAMES = [f"w{i}" for i in range(4)]
ELEMENTS = 5_000
RANKS = 2
KINDS = ["ringstow", "dcp", "torch", "hf"]

# The maximum size of a model's file, small enough for several files.
SMALL = ringstow.Config(block_bytes=16 << 10, pool_bytes=128 << 10, shard_bytes=30_000)


def state(step):
    """Return the state of a step; every element identifies the step."""
    return {name: torch.full((ELEMENTS,), float(step + i)) for i, name in enumerate(NAMES)}


def step_of(found):
    """Return the step of a state after checking every element."""
    step = int(found["w0"].view(-1)[0])
    assert set(found) == set(NAMES)
    for name, tensor in state(step).items():
        assert torch.equal(found[name].view(-1), tensor), f"MIXED: {name} is not of step {step}"
    return step


def source_of(kind, step, outside):
    """Return a checkpoint of a kind and step to convert from."""
    path = outside / f"{kind}-{step}"
    if not os.path.lexists(path):
        part, saved = outside / "source", outside / "saved"
        ringstow.save(state(step), saved)
        to_hf = {"max_shard_size": SMALL.shard_bytes}
        convert(saved, part, target=kind, overwrite=True, verify=False, config=SMALL, **to_hf)
        os.rename(part, path)
    return path


def converts(source, target):
    """Return a conversion from one kind of checkpoint to another."""

    def operation(step, path, outside, begins):
        of = source_of(source, step, outside)
        overwrite = load(path, outside) is not None
        to_hf = {"max_shard_size": SMALL.shard_bytes}
        begins()
        convert(of, path, target=target, overwrite=overwrite, config=SMALL, **to_hf)

    return operation


def saves(step, path, outside, begins):
    begins()
    ringstow.save(state(step), path, config=SMALL)


def saves_in_background(step, path, outside, begins):
    begins()
    ringstow.save_async(state(step), path, config=SMALL).result()


def promotes(step, path, outside, begins):
    """Copy a checkpoint from another disk."""
    source = outside / "promoted"
    # Anew, since it replaces older ones alone; in a child, since ``begins`` comes before all else.
    in_children(1, lambda _: ringstow.save(state(step), source, config=SMALL))
    begins()
    ringstow.promote(source, path, replace_older=True, config=SMALL)


def saves_with_dcp(step, path, outside, begins):
    join(0, 1, tempfile.mktemp(dir=outside))
    begins()
    dcp.save(state(step), storage_writer=ringstow.dcp.StorageWriter(path, config=SMALL))


def saves_with_dcp_in_background(step, path, outside, begins):
    join(0, 1, tempfile.mktemp(dir=outside))
    begins()
    writer = ringstow.dcp.StorageWriter(path, config=SMALL)
    dcp.async_save(state(step), storage_writer=writer).result()


def saves_by_ranks(number):
    """Return a save with DCP on two ranks; calls ``begins`` on the one with this number."""

    def operation(step, path, outside, begins):
        store = tempfile.mktemp(dir=outside)
        in_children(RANKS, lambda rank: save(rank, store, step, path, begins))

    def save(rank, store, step, path, begins):
        join(rank, RANKS, store)
        share = {n: t for i, (n, t) in enumerate(state(step).items()) if i % RANKS == rank}
        if rank == number:
            begins()
        dcp.save(share, storage_writer=ringstow.dcp.StorageWriter(path, config=SMALL))

    return operation


def exports_by_ranks(number):
    """Return an export of sharded tensors by two ranks; calls ``begins`` on the one of this number.

    The second half of the tensors is sharded along the inner dimension: the ranks exchange them.
    """

    def operation(step, path, outside, begins):
        store = tempfile.mktemp(dir=outside)
        overwrite = load(path, outside) is not None
        in_children(RANKS, lambda rank: export(rank, store, step, path, overwrite, begins))

    def export(rank, store, step, path, overwrite, begins):
        join(rank, RANKS, store)
        mesh = init_device_mesh("cpu", (RANKS,))
        shards = {
            name: distribute_tensor(tensor.view(-1, 50), mesh, [Shard(n // 2)], src_data_rank=None)
            for n, (name, tensor) in enumerate(state(step).items())
        }
        if rank == number:
            begins()
        ringstow.dcp.export_hf(
            shards, path, max_shard_size=SMALL.shard_bytes, overwrite=overwrite, config=SMALL
        )

    return operation


def join(rank, ranks, store):
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)


OPERATIONS = {
    f"{source}-to-{target}": converts(source, target)
    for source, target in itertools.permutations(KINDS, 2)
} | {
    "save": saves,
    "save-async": saves_in_background,
    "promote": promotes,
    "dcp-save": saves_with_dcp,
    "dcp-async-save": saves_with_dcp_in_background,
    "dcp-save-by-ranks": saves_by_ranks(0),
    "dcp-save-by-ranks-1": saves_by_ranks(1),
    "hf-export-by-ranks": exports_by_ranks(0),
    "hf-export-by-ranks-1": exports_by_ranks(1),
}


def load(path, outside):
    """Return the state at a path; None if there is no complete checkpoint."""
    if not os.path.lexists(path):
        return None
    looked = outside / "looked"
    try:
        convert(path, looked, target="ringstow", overwrite=True, verify=False)
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
    return ringstow.load(looked)


def look(path, outside, allowed):
    """Assert that a path holds one of the allowed steps, byte for byte; None means no step."""
    found = load(path, outside)
    step = None if found is None else step_of(found)
    assert step in allowed, f"step {step} is there, not one of {allowed}"
    return step


def left_over(path):
    """Clean up, then return the files in or beside a checkpoint that do not belong to it."""
    if os.path.isdir(path):
        assert not ringstow.prune(path.parent).left
    beside = os.listdir(path.parent)
    # A power cut may undo the removal of other paths, and of what was beside these.
    known = re.compile(rf"{path.name}|(?!{path.name}\.)(c|fresh-\d+)(\..+)?")
    left = [name for name in beside if not known.fullmatch(name)]
    if path.is_dir():
        left += [name for name in os.listdir(path) if ".part" in name or ".tmp" in name]
    return left


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
        raise RanksError(codes)


class RanksError(Exception):
    """Forked children ended with these codes."""

    @property
    def codes(self):
        return self.args[0]


REFUSED, KILLED = 3, 4


def end(work, *args):
    """Run a function and exit with 0, or after an exception with `code_of` it."""
    try:
        work(*args)
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(code_of(error))
    os._exit(0)


def code_of(error):
    """Return `REFUSED` for an error that a caller is to expect, and 1 for any other."""
    failures = getattr(error, "failures", None)  # of the ranks of a DCP save
    if isinstance(failures, dict):
        return min(code_of(one) for one, _ in failures.values())
    if isinstance(error, RanksError):
        if any(code < 0 for code in error.codes):
            return KILLED
        return REFUSED if set(error.codes) <= {0, REFUSED} else 1
    return REFUSED if isinstance(error, (OSError, ringstow.Error)) else 1


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
        with log:
            return code, log.read().decode(errors="replace")

    return wait


def must(outcome, what):
    """Assert that a child ended well; return what it said."""
    code, said = outcome
    assert code == 0, f"{what}: ended with {code}: {said}"
    return said
