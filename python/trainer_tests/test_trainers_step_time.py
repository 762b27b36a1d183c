"""tools/step_time.py in the frameworks' Trainers: each way to save has its figures."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

TOOL = pathlib.Path(__file__).parents[2] / "tools" / "step_time.py"

# The ways of each Trainer; the last one has no background.
WAYS = {
    "lightning": ["ringstow", "async-io", "torch.save"],
    "transformers": ["ringstow", "dcp-callback", "trainer"],
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("trainer", WAYS)
def test_each_way_to_save_is_measured(trainer, tmp_path):
    answer = tmp_path / "result.json"
    words = ["--trainer", trainer, "--gb", "0.03", "--rounds", "1", "--steps", "2"]
    command = [sys.executable, TOOL, *words, "--dir", tmp_path, "--json", answer]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    turns = json.loads(answer.read_text())["rounds"][0]
    assert set(turns) == {*WAYS[trainer]}
    assert turns[WAYS[trainer][-1]]["steps"] == []
    for turn in turns.values():
        assert len(turn["quiet"]) == 2
        assert turn["save"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
