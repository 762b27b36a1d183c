"""What a save costs a loop in Ray Train and NVRx: ringstow's beside their own, in turns.

    python tools/local_saves.py ray --gb 0.5 --rounds 5 DIR
    python tools/local_saves.py nvrx --gb 0.5 --rounds 5 DIR

Each turn trains quiet steps, saves once, and trains on until that save has ended. The table has the
time that the loop lost to the save, and ringstow's as a share of the others' of the same round.
ringstow's saves are durable, the others' are not synced.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

WIDTH = 2048
QUIET = 5


class Loop:
    """A training of a given size, and the time that its steps take."""

    def __init__(self, gb: float) -> None:
        torch.set_num_threads(1)
        layers = max(1, round(gb * 1e9 / (3 * 4 * WIDTH * WIDTH)))  # weights and two moments
        self.model = torch.nn.Sequential(
            *(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = torch.randn(32, WIDTH)
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        moments = self.optimizer.state_dict()
        copied = {number: dict(one) for number, one in moments["state"].items()}
        return {"model": self.model.state_dict(), "optimizer": {**moments, "state": copied}}

    def lost(self, save: Callable[[], Callable[[], bool]]) -> float:
        """Return the seconds that a save costs the loop until it has ended.

        Args:
            save: starts the save, and returns what tells whether it has ended.
        """
        quiet = []
        for _ in range(QUIET):
            begin = time.perf_counter()
            self.step()
            quiet.append(time.perf_counter() - begin)
        usual = statistics.median(quiet)
        begin = time.perf_counter()
        has_ended = save()
        lost = time.perf_counter() - begin
        while not has_ended():
            begin = time.perf_counter()
            self.step()
            lost += time.perf_counter() - begin - usual
        return lost


def fsync_tree(root: Path) -> None:
    """Make all files and names below a directory durable."""
    for folder, _, names in os.walk(root):
        for path in [*(os.path.join(folder, name) for name in names), folder]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def ray_worker(config: dict[str, Any]) -> None:
    """Measure within a worker of Ray Train."""
    import ray.train
    import ringstow.integrations.ray as ours

    loop, mode = Loop(config["gb"]), ray.train.CheckpointUploadMode

    def own(how: Any) -> Callable[[], bool]:
        folder = tempfile.mkdtemp(dir=config["dir"])
        torch.save(loop.state(), os.path.join(folder, "state.pt"))
        ray.train.report(
            {},
            ray.train.Checkpoint.from_directory(folder),
            checkpoint_upload_mode=how,
            delete_local_checkpoint_after_upload=True,
        )
        return counted()

    def ringstow_way() -> Callable[[], bool]:
        ours.report({}, loop.state())
        return counted()

    def counted() -> Callable[[], bool]:
        before = ray.train.get_checkpoint()
        path = None if before is None else before.path
        before_path = seen[-1] if seen else None
        if path != before_path:  # the save has ended within the call
            seen.append(path)
            return lambda: True

        def has_ended() -> bool:
            now = ray.train.get_checkpoint()
            if now is None or now.path == before_path:
                return False
            seen.append(now.path)
            return True

        return has_ended

    seen: list[str | None] = []
    ways = {
        "ringstow": ringstow_way,
        "ray, synchronous": lambda: own(mode.SYNC),
        "ray, asynchronous": lambda: own(mode.ASYNC),
    }
    turns(loop, ways, config["rounds"], Path(config["dir"]) / "figures")


def turns(
    loop: Loop, ways: dict[str, Callable[[], Callable[[], bool]]], rounds: int, out: Path
) -> None:
    """Take turns, and write a table."""
    lost: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            seconds = loop.lost(way)
            if number:  # the first round makes memory
                lost[name].append(seconds)
    lines = []
    for name, found in lost.items():
        lines.append(f"{name}: lost {spread(found)} s")
        for other in lost if name.startswith("ringstow") else ():
            if other.startswith("ringstow"):
                continue
            ratios = [a / b for a, b in zip(found, lost[other], strict=True)]
            lines.append(f"    {spread(ratios)} of {other}")
    out.write_text("\n".join(lines) + "\n")


def hold(wrapped: Any, state: dict[str, Any]) -> None:
    """Make NVRx's state dict, for tensors on the CPU."""
    wrapped.state_dict, wrapped._is_hollow = state, False


def spread(values: list[float]) -> str:
    """Return the median, the lowest and the highest."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def measure_ray(options: argparse.Namespace, folder: Path) -> None:
    """Measure in Ray Train."""
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.1"
    import ray
    import ray.train
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    TorchTrainer(
        ray_worker,
        train_loop_config={"gb": options.gb, "rounds": options.rounds, "dir": str(folder)},
        scaling_config=ray.train.ScalingConfig(num_workers=1),
        run_config=ray.train.RunConfig(
            name="run",
            storage_path=str(folder),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=1),
        ),
    ).fit()
    ray.shutdown()


def measure_nvrx(options: argparse.Namespace, folder: Path) -> None:
    """Measure NVRx's managers in one process."""
    import torch.distributed as dist
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
    from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import (
        BasicTensorAwareStateDict as Wrapped,
    )
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers import local_manager
    from ringstow.integrations.nvrx import LocalCheckpointManager

    if not torch.cuda.is_available():  # NVRx asks CUDA for its device, and waits for it
        anything: Any = torch.cuda
        anything.synchronize, anything.current_device = lambda *_: None, lambda: "cpu"
        kind: Any = Wrapped
        kind.__init__ = hold
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    managers = {
        "ringstow": LocalCheckpointManager(folder / "ours"),
        "nvrx": local_manager.LocalCheckpointManager(folder / "own"),
    }
    loop, iteration = Loop(options.gb), iter(range(1, 10**6))
    queue = AsyncCallsQueue(persistent=False)

    def synchronous(name: str) -> Callable[[], bool]:
        managers[name].save(Wrapped(loop.state()), next(iteration))
        return lambda: True

    def forked(name: str) -> Callable[[], bool]:
        manager, number = managers[name], next(iteration)
        queue.schedule_async_request(manager.save(Wrapped(loop.state()), number, is_async=True))
        return lambda: bool(queue.maybe_finalize_async_calls())

    ways: dict[str, Callable[[], Callable[[], bool]]] = {}
    for way in (synchronous, forked):
        for name in managers:
            ways[f"{name}, {way.__name__}"] = functools.partial(way, name)
    turns(loop, ways, options.rounds, folder / "figures")


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("framework", choices=["ray", "nvrx"])
    parser.add_argument("dir", type=Path, help="a directory on the disk to measure")
    parser.add_argument("--gb", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.dir))
    try:
        {"ray": measure_ray, "nvrx": measure_nvrx}[options.framework](options, folder)
        print((folder / "figures").read_text(), end="")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
