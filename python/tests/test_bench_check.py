"""The comparison of instruction counts, with made-up counts."""

from pathlib import Path

import bench_check as tool
import pytest

HERE = {"rustc": "1.95.0", "target": "x86_64-unknown-linux-gnu"}
BASELINE = HERE | {"instructions": {"block": 1000, "tensor": 200}}


@pytest.mark.parametrize(
    ("block", "code", "told"),
    [
        (1000, 0, "2 cases"),
        (1049, 0, "2 cases"),
        (1051, 1, "WORSE: block: 1,000 instructions before, 1,051 now, +5.1 %"),
        (940, 0, "better: block"),
    ],
)
def test_more_than_five_percent_is_a_regression(capsys, block, code, told):
    assert tool.check({"block": block, "tensor": 200}, BASELINE, HERE) == code
    assert told in capsys.readouterr().out


def test_other_compiler_raises_the_bound_to_a_quarter(capsys):
    other = HERE | {"rustc": "1.99.0"}
    assert tool.check({"block": 1200, "tensor": 200}, BASELINE, other) == 0
    assert tool.check({"block": 1300, "tensor": 200}, BASELINE, other) == 1
    assert "rustc: 1.95.0 in the baseline, 1.99.0 here" in capsys.readouterr().out


def test_case_without_counterpart_fails():
    assert tool.check({"block": 1000}, BASELINE, HERE) == 1
    assert tool.check({"block": 1000, "tensor": 200, "new": 1}, BASELINE, HERE) == 1


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"instructions": 3}'])
def test_bad_baseline_is_refused_before_counting(monkeypatch, tmp_path, capsys, text):
    baseline = tmp_path / "baseline.json"
    if text is not None:
        baseline.write_text(text)
    monkeypatch.setattr(tool, "BASELINE", baseline)
    monkeypatch.setattr(tool.shutil, "which", lambda _: "valgrind")
    monkeypatch.setattr(tool, "bench", lambda: pytest.fail("it was counted"))
    assert tool.main([]) == 1
    said = capsys.readouterr().out
    assert str(baseline) in said
    assert "make bench-baseline" in said


def test_cost_per_item_excludes_start_up(monkeypatch):
    monkeypatch.setattr(tool, "count", lambda binary, case, size: 1_000_000 + 70 * size)
    assert tool.cost(Path("bench"), tool.Case("block", 10, 110)) == 70


def test_missing_valgrind_error_names_the_package(monkeypatch, capsys):
    monkeypatch.setattr(tool.shutil, "which", lambda program: None)
    assert tool.main([]) == 2
    assert "apt-get install valgrind" in capsys.readouterr().out


def test_every_case_of_the_baseline_is_counted():
    counted = tool.json.loads(tool.BASELINE.read_text())["instructions"]
    assert list(counted) == [case.name for case in tool.CASES]
