"""tools/step_time.py in Lightning's Trainer: each plugin has its figures."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

TOOL = pathlib.Path(__file__).parents[2] / "tools" / "step_time.py"


@pytest.mark.timeout(400)
def test_each_plugin_is_measured(tmp_path):
    answer = tmp_path / "result.json"
    words = ["--trainer", "lightning", "--gb", "0.05", "--rounds", "1", "--steps", "2"]
    command = [sys.executable, TOOL, *words, "--dir", tmp_path, "--json", answer]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    turns = json.loads(answer.read_text())["rounds"][0]
    assert set(turns) == {"ringstow", "async-io", "torch.save"}
    assert turns["torch.save"]["steps"] == []
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
