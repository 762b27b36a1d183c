"""An export by several ranks that fails, or of which a rank is killed, leaves no half model."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import pathlib
import resource
import signal
import subprocess
from unittest.mock import Mock, patch

import pytest
import torch
from test_dcp_export import contents
from test_refusals import mounted
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import ringstow
import ringstow.dcp
from ringstow import _native
from ringstow.convert import hf_to_ringstow
from ringstow.dcp import _export_exchange, _export_plan, _export_rank

RANKS = 2
FILE_BYTES = 60_000


def state_of(value):
    """Return shards of rows and of columns; every element is the value."""
    mesh = init_device_mesh("cpu", (RANKS,))
    full = torch.full((100, 130), float(value))
    return {
        f"w{dim}": distribute_tensor(full, mesh, [Shard(dim)], src_data_rank=None) for dim in (0, 1)
    }


def export(rank, path, value=1, **options):
    _export_plan.UNIT_BYTES, _export_plan.ROUND_BYTES = 2 * _export_plan.PAGE, 4 * _export_plan.PAGE
    options = {"max_shard_size": FILE_BYTES} | options
    return ringstow.dcp.export_hf(state_of(value), path, **options)


def value_at(path):
    """Return the value of all elements of a model; None if there is none."""
    beside = pathlib.Path(f"{path}.looked")
    try:
        hf_to_ringstow(path, beside, verify=False, overwrite=True)
    except (FileNotFoundError, ringstow.Error):
        return None
    state = ringstow.load(beside)
    assert {name: tuple(t.shape) for name, t in state.items()} == dict.fromkeys(
        ("w0", "w1"), (100, 130)
    )
    (value,) = torch.cat([*state.values()]).unique().tolist()
    return value


def failed(ranks, function, *args, world=RANKS):
    """Run a function that raises on every rank; return what they raised, by rank."""
    return ranks(world).run(raised_by, function, *args)


def raised_by(rank, function, *args):
    try:
        function(rank, *args)
    except Exception as error:
        return error
    raise AssertionError(f"rank {rank} did not fail")


def assert_fails_together(errors, kind, match):
    """Assert that one rank raised this error, and that the others name it."""
    own = [error for error in errors if isinstance(error, kind) and match in str(error)]
    assert own, errors
    for error in errors:
        assert match in str(error), errors


# Arguments.


def with_options(rank, path, options):
    """Export; options may be a list of those of each rank."""
    options = options[rank] if isinstance(options, list) else options
    ringstow.dcp.export_hf(state_of(1), **{"path": path, **options})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("dtype", (torch.bfloat16, None)),
        ("prefix", ("", "w")),
        ("max_shard_size", ("5GB", "1GB")),
        ("overwrite", (True, False)),
        ("path", ("one", "other")),
        ("rename", ({"w0": "w"}, None)),
    ],
)
def test_different_arguments_are_refused_on_all_ranks(ranks, tmp_path, name, values):
    if name == "path":
        values = tuple(tmp_path / value for value in values)
    options = [{name: value} for value in values]
    for error in failed(ranks, with_options, tmp_path / "m", options):
        assert isinstance(error, ringstow.InvalidStateError)
        assert "give the same arguments on all ranks" in str(error)
        assert "on rank 1" in str(error)
    assert not os.listdir(tmp_path)


def wrong_state(rank, path, kind):
    mesh = init_device_mesh("cpu", (RANKS,))
    ones = torch.ones(4, 4)
    if kind == "partial":
        state = {"layer.w": DTensor.from_local(ones, mesh, [Partial()])}
    elif kind == "missing shard":
        state = state_of(1) if rank == 0 else {"w0": state_of(1)["w0"]}
    elif kind == "dtype":
        local = ones if rank else ones.bfloat16()
        state = {"w": DTensor.from_local(local, mesh, [Shard(0)])}
    elif kind == "shape":
        state = {"w": torch.ones(3 + rank)}
    elif kind == "plain":
        state = {"w": ones if rank else DTensor.from_local(ones, mesh, [Replicate()])}
    elif kind == "complex128":
        state = {"w": ones, "z": torch.ones(2, dtype=torch.complex128)}
    elif kind == "meta":
        state = {"w": ones.to("meta") if rank else ones}
    elif kind == "sparse":
        state = {"w": ones.to_sparse() if rank else ones}
    else:
        state = {"step": 3}
    ringstow.dcp.export_hf(state, path)


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("partial", "layer.w"),
        ("missing shard", "the ranks do not hold each element once of (1): w1"),
        ("dtype", "w is a sharded tensor of BF16 [8, 4] on rank 0 and a sharded tensor of F32"),
        ("shape", "[3] on rank 0 and a plain tensor of F32 [4] on rank 1"),
        ("plain", "a plain tensor of F32 [4, 4] on rank 1"),
        ("complex128", '"z"'),
        ("meta", "w is on the meta device"),
        ("sparse", "w is sparse"),
        ("nothing", "no tensor has a name in it"),
    ],
)
def test_state_that_cannot_be_written_is_refused_on_all_ranks(ranks, tmp_path, kind, match):
    errors = failed(ranks, wrong_state, tmp_path / "m", kind)
    assert_fails_together(errors, ringstow.Error, match)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "int8"},
        {"dtype": torch.float8_e5m2},
        {"max_shard_size": 0},
        {"prefix": "x."},
        {"rename": {"w0": "w1"}},  # two names become one
        {"rename": {("w0", "w1"): ringstow.Concat("w")}},
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(ranks, tmp_path, options):
    for error in failed(ranks, with_options, tmp_path / "m", options):
        assert isinstance(error, ringstow.Error)
    assert not os.listdir(tmp_path)


def test_url_is_refused():
    with pytest.raises(ringstow.InvalidStateError, match="URL"):
        ringstow.dcp.export_hf({"w": torch.ones(1)}, "s3://bucket/model")


# What is at the path.


def test_existing_model_is_kept_unless_overwrite_is_given(ranks, tmp_path):
    path = tmp_path / "m"
    ranks(2).run(export, path, 1)
    (path / "config.json").write_text("{}")
    before = contents(path)
    assert_fails_together(failed(ranks, export, path, 2), FileExistsError, "is there already")
    assert contents(path) == before
    ranks(2).run(overwritten, path, 2)
    assert value_at(path) == 2
    assert (path / "config.json").read_text() == "{}"
    assert contents(path).keys() == before.keys()


overwritten = functools.partial(export, overwrite=True)


@pytest.mark.parametrize("foreign", ["manifest.json", "adapter.safetensors", ".metadata"])
def test_other_tensors_are_never_replaced(ranks, tmp_path, foreign):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / foreign).write_bytes(b"{}")
    for function in (export, overwritten):
        errors = failed(ranks, function, tmp_path / "m", 1)
        assert_fails_together(errors, FileExistsError, foreign)
    assert os.listdir(tmp_path / "m") == [foreign]


def test_another_export_at_the_same_time_is_refused(ranks, tmp_path):
    specs = [("w", "F32", (3,))]
    config = ringstow.Config().to_json()
    running = _native.ModelSession(str(tmp_path / "m"), specs, config)
    for error in failed(ranks, export, tmp_path / "m", 1):
        assert "is being written by another process" in str(error)
    running.abandon()
    ranks(2).run(export, tmp_path / "m", 1)
    assert value_at(tmp_path / "m") == 1


# Failures of the system.


def test_full_disk_fails_before_a_byte_is_written_and_leaves_nothing(ranks, tmp_path):
    mounted(tmp_path / "disk", "size=64k")
    try:
        errors = failed(ranks, export, tmp_path / "disk" / "m", 1)
        assert errors[0].errno == errno.ENOSPC
        assert "rank 0 failed" in str(errors[1])
        assert not os.listdir(tmp_path / "disk")
    finally:
        subprocess.run(["umount", str(tmp_path / "disk")], check=True)


def export_with_limit(rank, path, victim):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == victim:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        export(rank, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def export_with_failing(rank, path, victim, what, overwrite):
    fail = Mock(side_effect=OSError(errno.EIO, "the disk fails", what))
    place, name = {
        "start": (_native, "start_model_share"),
        "pack": (_export_exchange.Round, "pack"),
        "unpack": (_export_exchange.Round, "unpack"),
        "load": (_export_exchange.Inbox, "load"),
        "end": (_export_rank.ShareWriter, "_end"),
    }[what]
    kept = patch.object(place, name, fail) if rank == victim else contextlib.nullcontext()
    with kept:
        export(rank, path, 2, overwrite=overwrite)


@pytest.mark.parametrize("victim", [0, 1])
def test_limit_of_one_rank_fails_all(ranks, tmp_path, victim):
    errors = failed(ranks, export_with_limit, tmp_path / "m", victim)
    assert errors[victim].errno == errno.EFBIG
    assert f"rank {victim} failed" in str(errors[1 - victim])
    assert not os.listdir(tmp_path)
    ranks(2).run(export, tmp_path / "m")
    assert value_at(tmp_path / "m") == 1


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("what", ["start", "pack", "unpack", "load", "end"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_failure_of_one_rank_fails_all_and_leaves_what_was_there(
    ranks, tmp_path, victim, what, overwrite
):
    path = tmp_path / "m"
    if overwrite:
        ranks(2).run(export, path, 1)
    errors = failed(ranks, export_with_failing, path, victim, what, overwrite)
    assert errors[victim].errno == errno.EIO
    assert f"rank {victim} failed" in str(errors[1 - victim])
    assert os.listdir(tmp_path) == (["m"] if overwrite else [])
    if overwrite:
        assert value_at(path) == 1
        assert not [name for name in os.listdir(path) if name.endswith(".part")]


# Kills.


def export_and_die(rank, path, victim, moment, overwrite):
    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    class Dying:
        """The coordinator's session, which dies when it publishes."""

        def __init__(self, *args, **options):
            self._session = session(*args, **options)
            if moment == "after the files are created":
                die()
            self.paths = self._session.paths

        def publish(self):
            if moment == "before it publishes":
                die()
            self._session.publish()
            die()

    session = _native.ModelSession
    if rank == victim:
        if moment == "before it writes":
            _native.start_model_share = die
        elif moment == "before an exchange":
            _export_exchange.Round.exchange = die
        elif moment == "before the end":
            _export_rank.ShareWriter._end = die
        else:
            _native.ModelSession = Dying
    export(rank, path, 2, overwrite=overwrite)


MOMENTS = [
    (victim, moment)
    for victim in (0, 1)
    for moment in ("before it writes", "before an exchange", "before the end")
] + [(0, "after the files are created"), (0, "before it publishes"), (0, "after it publishes")]


@pytest.mark.parametrize(("victim", "moment"), MOMENTS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_killed_rank_leaves_the_old_model_or_none(ranks, tmp_path, victim, moment, overwrite):
    path = tmp_path / "m"
    if overwrite:
        ranks(2).run(export, path, 1)
    with pytest.raises(RuntimeError, match=f"rank {victim} died with exit code -9"):
        ranks(2).run(export_and_die, path, victim, moment, overwrite)
    is_published = moment == "after it publishes" and not overwrite
    assert value_at(path) == (2 if is_published else 1 if overwrite else None)
    # Leftovers do not block the next export, which removes them.
    ranks(2).run(overwritten, path, 3)
    assert value_at(path) == 3
    assert len(os.listdir(path)) == 3
    assert {name.removesuffix(".looked") for name in os.listdir(tmp_path)} == {"m"}


def test_rank_of_a_failed_export_cannot_write_to_the_next_one(tmp_path):
    """A process that wakes up late knows only the names of its own export's files."""
    specs, config = [("w", "U8", (5000,))], ringstow.Config().to_json()
    old = _native.ModelSession(str(tmp_path), specs, config)
    late = [os.fspath(path) for path in old.paths]
    old.abandon()
    new = _native.ModelSession(str(tmp_path), specs, config)
    weight = torch.ones(5000, dtype=torch.uint8)
    memory = _export_rank._torch.memory_of(weight, "w")
    files = [(late[0], "model.safetensors", 4096 + 5000)]
    job = _native.start_model_share(
        [memory], str(tmp_path), files, [(0, 4096, 0, 0, 5000, 0)], config
    )
    job.wait()
    with pytest.raises(FileNotFoundError):
        job.result()
    new.publish()
