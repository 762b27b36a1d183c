"""Files of runs and checkpoints are opened by ``ringstow._core._files``: regular files alone.

No FIFO, socket or device is waited for, and nothing is written through a link.
"""

import ast
import contextlib
import os
import pathlib
import signal
import socket
import stat

import pytest
import torch

import ringstow
from ringstow._core import _files
from ringstow._program._page import _cli
from ringstow._reports import _history
from ringstow.dcp import _mark
from ringstow.integrations import _rename_when_complete
from ringstow.integrations._accelerate import _places
from ringstow.integrations._deepspeed import _tags

PACKAGE = pathlib.Path(ringstow.__file__).parent
ENTRIES = ("open", "fdopen", "read_text", "write_text", "read_bytes", "write_bytes", "from_file")
# Classes and functions that open a path which they are given.
OPENERS = {
    *(("io", "FileIO"), ("io", "open"), ("zipfile", "ZipFile"), ("zipfile", "is_zipfile")),
    *(("tarfile", "open"), ("tarfile", "is_tarfile"), ("torch", "load"), ("torch", "save")),
    *(("shutil", "copy"), ("shutil", "copy2"), ("shutil", "copyfile"), ("shutil", "copytree")),
    ("filesystem", "FileSystemReader"),
}
NAMES = {*ENTRIES, *(name for _, name in OPENERS)}
STREAM = "it is given a stream"
ALLOWED = {
    "_ranks/_concurrent_saves.py: open": "files of /proc",
    "_core/_files.py: os.open": "the module itself",
    "_core/_files.py: os.fdopen": "the module itself",
    "convert/_torch_files.py: torch.save": STREAM,
    "dcp/_objects.py: torch.load": STREAM,
    "dcp/_objects.py: torch.save": STREAM,
    "_foreign/_dcp.py: filesystem.FileSystemReader": "metadata_at has looked at each of its files",
    "_foreign/_pickles.py: torch.load": "a stream, or a path that is_zip has read from; see loader",
    "_foreign/_torch_file.py: tarfile.is_tarfile": "is_zip has read from it",
    "_foreign/_torch_file.py: tarfile.open": STREAM,
    "_foreign/_torch_file.py: zipfile.ZipFile": STREAM,
    "_foreign/_torch_file.py: zipfile.is_zipfile": STREAM,
    "integrations/_accelerate/_places.py: zipfile.is_zipfile": STREAM,
    "integrations/_deepspeed/_states.py: torch.save": STREAM,
    "integrations/_lightning/_models.py: torch.save": STREAM,
    "integrations/_lightning/_paths.py: zipfile.ZipFile": STREAM,
    "integrations/_lightning/_paths.py: zipfile.is_zipfile": STREAM,
    "integrations/_rename_when_complete.py: shutil.copy2": "it refuses FIFOs, and follows no link",
    "integrations/_kit/_values.py: torch.save": STREAM,
    "integrations/transformers.py: torch.save": STREAM,
    "_state/tree/_build.py: torch.load": STREAM,
}


def opening_calls(file):
    """Yield the calls in a module of the package that open a file by its name."""
    tree = ast.parse(file.read_text())
    own = {
        name
        for node in ast.walk(tree)
        for name in (
            [node.name]
            if isinstance(node, ast.FunctionDef)
            else [alias.asname or alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    for called in (node.func for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if isinstance(called, ast.Name) and called.id == "open" and "open" not in own:
            yield "open"
        elif isinstance(called, ast.Attribute) and called.attr in NAMES:
            base = ast.unparse(called.value)
            if (base, called.attr) in OPENERS or called.attr in ENTRIES:
                yield f"{base}.{called.attr}"


def test_no_module_opens_files_but_by_the_one_that_never_waits():
    found = {
        f"{file.relative_to(PACKAGE)}: {call}"
        for file in PACKAGE.rglob("*.py")
        for call in opening_calls(file)
    }
    assert not found - ALLOWED.keys(), "use ringstow._core._files"
    assert not ALLOWED.keys() - found, "no longer needed"


@pytest.fixture(autouse=True)
def never_waits():
    """Fail a test that waits for a FIFO, instead of waiting with it."""

    def fail(*_):
        raise AssertionError("a file was waited for")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(300)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def victim(tmp_path):
    """Return a file that links lead to, and that no test may change."""
    path = tmp_path / "victim"
    path.write_text("mine")
    yield path
    assert path.read_text() == "mine"


def plant(kind, path, victim=None):
    """Put something at a path that is no regular file of its own."""
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(path))
    elif kind == "a symbolic link":
        os.symlink(victim, path)
    elif kind == "a dangling link":
        os.symlink(f"{path}-made", path)
    else:
        os.link(victim, path)


OPEN = {
    "reading": lambda path: _files.reading(path, links=False),
    "rewriting": _files.rewriting,
}


@pytest.mark.parametrize("how", OPEN)
@pytest.mark.parametrize("kind", ["a FIFO", "a socket", "a symbolic link", "a dangling link"])
def test_what_is_no_regular_file_is_named_and_not_waited_for(tmp_path, victim, how, kind):
    plant(kind, tmp_path / "x", victim)
    is_link = "link" in kind
    with pytest.raises(OSError, match="a symbolic link" if is_link else kind) as caught:
        OPEN[how](str(tmp_path / "x"))
    assert "a regular file is expected" in str(caught.value)
    assert caught.value.filename == str(tmp_path / "x")
    assert not (tmp_path / "x-made").exists()


def test_devices_and_directories_are_refused(tmp_path):
    with pytest.raises(OSError, match="a character device"):
        _files.reading("/dev/zero")
    for how in OPEN.values():
        with pytest.raises(IsADirectoryError):
            how(str(tmp_path))


def test_only_reading_follows_links_and_only_if_asked(tmp_path, victim):
    os.symlink(victim, tmp_path / "x")
    with _files.reading(str(tmp_path / "x")) as file:
        assert file.read() == b"mine"
    with pytest.raises(FileExistsError):
        _files.new(str(tmp_path / "x"))


@pytest.mark.parametrize("kind", ["a FIFO", "a symbolic link", "a dangling link", "a hard link"])
def test_a_fresh_file_replaces_what_is_planted(tmp_path, victim, kind):
    plant(kind, tmp_path / "x", victim)
    with _files.fresh(str(tmp_path / "x")) as file:
        file.write(b"new")
    assert stat.S_ISREG(os.lstat(tmp_path / "x").st_mode)
    assert (tmp_path / "x").read_text() == "new"


@pytest.mark.parametrize("kind", ["a FIFO", "a symbolic link", "a dangling link", "a hard link"])
def test_the_history_is_not_written_through_and_says_so_once(tmp_path, victim, caplog, kind):
    (tmp_path / "run").mkdir()
    planted = tmp_path / "run" / _history.NAME
    plant(kind, planted, victim)
    with ringstow.CheckpointManager(tmp_path / "run", keep=1) as manager:
        manager.save(1, {"w": torch.ones(2)})
        manager.save(2, {"w": torch.ones(2)})
    said = [one.getMessage() for one in caplog.records if "is not noted" in one.getMessage()]
    assert len(said) == 1
    assert str(planted) in said[0]
    assert "remove it" in said[0]
    assert not os.path.exists(f"{planted}-made")


def test_a_fifo_in_place_of_the_history_holds_up_no_report(tmp_path):
    ringstow.save({"w": torch.ones(2)}, tmp_path / "run" / "step-1", step=1)
    os.mkfifo(tmp_path / "run" / _history.NAME)
    assert _history.read(str(tmp_path / "run")) == []
    assert _cli.main([str(tmp_path / "run"), "-o", str(tmp_path / "page.html")]) == 0


def test_dcps_mark_is_neither_waited_for_nor_written_through(tmp_path, victim):
    os.symlink(victim, tmp_path / ".metadata.part")
    os.symlink(victim, tmp_path / ".metadata")
    _mark.write(str(tmp_path))
    assert not os.path.islink(tmp_path / ".metadata")
    os.unlink(tmp_path / ".metadata")
    os.mkfifo(tmp_path / ".metadata")
    assert not _mark.is_torchs(str(tmp_path / ".metadata"))


WRITES = {
    "page.html": (["page.html.part"], lambda at: _cli._write(f"{at}/page.html", "new")),
    "latest": ([".ringstow-latest-tag", "latest"], lambda at: _tags.name_latest(str(at), "new")),
    _places.MARK: ([_places.MARK], lambda at: MARK.write(str(at))),
}
MARK = _places.Mark(1, False, {}, [])


@pytest.mark.parametrize("name", WRITES)
def test_adapters_and_reports_write_through_no_planted_link(tmp_path, victim, name):
    planted, write = WRITES[name]
    for link in planted:
        os.symlink(victim, tmp_path / link)
    write(tmp_path)
    assert not os.path.islink(tmp_path / name)
    if name == _places.MARK:
        assert _places.mark_of(str(tmp_path)) == MARK
    else:
        assert (tmp_path / name).read_text() == "new"


def test_a_users_fifo_in_a_directory_that_is_synced_is_passed_over(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_text("x")
    _rename_when_complete.sync(str(tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        *(".metadata", "latest", "manifest.json", "meta.pt", "metadata.json", "model.safetensors"),
        *("model.safetensors.index.json", "optimizer.bin", "pytorch_model.bin"),
        *("random_states_0.pkl", "trainer_state.json", "x_model_states.pt"),
    ],
)
def test_a_fifo_in_place_of_a_checkpoints_file_is_an_error_or_no_checkpoint(tmp_path, name):
    (tmp_path / "step-1").mkdir()
    os.mkfifo(tmp_path / "step-1" / name)
    with pytest.raises((ringstow.Error, OSError)):
        ringstow.load(tmp_path / "step-1", allow_pickle=True)
    with pytest.raises((ringstow.Error, OSError)):
        ringstow.open(tmp_path / "step-1").close()
    with contextlib.suppress(ringstow.Error, OSError):
        ringstow.latest(tmp_path)


def test_files_that_are_links_to_blobs_are_loaded_as_before(tmp_path):
    torch.save({"w": torch.arange(3)}, tmp_path / "blob")
    (tmp_path / "snapshot").mkdir()
    os.symlink("../blob", tmp_path / "snapshot" / "pytorch_model.bin")
    assert ringstow.load(tmp_path / "snapshot")["w"].tolist() == [0, 1, 2]
