"""The examples for several ranks, on two gloo ranks; some run under torchrun itself."""

import re
from pathlib import Path

import forked
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS = 2

pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the examples are not here")


def on_ranks(script: str, *arguments: str) -> str:
    """Run an example on ranks with torchrun's environment variables; return their output."""
    ended = forked.on_ranks(RANKS, forked.SCRIPT, *arguments, name=EXAMPLES / script)
    for done in ended:
        assert done.returncode == 0, done.stdout + done.stderr
    return "".join(done.stdout for done in ended)


def found(pattern: str, output: str) -> list[tuple[str, ...]]:
    return sorted(m.groups() for m in re.finditer(pattern, output))


SAVING = r"\[rank (\d)\] saving step (\d+) digest (\w+)"
RESUMED = r"\[rank (\d)\] resumed step (\d+) digest (\w+)"


@pytest.mark.parametrize("script", ["async_save", "kept_writer", "overlap"])
def test_resumed_state_equals_that_of_the_call(script: str, tmp_path: Path) -> None:
    """The example computes the digest at async_save's call, and trains on during the save."""
    first = on_ranks(f"dcp/{script}.py", "--out", str(tmp_path), "--steps", "5")
    saved = [line for line in found(SAVING, first) if line[1] == "4"]
    again = on_ranks(f"dcp/{script}.py", "--out", str(tmp_path), "--steps", "4", "--resume")
    assert len(saved) == RANKS
    assert found(RESUMED, again) == saved


@pytest.mark.parametrize("script", ["async_save", "overlap"])
def test_the_same_script_runs_with_pytorchs_own_writer(script: str, tmp_path: Path) -> None:
    output = on_ranks(f"dcp/{script}.py", "--out", str(tmp_path), "--steps", "2", "--stock")
    assert len(found(SAVING, output)) == RANKS


@pytest.mark.parametrize("how", [(), ("--each",), ("--each", "--background")])
def test_plain_saves_under_torchrun_resume(how: tuple[str, ...], tmp_path: Path) -> None:
    on_ranks("train_torchrun.py", "--out", str(tmp_path / "run"), "--steps", "4", *how)
    resumed = on_ranks(
        "train_torchrun.py", "--out", str(tmp_path / "run"), "--steps", "6", "--resume", *how
    )
    assert [line[1] for line in found(r"\[rank (\d)\] resumed step (\d+)", resumed)] == ["4", "4"]
    if "--each" in how:  # every rank restores its generator, so its losses equal those of one run
        whole = on_ranks("train_torchrun.py", "--out", str(tmp_path / "whole"), "--steps", "6")
        losses = r"\[rank (\d)\] step ([56]) loss (\S+)"
        assert found(losses, resumed) == found(losses, whole)


def test_an_example_runs_under_torchrun(tmp_path: Path) -> None:
    """Only one of them: the tests above set the variables that torchrun sets."""
    example = EXAMPLES / "train_torchrun.py"
    done = forked.torchrun(RANKS, example, "--out", tmp_path, "--steps", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {rank for (rank,) in found(r"\[rank (\d)\]", done.stdout)} == {"0", "1"}
