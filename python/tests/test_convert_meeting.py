"""Conversions to a path at which something appears meanwhile: a conversion, a planted link."""

import errno
import os
from types import SimpleNamespace

import pytest
import torch
from test_convert_overwrite import KINDS, NEW, OLD, files, read, same, source

import ringstow
from ringstow import convert as conversions
from ringstow._foreign import _lazy_tensors
from ringstow._publish import _replace
from ringstow.convert import _dcp, _targets, convert


def between(monkeypatch, act, *, kind=None):
    """Call ``act`` once: before the source is opened or, with a kind, once its state is written."""
    acts = [act]
    opened = conversions.open_source

    def open_source(*args):
        if kind is None and acts:
            acts.pop()()
        return opened(*args)

    monkeypatch.setattr(conversions, "open_source", open_source)
    if kind is not None:
        write = _targets.WRITERS[kind]

        def written(*args):
            done = write(*args)
            if acts:
                acts.pop()()
            return done

        monkeypatch.setitem(_targets.WRITERS, kind, written)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_that_appears_while_the_source_is_read_is_not_replaced(at, kind, monkeypatch):
    old, new = source(at, OLD, "old"), source(at, NEW, "new")
    seen = {}

    def other():
        convert(old, at / "to", target=kind)
        seen.update(files(at))

    between(monkeypatch, other)
    with pytest.raises(FileExistsError) as refused:
        convert(new, at / "to", target=kind)
    assert str(refused.value.filename).startswith(str(at / "to"))
    assert files(at) == seen
    assert same(read(at / "to", kind), OLD)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_that_appears_while_the_target_is_written_is_not_replaced(at, kind, monkeypatch):
    """As by another host, which no lock keeps out."""
    old, new = source(at, OLD, "old"), source(at, NEW, "new")
    convert(old, at / "other", target=kind)
    winner = {"ringstow": "manifest.json", "dcp": ".metadata", "hf": "model.safetensors"}.get(kind)

    take = _lazy_tensors.ReadAhead.take

    def taken(self, name):
        if winner is None:
            os.rename(at / "other", at / "to")
        else:
            os.rename(at / "other" / winner, at / "to" / winner)
        return take(self, name)

    monkeypatch.setattr(_lazy_tensors.ReadAhead, "take", taken)
    with pytest.raises((FileExistsError, ringstow.InvalidStateError)) as refused:
        convert(new, at / "to", target=kind, verify=False)
    assert str(at / "to") in str(refused.value)
    if winner is None:
        assert same(read(at / "to", kind), OLD)
    else:
        assert os.listdir(at / "to") == [winner]


@pytest.mark.parametrize("overwrite", [False, True])
def test_two_conversions_to_one_torch_file_do_not_mix(at, monkeypatch, overwrite):
    old, new = source(at, OLD, "old"), source(at, NEW, "new")

    def other():
        with pytest.raises(ringstow.BusyError, match=r"to\.pt\.part is being written"):
            convert(old, at / "to.pt", overwrite=overwrite)

    between(monkeypatch, other, kind="torch")
    convert(new, at / "to.pt", overwrite=overwrite)
    assert same(read(at / "to.pt", "torch"), NEW)
    assert sorted(os.listdir(at)) == ["new", "old", "to.pt"]


def test_torch_file_of_another_host_is_not_touched(at, monkeypatch):
    new = source(at, NEW, "new")
    monkeypatch.setattr(_replace._native, "shared_file_system", lambda _: "nfs4")
    (at / "to.pt.part").write_text("theirs")
    with pytest.raises(ringstow.BusyError, match=r"another host.*remove it"):
        convert(new, at / "to.pt")
    assert (at / "to.pt.part").read_text() == "theirs"
    # The other host creates it between the look and the creation.
    os.unlink(at / "to.pt.part")
    lexists = os.path.lexists

    def late(path):
        found = lexists(path)
        if str(path).endswith(".part") and not found:
            (at / "to.pt.part").write_text("theirs")
        return found

    monkeypatch.setattr(_replace.os.path, "lexists", late)
    with pytest.raises(ringstow.BusyError, match="another host"):
        convert(new, at / "to.pt")
    assert (at / "to.pt.part").read_text() == "theirs"


def test_what_a_killed_conversion_left_beside_a_torch_file_is_removed(at):
    (at / "to.pt.part").write_text("half")
    convert(source(at, NEW, "new"), at / "to.pt")
    assert sorted(os.listdir(at)) == ["new", "to.pt"]


def test_planted_link_beside_a_torch_file_is_not_followed(at):
    victim = at / "victim"
    victim.write_text("precious")
    (at / "to.pt.part").symlink_to(victim)
    with pytest.raises(FileExistsError, match=r"not a file.*to\.pt\.part"):
        convert(source(at, NEW, "new"), at / "to.pt")
    assert victim.read_text() == "precious"
    assert not (at / "to.pt").exists()
    # A hard link, as another user may make one to a file of ours.
    (at / "to.pt.part").unlink()
    (at / "to.pt.part").hardlink_to(victim)
    convert(at / "new", at / "to.pt")
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("locks", [True, False])
def test_losing_conversion_removes_nothing_of_the_winner(at, monkeypatch, locks):
    old, new = source(at, OLD, "old"), source(at, NEW, "new")
    if not locks:  # as for a conversion on another host
        flock = SimpleNamespace(**{**vars(_replace.fcntl), "flock": lambda *_: None})
        monkeypatch.setattr(_replace, "fcntl", flock)

    def other():
        with pytest.raises((ringstow.BusyError, FileExistsError)):
            convert(old, at / "to", target="dcp")

    between(monkeypatch, other, kind="dcp")
    convert(new, at / "to", target="dcp")
    assert same(read(at / "to", "dcp"), NEW)


@pytest.mark.parametrize("there", ["__0_convert.distcp", ".metadata"])
def test_failed_dcp_write_removes_only_what_it_created(at, there):
    (at / "to").mkdir()
    (at / "to" / there).write_text("theirs")
    (at / "to" / "__7_0.distcp").write_text("theirs")
    with pytest.raises(FileExistsError):
        _dcp.write({"a": torch.ones(3)}, str(at / "to"), lambda _: None)
    assert sorted(os.listdir(at / "to")) == sorted([there, "__7_0.distcp"])


def test_losing_conversion_keeps_the_directory_that_another_has_locked(at):
    """Both found none; the other one has created and locked it."""
    (at / "to").mkdir()
    with (
        _replace._locked(str(at / "to")),
        pytest.raises(ringstow.BusyError),
        _replace._new_directory(str(at / "to")),
    ):
        pass
    assert (at / "to").is_dir()


def test_directories_that_a_conversion_creates_are_synced_from_the_first(at, monkeypatch):
    new, synced, native = source(at, NEW, "new"), [], _replace._native
    sync = native.sync_dir
    monkeypatch.setattr(native, "sync_dir", lambda path: (synced.append(path), sync(path)))
    convert(new, at / "a" / "b" / "to", target="dcp")
    assert {str(at), str(at / "a"), str(at / "a" / "b"), str(at / "a" / "b" / "to")} <= {*synced}


@pytest.mark.parametrize("kind", KINDS)
def test_target_replaced_before_it_is_verified_is_not_called_damaged(at, kind, monkeypatch):
    """Regression: the other program's checkpoint was reported as a damaged one."""
    old, new = source(at, OLD, "old"), source(at, NEW, "new")
    verify = conversions._verify

    def late(*args):
        monkeypatch.setattr(conversions, "_verify", verify)
        convert(old, at / "to", target=kind, overwrite=True)
        verify(*args)

    monkeypatch.setattr(conversions, "_verify", late)
    with pytest.raises(ringstow.ReplacedCheckpointError, match=r"/to was written, and another"):
        convert(new, at / "to", target=kind)
    assert same(read(at / "to", kind), OLD)


def test_file_system_without_sync_of_directories_is_fine(at, monkeypatch):
    new = source(at, NEW, "new")
    fsync = os.fsync

    def unsupported(handle):
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(errno.EINVAL, "invalid argument")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", unsupported)
    for kind in ("torch", "dcp"):
        convert(new, at / kind, target=kind)
