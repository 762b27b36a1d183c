"""The program in a locale that is not UTF-8, as in a minimal container: names and output work."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import ringstow

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def program(*args, cwd, **env):
    env = {**os.environ, **ASCII, "PYTHONWARNINGS": "ignore", **env}
    command = [sys.executable, "-m", "ringstow", *args]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, encoding="utf-8")


@pytest.fixture
def run(tmp_path):
    state = {"wé": torch.ones(3), "é": {"日本": "värde"}}
    ringstow.save(state, tmp_path / "naïve" / "step-1", step=1, metrics={"lössé": 1.0})
    ringstow.save(state, tmp_path / "naïve" / "step-2", step=2)
    return tmp_path


def test_a_report_of_a_run_with_any_name_is_written(run):
    ran = program("report", "naïve", "-o", "sidä.html", cwd=run)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "sidä.html\n", "")
    page = (run / "sidä.html").read_text(encoding="utf-8")
    for text in ("naïve", "wé", "é.日本", "lössé"):
        assert text in page


def test_checkpoints_with_any_name_are_converted_and_errors_name_them(run):
    ran = program("convert", "naïve/step-1", "hf-ö", "--to", "hf", cwd=run)
    assert ran.returncode == 0, ran.stderr
    assert "naïve/step-1 (ringstow) -> " in ran.stdout
    assert "é.日本" in ran.stderr  # what the model can't hold
    assert ringstow.load(run / "hf-ö").keys() == {"wé"}
    ran = program("convert", "naïve/step-1", "mödel.pt", cwd=run)
    assert ran.returncode == 0, ran.stderr
    assert torch.load(run / "mödel.pt")["é"] == {"日本": "värde"}
    ran = program("convert", "fehlt-ö", "x", cwd=run)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "fehlt-ö: no such file or directory" in ran.stderr


def test_output_in_another_encoding_shows_what_it_can(run):
    ran = program("report", "naïve", "-o", "sidä.html", cwd=run, PYTHONIOENCODING="ascii")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "sid\\xe4.html\n", "")


def test_a_name_that_is_no_unicode_is_not_called_damage(tmp_path):
    torch.save({"w": torch.ones(1)}, tmp_path / "x.pt")
    path = os.path.join(os.fsencode(tmp_path), b"x\xff.pt")
    os.rename(tmp_path / "x.pt", path)
    with pytest.raises(ringstow.InvalidStateError, match="name is not valid Unicode.*rename it"):
        ringstow.load(os.fsdecode(path))
