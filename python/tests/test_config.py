"""Where a configuration comes from: the caller, the environment, ringstow.toml, the defaults."""

import json
import pathlib

import pytest
from support import python

import ringstow


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Run in a directory of the test's own, which may hold a ringstow.toml."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_caller_goes_over_the_environment_and_that_over_the_file(elsewhere, monkeypatch):
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


def test_the_file_may_be_anywhere(elsewhere, monkeypatch):
    other = elsewhere / "other.toml"
    other.write_text("queue_depth = 3\n")
    (elsewhere / "ringstow.toml").write_text("queue_depth = 4\n")
    monkeypatch.setenv("RINGSTOW_CONFIG", str(other))
    assert ringstow.Config().queue_depth == 3
    monkeypatch.setenv("RINGSTOW_CONFIG", str(elsewhere / "none.toml"))
    with pytest.raises(FileNotFoundError, match="none.toml"):
        ringstow.Config()


def test_what_cannot_be_is_named(elsewhere, monkeypatch):
    monkeypatch.setenv("RINGSTOW_DIRECT", "sometimes")
    with pytest.raises(ringstow.InvalidStateError, match="RINGSTOW_DIRECT=sometimes"):
        ringstow.Config()
    monkeypatch.delenv("RINGSTOW_DIRECT")
    (elsewhere / "ringstow.toml").write_text("que_depth = 4\n")
    with pytest.raises(ringstow.FormatError, match=r"ringstow.toml.*(?s:.*)que_depth"):
        ringstow.save({"a": 1}, elsewhere / "ckpt")
    assert not (elsewhere / "ckpt").exists()


def test_what_is_true_or_false_is_said_by_a_variable_too(monkeypatch):
    assert ringstow.Config().recycle is False
    monkeypatch.setenv("RINGSTOW_RECYCLE", "true")
    assert ringstow.Config().recycle is True
    monkeypatch.setenv("RINGSTOW_RECYCLE", "perhaps")
    with pytest.raises(ringstow.InvalidStateError, match="RINGSTOW_RECYCLE=perhaps.*true, on"):
        ringstow.Config()


def test_a_variable_of_no_field_is_warned_of_once(monkeypatch):
    monkeypatch.setenv("RINGSTOW_POOL_BYTE", "1G")
    ran = python("import ringstow; ringstow.Config(); ringstow.Config()")
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("\n") == 1
    assert "RINGSTOW_POOL_BYTE " in ran.stderr
    assert "RINGSTOW_POOL_BYTES?" in ran.stderr


def test_a_trace_is_written_of_saves_and_loads(elsewhere, monkeypatch):
    ringstow.save({"a": 1}, "ckpt", config=ringstow.Config(trace="save.json"))
    monkeypatch.setenv("RINGSTOW_TRACE", "load.json")
    ringstow.load("ckpt")
    for name, kind in [("save.json", "write"), ("load.json", "prepare")]:
        events = json.loads((elsewhere / name).read_text())["traceEvents"]
        assert kind in {event["name"] for event in events}


@pytest.mark.parametrize(
    ("field", "value", "may_be"),
    [
        ("pool_bytes", -1, "0 or more"),
        ("queue_depth", 8.0, "an int"),
        ("fillers", True, "an int"),
        ("direct", True, "'auto', 'on' or 'off'"),
        ("fixed", None, "'auto', 'on' or 'off'"),
        ("engine", None, "the name of an engine"),
        ("recycle", "yes", "True or False"),
        ("stripe", "/mnt/b", "a collection of paths ([path] for one)"),
    ],
)
def test_a_field_of_another_kind_is_named(field, value, may_be):
    with pytest.raises(TypeError) as caught:
        ringstow.Config(**{field: value})
    assert str(caught.value) == f"Config.{field} must be {may_be}, not {value!r}"


def test_what_is_no_config_is_refused(elsewhere):
    with pytest.raises(TypeError, match=r"a ringstow.Config, not a dict"):
        ringstow.save({"a": 1}, "ckpt", config={"files": 2})


def test_a_trace_stays_where_it_was_asked_for(elsewhere, monkeypatch, tmp_path):
    config = ringstow.Config(trace=pathlib.Path("trace.json"))
    (elsewhere / "sub").mkdir()
    monkeypatch.chdir(elsewhere / "sub")
    ringstow.save({"a": 1}, "ckpt", config=config)
    assert (elsewhere / "trace.json").is_file()


def test_a_trace_that_cannot_be_written_is_logged(elsewhere, caplog):
    ringstow.save({"a": 1}, "ckpt", config=ringstow.Config(trace="nowhere/trace.json"))
    told = [record for record in caplog.records if "nowhere/trace.json" in record.getMessage()]
    assert [(r.levelname, r.name.startswith("ringstow.")) for r in told] == [("WARNING", True)]
