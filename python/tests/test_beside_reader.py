"""tools/beside_reader.py: a small run has each row's figures."""

import shutil
from pathlib import Path

import forked
import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "beside_reader.py"


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_small_run_has_every_row(tmp_path):
    rows = ["alone", "ringstow:nice=3,io_priority=idle"]
    small = ["--gb", "0.01", "--rounds", "1", "--seconds", "1", "--dir", tmp_path]
    done = forked.script(TOOL, *small, "--rows", *rows, check=True)
    alone, saving = (next(ln for ln in done.stdout.splitlines() if ln.startswith(r)) for r in rows)
    assert alone.endswith("-")
    assert float(saving.split()[1]) > 0
    assert float(saving.split()[-2]) > 0
    assert list(tmp_path.iterdir()) == []
