"""The demo: train a real model, kill it with SIGKILL during a save, resume it, and compare its
losses and weights with those of an undisturbed run. `make demo` runs it.

The kill counts only if it leaves an uncommitted save in the directory. If losses or weights differ
in any bit, the demo exits with 1.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ringstow
import torch

ROOT = Path(__file__).resolve().parent.parent
TRAINER = ROOT / "examples" / "train_torch.py"
KILLS_MAX = 10  # attempts to hit a save before giving up
POLL_SECONDS = 0.0005  # interval of polling; correctness does not depend on it
# What fits a screen and a few minutes; `make compare` has all.
PEERS = ("ringstow", "ringstow-into", "torch.save", "dcp", "safetensors")
AIM_SECONDS_MAX = 0.01  # maximum of the random delay between seeing a save and killing it


class DemoFailed(Exception):
    """The demo did not do what it promises."""


def say(text: str = "") -> None:
    print(text, flush=True)


def trainer_command(out: Path, steps: int, *, resume: bool) -> list[str]:
    command = [sys.executable, str(TRAINER), "--out", str(out), "--steps", str(steps)]
    return command + (["--resume"] if resume else [])


def train_to_the_end(out: Path, steps: int, *, resume: bool) -> None:
    process = subprocess.Popen(
        trainer_command(out, steps, resume=resume), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        say("  | " + line.rstrip())
    if process.wait() != 0:
        raise DemoFailed(f"the training program ended with exit code {process.returncode}")


def step_number(step: Path) -> int:
    return int(step.name.removeprefix("step-"))


def is_committed(step: Path) -> bool:
    return (step / "manifest.json").exists()


def save_in_flight(out: Path, after_step: int) -> Path | None:
    """Return a step directory past `after_step` that holds data but no manifest yet."""
    for step in sorted(out.glob("step-*"), key=step_number, reverse=True):
        if step_number(step) <= after_step or is_committed(step):
            continue
        if any(step.glob("*.part")):
            return step
    return None


def kill_during_a_save(out: Path, steps: int, after_step: int, *, resume: bool) -> Path | None:
    """Train, and send SIGKILL shortly after a save past `after_step` begins.

    Return the step directory that the kill left uncommitted, or None if the save committed first.
    """
    process = subprocess.Popen(
        trainer_command(out, steps, resume=resume), stdout=subprocess.DEVNULL
    )
    try:
        while process.poll() is None:
            hit = save_in_flight(out, after_step)
            if hit is not None:
                time.sleep(random.uniform(0, AIM_SECONDS_MAX))
                process.kill()
                process.wait()
                return None if is_committed(hit) else hit
            time.sleep(POLL_SECONDS)
    finally:
        process.kill()
        process.wait()
    if process.returncode != 0:
        raise DemoFailed(f"the training program ended with exit code {process.returncode}")
    raise DemoFailed(
        "the training ended before the demo could catch a save in flight: this disk is too fast. "
        "Train for more saves: --steps 400"
    )


def newest_step(out: Path) -> int:
    newest = ringstow.latest(out)
    return 0 if newest is None else newest.step or 0


def kill_until_hit(out: Path, steps: int) -> Path:
    """Kill a training run during a save; after a miss, resume from the last commit and retry.

    Kill in the second half of the run, so that there is something to lose.
    """
    after_step = steps // 2
    for attempt in range(1, KILLS_MAX + 1):
        hit = kill_during_a_save(out, steps, after_step, resume=attempt > 1)
        if hit is not None:
            say(f"  killed (SIGKILL) while {hit.name} was being written")
            return hit
        after_step = newest_step(out)
        say(f"  the save of step {after_step} committed before the signal arrived: trying again")
    raise DemoFailed(f"{KILLS_MAX} kills all arrived after the commit; try a slower --dir")


def show_directory(out: Path) -> None:
    """Print the files of the last two step directories."""
    for step in sorted(out.glob("step-*"), key=step_number)[-2:]:
        say(f"  {step.name}/  {'committed' if is_committed(step) else 'NOT committed'}")
        for file in sorted(step.iterdir()):
            say(f"      {file.name:<34} {file.stat().st_size:>12,} bytes")


def losses(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "losses.jsonl").read_text().splitlines()]


def compare_losses(quiet: Path, killed: Path, steps: int) -> None:
    want, got = losses(quiet), losses(killed)
    if len(want) != steps or len(got) != steps:
        raise DemoFailed(f"expected {steps} losses, found {len(want)} and {len(got)}")
    for a, b in zip(want, got, strict=True):
        if a != b:
            raise DemoFailed(f"losses differ first at step {a['step']}: {a} and {b}")
    say(f"  all {steps} losses are equal to the last bit (the last one: {want[-1]['loss']!r})")


def tensors(state: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of a nested state by path."""
    if isinstance(state, torch.Tensor):
        return {name: state}
    if not isinstance(state, dict):
        return {}
    found: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        found |= tensors(value, f"{name}/{key}")
    return found


def compare_checkpoints(quiet: Path, killed: Path, steps: int) -> None:
    last = f"step-{steps:08}"
    want = tensors(ringstow.load(quiet / last))
    got = tensors(ringstow.load(killed / last))
    differ = [name for name in want.keys() | got.keys() if not same(want.get(name), got.get(name))]
    if differ or not want:
        raise DemoFailed(f"the last checkpoints differ in {sorted(differ) or 'everything'}")
    say(f"  all {len(want)} tensors of the last checkpoints are equal: weights, Adam, generators")


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b)


def tell(out: Path, steps: int) -> None:
    quiet, killed = out / "undisturbed", out / "killed"
    say(f"1. A transformer trains {steps} steps, saving asynchronously every 10, undisturbed.")
    train_to_the_end(quiet, steps, resume=False)

    say("\n2. The same training again, killed in the middle of a save.")
    hit = kill_until_hit(killed, steps)

    say("\n3. The kill left these files on disk:")
    show_directory(killed)
    committed = newest_step(killed)
    if committed == 0 or committed >= step_number(hit):
        raise DemoFailed(f"latest() says step {committed}, the kill hit step {step_number(hit)}")
    say(f"  ringstow.latest() returns step {committed}; it ignores {hit.name}.")

    say("\n4. The training resumes and finishes.")
    train_to_the_end(killed, steps, resume=True)

    say("\n5. The two runs side by side:")
    compare_losses(quiet, killed, steps)
    compare_checkpoints(quiet, killed, steps)


def compare_peers(gigabytes: float, out: Path) -> None:
    say(f"\n6. ringstow and its peers on the same {gigabytes:g} GB state, on this machine's disk.")
    command = [sys.executable, str(ROOT / "tools" / "compare.py")]
    command += ["--gb", str(gigabytes), "--dir", str(out), "--out", str(out / "compared")]
    command += ["--nothing-installed", "--peers", *PEERS]
    if subprocess.run(command).returncode != 0:
        raise DemoFailed("the comparison did not finish")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train, kill during a save, resume, compare.")
    parser.add_argument(
        "--dir",
        type=Path,
        default=ROOT / "demo-out",
        help="directory for the runs; the demo empties it first",
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument(
        "--gb", type=float, default=1.0, help="size of the state to compare, 1e9 bytes; 0 skips"
    )
    return parser.parse_args()


def main() -> int:
    args = arguments()
    for name in ("undisturbed", "killed"):
        shutil.rmtree(args.dir / name, ignore_errors=True)
    args.dir.mkdir(parents=True, exist_ok=True)
    try:
        tell(args.dir, args.steps)
        for name in ("undisturbed", "killed"):
            shutil.rmtree(args.dir / name)
        if args.gb > 0:
            compare_peers(args.gb, args.dir)
    except DemoFailed as failure:
        say(f"\ndemo FAILED: {failure}")
        return 1
    say("\nThe demo passed.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
