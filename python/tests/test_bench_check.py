"""The comparison of instruction counts, with made-up counts."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "bench_check.py"
HERE = {"rustc": "1.95.0", "target": "x86_64-unknown-linux-gnu"}
BASELINE = HERE | {"instructions": {"block": 1000, "tensor": 200}}


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("bench_check", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_check"] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("block", "code", "told"),
    [
        (1000, 0, "2 cases"),
        (1049, 0, "2 cases"),
        (1051, 1, "WORSE: block: 1,000 instructions before, 1,051 now, +5.1 %"),
        (940, 0, "better: block"),
    ],
)
def test_more_than_five_percent_is_a_regression(
    tool: Any, capsys: pytest.CaptureFixture[str], block: float, code: int, told: str
) -> None:
    assert tool.check({"block": block, "tensor": 200}, BASELINE, HERE) == code
    assert told in capsys.readouterr().out


def test_other_compiler_raises_the_bound_to_a_quarter(
    tool: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    other = HERE | {"rustc": "1.99.0"}
    assert tool.check({"block": 1200, "tensor": 200}, BASELINE, other) == 0
    assert tool.check({"block": 1300, "tensor": 200}, BASELINE, other) == 1
    assert "rustc: 1.95.0 in the baseline, 1.99.0 here" in capsys.readouterr().out


def test_case_without_counterpart_fails(tool: Any) -> None:
    assert tool.check({"block": 1000}, BASELINE, HERE) == 1
    assert tool.check({"block": 1000, "tensor": 200, "new": 1}, BASELINE, HERE) == 1


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"instructions": 3}'])
def test_bad_baseline_is_refused_before_counting(
    tool: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str | None,
) -> None:
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


def test_cost_per_item_excludes_start_up(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "count", lambda binary, case, size: 1_000_000 + 70 * size)
    assert tool.cost(Path("bench"), tool.Case("block", 10, 110)) == 70


def test_missing_valgrind_error_names_the_package(
    tool: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool.shutil, "which", lambda program: None)
    assert tool.main([]) == 2
    assert "apt-get install valgrind" in capsys.readouterr().out


def test_every_case_of_the_baseline_is_counted(tool: Any) -> None:
    counted = tool.json.loads(tool.BASELINE.read_text())["instructions"]
    assert list(counted) == [case.name for case in tool.CASES]
