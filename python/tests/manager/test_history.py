"""The file in which a manager notes what saves took, and what the page shows of it."""

import json
import math
import os

import numpy as np
import pytest
from support import python

import ringstow
from ringstow._program._page import _html
from ringstow._program._page._gather import gather
from ringstow._reports import _done_callbacks, _history
from ringstow._reports._io_reports import Fallback

STATE = {"a": np.arange(1000.0)}


def noted(root):
    return _history.read(str(root))


def test_saves_and_loads_of_a_manager_are_noted(tmp_path):
    root = tmp_path / "run"
    with ringstow.CheckpointManager(root, keep=1) as manager:
        assert manager.restore() is None
        report = manager.save(1, STATE)
        manager.save_async(2, STATE).result()
        manager.restore()
    first, second, removed, loaded = noted(root)
    assert (removed.kind, removed.name) == ("removal", "step-00000001")
    assert removed.reason == "no rule keeps it"
    assert (first.kind, first.name, first.step) == ("save", "step-00000001", 1)
    assert (first.bytes, first.seconds) == (report.written_bytes, report.seconds.total)
    assert first.blocked_seconds == report.blocked_seconds > 0
    assert first.error is second.error is loaded.error is None
    assert (second.step, loaded.kind, loaded.name) == (2, "load", "step-00000002")
    shown = gather(root, steps=9, changes=0, verifies=False)
    assert [one.step for one in shown.saves] == [1, 2]  # step 1 is gone
    assert "seconds for which training waited" in _html.page(shown)


def test_metrics_are_noted_with_the_save(tmp_path):
    given = {"loss": np.float32(0.5), "inf": math.inf, "nan": math.nan}
    with ringstow.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, STATE, metrics=given)
        manager.save_async(2, STATE, metrics={"loss": 0.25}).result()
        manager.save(3, STATE, metrics={f"{number:03}" * 80: number for number in range(256)})
        manager.restore()
    first, second, third, loaded = noted(tmp_path / "run")
    assert {**first.metrics, "nan": 0} == {"loss": 0.5, "inf": math.inf, "nan": 0}
    assert math.isnan(first.metrics["nan"])
    assert (second.metrics, loaded.metrics) == ({"loss": 0.25}, {})
    assert 1 <= len(third.metrics) < 256
    for line in (tmp_path / "run" / _history.NAME).read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
        assert len(line) < 20_000


def test_failures_are_noted_and_shown_until_a_later_copy(tmp_path):
    root, shared = tmp_path / "run", tmp_path / "shared"
    with ringstow.CheckpointManager(root, tiers=[shared]) as manager:
        manager.save(1, STATE)
        with pytest.raises(ringstow.InvalidStateError):
            manager.save(2, {"a": object()})
        manager.save(2, STATE)
        manager.wait_promoted()
    shown = gather(root, steps=9, changes=0, verifies=False)
    assert [one.error is None for one in shown.saves] == [True, False, True]
    assert "InvalidStateError" in shown.saves[1].error
    assert shown.failed_copies == ()
    text = _html.page(shown)
    assert "Saves that failed" in text
    assert "Copies that failed" not in text
    failed = _history.Entry("promotion", "step-00000002", 1, to="s3://b/<x>", error="E: refused")
    with open(root / _history.NAME, "a") as file:
        file.write("\n" + json.dumps(failed._asdict()))
    text = _html.page(gather(root, steps=9, changes=0, verifies=False))
    assert "Copies that failed" in text
    assert "s3://b/&lt;x&gt;" in text


def test_slower_ways_of_the_last_save_are_shown_with_their_remedies(tmp_path):
    with ringstow.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, STATE)
    slower = {"wanted": "O_DIRECT", "got": "the page cache", "reason": "tmpfs"}
    fallback = Fallback(kind="io_mode", remedy="use a disk <here>", **slower)
    [entry] = noted(tmp_path / "run")
    line = _history._fields(entry._replace(fallbacks=(fallback,)))
    (tmp_path / "run" / _history.NAME).write_text(json.dumps(line))
    shown = gather(tmp_path / "run", steps=9, changes=0, verifies=False)
    assert shown.fallbacks == (fallback,)
    assert "use a disk &lt;here&gt;" in _html.page(shown)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b'{"kind": "save"',
        b"[]",
        b"null",
        b'{"kind": "save"}',
        b'{"kind": "save", "name": 1, "at_unix_ms": 1}',
        b'{"kind": "save", "name": "a", "at_unix_ms": 1, "bytes": 1' + b"0" * 400 + b"}",
        b'{"kind": "save", "name": "a", "at_unix_ms": 1, "bytes": -1' + b"0" * 400 + b"}",
        b'{"kind": "save", "name": "a", "at_unix_ms": 1, "seconds": 1' + b"0" * 400 + b"}",
        b'{"kind": "save", "name": "a", "at_unix_ms": 1, "blocked_seconds": 1' + b"0" * 400 + b"}",
        b'{"kind": "save", "name": "a", "at_unix_ms": 1, "seconds": "x"}',
        b'{"kind": "save", "name": "a", "at_unix_ms": 1, "fallbacks": [{"a": 1}]}',
        b'{"kind": "save", "name": "a", "at_unix_ms": 1, "fallbacks": 3}',
        b'{"kind": "save", "name": "a", "at_unix_ms": 1, "metrics": 3}',
        b'{"kind": "save", "name": "a", "at_unix_ms": 1, "metrics": {"loss": "x"}}',
        b'{"kind": "save", "name": "a", "at_unix_ms": 1, "metrics": {"loss": {"$float": 1}}}',
        b'{"kind": "save", "name": "a", "at_unix_ms": 1, "metrics": {"loss": {}}}',
        b'{"kind": "save", "name": "a", "at_unix_ms": 1, "metrics": {"x": 1' + b"0" * 400 + b"}}",
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_what_is_no_such_line_is_left_out(tmp_path, line):
    good = json.dumps(_history._fields(_history.Entry("save", "a", 1, seconds=1.0))).encode()
    unknown = json.dumps({"kind": "save", "name": "b", "at_unix_ms": 2, "later": []}).encode()
    (tmp_path / _history.NAME).write_bytes(b"\n".join([good, line, unknown]))
    assert [one.name for one in _history.read(str(tmp_path))] == ["a", "b"]


def test_values_that_are_no_numbers_make_a_page(tmp_path):
    with ringstow.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, STATE)
    for seconds in ("NaN", "Infinity", "-1", "0", "1e-320", "5e300"):
        with open(tmp_path / "run" / _history.NAME, "a") as file:
            file.write(f'{{"kind":"save","name":"a","at_unix_ms":{10**18},"seconds":{seconds}}}\n')
    page = _html.page(gather(tmp_path / "run", steps=99, changes=0, verifies=False))
    assert "<h2>Saves</h2>" in page


def test_file_stays_bounded(tmp_path):
    history = tmp_path / "run" / _history.NAME
    with ringstow.CheckpointManager(tmp_path / "run", keep=1) as manager:
        for step in range(7):
            manager.save(step, STATE)
            if step in (2, 4):
                with open(history, "ab") as file:
                    file.write(b"x" * 2_000_000 + b"\n")
    steps = [one.step for one in noted(tmp_path / "run") if one.kind == "save"]
    assert steps == list(range(steps[0], 7))
    assert 0 < steps[0] < 5
    sizes = [file.stat().st_size for file in history.parent.glob(f"{_history.NAME}*")]
    assert (len(sizes), sum(sizes) // 1_000_000) == (2, 2)


def test_lines_follow_each_other_without_an_empty_one(tmp_path):
    with ringstow.CheckpointManager(tmp_path / "run", keep=1) as manager:
        manager.save(1, STATE)
        manager.save(2, STATE)
    text = (tmp_path / "run" / _history.NAME).read_text()
    kinds = [json.loads(line)["kind"] for line in text.split("\n")[:-1]]
    assert (sorted(kinds), text[-1]) == (["removal", "save", "save"], "\n")


def test_file_that_cannot_be_written_fails_no_save(tmp_path):
    (tmp_path / "run" / _history.NAME).mkdir(parents=True)
    with ringstow.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, STATE)
    assert noted(tmp_path / "run") == []
    assert ringstow.verify(tmp_path / "run" / "step-00000001").ok


def test_line_that_was_cut_costs_no_other(tmp_path):
    with ringstow.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, STATE)
        with open(tmp_path / "run" / _history.NAME, "ab") as file:
            file.write(b'\n{"kind": "sa')
        manager.save(2, STATE)
    assert [one.step for one in noted(tmp_path / "run")] == [1, 2]


def test_error_without_a_text_reaches_the_caller(tmp_path):
    class Mute(ValueError):
        def __str__(self):
            raise TypeError("no text")

    with ringstow.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, STATE)
        path = str(tmp_path / "run" / "step-00000002")
        with pytest.raises(Mute), _done_callbacks.failing("save", path):
            raise Mute


def test_page_of_a_run_whose_saves_all_failed_says_why(tmp_path):
    (tmp_path / "run").mkdir()
    with (
        ringstow.CheckpointManager(tmp_path / "run") as manager,
        pytest.raises(ringstow.InvalidStateError),
    ):
        manager.save(1, {"a": object()})
    text = _html.page(gather(tmp_path / "run", steps=9, changes=9, verifies=True))
    assert "1 failed save: see below" in text
    assert "InvalidStateError" in text


def test_other_directories_and_programs_without_a_manager_leave_none(tmp_path):
    code = """
import sys, ringstow
ringstow.save({"a": 1}, sys.argv[1] + "/plain/step-1")
with ringstow.CheckpointManager(sys.argv[1] + "/run") as manager:
    manager.save(1, {"a": 1})
    ringstow.save({"a": 1}, sys.argv[1] + "/plain/step-2")
"""
    assert python(code, tmp_path).returncode == 0
    assert len(_history.read(str(tmp_path / "run"))) == 1
    assert sorted(os.listdir(tmp_path / "plain")) == ["step-1", "step-2"]


def test_fork_notes_for_managers_of_its_own_alone(tmp_path):
    code = """
import os, sys, ringstow
with ringstow.CheckpointManager(sys.argv[1] + "/parent") as manager:
    manager.save(1, {"a": 1})
pid = os.fork()
if pid == 0:
    with ringstow.CheckpointManager(sys.argv[1] + "/child") as manager:
        manager.save(1, {"a": 1})
    ringstow.save({"a": 1}, sys.argv[1] + "/parent/step-2")
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert python(code, tmp_path).returncode == 0
    assert len(_history.read(str(tmp_path / "child"))) == 1
    assert len(_history.read(str(tmp_path / "parent"))) == 1
