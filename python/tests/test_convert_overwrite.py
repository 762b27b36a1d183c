"""Conversions to an existing path: refusals, replacements, and files that must stay."""

import contextlib
import errno
import fcntl
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from converted import mild_load, read_hf, saved
from support import flip, missing, raising

import ringstow
from ringstow import _native
from ringstow._publish import _replace
from ringstow.convert import _targets, convert

KINDS = ["ringstow", "dcp", "torch", "hf"]
OLD = {"old": torch.arange(20_000.0), "older": torch.arange(7.0)}
NEW = {"new": torch.arange(300.0)}
INDEX = "model.safetensors.index.json"
NOT_SUPPORTED = raising(OSError(errno.EINVAL, "invalid argument"))


def source(at, state, name):
    """Return a checkpoint that can be converted to any kind."""
    ringstow.save(state, at / name)
    return at / name


def read(path, kind):
    if kind == "dcp":
        state = {name: torch.zeros(n) for name, n in [("old", 20_000), ("older", 7), ("new", 300)]}
        there = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        state = {name: state[name] for name in there}
        dcp.load(state, checkpoint_id=path, no_dist=True)
        return state
    return {"ringstow": ringstow.load, "torch": mild_load, "hf": read_hf}[kind](path)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def files(path):
    """Return all files in a directory tree."""
    return {
        str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }


def replaceable(at, kind="hf", **options):
    """Convert an old state to ``to``; return a source of a new one, and all files."""
    convert(source(at, OLD, "one"), at / "to", target=kind, **options)
    return source(at, NEW, "other"), files(at)


@pytest.mark.parametrize("kind", KINDS)
def test_existing_checkpoint_is_replaced_only_on_request(at, kind):
    new, before = replaceable(at, kind, max_shard_size="60KB")
    with pytest.raises(FileExistsError, match=r"to.*|overwrite") as refused:
        convert(new, at / "to", target=kind)
    assert refused.value.filename == str(at / "to")
    assert "--overwrite" in str(refused.value)
    assert files(at) == before

    report = convert(new, at / "to", target=kind, overwrite=True)
    assert report.verified
    assert report.save is None or report.save.path == str(at / "to")
    assert same(read(at / "to", kind), NEW)
    assert sorted(os.listdir(at)) == ["one", "other", "to"]
    # A new path is written with either option.
    convert(new, at / "fresh", target=kind, overwrite=True)
    fresh = os.listdir(at / "fresh") if kind != "torch" else []
    assert kind == "torch" or len(fresh) == len(os.listdir(at / "to"))


@pytest.mark.parametrize("kind", KINDS)
def test_old_checkpoint_stays_until_the_new_is_written(at, kind, monkeypatch):
    new, before = replaceable(at, kind)
    write = _targets.WRITERS[kind]

    def write_and_fail(*args):
        if kind in ("dcp", "hf"):
            write(*args)
            raise OSError(28, "no space left on device", args[1])
        return write(*args)

    monkeypatch.setitem(_targets.WRITERS, kind, write_and_fail)
    if kind in ("ringstow", "torch"):  # these commit by themselves, so the source fails instead
        flip(next(new.glob("*.safetensors")), -9)
        before = files(at)
    with pytest.raises((OSError, ringstow.CorruptCheckpointError)):
        convert(new, at / "to", target=kind, overwrite=True)
    assert files(at) == before


STEPS = ["rename", "unlink", "link", "rmdir", "mkdir", "chmod"]


class Killed(BaseException):
    """Stands for SIGKILL: no handler of exceptions catches it, so nothing is cleaned up."""


def kill_at(cut, monkeypatch, *, swaps=True):
    """Simulate a kill before the n-th change to a directory; later changes do nothing."""
    steps = 0

    def counted(act):
        def step(*args, **options):
            nonlocal steps
            steps += 1
            if steps > cut:
                raise Killed
            return act(*args, **options)

        return step

    for name in STEPS:
        monkeypatch.setattr(_replace.os, name, counted(getattr(os, name)))
    exchange = _native.swap_names if swaps else NOT_SUPPORTED
    monkeypatch.setattr(_replace._native, "swap_names", counted(exchange))


@pytest.mark.parametrize("swaps", [True, False], ids=["swap", "renames"])
@pytest.mark.parametrize("kind", ["hf", "dcp"])
def test_kill_while_replacing_leaves_all_of_one_checkpoint(at, kind, swaps, monkeypatch):
    new = source(at, NEW, "new")
    seen = set()
    for cut in range(100):
        to = at / f"to{cut}"
        convert(source(at, OLD, f"old{cut}"), to, target=kind, max_shard_size="60KB")
        if kind == "hf":
            (to / "config.json").write_text("{}")
            (to / "tokenizer").mkdir()
            (to / "tokenizer" / "words").write_text("a b")
        killed = True
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            kill_at(cut, patch, swaps=swaps)
            convert(new, to, target=kind, overwrite=True, max_shard_size="60KB")
            killed = False
        if to.exists():
            found = read(to, kind)
            assert same(found, NEW) or same(found, OLD)
            seen.add("new" if same(found, NEW) else "old")
        else:  # without a swap, between two renames: the next conversion restores it
            assert not swaps
        convert(new, to, target=kind, overwrite=True, max_shard_size="60KB")
        assert same(read(to, kind), NEW)
        if kind == "hf":
            assert (to / "config.json").read_text() == "{}"
            assert (to / "tokenizer" / "words").read_text() == "a b"
        assert not [name for name in os.listdir(at) if ".convert." in name]
        if not killed:
            break
    assert not killed
    assert seen == {"old", "new"}


def test_conversion_over_a_killed_export_keeps_none_of_its_files(at):
    """Regression: refused as a model that is there; with overwrite=True the index stayed."""
    new = source(at, NEW, "new")
    for overwrite in (False, True):
        to = at / f"to{overwrite}"
        convert(source(at, OLD, "old"), to, target="hf", max_shard_size="60KB")
        os.rename(to / f"{INDEX}", to / f"{INDEX}.part")
        convert(new, to, target="hf", overwrite=overwrite)
        assert os.listdir(to) == ["model.safetensors"]
        assert same(read_hf(to), NEW)


def test_replaced_checkpoint_stays_until_the_swap_is_durable(at, monkeypatch):
    """Regression: the old one was removed although a crash could have undone the swap."""
    new, _ = replaceable(at)
    sync, unlink = _native.sync_dir, os.unlink

    def fail(directory):
        if directory == str(at) and same(read_hf(at / "to"), NEW):
            raise OSError(errno.EIO, "input/output error", directory)
        sync(directory)

    with monkeypatch.context() as patch:
        patch.setattr(_replace._native, "sync_dir", fail)
        with pytest.raises(ringstow.NotDurableError, match="to is written"):
            convert(new, at / "to", target="hf", overwrite=True)
    assert same(read_hf(at / "to"), NEW)
    assert same(read_hf(at / "to.convert.old"), OLD)

    done = []
    monkeypatch.setattr(_replace._native, "sync_dir", lambda at: done.append(at) or sync(at))
    monkeypatch.setattr(_replace.os, "unlink", lambda at: done.append("unlink") or unlink(at))
    convert(new, at / "to", target="hf", overwrite=True)
    assert done.index(str(at)) < done.index("unlink")
    assert sorted(os.listdir(at)) == ["one", "other", "to"]


def test_failure_while_replacing_keeps_the_only_copy(at, monkeypatch):
    """Regression: ENOSPC or Ctrl-C at the swap removed both checkpoints."""
    new, before = replaceable(at)
    for error in (OSError(28, "no space left on device"), KeyboardInterrupt()):
        with monkeypatch.context() as patch:
            patch.setattr(_replace._native, "swap_names", raising(error))
            with pytest.raises(type(error)):
                convert(new, at / "to", target="hf", overwrite=True)
        assert files(at) == before


def test_two_conversions_to_one_path_exclude_each_other(at):
    new, _ = replaceable(at)
    with (
        pytest.raises(ringstow.BusyError, match=r"to is being written"),
        _replace.place(str(at / "to"), "hf", lambda: None, overwrite=True),
    ):
        convert(new, at / "to", target="hf", overwrite=True)
    assert same(read_hf(at / "to"), OLD)


def test_lock_on_a_directory_that_was_swapped_away_is_refused(at, monkeypatch):
    (at / "one").mkdir()
    (at / "other").mkdir()

    def late(handle, how):
        _native.swap_names(str(at / "one"), str(at / "other"))
        fcntl.flock(handle, how)

    monkeypatch.setattr(_replace, "fcntl", SimpleNamespace(**{**vars(fcntl), "flock": late}))
    with pytest.raises(ringstow.BusyError), _replace._locked(str(at / "one")):
        pass


def test_interrupt_between_the_two_renames_keeps_the_old_checkpoint(at, monkeypatch):
    new, before = replaceable(at)
    rename = os.rename

    def interrupted(one, other):
        rename(one, other)
        monkeypatch.setattr(_replace.os, "rename", rename)
        raise KeyboardInterrupt

    monkeypatch.setattr(_replace._native, "swap_names", NOT_SUPPORTED)
    monkeypatch.setattr(_replace.os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(new, at / "to", target="hf", overwrite=True)
    assert files(at) == before


@pytest.mark.parametrize("of", ["mode", "owner"])
def test_replacing_keeps_the_directory_s(at, of):
    if of == "owner" and os.geteuid() != 0:
        missing("only root can give directories away")
    new, _ = replaceable(at)
    os.chmod(at / "to", 0o2775) if of == "mode" else os.chown(at / "to", 4242, 4243)
    before = os.stat(at / "to")
    convert(new, at / "to", target="hf", overwrite=True)
    found = os.stat(at / "to")
    assert (found.st_mode, found.st_uid, found.st_gid) == before[0:1] + before[4:6]
    assert found.st_ino != before.st_ino


def test_only_a_checkpoint_of_the_kind_is_replaced(at):
    new = source(at, NEW, "new")
    makers = {kind: at / f"a.{kind}" for kind in KINDS}
    for kind, path in makers.items():
        convert(new, path, target=kind)
    (at / "dir").mkdir()
    (at / "dir" / "mine").write_text("mine")
    before = files(at)
    for kind in KINDS:
        for other, path in [*makers.items(), (None, at / "dir")]:
            if other == kind or (kind in ("hf", "ringstow") and other is None):
                continue
            with pytest.raises((FileExistsError, ringstow.InvalidStateError), match=path.name):
                convert(new, path, target=kind, overwrite=True)
    assert files(at) == before


def test_refusal_advises_to_replace_only_what_overwrite_replaces(at):
    """Regression: it advised --overwrite, which refused in turn."""
    new = source(at, NEW, "new")
    convert(new, at / "stock", target="dcp")
    for kind in ("ringstow", "hf"):
        for overwrite in (False, True):
            with pytest.raises(FileExistsError, match=r"holds \.metadata") as refused:
                convert(saved(NEW, at / "new.pt"), at / "stock", target=kind, overwrite=overwrite)
            assert "--overwrite" not in str(refused.value)


def killed_dcp(at, cut="metadata"):
    """Leave what a kill leaves of a conversion to a new DCP directory; return its path."""
    to = at / "to"
    convert(source(at, OLD, "killed"), to, target="dcp", verify=False)
    os.rename(to / ".metadata", to / ".metadata.tmp")
    if cut == "data":
        os.unlink(to / ".metadata.tmp")
    return to


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("cut", ["data", "metadata"])
def test_next_conversion_removes_what_a_killed_one_to_dcp_left(at, cut, overwrite):
    """Regression: the user had to remove the directory."""
    to = killed_dcp(at, cut=cut)
    convert(source(at, NEW, "new"), to, target="dcp", overwrite=overwrite)
    assert same(read(to, "dcp"), NEW)
    assert sorted(os.listdir(to)) == [".metadata", "__0_convert.distcp"]
    assert sorted(os.listdir(at)) == ["killed", "new", "to"]


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", "notes", ".metadata"])
def test_conversion_to_dcp_removes_nothing_of_another_program(at, name):
    to = killed_dcp(at)
    (to / name).write_text("theirs")
    before = files(at)
    with pytest.raises(FileExistsError, match="is there already"):
        convert(source(at, NEW, "new"), to, target="dcp")
    assert files(at) | before == files(at)


@pytest.fixture
def shared(monkeypatch):
    """Be on a file system that several hosts share."""
    monkeypatch.setattr(_replace._native, "shared_file_system", lambda _: "nfs4")


@pytest.mark.usefixtures("shared")
def test_unfinished_dcp_directory_of_another_host_is_not_touched(at):
    to = killed_dcp(at)
    before = files(to)
    with pytest.raises(ringstow.BusyError, match=r"another host.*remove all files in") as refused:
        convert(source(at, NEW, "new"), to, target="dcp")
    assert "__0_convert.distcp" in str(refused.value)
    assert files(to) == before


def test_foreign_files_are_refused_or_kept(at):
    new = source(at, NEW, "new")
    for kind in ("ringstow", "dcp"):
        (at / kind).mkdir()
        (at / kind / "mine").write_text("mine")
        with pytest.raises(FileExistsError, match="holds mine"):
            convert(saved(NEW, at / "new.pt"), at / kind, target=kind)
    (at / "x.pt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"x\.pt"):
        convert(new, at / "x.pt")
    assert (at / "x.pt").read_text() == (at / "dcp" / "mine").read_text() == "mine"
    (at / "hf").mkdir()
    (at / "hf" / "config.json").write_text("{}")
    for _ in range(2):
        convert(new, at / "hf", target="hf", overwrite=True)
    assert sorted(os.listdir(at / "hf")) == ["config.json", "model.safetensors"]
    # Leftovers of a killed conversion do not block the next one.
    (at / "killed").mkdir()
    (at / "killed" / "rank00000-0.safetensors.part").write_text("half")
    convert(at / "new.pt", at / "killed")
    assert same(ringstow.load(at / "killed"), NEW)


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("swaps", [True, False])
def test_conversion_never_clears_what_another_host_may_be_writing(at, monkeypatch, swaps):
    new, _ = replaceable(at)
    if not swaps:
        monkeypatch.setattr(_replace._native, "swap_names", NOT_SUPPORTED)
    for beside in (at / "to.convert.part", at / "to.convert.old"):
        beside.mkdir()
        (beside / "model.safetensors").write_text("theirs")
        before = files(at)
        with pytest.raises(ringstow.BusyError, match=r"another host.*remove it") as refused:
            convert(new, at / "to", target="hf", overwrite=True)
        assert str(beside) in str(refused.value)
        assert files(at) == before
        (beside / "model.safetensors").unlink()
        beside.rmdir()
    convert(new, at / "to", target="hf", overwrite=True)
    assert same(read_hf(at / "to"), NEW)
    assert not [name for name in os.listdir(at) if ".convert." in name]


@pytest.mark.usefixtures("shared")
def test_conversion_on_another_host_that_begins_now_wins(at, monkeypatch):
    new, _ = replaceable(at)
    mkdir = os.mkdir

    def late(path, mode=0o777):
        mkdir(path, mode)  # stands for the other host's
        (at / "to.convert.part" / "model.safetensors").write_text("theirs")
        mkdir(path, mode)

    monkeypatch.setattr(_replace.os, "mkdir", late)
    with pytest.raises(ringstow.BusyError, match="another host"):
        convert(new, at / "to", target="hf", overwrite=True)
    assert same(read_hf(at / "to"), OLD)
    assert (at / "to.convert.part" / "model.safetensors").read_text() == "theirs"


@pytest.mark.usefixtures("shared")
def test_old_checkpoint_between_two_renames_of_another_host_stays(at):
    new, _ = replaceable(at)
    os.rename(at / "to", at / "to.convert.old")
    before = files(at)
    with pytest.raises(ringstow.BusyError, match=r"another host.*rename it to"):
        convert(new, at / "to", target="hf", overwrite=True)
    assert files(at) | before == files(at)
    assert (at / "to.convert.old").is_dir()


@pytest.mark.parametrize("kind", ["dcp", "hf", "torch"])
@pytest.mark.parametrize("is_whole", [True, False])
def test_leftover_that_a_loss_of_power_brings_back_harms_nothing_and_goes(at, kind, is_whole):
    to = at / "to.pt"
    old, new = source(at, OLD, "old"), source(at, NEW, "new")
    convert(old, to, target=kind)
    lost = at / ("to.pt.part" if kind == "torch" else "to.pt.convert.part")
    kept = at / "kept"
    (shutil.copy if kind == "torch" else shutil.copytree)(to, kept)
    convert(new, to, target=kind, overwrite=True)
    assert not lost.exists()

    kept.rename(lost)
    if not is_whole:
        first = lost if kind == "torch" else lost / sorted(os.listdir(lost))[0]
        first.unlink() if first is not lost else os.truncate(lost, 10)
    before = sorted(os.listdir(at))
    assert same(read(to, kind), NEW)
    swept = ringstow.prune(at)
    assert not swept.removed
    assert not swept.left
    with pytest.raises(FileExistsError):  # it is the target that is in the way
        convert(old, to, target=kind)
    assert sorted(os.listdir(at)) == before
    convert(old, to, target=kind, overwrite=True)
    assert same(read(to, kind), OLD)
    assert sorted(os.listdir(at)) == sorted({*before} - {lost.name})
