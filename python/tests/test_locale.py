"""The program in a locale that is not UTF-8, as in a minimal container: names and output work."""

import os

import pytest
import torch
from support import python

import ringstow

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


# Runs commands one after the other, since importing torch takes seconds, and marks their ends.
PROGRAM = """
import sys
from ringstow._program import _cli
words = sys.argv[1:]
while words:
    end = words.index("then") if "then" in words else len(words)
    sys.argv[1:], words, code = words[:end], words[end + 1:], 0
    try:
        _cli.main()
    except SystemExit as ended:
        code = ended.code or 0
    for stream in (sys.stdout, sys.stderr):
        print(f"{code}\\0", end="", file=stream, flush=True)
"""


def program(*commands, cwd, **env):
    """Run commands of the program in a new interpreter; return each one's code and output."""
    words = [word for command in commands for word in (*command, "then")]
    env = {**os.environ, **ASCII, "PYTHONWARNINGS": "ignore", **env}
    ran = python(PROGRAM, *words, cwd=cwd, env=env, encoding="utf-8", check=True)
    said = [text.split("\0")[:-1] for text in (ran.stdout, ran.stderr)]
    return [(int(out[-1]), out[:-1], err[:-1]) for out, err in zip(*said, strict=True)]


@pytest.fixture
def run(tmp_path):
    state = {"wé": torch.ones(3), "é": {"日本": "värde"}}
    ringstow.save(state, tmp_path / "naïve" / "step-1", step=1, metrics={"lössé": 1.0})
    ringstow.save(state, tmp_path / "naïve" / "step-2", step=2)
    return tmp_path


def test_runs_and_checkpoints_with_any_name_are_shown_and_converted_and_errors_name_them(run):
    reported, to_hf, to_torch, missing = program(
        ["report", "naïve", "-o", "sidä.html"],
        ["convert", "naïve/step-1", "hf-ö", "--to", "hf"],
        ["convert", "naïve/step-1", "mödel.pt"],
        ["convert", "fehlt-ö", "x"],
        cwd=run,
    )
    assert reported == (0, "sidä.html\n", "")
    page = (run / "sidä.html").read_text(encoding="utf-8")
    for text in ("naïve", "wé", "é.日本", "lössé"):
        assert text in page
    code, out, err = to_hf
    assert code == 0, err
    assert "naïve/step-1 (ringstow) -> " in out
    assert "é.日本" in err  # what the model can't hold
    assert ringstow.load(run / "hf-ö").keys() == {"wé"}
    assert to_torch[0] == 0, to_torch
    assert torch.load(run / "mödel.pt")["é"] == {"日本": "värde"}
    assert missing[:2] == (2, "")
    assert "fehlt-ö: no such file or directory" in missing[2]


def test_output_in_another_encoding_shows_what_it_can(run):
    [ran] = program(["report", "naïve", "-o", "sidä.html"], cwd=run, PYTHONIOENCODING="ascii")
    assert ran == (0, "sid\\xe4.html\n", "")


def test_a_name_that_is_no_unicode_is_not_called_damage(tmp_path):
    torch.save({"w": torch.ones(1)}, tmp_path / "x.pt")
    path = os.path.join(os.fsencode(tmp_path), b"x\xff.pt")
    os.rename(tmp_path / "x.pt", path)
    with pytest.raises(ringstow.InvalidStateError, match="name is not valid Unicode.*rename it"):
        ringstow.load(os.fsdecode(path))
