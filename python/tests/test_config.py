"""The sources of a configuration: the caller, the environment, ringstow.toml, the defaults."""

import contextlib
import dataclasses
import inspect
import json
import pathlib
import pydoc
import re

import numpy as np
import pytest
from support import python

import ringstow


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Run in a new directory, to which a test may add a ringstow.toml."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_arguments_override_environment_and_file(elsewhere, monkeypatch):
    (elsewhere / "ringstow.toml").write_text(
        'pool_bytes = "64M"\nqueue_depth = 4\nengine = "portable"\n'
    )
    monkeypatch.setenv("RINGSTOW_QUEUE_DEPTH", "16")
    monkeypatch.setenv("RINGSTOW_BLOCK_BYTES", "1M")
    config = ringstow.Config(block_bytes=2 << 20)
    assert (config.pool_bytes, config.queue_depth) == (64 << 20, 16)
    assert (config.block_bytes, config.engine, config.fillers) == (2 << 20, "portable", 0)
    report = ringstow.save({"a": 1}, elsewhere / "ckpt")
    assert (report.engine, report.pool_bytes) == ("portable", 64 << 20)


def test_help_shows_the_defaults():
    config = ringstow.Config()
    for field in dataclasses.fields(config):
        default = field.default.value
        assert repr(field.default) == repr(default)
        alone = ringstow.Config(**{field.name: default})
        assert getattr(alone, field.name) == getattr(config, field.name)
    shown = pydoc.plain(pydoc.render_doc(ringstow.Config))
    assert re.search(r"pool_bytes: .*int.* = 'auto'", shown)
    automatic = ringstow.Config(pool_bytes=0)
    assert (automatic, automatic.pool_bytes) == (ringstow.Config(), "auto")


def test_no_public_call_shows_a_mark_as_a_default():
    for name in dir(ringstow):
        call = getattr(ringstow, name)
        if callable(call) and not name.startswith("_"):
            with contextlib.suppress(ValueError):  # a built-in without a signature
                assert "object at 0x" not in str(inspect.signature(call)), name


def test_the_file_may_be_anywhere(elsewhere, monkeypatch):
    other = elsewhere / "other.toml"
    other.write_text("queue_depth = 3\n")
    (elsewhere / "ringstow.toml").write_text("queue_depth = 4\n")
    monkeypatch.setenv("RINGSTOW_CONFIG", str(other))
    assert ringstow.Config().queue_depth == 3
    monkeypatch.setenv("RINGSTOW_CONFIG", str(elsewhere / "none.toml"))
    with pytest.raises(FileNotFoundError, match="none.toml"):
        ringstow.Config()


def test_invalid_settings_are_named(elsewhere, monkeypatch):
    for name, value, said in [
        ("RINGSTOW_DIRECT", "sometimes", "RINGSTOW_DIRECT=sometimes"),
        ("RINGSTOW_RECYCLE", "perhaps", "RINGSTOW_RECYCLE=perhaps.*true, on"),
    ]:
        monkeypatch.setenv(name, value)
        with pytest.raises(ringstow.InvalidStateError, match=said):
            ringstow.Config()
        monkeypatch.delenv(name)
    (elsewhere / "ringstow.toml").write_text("que_depth = 4\n")
    with pytest.raises(ringstow.FormatError, match=r"ringstow.toml.*(?s:.*)que_depth"):
        ringstow.save({"a": 1}, elsewhere / "ckpt")
    assert not (elsewhere / "ckpt").exists()


def test_unknown_variable_is_warned_of_once(monkeypatch):
    monkeypatch.setenv("RINGSTOW_POOL_BYTE", "1G")
    ran = python("import ringstow; ringstow.Config(); ringstow.Config()", check=True)
    assert ran.stderr.count("\n") == 1
    assert "RINGSTOW_POOL_BYTE " in ran.stderr
    assert "RINGSTOW_POOL_BYTES?" in ran.stderr


def test_saves_and_loads_write_a_trace(elsewhere, monkeypatch):
    ringstow.save({"a": np.ones(3)}, "ckpt", config=ringstow.Config(trace="save.json"))
    monkeypatch.setenv("RINGSTOW_TRACE", "load.json")
    ringstow.load("ckpt")
    for name, kind in [("save.json", "write"), ("load.json", "prepare")]:
        events = json.loads((elsewhere / name).read_text())["traceEvents"]
        assert kind in {event["name"] for event in events}


@pytest.mark.parametrize(
    ("field", "value", "may_be"),
    [
        ("pool_bytes", 1.5, "an int, or a size as text ('256M')"),
        ("queue_depth", 8.0, "an int"),
        ("fillers", True, "an int"),
        ("direct", True, "'auto', 'on' or 'off'"),
        ("fixed", None, "'auto', 'on' or 'off'"),
        ("engine", None, "'auto', 'uring', 'portable' or 'tokio-uring'"),
        ("recycle", "yes", "True or False"),
        ("stripe", "/mnt/b", "a collection of paths ([path] for one)"),
        *(
            ("tiers", tiers, "a collection of paths ([path] for one)")
            for tiers in ("s3://bucket/run", None, [None], [3], 5)
        ),
    ],
)
def test_field_of_wrong_type_is_named(field, value, may_be):
    with pytest.raises(TypeError) as caught:
        ringstow.Config(**{field: value})
    assert str(caught.value) == f"Config.{field} must be {may_be}, not {value!r}"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"engine": "foo"}, "engine = 'foo': must be 'auto', 'uring', 'portable' or 'tokio-uring'"),
        ({"direct": "yes"}, "direct = 'yes': must be 'auto', 'on' or 'off'"),
        ({"pool_bytes": -1}, "pool_bytes = -1: must be 0 or more bytes"),
        ({"pool_bytes": "lots"}, "pool_bytes = 'lots': a size is a number and a unit"),
        ({"pool_bytes": "4M"}, "pool_bytes = 4194304: must be auto, or at least two blocks"),
        (
            {"pool_bytes": "1G", "block_bytes": 4096},
            "pool_bytes = 1073741824: must be at most 16384",
        ),
        ({"block_bytes": 1000}, "block_bytes = 1000: must be a multiple of 4096"),
        ({"queue_depth": 0}, "queue_depth = 0: must be from 1 to 1024"),
        ({"queue_depth": 2**40}, f"queue_depth = {2**40}: must be a number from 0"),
        ({"fillers": 1000}, "fillers = 1000: must be from 0 (automatic) to 256"),
        ({"files": 0}, "files = 0: must be from 1 to 64"),
        ({"files": 65}, "files = 65: must be from 1 to 64"),
        ({"stripe": [""]}, "stripe names an empty path"),
        ({"engine": "portable", "fixed": "on"}, "engine = portable and Config.fixed = on"),
        ({"stripe": ["/b", "/b"]}, "stripe names /b twice"),
        ({"tiers": ["/b", "/b"]}, "tiers names /b twice"),
        ({"tiers": [""]}, "tiers names an empty path"),
    ],
)
def test_invalid_field_raises_at_construction(fields, said):
    with pytest.raises(ringstow.InvalidStateError) as caught:
        ringstow.Config(**fields)
    assert f"Config.{said}" in str(caught.value)


def test_text_sizes_and_booleans_of_the_environment_are_stored_as_values(monkeypatch):
    assert ringstow.Config().recycle is False
    monkeypatch.setenv("RINGSTOW_RECYCLE", "true")
    assert ringstow.Config().recycle is True
    config = ringstow.Config(pool_bytes="64MiB", block_bytes="1M", shard_bytes="5GB")
    assert (config.pool_bytes, config.block_bytes) == (64 << 20, 1 << 20)
    assert config.shard_bytes == 5 * 10**9
    monkeypatch.setenv("RINGSTOW_POOL_BYTES", "1G")
    assert ringstow.Config().pool_bytes == 1 << 30


def test_config_file_found_by_chance_cannot_set_trace(elsewhere, monkeypatch):
    victim = elsewhere / "victim"
    victim.write_text("precious")
    ringstow.save({"a": np.ones(3)}, elsewhere / "ckpt")
    (elsewhere / "ringstow.toml").write_text(f'trace = "{victim}"\nqueue_depth = 3\n')
    load = "import ringstow, sys; ringstow.load('ckpt'); print(ringstow.Config().queue_depth)"
    ran = python(load)
    assert (ran.returncode, ran.stdout) == (0, "3\n"), ran.stderr
    assert victim.read_text() == "precious"
    assert ran.stderr.count("trace") == 2
    assert f"set RINGSTOW_CONFIG={elsewhere / 'ringstow.toml'}" in ran.stderr
    monkeypatch.setenv("RINGSTOW_CONFIG", str(elsewhere / "ringstow.toml"))
    ran = python(load)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert victim.read_text() != "precious"


def test_config_file_in_use_is_logged_once(elsewhere):
    (elsewhere / "ringstow.toml").write_text("queue_depth = 3\n")
    ran = python(
        "import logging; logging.basicConfig(level='INFO')\n"
        "import ringstow; ringstow.Config(); ringstow.Config()"
    )
    assert ran.stderr.count(str(elsewhere / "ringstow.toml")) == 1, ran.stderr


def test_config_of_wrong_type_is_refused():
    with pytest.raises(TypeError, match=r"a ringstow.Config, not a dict"):
        ringstow.save({"a": 1}, "ckpt", config={"files": 2})


def test_relative_trace_path_is_resolved_at_construction(elsewhere, monkeypatch):
    config = ringstow.Config(trace=pathlib.Path("trace.json"))
    (elsewhere / "sub").mkdir()
    monkeypatch.chdir(elsewhere / "sub")
    ringstow.save({"a": 1}, "ckpt", config=config)
    assert (elsewhere / "trace.json").is_file()


def test_a_trace_that_cannot_be_written_is_logged(caplog):
    ringstow.save({"a": 1}, "ckpt", config=ringstow.Config(trace="nowhere/trace.json"))
    told = [record for record in caplog.records if "nowhere/trace.json" in record.getMessage()]
    assert [(r.levelname, r.name.startswith("ringstow.")) for r in told] == [("WARNING", True)]
