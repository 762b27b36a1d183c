"""tools/compare_dcp.py: small runs with many tensors, and what it writes for the figures."""

import json
import sys

import compare_dcp
import forked
import pytest
from comparing.processes import CompareFailed


def forked_ranks(command):
    """Run ranks as torchrun would, without importing torch on each."""
    ranks, program, *options = command
    ended = forked.on_ranks(ranks, forked.SCRIPT, *options, name=program)
    assert [done.returncode for done in ended] == [0] * ranks, ended
    lines = "".join(done.stdout for done in ended).splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_many_tensors_are_also_loaded_by_one_process(at, monkeypatch, capsys):
    answer = at / "result.json"
    words = ["--tensors", "20", "--ranks", "2", "--rounds", "1"]
    words += ["--dir", str(at), "--json", str(answer)]
    monkeypatch.setattr(sys, "argv", [compare_dcp.__file__, *words])
    monkeypatch.setattr(compare_dcp, "launcher", lambda ranks: [ranks])
    monkeypatch.setattr(compare_dcp, "run_ranks", forked_ranks)
    assert compare_dcp.main() == 0
    result = json.loads(answer.read_text())
    assert (result["tensors"], result["ranks"]) == (20, 2)
    assert result["command"].startswith("python tools/compare_dcp.py --tensors 20 ")
    rows = [measured["row"] for measured in result["measurements"]]
    assert sorted(rows) == sorted(compare_dcp.PLANNING_ROWS)
    assert "dcp / distributed, loads by one process" in capsys.readouterr().out
    assert [path.name for path in at.iterdir()] == ["result.json"]


RANK = """
import json, os
told = {"round": 0, "row": "rank " + os.environ["RANK"], "what": "planning", "seconds": 1.0}
os.write(1, (json.dumps(told) + "\\n").encode())
"""


def test_ranks_run_under_torchrun_and_each_line_is_a_measurement(at, capsys):
    (at / "rank.py").write_text(RANK)
    command = [*compare_dcp.launcher(2), str(at / "rank.py")]
    found = compare_dcp.run_ranks(command)
    assert sorted(measured["row"] for measured in found) == ["rank 0", "rank 1"]
    assert "round 1  rank 0" in capsys.readouterr().out


def test_ranks_that_fail_are_an_error():
    with pytest.raises(CompareFailed, match="exit code 7"):
        compare_dcp.run_ranks([sys.executable, "-c", "exit(7)"])
