"""The arguments and attributes of torch's file system storage take effect or cause a warning."""

from __future__ import annotations

import gc
import inspect
import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import load
from support import assert_same
from test_dcp_defaults import fetch, is_ours
from test_dcp_writer import cause
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.api import CheckpointException
from torch_has import needs_use_collectives, takes

import ringstow
import ringstow.dcp
from ringstow.dcp import StorageReader, StorageWriter, _drop_in

pytestmark = pytest.mark.torch_seam

SECRET = torch.full((1000,), 3.0)


@pytest.fixture(autouse=True)
def swapped():
    with ringstow.dcp.use_by_default():
        yield
    _drop_in._warned.clear()


class Flipped(StreamTransformExtension):
    """Inverts every bit, so that no byte in a file equals the saved one."""

    @staticmethod
    def registry_name():
        return "stream.flipped"

    @staticmethod
    def from_descriptor(version):
        return Flipped()

    def get_descriptor(self):
        return "stream.flipped/1"

    def transform_to(self, output):
        class Writer(io.RawIOBase):
            def writable(self):
                return True

            def write(self, data):
                return output.write(_flipped(data))

        return Writer()

    def transform_from(self, source):
        return io.BytesIO(_flipped(source.read(-1)))


def _flipped(data):
    return bytes(byte ^ 255 for byte in bytes(data))


def test_every_argument_of_this_torch_is_known():
    """Otherwise `use_by_default` refuses arguments of a newer torch."""
    known = _drop_in._HONOURED | set(_drop_in._INSTEAD)
    assert set(_drop_in._SIGNATURE.parameters) - {"args", "kwargs"} <= known


@pytest.mark.skipif(not takes(_drop_in.StockWriter, "_extensions"), reason="torch without it")
def test_extensions_transform_every_byte(tmp_path):
    writer = dcp.FileSystemWriter(tmp_path, _extensions=[Flipped()])
    assert isinstance(writer, dcp.FileSystemWriter)
    dcp.save({"a": SECRET, "b": "plain text"}, storage_writer=writer)
    written = b"".join(file.read_bytes() for file in tmp_path.glob("__0_*"))
    for plain in (SECRET.numpy().tobytes(), b"plain text"):
        assert plain not in written
        assert _flipped(plain) in written
    registry = ExtensionRegistry()
    registry.register(Flipped)
    target = {"a": torch.zeros(1000), "b": None}
    reader = dcp.FileSystemReader(tmp_path, _extension_registry=registry)
    dcp.load(target, storage_reader=reader)
    assert_same(target, {"a": SECRET, "b": "plain text"})
    with pytest.raises(CheckpointException, match="Unknown extension"):
        fetch(tmp_path, target)


@pytest.mark.skipif(not takes(_drop_in.StockWriter, "_extensions"), reason="torch without it")
def test_extensions_log_that_torch_does_the_saving(tmp_path, caplog):
    for _ in range(2):
        dcp.FileSystemWriter(tmp_path, True, True, 1, 1000, False, True, [Flipped()])
    assert caplog.text.count("torch's own writer saves these checkpoints") == 1


@pytest.mark.skipif(not takes(_drop_in.StockWriter, "_extensions"), reason="torch without it")
def test_derived_writer_with_extensions_is_refused(tmp_path):
    class Derived(dcp.FileSystemWriter):
        pass

    with pytest.raises(ringstow.UnsupportedError, match="does not transform"):
        Derived(tmp_path, _extensions=[Flipped()])
    assert type(Derived(tmp_path, _extensions=None)) is Derived


@pytest.mark.parametrize(
    ("name", "odd", "usual"),
    [
        ("single_file_per_rank", False, True),
        ("sync_files", False, True),
        ("thread_count", 4, 1),
        ("per_thread_copy_ahead", 1 << 20, 10_000_000),
        ("serialization_format", "TORCH_SAVE", "SAFETENSORS"),
    ],
)
def test_options_without_effect_are_warned_of_once(name, odd, usual, tmp_path, caplog):
    if not takes(_drop_in.StockWriter, name):
        pytest.skip(f"torch without {name}")
    if name == "serialization_format":
        odd, usual = (filesystem.SerializationFormat[value] for value in (odd, usual))
    dcp.FileSystemWriter(tmp_path, **{name: usual})
    assert caplog.text == ""
    for _ in range(2):
        writer = dcp.FileSystemWriter(tmp_path, **{name: odd})
    assert getattr(writer, name) == getattr(pickle.loads(pickle.dumps(writer)), name) == odd
    assert caplog.text.count(f"FileSystemWriter({name}=") == 1
    assert caplog.records[0].levelname == "WARNING"
    dcp.save({"a": SECRET}, storage_writer=writer)
    assert_same(fetch(tmp_path, {"a": SECRET}), {"a": SECRET})


def test_positional_arguments_match_torchs(tmp_path, caplog):
    writer = dcp.FileSystemWriter(tmp_path, True, False, 3)
    assert (writer.single_file_per_rank, writer.sync_files, writer.thread_count) == (True, False, 3)
    assert "sync_files=False" in caplog.text
    assert "thread_count=3" in caplog.text


def test_arguments_that_torch_refuses_are_refused(tmp_path):
    for options in ({"threads": 3}, {"path": tmp_path}):
        with pytest.raises(TypeError):
            dcp.FileSystemWriter(tmp_path, **options)
    with pytest.raises(TypeError):
        dcp.FileSystemReader(tmp_path, threads=3)
    with pytest.raises(TypeError):
        dcp.FileSystemWriter()


def test_argument_of_a_newer_torch_is_refused_unless_empty(tmp_path, monkeypatch):
    parameter = inspect.Parameter("encrypt", inspect.Parameter.KEYWORD_ONLY, default=False)
    signature = _drop_in._SIGNATURE
    newer = signature.replace(parameters=[*signature.parameters.values(), parameter])
    monkeypatch.setattr(_drop_in, "_SIGNATURE", newer)
    dcp.FileSystemWriter(tmp_path, encrypt=False)
    with pytest.raises(ringstow.UnsupportedError, match="encrypt=True"):
        dcp.FileSystemWriter(tmp_path, encrypt=True)


@pytest.mark.parametrize("keep", [True, False])
def test_option_decides_whether_snapshot_memory_is_kept(keep, tmp_path, monkeypatch):
    monkeypatch.setenv("RINGSTOW_POOL_BYTES", "16M")
    ringstow.release_memory()
    writer = dcp.FileSystemWriter(tmp_path, cache_staged_state_dict=keep)
    for step in range(3):
        state = {"a": torch.full((20_000_000,), float(step))}
        dcp.async_save(state, storage_writer=writer).result()
        assert_same(fetch(tmp_path, state), state)
    gc.collect()
    assert (ringstow.release_memory() > 64 << 20) == keep


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"use_collectives": False}, marks=needs_use_collectives)]
)
@pytest.mark.parametrize("before", ["torch", "ringstow"])
def test_overwriting_raises_or_warns_with_torchs_text(before, options, tmp_path):
    writer = _drop_in.StockWriter if before == "torch" else dcp.FileSystemWriter
    dcp.save({"a": 1}, storage_writer=writer(tmp_path), **options)
    refusing = dcp.FileSystemWriter(tmp_path, overwrite=False)
    with pytest.raises((CheckpointException, ValueError), match="Checkpoint already exists"):
        dcp.save({"a": 2}, storage_writer=refusing, **options)
    assert fetch(tmp_path, {"a": None}) == {"a": 1}
    with pytest.warns(UserWarning, match="Detected an existing checkpoint"):
        dcp.save({"a": 2}, storage_writer=dcp.FileSystemWriter(tmp_path), **options)
    assert fetch(tmp_path, {"a": None}) == {"a": 2}


def test_first_save_without_overwrite_works(tmp_path):
    writer = dcp.FileSystemWriter(tmp_path / "new", overwrite=False)
    dcp.save({"a": 1}, storage_writer=writer)
    with pytest.raises(CheckpointException) as caught:
        dcp.save({"a": 2}, storage_writer=writer)
    assert type(cause(caught)) is ringstow.InvalidStateError


@pytest.mark.parametrize("whose", ["torch", "drop-in", "ringstow"])
def test_metadata_holds_save_and_load_ids(whose, tmp_path):
    writer, reader = {
        "torch": (_drop_in.StockWriter(tmp_path), _drop_in.StockReader(tmp_path)),
        "drop-in": (dcp.FileSystemWriter(tmp_path), dcp.FileSystemReader(tmp_path)),
        "ringstow": (StorageWriter(tmp_path), StorageReader(tmp_path)),
    }[whose]
    before = writer.save_id
    assert writer.storage_meta().save_id == before
    written = dcp.save({"a": SECRET}, storage_writer=writer)
    read = reader.read_metadata()
    if whose == "torch" and None in (written.storage_meta, read.storage_meta):
        pytest.skip("this torch's own storage does not say it; ours does")
    for metadata in (written, read):
        assert str(metadata.storage_meta.checkpoint_id) == str(tmp_path)
        assert metadata.storage_meta.save_id == writer.save_id
        assert metadata.version == getattr(filesystem, "CURRENT_DCP_VERSION", None)
    assert read.storage_meta.load_id == reader.load_id
    writer.reset()
    reader.reset()
    assert writer.save_id not in (before, written.storage_meta.save_id)
    assert reader.load_id != read.storage_meta.load_id


def test_a_load_by_either_reader_has_torchs_id(tmp_path):
    dcp.save({"a": 1}, storage_writer=_drop_in.StockWriter(tmp_path))
    reader = dcp.FileSystemReader(tmp_path)
    assert reader.read_metadata().storage_meta.load_id == reader.load_id
    assert reader.path == tmp_path


def test_writer_keeps_its_save_id_like_torchs(tmp_path):
    writer = dcp.FileSystemWriter(tmp_path / "1")
    dcp.save({"a": 1}, checkpoint_id=tmp_path / "2", storage_writer=writer)
    dcp.save({"a": 2}, storage_writer=writer)
    assert load(tmp_path / "2", {"a": None}) == {"a": 2}
    assert not is_ours(tmp_path / "1")
