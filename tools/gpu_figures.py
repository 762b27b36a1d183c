"""Measure one figure of the GPU report with torch, in its own process.

gpu_report.py runs this:
    python gpu_figures.py step --dir /mnt/nvme --gb 4 --rounds 5

Prints one JSON object: `values`, one per round, and a `note`; or `skipped` with the reason.
--rehearse tests the script on the CPU; the figures then mean nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ringstow
import torch
from comparing.directories import fresh_directory
from comparing.durable import drop_caches
from comparing.fio import BLOCK_BYTES, fio_pass
from comparing.measuring import in_turn
from comparing.usage import memory_bytes, reset_peak
from gpu_document import MIB
from stepping.contenders import DCP_STAGER, closing
from stepping.training import SleepingTrainer

LEAST_S = 0.01  # a loss below it is noise
Tensors = dict[str, torch.Tensor]
Values = tuple[list[float], str]  # and a note


class Skipped(Exception):
    """This machine cannot measure the figure; the message says why."""


class Gpu:
    """The GPU operations that the measurements need."""

    device = "cuda"

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info()[0]

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class Rehearsal(Gpu):
    """The CPU as a stand-in for the GPU."""

    device = "cpu"

    def synchronize(self) -> None:
        pass

    def free_bytes(self) -> int:
        return 0

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


@dataclass(frozen=True)
class Setting:
    """The device, the directory and the amount to measure."""

    gpu: Gpu
    dir: Path
    nbytes: int
    rounds: int

    def tensors(self, count: int = 32, nbytes: int | None = None) -> Tensors:
        """Return random tensors on the GPU."""
        each = (nbytes or self.nbytes) // count
        made = (torch.empty(each, dtype=torch.uint8, device=self.gpu.device) for _ in range(count))
        return {f"layer.{i}.weight": tensor.random_() for i, tensor in enumerate(made)}

    def path(self) -> Path:
        return self.dir / "checkpoint"

    def seconds(self, work: Callable[[], Any]) -> float:
        self.gpu.synchronize()
        start = time.perf_counter()
        work()
        self.gpu.synchronize()
        return time.perf_counter() - start

    def save_seconds(self, state: Tensors, config: ringstow.Config | None = None) -> float:
        """Return the seconds of a durable save; remove the checkpoint afterwards."""
        seconds = self.seconds(lambda: ringstow.save(state, self.path(), config=config))
        shutil.rmtree(self.path())
        return seconds

    def copy_gb_per_s(self, to: str) -> float:
        """Return the best speed of three large pinned copies `to` the host or the device."""
        nbytes = min(self.nbytes, 1 << 30)
        host = self.gpu.pinned(nbytes)
        there = torch.empty(nbytes, dtype=torch.uint8, device=self.gpu.device)
        target, source = (host, there) if to == "host" else (there, host)
        copies = [self.seconds(lambda: target.copy_(source, non_blocking=True)) for _ in range(3)]
        return nbytes / min(copies) / 1e9


def in_host_memory(state: Tensors) -> Tensors:
    return {name: tensor.cpu() for name, tensor in state.items()}


# --- the figures -------------------------------------------------------------------------------


def save_of_host(on: Setting) -> Values:
    there = on.tensors()
    here = in_host_memory(there)
    on.save_seconds(there), on.save_seconds(here)
    ratios, rates = [], []
    for number in range(on.rounds):
        order = [there, here] if number % 2 else [here, there]
        seconds = {id(state): on.save_seconds(state) for state in order}
        ratios.append(seconds[id(here)] / seconds[id(there)])
        rates.append(on.nbytes / seconds[id(here)] / 1e9)
    rate, copy = statistics.median(rates), on.copy_gb_per_s("host")
    note = f"from host memory {rate:.2f} GB/s; the GPU copies {copy:.1f} GB/s"
    if rate > copy / 2:
        raise Skipped(f"the disk is not the bottleneck here: {note}")
    return ratios, note


def async_returns(on: Setting) -> Values:
    state = on.tensors(1000, 1000 * min(256 << 10, on.nbytes // 1000))
    work = torch.ones(2048, 2048, device=on.gpu.device)

    def call() -> float:
        work @ work  # the stream of a training run is never empty
        start = time.perf_counter()
        handle = ringstow.save_async(state, on.path())
        seconds = time.perf_counter() - start
        handle.result()
        shutil.rmtree(on.path())
        return seconds * 1e3

    call()
    return [call() for _ in range(2 * on.rounds)], ""


def staged(on: Setting) -> Values:
    nbytes = min(on.nbytes, 2 << 30)
    state = on.tensors(nbytes=nbytes)
    pool = -(-nbytes // (4 * MIB)) * 4 * MIB + 64 * MIB
    config = ringstow.Config(pool_bytes=pool)
    on.save_seconds(state, config)
    ratios = []
    for _ in range(on.rounds):
        on.gpu.synchronize()
        start = time.perf_counter()
        handle = ringstow.save_async(state, on.path(), config=config)
        handle.wait_staged()
        seconds = time.perf_counter() - start
        handle.result()
        shutil.rmtree(on.path())
        ratios.append(seconds / (nbytes / on.copy_gb_per_s("host") / 1e9))
    return ratios, f"{nbytes / 1e9:.1f} GB"


def step(on: Setting) -> Values:
    state = on.tensors()
    side = 4096 if on.gpu.device == "cuda" else 64
    weight = torch.ones(side, side, device=on.gpu.device, dtype=torch.bfloat16)

    def train() -> float:
        def matmuls() -> None:
            x = weight
            for _ in range(16):
                x = x @ weight

        return on.seconds(matmuls)

    on.save_seconds(state)
    for _ in range(20):
        train()
    ratios, counts = [], []
    for _ in range(on.rounds):
        handle = ringstow.save_async(state, on.path())
        during: list[float] = []
        while not handle.done():
            during.append(train())
        handle.result()
        shutil.rmtree(on.path())
        alone = [train() for _ in range(max(20, len(during)))]
        if during:
            ratios.append(statistics.median(during) / statistics.median(alone))
            counts.append(len(during))
    return ratios, f"{statistics.median(counts or [0]):.0f} steps per save"


def lost(on: Setting) -> Values:
    # Of half of the bytes, to end in time. step_time.py --device cuda measures other sizes.
    ours, peers = "ringstow", DCP_STAGER
    told, ratios = [], []
    for step_ms in (20, 100, 500):
        trainer = SleepingTrainer(
            on.nbytes / 2, on.dir, 3, seconds=step_ms / 1000, device=on.gpu.device
        )
        turns: dict[str, list[float]] = {ours: [], peers: []}
        for number in range(-1, min(on.rounds, 2)):
            for name in in_turn([ours, peers], max(number, 0)):
                seconds = trainer.turn(name).lost
                if number >= 0:
                    turns[name].append(seconds)
        told.append(f"{step_ms} ms: " + " of ".join(f"{min(turns[n]):.2f}" for n in (ours, peers)))
        if step_ms == 100:
            pairs = zip(turns[ours], turns[peers], strict=True)
            ratios = [a / b for a, b in pairs if b > LEAST_S]
    if not ratios:
        raise Skipped("DefaultStager took no time from training")
    return ratios, f"{on.nbytes / 2e9:.1f} GB, seconds lost at steps of {'; '.join(told)}"


def load_of_disk(on: Setting) -> Values:
    ringstow.save(on.tensors(), on.path())
    shard = max(on.path().glob("*.safetensors"), key=lambda file: file.stat().st_size)
    into = in_host_memory(ringstow.load(on.path(), device=on.gpu.device))
    fio = shutil.which("fio") is not None

    def ceiling() -> float:
        if fio:
            read = fio_pass("read", shard, shard.stat().st_size // BLOCK_BYTES * BLOCK_BYTES)
            return read["bytes"] / read["seconds"] / 1e9
        return on.nbytes / on.seconds(lambda: ringstow.load_into(into, on.path())) / 1e9

    ratios, ceilings = [], []
    for _ in range(on.rounds):
        drop_caches(on.path())
        seconds = on.seconds(lambda: ringstow.load(on.path(), device=on.gpu.device))
        drop_caches(on.path())
        ceilings.append(ceiling())
        ratios.append(on.nbytes / seconds / 1e9 / ceilings[-1])
    other = "fio" if fio else "no fio here: load_into host memory"
    return ratios, f"{other} {statistics.median(ceilings):.2f} GB/s"


def load_of_copy(on: Setting) -> Values:
    memory = Path("/dev/shm")
    if not memory.is_dir() or shutil.disk_usage(memory).free < on.nbytes * 1.2:
        raise Skipped(f"/dev/shm has less than {on.nbytes / 1e9:.1f} GB free")
    with fresh_directory(memory) as directory:
        path = directory / "checkpoint"
        ringstow.save(on.tensors(), path)
        ringstow.load(path, device=on.gpu.device)
        ratios, copies = [], []
        for _ in range(on.rounds):
            seconds = on.seconds(lambda: ringstow.load(path, device=on.gpu.device))
            copies.append(on.copy_gb_per_s("device"))
            ratios.append(on.nbytes / seconds / 1e9 / copies[-1])
    return ratios, f"pinned copies to the GPU {statistics.median(copies):.1f} GB/s"


def device_memory(on: Setting) -> Values:
    state = on.tensors()
    on.gpu.synchronize()
    before = least = on.gpu.free_bytes()
    over = threading.Event()

    def watch() -> None:
        nonlocal least
        while not over.wait(0.002):
            least = min(least, on.gpu.free_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    values = []
    try:
        for _ in range(on.rounds):
            save_and_load_into(state, on)
            values.append((before - min(least, on.gpu.free_bytes())) / MIB)
    finally:
        over.set()
        watcher.join()
    return values, "maximum observed, compared with before the first save"


def host_memory(on: Setting) -> Values:
    state = on.tensors()
    on.gpu.synchronize()
    reset_peak()
    before = memory_bytes("VmRSS")
    values = []
    for _ in range(on.rounds):
        save_and_load_into(state, on)
        extra = memory_bytes("VmHWM") - before
        values.append((extra - ringstow.Config().staging_bytes) / MIB)
    return values, f"peak resident memory; the pool has {ringstow.Config().staging_bytes >> 20} MiB"


def save_and_load_into(state: Tensors, on: Setting) -> None:
    ringstow.save(state, on.path())
    ringstow.load_into(state, on.path())
    shutil.rmtree(on.path())


MEASURES: dict[str, Callable[[Setting], Values]] = {
    measure.__name__: measure
    for measure in (
        save_of_host, async_returns, staged, step, lost, load_of_disk, load_of_copy, device_memory,
        host_memory,
    )
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figure", choices=list(MEASURES))
    parser.add_argument("--dir", type=Path, default=Path())
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    gpu = Rehearsal() if args.rehearse else Gpu()
    with fresh_directory(args.dir) as directory:
        nbytes = int(args.gb * 1e9) // 4096_000 * 4096_000  # divisible by 32 and by 1,000 tensors
        setting = Setting(gpu, directory, nbytes, args.rounds)
        try:
            with closing:
                values, note = MEASURES[args.figure](setting)
            answer: dict[str, Any] = {"values": values, "note": note}
        except Skipped as why:
            answer = {"skipped": str(why)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
