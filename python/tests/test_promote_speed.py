"""tools/promote_speed.py in small: both kinds of runs end with their figures."""

import json

import forked
from support import ROOT


def measure(*words):
    tool = ROOT / "tools" / "promote_speed.py"
    return forked.script(tool, "--rounds", "1", *words, check=True).stdout


def test_copies_are_measured_beside_cp(tmp_path):
    answer = tmp_path / "out.json"
    told = measure("--gb", "0.01", "--dir", tmp_path, "--json", answer)
    assert "| `cp -r` |" in told
    [measured] = json.loads(answer.read_text())["copies"]
    assert set(measured) == {"ringstow.promote", "cp -r"}
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_saves_are_measured_beside_a_copy(tmp_path):
    told = measure("--gb", "0.04", "--dir", tmp_path, "--behind", "1")
    assert "beside, of alone in the round" in told
    assert not list(tmp_path.iterdir())
