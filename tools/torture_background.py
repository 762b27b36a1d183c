"""Change tensors at random while `save_async` saves them, and check the committed values.

    torture_background.py                        # 1,000 training loops
    torture_background.py --loops 20 --seed 7    # 20 other loops; --loops 1 repeats the first
    torture_background.py --memory short         # no host memory is left for what is staged
    torture_background.py --unseen               # only changes that no save can see
    torture_background.py --staging unguarded    # finds torn saves: checks the tool itself

Each loop trains a small model on the CPU, saves it with one of the ways of staging, and meanwhile
changes weights, buffers and the optimizer's state from several threads. A save must commit exactly
the values of the call, or fail and leave the earlier checkpoint unchanged. If the loop ran only
ordinary training steps, the save must not fail. Exits with 1 if a checkpoint was torn.
docs/background.md names the changes that no save can see.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import ringstow
import torch
from torturing.changes import SEEN, UNSEEN
from torturing.loops import MEMORIES, Result, Staging, run

HANG_S = 150


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(1)
    results: list[Result] = []
    changes = UNSEEN if options.unseen else SEEN
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="torture-") as folder:
        for seed in range(options.seed, options.seed + options.loops):
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            inside = Path(folder) / str(seed)
            inside.mkdir()
            results.append(run(seed, inside, changes, options.staging, options.memory))
            shutil.rmtree(inside)
            if results[-1].torn and not options.unseen:
                say(results[-1])
    faulthandler.cancel_dump_traceback_later()
    return summary(results, unseen=options.unseen)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    words = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument("--loops", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first loop")
    parser.add_argument("--dir", type=Path, help="directory for the checkpoints")
    parser.add_argument(
        "--unseen",
        action="store_true",
        help="only changes that no save can see; count torn checkpoints",
    )
    parser.add_argument(
        "--staging",
        choices=get_args(Staging),
        help='use only this way of staging; "unguarded" must tear checkpoints',
    )
    parser.add_argument(
        "--memory",
        choices=MEMORIES,
        help="whether saves may take host memory for all of the state (default: any)",
    )
    return parser.parse_args(arguments)


def say(result: Result) -> None:
    torn = ", ".join(result.torn[:4])
    print(
        f"TORN: seed {result.seed}, staging {result.staging}, memory {result.memory}, "
        f"{result.optimizer}, {'+'.join(result.outcomes)}: {torn}; "
        f"changes: {', '.join(result.changes)}",
        flush=True,
    )


def summary(results: list[Result], *, unseen: bool) -> int:
    ends = collections.Counter(
        (r.staging, f"memory {r.memory}", outcome) for r in results for outcome in r.outcomes
    )
    for (staging, memory, outcome), count in sorted(ends.items()):
        print(f"{staging:10} {memory:14} {outcome:10} {count}")
    torn = sum(bool(r.torn) for r in results)
    print(f"{torn} torn in {len(results)} loops, ringstow {ringstow.__version__}")
    if unseen:
        return 0
    print(
        "promise: a background save commits the values of the call, or fails: "
        f"{len(results)} loops, {torn} broken"
    )
    return int(torn > 0)


if __name__ == "__main__":
    sys.exit(main())
