"""The tutorial's program, killed and resumed by its own commands, ends with the loss of one run."""

from __future__ import annotations

import re
from pathlib import Path

import forked
import pytest
from snippets import snippets

PAGE = Path(__file__).parents[3] / "docs" / "tutorial-fsdp2.md"
COMMAND = re.compile(r"^torchrun --nproc-per-node (\d+) train.py (\w+) ?(\d*)$", re.MULTILINE)

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not here")


def torchrun(ranks, program, root, *dies_at):
    """Run the program by torchrun, in new interpreters."""
    return forked.torchrun(ranks, program, root, *dies_at)


def on_ranks(ranks, program, root, *dies_at):
    """Run the program with torchrun's environment, in processes that have imported torch."""
    ended = forked.on_ranks(ranks, program.read_text(), root, *dies_at)
    failed = [done for done in ended if done.returncode]
    return failed[0] if failed else ended[0]


@pytest.mark.parametrize(
    ("runs", "start"), [(("whole", "run"), torchrun), (("whole", "other"), on_ranks)]
)
def test_a_run_that_is_killed_and_resumed_ends_as_one_that_was_not(tmp_path, runs, start):
    program = tmp_path / "train.py"
    program.write_text("".join(code for _, code in snippets(PAGE)))
    losses = {}
    for ranks, name, dies_at in COMMAND.findall(PAGE.read_text()):
        if name not in runs:
            continue
        done = start(int(ranks), program, tmp_path / name, *([dies_at] if dies_at else []))
        assert (done.returncode == 0) == (dies_at == ""), done.stdout + done.stderr
        losses[name] = re.findall(r"^step 29: .*$", done.stdout, re.MULTILINE)
    assert len(losses["whole"]) == 1
    assert losses == dict.fromkeys(runs, losses["whole"])
