"""tools/promote_speed.py in small: both kinds of runs end with their figures."""

import json

import forked
from support import ROOT

TOOL = ROOT / "tools" / "promote_speed.py"
# The tool over copies that last until their save has ended, whatever the machine's speed.
BESIDE = """
import sys, threading, types
import promote_speed, ringstow

promote = ringstow.promote
may_end = threading.Event()

class Copy(threading.Thread):
    def join(self):
        may_end.set()
        super().join()
        may_end.clear()

def promote_and_wait(*paths, rate):
    assert rate == 10**6
    promote(*paths)
    assert may_end.wait(300)

ringstow.promote = promote_and_wait
promote_speed.threading = types.SimpleNamespace(Thread=Copy)
sys.exit(promote_speed.main())
"""


def measure(*words, code=forked.SCRIPT):
    return forked.python(code, "--rounds", "1", *words, name=TOOL, check=True).stdout


def test_copies_are_measured_beside_cp(tmp_path):
    answer = tmp_path / "out.json"
    told = measure("--gb", "0.01", "--dir", tmp_path, "--json", answer)
    assert "| `cp -r` |" in told
    [measured] = json.loads(answer.read_text())["copies"]
    assert set(measured) == {"ringstow.promote", "cp -r"}
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_saves_are_measured_beside_a_copy(tmp_path):
    told = measure("--gb", "0.04", "--dir", tmp_path, "--behind", "1", code=BESIDE)
    assert "beside, of alone in the round" in told
    assert not list(tmp_path.iterdir())
