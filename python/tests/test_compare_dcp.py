"""tools/compare_dcp.py: small runs with many tensors, and what it writes for the figures."""

import json
import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import compare_dcp  # noqa: E402


def test_many_tensors_are_also_loaded_by_one_process(at):
    answer = at / "result.json"
    command = [sys.executable, str(TOOLS / "compare_dcp.py"), "--tensors", "20"]
    command += ["--ranks", "2", "--rounds", "1", "--dir", str(at), "--json", str(answer)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(answer.read_text())
    assert (result["tensors"], result["ranks"]) == (20, 2)
    assert result["command"].startswith("python tools/compare_dcp.py --tensors 20 ")
    rows = [measured["row"] for measured in result["measurements"]]
    assert sorted(rows) == sorted(compare_dcp.PLANNING_ROWS)
    assert "dcp / distributed, loads by one process" in done.stdout
    assert [path.name for path in at.iterdir()] == ["result.json"]
