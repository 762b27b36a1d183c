"""Checkpoints at non-Unicode paths (lone surrogates in Python), and invalid paths."""

import os
import pathlib

import numpy as np
import pytest
from support import missing

import ringstow


@pytest.fixture
def root(tmp_path):
    root = os.fsdecode(os.fsencode(tmp_path) + b"/sm\xff\xfe")
    try:
        os.mkdir(root)
    except OSError:
        missing("a file system that takes any bytes for a name")
    return root


def state(step):
    return {"step": step, "w": np.full(5_000, step, dtype=np.float32)}


def test_non_unicode_path_works_and_is_reported(root):
    paths = [f"{root}/step-{step}" for step in (1, 2)]
    for step, path in enumerate(paths, 1):
        assert ringstow.save(state(step), path).path == path
        assert ringstow.load(path)["step"] == step
    filled = state(0)
    assert ringstow.load_into(filled, paths[0]).path == paths[0]
    assert (filled["w"] == 1).all()
    assert ringstow.latest(root).path == paths[1]
    done = ringstow.retain(root, 1)
    assert (done.removed, done.kept) == ((paths[0],), (paths[1],))
    assert os.listdir(os.fsencode(root)).count(b"step-1") == 0
    ringstow.remove(paths[1])
    assert not os.path.exists(paths[1])


def test_damage_report_has_the_exact_path(root):
    path = f"{root}/step-1"
    ringstow.save(state(1), path)
    assert ringstow.verify(path).path == path
    shard = f"{path}/rank00000-0.safetensors"
    with open(shard, "r+b") as file:
        file.seek(5_000)
        file.write(b"damage")
    report = ringstow.verify(path)
    assert not report.ok
    assert report.damage[0].file == shard
    with pytest.raises(ringstow.CorruptCheckpointError) as raised:
        ringstow.load(path)
    assert raised.value.file == shard


def test_errors_have_the_exact_path(root):
    with pytest.raises(ringstow.IncompleteCheckpointError) as raised:
        ringstow.load(root)
    assert raised.value.path == root
    with pytest.raises(FileNotFoundError) as missing:
        ringstow.load(f"{root}/none")
    assert missing.value.filename == f"{root}/none"


def test_name_with_escape_like_text_is_unchanged(tmp_path):
    path = str(tmp_path / "a\\u0000ff\\" / 'größe \U0001f4be "x"')
    assert ringstow.save(state(1), path).path == path
    assert ringstow.load(path)["step"] == 1


WRITES = (
    ringstow.prune,
    lambda url: ringstow.save({"a": 1}, url),
    lambda url: ringstow.save_async({"a": 1}, url),
    lambda url: ringstow.Config(stripe=[url]),
    lambda url: ringstow.Config(trace=url),
)
READS = (
    *(ringstow.load, ringstow.latest, ringstow.verify),
    lambda url: ringstow.load_into({"a": 1}, url),
)


@pytest.mark.parametrize(
    ("url", "calls"),
    [
        *((url, WRITES) for url in ("s3://bucket/x", pathlib.Path("gs://bucket/x"))),
        *((url, WRITES + READS) for url in ("file:///tmp/x", "https://host/x", "hdfs:/a")),
    ],
    ids=lambda each: f"{len(each)} calls" if isinstance(each, tuple) else str(each),
)
def test_urls_are_refused_without_creating_anything(url, calls, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in calls:
        with pytest.raises(ringstow.InvalidStateError, match="is a URL"):
            call(url)
    assert list(tmp_path.iterdir()) == []


def test_tilde_is_expanded(tmp_path, monkeypatch):
    here, home = tmp_path / "here", tmp_path / "home"
    here.mkdir()
    home.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(home))
    assert ringstow.save(state(1), "~/run/step-1").path == str(home / "run" / "step-1")
    assert ringstow.load(pathlib.Path("~/run/step-1"))["step"] == 1
    assert ringstow.latest("~/run").path == str(home / "run" / "step-1")
    assert ringstow.Config(trace="~/t.json").trace == str(home / "t.json")
    with pytest.raises(ringstow.InvalidStateError, match=r"is unknown.*\./~no-such-user/x"):
        ringstow.save(state(1), "~no-such-user/x")
    assert list(here.iterdir()) == []
    assert ringstow.save(state(1), "./~").path == str(here / "~")


@pytest.mark.parametrize(
    ("path", "kind", "said"),
    [
        ("", ValueError, "the path is empty"),
        (1, TypeError, "must be str or os.PathLike[str], not int"),
        (None, TypeError, "must be str or os.PathLike[str], not NoneType"),
        (b"c", TypeError, "must be str or os.PathLike[str], not bytes"),
        ("a\0b", ValueError, r"'a\x00b' is not a path: it has a null character"),
    ],
)
def test_what_is_no_path_is_refused_by_what_it_is(path, kind, said):
    """Regression: it said that bytes are expected, and that creating the directory failed."""
    with pytest.raises(kind) as caught:
        ringstow.save({}, path)
    assert said in str(caught.value)
