"""The examples for several ranks, on two gloo ranks; some run under torchrun itself."""

import os
import re
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS = 2

pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the examples are not here")


def on_ranks(script: str, *arguments: str) -> str:
    """Run an example on ranks with torchrun's environment variables; return their output."""
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    same = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(RANKS)}
    same |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    started = []
    for rank in map(str, range(RANKS)):
        env = {**os.environ, **same, "RANK": rank, "LOCAL_RANK": rank}
        started.append(forked.Program(forked.SCRIPT, *arguments, name=EXAMPLES / script, env=env))
    ended = [program.wait() for program in started]
    for done in ended:
        assert done.returncode == 0, done.stdout + done.stderr
    return "".join(done.stdout for done in ended)


def torchrun(script: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    command += [str(EXAMPLES / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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


@pytest.mark.parametrize("script", ["dcp/kept_writer.py", "train_torchrun.py"])
def test_examples_run_under_torchrun(script: str, tmp_path: Path) -> None:
    output = torchrun(script, "--out", str(tmp_path), "--steps", "2")
    assert {rank for (rank,) in found(r"\[rank (\d)\]", output)} == {"0", "1"}
