"""The loops of README and the guides restart: each runs twice on two ranks, in fresh processes.

What they end with equals one run without a stop. The snippet is taken from the page as it is.
"""

from __future__ import annotations

from pathlib import Path

import forked
import pytest
from snippets import snippets

ROOT = Path(__file__).parents[3]
PAGES = {
    "README.md": ["run", "sharded"],
    "docs/manager.md": ["training", "sharded"],
    "docs/distributed.md": ["/mnt/nvme/run"],
}
LOOPS = [(page, name) for page, names in PAGES.items() for name in names]

pytestmark = pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="no documentation here")

PROGRAM = """
import os, sys, hashlib
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import ringstow

torch.set_num_threads(1)
steps, root = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
torch.manual_seed(3)
RATE = 0.1 if "RngState" in CODE else 0.0
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(RATE), torch.nn.Linear(8, 8))
if "fully_shard(model)" not in CODE:
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
torch.manual_seed(dist.get_rank())
batches = [torch.full((4, 8), float(number)) for number in range(steps)]
batch = batches[0] + 1
exec(CODE)
local = [p.to_local() for p in model.parameters()]
local += [one["exp_avg"].to_local() for one in optimizer.state.values()]
local.append(torch.tensor([group["lr"] for group in optimizer.param_groups]))
told = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in local)).hexdigest()
everyone = [None, None]
dist.all_gather_object(everyone, told)
if dist.get_rank() == 0:
    print("END", optimizer.state[next(model.parameters())]["step"].item(), everyone)
dist.destroy_process_group()
"""


def loop_of(page, name):
    """Return the page's snippet that saves into a run of this name, and restores from it."""
    (found,) = [
        code
        for _, code in snippets(ROOT / page)
        if f'CheckpointManager("{name}"' in code and "restore(into=state)" in code
    ]
    return found


def run(code, steps, root):
    """Run a training on two ranks in fresh processes; return its last line."""
    # Each step is saved: a loop that saves every hundredth would have to be that long.
    for rate in ("step % 100 == 0", "step % 5 == 0"):
        code = code.replace(f"if {rate}:", "if True:")
    code = code.replace('"/mnt/', f'"{root}/mnt/')
    ended = forked.on_ranks(2, f"CODE = {code!r}\n{PROGRAM}", steps, root, cwd=root)
    for done in ended:
        assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in ended[0].stdout.splitlines() if line.startswith("END")]
    return line


@pytest.mark.parametrize(("page", "name"), LOOPS, ids=lambda value: value.strip("/"))
def test_a_loop_of_the_documentation_that_runs_twice_equals_one_that_ran_once(tmp_path, page, name):
    code = loop_of(page, name)
    (tmp_path / "whole").mkdir()
    (tmp_path / "again").mkdir()
    whole = run(code, 6, tmp_path / "whole")
    assert whole.startswith("END 6.0 ")
    first = run(code, 3, tmp_path / "again")
    assert first.startswith("END 3.0 ")
    assert run(code, 6, tmp_path / "again") == whole
